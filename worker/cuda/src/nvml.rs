//! NVML: the driver's view of GPU health: errors, clocks, temperature, links, and processes.
//!
//! NVML needs no context and allocates no GPU memory. It stays initialised until the process ends.
#![allow(unsafe_code)]

use crate::error::Error;
use crate::find::NVML;
use crate::library::{Library, Pointer, check, functions, text_at};
use std::ffi::{CStr, CString, c_char};
use std::sync::Arc;
use std::time::Duration;

/// `nvmlReturn_t`.
const NOT_SUPPORTED: i32 = 3;
const INSUFFICIENT_SIZE: i32 = 7;
const TIMEOUT: i32 = 10;
const GPU_IS_LOST: i32 = 15;
/// `NVML_TEMPERATURE_GPU`.
const TEMPERATURE_OF_GPU: i32 = 0;
/// `nvmlMemoryErrorType_t`.
const CORRECTED: i32 = 0;
const UNCORRECTED: i32 = 1;
/// `NVML_VOLATILE_ECC`: since the driver was loaded.
const VOLATILE: i32 = 0;
/// `nvmlEventTypeXidCriticalError`.
const XID: u64 = 8;
/// `NVML_VALUE_NOT_AVAILABLE`.
const NOT_AVAILABLE: u64 = u64::MAX;
/// Initial capacity of the process list; grows as needed.
const PROCESSES: usize = 16;

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct RawMemory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlUtilization_t`, percent of the last sample period.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct RawUtilization {
    /// Time in which a kernel ran.
    gpu: u32,
    /// Time in which memory was read or written.
    memory: u32,
}

/// `nvmlProcessInfo_t` of `nvmlDeviceGetComputeRunningProcesses_v3`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct RawProcess {
    pid: u32,
    used: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

/// `nvmlEventData_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct RawEvent {
    device: Pointer,
    kind: u64,
    data: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

functions!(Functions {
    nvmlInit_v2() -> i32;
    nvmlErrorString(i32) -> *const c_char;
    nvmlSystemGetDriverVersion(*mut c_char, u32) -> i32;
    nvmlSystemGetProcessName(u32, *mut c_char, u32) -> i32;
    nvmlDeviceGetHandleByPciBusId_v2(*const c_char, *mut Pointer) -> i32;
    nvmlDeviceGetMemoryInfo(Pointer, *mut RawMemory) -> i32;
    nvmlDeviceGetComputeRunningProcesses_v3(Pointer, *mut u32, *mut RawProcess) -> i32;
    nvmlDeviceGetCurrentClocksThrottleReasons(Pointer, *mut u64) -> i32;
    nvmlDeviceGetTemperature(Pointer, i32, *mut u32) -> i32;
    nvmlDeviceGetUtilizationRates(Pointer, *mut RawUtilization) -> i32;
    nvmlDeviceGetTotalEccErrors(Pointer, i32, i32, *mut u64) -> i32;
    nvmlDeviceGetCurrPcieLinkWidth(Pointer, *mut u32) -> i32;
    nvmlDeviceGetMaxPcieLinkWidth(Pointer, *mut u32) -> i32;
    nvmlDeviceGetMigMode(Pointer, *mut u32, *mut u32) -> i32;
    nvmlDeviceGetSupportedEventTypes(Pointer, *mut u64) -> i32;
    nvmlDeviceRegisterEvents(Pointer, u64, Pointer) -> i32;
    nvmlEventSetCreate(*mut Pointer) -> i32;
    nvmlEventSetWait_v2(Pointer, *mut RawEvent, u32) -> i32;
    nvmlEventSetFree(Pointer) -> i32;
});

/// The initialised library. Clones share it.
#[derive(Clone)]
pub struct Nvml {
    functions: Arc<Functions>,
}

/// A GPU. Several threads can query it.
#[derive(Clone)]
pub struct Gpu {
    nvml: Nvml,
    raw: Pointer,
}

// SAFETY: the handle is opaque to us, and all threads can call the library concurrently.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

/// GPU memory in bytes, over all processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    pub total: u64,
    pub free: u64,
}

/// A process that computes on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// In the host's PID namespace.
    pub pid: u32,
    /// Absent where NVML cannot see it, for example in a container.
    pub name: Option<String>,
    /// GPU memory in use; absent if the driver does not report it.
    pub bytes: Option<u64>,
}

/// Clock throttle reasons at a point in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reasons(u64);

impl Reasons {
    /// `nvmlClocksThrottleReasonSwPowerCap`.
    pub const POWER: u64 = 0x4;
    const HARDWARE: u64 = 0x8;
    /// Software and hardware thermal slowdown.
    const THERMAL: u64 = 0x20 | 0x40;
    const POWER_BRAKE: u64 = 0x80;

    /// Power cap.
    pub fn power(self) -> bool {
        self.0 & Reasons::POWER != 0
    }

    /// Temperature.
    pub fn temperature(self) -> bool {
        self.0 & Reasons::THERMAL != 0
    }

    /// Power brake, requested by the power supply.
    pub fn power_brake(self) -> bool {
        self.0 & Reasons::POWER_BRAKE != 0
    }

