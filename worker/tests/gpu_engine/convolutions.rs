//! cuDNN computes convolutions. A job is refused with the reason if it does not.

use crate::losses::compare;
use crate::pods::Job;
use crate::support::{RunOutput, amp, on, resnet, run};
use std::ffi::OsString;
use switchyard_cuda::find::VARIABLE;
use switchyard_cuda_libraries::environment;
use switchyard_worker_contract::config::*;

const STEPS: u64 = 4;
const FAULT: &str = "SWITCHYARD_REFERENCE_FAULT";

/// A run of a small ResNet in bf16.
fn with(libraries: &[(&'static str, OsString)], extra: &[(&str, &str)]) -> RunOutput {
    run(&Job::new(1, 1, STEPS).with(on(Device::Cuda, STEPS, half)), libraries, extra)
}

fn half(config: &mut EngineConfig) {
    resnet(config);
    config.precision = amp(HalfType::Bf16, LossScaling::Static { scale: 1.0 });
}

/// From the log: convolution kinds accepted by cuDNN, and all kinds.
fn counts(output: &RunOutput) -> Option<[usize; 2]> {
    let line = output.log.lines().find(|line| line.contains(" kinds of convolutions"))?;
    let words: Vec<usize> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
    Some([words[0], words[1]])
}

#[test]
fn f16_losses_match_the_cpu_and_cudnn_computes_everything() {
    let output = compare("resnet in f16", (1, 1), &[("SWITCHYARD_REFERENCE_SEED", "9")], 2e-2, |config| {
        resnet(config);
        config.length = Length::Steps(6);
        config.precision = amp(HalfType::Fp16, LossScaling::Static { scale: 128.0 });
    });
    let counts = counts(&output).unwrap_or_else(|| panic!("{}", output.log));
    // For each shape: forward, gradient of the weights, and gradient of the input, overwriting and
    // accumulating.
    assert!(counts[0] == counts[1] && counts[0] > 20 && counts[0].is_multiple_of(4), "{}", output.log);
    assert!(output.log.contains("note: cuDNN 9.12.0 accepts"), "{}", output.log);
}

fn assert_refused(output: &RunOutput, reason: &str) {
    assert_eq!(output.codes, [2], "{reason}: {}", output.log);
    assert!(output.log.contains("spec.engine.device: got Cuda; convolution "), "{}", output.log);
    assert!(output.log.contains(reason), "no `{reason}` in {}", output.log);
}

#[test]
fn convolutions_that_cudnn_refuses_end_the_job_with_the_reason() {
    let libraries = environment();
    let cases = [
        ("cudnn-refused:0", "forward: cuDNN: cudnnBackendFinalize(heuristic)"),
        ("cudnn-refused:11", "padding 1: gradient of the weights: cuDNN: "),
        ("cudnn-refused:12", "padding 1: gradient of the input"),
        ("cudnn-untaken:10", "forward: cuDNN: cudnnBackendFinalize(plan)"),
        ("cudnn-version:91000", "is 9.10.0, expected 9.11.0 or newer of version 9"),
        ("cudnn-version:100000", "is 10.0.0, expected 9.11.0 or newer of version 9"),
    ];
    for (fault, reason) in cases {
        assert_refused(&with(&libraries, &[(FAULT, fault)]), reason);
    }
}

#[test]
fn convolutions_on_a_machine_without_cudnn_are_refused() {
    let mut libraries = environment();
    let folder = tempfile::tempdir().unwrap();
    let variable = libraries.iter_mut().find(|(name, _)| *name == VARIABLE).unwrap();
    for entry in std::fs::read_dir(&variable.1).unwrap() {
        let file = entry.unwrap().path();
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        if name.ends_with(|last: char| last.is_ascii_digit()) && !name.starts_with("libcudnn") {
            std::os::unix::fs::symlink(file.canonicalize().unwrap(), folder.path().join(name)).unwrap();
        }
    }
    variable.1 = folder.path().into();
    assert_refused(&with(&libraries, &[]), "forward: cuDNN is not on this machine");
}

#[test]
fn a_convolution_that_fails_ends_the_rank_with_the_call() {
    let libraries = environment();
    let output = with(&libraries, &[(FAULT, "cudnn-fails:70")]);
    assert_ne!(output.codes, [0], "{}", output.log);
    let expected = "cuDNN: cudnnBackendExecute returned 5000: CUDNN_STATUS_EXECUTION_FAILED";
    assert!(output.log.contains(expected), "{}", output.log);
}
