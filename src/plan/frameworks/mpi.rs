//! Open MPI 5 without ssh, and Horovod on it.
//!
//! `mpirun` on node 0 starts a daemon on every other host by a remote shell, and waits until each has called back. Here the pods start
//! these daemons themselves: their identity is not made up by `mpirun` but known beforehand (namespace, port, position), so the remote
//! shell has nothing to do and is `true`. Daemons that are early retry until `mpirun` is up.
//!
//! Names are parameters of PRRTE 3, the run-time environment of Open MPI 5: `prte_info --all`.

use super::{Entry, GangPod, set};
use switchyard_worker_contract::pod::{CONFIG_DIR, HOST_FILE};

/// Seconds for which a daemon calls for node 0, whose image may take long to arrive. Then the pod fails: a program that never calls
/// `mpirun` must not keep the job open forever.
const PATIENCE: u32 = 1800;

/// Daemons know node 0 by number only, so the name is looked up first, which works as soon as the pod runs.
const DAEMON: &str = r#"for program in prted getent; do
  command -v "$program" >/dev/null || { echo "no $program in this image: MPI needs Open MPI 5 and getent on the PATH" >&2; exit 127; }
done
host=${SWITCHYARD_RENDEZVOUS%:*}
left=$PRTE_MCA_oob_tcp_max_recon_attempts
until address=$(getent ahostsv4 "$host"); do
  left=$((left - 1))
  [ "$left" -gt 0 ] || { echo "no address of $host" >&2; exit 1; }
  sleep 1
done
export PRTE_MCA_prte_hnp_uri="$PRTE_MCA_ess_base_nspace.0;tcp://${address%% *}:${SWITCHYARD_RENDEZVOUS##*:}:24"
exec prted"#;

pub(super) fn environment(pod: &GangPod<'_>) -> Vec<Entry> {
    let hosts = format!("{CONFIG_DIR}/{HOST_FILE}");
    // Without CPUs of its own a pod sees all of its node's, and every job there would bind its processes to the first ones.
    let unbound =
        set("PRTE_MCA_hwloc_default_binding_policy", "none", "which CPUs are the pod's own, mpirun cannot see");
    if pod.nodes() == 1 {
        return vec![set("PRTE_MCA_prte_default_hostfile", hosts, "the processes of the pod"), unbound];
    }
    let radix =
        set("PRTE_MCA_rml_base_radix", pod.nodes(), "every daemon talks to mpirun itself, not to other daemons");
    if pod.node_rank == 0 {
        return vec![
            set("PRTE_MCA_prte_default_hostfile", hosts, "nodes in the order of the placement, with their processes"),
            set("PRTE_MCA_plm_ssh_agent", "true", "no remote shell: the other pods start their daemons themselves"),
            set("PRTE_MCA_oob_tcp_static_ipv4_ports", pod.port(), "daemons call mpirun there"),
            set("PMIX_SERVER_NSPACE", pod.id(), "the name by which daemons call mpirun"),
            radix,
            unbound,
        ];
    }
    vec![
        set("PRTE_MCA_ess", "env", "the daemon takes its identity from the environment"),
        set("PRTE_MCA_ess_base_nspace", pod.id(), "the name by which it calls mpirun"),
        set("PRTE_MCA_ess_base_vpid", pod.node_rank, "its number is the node's line in the hostfile"),
        set("PRTE_MCA_ess_base_num_procs", pod.nodes(), "spec.trainer.numNodes"),
        set("PRTE_MCA_oob_tcp_max_recon_attempts", PATIENCE, "the daemon may be earlier than mpirun"),
        set("PRTE_MCA_oob_tcp_retry_delay", 1, "a second between two calls"),
        radix,
    ]
}

/// Horovod finds its ranks through MPI; its own launcher would need ssh.
pub(super) fn horovod(pod: &GangPod<'_>) -> Vec<Entry> {
    let mut entries = environment(pod);
    entries.push(set("HOROVOD_CONTROLLER", "mpi", "ranks come from mpirun"));
    entries.push(set("HOROVOD_CPU_OPERATIONS", "mpi", "data in host memory takes the same way"));
    entries
}

/// The command of the nodes after the first.
pub(super) fn daemon() -> Vec<String> {
    ["sh", "-c", DAEMON].map(str::to_string).into()
}

/// Lines in the order of node ranks. Hosts have the names that they give themselves; these names are never resolved.
pub(super) fn hostfile(pod: &GangPod<'_>) -> String {
    let slots = pod.processes();
    if pod.nodes() == 1 {
        return format!("localhost slots={slots}\n");
    }
    (0..pod.nodes()).map(|rank| format!("{}-{rank} slots={slots}\n", pod.id())).collect()
}