    /// Hardware slowdown, other than thermal slowdown and power brake.
    pub fn hardware(self) -> bool {
        self.0 & Reasons::HARDWARE != 0 && !self.temperature() && !self.power_brake()
    }
}

/// A snapshot of a GPU. Fields are absent if the GPU does not report them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct State {
    pub reasons: Option<Reasons>,
    pub celsius: Option<u32>,
    /// Share of the driver's last sample period, up to a second, in which a kernel ran.
    pub busy_percent: Option<u32>,
    /// Memory errors since the driver was loaded.
    pub corrected: Option<u64>,
    pub uncorrected: Option<u64>,
    /// PCIe lanes in use, and their maximum.
    pub lanes: Option<(u32, u32)>,
}

impl Nvml {
    /// Resolves the functions and initialises the library.
    ///
    /// # Errors
    /// A function is missing, or there is no driver.
    pub fn new(library: &Library) -> Result<Nvml, Error> {
        let nvml = Nvml { functions: Arc::new(Functions::load(library)?) };
        // SAFETY: no arguments.
        nvml.check("nvmlInit", unsafe { (nvml.functions.nvmlInit_v2)() })?;
        Ok(nvml)
    }

    fn check(&self, call: &str, code: i32) -> Result<(), Error> {
        // SAFETY: any code is valid; the result is a constant string.
        check(NVML.name, call, code, || unsafe { text_at((self.functions.nvmlErrorString)(code)) })
    }

    /// Looks up a GPU by its PCI address, as given by the CUDA driver.
    ///
    /// # Errors
    /// The driver does not know the address.
    pub fn gpu(&self, bus: &str) -> Result<Gpu, Error> {
        const CALL: &str = "nvmlDeviceGetHandleByPciBusId";
        let address = CString::new(bus).map_err(|_| Error::refused(CALL, format!("`{bus}` as an address")))?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointers are to a null-terminated string and to a live handle.
        let code = unsafe { (self.functions.nvmlDeviceGetHandleByPciBusId_v2)(address.as_ptr(), &raw mut raw) };
        self.check(CALL, code)?;
        Ok(Gpu { nvml: self.clone(), raw })
    }

    /// Makes a call that writes a string; returns its code and the string.
    fn text(&self, ask: impl FnOnce(&Functions, *mut c_char, u32) -> i32) -> (i32, String) {
        let mut bytes = [0u8; 256];
        let code = ask(&self.functions, bytes.as_mut_ptr().cast::<c_char>(), bytes.len() as u32);
        let text = CStr::from_bytes_until_nul(&bytes).map(|text| text.to_string_lossy().into_owned());
        (code, text.unwrap_or_default())
    }

    /// The driver version, for example `580.65.06`.
    ///
    /// # Errors
    /// The call fails.
    pub fn driver_version(&self) -> Result<String, Error> {
        // SAFETY: the pointer is to as many bytes as given.
        let (code, text) = self.text(|call, to, room| unsafe { (call.nvmlSystemGetDriverVersion)(to, room) });
        self.check("nvmlSystemGetDriverVersion", code).map(|()| text)
    }

    fn process_name(&self, pid: u32) -> Option<String> {
        // SAFETY: as above.
        let (code, name) = self.text(|call, to, room| unsafe { (call.nvmlSystemGetProcessName)(pid, to, room) });
        Some(name).filter(|name| code == 0 && !name.is_empty())
    }
}

impl Gpu {
    /// Reads a value through an out-pointer; `None` if the GPU or the driver does not support it.
    fn query<T: Default>(&self, ask: impl FnOnce(&Functions, Pointer, *mut T) -> i32) -> Option<T> {
        let mut value = T::default();
        (ask(&self.nvml.functions, self.raw, &raw mut value) == 0).then_some(value)
    }

    /// # Errors
    /// The call fails.
    pub fn memory(&self) -> Result<Memory, Error> {
        let mut memory = RawMemory::default();
        // SAFETY: the handle is the library's; the pointer is to a live struct.
        let code = unsafe { (self.nvml.functions.nvmlDeviceGetMemoryInfo)(self.raw, &raw mut memory) };
        self.nvml.check("nvmlDeviceGetMemoryInfo", code)?;
        Ok(Memory { total: memory.total, free: memory.free })
    }

    /// Processes computing on the GPU, including those of other users and containers if the driver
    /// shows them.
    ///
    /// # Errors
    /// The call fails.
    pub fn processes(&self) -> Result<Vec<Process>, Error> {
        const CALL: &str = "nvmlDeviceGetComputeRunningProcesses";
        let mut found = vec![RawProcess::default(); PROCESSES];
        let count = loop {
            let mut count = found.len() as u32;
            // SAFETY: the handle is the library's; the pointers are to a live count, and to as many
            // structs as it says.
            let code = unsafe {
                let call = self.nvml.functions.nvmlDeviceGetComputeRunningProcesses_v3;
                call(self.raw, &raw mut count, found.as_mut_ptr())
            };
            // More processes can start between two calls.
            if code == INSUFFICIENT_SIZE && count as usize >= found.len() {
                found.resize(2 * count as usize + 1, RawProcess::default());
                continue;
            }
            self.nvml.check(CALL, code)?;
            break count as usize;
        };
        let process = |raw: &RawProcess| Process {
            pid: raw.pid,
            name: self.nvml.process_name(raw.pid),
            bytes: Some(raw.used).filter(|bytes| *bytes != NOT_AVAILABLE),
        };
        Ok(found.iter().take(count).map(process).collect())
    }

