//! Contents of the images that `cargo xtask images` has written, and checks that they contain
//! everything that their programs need.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use switchyard_tests::{cargo, root, target, xtask};

/// Images with their Dockerfile stages.
///
/// Built from the same programs as all other tests use. The shipped programs of the `dist` profile
/// are smaller: `cargo xtask images` refuses an image over the limits in `xtask/src/images.rs`, and
/// a program that does not print its commit.
const IMAGES: [(&str, &str); 3] =
    [("switchyard-controller", "operator"), ("switchyard-node-agent", "agent"), ("switchyard-worker", "worker")];
/// Maximum MiB of an image besides its program: the C library, and the C++ library for the worker.
const BESIDES: f64 = 8.0;
/// The user of all images.
const USER: &str = "65532:65532";

/// Output of one run of `cargo xtask images`: digest and archive bytes by image.
type Images = BTreeMap<&'static str, (String, Vec<u8>)>;

fn folder() -> PathBuf {
    target().join("images")
}

/// Builds the images with this umask. cargo only rebuilds programs whose sources have changed.
fn build(umask: &str) -> Result<Images> {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("umask {umask}; exec \"$0\" \"$@\"")]).arg(xtask());
    command.args(["images", "--profile", "dev"]).current_dir(root()).env("CARGO_TARGET_DIR", target());
    // As in `switchyard_tests::cargo`: the variables set by the test's own cargo and runner would
    // rebuild half the tree.
    let images = cargo(&[]);
    for (name, _) in images.get_envs().filter(|(_, value)| value.is_none()) {
        command.env_remove(name);
    }
    let output = command.output()?;
    ensure!(output.status.success(), "cargo xtask images: {}", String::from_utf8_lossy(&output.stderr));
    println!("{}", String::from_utf8_lossy(&output.stdout));
    let read = |name: &'static str| {
        let digest = fs::read_to_string(folder().join(format!("{name}.digest")))?;
        Ok((name, (digest, fs::read(folder().join(format!("{name}.tar")))?)))
    };
    IMAGES.iter().map(|(name, _)| read(name)).collect()
}

/// The images, built twice and shared by all tests of this file, which would otherwise overwrite
/// each other's images.
fn images() -> &'static [Images; 2] {
    static IMAGES: OnceLock<[Images; 2]> = OnceLock::new();
    let made = |umask: &str| build(umask).unwrap_or_else(|error| panic!("{error:#}"));
    IMAGES.get_or_init(|| {
        // The first build may reuse existing images. The second always rebuilds.
        let first = made("0022");
        fs::remove_file(folder().join("inputs")).unwrap();
        [first, made("0077")]
    })
}

/// Unpacks an archive: the image configuration, and a folder with the files of its layers.
fn unpack(name: &str) -> Result<(Value, tempfile::TempDir)> {
    images();
    let unpacked = tempfile::tempdir()?;
    let untar = |archive: &Path, to: &Path| -> Result<()> {
        fs::create_dir_all(to)?;
        let status = Command::new("tar").arg("-xpf").arg(archive).arg("-C").arg(to).status()?;
        ensure!(status.success(), "tar {}", archive.display());
        Ok(())
    };
    let parts = unpacked.path().join("parts");
    untar(&folder().join(format!("{name}.tar")), &parts)?;
    let manifest: Value = serde_json::from_str(&fs::read_to_string(parts.join("manifest.json"))?)?;
    for layer in manifest[0]["Layers"].as_array().context("Layers")? {
        untar(&parts.join(layer.as_str().context("a layer")?), &unpacked.path().join("files"))?;
    }
    let config = fs::read_to_string(parts.join(manifest[0]["Config"].as_str().context("Config")?))?;
    assert_eq!(
        manifest[0]["RepoTags"],
        serde_json::json!([format!("docker.io/library/{name}:{}", env!("CARGO_PKG_VERSION"))])
    );
    Ok((serde_json::from_str(&config)?, unpacked))
}

/// Collects every file below a folder.
fn files(folder: &Path, all: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let kind = fs::symlink_metadata(&path).unwrap();
        if kind.is_dir() {
            files(&path, all)
        } else if kind.is_file() {
            all.push(path)
        }
    }
}

/// Runs a command in an image like a container runtime: as the image's user, with /sys and /proc,
/// on a read-only root.
fn inside(files: &Path, command: &[&str]) -> Output {
    for folder in ["sys", "proc"] {
        fs::create_dir_all(files.join(folder)).unwrap();
    }
    let script = "set -e; root=$1; user=$2; shift 2; mount --bind \"$root\" \"$root\"; mount --bind /sys \"$root/sys\"; \
                  mount --bind /proc \"$root/proc\"; mount -o remount,ro,bind \"$root\"; exec chroot --userspec=\"$user\" \"$root\" \"$@\"";
    let mut unshare = Command::new("unshare");
    unshare.args(["--mount", "sh", "-c", script, "sh"]).arg(files).arg(USER).args(command).output().unwrap()
}

