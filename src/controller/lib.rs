//! The controller: watches TrainJobs and carries them through their life. Wiring only; what to do is decided in `plan`.
//!
//! ```text
//! watch ─> Index ─> Queue ─> reconcile: Snapshot ─> plan (pure) ─> apply ─> status ─> events
//!            ^                                                                 │
//!            └─────────────────────── the API server <─────────────────────────┘
//! ```
//!
//! One controller leads (`election`); the others keep their caches warm. Correctness does not depend on that: see `apply`.
#![forbid(unsafe_code)]

mod admissions;
mod clock;
mod election;
mod logs;
mod metrics;
mod openings;
mod pages;
mod policies;
mod progress;
mod provisioning;
mod queue;
mod reader;
mod reconcile;
mod taints;
mod volumes;
mod warnings;
mod watch;
mod work;

pub mod apply;

pub use election::Timing;

use crate::apply::Executor;
use election::Leading;
use jiff::{SignedDuration, Timestamp};
use kube::Client;
use kube::runtime::events::Recorder;
use metrics::Metrics;
use pages::Health;
use queue::Queue;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use switchyard_ledger::index::Index;
use switchyard_ledger::job::Key;
use switchyard_plan::cluster::levels::Levels;
use switchyard_plan::objects::Defaults;
use switchyard_service::ServerClock;

/// What an operator sets.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Namespace of the Lease.
    pub namespace: String,
    /// Name of this controller among its replicas.
    pub identity: String,
    /// Address of health and metrics.
    pub listen: SocketAddr,
    /// Address of the metrics for those who may read them; `None`: everybody may, at `listen`.
    pub secure_metrics: Option<SocketAddr>,
    /// Leader election; `None`: this controller leads, and no other runs.
    pub election: Option<Timing>,
    /// Only TrainJobs of these namespaces; empty: of all.
    pub watch_namespaces: Vec<String>,
    /// Jobs reconciled at a time.
    pub concurrent_reconciles: usize,
    /// Settings that show in objects.
    pub defaults: Defaults,
    /// Levels of domains of nodes.
    pub levels: Levels,
    /// How long a node that does not report is waited for.
    pub node_grace: SignedDuration,
    /// Upper bound of `gangPolicy.scheduleTimeoutSeconds`.
    pub longest_schedule_timeout: SignedDuration,
    /// How long the head of the queue may hold nodes without beginning.
    pub longest_reservation: SignedDuration,
    /// Share of the nodes that must stop reporting together for the brake.
    pub fleet_brake_percent: u8,
    /// Run times stand in for limits that are missing.
    pub predicts: bool,
    /// By namespace; empty: what namespaces had does not count in the order of the queue.
    pub weights: BTreeMap<String, u32>,
    /// Priority classes whose `preemptionPolicy: Never` is for the scheduler alone: `topologyPolicy.preemption` decides about their jobs.
    pub gang_classes: BTreeSet<String>,
    /// Messages in the status of a job name jobs of other namespaces.
    pub names_others: bool,
    /// Class of the ProvisioningRequests by which gangs ask for nodes; `None`: they do not.
    pub provisioning_class: Option<String>,
    /// Admission policies that must be in force, each with a binding of its name.
    pub admission_policies: Vec<String>,
}

/// What everything in the controller shares.
#[derive(Clone)]
struct Context {
    settings: Arc<Settings>,
    client: Client,
    executor: Executor,
    index: Arc<Mutex<Index>>,
    queue: Queue<Key>,
    metrics: Arc<Metrics>,
    health: Arc<Health>,
    recorder: Recorder,
    leading: Leading,
    clock: Arc<ServerClock>,
    /// The last event could not be sent.
    silent: Arc<AtomicBool>,
}

impl Context {
    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn leads(&self) -> bool {
        self.leading.now()
    }

    /// The time by the API server.
    fn now(&self) -> Timestamp {
        self.clock.now()
    }
}

/// What ends the controller before it is asked to stop.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kubeconfig cannot be used.
    #[error("{0}")]
    Config(String),
    /// The address of health and metrics cannot be had.
    #[error("--listen {address}: {error}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why not.
        error: std::io::Error,
    },
    /// The address of the metrics cannot be had.
    #[error("--secure-metrics {address}: {error}")]
    SecureMetrics {
        /// The address.
        address: SocketAddr,
        /// Why not.
        error: std::io::Error,
    },
}

pub use work::run;
