//! Rules that respond to the same events: the product's own, and peers' rules implemented from
//! their documentation. All start gangs as a whole; otherwise half-started gangs would deadlock and
//! the comparison would be meaningless.

mod peer;
mod pool;
mod product;

pub use peer::{HostOrder, Order, Peer};
pub use pool::{Pool, PoolOrder};
pub use product::Product;

use crate::fabric::Fabric;
use crate::replay::Rule;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_ledger::queue::PredictorSettings;
use switchyard_plan::cluster::queue_policy::QueuePolicy;

/// The available rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Switchyard's queue, first come, first served.
    Switchyard,
    /// The same with the run-time predictor.
    Predicting,
    /// Switchyard with the queue policy `Opportunistic`.
    Opportunistic,
    /// Switchyard with the queue policy `LeastAttainedService` and its run-time predictor, as the
    /// chart sets it up.
    LeastAttainedService,
    StrictFifo,
    KueueLike,
    /// Kueue-like, with `withinClusterQueue: LowerOrNewerEqualPriority`.
    KueuePreempting,
    VolcanoLike,
    DefaultScheduler,
    Easy,
}

impl Policy {
    pub const ALL: [Policy; 10] = [
        Policy::Switchyard,
        Policy::Predicting,
        Policy::Opportunistic,
        Policy::LeastAttainedService,
        Policy::StrictFifo,
        Policy::KueueLike,
        Policy::KueuePreempting,
        Policy::VolcanoLike,
        Policy::DefaultScheduler,
        Policy::Easy,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Policy::Switchyard => "Switchyard",
            Policy::Predicting => "Switchyard with predictor",
            Policy::Opportunistic => "Switchyard, opportunistic",
            Policy::LeastAttainedService => "Switchyard, least attained service",
            Policy::StrictFifo => "strict FIFO",
            Policy::KueueLike => "Kueue-like",
            Policy::KueuePreempting => "Kueue-like, preempting newer",
            Policy::VolcanoLike => "Volcano-like",
            Policy::DefaultScheduler => "default scheduler",
            Policy::Easy => "EASY",
        }
    }

    /// Whether the rule preempts jobs of equal priority.
    pub fn preempts(self) -> bool {
        matches!(self, Policy::Opportunistic | Policy::LeastAttainedService | Policy::KueuePreempting)
    }

    /// Creates the rule for an empty cluster whose hosts all look like `machine`.
    ///
    /// # Errors
    /// See [`Product::new`].
    pub fn rule(self, fabric: &Fabric, machine: &GPUTopology) -> Result<Box<dyn Rule>, String> {
        let peer = |order, places| Ok(Box::new(Peer::new(fabric, order, places)) as Box<dyn Rule>);
        let product = |policy, predicts: bool| -> Result<Box<dyn Rule>, String> {
            Ok(Box::new(Product::new(fabric, machine)?.with_queue(|queue| {
                queue.policy.policy = policy;
                queue.predictor = predicts.then(PredictorSettings::default);
            })))
        };
        match self {
            Policy::Switchyard => product(QueuePolicy::FirstComeFirstServed, false),
            Policy::Predicting => product(QueuePolicy::FirstComeFirstServed, true),
            Policy::Opportunistic => product(QueuePolicy::Opportunistic, false),
            Policy::LeastAttainedService => product(QueuePolicy::LeastAttainedService, true),
            Policy::StrictFifo => peer(Order::Strict, HostOrder::Domains),
            Policy::KueueLike => peer(Order::Skip, HostOrder::Domains),
            Policy::KueuePreempting => peer(Order::PreemptNewer, HostOrder::Domains),
            Policy::VolcanoLike => peer(Order::Skip, HostOrder::MostUsed),
            Policy::DefaultScheduler => peer(Order::Skip, HostOrder::LeastUsed),
            Policy::Easy => peer(Order::Easy, HostOrder::Domains),
        }
    }
}
