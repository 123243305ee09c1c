//! GPU kernels: are they far from their minimum time, is the GPU idle, are products computed
//! exactly?

use super::{Advice, Basis, Change, Chart, Field, Finding, LOSS_MAY_CHANGE, Rule, ms, of_step};
use crate::report::facts::Facts;
use crate::report::kernels::{KernelFacts, title};
use crate::report::sample::Part;
use switchyard_worker_contract::config::{Device, Matmul};
use switchyard_worker_contract::prediction::Arithmetic;

/// Kernels above this share of the step are checked, percent.
const LARGE: f64 = 5.0;
/// Acceptable ratio of a kernel's time to its minimum.
const FAR: f64 = 2.0;
/// Acceptable idle share of a GPU in the step, percent.
const IDLE: f64 = 10.0;
/// Acceptable share of exact products in the step, percent.
const EXACT: f64 = 10.0;

const COMPUTE: &[Part] = &[Part::Forward, Part::Backward, Part::Optimizer];
const PRODUCTS: &[Part] = &[Part::Forward, Part::Backward];

/// The kernels, or the finding if they are unknown.
fn known(facts: &Facts) -> Result<&KernelFacts, Finding> {
    match (&facts.kernels, facts.on_gpu) {
        (Some(kernels), _) => Ok(kernels),
        (None, Some(true)) => Err(Finding::Unknown("kernel times: enable them with `engine.profile`")),
        (None, _) => Err(Finding::NotApplicable),
    }
}

pub(super) const SLOW_KERNEL: Rule = Rule {
    id: "slow-kernel",
    question: 1,
    threshold: "With `--device`, a kernel takes ≥ 5 % of the step and ≥ 2 times what its bytes and its arithmetic need.",
    gain: "None: a note. What it needs is a bound that nothing reaches.",
    source: "ours",
    check: |facts| {
        let kernels = match known(facts) {
            Ok(kernels) => kernels,
            Err(finding) => return finding,
        };
        if kernels.gpu.is_none() {
            return Finding::Unknown("the rates of the GPU: `--device FILE` gives them");
        }
        let sums = kernels.sums();
        let far = sums.iter().filter_map(|((part, name), sum)| {
            let floor = sum.floor_ms.filter(|floor| *floor > 0.0)?;
            (facts.percent(sum.ms) >= LARGE && sum.ms >= FAR * floor)
                .then(|| format!("{} {} ms, at least {}", title(*part, name), ms(sum.ms), ms(floor)))
        });
        let far: Vec<String> = far.collect();
        match far.is_empty() {
            true => Finding::Fine("no large kernel takes twice what it needs".into()),
            false => Finding::Note(format!("kernels far from what they need: {}", far.join("; ")), Chart::Kernels),
        }
    },
};

pub(super) const IDLE_GPU: Rule = Rule {
    id: "gpu-idle",
    question: 3,
    threshold: "Kernels, input, reductions, checkpoints and what lies between steps leave ≥ 10 % of the step: the GPU is idle.",
    gain: "Without CUDA graphs half of that; else not known.",
    source: "kineto and TensorFlow profiler (kernel launch time); 10 % is ours",
    check: |facts| {
        let kernels = match known(facts) {
            Ok(kernels) => kernels,
            Err(finding) => return finding,
        };
        let idle = kernels.idle_ms(&facts.step);
        if facts.percent(idle) < IDLE {
            return Finding::Fine(format!("the GPU is idle {:.1} % of the step", facts.percent(idle)));
        }
        let Some(engine) = &facts.engine else { return Finding::Unknown("the engine configuration") };
        let graphs = (!engine.gpu.graphs && engine.device == Device::Cuda)
            .then(|| Change::set([Field::word("engine.cudaGraphs", "Enabled")], idle / 2.0, Basis::Guess));
        let evidence = format!("The GPU is idle for {} of a step.", of_step(facts, idle));
        Advice::about(COMPUTE, Chart::Kernels, evidence, [graphs])
    },
};

pub(super) const EXACT_PRODUCTS: Rule = Rule {
    id: "exact-products",
    question: 6,
    threshold: "Products of 32-bit factors without TF32 take ≥ 10 % of the step on a GPU.",
    gain: "Half of their time.",
    source: "PyTorch (TF32 for products is a switch); the bound is ours",
    check: |facts| {
        let kernels = match known(facts) {
            Ok(kernels) => kernels,
            Err(finding) => return finding,
        };
        let Some(engine) = &facts.engine else { return Finding::Unknown("the engine configuration") };
        if engine.device != Device::Cuda {
            return Finding::NotApplicable;
        }
        let exact = kernels.ms_of(|kernel| kernel.cost.arithmetic == Arithmetic::F32);
        if engine.gpu.matmul == Matmul::Tf32 || facts.percent(exact) < EXACT {
            return Finding::Fine(format!("exact products {:.1} % of the step", facts.percent(exact)));
        }
        let evidence = format!("Products of 32-bit factors are exact and take {} of a step.", of_step(facts, exact));
        let tf32 = Change::set([Field::word("engine.precision.matmul", "TF32")], exact / 2.0, Basis::Guess);
        Advice::about(PRODUCTS, Chart::Kernels, evidence, [Some(tf32.with_remark(LOSS_MAY_CHANGE))])
    },
};
