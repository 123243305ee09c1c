//! A step begins before the outcome of the one before it is known.

use crate::losses::compare;
use crate::pods::Job;
use crate::support::{amp, gpt, mlp, on, run};
use switchyard_cuda_libraries::environment;
use switchyard_worker_contract::config::*;
use switchyard_worker_contract::recorder::{Operation, Recording};

const STEPS: u64 = 6;

const DYNAMIC: LossScaling =
    LossScaling::Dynamic { initial_scale: 8.0, growth_factor: 2.0, backoff_factor: 0.5, growth_interval_steps: 100 };

fn f16(config: &mut EngineConfig, loss_scaling: LossScaling) {
    gpt(config);
    config.precision = amp(HalfType::Fp16, loss_scaling);
}

/// A GPU that hangs in an early step: the step of the last batch that its rank took, and the step that it waits for.
fn last_steps(change: impl Fn(&mut EngineConfig)) -> [u64; 2] {
    let libraries = environment();
    let job = Job::new(1, 1, STEPS).with(on(Device::Cuda, STEPS, |config| {
        change(config);
        config.watchdog.timeout_seconds = Some(6);
    }));
    let told = run(&job, &libraries, &[("SWITCHYARD_REFERENCE_FAULT", "hang:90")]);
    assert_eq!(told.codes, [10], "{}", told.log);
    let file = std::fs::read(job.path("run-0/record/rank-0.attempt-1.recorder")).unwrap();
    let entries = Recording::read(&file).unwrap().entries;
    let last =
        |operations: &[Operation]| entries.iter().rfind(|entry| operations.contains(&entry.operation)).unwrap().step;
    [last(&[Operation::Input]), last(&[Operation::Forward, Operation::Backward])]
}

#[test]
fn the_host_has_queued_the_next_step_when_it_waits_for_a_step() {
    let [queued, waits] = last_steps(gpt);
    assert_eq!(queued, waits + 1);
    // With a dynamic scale it waits for the step that it has queued.
    let [queued, waits] = last_steps(|config| f16(config, DYNAMIC));
    assert_eq!(queued, waits);
}

#[test]
fn a_step_waits_as_often_as_planned() {
    let libraries = environment();
    // For the memory of two messages, which copies of earlier steps have left; for two marks and two messages of the step before.
    for (merge, expected) in [(1, 6), (3, 6 + 2 * 3)] {
        let job = Job::new(1, 1, STEPS).with(on(Device::Cuda, STEPS, |config| {
            mlp(config);
            config.batch_merge = merge;
        }));
        let told = run(&job, &libraries, &[]);
        assert_eq!(told.calls.map(|calls| calls.waits), Some(expected), "{}", told.log);
    }
}

#[test]
fn steps_that_are_left_out_while_the_host_does_not_know_it_change_what_the_optimizer_is_told() {
    let scale = f64::from(1u32 << 18);
    let told = compare("static scale", (1, 1), &[], 1e-2, |config| f16(config, LossScaling::Static { scale }));
    let skipped: Vec<u64> = told.progress.iter().filter_map(|progress| progress.skipped_steps).collect();
    let (last, steps) = (skipped[skipped.len() - 1], skipped.len() as u64);
    assert!(0 < last && last < steps, "some steps are left out, and others follow: {skipped:?}");
}
