//! Training with FP8 matrix products.

use crate::pods::Job;
use crate::support::{Change, RunOutput, amp, bert, gpt, mlp, on, run};
use std::sync::LazyLock;
use switchyard_cuda_libraries::environment;
use switchyard_worker_contract::config::*;

const STEPS: u64 = 30;
const STATIC: LossScaling = LossScaling::Static { scale: 1.0 };

fn with(model: Change, matmul: Matmul, extra: &[(&str, &str)], change: impl Fn(&mut EngineConfig)) -> RunOutput {
    let job = Job::new(1, 1, STEPS).with(on(Device::Cuda, STEPS, |config| {
        model(config);
        config.batch_size_per_process = 16;
        config.precision = amp(HalfType::Bf16, STATIC);
        config.gpu.matmul = matmul;
        change(config);
    }));
    run(&job, &environment(), extra)
}

static GPT_IN_BF16: LazyLock<RunOutput> = LazyLock::new(|| with(gpt, Matmul::Ieee, &[], |_| ()));

#[test]
fn losses_match_bf16_within_rounding() {
    let models: [(&str, Change, &str); 2] =
        [("gpt", gpt, "note: 5 of 5 linear layers"), ("bert", bert, "linear layers are computed in 8 bits")];
    for (name, model, note) in models {
        let half = if name == "gpt" { &*GPT_IN_BF16 } else { &with(model, Matmul::Ieee, &[], |_| ()) };
        let narrow = with(model, Matmul::Fp8, &[("SWITCHYARD_REFERENCE_SEED", "3")], |_| ());
        assert_eq!(narrow.difference(half, 2e-2), None, "{name}");
        assert_ne!(narrow.digest, half.digest, "{name}");
        assert_eq!(narrow.kernel.as_deref(), Some("cuda sm_90, NVRTC 13.0, FP8"), "{name}");
        assert!(narrow.log.contains(note), "{name}: {}", narrow.log);
        let losses = half.losses();
        assert!(
            losses[STEPS as usize - 1] < 0.9 * losses[0],
            "{name} does not learn, so the comparison proves nothing: {losses:?}"
        );
    }
}

#[test]
fn graphs_merged_batches_and_evaluations_match_eager_execution() {
    let [eager, captured] = [false, true].map(|graphs| {
        with(gpt, Matmul::Fp8, &[("SWITCHYARD_REFERENCE_SEED", "11")], |config| {
            config.length = Length::Steps(6);
            config.batch_merge = 2;
            config.evaluation.every_steps = 3;
            config.gpu.graphs = graphs;
        })
    });
    assert_eq!((eager.codes.as_slice(), eager.progress.len()), (&[0][..], 6), "{}", eager.log);
    assert_eq!(eager.losses(), captured.losses());
    assert_eq!((eager.digest, eager.validation), (captured.digest, captured.validation));
}

#[test]
fn layers_with_unsuitable_sizes_stay_in_16_bits() {
    let few = |config: &mut EngineConfig| config.length = Length::Steps(6);
    let [odd, same] = [Matmul::Fp8, Matmul::Ieee].map(|matmul| with(mlp, matmul, &[], few));
    assert!(odd.log.contains("note: 0 of 3 linear layers are computed in 8 bits"), "{}", odd.log);
    assert_eq!(odd.digest, same.digest);
}

#[test]
fn a_wrong_product_is_detected() {
    let wrong = with(gpt, Matmul::Fp8, &[("SWITCHYARD_REFERENCE_FAULT", "wrong:1")], |_| ());
    assert!(wrong.difference(&GPT_IN_BF16, 2e-2).is_some(), "{:?}", wrong.losses());
}

#[test]
fn jobs_without_fp8_support_are_refused() {
    let refused = |words: &str, extra: &[(&str, &str)], change: fn(&mut EngineConfig)| {
        let output = with(gpt, Matmul::Fp8, extra, change);
        assert_eq!(output.codes, [2], "{}", output.log);
        assert!(output.log.contains(words), "no `{words}` in {}", output.log);
    };
    let old = [("SWITCHYARD_REFERENCE_FAULT", "capability:80")];
    refused("whose compute capability is 8.0; expected IEEE, or a GPU of 8.9 or higher", &old, |_| ());
    refused("got FP8 with numbers in F32; expected mode AMP with computeType BF16", &[], |config| {
        config.precision = Precision::Fp32;
    });
    refused("got FP8 with numbers in F16; expected mode AMP", &[], |config| {
        config.precision = amp(HalfType::Fp16, STATIC);
    });
}
