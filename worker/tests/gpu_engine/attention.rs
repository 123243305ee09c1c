//! 16-bit attention uses cuDNN where it accepts it, and our kernels otherwise: losses are equal,
//! and the log gives the reason.

use crate::pods::Job;
use crate::support::{Change, RunOutput, gpt, on, run};
use switchyard_cuda_libraries::environment;
use switchyard_worker_contract::config::*;

const STEPS: u64 = 4;
const FAULT: &str = "SWITCHYARD_REFERENCE_FAULT";
const BF16: Precision =
    Precision::Amp(Amp { compute_type: HalfType::Bf16, loss_scaling: LossScaling::Static { scale: 1.0 } });

/// A run in bf16.
fn with(model: Change, extra: &[(&str, &str)]) -> RunOutput {
    let job = Job::new(1, 1, STEPS).with(on(Device::Cuda, STEPS, |config| {
        model(config);
        config.precision = BF16;
    }));
    run(&job, &environment(), extra)
}

#[test]
fn a_cuda_graph_matches_eager_execution() {
    let [eager, captured] = [false, true].map(|graphs| {
        let job = Job::new(1, 1, 6).with(on(Device::Cuda, 6, |config| {
            gpt(config);
            config.precision = BF16;
            config.gpu = Gpu { graphs, ..config.gpu };
        }));
        run(&job, &environment(), &[("SWITCHYARD_REFERENCE_SEED", "11")])
    });
    assert_eq!(eager.codes, [0], "{}", eager.log);
    assert_eq!((eager.losses(), eager.digest), (captured.losses(), captured.digest));
}

#[test]
fn attention_that_cudnn_refuses_uses_our_kernels_and_the_log_says_why() {
    let by_cudnn = with(gpt, &[]);
    assert!(by_cudnn.log.contains("note: cuDNN 9.12.0 accepts 2 of 2 kinds of attention"), "{}", by_cudnn.log);
    // A fault, and the expected log lines.
    let cases = [
        ("cudnn-refused:0", "accepts 0 of 2 kinds", "2 heads, causal: forward: cuDNN: cudnnBackendFinalize(heuristic)"),
        ("cudnn-refused:13", "accepts 1 of 2 kinds", "2 heads, causal: gradient: cuDNN: "),
        ("cudnn-untaken:19", "accepts 1 of 2 kinds", "2 heads, causal: forward: cuDNN: cudnnBackendFinalize(plan)"),
        ("cudnn-version:91000", "note: attention: kernels of ours", "is 9.10.0, expected 9.11.0 or newer of version 9"),
    ];
    for (fault, counts, reason) in cases {
        let output = with(gpt, &[(FAULT, fault)]);
        assert_eq!(output.difference(&by_cudnn, 1e-2), None, "{fault}");
        assert!(output.log.contains(counts) && output.log.contains(reason), "{fault}: {}", output.log);
    }
}

#[test]
fn f32_attention_does_not_use_cudnn() {
    let libraries = environment();
    let output = run(&Job::new(1, 1, STEPS).with(on(Device::Cuda, STEPS, gpt)), &libraries, &[]);
    assert!(output.codes == [0] && !output.log.contains("attention"), "{}", output.log);
}
