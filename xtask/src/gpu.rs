//! `cargo xtask test --gpu-libraries`, and `cargo xtask gpu bundle`: what goes to a machine with a GPU that has neither a network nor a compiler.

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

/// The probe, which runs everything, and the worker beside it, which it trains with.
const PROGRAMS: [&str; 2] = ["gpu-probe", "switchyard-worker"];
/// Pages of this repository that are in it.
const PAGES: [&str; 2] = ["docs/dev/gpu-probe.md", "LICENSE"];
/// The folder of launches that the tests of the kernels have recorded, beside the probe.
const VECTORS: &str = "vectors";
/// Tells the tests of the kernels where to record their launches.
const RECORD: &str = "SWITCHYARD_RECORD_VECTORS";
/// The most MiB of an archive: what is carried to such machines is limited.
const MOST: f64 = 60.0;

#[derive(Debug, Subcommand)]
pub(crate) enum What {
    /// Pack the probe, the worker and launches of every kernel into one archive; print its size, and the command to run there.
    Bundle {
        /// The archive; target/gpu-bundle.tar.gz if not given.
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
        /// Profile of the programs: `dist` is what the images have; `release` is faster to build.
        #[arg(long, default_value = SHIPPED)]
        profile: String,
        /// Record no launches of kernels: the probe's part `vectors` then has nothing to compare with. Saves two minutes and half of the size.
        #[arg(long)]
        without_vectors: bool,
    },
}

/// `cargo xtask test --gpu-libraries`: fetches NVIDIA's libraries, opens them without a GPU, and compares our bindings with their headers.
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

/// Does it.
///
/// # Errors
/// A program does not build, a kernel is wrong on the executor, or the archive cannot be written or is too large.
pub(crate) fn gpu(what: &What) -> Result<()> {
    let What::Bundle { out, profile, without_vectors } = what;
    step(&format!("programs of the bundle ({profile})"), &mut programs_in(profile, &PROGRAMS))?;
    // Cargo builds the profile `dev` in `debug`.
    let built = target().join(if profile == "dev" { "debug" } else { profile });
    let archive = out.clone().unwrap_or_else(|| target().join("gpu-bundle.tar.gz"));
    let folder = target().join("gpu-bundle");
    lay_out(&built, &folder)?;
    if !without_vectors {
        record(&folder.join(VECTORS))?;
    }
    pack(&folder, &archive, Version::of_this_tree().time)?;
    let size = fs::metadata(&archive).with_context(|| archive.display().to_string())?.len() as f64 / 1_048_576.0;
    small(size)?;
    println!("{}: {size:.1} MiB. On the machine with the GPU:", archive.display());
    println!(
        "    tar -xzf {} && gpu-bundle/gpu-probe --out results",
        archive.file_name().unwrap_or_default().display()
    );
    Ok(())
}

/// The files of the archive in a folder.
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

/// Runs the tests of the kernels, which record their launches into a folder.
fn record(folder: &Path) -> Result<()> {
    wheels::cuda()?;
    // On one thread: the cases are then in the same order each time. Programs for other devices have no launches.
    let arguments = ["test", "--package", "switchyard-cuda-reference", "--test", "kernels", "--quiet", "--"];
    let mut command = cargo(&arguments);
    command.args(["--test-threads=1", "--skip", "resources::"]);
    command.env(RECORD, folder);
    step("launches of every kernel on the executor, recorded", &mut command)?;
    let text = fs::read_to_string(folder.join("cases.txt")).context("what the tests of the kernels recorded")?;
    let cases = text.lines().count();
    ensure!(cases > 0, "the tests of the kernels recorded no launch, expected at least one");
    println!("{cases} launches of kernels are recorded");
    Ok(())
}

/// The same files and time give the same archive.
fn pack(folder: &Path, archive: &Path, time: u64) -> Result<()> {
    let parent = folder.parent().context("invariant: the bundle lies in the target folder")?;
    let mut tar = Command::new("tar");
    tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner"]).arg(format!("--mtime=@{time}"));
    tar.args(["--use-compress-program", "gzip -n", "-cf"]).arg(std::path::absolute(archive)?);
    tar.arg("-C").arg(parent).arg(folder.file_name().context("invariant: it has a name")?);
    quietly("archive", &mut tar)
}

/// Fails for an archive of too many MiB.
fn small(size: f64) -> Result<()> {
    ensure!(size <= MOST, "the bundle has {size:.1} MiB; expected at most {MOST}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{MOST, pack, small};
    use std::process::Command;

    #[test]
    fn the_same_files_give_the_same_archive_and_a_large_one_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("bundle");
        std::fs::create_dir(&folder).unwrap();
        let archives = ["a", "b"].map(|name| place.path().join(name));
        for (archive, text) in archives.iter().zip(["x", "x"]) {
            std::fs::write(folder.join("program"), text).unwrap();
            pack(&folder, archive, 7).unwrap();
        }
        let [a, b] = archives.map(|archive| std::fs::read(&archive).unwrap());
        assert!(a == b);
        let list = Command::new("tar").arg("-tzf").arg(place.path().join("a")).output().unwrap();
        assert_eq!(String::from_utf8(list.stdout).unwrap(), "bundle/\nbundle/program\n");
        small(MOST).unwrap();
        assert!(small(MOST + 1.0).unwrap_err().to_string().contains("61.0 MiB; expected at most 60"));
    }
}
