//! `cargo xtask images`: builds the container images of the three programs.
//!
//! ```text
//! cargo build --profile dist -> layout: one folder per image -> Dockerfile (buildah) -> target/images/*.tar
//! ```
//!
//! The same programs, files and times give the same image: layers are ordered, owned by root, and
//! dated by `SOURCE_DATE_EPOCH` or the commit.

pub(crate) mod layout;
mod sbom;

use crate::workspace::{LOCAL, built_in, cargo, root, step, target};
use crate::{programs, setup};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// A container image.
#[derive(Debug)]
pub(crate) struct Image {
    /// Stage of the Dockerfile, and folder of its files.
    pub stage: &'static str,
    /// Name of the image and of its program.
    pub name: &'static str,
    /// Package of the program, where the bill of materials starts.
    pub package: &'static str,
    /// Libraries that the program loads at run time, and their dependencies, by name in the
    /// linker's cache.
    pub loads: &'static [&'static str],
    /// Size limits in MiB of the shipped image: compressed and unpacked.
    max_mib: (f64, f64),
}

/// Profile of the shipped programs.
pub(crate) const SHIPPED: &str = "dist";

/// Parts of the C library that the driver's libraries are linked with; empty files in newer
/// versions.
const DRIVER_LIBRARIES: &[&str] = &["libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1"];

/// The same plus the C++ library, which `libnvrtc-builtins` is linked with, and zlib for cuDNN's
/// heuristics.
const TOOLKIT_LIBRARIES: &[&str] =
    &["libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1", "libstdc++.so.6", "libz.so.1"];

/// All images. At run time the agent loads NVML, and the worker also the CUDA driver, cuBLASLt,
/// cuDNN, NVRTC and NCCL. No image contains them.
pub(crate) const IMAGES: [Image; 3] = [
    Image {
        stage: "operator",
        name: "switchyard-controller",
        package: "switchyard-controller",
        loads: &[],
        max_mib: (25.0, 25.0),
    },
    Image {
        stage: "agent",
        name: "switchyard-node-agent",
        package: "switchyard-node-agent-daemon",
        loads: DRIVER_LIBRARIES,
        max_mib: (25.0, 25.0),
    },
    Image {
        stage: "worker",
        name: "switchyard-worker",
        package: "switchyard-worker",
        loads: TOOLKIT_LIBRARIES,
        max_mib: (20.0, 20.0),
    },
];

/// Output folder of the images.
pub(crate) fn folder() -> PathBuf {
    target().join("images")
}

/// Builds the programs in a profile and writes one archive per image, or only lays out their files
/// in a folder.
///
/// # Errors
/// A program is missing or does not build, or buildah fails.
pub(crate) fn images(only_layout: Option<&Path>, profile: &str) -> Result<()> {
    let version = Version::of_this_tree();
    let programs = IMAGES.map(|image| image.name);
    step(&format!("image programs ({profile})"), &mut programs_in(profile, &programs))?;
    let built = built_in(profile);
    if let Some(folder) = only_layout {
        return lay_out(folder, &built, &version);
    }
    let folder = folder();
    let inputs = inputs(&built, profile, &version)?;
    let known = fs::read_to_string(folder.join(INPUTS)).is_ok_and(|known| known == inputs);
    if known && IMAGES.iter().all(|image| folder.join(format!("{}.tar", image.name)).is_file()) {
        println!("==> images: up to date, in {}", folder.display());
        return Ok(());
    }
    setup::buildah()?;
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let _ = fs::remove_file(folder.join(INPUTS));
    let files = folder.join("root");
    lay_out(&files, &built, &version)?;
    let start = Instant::now();
    for image in &IMAGES {
        if profile == SHIPPED {
            names_its_commit(image, &built, &version)?;
        }
        let result = make(image, &folder, &files, &version).and_then(|archive| match profile == SHIPPED {
            true => check_size(image, sizes(image, &archive)?),
            false => Ok(()),
        });
        // buildah's store holds every layer twice and is no longer needed.
        result.with_context(|| format!("image {}", image.name))?;
    }
    let _ = fs::remove_dir_all(folder.join("store"));
    fs::write(folder.join(INPUTS), inputs)?;
    println!("==> images: {:.1} s, in {}", start.elapsed().as_secs_f64(), folder.display());
    Ok(())
}

