//! NVML of the reference libraries, through the calls that the worker makes.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)]

// `findings.rs` covers programs with misuse.
#[allow(dead_code, unused_imports, unused_macros)]
mod child;

use std::path::Path;
use std::time::Duration;
use switchyard_cuda::find::{NVML, Places, VARIABLE};
use switchyard_cuda::nvml::{GpuEvent, Nvml, Process, State};

fn nvml() -> Nvml {
    let places = Places::new(
        |name| (name == VARIABLE).then(|| switchyard_cuda_libraries::folder().into()),
        Path::new("/nowhere"),
        None,
    );
    Nvml::new(&places.open(&NVML).unwrap().library).unwrap()
}

#[test]
fn a_gpu_without_faults_is_healthy() {
    let nvml = nvml();
    assert_eq!(nvml.driver_version().unwrap(), "580.65.06");
    let gpu = nvml.gpu("0000:10:00.0").unwrap();
    let State { reasons, celsius, busy_percent, uncorrected, lanes, .. } = gpu.state();
    assert!(reasons.is_some_and(|reasons| !reasons.power() && !reasons.temperature() && !reasons.hardware()));
    assert_eq!((celsius, busy_percent, uncorrected, lanes), (Some(40), Some(97), Some(5), Some((16, 16))));
    assert_eq!((gpu.processes().unwrap(), gpu.is_divided()), (Vec::new(), false));
    assert_eq!(gpu.memory().unwrap().free, gpu.memory().unwrap().total);
    let listener = gpu.listen().unwrap().unwrap();
    assert_eq!(listener.wait(Duration::ZERO).unwrap(), GpuEvent::Nothing);
    let error = nvml.gpu("0000:77:00.0").err().unwrap().to_string();
    assert_eq!(error, "NVML: nvmlDeviceGetHandleByPciBusId returned 6: Not Found");
}

#[test]
fn injected_faults_are_reported() {
    if child::role().is_none() {
        let faults = "slowed:36,celsius:91,lanes:4,process:4242.1024,mig";
        let output = child::start("injected_faults_are_reported", true, &[("SWITCHYARD_REFERENCE_FAULT", faults)]);
        assert!(output.status.success(), "{output:?}");
        return;
    }
    let gpu = nvml().gpu("0000:10:00.0").unwrap();
    let State { reasons, celsius, busy_percent, lanes, .. } = gpu.state();
    assert!(reasons.is_some_and(|reasons| reasons.power() && reasons.temperature()));
    assert_eq!((celsius, lanes, gpu.is_divided()), (Some(91), Some((4, 16)), true));
    assert_eq!(busy_percent, None, "as with MIG");
    let python = Process { pid: 4242, name: Some("python3".into()), bytes: Some(1 << 30) };
    assert_eq!(gpu.processes().unwrap(), [python]);
    let memory = gpu.memory().unwrap();
    assert_eq!(memory.total - memory.free, 1 << 30);
}
