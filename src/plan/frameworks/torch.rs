//! PyTorch: option defaults for `torchrun` (`PET_` plus the option name,
//! torch/distributed/argparse_util.py), and the variables that `init_process_group("env://")` reads
//! in programs that are started without it.

use super::{Entry, GangPod, set};

pub(super) fn environment(pod: &GangPod<'_>) -> Vec<Entry> {
    let mut entries = vec![
        set("PET_NNODES", pod.nodes(), "torchrun --nnodes: spec.trainer.numNodes"),
        set("PET_NPROC_PER_NODE", pod.processes(), "torchrun --nproc-per-node: GPUs of the pod, or numProcPerNode"),
        set("PET_NODE_RANK", pod.node_rank, "torchrun --node-rank: position of the node in the placement"),
        set("PET_MASTER_ADDR", pod.host(0), "torchrun --master-addr: node 0"),
        set("PET_MASTER_PORT", pod.port(0), "torchrun --master-port: node 0 listens there"),
        set("MASTER_ADDR", pod.host(0), "node 0, for programs started without torchrun"),
        set("MASTER_PORT", pod.port(0), "node 0 listens there"),
    ];
    // With several processes per node only their launcher can set these. With one, no launcher is
    // needed.
    if (0..pod.nodes()).all(|rank| pod.valid.of_pod(rank).request.processes_per_node == 1) {
        entries.push(set("WORLD_SIZE", pod.nodes(), "one process per node: no launcher is needed"));
        entries.push(set("RANK", pod.node_rank, "one process per node: its rank is that of the node"));
    }
    entries
}
