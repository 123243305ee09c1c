//! Epilogues are computed by cuBLASLt where it has an algorithm, and by our kernels otherwise:
//! losses are equal, and the log gives the reason.

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
fn losses_match_the_cpu_with_and_without_cublaslt_epilogues() {
    let models: [(&str, Change); 4] =
        [("gelu", mlp), ("relu", relu), ("bert, which has a tanh too", bert), ("gpt", gpt)];
    for (name, model) in models {
        for (precision, most) in
            [(Precision::Fp32, 1e-3), (amp(HalfType::Bf16, LossScaling::Static { scale: 1.0 }), 1e-2)]
        {
            let output = |extra: &[(&str, &str)]| {
                compare(name, (1, 1), extra, most, |config| {
                    model(config);
                    config.batch_merge = 2;
                    config.evaluation.every_steps = 10;
                    config.precision = precision;
                })
            };
            let whole = output(&[]);
            let bare = output(&[BARE]);
            assert!(!whole.log.contains(NOTE) && bare.log.contains(NOTE), "{name}: {}{}", whole.log, bare.log);
        }
    }
}

/// Operations per step: a product with its epilogue is one, whereas our kernels make it two.
#[test]
fn a_fused_bias_saves_one_operation() {
    let libraries = environment();
    let works = |extra: &[(&str, &str)]| {
        let output = run(&Job::new(1, 1, STEPS).with(on(Device::Cuda, STEPS, mlp)), &libraries, extra);
        output.calls.unwrap_or_else(|| panic!("{}", output.log)).works
    };
    // Two hidden layers and the head.
    assert_eq!(works(&[BARE]) - works(&[]), 3);
}
