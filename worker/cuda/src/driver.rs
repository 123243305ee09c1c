//! The CUDA driver: devices, memory, streams, kernels, timing.
//!
//! ```text
//! Driver -> Context ─┬─ Buffer, Span   device memory, and ranges of it
//!                    ├─ Pinned         host memory for asynchronous copies
//!                    ├─ Stream, Event  ordering of operations
//!                    ├─ Graph          operations of a stream, launched at once
//!                    └─ Loaded         kernels
//! ```
//!
//! Every object holds its context and makes it current on the calling thread, so objects can move
//! between threads, and can be struct fields in any order.
#![allow(unsafe_code)]

mod graph;
mod memory;
mod module;
mod pinned;
mod stream;

pub use graph::Graph;
pub use memory::{Buffer, Span};
pub use module::Loaded;
pub use pinned::Pinned;
pub use stream::{Event, Lines, Stream};

use crate::error::Error;
use crate::find::DRIVER;
use crate::library::{Library, Pointer, check, functions, text_at};
use crate::version;
use memory::Live;
use std::ffi::{CStr, c_char, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

functions!(Functions {
    cuInit(u32) -> i32;
    cuDriverGetVersion(*mut i32) -> i32;
    cuDeviceGetCount(*mut i32) -> i32;
    cuDeviceGet(*mut i32, i32) -> i32;
    cuDeviceGetName(*mut c_char, i32, i32) -> i32;
    cuDeviceGetPCIBusId(*mut c_char, i32, i32) -> i32;
    cuDeviceTotalMem_v2(*mut usize, i32) -> i32;
    cuDeviceGetAttribute(*mut i32, i32, i32) -> i32;
    cuDevicePrimaryCtxRetain(*mut Pointer, i32) -> i32;
    cuCtxSetCurrent(Pointer) -> i32;
    cuCtxSynchronize() -> i32;
    cuMemGetInfo_v2(*mut usize, *mut usize) -> i32;
    cuMemAlloc_v2(*mut u64, usize) -> i32;
    cuMemFree_v2(u64) -> i32;
    cuMemHostAlloc(*mut Pointer, usize, u32) -> i32;
    cuMemFreeHost(Pointer) -> i32;
    cuMemcpyHtoD_v2(u64, *const c_void, usize) -> i32;
    cuMemcpyDtoH_v2(Pointer, u64, usize) -> i32;
    cuMemcpyHtoDAsync_v2(u64, *const c_void, usize, Pointer) -> i32;
    cuMemcpyDtoHAsync_v2(Pointer, u64, usize, Pointer) -> i32;
    cuMemcpyDtoDAsync_v2(u64, u64, usize, Pointer) -> i32;
    cuMemcpy2DAsync_v2(*const stream::Copy2D, Pointer) -> i32;
    cuMemsetD8Async(u64, u8, usize, Pointer) -> i32;
    cuModuleLoadData(*mut Pointer, *const c_void) -> i32;
    cuModuleUnload(Pointer) -> i32;
    cuModuleGetFunction(*mut Pointer, Pointer, *const c_char) -> i32;
    cuFuncGetParamInfo(Pointer, usize, *mut usize, *mut usize) -> i32;
    cuFuncSetAttribute(Pointer, i32, i32) -> i32;
    cuLaunchKernel(Pointer, u32, u32, u32, u32, u32, u32, u32, Pointer, *mut Pointer, *mut Pointer) -> i32;
    cuStreamCreate(*mut Pointer, u32) -> i32;
    cuStreamDestroy_v2(Pointer) -> i32;
    cuStreamSynchronize(Pointer) -> i32;
    cuStreamWaitEvent(Pointer, Pointer, u32) -> i32;
    cuStreamBeginCapture_v2(Pointer, u32) -> i32;
    cuStreamEndCapture(Pointer, *mut Pointer) -> i32;
    cuGraphInstantiateWithFlags(*mut Pointer, Pointer, u64) -> i32;
    cuGraphLaunch(Pointer, Pointer) -> i32;
    cuGraphExecDestroy(Pointer) -> i32;
    cuGraphDestroy(Pointer) -> i32;
    cuEventCreate(*mut Pointer, u32) -> i32;
    cuEventDestroy_v2(Pointer) -> i32;
    cuEventRecord(Pointer, Pointer) -> i32;
    cuEventRecordWithFlags(Pointer, Pointer, u32) -> i32;
    cuEventQuery(Pointer) -> i32;
    cuEventSynchronize(Pointer) -> i32;
    cuEventElapsedTime(*mut f32, Pointer, Pointer) -> i32;
    cuGetErrorString(i32, *mut *const c_char) -> i32;
});

const NO_DEVICE: i32 = 100;
const MULTIPROCESSOR_COUNT: i32 = 16;
const COMPUTE_CAPABILITY_MAJOR: i32 = 75;
const COMPUTE_CAPABILITY_MINOR: i32 = 76;
const MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: i32 = 97;

/// One GPU.
#[derive(Debug, Clone)]
pub struct Device {
    raw: i32,
    pub name: String,
    /// PCI address: `0000:17:00.0`.
    pub bus: String,
    pub memory_bytes: usize,
    pub multiprocessors: i32,
    /// Maximum shared memory per block.
    pub shared_bytes: u32,
    /// Compute capability, major and minor, for which machine code must be compiled.
    pub capability: (i32, i32),
}

impl Device {
    /// The architecture, for example `sm_90`.
    pub fn architecture(&self) -> String {
        let (major, minor) = self.capability;
        format!("sm_{major}{minor}")
    }
}

/// The initialised driver.
pub struct Driver {
    functions: Functions,
}

impl Driver {
    /// Oldest version with all functions used here: CUDA 12.4.
    pub const OLDEST: i32 = 12_040;

    /// Initialises the driver.
    ///
    /// # Errors
    /// [`Error::NoDevice`] on a machine without a GPU; other errors if the driver is older than
    /// [`Driver::OLDEST`] or fails to initialise.
    pub fn new(library: &Library) -> Result<Driver, Error> {
        // SAFETY: the signature matches the header.
        let get: unsafe extern "C" fn(*mut i32) -> i32 = unsafe { library.function("cuDriverGetVersion") }?;
        let mut version = 0;
        // SAFETY: the pointer is to a live integer. The call needs no initialisation.
        check(DRIVER.name, "cuDriverGetVersion", unsafe { get(&raw mut version) }, || "no text".to_owned())?;
        if version < Driver::OLDEST {
            let [got, oldest] = [version, Driver::OLDEST].map(version::cuda);
            let text = format!(
                "{} is of a driver for CUDA {got}; expected {oldest} or newer, which NVIDIA's driver 550 and newer ones have",
                library.path.display()
            );
            return Err(Error::refused("cuDriverGetVersion", text));
        }
        let driver = Driver { functions: Functions::load(library)? };
        // SAFETY: takes flags, which must be 0.
        let code = unsafe { (driver.functions.cuInit)(0) };
        if code == NO_DEVICE {
            return Err(Error::NoDevice);
        }
        driver.check("cuInit", code)?;
        Ok(driver)
    }

    fn check(&self, call: &str, code: i32) -> Result<(), Error> {
        check(DRIVER.name, call, code, || {
            let mut text = std::ptr::null();
            // SAFETY: any code is valid; the driver writes a pointer to a constant string, or null.
            unsafe {
                (self.functions.cuGetErrorString)(code, &raw mut text);
                text_at(text)
            }
        })
    }

    /// The highest CUDA version that the driver supports, in its numeric form.
    ///
    /// # Errors
    /// The call fails.
    pub fn version(&self) -> Result<i32, Error> {
        let mut version = 0;
        // SAFETY: the pointer is to a live integer.
        self.check("cuDriverGetVersion", unsafe { (self.functions.cuDriverGetVersion)(&raw mut version) })?;
        Ok(version)
    }

    /// All GPUs in driver order.
    ///
    /// # Errors
    /// A call fails.
    pub fn devices(&self) -> Result<Vec<Device>, Error> {
        let mut count = 0;
        // SAFETY: the pointer is to a live integer.
        self.check("cuDeviceGetCount", unsafe { (self.functions.cuDeviceGetCount)(&raw mut count) })?;
        (0..count).map(|index| self.device(index)).collect()
    }

    fn device(&self, index: i32) -> Result<Device, Error> {
        let call = &self.functions;
        let (mut raw, mut memory_bytes, mut name, mut bus) = (0, 0, [0u8; 256], [0u8; 32]);
        // SAFETY: all pointers are to live values of the header's types; strings are truncated to
        // the given length.
        unsafe {
            self.check("cuDeviceGet", (call.cuDeviceGet)(&raw mut raw, index))?;
            self.check("cuDeviceGetName", (call.cuDeviceGetName)(name.as_mut_ptr().cast(), name.len() as i32, raw))?;
            let text = (call.cuDeviceGetPCIBusId)(bus.as_mut_ptr().cast(), bus.len() as i32, raw);
            self.check("cuDeviceGetPCIBusId", text)?;
            self.check("cuDeviceTotalMem", (call.cuDeviceTotalMem_v2)(&raw mut memory_bytes, raw))?;
        }
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: the pointer is to a live integer.
            self.check("cuDeviceGetAttribute", unsafe { (call.cuDeviceGetAttribute)(&raw mut value, which, raw) })?;
            Ok::<i32, Error>(value)
        };
        let text = |bytes: &[u8]| {
            CStr::from_bytes_until_nul(bytes).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
        };
        Ok(Device {
            raw,
            name: text(&name),
            bus: text(&bus),
            memory_bytes,
            multiprocessors: attribute(MULTIPROCESSOR_COUNT)?,
            shared_bytes: u32::try_from(attribute(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?).unwrap_or(0),
            capability: (attribute(COMPUTE_CAPABILITY_MAJOR)?, attribute(COMPUTE_CAPABILITY_MINOR)?),
        })
    }

    /// Retains the primary context of a device until the process ends.
    ///
    /// # Errors
    /// A call fails.
    pub fn context(self, device: &Device) -> Result<Context, Error> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the device was listed by this driver.
        let code = unsafe { (self.functions.cuDevicePrimaryCtxRetain)(&raw mut raw, device.raw) };
        self.check("cuDevicePrimaryCtxRetain", code)?;
        let inner = Inner {
            driver: self,
            raw,
            device: device.clone(),
            live: Live::default(),
            launches: AtomicU64::default(),
            waits: AtomicU64::default(),
        };
        let context = Context { inner: Arc::new(inner) };
        context.make_current()?;
        Ok(context)
    }
}