#[test]
fn images_contain_their_program_and_little_else() -> Result<()> {
    for (name, _) in IMAGES {
        let (config, unpacked) = unpack(name)?;
        let root = unpacked.path().join("files");
        let mut all = Vec::new();
        files(&root, &mut all);
        let program = root.join("usr/bin").join(name);
        let others = all.iter().filter(|file| **file != program);
        let bytes: u64 = others.map(|file| fs::metadata(file).unwrap().len()).sum();
        let mib = bytes as f64 / 1_048_576.0;
        println!("{name}: {mib:.1} MiB in {} other files", all.len() - 1);
        assert!(mib <= BESIDES, "{name}: {mib:.1} MiB in other files; expected at most {BESIDES}");

        let programs: Vec<&PathBuf> = all.iter().filter(|file| file.starts_with(root.join("usr/bin"))).collect();
        assert_eq!(programs, [&program], "{name}: expected only its program");
        let is_other_file = |file: &&PathBuf| {
            let name = file.file_name().unwrap().to_string_lossy().into_owned();
            !name.contains(".so")
                && !file.starts_with(root.join("usr/share/doc"))
                && !file.starts_with(root.join("etc"))
        };
        assert_eq!(all.iter().filter(is_other_file).count(), 1, "{name}: {all:?}");
        assert!(
            all.iter().all(|file| fs::metadata(file).unwrap().permissions().mode() & 0o6022 == 0),
            "{name}: setuid or world-writable files"
        );

        let labels = &config["config"]["Labels"];
        assert_eq!(labels["org.opencontainers.image.title"], *name, "{labels}");
        assert_eq!(labels["org.opencontainers.image.version"], env!("CARGO_PKG_VERSION"));
        assert_eq!(labels["org.opencontainers.image.licenses"], "Apache-2.0");
        assert_eq!(config["config"]["User"], USER);
        assert_eq!(config["config"]["Entrypoint"], serde_json::json!([format!("/usr/bin/{name}")]));
    }
    Ok(())
}

/// As the image's user, on a read-only root, without any host file.
#[test]
fn programs_run_with_what_is_in_their_image() -> Result<()> {
    for (name, _) in IMAGES {
        let (_, unpacked) = unpack(name)?;
        let files = unpacked.path().join("files");
        let ended = inside(&files, &[&format!("/usr/bin/{name}"), "--version"]);
        let text = String::from_utf8_lossy(&ended.stdout).trim().to_string();
        let expected = format!("{name} {}", env!("CARGO_PKG_VERSION"));
        assert_eq!(text, expected, "{}", String::from_utf8_lossy(&ended.stderr));
        let shell = inside(&files, &["/bin/sh", "-c", "true"]);
        assert!(!shell.status.success(), "{name} has a shell");
    }
    Ok(())
}

/// The agent loads the driver's library at run time, which needs parts of the C library that the
/// program itself does not.
#[test]
fn the_agent_loads_a_driver_in_its_image() -> Result<()> {
    let (_, unpacked) = unpack("switchyard-node-agent")?;
    let files = unpacked.path().join("files");
    let library = files.join("usr/lib/libnvidia-ml.so.1");
    let source = root().join("node-agent/tests/nvml_reports/library.rs");
    let mut compiler = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    compiler.args(["--edition", "2024", "-C", "panic=abort", "-o"]).arg(&library).arg(source);
    ensure!(compiler.status()?.success(), "the driver does not compile");
    let agent = |more: &[&str]| {
        let command = [&["/usr/bin/switchyard-node-agent", "--once", "--node-name", "a"][..], more].concat();
        let ended = inside(&files, &command);
        format!("{}{}", String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr))
    };
    let report = agent(&[]);
    assert!(report.contains("gpus:") && report.contains("uuid:"), "{report}");
    // A missing library must be reported.
    assert!(!agent(&["--nvml-lib", "/none.so"]).contains("uuid:"));
    Ok(())
}

