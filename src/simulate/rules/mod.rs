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
use crate::trace::Row;
use std::collections::BTreeMap;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_ledger::queue::QueueSettings;
use switchyard_plan::cluster::queue_policy::QueuePolicy;

/// The available rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Switchyard's queue with the settings of the cluster's controller.
    Configured,
    /// The same, but first come, first served and without the predictor.
    Switchyard,
    /// The same with the run-time predictor.
    Predicting,
    /// Switchyard with the queue policy `Opportunistic`.
    Opportunistic,
    /// Switchyard with the queue policy `LeastAttainedService` and its run-time predictor, as the
    /// chart configures them by default.
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
    pub const ALL: [Policy; 11] = [
        Policy::Configured,
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
            Policy::Configured => "Switchyard, as configured",
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

    /// Whether the rule preempts jobs of equal priority, given the settings of the controller.
    pub fn preempts(self, configured: &QueueSettings) -> bool {
        self.queue(configured).map_or(self == Policy::KueuePreempting, |queue| queue.policy.preempts())
    }

    /// The settings of the product's queue; `None` for other rules.
    fn queue(self, configured: &QueueSettings) -> Option<QueueSettings> {
        let (policy, predicts) = match self {
            Policy::Configured => return Some(configured.clone()),
            Policy::Switchyard => (QueuePolicy::FirstComeFirstServed, false),
            Policy::Predicting => (QueuePolicy::FirstComeFirstServed, true),
            Policy::Opportunistic => (QueuePolicy::Opportunistic, false),
            Policy::LeastAttainedService => (QueuePolicy::LeastAttainedService, true),
            _ => return None,
        };
        let mut queue = configured.clone();
        queue.policy.policy = policy;
        queue.predictor = predicts.then(|| queue.predictor.unwrap_or_default());
        Some(queue)
    }

    /// Creates the rule for an empty cluster whose hosts all look like `machine`, and whose
    /// controller has these settings.
    ///
    /// # Errors
    /// See [`Product::new`].
    pub fn rule(
        self,
        fabric: &Fabric,
        machine: &GPUTopology,
        configured: &QueueSettings,
    ) -> Result<Box<dyn Rule>, String> {
        let (order, hosts) = match self {
            Policy::StrictFifo => (Order::Strict, HostOrder::Domains),
            Policy::KueueLike => (Order::Skip, HostOrder::Domains),
            Policy::KueuePreempting => (Order::PreemptNewer, HostOrder::Domains),
            Policy::VolcanoLike => (Order::Skip, HostOrder::MostUsed),
            Policy::DefaultScheduler => (Order::Skip, HostOrder::LeastUsed),
            Policy::Easy => (Order::Easy, HostOrder::Domains),
            Policy::Configured
            | Policy::Switchyard
            | Policy::Predicting
            | Policy::Opportunistic
            | Policy::LeastAttainedService => {
                let queue = self.queue(configured).unwrap_or_default();
                return Ok(Box::new(Product::new(fabric, machine)?.with_queue(|settings| *settings = queue)));
            }
        };
        Ok(Box::new(Peer::new(fabric, order, hosts)))
    }
}

/// The settings of a controller whose namespaces are the queues of these rows. The product's rules
/// name namespaces after the numbers of the queues.
pub fn settings_for(rows: &[Row], mut configured: QueueSettings) -> QueueSettings {
    let Some(weights) = &mut configured.weights else { return configured };
    let mut numbers: BTreeMap<&str, usize> = BTreeMap::new();
    for row in rows {
        let next = numbers.len();
        numbers.entry(row.queue.as_str()).or_insert(next);
    }
    let by_number = weights
        .by_namespace
        .iter()
        .filter_map(|(queue, weight)| Some((product::namespace(*numbers.get(queue.as_str())?), *weight)));
    weights.by_namespace = by_number.collect();
    configured
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use switchyard_ledger::queue::Weights;

    #[test]
    fn weights_follow_the_queues_of_the_trace() {
        let row = |queue: &str| Row {
            line: 2,
            submit: 0.0,
            duration: 1.0,
            gpus: 1,
            queue: queue.into(),
            limit: None,
            preemptible: None,
        };
        let rows = [row("vision"), row("text"), row("vision"), row("search")];
        let weights = Weights::new([("text", 2), ("search", 3), ("absent", 4)].map(|(a, b)| (a.into(), b)).into());
        let configured = QueueSettings { weights: Some(weights), ..QueueSettings::default() };
        let got = settings_for(&rows, configured).weights.unwrap().by_namespace;
        assert_eq!(got, [("team-1", 2), ("team-2", 3)].map(|(a, b)| (a.to_string(), b)).into());
    }
}
