//! `cargo xtask test --gpu-libraries` and `cargo xtask gpu bundle`, which packs an archive for a
//! GPU machine without network or compiler.

use crate::images::layout::strip;
use crate::images::{SHIPPED, Version, programs_in};
use crate::programs::quietly;
use crate::wheels;
use crate::workspace::{cargo, root, step, target};
use anyhow::{Context, Result, ensure};
use clap::Subcommand;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The probe, which runs everything, and the worker that it trains with.
const PROGRAMS: [&str; 2] = ["gpu-probe", "switchyard-worker"];
/// Pages included in the archive.
const PAGES: [&str; 2] = ["docs/dev/gpu-probe.md", "LICENSE"];
/// File, next to the probe, with losses of trainings on a CPU.
const CPU_LOSSES: &str = "cpu-losses.json";
/// Folder, next to the probe, with the launches recorded by the kernel tests.
const VECTORS: &str = "vectors";
/// The variable that makes kernel tests record their launches, and where.
const RECORD: &str = "SWITCHYARD_RECORD_VECTORS";
/// Seconds of each of the two commands for the GPU machine. A session has fifteen minutes of device
/// time, with the start and the pause between the commands.
const BUDGET: u32 = 360;
/// Largest archive in MiB, because transfers to isolated machines are limited.
const MAX_MIB: f64 = 60.0;

#[derive(Debug, Subcommand)]
pub(crate) enum GpuCommand {
    /// Pack the probe, the worker and launches of every kernel into one archive. Prints its size
    /// and the two commands to run on the other machine.
    Bundle {
        /// Archive to write. Default: target/gpu-bundle.tar.gz.
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
        /// Profile of the programs: `dist` as in the images, `release` for a faster build.
        #[arg(long, default_value = SHIPPED)]
        profile: String,
        /// Do not record kernel launches: the probe's part `vectors` then has nothing to compare
        /// with. Saves two minutes and half of the size.
        #[arg(long)]
        without_vectors: bool,
    },
}

/// `cargo xtask test --gpu-libraries`: fetches NVIDIA's libraries, loads them without a GPU, and
/// compares our bindings with their headers.
///
/// # Errors
/// They cannot be fetched, or a test fails.
pub(crate) fn libraries() -> Result<()> {
    wheels::gpu_libraries()?;
    let tests: [(&str, &[&str]); 2] = [
        (
            "NVIDIA's libraries and headers, without a GPU",
            &["test", "--package", "switchyard-cuda", "--", "--include-ignored"],
        ),
        (
            "cuDNN and the convolutions of ResNets, without a GPU",
            &["test", "--package", "switchyard-worker", "--test", "gpu", "accepted", "--", "--ignored"],
        ),
    ];
    tests.iter().try_for_each(|(name, arguments)| step(name, &mut cargo(arguments)))
}

/// Runs a `gpu` subcommand.
///
/// # Errors
/// A program does not build, a kernel fails on the executor, or the archive cannot be written or is
/// too large.
pub(crate) fn gpu(what: &GpuCommand) -> Result<()> {
    let GpuCommand::Bundle { out, profile, without_vectors } = what;
    step(&format!("bundle programs ({profile})"), &mut programs_in(profile, &PROGRAMS))?;
    // Cargo builds the profile `dev` in `debug`.
    let built = target().join(if profile == "dev" { "debug" } else { profile });
    let archive = out.clone().unwrap_or_else(|| target().join("gpu-bundle.tar.gz"));
    let folder = target().join("gpu-bundle");
    lay_out(&built, &folder)?;
    let mut losses = Command::new(folder.join("gpu-probe"));
    losses.arg("--record-cpu-losses").arg(folder.join(CPU_LOSSES));
    step("losses of trainings on the CPU, recorded", &mut losses)?;
    if !without_vectors {
        record(&folder.join(VECTORS))?;
    }
    pack(&folder, &archive, Version::of_this_tree().time)?;
    let size = fs::metadata(&archive).with_context(|| archive.display().to_string())?.len() as f64 / 1_048_576.0;
    check_size(size)?;
    println!("{}: {size:.1} MiB. On the GPU machine, one after the other:", archive.display());
    commands(&archive).iter().for_each(|command| println!("    {command}"));
    Ok(())
}

