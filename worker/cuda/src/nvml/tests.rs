//! Checks layouts and constants against `nvml.h`, via the bindings that others generate from it.

use super::*;
use nvml_wrapper_sys::bindings as header;
use std::mem::offset_of;

#[test]
fn layouts_match_the_header() {
    assert_eq!(size_of::<RawMemory>(), size_of::<header::nvmlMemory_t>());
    assert_eq!(
        [offset_of!(RawMemory, total), offset_of!(RawMemory, free)],
        [offset_of!(header::nvmlMemory_t, total), offset_of!(header::nvmlMemory_t, free)]
    );
    assert_eq!(size_of::<RawProcess>(), size_of::<header::nvmlProcessInfo_t>());
    assert_eq!(
        [offset_of!(RawProcess, pid), offset_of!(RawProcess, used)],
        [offset_of!(header::nvmlProcessInfo_t, pid), offset_of!(header::nvmlProcessInfo_t, usedGpuMemory)]
    );
    assert_eq!(size_of::<RawEvent>(), size_of::<header::nvmlEventData_t>());
    assert_eq!(
        [offset_of!(RawEvent, kind), offset_of!(RawEvent, data), offset_of!(RawEvent, gpu_instance)],
        [
            offset_of!(header::nvmlEventData_t, eventType),
            offset_of!(header::nvmlEventData_t, eventData),
            offset_of!(header::nvmlEventData_t, gpuInstanceId)
        ]
    );
}

#[test]
fn constants_match_the_header() {
    let own = [NOT_SUPPORTED, INSUFFICIENT_SIZE, TIMEOUT, GPU_IS_LOST];
    let theirs = [
        header::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED,
        header::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE,
        header::nvmlReturn_enum_NVML_ERROR_TIMEOUT,
        header::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST,
    ];
    assert_eq!(own.map(|code| code as u32), theirs);
    let own = [TEMPERATURE_OF_GPU, CORRECTED, UNCORRECTED, VOLATILE];
    let theirs = [
        header::nvmlTemperatureSensors_enum_NVML_TEMPERATURE_GPU,
        header::nvmlMemoryErrorType_enum_NVML_MEMORY_ERROR_TYPE_CORRECTED,
        header::nvmlMemoryErrorType_enum_NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        header::nvmlEccCounterType_enum_NVML_VOLATILE_ECC,
    ];
    assert_eq!(own.map(|number| number as u32), theirs);
    assert_eq!(XID, u64::from(header::nvmlEventTypeXidCriticalError));
    let thermal = header::nvmlClocksEventReasonSwThermalSlowdown | header::nvmlClocksThrottleReasonHwThermalSlowdown;
    let own = [Reasons::POWER, Reasons::HARDWARE, Reasons::THERMAL, Reasons::POWER_BRAKE];
    let theirs = [
        header::nvmlClocksEventReasonSwPowerCap,
        header::nvmlClocksThrottleReasonHwSlowdown,
        thermal,
        header::nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    ];
    assert_eq!(own, theirs.map(u64::from));
}

#[test]
fn hardware_is_the_reason_only_if_there_is_no_other() {
    assert!(Reasons(0x8).hardware() && !Reasons(0x8 | 0x40).hardware() && !Reasons(0x8 | 0x80).hardware());
    assert!(Reasons(0x20).temperature() && Reasons(0x80).power_brake() && Reasons(0x4).power());
    assert!(!Reasons(0x1).power() && !Reasons(0x1).hardware(), "an idle GPU is not slowed down");
}
