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
use switchyard_ledger::queue::{PredictorSettings, QueueSettings};

/// The available rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    Switchyard,
    /// Switchyard with its run-time predictor.
    Predicting,
    StrictFifo,
    KueueLike,
    VolcanoLike,
    DefaultScheduler,
    Easy,
}

impl Policy {
    pub const ALL: [Policy; 7] = [
        Policy::Switchyard,
        Policy::Predicting,
        Policy::StrictFifo,
        Policy::KueueLike,
        Policy::VolcanoLike,
        Policy::DefaultScheduler,
        Policy::Easy,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Policy::Switchyard => "Switchyard",
            Policy::Predicting => "Switchyard with predictor",
            Policy::StrictFifo => "strict FIFO",
            Policy::KueueLike => "Kueue-like",
            Policy::VolcanoLike => "Volcano-like",
            Policy::DefaultScheduler => "default scheduler",
            Policy::Easy => "EASY",
        }
    }

    /// Creates the rule for an empty cluster whose hosts all look like `machine`.
    ///
    /// # Errors
    /// See [`Product::new`].
    pub fn rule(self, fabric: &Fabric, machine: &GPUTopology) -> Result<Box<dyn Rule>, String> {
        let peer = |order, places| Ok(Box::new(Peer::new(fabric, order, places)) as Box<dyn Rule>);
        match self {
            Policy::Switchyard => Ok(Box::new(Product::new(fabric, machine)?)),
            Policy::Predicting => {
                let predicts = |queue: &mut QueueSettings| queue.predictor = Some(PredictorSettings::default());
                Ok(Box::new(Product::new(fabric, machine)?.with_queue(predicts)))
            }
            Policy::StrictFifo => peer(Order::Strict, HostOrder::Domains),
            Policy::KueueLike => peer(Order::Skip, HostOrder::Domains),
            Policy::VolcanoLike => peer(Order::Skip, HostOrder::MostUsed),
            Policy::DefaultScheduler => peer(Order::Skip, HostOrder::LeastUsed),
            Policy::Easy => peer(Order::Easy, HostOrder::Domains),
        }
    }
}
