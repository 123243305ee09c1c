//! What a person writes about a machine.

use crate::failures::Failures;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

/// A machine in short form. Paths of devices are written as `15/01.0/16:00.0/1b:00.0`: root complex, bridges, device.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Scene {
    /// Which machine it is, and where the knowledge comes from.
    pub about: String,
    /// Vendor and model of the processors.
    pub cpu: [String; 2],
    /// `uname -m`.
    pub architecture: String,
    /// Processor packages. The NUMA nodes with CPUs are divided among them in equal parts, in order.
    pub sockets: u32,
    /// NUMA nodes.
    pub numa: Vec<NumaScene>,
    /// Release of the kernel.
    pub kernel: String,
    /// Version of the driver; absent where none is installed.
    #[serde(default)]
    pub driver: Option<String>,
    /// Kind of the kernel module.
    #[serde(default)]
    pub driver_module: DriverModule,
    /// Newest CUDA of the driver: `13000` is 13.0.
    #[serde(default)]
    pub cuda: i32,
    /// Functions that the library lacks, as in an old driver.
    #[serde(default)]
    pub without: Vec<String>,
    /// Kernel modules beside the driver.
    #[serde(default)]
    pub modules: Vec<String>,
    /// GPUs, in the order of the driver, which is that of the bus.
    #[serde(default)]
    pub gpus: Vec<GpuGroup>,
    /// NVLinks without a switch: GPU, GPU, how many.
    #[serde(default)]
    pub mesh: Vec<[u32; 3]>,
    /// NVSwitches, by path.
    #[serde(default)]
    pub nvswitches: Vec<String>,
    /// GPUs that are split, by index, and the profiles of their instances.
    #[serde(default)]
    pub mig: BTreeMap<u32, Vec<String>>,
    /// Place in the fabric; absent where the driver knows none.
    #[serde(default)]
    pub fabric: Option<FabricScene>,
    /// Every pair of GPUs is `SYS` to the driver, whatever the paths are.
    #[serde(default)]
    pub far_apart: bool,
    /// Network devices with RDMA.
    #[serde(default)]
    pub nics: Vec<NicGroup>,
    /// Channels for memory shared between machines.
    #[serde(default)]
    pub imex_channels: u32,
    /// What is wrong from the beginning.
    #[serde(default)]
    pub failures: Failures,
}

/// Kind of the NVIDIA kernel module.
#[derive(Serialize, Deserialize, Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DriverModule {
    /// With public source.
    #[default]
    Open,
    /// Without.
    Proprietary,
}

/// NUMA nodes of one kind.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NumaScene {
    /// A number, or a list of them for nodes without CPUs.
    pub node: String,
    /// CPUs. Two ranges of one length: the second one has the second thread of each core.
    #[serde(default)]
    pub cpus: String,
    /// Memory, GiB.
    pub gib: u64,
    /// Root complexes by their number (`15`, `0008:00`).
    #[serde(default)]
    pub roots: Vec<String>,
}

/// GPUs of one kind.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GpuGroup {
    /// Product name.
    pub model: String,
    /// Memory, GiB.
    pub gib: u64,
    /// Generation and lanes of the PCIe link.
    pub pcie: [u32; 2],
    /// Where each one is.
    pub at: Vec<String>,
    /// NVLinks of each to switches.
    #[serde(default)]
    pub switch_links: u32,
    /// Speed of one NVLink, MB/s; absent where the driver does not tell.
    #[serde(default)]
    pub link_speed: Option<u64>,
    /// Generation to which an idle link falls; absent where it does not.
    #[serde(default)]
    pub idle_generation: Option<u32>,
    /// NUMA nodes by the driver, one for each GPU, where the kernel does not know them.
    #[serde(default)]
    pub affinity: Vec<u32>,
    /// NUMA nodes that are the memory of each GPU.
    #[serde(default)]
    pub memory_nodes: Vec<u32>,
}

/// A place in the fabric.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FabricScene {
    /// 32 hexadecimal digits; zeros for a machine by itself.
    pub cluster: String,
    /// Part of the cluster.
    pub clique: u32,
    /// Health mask.
    pub mask: u32,
    /// Health in one number.
    pub summary: u8,
}

/// Network devices of one kind.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NicGroup {
    /// `InfiniBand` or `Ethernet`.
    pub layer: String,
    /// Speed, Gbit/s.
    pub gbps: u32,
    /// Generation and lanes of the PCIe link.
    pub pcie: [u32; 2],
    /// Where each RDMA device is.
    pub ports: BTreeMap<String, String>,
    /// IPv4 addresses of each port, for Ethernet.
    #[serde(default = "one")]
    pub addresses: u32,
    /// Virtual functions of each port.
    #[serde(default)]
    pub functions: u32,
}

fn one() -> u32 {
    1
}

/// Why a text is no scene.
#[derive(Debug, thiserror::Error)]
pub enum SceneError {
    /// No JSON of a scene.
    #[error("no scene: {0}")]
    Json(#[from] serde_json::Error),
    /// No scene of this name.
    #[error("{}: {source}", path.display())]
    Read {
        /// Where it was looked for.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A value that cannot be.
    #[error("{field}: got {got}; expected {expected}")]
    Field {
        /// Where.
        field: String,
        /// What is there.
        got: String,
        /// What can be.
        expected: &'static str,
    },
}

fn machines() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/machines"))
}

impl Scene {
    /// Reads a scene.
    ///
    /// # Errors
    /// The text is no JSON of a scene. Whether its values fit together is found by [`crate::Machine::new`].
    pub fn parse(text: &str) -> Result<Scene, SceneError> {
        Ok(serde_json::from_str(text)?)
    }

    /// A machine of `tests/scenes/machines`, by the name of its file.
    ///
    /// # Errors
    /// There is none of this name, or it is no scene.
    pub fn shipped(name: &str) -> Result<Scene, SceneError> {
        let path = machines().join(name).with_extension("json");
        let text = std::fs::read_to_string(&path).map_err(|source| SceneError::Read { path, source })?;
        Scene::parse(&text)
    }

    /// The names of all machines of `tests/scenes/machines`, sorted.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn names() -> io::Result<Vec<String>> {
        let files: Vec<PathBuf> =
            std::fs::read_dir(machines())?.map(|file| Ok(file?.path())).collect::<io::Result<_>>()?;
        let name = |path: &PathBuf| Some(path.file_stem()?.to_str()?.to_owned());
        let mut names: Vec<String> = files.iter().filter_map(name).collect();
        names.sort();
        Ok(names)
    }
}
