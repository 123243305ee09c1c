//! Hand-written descriptions of machines.

use crate::failures::Failures;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

/// A machine in short form. Device paths are written as `15/01.0/16:00.0/1b:00.0`: root complex,
/// bridges, device.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Scene {
    /// Which machine it is, and the source of the data.
    pub about: String,
    /// Vendor and model of the processors.
    pub cpu: [String; 2],
    /// Output of `uname -m`.
    pub architecture: String,
    /// Number of processor packages. NUMA nodes with CPUs are divided among them equally, in order.
    pub sockets: u32,
    /// NUMA nodes.
    pub numa: Vec<NumaScene>,
    /// Kernel release.
    pub kernel: String,
    /// Driver version; absent if no driver is installed.
    #[serde(default)]
    pub driver: Option<String>,
    /// Kind of the kernel module.
    #[serde(default)]
    pub driver_module: DriverModule,
    /// Newest CUDA version of the driver: `13000` is 13.0.
    #[serde(default)]
    pub cuda: i32,
    /// Functions that the library lacks, as in an old driver.
    #[serde(default)]
    pub without: Vec<String>,
    /// Kernel modules other than the driver.
    #[serde(default)]
    pub modules: Vec<String>,
    /// GPUs in driver order, which is bus order.
    #[serde(default)]
    pub gpus: Vec<GpuGroup>,
    /// Direct NVLinks: GPU, GPU, count.
    #[serde(default)]
    pub mesh: Vec<[u32; 3]>,
    /// NVSwitches, by path.
    #[serde(default)]
    pub nvswitches: Vec<String>,
    /// Partitioned GPUs by index, with the profiles of their instances.
    #[serde(default)]
    pub mig: BTreeMap<u32, Vec<String>>,
    /// Fabric registration; absent if the driver reports no fabric.
    #[serde(default)]
    pub fabric: Option<FabricScene>,
    /// Whether the driver reports every pair of GPUs as `SYS`, independent of the paths.
    #[serde(default)]
    pub far_apart: bool,
    /// Network devices with RDMA.
    #[serde(default)]
    pub nics: Vec<NicGroup>,
    /// IMEX channels for memory shared between machines.
    #[serde(default)]
    pub imex_channels: u32,
    /// Initial failures.
    #[serde(default)]
    pub failures: Failures,
}

/// Kind of the NVIDIA kernel module.
#[derive(Serialize, Deserialize, Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DriverModule {
    /// Open source.
    #[default]
    Open,
    /// Closed source.
    Proprietary,
}

/// NUMA nodes of one kind.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NumaScene {
    /// A node number, or a list of numbers for nodes without CPUs.
    pub node: String,
    /// CPUs. In two ranges of equal length, the second has the second thread of each core.
    #[serde(default)]
    pub cpus: String,
    /// Memory in GiB.
    pub gib: u64,
    /// Root complexes by number (`15`, `0008:00`).
    #[serde(default)]
    pub roots: Vec<String>,
}

/// GPUs of one kind.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GpuGroup {
    /// Product name.
    pub model: String,
    /// Memory in GiB.
    pub gib: u64,
    /// Generation and lanes of the PCIe link.
    pub pcie: [u32; 2],
    /// Location of each GPU.
    pub at: Vec<String>,
    /// NVLinks of each GPU to switches.
    #[serde(default)]
    pub switch_links: u32,
    /// Speed of one NVLink in MB/s; absent if the driver does not report it.
    #[serde(default)]
    pub link_speed: Option<u64>,
    /// Generation of an idle link; absent if idle links keep their generation.
    #[serde(default)]
    pub idle_generation: Option<u32>,
    /// NUMA nodes according to the driver, one per GPU, if the kernel does not know them.
    #[serde(default)]
    pub affinity: Vec<u32>,
    /// NUMA nodes of each GPU's own memory.
    #[serde(default)]
    pub memory_nodes: Vec<u32>,
}

/// A fabric registration.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FabricScene {
    /// 32 hexadecimal digits; zeros for a single machine.
    pub cluster: String,
    /// Part of the cluster.
    pub clique: u32,
    /// Health mask.
    pub mask: u32,
    /// Health summary.
    pub summary: u8,
}

/// Network devices of one kind.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NicGroup {
    /// `InfiniBand` or `Ethernet`.
    pub layer: String,
    /// Speed in Gbit/s.
    pub gbps: u32,
    /// Generation and lanes of the PCIe link.
    pub pcie: [u32; 2],
    /// Location of each RDMA device.
    pub ports: BTreeMap<String, String>,
    /// Number of IPv4 addresses of each Ethernet port.
    #[serde(default = "one")]
    pub addresses: u32,
    /// Number of virtual functions of each port.
    #[serde(default)]
    pub functions: u32,
}

fn one() -> u32 {
    1
}

/// Why a scene is invalid.
#[derive(Debug, thiserror::Error)]
pub enum SceneError {
    /// Not valid JSON for a scene.
    #[error("no scene: {0}")]
    Json(#[from] serde_json::Error),
    /// No scene of this name.
    #[error("{}: {source}", path.display())]
    Read {
        /// Path of the missing file.
        path: PathBuf,
        /// The underlying I/O error.
        source: io::Error,
    },
    /// An invalid value.
    #[error("{field}: got {got}; expected {expected}")]
    Field {
        /// Path of the field.
        field: String,
        /// The actual value.
        got: String,
        /// The expected value.
        expected: &'static str,
    },
}

fn machines() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/machines"))
}

impl Scene {
    /// Parses a scene.
    ///
    /// # Errors
    /// The text is not valid JSON for a scene. [`crate::Machine::new`] checks whether its values
    /// are consistent.
    pub fn parse(text: &str) -> Result<Scene, SceneError> {
        Ok(serde_json::from_str(text)?)
    }

    /// Loads a machine of `tests/scenes/machines` by its file name.
    ///
    /// # Errors
    /// There is no scene of this name, or it is invalid.
    pub fn shipped(name: &str) -> Result<Scene, SceneError> {
        let path = machines().join(name).with_extension("json");
        let text = std::fs::read_to_string(&path).map_err(|source| SceneError::Read { path, source })?;
        Scene::parse(&text)
    }

    /// Names of all machines in `tests/scenes/machines`, sorted.
    ///
    /// # Errors
    /// The folder is unreadable.
    pub fn names() -> io::Result<Vec<String>> {
        let files: Vec<PathBuf> =
            std::fs::read_dir(machines())?.map(|file| Ok(file?.path())).collect::<io::Result<_>>()?;
        let name = |path: &PathBuf| Some(path.file_stem()?.to_str()?.to_owned());
        let mut names: Vec<String> = files.iter().filter_map(name).collect();
        names.sort();
        Ok(names)
    }
}