/// The image contains no CUDA files. The worker must find the driver where a container runtime
/// mounts it, including folders outside the image's library path, and the image must provide the
/// libraries that NVIDIA's libraries link against.
#[test]
fn the_worker_finds_a_driver_in_its_image() -> Result<()> {
    let (config, unpacked) = unpack("switchyard-worker")?;
    let variables = config["config"]["Env"].as_array().context("Env")?;
    assert!(variables.iter().any(|one| one == "NVIDIA_DRIVER_CAPABILITIES=compute,utility"), "{variables:?}");
    // On nodes whose default runtime is NVIDIA's, this variable would give every pod all GPUs.
    assert!(variables.iter().all(|one| !one.as_str().unwrap_or_default().starts_with("NVIDIA_VISIBLE_DEVICES")));
    let files = unpacked.path().join("files");
    let mut all = Vec::new();
    self::files(&files, &mut all);
    let names: Vec<String> =
        all.iter().filter_map(|file| Some(file.file_name()?.to_string_lossy().into_owned())).collect();
    for cuda_library in ["libcuda", "libcublas", "libnvrtc", "libnccl", "libnvidia", "libcudnn", "libcudart"] {
        assert!(names.iter().all(|name| !name.starts_with(cuda_library)), "{cuda_library} is in the image");
    }
    // `worker/cuda/tests/libraries.rs` compares this list with the real libraries.
    let libc_parts = ["libdl.so.2", "libgcc_s.so.1", "libm.so.6", "libpthread.so.0", "librt.so.1"];
    for needed in libc_parts.into_iter().chain(["libstdc++.so.6", "libz.so.1"]) {
        let file = all.iter().find(|file| file.ends_with(needed)).with_context(|| format!("{needed} is not there"))?;
        let within = format!("/{}", file.strip_prefix(&files)?.display());
        let ended = inside(&files, &["/lib64/ld-linux-x86-64.so.2", "--list", &within]);
        let text = String::from_utf8_lossy(&[ended.stdout, ended.stderr].concat()).into_owned();
        assert!(ended.status.success() && !text.contains("not found"), "{needed}: {text}");
    }
    let software = || -> Result<Value> {
        let ended = inside(&files, &["/usr/bin/switchyard-worker", "gpu"]);
        serde_json::from_slice(&ended.stdout).with_context(|| String::from_utf8_lossy(&ended.stderr).into_owned())
    };
    let nvml = |software: &Value| {
        let all = software["libraries"].as_array().cloned().unwrap_or_default();
        all.into_iter().find(|library| library["name"] == "NVML").unwrap_or_default()
    };
    let without = nvml(&software()?);
    assert_eq!((&without["file"], &without["problem"]), (&Value::Null, &"NVML is not on this machine".into()));
    for folder in ["usr/lib64", "usr/local/nvidia/lib64"] {
        let library = files.join(folder).join("libnvidia-ml.so.1");
        fs::create_dir_all(files.join(folder))?;
        let source = root().join("node-agent/tests/nvml_reports/library.rs");
        let mut compiler = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
        compiler.args(["--edition", "2024", "-C", "panic=abort", "-o"]).arg(&library).arg(source);
        ensure!(compiler.status()?.success(), "the driver does not compile");
        let found = nvml(&software()?);
        assert_eq!(found["file"], format!("/{folder}/libnvidia-ml.so.1"), "{found}");
        fs::remove_file(&library)?;
    }
    Ok(())
}

/// The SBOM lists the linked crates, and no build or test dependencies.
#[test]
fn the_sbom_matches_the_program() -> Result<()> {
    for (name, stage) in IMAGES {
        let (_, unpacked) = unpack(name)?;
        let text = fs::read_to_string(unpacked.path().join("files/usr/share/doc/switchyard/sbom.cdx.json"))?;
        let bill: Value = serde_json::from_str(&text)?;
        assert_eq!((&bill["bomFormat"], &bill["specVersion"]), (&"CycloneDX".into(), &"1.5".into()));
        let components = bill["components"].as_array().context("components")?;
        let has = |name: &str| components.iter().any(|component| component["name"] == name);
        for (crate_name, stages) in [
            ("serde_json", &["operator", "agent", "worker"][..]),
            ("kube-client", &["operator", "agent"]),
            ("nvml-wrapper", &["agent"]),
            ("clap_complete", &[]),
            ("safetensors", &["worker"]),
            ("proptest", &[]),
            ("serde_derive", &[]),
            ("switchyard-tests", &[]),
        ] {
            assert_eq!(has(crate_name), stages.contains(&stage), "{stage}: {crate_name}");
        }
        let from_registry = components.iter().filter(|component| !component["hashes"].is_null()).count();
        assert!(from_registry > 20, "{stage}: {from_registry} with a digest");
        let unlicensed: Vec<&Value> = components
            .iter()
            .filter(|component| {
                component["purl"].as_str().is_some_and(|purl| purl.starts_with("pkg:cargo/"))
                    && component["licenses"].is_null()
            })
            .collect();
        assert!(unlicensed.is_empty(), "{unlicensed:?}");
        // Every referenced component exists exactly once.
        let mut refs: Vec<&str> = components.iter().filter_map(|component| component["bom-ref"].as_str()).collect();
        refs.push(bill["metadata"]["component"]["bom-ref"].as_str().context("a name")?);
        let count = refs.len();
        refs.sort_unstable();
        refs.dedup();
        assert_eq!(refs.len(), count, "{stage}");
        for dependency in bill["dependencies"].as_array().context("dependencies")? {
            for on in dependency["dependsOn"].as_array().into_iter().flatten() {
                assert!(refs.contains(&on.as_str().unwrap_or_default()), "{stage}: {on}");
            }
        }
    }
    Ok(())
}

/// A build at another time with another umask yields the same image and the same archive.
#[test]
fn two_builds_have_the_same_digest() {
    let [first, second] = images();
    for (name, (digest, archive)) in first {
        assert!(digest.starts_with("sha256:") && digest.trim().len() == 71, "{name}: {digest}");
        assert_eq!(digest, &second[name].0, "{name}");
        assert!(archive == &second[name].1, "{name}: the archives differ");
    }
}
