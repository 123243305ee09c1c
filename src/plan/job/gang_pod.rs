//! One pod of the gang, and its address for the other pods.

use super::{LAUNCHER, RequestedPod, Role, ValidJob};
use switchyard_crds::TrainJob;
use switchyard_worker_contract::pod::RENDEZVOUS_PORT;

/// Number of ports from [`RENDEZVOUS_PORT`] up that host-network jobs choose from: 29400 to 29999,
/// below Linux's ephemeral ports (32768 up) and Kubernetes' node ports (30000 to 32767).
const HOST_PORTS: u16 = 600;

/// The network of a gang.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Network<'a> {
    /// Pods have names, and each has all ports.
    Cluster,
    /// Pods are processes of one machine, with these addresses by node rank. Ports differ too,
    /// because a program that listens on all addresses would collide with others on a common port.
    Loopback(&'a [Address]),
}

/// Where a pod listens on one machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// A loopback address.
    pub host: String,
    pub port: u16,
}

/// One pod of an attempt.
#[derive(Debug, Clone, Copy)]
pub struct GangPod<'a> {
    /// The job, or in a job with roles the job that the pod's role would be alone.
    pub job: &'a TrainJob,
    /// The whole job.
    pub valid: &'a ValidJob,
    /// Attempt number, from 1.
    pub attempt: u32,
    /// Rank of the node in the gang.
    pub node_rank: u32,
    pub network: Network<'a>,
}

impl<'a> GangPod<'a> {
    /// The pod of this rank in a cluster.
    pub fn new(job: &'a TrainJob, valid: &'a ValidJob, attempt: u32, node_rank: u32) -> GangPod<'a> {
        let job = valid.role_of(node_rank).map_or(job, |role| &role.job);
        GangPod { job, valid, attempt, node_rank, network: Network::Cluster }
    }

    /// The same pod on another network.
    pub(crate) fn on(self, network: Network<'a>) -> GangPod<'a> {
        GangPod { network, ..self }
    }

    pub(crate) fn role(&self) -> Option<&'a Role> {
        self.valid.role_of(self.node_rank)
    }

    /// Requirements of this pod.
    pub(crate) fn requested(&self) -> &'a RequestedPod {
        &self.valid.of_pod(self.node_rank).pod
    }

    /// Number of nodes in the pod's rendezvous: 1 for a pod that does not join it.
    pub(crate) fn nodes(&self) -> u32 {
        match self.role() {
            Some(role) if role.in_rendezvous => {
                self.valid.roles.iter().filter(|role| role.in_rendezvous).map(Role::pods).sum()
            }
            Some(_) => 1,
            None => self.valid.request.nodes,
        }
    }

    /// Rank in the pod's rendezvous.
    pub(crate) fn rendezvous_rank(&self) -> u32 {
        match self.role() {
            Some(role) if !role.in_rendezvous => 0,
            _ => self.node_rank,
        }
    }

    /// Position among the pods that exchange data by NCCL, Gloo or MPI, and the number of those
    /// pods: `(0, 1)` for any other pod.
    pub(crate) fn collective(&self) -> (u32, u32) {
        match (self.role(), self.valid.collective()) {
            (None, _) => (self.node_rank, self.valid.request.nodes),
            (Some(own), Some(role)) if own.first_node == role.first_node => {
                (self.node_rank - role.first_node, role.pods())
            }
            _ => (0, 1),
        }
    }

    pub(crate) fn processes(&self) -> u32 {
        self.valid.of_pod(self.node_rank).request.processes_per_node
    }

    /// Whether the pod only runs `mpirun`.
    pub(crate) fn is_launcher(&self, node_rank: u32) -> bool {
        node_rank == 0 && self.nodes() > 1 && self.valid.role_of(0).is_some_and(|role| role.name == LAUNCHER)
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
        if let Some(address) = self.loopback(node_rank) {
            return address.host.clone();
        }
        if self.valid.request.nodes == 1 {
            return "127.0.0.1".into();
        }
        let namespace = self.job.metadata.namespace.as_deref().unwrap_or_default();
        format!("{}.{}.{namespace}.svc", self.valid.pod_name(self.attempt, node_rank), self.valid.name)
    }

    /// Port on which a node listens. A pod with its own network uses a fixed one. On a host network
    /// other jobs may listen, so each job and attempt takes one of [`HOST_PORTS`]. The port is
    /// declared, so the scheduler rejects a node where another pod has it, and the next attempt
    /// uses another one.
    pub(crate) fn port(&self, node_rank: u32) -> u16 {
        if let Some(address) = self.loopback(node_rank) {
            return address.port;
        }
        if self.valid.of_pod(0).pod.spec.host_network != Some(true) {
            return RENDEZVOUS_PORT;
        }
        let uid = self.job.metadata.uid.as_deref().unwrap_or_default();
        let mixed = uid.bytes().fold(self.attempt, |mixed, byte| mixed.wrapping_mul(31).wrapping_add(byte.into()));
        RENDEZVOUS_PORT + (mixed % u32::from(HOST_PORTS)) as u16
    }

    /// The address of a node on one machine. `None` in a cluster.
    fn loopback(&self, node_rank: u32) -> Option<&'a Address> {
        match self.network {
            Network::Loopback(addresses) => addresses.get(node_rank as usize),
            Network::Cluster => None,
        }
    }

    /// Host and port of a node, as in `127.0.0.1:29400`.
    pub(crate) fn address(&self, node_rank: u32) -> String {
        format!("{}:{}", self.host(node_rank), self.port(node_rank))
    }
}
