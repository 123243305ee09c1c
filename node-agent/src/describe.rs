//! Combines all readers into one description.

use crate::read::Notes;
use crate::{acs, cpu, fabric, gpu, host, measured, net, numa, pci};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use std::io;
use std::path::{Path, PathBuf};
use switchyard_crds::gpu_topology::{Facts, GPUTopology, GPUTopologySpec, GPUTopologyStatus, NvSwitch, SourceState};

/// Locations of the machine's files. Everything but NVML's library can be a copy in any directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roots {
    /// Usually `/sys`.
    pub sysfs: PathBuf,
    /// Usually `/proc`.
    pub procfs: PathBuf,
    /// Usually `/dev`.
    pub dev: PathBuf,
    /// NVML's library; `None` for `libnvidia-ml.so.1`, found by the dynamic linker.
    pub nvml_library: Option<PathBuf>,
    /// A file of measured speeds (see [`crate::measured`]), if there is one.
    pub measured: Option<PathBuf>,
    /// Whether to read the ACS registers of bridges, which needs CAP_SYS_ADMIN.
    pub read_acs: bool,
    /// Name of the description, which is the name of the node.
    pub node_name: String,
}

impl Roots {
    /// The machine that this program runs on.
    pub fn local(node_name: impl Into<String>) -> Self {
        Self {
            sysfs: "/sys".into(),
            procfs: "/proc".into(),
            dev: "/dev".into(),
            nvml_library: None,
            measured: None,
            read_acs: false,
            node_name: node_name.into(),
        }
    }
}

/// Why a machine cannot be described at all.
#[derive(Debug, thiserror::Error)]
pub enum DescribeError {
    /// The name is not a valid object name.
    #[error("node name `{got}`: expected 1 to 253 characters of a-z, 0-9, `-` and `.`")]
    NodeName { got: String },
    /// A root does not exist.
    #[error("{what} root {}: expected a directory", path.display())]
    Root {
        /// `sysfs` or `procfs`.
        what: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Reads the machine. `now` becomes `status.observedTime` and affects nothing else, so two
/// descriptions of an unchanged machine differ only in that field.
///
/// A fact that cannot be read is absent and named in `status.sources`.
///
/// # Errors
/// The node name is invalid, or `sysfs` or `procfs` is not a directory.
pub fn describe(roots: &Roots, now: jiff::Timestamp) -> Result<GPUTopology, DescribeError> {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-' || byte == b'.';
    if !(1..=253).contains(&roots.node_name.len()) || !roots.node_name.bytes().all(allowed) {
        return Err(DescribeError::NodeName { got: roots.node_name.clone() });
    }
    check_root("sysfs", &roots.sysfs)?;
    check_root("procfs", &roots.procfs)?;

    let mut topology = GPUTopology::new(&roots.node_name, GPUTopologySpec {});
    topology.status = Some(read_status(roots, now));
    Ok(topology)
}

fn check_root(what: &'static str, path: &Path) -> Result<(), DescribeError> {
    std::fs::read_dir(path).map(drop).map_err(|source| DescribeError::Root { what, path: path.to_owned(), source })
}

fn read_status(roots: &Roots, now: jiff::Timestamp) -> GPUTopologyStatus {
    let mut status = GPUTopologyStatus {
        observed_time: Some(Time(now)),
        agent_version: Some(env!("CARGO_PKG_VERSION").to_owned()),
        ..GPUTopologyStatus::default()
    };

    let mut notes = Notes::default();
    status.cpus = cpu::read_cpus(roots, &mut notes);
    status.sources.push(notes.source(Facts::CPUs, "sysfs, procfs", status.cpus.is_some()));

    let mut notes = Notes::default();
    let nodes = numa::read_nodes(roots, &mut notes);
    status.memory_bytes = numa::read_total_memory(roots, &mut notes);
    status.sources.push(notes.source(Facts::NUMANodes, "sysfs, procfs", nodes.is_some()));
    status.numa_node_count = nodes.as_ref().map(|nodes| nodes.len() as u32);
    status.numa_nodes = nodes.unwrap_or_default();

    let (mut notes, mut link_notes) = (Notes::default(), Notes::default());
    let gpus = gpu::read_gpus(roots, &status.numa_nodes, &mut notes, &mut link_notes);
    let mut source = notes.source(Facts::GPUs, &gpus.source, gpus.count.is_some());
    if gpus.count == Some(0) {
        // The note only explains why the list is empty; nothing is missing.
        source.state = SourceState::Complete;
    }
    status.sources.push(source);
    if gpus.gpus.len() > 1 || !link_notes.is_empty() {
        status.sources.push(link_notes.source(Facts::Links, &gpus.source, !gpus.links.is_empty()));
    }
    status.gpu_count = gpus.count;
    status.gpus = gpus.gpus;
    status.links = gpus.links;
    status.nvswitch = read_nvswitch(roots, gpus.at_switches);
    if status.gpus.iter().any(|gpu| gpu.fabric.is_some()) {
        let mut notes = Notes::default();
        status.fabric = fabric::of_machine(&status.gpus, &mut notes);
        status.sources.push(notes.source(Facts::Fabric, &gpus.source, status.fabric.is_some()));
    }

    let default_route = host::read_default_route(roots);
    let mut notes = Notes::default();
    let nics = net::read_nics(roots, default_route.as_deref(), &mut notes);
    status.sources.push(notes.source(Facts::NICs, "sysfs, procfs", nics.is_some()));
    status.nic_count = nics.as_ref().map(|nics| nics.len() as u32);
    status.nics = nics.unwrap_or_default();

    let mut notes = Notes::default();
    status.host_identity = host::read_identity(roots, &mut notes);
    let mut facts = host::read_host(roots, default_route, &mut notes);
    facts.driver = gpus.driver;
    facts.nvml_version = gpus.nvml_version;
    facts.cuda_version = gpus.cuda_version;
    if roots.read_acs {
        facts.acs = acs::read(roots, &status.gpus, &status.nics, &mut notes);
    }
    let found = status.host_identity.is_some() || facts.kernel.is_some();
    status.sources.push(notes.source(Facts::Host, "procfs", found));
    status.host = Some(facts);

    if let Some(path) = &roots.measured {
        let mut notes = Notes::default();
        let measured = measured::read(path, &mut notes);
        status.sources.push(notes.source(Facts::Measured, "file", measured.is_some()));
        status.measured = measured.unwrap_or_default();
    }
    status
}

/// `gpus` is the number of GPUs with an NVLink to a switch.
fn read_nvswitch(roots: &Roots, gpus: u32) -> Option<NvSwitch> {
    let devices = pci::functions(&roots.sysfs).map_or(0, |all| pci::nvswitches(&all) as u32);
    let known = |count: u32| (count > 0).then_some(count);
    let found = NvSwitch { devices: known(devices), gpus: known(gpus) };
    (found != NvSwitch::default()).then_some(found)
}
