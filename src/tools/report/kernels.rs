//! GPU kernels: their profile, and how far each is from the minimum time for its bytes and
//! arithmetic.

use super::sample::{Part, Parts};
use std::collections::BTreeMap;
use switchyard_worker_contract::kernels::{KernelTimes, Launches};
use switchyard_worker_contract::prediction::{Arithmetic, Cost, Gpu, Part as Phase};

/// Kernel data of a rank.
#[derive(Debug, Clone)]
pub struct KernelFacts {
    pub rank: u32,
    pub times: KernelTimes,
    /// From a device file.
    pub gpu: Option<Gpu>,
}

/// All launches of a kernel in a part of the step. Figures are per step.
#[derive(Debug, Clone, Default)]
pub struct Sum {
    pub launches: f64,
    pub ms: f64,
    pub bytes: f64,
    pub flops: f64,
    /// FLOP that tensor cores can do.
    pub tensor_flops: f64,
    /// Minimum time, if the GPU's rates are known.
    pub floor_ms: Option<f64>,
    /// Share of the minimum bound by memory, arithmetic and launches.
    pub bounds: [f64; 3],
}

/// `backward layer_norm_backward`.
pub fn title(part: Phase, name: &str) -> String {
    format!("{} {name}", word(part))
}

/// `forward`.
pub fn word(part: Phase) -> &'static str {
    match part {
        Phase::Forward => "forward",
        Phase::Backward => "backward",
        Phase::Update => "update",
    }
}

impl KernelFacts {
    /// Divides a sum over all profiled steps by their number.
    pub fn per_step(&self, sum: f64) -> f64 {
        sum / self.times.steps.max(1) as f64
    }

    /// Total time of all launches in a step, ms.
    pub fn kernel_ms(&self) -> f64 {
        1e3 * self.per_step(self.times.kernels.iter().map(|kernel| kernel.seconds).sum())
    }

    /// Time of the launches that satisfy `is`, ms.
    pub fn ms_of(&self, is: impl Fn(&Launches) -> bool) -> f64 {
        let seconds = self.times.kernels.iter().filter(|kernel| is(kernel)).map(|kernel| kernel.seconds);
        1e3 * self.per_step(seconds.sum())
    }

    /// Sums by part and name, longest first.
    pub fn sums(&self) -> Vec<((Phase, &str), Sum)> {
        let mut sums: BTreeMap<(Phase, &str), Sum> = BTreeMap::new();
        for kernel in &self.times.kernels {
            let sum = sums.entry((kernel.part, &kernel.name)).or_default();
            let launches = self.per_step(kernel.launches as f64);
            sum.launches += launches;
            sum.ms += 1e3 * self.per_step(kernel.seconds);
            sum.bytes += launches * kernel.cost.bytes;
            sum.flops += launches * kernel.cost.flops;
            sum.tensor_flops += if self.on_tensor_cores(kernel) { launches * kernel.cost.flops } else { 0.0 };
            if let Some(gpu) = &self.gpu {
                let (seconds, bound) = gpu.floor(&self.with_known_rate(&kernel.cost));
                *sum.floor_ms.get_or_insert_default() += 1e3 * launches * seconds;
                sum.bounds[bound as usize] += launches * seconds;
            }
        }
        let mut sums: Vec<_> = sums.into_iter().collect();
        sums.sort_by(|a, b| b.1.ms.total_cmp(&a.1.ms));
        sums
    }

    /// Whether tensor cores can take the factors of a product in their current layout.
    fn on_tensor_cores(&self, kernel: &Launches) -> bool {
        kernel.aligned
            && match kernel.cost.arithmetic {
                Arithmetic::Bf16 | Arithmetic::F16 | Arithmetic::Fp8 => true,
                Arithmetic::F32 => self.times.tf32,
                Arithmetic::Scalar => false,
            }
    }

