//! Finds libraries of CUDA.
//!
//! The order is: the folders in [`VARIABLE`], the loader by its own rules (`LD_LIBRARY_PATH`, `ldconfig`), for what comes with the driver
//! the folders into which NVIDIA's container runtime and device plugins put it, the toolkit in `/usr/local/cuda`, and the wheels that pip
//! installs for a Python (`site-packages/nvidia/*/lib`).

use crate::error::Error;
use crate::library::Library;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Folders of libraries, separated by colons, that are searched before all others.
pub const VARIABLE: &str = "SWITCHYARD_CUDA_LIBRARIES";

/// A library, with the file names that it may have, best first.
pub struct Wanted {
    /// Its common name.
    pub name: &'static str,
    files: &'static [&'static str],
    /// What the files that it opens by itself begin with. They lie beside it, and not every build of it looks there (NVRTC of the 13.0
    /// wheels does not), so they are opened with it.
    own_files: Option<&'static str>,
    /// It comes with the driver, which a container gets from its runtime.
    is_of_driver: bool,
}

/// Comes with the driver, never with a toolkit.
pub const DRIVER: Wanted = Wanted { name: "driver", files: &["libcuda.so.1"], own_files: None, is_of_driver: true };
pub const CUBLASLT: Wanted = Wanted {
    name: "cuBLASLt",
    files: &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
    own_files: None,
    is_of_driver: false,
};
pub const CUDNN: Wanted =
    Wanted { name: "cuDNN", files: &["libcudnn.so.9", "libcudnn.so"], own_files: None, is_of_driver: false };
pub const NVRTC: Wanted = Wanted {
    name: "NVRTC",
    files: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
    own_files: Some("libnvrtc-builtins.so."),
    is_of_driver: false,
};
/// Comes with the driver, as the part `utility`.
pub const NVML: Wanted = Wanted { name: "NVML", files: &["libnvidia-ml.so.1"], own_files: None, is_of_driver: true };
pub const NCCL: Wanted =
    Wanted { name: "NCCL", files: &["libnccl.so.2", "libnccl.so"], own_files: None, is_of_driver: false };

/// Where a container finds the driver's libraries, whatever its own loader searches: in the folders of the host's distribution, and in those
/// of device plugins. An image without `ldconfig` has no cache that its runtime could have updated.
const OF_DRIVER: [&str; 5] = [
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/local/nvidia/lib64",
    "usr/local/nvidia/lib",
];

/// The rule that led to a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    Variable,
    Loader,
    Driver,
    Toolkit,
    Python,
}

impl Origin {
    /// The name in results.
    pub fn name(self) -> &'static str {
        match self {
            Origin::Variable => VARIABLE,
            Origin::Loader => "the loader",
            Origin::Driver => "the folders of the driver",
            Origin::Toolkit => "the toolkit",
            Origin::Python => "Python",
        }
    }
}

/// The folders of this machine to search.
#[derive(Debug, Clone, Default)]
pub struct Places {
    variable: Vec<PathBuf>,
    driver: Vec<PathBuf>,
    toolkit: Vec<PathBuf>,
    python: Vec<PathBuf>,
}

/// An opened library.
pub struct Found {
    pub library: Library,
    pub origin: Origin,
}

impl Wanted {
    /// Opens the library's own files, so that it finds them by name. What cannot be opened it reports itself.
    fn open_own_files(&self, library: &Path) {
        let (Some(start), Some(folder)) = (self.own_files, library.parent()) else { return };
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(start) {
                let _ = Library::open(&entry.path());
            }
        }
    }
}

