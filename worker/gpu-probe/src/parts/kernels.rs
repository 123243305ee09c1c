//! Time of each kernel in a training step, compared with the lower bound from its bytes and FLOPs
//! at the measured rates.

use super::steps::{self, Case};
use super::{Probe, rates};
use crate::numbers::short;
use crate::outcome::Outcome;
use crate::scratch;
use crate::worker::check_paths;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use switchyard_worker_contract::config::{EngineConfig, Length, Profile};
use switchyard_worker_contract::kernels::KernelTimes;
use switchyard_worker_contract::prediction::{Gpu, Part};

/// Untimed warm-up steps, which load code and touch memory.
const WARM_UP: u64 = 10;
const TIMED: u32 = 5;

/// Allowed time of our memory-bound kernels as a multiple of the lower bound.
const GOAL: f64 = 1.4;
/// The kernels that must meet it.
const JUDGED: [&str; 4] = ["layer_norm_forward", "layer_norm_backward", "cross_entropy", "optimizer_step"];

pub(super) fn gpt(probe: &Probe) -> Result<Value, Outcome> {
    run(probe, "gpt", &steps::gpt_124m_case(probe))
}

pub(super) fn resnet(probe: &Probe) -> Result<Value, Outcome> {
    run(probe, "resnet", &steps::resnet50_case(probe))
}

fn run(probe: &Probe, name: &str, case: &Case) -> Result<Value, Outcome> {
    let gpu = rates::known(probe)?;
    let worker = probe.worker()?;
    let config = steps::largest(probe, &worker, case)?;
    let (before, timed) = if probe.rehearse { (1, 2) } else { (WARM_UP, TIMED) };
    let profile = Some(Profile { from_step: before + 1, steps: timed });
    let length = Length::Steps(before + u64::from(timed));
    let config = EngineConfig { profile, length, ..config };
    let name = format!("kernels-{name}");
    let ran = worker.train(&name, &config, 1)?;
    let times = times(&name)?;
    let rows = rows(&times, &gpu);
    let step_ms = 1e3 * times.kernels.iter().map(|kernel| kernel.seconds).sum::<f64>() / times.steps.max(1) as f64;
    let items = f64::from(config.batch_size_per_process * case.items);
    let needed: f64 = times.kernels.iter().map(|kernel| kernel.launches as f64 * kernel.cost.needed_flops).sum();
    let figures = json!({
        "device": gpu.name, "batch": config.batch_size_per_process, "steps": times.steps, "kernelMs": short(step_ms),
        "neededTFLOP": short(needed / times.steps.max(1) as f64 / 1e12),
        "palmTFLOP": steps::palm_flops(&config.model).map(|flops| short(flops * items / 1e12)),
        "gapMs": short(1e3 * times.gaps.seconds / times.steps.max(1) as f64), "bytesPerSecond": gpu.bytes_per_second,
        "kernels": rows,
    });
    check_paths(&ran.paths(), figures)
}

/// Reads the kernel times that the worker wrote.
pub(super) fn times(name: &str) -> Result<KernelTimes, Outcome> {
    let failed = |text: String| Outcome::failed("times of kernels", text);
    let folder = scratch::folder(name).map_err(|error| failed(error.to_string()))?;
    let file = folder.join("record/rank-0.kernels.json");
    let bytes = std::fs::read(&file).map_err(|error| failed(format!("{}: {error}", file.display())))?;
    serde_json::from_slice(&bytes).map_err(|error| failed(format!("{}: {error}", file.display())))
}

/// One row per kernel and part of the step, slowest first.
fn rows(times: &KernelTimes, gpu: &Gpu) -> Vec<Value> {
    let mut sums: BTreeMap<(Part, &str), [f64; 4]> = BTreeMap::new();
    for kernel in &times.kernels {
        let [launches, seconds, floor, bytes] = sums.entry((kernel.part, &kernel.name)).or_default();
        let count = kernel.launches as f64;
        *launches += count;
        *seconds += kernel.seconds;
        *floor += count * gpu.floor(&kernel.cost).0;
        *bytes += count * kernel.cost.bytes;
    }
    let mut sums: Vec<_> = sums.into_iter().collect();
    sums.sort_by(|a, b| b.1[1].total_cmp(&a.1[1]));
    let steps = times.steps.max(1) as f64;
    let row = |((part, name), [launches, seconds, floor, bytes]): ((Part, &str), [f64; 4])| {
        let ratio = seconds / floor;
        let goal = JUDGED.contains(&name).then_some(GOAL);
        json!({
            "part": part, "kernel": name, "launches": launches / steps, "ms": short(1e3 * seconds / steps),
            "leastMs": short(1e3 * floor / steps), "ratio": short(ratio), "goal": goal,
            "isWithinGoal": goal.map(|goal| ratio <= goal), "GBs": short(bytes / seconds / 1e9),
        })
    };
    sums.into_iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use switchyard_worker_contract::kernels::Launches;
    use switchyard_worker_contract::prediction::{Arithmetic, Cost, Rates};

    #[test]
    fn each_kernel_is_compared_with_the_lower_bound_of_its_launches() {
        let gpu = Gpu {
            name: "slow".into(),
            source: String::new(),
            multiprocessors: 1,
            shared_bytes_per_block: 1,
            memory_bytes: 1,
            bytes_per_second: 1e3,
            products: Rates { f32: 1.0, bf16: 1e3, f16: 1.0, fp8: None },
            flops_per_second: 1.0,
            launch_seconds: None,
        };
        let launches = |part, name: &str, bytes, flops, seconds| Launches {
            part,
            name: name.into(),
            launches: 2,
            cost: Cost { bytes, flops, needed_flops: flops, arithmetic: Arithmetic::Bf16 },
            half: true,
            aligned: true,
            seconds,
        };
        let kernels = vec![
            launches(Part::Forward, "cross_entropy", 1e3, 0.0, 2.4),
            launches(Part::Forward, "cross_entropy", 3e3, 0.0, 6.4),
            launches(Part::Backward, "product", 1e3, 5e3, 12.0),
            launches(Part::Update, "optimizer_step", 1e3, 0.0, 3.0),
        ];
        let times = KernelTimes { steps: 2, kernels, ..KernelTimes::default() };
        let rows = rows(&times, &gpu);
        let columns = ["kernel", "launches", "ms", "leastMs", "ratio", "isWithinGoal"];
        let shown: Vec<Value> = rows.iter().map(|row| columns.map(|name| row[name].clone()).into()).collect();
        let expected = [
            json!(["product", 1.0, 6e3, 5e3, 1.2, null]),
            json!(["cross_entropy", 2.0, 4.4e3, 4e3, 1.1, true]),
            json!(["optimizer_step", 1.0, 1.5e3, 1e3, 1.5, false]),
        ];
        assert_eq!(shown, expected);
    }
}
