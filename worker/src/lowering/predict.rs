//! Lower bounds of the time of each operation of a training step, on a GPU with known rates.
//!
//! An operation moves each of its bytes once and computes at the device's full rate, whichever
//! takes longer; no operation is shorter than a launch. Operations run one after another, as in a
//! rank's single stream.

use super::cost::{self, Costed};
use super::plan::Plan;
use super::refused::Refused;
use super::update::Update;
use std::collections::BTreeMap;
use switchyard_worker_contract::prediction::{Bound, Gpu, Operation, Part};

/// Totals over the launches of a kernel in one part of a step.
#[derive(Default)]
struct Sum {
    launches: u64,
    bytes: f64,
    flops: f64,
    seconds: f64,
    /// The seconds bound by memory, by arithmetic, and by the launch itself.
    bounds: [f64; 3],
}

/// All operations of a step with `micro_batches` micro-batches, slowest first.
///
/// # Errors
/// None for a plan and an update returned by their constructors.
pub(super) fn predict(plan: &Plan, update: &Update, micro_batches: u32, gpu: &Gpu) -> Result<Vec<Operation>, Refused> {
    let mut sums: BTreeMap<(Part, &'static str), Sum> = BTreeMap::new();
    let later = u64::from(micro_batches.saturating_sub(1));
    for (adds, times) in [(false, 1), (true, later)] {
        for of in cost::pass_costs(plan, update, adds)? {
            sum(&mut sums, &of, times, gpu);
        }
    }
    for of in cost::update_costs(update)? {
        sum(&mut sums, &of, 1, gpu);
    }
    sums.retain(|_, sum| sum.launches > 0);
    let mut operations: Vec<Operation> = sums.into_iter().map(|(of, sum)| sum.operation(of)).collect();
    operations.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    Ok(operations)
}

fn sum(sums: &mut BTreeMap<(Part, &'static str), Sum>, of: &Costed, times: u64, gpu: &Gpu) {
    let sum = sums.entry((of.part, of.name)).or_default();
    let (seconds, bound) = gpu.floor(&of.cost);
    let times_f64 = times as f64;
    sum.launches += times;
    sum.bytes += times_f64 * of.cost.bytes;
    sum.flops += times_f64 * of.cost.flops;
    sum.seconds += times_f64 * seconds;
    sum.bounds[bound as usize] += times_f64 * seconds;
}

impl Sum {
    fn operation(self, (part, name): (Part, &'static str)) -> Operation {
        let Sum { launches, bytes, flops, seconds, bounds: [memory, arithmetic, launch] } = self;
        let bound = match () {
            () if memory >= arithmetic && memory >= launch => Bound::Memory,
            () if arithmetic >= launch => Bound::Arithmetic,
            () => Bound::Launch,
        };
        Operation { part, name: name.to_owned(), launches, bytes, flops, seconds, bound }
    }
}