impl Places {
    /// Reads the environment and the file system below `root`, which is `/` except in tests. `python` is an interpreter
    /// whose packages are searched instead of those of `VIRTUAL_ENV` and `PATH`.
    pub fn new(get: impl Fn(&str) -> Option<OsString>, root: &Path, python: Option<&Path>) -> Places {
        let list =
            |name: &str| get(name).map(|value| std::env::split_paths(&value).collect::<Vec<_>>()).unwrap_or_default();
        let bins = match python {
            Some(python) => python.parent().map(Path::to_path_buf).into_iter().collect(),
            None => {
                let active = get("VIRTUAL_ENV").map(|folder| PathBuf::from(folder).join("bin"));
                active.into_iter().chain(list("PATH")).collect::<Vec<_>>()
            }
        };
        let homes = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(|name| get(name)).map(PathBuf::from);
        Places {
            variable: list(VARIABLE).into_iter().filter(|folder| !folder.as_os_str().is_empty()).collect(),
            driver: OF_DRIVER.map(|folder| root.join(folder)).to_vec(),
            toolkit: distinct(homes.chain([root.join("usr/local/cuda")])),
            python: distinct(bins.iter().flat_map(|bin| wheels(bin))),
        }
    }

    /// Every file that may be the library, in the order in which they are tried. Those for the loader are bare names.
    fn candidates(&self, wanted: &Wanted) -> Vec<(Origin, PathBuf)> {
        let toolkit = self.toolkit.iter().flat_map(|home| ["lib64", "lib", "compat"].map(|folder| home.join(folder)));
        let python = self.python.iter().map(|package| package.join("lib"));
        let driver = if wanted.is_of_driver { self.driver.clone() } else { Vec::new() };
        let groups: [(Origin, Vec<PathBuf>); 5] = [
            (Origin::Variable, self.variable.clone()),
            (Origin::Loader, vec![PathBuf::new()]),
            (Origin::Driver, driver),
            (Origin::Toolkit, toolkit.collect()),
            (Origin::Python, python.collect()),
        ];
        let files = |folder: PathBuf| wanted.files.iter().map(move |file| folder.join(file));
        groups
            .into_iter()
            .flat_map(|(origin, folders)| folders.into_iter().flat_map(files).map(move |path| (origin, path)))
            .collect()
    }

    /// Opens the first candidate that can be opened, for the whole process: libraries that later ask the loader for its
    /// SONAME get this one.
    ///
    /// # Errors
    /// [`Error::NotFound`] with everything that was tried; [`Error::NotLoaded`] if a file exists that the loader refuses.
    pub fn open(&self, wanted: &Wanted) -> Result<Found, Error> {
        let mut refused = Vec::new();
        let candidates = self.candidates(wanted);
        for (origin, path) in &candidates {
            if *origin != Origin::Loader && !path.exists() {
                continue;
            }
            match Library::open(path) {
                Ok(library) => {
                    wanted.open_own_files(&library.path);
                    return Ok(Found { library, origin: *origin });
                }
                // Most of the time the loader just says that there is no file of this name.
                Err(text) if *origin == Origin::Loader && text.contains("No such file") => {}
                Err(text) => refused.push(text),
            }
        }
        if refused.is_empty() {
            let tried = candidates.into_iter().map(|(_, path)| path).collect();
            return Err(Error::NotFound { library: wanted.name, tried });
        }
        Err(Error::NotLoaded { library: wanted.name, text: refused.join("; ") })
    }
}

/// The folders `nvidia/*` in the packages of the Python whose program is in `bin`. The program of a virtual environment
/// is a link: its own packages come before those of the interpreter that it points to.
fn wheels(bin: &Path) -> Vec<PathBuf> {
    let program = bin.join("python3");
    let real = program.canonicalize().ok();
    let programs = [program.exists().then_some(program), real];
    let prefixes = programs.iter().flatten().filter_map(|program| program.parent()?.parent());
    let versions = prefixes.flat_map(|prefix| {
        let found = folders(&prefix.join("lib"));
        found
            .into_iter()
            .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3")))
    });
    let sites = versions.flat_map(|version| ["site-packages", "dist-packages"].map(|kind| version.join(kind)));
    sites.flat_map(|site| folders(&site.join("nvidia"))).collect()
}

/// The folders in a folder, sorted by name; none if it cannot be read.
fn folders(parent: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    paths.sort();
    paths
}

fn distinct(paths: impl IntoIterator<Item = PathBuf>) -> Vec<PathBuf> {
    let mut kept: Vec<PathBuf> = Vec::new();
    for path in paths {
        if !kept.contains(&path) {
            kept.push(path);
        }
    }
    kept
}

#[cfg(test)]
mod tests;
