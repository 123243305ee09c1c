//! Convolutions use cuDNN where it accepts them, and im2col + GEMM otherwise: losses are equal, and
//! the log gives the reason.

use crate::losses::compare;
use crate::pods::Job;
use crate::support::{RunOutput, amp, on, resnet, run};
use std::ffi::OsString;
use std::path::Path;
use switchyard_cuda::find::VARIABLE;
use switchyard_cuda_libraries::environment;
use switchyard_worker_contract::config::*;
use switchyard_worker_contract::env;

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

#[test]
fn convolutions_that_cudnn_refuses_use_im2col_and_the_log_says_why() {
    let libraries = environment();
    let by_cudnn = with(&libraries, &[]);
    let all = counts(&by_cudnn).unwrap_or_else(|| panic!("{}", by_cudnn.log))[1];
    // A fault, the number of the four kinds that cuDNN then accepts, and the expected log line.
    let cases = [
        ("cudnn-refused:0", Some(0), "gradient of the weights: cuDNN: cudnnBackendFinalize(heuristic)"),
        ("cudnn-refused:11", Some(3), "stride 2, padding 1: gradient of the weights: cuDNN: "),
        ("cudnn-refused:12", Some(2), "gradient of the input, added: cuDNN: "),
        ("cudnn-untaken:10", Some(3), "forward: cuDNN: cudnnBackendFinalize(plan)"),
        ("cudnn-version:91000", None, "is 9.10.0, expected 9.11.0 or newer of version 9"),
        ("cudnn-version:100000", None, "is 10.0.0, expected 9.11.0 or newer of version 9"),
    ];
    for (fault, share, reason) in cases {
        let output = with(&libraries, &[(FAULT, fault)]);
        assert_eq!(output.difference(&by_cudnn, 2e-2), None, "{fault}");
        assert_eq!(counts(&output), share.map(|share| [share * all / 4, all]), "{fault}: {}", output.log);
        assert!(output.log.contains(reason), "{fault}: {}", output.log);
    }
}

#[test]
fn a_machine_without_cudnn_uses_im2col() {
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
    let output = with(&libraries, &[]);
    let on_cpus = run(&Job::new(1, 1, STEPS).with(on(Device::Cpu, STEPS, half)), &[], &[]);
    assert_eq!(output.difference(&on_cpus, 2e-2), None);
    assert!(output.log.contains("products of patches: cuDNN is not on this machine"), "{}", output.log);
}

#[test]
fn a_second_run_queries_no_plans_and_a_new_version_queries_all() {
    let folder = tempfile::tempdir().unwrap();
    let libraries = environment();
    let kept =
        |folder: &Path, fault: &str| with(&libraries, &[(env::GPU_CACHE, folder.to_str().unwrap()), (FAULT, fault)]);
    let first = kept(folder.path(), "");
    let all = counts(&first).unwrap_or_else(|| panic!("{}", first.log))[1];
    // With this fault, cuDNN would refuse every query.
    let second = kept(folder.path(), "cudnn-refused:0");
    assert_eq!((counts(&second), &second.digest), (Some([all, all]), &first.digest), "{}", second.log);
    // Plans that the device rejects are not cached.
    let untaken = kept(folder.path(), "cudnn-refused:0,cudnn-untaken:0");
    assert_eq!(counts(&untaken), Some([0, all]), "{}", untaken.log);
    let after = kept(folder.path(), "cudnn-refused:0");
    assert_eq!(counts(&after), Some([0, all]), "{}", after.log);
    let newer = kept(folder.path(), "cudnn-refused:0,cudnn-version:92600");
    assert_eq!(counts(&newer), Some([0, all]), "{}", newer.log);
}

#[test]
fn a_convolution_that_fails_ends_the_rank_with_the_call() {
    let libraries = environment();
    let output = with(&libraries, &[(FAULT, "cudnn-fails:70")]);
    assert_ne!(output.codes, [0], "{}", output.log);
    let expected = "cuDNN: cudnnBackendExecute returned 5000: CUDNN_STATUS_EXECUTION_FAILED";
    assert!(output.log.contains(expected), "{}", output.log);
}