struct Inner {
    driver: Driver,
    raw: Pointer,
    device: Device,
    live: Live,
    launches: AtomicU64,
    waits: AtomicU64,
}

/// Driver calls of a context so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Calls that queued work: kernels, GEMMs, copies, fills; a graph counts as one.
    pub launches: u64,
    /// Calls that waited for the device.
    pub waits: u64,
}

// SAFETY: a context can be current on several threads, and all of them can call the driver
// concurrently.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

/// A device's context. Clones share it.
#[derive(Clone)]
pub struct Context {
    inner: Arc<Inner>,
}

impl Context {
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// Makes the context current for this thread's calls, including calls of other libraries.
    /// Functions of this crate do so themselves.
    ///
    /// # Errors
    /// The call fails.
    pub fn make_current(&self) -> Result<(), Error> {
        let Inner { driver, raw, .. } = &*self.inner;
        // SAFETY: the context was retained in `Driver::context` and is never released.
        driver.check("cuCtxSetCurrent", unsafe { (driver.functions.cuCtxSetCurrent)(*raw) })
    }

    pub fn counts(&self) -> Counts {
        let Inner { launches, waits, .. } = &*self.inner;
        Counts { launches: launches.load(Ordering::Relaxed), waits: waits.load(Ordering::Relaxed) }
    }

