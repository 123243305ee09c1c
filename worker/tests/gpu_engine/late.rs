//! A step starts before the outcome of the previous one is known.

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

/// Hangs the GPU of the only rank in an early step.
const HANG: (u32, &str) = (1, "hang:90");
/// Rank 1 never takes part in a sum of an early step.
const SILENT: (u32, &str) = (2, "nccl-silent:1.9");

/// Injects a fault; returns the step of the last batch that rank 0 started, and the step that it
/// waits for.
fn last_steps((ranks, fault): (u32, &str), change: impl Fn(&mut EngineConfig)) -> [u64; 2] {
    let libraries = environment();
    let job = Job::new(1, ranks, STEPS).with(on(Device::Cuda, STEPS, |config| {
        change(config);
        config.watchdog.timeout_seconds = Some(6);
    }));
    let devices = ranks.to_string();
    let extra = [("SWITCHYARD_REFERENCE_DEVICES", devices.as_str()), ("SWITCHYARD_REFERENCE_FAULT", fault)];
    let output = run(&job, &libraries, &extra);
    assert_eq!(output.codes, [10], "{}", output.log);
    let file = std::fs::read(job.path("run-0/record/rank-0.attempt-1.recorder")).unwrap();
    let entries = Recording::read(&file).unwrap().entries;
    let last =
        |operations: &[Operation]| entries.iter().rfind(|entry| operations.contains(&entry.operation)).unwrap().step;
    [last(&[Operation::Input]), last(&[Operation::Forward, Operation::Backward, Operation::Reduce])]
}

#[test]
fn the_host_enqueues_the_next_step_before_it_waits() {
    for fault in [HANG, SILENT] {
        let [queued, waits] = last_steps(fault, gpt);
        assert_eq!(queued, waits + 1, "{fault:?}");
        // With a dynamic scale, the host waits for the step that it has enqueued.
        let [queued, waits] = last_steps(fault, |config| f16(config, DYNAMIC));
        assert_eq!(queued, waits, "{fault:?}");
    }
}

#[test]
fn a_step_waits_as_often_as_planned() {
    let libraries = environment();
    // Two waits for message memory used by copies of earlier steps, and four for two marks and two
    // messages of the previous step.
    for (merge, expected) in [(1, 6), (3, 6 + 2 * 3)] {
        let job = Job::new(1, 1, STEPS).with(on(Device::Cuda, STEPS, |config| {
            mlp(config);
            config.batch_merge = merge;
        }));
        let output = run(&job, &libraries, &[]);
        assert_eq!(output.calls.map(|calls| calls.waits), Some(expected), "{}", output.log);
    }
}

#[test]
fn skipped_steps_that_the_host_learns_of_late_adjust_the_optimizer() {
    let scale = f64::from(1u32 << 18);
    let output = compare("static scale", (1, 1), &[], 1e-2, |config| f16(config, LossScaling::Static { scale }));
    let skipped: Vec<u64> = output.progress.iter().filter_map(|progress| progress.skipped_steps).collect();
    let (last, steps) = (skipped[skipped.len() - 1], skipped.len() as u64);
    assert!(0 < last && last < steps, "some steps are left out, and others follow: {skipped:?}");
}
