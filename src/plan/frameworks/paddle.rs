//! PaddlePaddle: the inputs of `paddle.distributed.launch`
//! (python/paddle/distributed/launch/context/args_envs.py).

use super::{Entry, GangPod, Source, set};

pub(super) fn environment(pod: &GangPod<'_>) -> Vec<Entry> {
    // The launcher on node 0 recognises itself as the master by comparing this with its own address
    // as text, so a host name does not work there.
    let host = if pod.node_rank == 0 { "$(POD_IP)".to_string() } else { pod.host(0) };
    vec![
        Entry { name: "POD_IP", source: Source::Field("status.podIP"), reason: "launch --host: address of this node" },
        set("PADDLE_MASTER", format!("{host}:{}", pod.port()), "launch --master: node 0 keeps the list of peers"),
        set("PADDLE_NNODES", pod.nodes(), "launch --nnodes: spec.trainer.numNodes"),
        set("PADDLE_RANK", pod.node_rank, "launch --rank: position of the node in the placement"),
        set("PADDLE_JOB_ID", pod.id(), "launch --job_id: keeps attempts apart"),
        set("PADDLE_NPROC_PER_NODE", pod.processes(), "launch --nproc_per_node: GPUs of the pod, or numProcPerNode"),
    ]
}
