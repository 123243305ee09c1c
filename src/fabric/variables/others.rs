//! Variables of frameworks, launchers and drivers, and other readers of names that look like
//! NCCL's.

/// Reader of a name that begins with `NCCL_` but is not one of NCCL's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reader {
    /// The name, or a prefix that ends with `_`.
    pub name: &'static str,
    /// The program that reads it.
    pub who: &'static str,
}

const fn reader(name: &'static str, who: &'static str) -> Reader {
    Reader { name, who }
}

/// Plugins, builds and images. Their values are not checked.
const READERS: [Reader; 18] = [
    reader("NCCL_FASTRAK_", "GPUDirect-TCPXO of Google Cloud"),
    reader("NCCL_GPUDIRECTTCPX_", "GPUDirect-TCPX of Google Cloud"),
    reader("NCCL_DYNAMIC_CHUNK_SIZE", "GPUDirect-TCPXO of Google Cloud"),
    reader("NCCL_SHIMNET_", "the configuration checker of Google Cloud's plugins"),
    reader("NCCL_TUNER_CONFIG_", "tuner plugins"),
    reader("NCCL_UCX_", "the UCX plugin (nccl-rdma-sharp-plugins)"),
    reader("NCCL_SHARP_", "the SHARP plugin (nccl-rdma-sharp-plugins)"),
    reader("NCCL_PLUGIN_P2P", "nccl-rdma-sharp-plugins"),
    reader("NCCL_IBEXT_DISABLE", "nccl-rdma-sharp-plugins"),
    reader("NCCL_TESTS_", "nccl-tests"),
    reader("NCCL_HOME", "builds"),
    reader("NCCL_ROOT", "builds"),
    reader("NCCL_ROOT_DIR", "builds"),
    reader("NCCL_INCLUDE_DIR", "builds"),
    reader("NCCL_LIB_DIR", "builds"),
    reader("NCCL_LIBRARY", "builds"),
    reader("NCCL_VERSION", "images of NVIDIA, as a statement"),
    reader("NCCL_SO_PATH", "vLLM"),
];

/// The program other than NCCL that reads a name that begins with `NCCL_`.
pub fn reader_of(name: &str) -> Option<&'static Reader> {
    READERS.iter().find(|reader| reader.name == name || reader.name.ends_with('_') && name.starts_with(reader.name))
}

/// A renamed variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Renamed {
    pub from: &'static str,
    pub to: &'static str,
    /// Program and release that renamed it.
    pub since: &'static str,
}

const fn torch(from: &'static str, to: &'static str) -> Renamed {
    Renamed { from, to, since: "PyTorch 2.2" }
}

/// PyTorch's process group; it reads the old names with a warning. Sources:
/// `torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp`, "torch_nccl_environment_variables" of
/// docs.pytorch.org.
const RENAMED: [Renamed; 5] = [
    torch("NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    torch("NCCL_BLOCKING_WAIT", "TORCH_NCCL_BLOCKING_WAIT"),
    torch("NCCL_DESYNC_DEBUG", "TORCH_NCCL_DESYNC_DEBUG"),
    torch("NCCL_ENABLE_TIMING", "TORCH_NCCL_ENABLE_TIMING"),
    torch("NCCL_USE_COMM_NONBLOCKING", "TORCH_NCCL_USE_COMM_NONBLOCKING"),
];

/// The new name of a PyTorch variable.
pub fn renamed(name: &str) -> Option<&'static Renamed> {
    RENAMED.iter().find(|renamed| renamed.from == name)
}

/// A debug setting that costs speed or hides the fault if it stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Debugging {
    pub name: &'static str,
    /// Value, case-insensitive; empty for any value.
    pub value: &'static str,
    /// Whether it does harm, or only fills the log.
    pub does_harm: bool,
    /// What it does.
    pub why: &'static str,
}

const fn harm(name: &'static str, value: &'static str, why: &'static str) -> Debugging {
    Debugging { name, value, does_harm: true, why }
}

const fn noise(name: &'static str, value: &'static str, why: &'static str) -> Debugging {
    Debugging { name, value, does_harm: false, why }
}

