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
    threshold: "Kernels, input, reductions, checkpoints and what lies between steps leave ≥ 10 % of the step: the GPU is idle. Without a profile: NVML saw no kernel in ≥ 10 % of at least 10 s, a note that names the longest wait.",
    gain: "Without CUDA graphs half of that; else not known.",
    source: "kineto and TensorFlow profiler (kernel launch time); 10 % is ours",
    check: |facts| {
        let kernels = match (known(facts), facts.gpu_idle_percent()) {
            (Ok(kernels), _) => kernels,
            (Err(_), Some(idle)) => return sampled_idle(facts, idle),
            (Err(finding), None) => return finding,
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

/// The finding without a profile: `idle` is the percentage of the run in which NVML saw no kernel.
fn sampled_idle(facts: &Facts, idle: f64) -> Finding {
    if idle < IDLE {
        return Finding::Fine(format!("NVML saw the GPUs idle {idle:.1} % of the run"));
    }
    let waits = [
        (Part::Input, "for the reader"),
        (Part::Communication, "for reductions"),
        (Part::Gather, "for updated weights"),
        (Part::Checkpoint, "for checkpoints"),
        (Part::Other, "between steps"),
    ];
    let longest = waits.into_iter().max_by(|(a, _), (b, _)| facts.step[*a].total_cmp(&facts.step[*b]));
    let cause = match longest {
        Some((part, what)) if facts.percent(facts.step[part]) >= IDLE / 2.0 => {
            format!("the longest wait is {what}, {}", of_step(facts, facts.step[part]))
        }
        _ => "no wait explains it; `engine.profile` shows the gaps between kernels".to_owned(),
    };
    Finding::Note(format!("NVML saw the GPUs idle {idle:.0} % of the run: {cause}"), Chart::StepTime)
}

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

#[cfg(test)]
mod tests {
    use super::super::{input, tests::healthy};
    use super::*;
    use switchyard_worker_contract::gpu::GpuReport;

    #[test]
    fn an_idle_gpu_is_explained_by_the_longest_wait() {
        let sampled = |seconds, busy| GpuReport { seconds, busy_seconds: Some(busy), ..GpuReport::default() };
        let mut facts = healthy();
        // The last one was monitored too briefly for a mean.
        facts.gpus = vec![sampled(100.0, 20.0), sampled(100.0, 80.0), sampled(9.0, 9.0)];
        let text = |facts: &Facts| match (IDLE_GPU.check)(facts) {
            Finding::Note(text, _) => text,
            other => panic!("{other:?}"),
        };
        let unexplained = text(&facts);
        assert!(
            unexplained.starts_with("NVML saw the GPUs idle 50 % of the run: no wait explains it"),
            "{unexplained}"
        );
        facts.step[Part::Input] = 66.0;
        let waits = text(&facts);
        assert!(waits.contains("the longest wait is for the reader, 66") && waits.ends_with("(40 %)"), "{waits}");
        let Finding::Advice(advice) = (input::INPUT_BOUND.check)(&facts) else { panic!("no advice") };
        assert!(advice.evidence.contains("NVML saw the GPUs idle 50 % of the run."), "{}", advice.evidence);
    }
}
