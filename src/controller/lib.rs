//! The controller: watches TrainJobs and reconciles them. This crate is wiring only; all decisions
//! are made in `plan`.
//!
//! ```text
//! watch ─> Index ─> Queue ─> reconcile: Snapshot ─> plan (pure) ─> apply ─> status ─> events
//!            ^                                                                 │
//!            └─────────────────────── the API server <─────────────────────────┘
//! ```
//!
//! One controller leads (`election`); the others keep their caches warm. Correctness does not
//! depend on the election (see `apply`).
#![forbid(unsafe_code)]

mod admissions;
mod clock;
mod election;
mod endpoints;
mod log_heads;
mod logs;
mod main_loop;
mod metrics;
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

pub mod apply;
pub mod daemon;

pub use election::Timing;

pub use switchyard_ledger::queue::{PredictorSettings, QueueSettings, Weights};

use crate::apply::Executor;
use election::Leadership;
use endpoints::Health;
use jiff::{SignedDuration, Timestamp};
use kube::Client;
use kube::runtime::events::Recorder;
use metrics::Metrics;
use queue::Queue;
use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use switchyard_ledger::index::Index;
use switchyard_ledger::job::Key;
use switchyard_plan::cluster::levels::Levels;
use switchyard_plan::objects::Defaults;
use switchyard_service::ServerClock;

/// The operator's settings.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Namespace of the Lease.
    pub namespace: String,
    /// Identity of this controller among its replicas.
    pub identity: String,
    /// Address of the health and metrics endpoints.
    pub listen: SocketAddr,
    /// Address of the metrics endpoint for authorized readers; `None` if metrics are public, at
    /// `listen`.
    pub secure_metrics: Option<SocketAddr>,
    /// Leader election; `None` if this is the only controller.
    pub election: Option<Timing>,
    /// Namespaces of the TrainJobs to reconcile; all if empty.
    pub watch_namespaces: Vec<String>,
    /// Number of jobs reconciled concurrently.
    pub concurrent_reconciles: usize,
    /// Settings that affect the objects of jobs.
    pub defaults: Defaults,
    /// Levels of the node topology.
    pub levels: Levels,
    /// How long to wait for a node that does not report.
    pub node_grace: SignedDuration,
    /// Upper bound of `gangPolicy.scheduleTimeoutSeconds`.
    pub longest_schedule_timeout: SignedDuration,
    /// Percentage of the nodes that must stop reporting together to trip the circuit breaker.
    pub mass_outage_percent: u8,
    pub queue: QueueSettings,
    /// Class of the ProvisioningRequests with which gangs request nodes; `None` if they do not.
    pub provisioning_class: Option<String>,
    /// Admission policies that must be in force, each with a binding of the same name.
    pub admission_policies: Vec<String>,
}

/// State shared by all tasks of the controller.
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
    leadership: Leadership,
    clock: Arc<ServerClock>,
    /// Whether the last event could not be sent.
    events_failing: Arc<AtomicBool>,
}

impl Context {
    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_leader(&self) -> bool {
        self.leadership.is_held()
    }

    /// The API server's time.
    fn now(&self) -> Timestamp {
        self.clock.now()
    }
}

/// Why the controller exits before it is stopped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kubeconfig is invalid.
    #[error("{0}")]
    Config(String),
    /// The address of the health and metrics endpoints cannot be bound.
    #[error("--listen {address}: {error}")]
    Listen {
        address: SocketAddr,
        /// Cause of the failure.
        error: std::io::Error,
    },
    /// The address of the secure metrics endpoint cannot be bound.
    #[error("--secure-metrics {address}: {error}")]
    SecureMetrics {
        address: SocketAddr,
        /// Cause of the failure.
        error: std::io::Error,
    },
}

pub use main_loop::run;
