//! Epilogues are computed by our kernels where cuBLASLt has no algorithm: losses are the CPU's, and
//! the log gives the reason. Those by cuBLASLt are compared in `losses`.

use crate::losses::compare;
use crate::pods::Job;
use crate::support::{Change, amp, bert, gpt, mlp, on, relu, run};
use switchyard_cuda_libraries::environment;
use switchyard_worker_contract::config::*;

const STEPS: u64 = 4;
const BARE: (&str, &str) = ("SWITCHYARD_REFERENCE_FAULT", "cublaslt-bare");
pub const NOTE: &str =
    "note: what follows products is computed by kernels of ours: cublasLtMatmulAlgoGetHeuristic: no algorithm for";

#[test]
fn losses_match_the_cpu_without_cublaslt_epilogues() {
    let models: [(&str, Change); 4] =
        [("gelu", mlp), ("relu", relu), ("bert, which has a tanh too", bert), ("gpt", gpt)];
    for (name, model) in models {
        for (precision, most) in
            [(Precision::Fp32, 1e-3), (amp(HalfType::Bf16, LossScaling::Static { scale: 1.0 }), 1e-2)]
        {
            let output = compare(name, (1, 1), &[BARE], most, |config| {
                model(config);
                config.batch_merge = 2;
                config.length = Length::Steps(10);
                config.evaluation.every_steps = 5;
                config.precision = precision;
            });
            assert!(output.log.contains(NOTE), "{name}: {}", output.log);
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
