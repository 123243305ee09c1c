//! Finds CUDA libraries.
//!
//! The search order is: the directories in [`VARIABLE`]; the loader's own rules (`LD_LIBRARY_PATH`,
//! `ldconfig`); for driver libraries, the directories where NVIDIA's container runtime and device
//! plugins mount them; the toolkit in `/usr/local/cuda`; and pip-installed wheels of a Python
//! (`site-packages/nvidia/*/lib`).

use crate::error::Error;
use crate::library::Library;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Colon-separated library directories that are searched first.
pub const VARIABLE: &str = "SWITCHYARD_CUDA_LIBRARIES";

/// A library, with its possible file names, best first.
pub struct LibrarySpec {
    /// Its common name.
    pub name: &'static str,
    files: &'static [&'static str],
    /// Prefix of the files that it loads itself. They are next to it, but not every build searches
    /// there (NVRTC in the 13.0 wheels does not), so they are opened along with it.
    companion_prefix: Option<&'static str>,
    /// Whether it is part of the driver, which a container gets from its runtime.
    from_driver: bool,
}

/// Part of the driver, never of a toolkit.
pub const DRIVER: LibrarySpec =
    LibrarySpec { name: "driver", files: &["libcuda.so.1"], companion_prefix: None, from_driver: true };
pub const CUBLASLT: LibrarySpec = LibrarySpec {
    name: "cuBLASLt",
    files: &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
    companion_prefix: None,
    from_driver: false,
};
pub const CUDNN: LibrarySpec =
    LibrarySpec { name: "cuDNN", files: &["libcudnn.so.9", "libcudnn.so"], companion_prefix: None, from_driver: false };
pub const NVRTC: LibrarySpec = LibrarySpec {
    name: "NVRTC",
    files: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
    companion_prefix: Some("libnvrtc-builtins.so."),
    from_driver: false,
};
/// Part of the driver, in its `utility` capability.
pub const NVML: LibrarySpec =
    LibrarySpec { name: "NVML", files: &["libnvidia-ml.so.1"], companion_prefix: None, from_driver: true };
pub const NCCL: LibrarySpec =
    LibrarySpec { name: "NCCL", files: &["libnccl.so.2", "libnccl.so"], companion_prefix: None, from_driver: false };

/// Where containers have the driver's libraries, regardless of the loader configuration: the
/// directories of the host's distribution, and those of device plugins. An image without `ldconfig`
/// has no cache that its runtime could update.
const DRIVER_DIRECTORIES: [&str; 5] = [
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/local/nvidia/lib64",
    "usr/local/nvidia/lib",
];

/// The search rule that found a candidate.
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

/// The directories to search on this machine.
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

impl LibrarySpec {
    /// Opens the library's own files in advance, so that it finds them by name. The library itself
    /// reports those that cannot be opened.
    fn open_companions(&self, library: &Path) {
        let (Some(start), Some(folder)) = (self.companion_prefix, library.parent()) else { return };
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(start) {
                let _ = Library::open(&entry.path());
            }
        }
    }
}

impl Places {
    /// Reads the environment and the file system below `root`, which is `/` except in tests.
    /// `python` is an interpreter whose packages are searched instead of those in `VIRTUAL_ENV` and
    /// `PATH`.
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
            driver: DRIVER_DIRECTORIES.map(|folder| root.join(folder)).to_vec(),
            toolkit: distinct(homes.chain([root.join("usr/local/cuda")])),
            python: distinct(bins.iter().flat_map(|bin| wheels(bin))),
        }
    }

    /// All candidate files, in the order in which they are tried. Bare names are for the loader.
    fn candidates(&self, wanted: &LibrarySpec) -> Vec<(Origin, PathBuf)> {
        let toolkit = self.toolkit.iter().flat_map(|home| ["lib64", "lib", "compat"].map(|folder| home.join(folder)));
        let python = self.python.iter().map(|package| package.join("lib"));
        let driver = if wanted.from_driver { self.driver.clone() } else { Vec::new() };
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

    /// Opens the first candidate that can be opened, globally for the process: libraries that later
    /// request its SONAME from the loader get this file.
    ///
    /// # Errors
    /// [`Error::NotFound`] with everything that was tried; [`Error::NotLoaded`] if a file exists
    /// but the loader rejects it.
    pub fn open(&self, wanted: &LibrarySpec) -> Result<Found, Error> {
        let mut refused = Vec::new();
        let candidates = self.candidates(wanted);
        for (origin, path) in &candidates {
            if *origin != Origin::Loader && !path.exists() {
                continue;
            }
            match Library::open(path) {
                Ok(library) => {
                    wanted.open_companions(&library.path);
                    return Ok(Found { library, origin: *origin });
                }
                // Usually the loader only reports that no file of this name exists.
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

/// The directories `nvidia/*` in the packages of the Python whose executable is in `bin`. A virtual
/// environment's executable is a link: its own packages take precedence over the packages of its
/// target.
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

/// The subdirectories of a directory, sorted by name; none if it cannot be read.
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
