//! JAX: one process per node, which drives all GPUs of its pod.
//!
//! `jax.distributed.initialize()` reads the first variable itself. It takes the other two only from
//! schedulers that it knows (jax/_src/distributed.py and clusters/ of 0.10), so the program passes
//! them on: docs/frameworks.md.

use super::{Entry, GangPod, set};

pub(super) fn environment(pod: &GangPod<'_>) -> Vec<Entry> {
    vec![
        set("JAX_COORDINATOR_ADDRESS", pod.address(0), "process 0, on node 0, listens there"),
        set("JAX_NUM_PROCESSES", pod.nodes(), "one process per node"),
        set("JAX_PROCESS_ID", pod.node_rank, "position of the node in the placement"),
    ]
}