    /// A call that waits for the device.
    fn call_and_wait(&self, name: &str, make: impl FnOnce(&Functions) -> i32) -> Result<(), Error> {
        self.inner.waits.fetch_add(1, Ordering::Relaxed);
        self.call(name, make)
    }

    /// Calls the driver with this context current.
    fn call(&self, name: &str, make: impl FnOnce(&Functions) -> i32) -> Result<(), Error> {
        self.make_current()?;
        let driver = &self.inner.driver;
        driver.check(name, make(&driver.functions))
    }

    /// Waits for all work on the device.
    ///
    /// # Errors
    /// The work failed.
    pub fn synchronize(&self) -> Result<(), Error> {
        // SAFETY: no arguments.
        self.call_and_wait("cuCtxSynchronize", |call| unsafe { (call.cuCtxSynchronize)() })
    }

    /// Free device memory, shared by all processes.
    ///
    /// # Errors
    /// The call fails.
    pub fn free_bytes(&self) -> Result<usize, Error> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the pointers are to live numbers.
        self.call("cuMemGetInfo", |call| unsafe { (call.cuMemGetInfo_v2)(&raw mut free, &raw mut total) })?;
        Ok(free)
    }

    /// Device time in seconds of one `work` call, which queues operations in `stream`: the minimum
    /// of several measurements, each over `calls` calls.
    ///
    /// # Errors
    /// The errors of `work` and of the events.
    /// Those of `work`, and of the events.
    pub fn time(
        &self,
        stream: &Stream,
        calls: usize,
        mut work: impl FnMut() -> Result<(), Error>,
    ) -> Result<f64, Error> {
        const MEASUREMENTS: usize = 5;
        let (start, end) = (self.timed_event()?, self.timed_event()?);
        work()?;
        let mut best = f64::INFINITY;
        for _ in 0..MEASUREMENTS {
            stream.record(&start)?;
            for _ in 0..calls {
                work()?;
            }
            stream.record(&end)?;
            end.synchronize()?;
            best = best.min(end.seconds_since(&start)? / calls as f64);
        }
        Ok(best)
    }
}

/// A context's object, destroyed on drop.
struct Object {
    context: Context,
    raw: Pointer,
    destroy: unsafe extern "C" fn(Pointer) -> i32,
}

// SAFETY: as for contexts; driver objects belong to a context, not to a thread.
unsafe impl Send for Object {}
// SAFETY: as above.
unsafe impl Sync for Object {}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: `raw` came from the create function that matches `destroy`, and is destroyed
        // once. An error could not be handled here.
        let _ = self.context.call("destroy", |_| unsafe { (self.destroy)(self.raw) });
    }
}

#[cfg(test)]
mod tests;