/// Sources: the "Debugging" section of NCCL's user guide, docs.pytorch.org
/// (`torch_nccl_environment_variables`, `distributed`), the CUDA programming guide, `fi_log` of
/// libfabric, UCX's `UCX_LOG_LEVEL`.
const DEBUGGING: [Debugging; 29] = [
    harm("NCCL_DEBUG", "TRACE", "every call of NCCL is printed by every rank"),
    noise("NCCL_DEBUG", "INFO", "every rank prints hundreds of lines at the start"),
    harm("NCCL_P2P_DISABLE", "1", "GPUs of a node exchange data through host memory instead of NVLink or PCIe"),
    harm("NCCL_P2P_DIRECT_DISABLE", "1", "GPUs of a process copy through intermediate buffers"),
    harm(
        "NCCL_SHM_DISABLE",
        "1",
        "processes of a node exchange data through the network; it hides a /dev/shm that is too small",
    ),
    harm("NCCL_IB_DISABLE", "1", "data goes over TCP although there may be RDMA"),
    harm("NCCL_NET", "Socket", "data goes over TCP although there may be RDMA or EFA"),
    harm("NCCL_GRAPH_FILE", "", "the file pins the rings, and fits one machine and one number of GPUs only"),
    harm("NCCL_NVLS_ENABLE", "0", "NVLink SHARP is off; it hides a Fabric Manager that does not work"),
    harm("NCCL_MNNVL_ENABLE", "0", "NVLink between nodes is off; it hides an IMEX domain that does not work"),
    harm("NCCL_PXN_DISABLE", "1", "messages take NICs far from their GPU"),
    harm("NCCL_DMABUF_ENABLE", "0", "GPUDirect RDMA falls back to a kernel module that may not be there"),
    harm("NCCL_CHECK_POINTERS", "1", "every collective checks its pointers first"),
    harm(
        "NCCL_ALGO",
        "",
        "NCCL cannot choose the algorithm by size any more, and since 2.24 fails where none of the list fits",
    ),
    harm(
        "NCCL_PROTO",
        "",
        "NCCL cannot choose the protocol any more, and LL128 where it is not supported corrupts data",
    ),
    harm("CUDA_LAUNCH_BLOCKING", "1", "the host waits for every kernel: nothing overlaps"),
    harm("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "every collective is preceded by one that compares its shapes"),
    noise("TORCH_DISTRIBUTED_DEBUG", "INFO", "statistics are collected in every step"),
    noise("TORCH_CPP_LOG_LEVEL", "INFO", "every rank prints what the process group does"),
    harm("TORCH_NCCL_BLOCKING_WAIT", "1", "the host waits for every collective: nothing overlaps"),
    harm("TORCH_NCCL_DESYNC_DEBUG", "1", "every collective is written to the store"),
    harm("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "ranks hang forever after an error instead of ending"),
    harm("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "every tensor is allocated by the driver"),
    harm("CUDA_ENABLE_COREDUMP_ON_EXCEPTION", "1", "a failing GPU writes its whole memory before the rank ends"),
    noise("UCX_LOG_LEVEL", "DEBUG", "every rank prints what UCX does"),
    harm("UCX_LOG_LEVEL", "TRACE", "every message of UCX is printed"),
    harm("FI_LOG_LEVEL", "TRACE", "every message of libfabric is printed"),
    noise("FI_LOG_LEVEL", "DEBUG", "every rank prints what libfabric does"),
    harm("HOROVOD_LOG_LEVEL", "TRACE", "every message of Horovod is printed"),
];

/// The effect of a debug setting.
pub fn debugging_only(name: &str, value: &str) -> Option<&'static Debugging> {
    DEBUGGING
        .iter()
        .find(|entry| entry.name == name && (entry.value.is_empty() || entry.value.eq_ignore_ascii_case(value.trim())))
}

/// Variables that differ between processes on one node. The launcher sets them, so one value for
/// all is always wrong. Sources: torchrun (`torch/distributed/run.py`),
/// `python/paddle/distributed/launch`, `mpirun(1)`, `srun(1)`.
const PER_PROCESS: [&str; 17] = [
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMIX_RANK",
    "HOROVOD_RANK",
    "HOROVOD_LOCAL_RANK",
    "PADDLE_GLOBAL_RANK",
    "PADDLE_LOCAL_RANK",
    "PADDLE_TRAINER_ENDPOINTS",
    "PADDLE_CURRENT_ENDPOINT",
    "PADDLE_TRAINERS_NUM",
    "FLAGS_selected_gpus",
];

/// Whether a variable differs between processes.
pub fn per_process(name: &str) -> bool {
    PER_PROCESS.contains(&name)
}

/// Whether an operator that sets up PyTorch's rendezvous sets this variable in every pod.
pub fn set_by_launcher(name: &str) -> bool {
    TORCH.iter().any(|variable| variable.name == name)
}

/// A variable through which Switchyard passes a node's position to a framework's launcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rendezvous {
    pub name: &'static str,
    /// Whether it differs between nodes, so that one value for all is wrong.
    pub differs: bool,
}

const fn same(name: &'static str) -> Rendezvous {
    Rendezvous { name, differs: false }
}

const fn differs(name: &'static str) -> Rendezvous {
    Rendezvous { name, differs: true }
}

const TORCH: [Rendezvous; 9] = [
    same("PET_NNODES"),
    same("PET_NPROC_PER_NODE"),
    differs("PET_NODE_RANK"),
    same("PET_MASTER_ADDR"),
    same("PET_MASTER_PORT"),
    same("MASTER_ADDR"),
    same("MASTER_PORT"),
    same("WORLD_SIZE"),
    differs("RANK"),
];
const PADDLE: [Rendezvous; 6] = [
    differs("POD_IP"),
    differs("PADDLE_MASTER"),
    same("PADDLE_NNODES"),
    differs("PADDLE_RANK"),
    same("PADDLE_JOB_ID"),
    same("PADDLE_NPROC_PER_NODE"),
];
const JAX: [Rendezvous; 3] = [same("JAX_COORDINATOR_ADDRESS"), same("JAX_NUM_PROCESSES"), differs("JAX_PROCESS_ID")];
const TENSORFLOW: [Rendezvous; 1] = [differs("TF_CONFIG")];
/// On node 0, where `mpirun` runs, and on the others, where its daemon runs.
const MPI: [Rendezvous; 14] = [
    differs("PRTE_MCA_prte_default_hostfile"),
    differs("PRTE_MCA_plm_ssh_agent"),
    differs("PRTE_MCA_oob_tcp_static_ipv4_ports"),
    differs("PMIX_SERVER_NSPACE"),
    differs("PRTE_MCA_hwloc_default_binding_policy"),
    differs("PRTE_MCA_ess"),
    differs("PRTE_MCA_ess_base_nspace"),
    differs("PRTE_MCA_ess_base_vpid"),
    differs("PRTE_MCA_ess_base_num_procs"),
    differs("PRTE_MCA_oob_tcp_max_recon_attempts"),
    differs("PRTE_MCA_oob_tcp_retry_delay"),
    same("PRTE_MCA_rml_base_radix"),
    same("HOROVOD_CONTROLLER"),
    same("HOROVOD_CPU_OPERATIONS"),
];

/// Variables that Switchyard sets, by `trainer.framework`. `plan::frameworks` defines the values.
pub fn rendezvous(framework: &str) -> &'static [Rendezvous] {
    match framework {
        "Torch" => &TORCH,
        "Paddle" => &PADDLE,
        "JAX" => &JAX,
        "TensorFlow" => &TENSORFLOW,
        "MPI" | "Horovod" => &MPI,
        _ => &[],
    }
}