/// File in the images' folder with a digest of the inputs. Without it the images are rebuilt.
const INPUTS: &str = "inputs";

/// The source of what lays out images. This program's file would not do: a test run in CI rebuilds
/// it without line tables, and then the images again.
const LAYOUT: [&str; 3] = [include_str!("images.rs"), include_str!("images/layout.rs"), include_str!("images/sbom.rs")];

/// Everything that determines the images' content: the programs, their layout, the Dockerfile and
/// the version.
fn inputs(built: &Path, profile: &str, version: &Version) -> Result<String> {
    let mut layout = DefaultHasher::new();
    LAYOUT.hash(&mut layout);
    let mut text = format!("{profile} {} {:016x}\n", version.display(), layout.finish());
    for file in IMAGES.map(|image| built.join(image.name)).into_iter().chain([root().join("Dockerfile")]) {
        let data = fs::metadata(&file).with_context(|| file.display().to_string())?;
        text += &format!("{} {} {:?}\n", file.display(), data.len(), data.modified()?);
    }
    Ok(text)
}

fn lay_out(folder: &Path, built: &Path, version: &Version) -> Result<()> {
    for image in &IMAGES {
        let of = folder.join(image.stage);
        layout::write(image, &built.join(image.name), &of, version)
            .with_context(|| format!("files of image {}", image.name))?;
    }
    Ok(())
}

/// Fails if an image exceeds its size limits.
fn check_size(image: &Image, (pulled, unpacked): (f64, f64)) -> Result<()> {
    let max_mib = image.max_mib;
    ensure!(
        pulled <= max_mib.0 && unpacked <= max_mib.1,
        "{pulled:.1} MiB to pull and {unpacked:.1} unpacked; expected at most {} and {}",
        max_mib.0,
        max_mib.1
    );
    Ok(())
}

/// Fails if a program does not print the commit it was built from.
fn names_its_commit(image: &Image, built: &Path, version: &Version) -> Result<()> {
    let output = Command::new(built.join(image.name)).arg("--version").output().context("cannot start the program")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let expected = format!("{} {}", image.name, version.display());
    ensure!(text.trim() == expected, "{} --version: got {text:?}, expected {expected:?}", image.name);
    Ok(())
}

/// Size of an archive in MiB, compressed as in a registry and unpacked; prints both.
fn sizes(image: &Image, archive: &Path) -> Result<(f64, f64)> {
    let compressed = Command::new("gzip").args(["--stdout", "--no-name"]).arg(archive).output();
    let compressed = compressed.context("cannot start gzip")?;
    ensure!(compressed.status.success(), "gzip: {}", compressed.status);
    let mib = |bytes: usize| bytes as f64 / 1_048_576.0;
    let (pulled, unpacked) = (mib(compressed.stdout.len()), mib(fs::metadata(archive)?.len() as usize));
    println!("    {}: {pulled:.1} MiB to pull, {unpacked:.1} MiB unpacked", image.name);
    Ok((pulled, unpacked))
}

