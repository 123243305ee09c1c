//! One pod of the gang, and its address for the other pods.

use super::ValidJob;
use switchyard_crds::TrainJob;
use switchyard_worker_contract::pod::RENDEZVOUS_PORT;

/// Number of ports from [`RENDEZVOUS_PORT`] up that host-network jobs choose from: 29400 to 29999,
/// below Linux's ephemeral ports (32768 up) and Kubernetes' node ports (30000 to 32767).
const HOST_PORTS: u16 = 600;

/// One pod of an attempt: a node of the job.
#[derive(Debug, Clone, Copy)]
pub struct GangPod<'a> {
    pub job: &'a TrainJob,
    pub valid: &'a ValidJob,
    /// Attempt number, from 1.
    pub attempt: u32,
    /// Rank of the node in the gang.
    pub node_rank: u32,
}

impl GangPod<'_> {
    pub(crate) fn nodes(&self) -> u32 {
        self.valid.request.nodes
    }

    pub(crate) fn processes(&self) -> u32 {
        self.valid.request.processes_per_node
    }

    /// Distinguishes the attempts of a job, so that a late process of an older attempt is not taken
    /// for one of this attempt.
    pub(crate) fn id(&self) -> String {
        format!("{}-{}", self.valid.name, self.attempt)
    }

    pub(crate) fn name(&self) -> String {
        self.valid.pod_name(self.attempt, self.node_rank)
    }

    /// Host name under which other nodes reach a node. A single node needs no name: its loopback
    /// address always works, even before DNS does.
    pub(crate) fn host(&self, node_rank: u32) -> String {
        if self.nodes() == 1 {
            return "127.0.0.1".into();
        }
        let namespace = self.job.metadata.namespace.as_deref().unwrap_or_default();
        format!("{}.{}.{namespace}.svc", self.valid.pod_name(self.attempt, node_rank), self.valid.name)
    }

    /// Port of node 0. A pod with its own network uses a fixed one. On a host network other jobs
    /// may listen, so each job and attempt takes one of [`HOST_PORTS`]. The port is declared, so
    /// the scheduler rejects a node where another pod has it, and the next attempt uses another
    /// one.
    pub(crate) fn port(&self) -> u16 {
        if !uses_host_network(self.job) {
            return RENDEZVOUS_PORT;
        }
        let uid = self.job.metadata.uid.as_deref().unwrap_or_default();
        let mixed = uid.bytes().fold(self.attempt, |mixed, byte| mixed.wrapping_mul(31).wrapping_add(byte.into()));
        RENDEZVOUS_PORT + (mixed % u32::from(HOST_PORTS)) as u16
    }
}

/// Whether the pods of a job use the host network.
fn uses_host_network(job: &TrainJob) -> bool {
    let spec = job.spec.template.as_ref().and_then(|template| template.spec.as_ref());
    spec.is_some_and(|spec| spec.host_network == Some(true))
}
