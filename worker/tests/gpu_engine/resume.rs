//! Resuming a checkpoint of one device on the other.

use crate::pods::{Job, resumed};
use crate::support::{Change, RunOutput, SECOND_ATTEMPT, gpt, on, resnet, run};
use switchyard_cuda_libraries::environment;
use switchyard_worker_contract::config::*;

const HALF: u64 = 6;
const STEPS: u64 = 12;

fn saving(job: &Job, model: Change, device: Device, steps: u64) -> impl FnOnce(&mut EngineConfig) + use<> {
    let path = job.path("checkpoints").display().to_string();
    on(device, steps, move |config| {
        model(config);
        config.checkpoint = Some(Checkpoint { path, every_steps: 0, period_seconds: 0, keep: 1, on_suspend: true });
        // The steps of both parts must equal those of a single run.
        config.schedule = Schedule { kind: ScheduleKind::Constant, ..config.schedule };
    })
}

/// Runs half of the steps on the first device and the rest on the second.
fn across(model: Change, devices: [Device; 2]) -> RunOutput {
    let libraries = environment();
    let job = Job::new(1, 1, HALF);
    let change = saving(&job, model, devices[0], HALF);
    let job = job.with(change);
    let first = run(&job, &libraries, &[]);
    assert_eq!(first.codes, [0], "{}", first.log);
    let change = saving(&job, model, devices[1], STEPS);
    let job = job.with(change);
    let mut second = run(&job, &libraries, &[SECOND_ATTEMPT]);
    assert_eq!(resumed(&job), Some(HALF), "{}", second.log);
    second.progress.splice(0..0, first.progress);
    second
}

#[test]
fn changing_the_device_does_not_change_the_losses() {
    // A ResNet's checkpoints include running statistics, which its validation depends on.
    let models: [(&str, Change); 2] = [("gpt", gpt), ("resnet", resnet)];
    for (name, model) in models {
        let expected = across(model, [Device::Cpu, Device::Cpu]);
        assert_eq!(expected.losses().len() as u64, STEPS, "{name}");
        for devices in [[Device::Cpu, Device::Cuda], [Device::Cuda, Device::Cpu], [Device::Cuda, Device::Cuda]] {
            let got = across(model, devices);
            assert_eq!(got.difference(&expected, 1e-3), None, "{name}, {devices:?}");
        }
    }
}