/// Builds one image, writes its archive, and prints its digest.
fn make(image: &Image, folder: &Path, files: &Path, version: &Version) -> Result<PathBuf> {
    // The full form of a name without a registry, such as the chart's defaults.
    let tag = format!("docker.io/library/{}:{}", image.name, version.number);
    let store = |command: &mut Command| {
        // Use a separate store, so that this machine's images are neither touched nor needed.
        command.args(["--storage-driver", "vfs", "--root"]).arg(folder.join("store/root"));
        command.arg("--runroot").arg(folder.join("store/run")).env("BUILDAH_ISOLATION", "chroot");
    };
    let mut build = Command::new("buildah");
    store(&mut build);
    build.args(["build", "--isolation", "chroot", "--pull=false", "--no-cache", "--quiet", "--target", image.stage]);
    build.arg(format!("--timestamp={}", version.time)).args(["--build-arg", "PROGRAMS=prebuilt"]);
    build.arg("--build-arg").arg(format!("VERSION={}", version.number));
    build.arg("--build-arg").arg(format!("REVISION={}", version.commit.as_deref().unwrap_or_default()));
    build.args(["--tag", &tag, "--file"]).arg(root().join("Dockerfile")).arg(files);
    let output = build.output().context("cannot start buildah")?;
    ensure!(output.status.success(), "buildah: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    // The last line is the digest of the image's configuration, which contains the digests of its
    // layers.
    let id = String::from_utf8(output.stdout)?.trim().to_string();

    let archive = folder.join(format!("{}.tar", image.name));
    // Replace the archive atomically, because a cluster can be loading it.
    let new = archive.with_extension("new");
    let _ = fs::remove_file(&new);
    let mut push = Command::new("buildah");
    store(&mut push);
    push.args(["push", "--quiet", &tag]);
    push.arg(format!("docker-archive:{}:{tag}", new.display()));
    programs::quietly(&format!("{}.tar", image.name), &mut push)?;
    fs::rename(&new, &archive)?;
    fs::write(folder.join(format!("{}.digest", image.name)), format!("sha256:{id}\n"))?;
    println!("{}:{}  sha256:{id}", image.name, version.number);
    Ok(archive)
}

/// The version being built.
#[derive(Debug)]
pub(crate) struct Version {
    /// Version of the workspace.
    pub number: &'static str,
    /// Short commit hash, if git knows it.
    pub commit: Option<String>,
    /// Modification time of every file in an image, seconds since 1970.
    pub time: u64,
}

impl Version {
    /// The version of the checked-out commit, or of the one in `SWITCHYARD_COMMIT`. Without either,
    /// no commit and the epoch.
    pub fn of_this_tree() -> Version {
        let git = |arguments: &[&str]| {
            let output = Command::new("git").args(arguments).current_dir(root()).output().ok()?;
            let text = String::from_utf8(output.stdout).ok()?.trim().to_string();
            (output.status.success() && !text.is_empty()).then_some(text)
        };
        let variable = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
        let time = variable("SOURCE_DATE_EPOCH").or_else(|| git(&["show", "--no-patch", "--format=%ct", "HEAD"]));
        Version {
            number: env!("CARGO_PKG_VERSION"),
            commit: variable("SWITCHYARD_COMMIT").or_else(|| git(&["rev-parse", "--short=12", "HEAD"])),
            time: time.and_then(|text| text.parse().ok()).unwrap_or(0),
        }
    }

    /// As printed by `--version`.
    pub fn display(&self) -> String {
        match &self.commit {
            Some(commit) => format!("{} ({commit})", self.number),
            None => self.number.to_string(),
        }
    }
}

/// Builds programs in a profile; all but local builds embed the commit in their version.
///
/// Selects the whole workspace but builds only these programs: cargo unifies features over the
/// selected packages, so each crate is compiled once per profile.
pub(crate) fn programs_in(profile: &str, programs: &[&str]) -> Command {
    let mut all = cargo(&["build", "--profile", profile, "--locked", "--workspace"]);
    all.args(programs.iter().flat_map(|program| ["--bin", program]));
    // Local programs omit the commit: otherwise each commit would relink them, and tests would
    // replace programs in use.
    if profile != LOCAL {
        all.env("SWITCHYARD_VERSION", Version::of_this_tree().display());
    }
    all
}

#[cfg(test)]
mod tests {
    use super::{IMAGES, check_size};

    #[test]
    fn a_large_image_is_refused() {
        let [operator, ..] = &IMAGES;
        assert!(check_size(operator, operator.max_mib).is_ok());
        let refused = check_size(operator, (1.0, operator.max_mib.1 + 1.0)).unwrap_err().to_string();
        assert!(refused.contains("26.0 unpacked; expected at most 25 and 25"), "{refused}");
    }
}