/// The commands for the GPU machine. The second runs the parts that the first had to skip, so it
/// needs no decision in between.
fn commands(archive: &Path) -> [String; 2] {
    let probe = format!("gpu-bundle/gpu-probe --out results --budget {BUDGET}");
    [format!("tar -xzf {} && {probe}", archive.file_name().unwrap_or_default().display()), probe]
}

/// Copies the files of the archive to a folder.
fn lay_out(built: &Path, folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    for program in PROGRAMS {
        strip(&built.join(program), &folder.join(program))?;
    }
    for page in PAGES {
        let name = Path::new(page).file_name().context("invariant: a page is a file")?;
        fs::copy(root().join(page), folder.join(name)).with_context(|| page.to_owned())?;
    }
    Ok(())
}

/// Runs the kernel tests, which record their launches in a folder.
fn record(folder: &Path) -> Result<()> {
    wheels::cuda()?;
    // Use one thread, so that the cases have the same order each time. Programs for other devices
    // have no launches.
    let arguments = ["test", "--package", "switchyard-cuda-reference", "--test", "kernels", "--quiet", "--"];
    let mut command = cargo(&arguments);
    command.args(["--test-threads=1", "--skip", "resources::"]);
    command.env(RECORD, folder);
    step("launches of every kernel on the executor, recorded", &mut command)?;
    let text = fs::read_to_string(folder.join("cases.jsonl")).context("the launches that the kernel tests recorded")?;
    let cases = text.lines().count();
    ensure!(cases > 0, "the kernel tests recorded no launch; expected at least one");
    println!("{cases} launches of kernels are recorded");
    Ok(())
}

/// Packs the archive reproducibly: the same files and time give the same bytes.
fn pack(folder: &Path, archive: &Path, time: u64) -> Result<()> {
    let parent = folder.parent().context("invariant: the bundle is in the target folder")?;
    let mut tar = Command::new("tar");
    tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner"]).arg(format!("--mtime=@{time}"));
    tar.args(["--use-compress-program", "gzip -n", "-cf"]).arg(std::path::absolute(archive)?);
    tar.arg("-C").arg(parent).arg(folder.file_name().context("invariant: the bundle has a name")?);
    quietly("archive", &mut tar)
}

/// Fails if the archive is too large.
fn check_size(size: f64) -> Result<()> {
    ensure!(size <= MAX_MIB, "the bundle has {size:.1} MiB; expected at most {MAX_MIB}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{MAX_MIB, check_size, commands, pack};
    use std::path::Path;
    use std::process::Command;

    #[test]
    fn both_commands_share_results_and_budget() {
        let [first, second] = commands(Path::new("target/gpu-bundle.tar.gz"));
        assert_eq!(second, "gpu-bundle/gpu-probe --out results --budget 360");
        assert_eq!(first, format!("tar -xzf gpu-bundle.tar.gz && {second}"));
    }

    #[test]
    fn the_same_files_give_the_same_archive_and_a_large_one_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("bundle");
        std::fs::create_dir(&folder).unwrap();
        let archives = ["a", "b"].map(|name| parent.path().join(name));
        for (archive, text) in archives.iter().zip(["x", "x"]) {
            std::fs::write(folder.join("program"), text).unwrap();
            pack(&folder, archive, 7).unwrap();
        }
        let [a, b] = archives.map(|archive| std::fs::read(&archive).unwrap());
        assert!(a == b);
        let list = Command::new("tar").arg("-tzf").arg(parent.path().join("a")).output().unwrap();
        assert_eq!(String::from_utf8(list.stdout).unwrap(), "bundle/\nbundle/program\n");
        check_size(MAX_MIB).unwrap();
        assert!(check_size(MAX_MIB + 1.0).unwrap_err().to_string().contains("61.0 MiB; expected at most 60"));
    }
}