/// Whether a variable shows that a pod uses Google Cloud's GPUDirect-TCPXO profile. The profile
/// sets NCCL's variables together, and its checker ends jobs in which one of them differs.
pub fn is_of_google_profile(name: &str) -> bool {
    name.starts_with("NCCL_FASTRAK_") || name == "NCCL_SHIMNET_GUEST_CONFIG_CHECKER_CONFIG_FILE"
}

/// Whether a variable names the GPUs visible to a process. The device plugin decides that.
pub fn is_visible_devices(name: &str) -> bool {
    ["CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"].contains(&name)
}

/// Whether a variable lists interfaces by full name. NCCL's `=` and `^` are part of the name here.
/// Sources: PyTorch's `ProcessGroupGloo.cpp` and TensorPipe, Horovod's `gloo_context.cc`.
pub fn is_interface_list(name: &str) -> bool {
    ["GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE"].contains(&name)
}

/// Prefixes of interfaces that do not reach other nodes: those of container engines and pod
/// networks (Calico, Flannel, Cilium, kube-proxy, OVN).
const VIRTUAL: [&str; 15] = [
    "docker",
    "virbr",
    "veth",
    "cali",
    "flannel",
    "cni",
    "cbr",
    "br-",
    "kube-",
    "nodelocaldns",
    "tunl",
    "cilium",
    "lxc",
    "dummy",
    "ovn",
];

/// Whether an interface of this name does not reach other nodes.
pub fn is_virtual_interface(name: &str) -> bool {
    VIRTUAL.iter().any(|start| name.starts_with(start))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::variables::nccl;

    #[test]
    fn debugging_settings_are_found_by_value() {
        assert!(debugging_only("NCCL_DEBUG", "trace").is_some_and(|found| found.does_harm));
        assert!(debugging_only("NCCL_DEBUG", "INFO").is_some_and(|found| !found.does_harm));
        assert!(debugging_only("NCCL_ALGO", "Ring").is_some());
        for (name, value) in [("NCCL_DEBUG", "WARN"), ("NCCL_P2P_DISABLE", "0"), ("CUDA_LAUNCH_BLOCKING", "0")] {
            assert_eq!(debugging_only(name, value), None);
        }
    }

    #[test]
    fn tables_are_consistent() {
        for entry in DEBUGGING.iter().filter(|entry| entry.name.starts_with(nccl::PREFIX)) {
            let key = nccl::find(entry.name).unwrap_or_else(|| panic!("{} is no key of NCCL", entry.name));
            assert!(entry.value.is_empty() || key.form.check(entry.value).is_ok(), "{entry:?}");
        }
        for name in
            READERS.iter().map(|reader| reader.name).chain(TORCH.map(|variable| variable.name)).chain(PER_PROCESS)
        {
            assert!(nccl::find(name).is_none() && renamed(name).is_none(), "{name}");
        }
        assert!(RENAMED.iter().all(|renamed| nccl::find(renamed.from).is_none()));
    }

    #[test]
    fn prefixes_match_only_at_the_start() {
        assert!(reader_of("NCCL_FASTRAK_CTRL_DEV").is_some() && reader_of("NCCL_ROOT").is_some());
        assert!(reader_of("NCCL_ROOTS").is_none() && reader_of("NCCL_FASTRAKX").is_none());
    }
}