    /// Whether MIG mode is enabled.
    pub fn is_divided(&self) -> bool {
        let mut later = 0;
        // SAFETY: the handle is the library's; the pointers are to live integers.
        let now = self.query(|call, raw, now| unsafe { (call.nvmlDeviceGetMigMode)(raw, now, &raw mut later) });
        now == Some(1u32)
    }

    /// Queries the GPU's current state.
    pub fn state(&self) -> State {
        // SAFETY: here and below the handle is the library's, and the pointers are to live values.
        let errors =
            |kind| self.query(|call, raw, to| unsafe { (call.nvmlDeviceGetTotalEccErrors)(raw, kind, VOLATILE, to) });
        // SAFETY: as above.
        let reasons = self.query(|call, raw, to| unsafe { (call.nvmlDeviceGetCurrentClocksThrottleReasons)(raw, to) });
        // SAFETY: as above.
        let celsius =
            self.query(|call, raw, to| unsafe { (call.nvmlDeviceGetTemperature)(raw, TEMPERATURE_OF_GPU, to) });
        // SAFETY: as above.
        let busy: Option<RawUtilization> =
            self.query(|call, raw, to| unsafe { (call.nvmlDeviceGetUtilizationRates)(raw, to) });
        // SAFETY: as above.
        let lanes = self.query(|call, raw, to| unsafe { (call.nvmlDeviceGetCurrPcieLinkWidth)(raw, to) });
        // SAFETY: as above.
        let max_lanes = self.query(|call, raw, to| unsafe { (call.nvmlDeviceGetMaxPcieLinkWidth)(raw, to) });
        State {
            reasons: reasons.map(Reasons),
            celsius,
            busy_percent: busy.map(|busy| busy.gpu),
            corrected: errors(CORRECTED),
            uncorrected: errors(UNCORRECTED),
            lanes: lanes.zip(max_lanes),
        }
    }

    /// Subscribes to critical errors from now on. `None` if the GPU does not support events.
    ///
    /// # Errors
    /// A call fails.
    pub fn listen(&self) -> Result<Option<Listener>, Error> {
        let (nvml, call) = (&self.nvml, &self.nvml.functions);
        let mut kinds = 0;
        // SAFETY: the handle is the library's; the pointer is to a live integer.
        let code = unsafe { (call.nvmlDeviceGetSupportedEventTypes)(self.raw, &raw mut kinds) };
        if code == NOT_SUPPORTED || code == 0 && kinds & XID == 0 {
            return Ok(None);
        }
        nvml.check("nvmlDeviceGetSupportedEventTypes", code)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer is to a live handle.
        nvml.check("nvmlEventSetCreate", unsafe { (call.nvmlEventSetCreate)(&raw mut raw) })?;
        let listener = Listener { nvml: nvml.clone(), raw };
        // SAFETY: both handles are the library's and alive.
        let code = unsafe { (call.nvmlDeviceRegisterEvents)(self.raw, XID, listener.raw) };
        nvml.check("nvmlDeviceRegisterEvents", code)?;
        Ok(Some(listener))
    }
}

/// A subscription to a GPU's errors.
pub struct Listener {
    nvml: Nvml,
    raw: Pointer,
}

// SAFETY: an event set does not belong to a thread; only one thread uses it.
unsafe impl Send for Listener {}

/// An event from a [`Listener`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuEvent {
    Nothing,
    /// A critical error, by its XID.
    Xid(u32),
    /// The driver has lost the GPU.
    Lost,
}

impl Listener {
    /// Waits for the next error, at most `time`.
    ///
    /// # Errors
    /// The driver is gone.
    pub fn wait(&self, time: Duration) -> Result<GpuEvent, Error> {
        let mut event =
            RawEvent { device: std::ptr::null_mut(), kind: 0, data: 0, gpu_instance: 0, compute_instance: 0 };
        let milliseconds = u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
        // SAFETY: the set is alive; the pointer is to a live struct.
        let code = unsafe { (self.nvml.functions.nvmlEventSetWait_v2)(self.raw, &raw mut event, milliseconds) };
        match code {
            TIMEOUT => Ok(GpuEvent::Nothing),
            GPU_IS_LOST => Ok(GpuEvent::Lost),
            0 if event.kind == XID => Ok(GpuEvent::Xid(u32::try_from(event.data).unwrap_or(u32::MAX))),
            0 => Ok(GpuEvent::Nothing),
            code => self.nvml.check("nvmlEventSetWait", code).map(|()| GpuEvent::Nothing),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // SAFETY: the set is alive, and is never used again. An error could not be handled here.
        let _ = unsafe { (self.nvml.functions.nvmlEventSetFree)(self.raw) };
    }
}

#[cfg(test)]
mod tests;
