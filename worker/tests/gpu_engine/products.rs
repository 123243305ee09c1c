//! What follows products is computed by cuBLASLt where it has an algorithm for that, else by our kernels: with the same losses, and the log says why.

use crate::losses::compare;
use crate::pods::Job;
use crate::support::{Change, amp, bert, gpt, mlp, on, run};
use switchyard_cuda_libraries::environment;
use switchyard_worker_contract::config::*;

const STEPS: u64 = 4;
const BARE: (&str, &str) = ("SWITCHYARD_REFERENCE_FAULT", "cublaslt-bare");
const NOTE: &str =
    "note: what follows products is computed by kernels of ours: cublasLtMatmulAlgoGetHeuristic: no algorithm for";

fn relu(config: &mut EngineConfig) {
    mlp(config);
    config.model = Model::Mlp(Mlp { hidden_sizes: vec![24, 13], activation: Activation::Relu });
}

#[test]
fn with_and_without_it_losses_are_those_on_cpus() {
    let models: [(&str, Change); 4] =
        [("gelu", mlp), ("relu", relu), ("bert, which has a tanh too", bert), ("gpt", gpt)];
    for (name, model) in models {
        for (precision, most) in
            [(Precision::Fp32, 1e-3), (amp(HalfType::Bf16, LossScaling::Static { scale: 1.0 }), 1e-2)]
        {
            let told = |extra: &[(&str, &str)]| {
                compare(name, (1, 1), extra, most, |config| {
                    model(config);
                    config.batch_merge = 2;
                    config.evaluation.every_steps = 10;
                    config.precision = precision;
                })
            };
            let whole = told(&[]);
            let bare = told(&[BARE]);
            assert!(!whole.log.contains(NOTE) && bare.log.contains(NOTE), "{name}: {}{}", whole.log, bare.log);
        }
    }
}

/// Works of a step: a product with what follows it is one, where a kernel of ours makes two of it.
#[test]
fn a_step_has_a_work_less_for_each_bias() {
    let libraries = environment();
    let works = |extra: &[(&str, &str)]| {
        let told = run(&Job::new(1, 1, STEPS).with(on(Device::Cuda, STEPS, mlp)), &libraries, extra);
        told.calls.unwrap_or_else(|| panic!("{}", told.log)).works
    };
    // Two hidden layers and the head.
    assert_eq!(works(&[BARE]) - works(&[]), 3);
}
