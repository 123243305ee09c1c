//! PaddlePaddle: the inputs of `paddle.distributed.launch`
//! (python/paddle/distributed/launch/context/args_envs.py).

use super::{Entry, GangPod, Source, set};
use crate::job::ValidJob;

pub(super) fn environment(pod: &GangPod<'_>) -> Vec<Entry> {
    // The launcher on node 0 recognises itself as the master by comparing this with its own address
    // as text, so a host name does not work there.
    let host = if pod.node_rank == 0 { "$(POD_IP)".to_string() } else { pod.host(0) };
    vec![
        Entry { name: "POD_IP", source: Source::Field("status.podIP"), reason: "launch --host: address of this node" },
        set("PADDLE_MASTER", format!("{host}:{}", pod.port(0)), "launch --master: node 0 keeps the list of peers"),
        set("PADDLE_NNODES", pod.nodes(), "launch --nnodes: spec.trainer.numNodes"),
        set("PADDLE_RANK", pod.node_rank, "launch --rank: position of the node in the placement"),
        set("PADDLE_JOB_ID", pod.id(), "launch --job_id: keeps attempts apart"),
        set("PADDLE_NPROC_PER_NODE", pod.processes(), "launch --nproc_per_node: GPUs of the pod, or numProcPerNode"),
    ]
}

/// Role that runs parameter servers.
const SERVERS: &str = "ps";

/// Whether the job trains with parameter servers.
pub(super) fn has_servers(valid: &ValidJob) -> bool {
    valid.roles.iter().any(|role| role.name == SERVERS)
}

/// The inputs of `fleet.init` in parameter server mode, which needs no launcher
/// (python/paddle/distributed/fleet/base/role_maker.py, `PaddleCloudRoleMaker._ps_env`). A server
/// finds itself by comparing `POD_IP:PADDLE_PORT` with the list as text, so both are host names.
pub(super) fn with_servers(pod: &GangPod<'_>) -> Vec<Entry> {
    let Some(own) = pod.role() else { return Vec::new() };
    let is_server = own.name == SERVERS;
    if !is_server && !own.in_rendezvous {
        return Vec::new();
    }
    let hosts = |servers: bool| {
        let roles = pod.valid.roles.iter();
        let roles = roles.filter(move |role| (role.name == SERVERS) == servers && (servers || role.in_rendezvous));
        roles.flat_map(|role| role.node_ranks()).map(|rank| pod.address(rank)).collect::<Vec<_>>()
    };
    let (servers, trainers) = (hosts(true), hosts(false));
    let role = if is_server { "PSERVER" } else { "TRAINER" };
    let mut entries = vec![
        set("PADDLE_PSERVERS_IP_PORT_LIST", servers.join(","), "pods of role ps"),
        set("PADDLE_TRAINER_ENDPOINTS", trainers.join(","), "pods of the roles that join the rendezvous"),
        set("PADDLE_TRAINERS_NUM", trainers.len(), "number of trainers"),
        set("TRAINING_ROLE", role, "whether the pod is in role ps"),
        set("PADDLE_PORT", pod.port(pod.node_rank), "port of this pod in the lists"),
        set("POD_IP", pod.host(pod.node_rank), "host of this pod in the lists"),
    ];
    if !is_server {
        entries.push(set("PADDLE_TRAINER_ID", pod.node_rank, "position among the trainers"));
    }
    entries
}