    /// Device files have no TF32 rate, so only the bytes of a TF32 product bound its time.
    fn with_known_rate(&self, cost: &Cost) -> Cost {
        let known = cost.arithmetic != Arithmetic::F32 || !self.times.tf32;
        Cost { flops: if known { cost.flops } else { 0.0 }, ..*cost }
    }

    /// The arithmetic used for most of the products' FLOP.
    fn main_arithmetic(&self) -> Option<Arithmetic> {
        let mut flops: BTreeMap<Arithmetic, f64> = BTreeMap::new();
        let products = self.times.kernels.iter().filter(|kernel| kernel.cost.arithmetic != Arithmetic::Scalar);
        products.for_each(|kernel| {
            *flops.entry(kernel.cost.arithmetic).or_default() += kernel.launches as f64 * kernel.cost.flops;
        });
        flops.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).map(|(arithmetic, _)| arithmetic)
    }

    /// Share of the product rate that a step of this many ms achieves (MFU); recomputation does not
    /// count.
    pub fn utilization(&self, step_ms: f64) -> Option<f64> {
        let gpu = self.gpu.as_ref()?;
        let arithmetic = self.main_arithmetic()?;
        if (arithmetic == Arithmetic::F32 && self.times.tf32) || step_ms <= 0.0 {
            return None;
        }
        let needed = self.times.kernels.iter().map(|kernel| kernel.launches as f64 * kernel.cost.needed_flops);
        Some(self.per_step(needed.sum()) / (step_ms / 1e3) / gpu.rate(arithmetic))
    }

    /// Time of a step in which the GPU is idle although the rank does not wait for anything else,
    /// ms. Profiled steps are few, and launched operation by operation.
    pub fn idle_ms(&self, step: &Parts) -> f64 {
        let waits = [Part::Input, Part::Communication, Part::Gather, Part::Pipeline, Part::Checkpoint, Part::Other];
        let waits: f64 = waits.into_iter().map(|part| step[part]).sum();
        (step.total() - waits - self.kernel_ms()).max(0.0)
    }
}

/// Two steps with an aligned product, an unaligned one, a norm, and an optimizer.
#[cfg(test)]
pub(super) fn example(gpu: bool) -> KernelFacts {
    use serde_json::json;
    let launch =
        |part: &str, name: &str, [launches, bytes, flops]: [f64; 3], arithmetic: &str, aligned: bool, seconds: f64| {
            json!({
                "part": part, "name": name, "launches": launches as u64,
                "cost": {"bytes": bytes, "flops": flops, "neededFlops": flops / 2.0, "arithmetic": arithmetic},
                "half": part != "update", "aligned": aligned, "seconds": seconds,
            })
        };
    let times = json!({
        "attempt": 1, "steps": 2, "gpu": "GPU", "tf32": false,
        "kernels": [
            launch("forward", "product", [4.0, 1e6, 1e9], "bf16", true, 0.020),
            launch("forward", "product", [2.0, 1e6, 1e9], "bf16", false, 0.030),
            launch("backward", "layer_norm_backward", [2.0, 4e6, 0.0], "scalar", false, 0.040),
            launch("update", "optimizer_step", [2.0, 8e6, 0.0], "scalar", false, 0.010),
        ],
        "gaps": {"count": 8, "seconds": 0.004, "longestSeconds": 0.001},
        "copies": {"count": 2, "bytes": 2000, "seconds": 0.002},
    });
    // The minimum of a product is 1 ms by its bytes as well as by its arithmetic; the norm and the
    // optimizer are bound by bytes, at 4 and 8 ms.
    let device = json!({
        "name": "file", "source": "made up", "multiprocessors": 1, "sharedBytesPerBlock": 1, "memoryBytes": 1,
        "bytesPerSecond": 1e9, "products": {"f32": 1e9, "bf16": 1e12, "f16": 1e12}, "flopsPerSecond": 1e9,
    });
    KernelFacts {
        rank: 0,
        times: serde_json::from_value(times).unwrap(),
        gpu: gpu.then(|| serde_json::from_value(device).unwrap()),
    }
}
