//! The worker's report on a machine's libraries.

use crate::pods::WORKER;
use std::process::Command;
use switchyard_cuda_libraries::environment;
use switchyard_worker_contract::software::{Library, Process, Software};

fn software(variables: &[(&str, &std::ffi::OsStr)]) -> Software {
    let output = Command::new(WORKER).arg("gpu").envs(variables.iter().copied()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn versions(libraries: &[Library]) -> Vec<(&str, Option<&str>)> {
    libraries.iter().map(|library| (library.name.as_str(), library.version.as_deref())).collect()
}

#[test]
fn libraries_are_listed_with_file_and_version_and_gpus_with_their_address() {
    let libraries = environment();
    let mut variables: Vec<_> = libraries.iter().map(|(name, value)| (*name, value.as_os_str())).collect();
    variables.push(("SWITCHYARD_REFERENCE_DEVICES", "2".as_ref()));
    let Software { libraries, gpus } = software(&variables);
    let [driver, nvrtc] = [Some("13.0"); 2];
    let expected = [("driver", driver), ("NVRTC", nvrtc), ("cuBLASLt", Some("13.1.0")), ("NCCL", Some("2.28.9"))];
    assert_eq!(versions(&libraries)[..4], expected);
    assert!(libraries[..4].iter().all(|library| library.problem.is_none() && library.remedy.is_none()));
    assert!(libraries[3].file.as_deref().is_some_and(|file| file.ends_with(".so") || file.contains("libnccl.so.2")));
    let buses: Vec<&str> = gpus.iter().map(|gpu| gpu.bus.as_str()).collect();
    assert_eq!(buses, ["0000:10:00.0", "0000:11:00.0"]);
    let nvml = libraries.iter().find(|library| library.name == "NVML").unwrap();
    assert_eq!((nvml.version.as_deref(), &nvml.remedy), (Some("580.65.06"), &None));
    assert!(
        gpus.iter().all(|gpu| gpu.free_bytes == Some(gpu.memory_bytes) && gpu.processes.is_empty() && !gpu.is_divided)
    );
}

#[test]
fn processes_on_a_gpu_are_listed() {
    let libraries = environment();
    let mut variables: Vec<_> = libraries.iter().map(|(name, value)| (*name, value.as_os_str())).collect();
    variables.push(("SWITCHYARD_REFERENCE_FAULT", "process:4242.1024,mig".as_ref()));
    let Software { gpus, .. } = software(&variables);
    let python = Process { pid: 4242, name: Some("python3".into()), memory_bytes: Some(1 << 30) };
    assert_eq!((&gpus[0].processes, gpus[0].is_divided), (&vec![python], true));
    assert_eq!(gpus[0].free_bytes, Some(gpus[0].memory_bytes - (1 << 30)));
}

#[test]
fn an_unusable_library_is_listed_with_reason_and_remedy() {
    let libraries = environment();
    let mut variables: Vec<_> = libraries.iter().map(|(name, value)| (*name, value.as_os_str())).collect();
    variables.push(("SWITCHYARD_REFERENCE_FAULT", "nccl-version:21806".as_ref()));
    let Software { libraries, .. } = software(&variables);
    let nccl = &libraries[3];
    assert!(nccl.problem.as_deref().unwrap().contains("version 2.18.6; expected 2.19.0"), "{nccl:?}");
    assert_eq!(nccl.remedy.as_deref(), Some("pip install nvidia-nccl-cu13"));
    assert_eq!((libraries[4].name.as_str(), libraries[4].version.as_deref()), ("cuDNN", Some("9.12.0")));
    assert_eq!(libraries[4].without, "networks with convolutions do not run on GPUs");
    let folder = tempfile::tempdir().unwrap();
    let none = [("SWITCHYARD_CUDA_LIBRARIES", folder.path().as_os_str()), ("PATH", folder.path().as_os_str())];
    let Software { libraries, gpus } = software(&none);
    if libraries[0].file.is_none() {
        assert_eq!(libraries[0].problem.as_deref(), Some("driver is not on this machine"));
        assert!(gpus.is_empty() && libraries[0].remedy.as_deref().unwrap().contains("driver 550"), "{libraries:?}");
    }
}
