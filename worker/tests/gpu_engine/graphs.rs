//! Captured graphs match eager execution bit for bit.

use crate::pods::Job;
use crate::support::{Change, RunOutput, amp, bert, gpt, mlp, on, resnet, run};
use switchyard_cuda::kernels::optimizer::Numbers;
use switchyard_cuda_libraries::environment;
use switchyard_worker_contract::config::*;
use switchyard_worker_contract::event::GpuCalls;

const STEPS: u64 = 8;

/// A run with or without graphs.
fn with_graphs(graphs: bool, ranks: u32, extra: &[(&str, &str)], change: impl Fn(&mut EngineConfig)) -> RunOutput {
    let libraries = environment();
    let job = Job::new(1, ranks, STEPS).with(on(Device::Cuda, STEPS, |config| {
        change(config);
        config.evaluation.every_steps = 3;
        config.gpu.graphs = graphs;
    }));
    let output = run(&job, &libraries, extra);
    assert!(output.codes.iter().all(|code| *code == 0), "{}", output.log);
    output
}

/// The bits of all losses, norms and scales, and the digest of the weights.
fn bits(output: &RunOutput) -> (Vec<[u64; 3]>, Option<u64>, Option<String>) {
    let step = |progress: &switchyard_worker_contract::event::Progress| {
        [progress.loss, progress.gradient_norm, progress.loss_scale.unwrap_or_default()].map(f64::to_bits)
    };
    (output.progress.iter().map(step).collect(), output.validation.map(f64::to_bits), output.digest.clone())
}

/// Compares both modes, and the driver calls of their last steps. `graphs` is the number of graphs
/// per step.
fn compare(name: &str, (ranks, graphs): (u32, u64), extra: &[(&str, &str)], change: impl Fn(&mut EngineConfig)) {
    let eager = with_graphs(false, ranks, extra, &change);
    let captured = with_graphs(true, ranks, extra, &change);
    assert_eq!(eager.progress.len() as u64, STEPS, "{name}");
    assert_eq!(bits(&eager), bits(&captured), "{name}");
    let [GpuCalls { works, launches, .. }, after] = [&eager, &captured].map(|output| output.calls.unwrap());
    assert!(works > 15 * graphs && after.works == works, "{name}: {works}");
    assert_eq!(after.launches, launches - works + graphs, "{name}: {launches} calls without graphs");
    println!("{name}: {works} operations, {launches} calls without graphs, {} with graphs", after.launches);
}

#[test]
fn every_model_with_merged_batches_clipping_and_evaluations() {
    // The cheapest model merges the most batches.
    let models: [(&str, Change); 4] = [("bert", bert), ("gpt", gpt), ("resnet", resnet), ("mlp", mlp)];
    for (merge, (name, model)) in (1..).zip(models) {
        compare(name, (1, u64::from(merge)), &[("SWITCHYARD_REFERENCE_SEED", "5")], |config| {
            model(config);
            config.batch_merge = merge;
            config.optimizer.gradient_clip_norm = Some(0.3);
        });
    }
}

#[test]
fn a_dynamic_scale_that_overflows() {
    let loss_scaling = LossScaling::Dynamic {
        initial_scale: f64::from(1u32 << 26),
        growth_factor: 2.0,
        backoff_factor: 0.125,
        growth_interval_steps: 2,
    };
    let fp16 = |config: &mut EngineConfig| {
        gpt(config);
        config.precision = amp(HalfType::Fp16, loss_scaling);
    };
    compare("gpt in f16", (1, 1), &[], fp16);
    let output = with_graphs(true, 1, &[], fp16);
    let scales: Vec<f64> = output.progress.iter().filter_map(|progress| progress.loss_scale).collect();
    assert!(scales.windows(2).any(|pair| pair[1] < pair[0]), "the scale backs off: {scales:?}");
    assert!(scales.windows(2).any(|pair| pair[1] > pair[0]), "the scale grows again: {scales:?}");
}

#[test]
fn two_ranks_whose_gradients_the_host_reduces_while_a_graph_runs() {
    let extra = [("SWITCHYARD_REFERENCE_DEVICES", "2"), ("SWITCHYARD_REFERENCE_SEED", "6")];
    for enabled in [true, false] {
        compare(&format!("two ranks, overlap {enabled}"), (2, 3), &extra, |config| {
            resnet(config);
            config.batch_merge = 2;
            config.overlap.enabled = enabled;
            config.overlap.bucket_size_mib = None;
        });
    }
}

#[test]
fn a_step_parameter_baked_into_a_graph_is_detected() {
    let right = with_graphs(false, 1, &[], mlp);
    let stale = format!("stale:{}", 2 * size_of::<Numbers>());
    let baked = with_graphs(true, 1, &[("SWITCHYARD_REFERENCE_FAULT", &stale)], mlp);
    let [right, baked] = [right, baked].map(|output| bits(&output));
    assert_eq!(right.0[0], baked.0[0], "the first step has the numbers of the first step");
    assert_ne!((right.0, right.2), (baked.0, baked.2));
}
