//! The driver: devices, memory, kernels, time. Everything runs on the default stream of the device's primary context,
//! which the libraries use too.
#![allow(unsafe_code)]

use crate::error::Error;
use crate::find::DRIVER;
use crate::kernels::{Argument, Call, Memory, Program};
use crate::library::{Handle, Library, Pointer, check, functions, text_at};
use crate::nvrtc::Nvrtc;
use bytemuck::Pod;
use std::ffi::{CStr, CString, c_char};
use std::marker::PhantomData;

functions!(Functions {
    cuInit(u32) -> i32;
    cuDriverGetVersion(*mut i32) -> i32;
    cuDeviceGetCount(*mut i32) -> i32;
    cuDeviceGet(*mut i32, i32) -> i32;
    cuDeviceGetName(*mut c_char, i32, i32) -> i32;
    cuDeviceTotalMem_v2(*mut usize, i32) -> i32;
    cuDeviceGetAttribute(*mut i32, i32, i32) -> i32;
    cuDevicePrimaryCtxRetain(*mut Pointer, i32) -> i32;
    cuCtxSetCurrent(Pointer) -> i32;
    cuCtxSynchronize() -> i32;
    cuMemAlloc_v2(*mut u64, usize) -> i32;
    cuMemFree_v2(u64) -> i32;
    cuMemcpyHtoD_v2(u64, *const std::ffi::c_void, usize) -> i32;
    cuMemcpyDtoH_v2(Pointer, u64, usize) -> i32;
    cuMemsetD8_v2(u64, u8, usize) -> i32;
    cuModuleLoadData(*mut Pointer, *const std::ffi::c_void) -> i32;
    cuModuleUnload(Pointer) -> i32;
    cuModuleGetFunction(*mut Pointer, Pointer, *const c_char) -> i32;
    cuFuncSetAttribute(Pointer, i32, i32) -> i32;
    cuLaunchKernel(Pointer, u32, u32, u32, u32, u32, u32, u32, Pointer, *mut Pointer, *mut Pointer) -> i32;
    cuEventCreate(*mut Pointer, u32) -> i32;
    cuEventDestroy_v2(Pointer) -> i32;
    cuEventRecord(Pointer, Pointer) -> i32;
    cuEventSynchronize(Pointer) -> i32;
    cuEventElapsedTime(*mut f32, Pointer, Pointer) -> i32;
    cuGetErrorString(i32, *mut *const c_char) -> i32;
});

const NO_DEVICE: i32 = 100;
const MULTIPROCESSOR_COUNT: i32 = 16;
const COMPUTE_CAPABILITY_MAJOR: i32 = 75;
const COMPUTE_CAPABILITY_MINOR: i32 = 76;
/// Attribute of a kernel: the most shared memory that a launch may give it.
const MAX_DYNAMIC_SHARED_SIZE_BYTES: i32 = 8;

/// One GPU.
#[derive(Debug, Clone)]
pub struct Device {
    raw: i32,
    pub name: String,
    pub memory_bytes: usize,
    pub multiprocessors: i32,
    /// Major and minor number of the architecture that machine code must be compiled for.
    pub capability: (i32, i32),
}

/// The initialised driver.
pub struct Driver {
    functions: Functions,
}

impl Driver {
    /// Initialises the driver.
    ///
    /// # Errors
    /// [`Error::NoDevice`] on a machine without a GPU; others if the driver does not start.
    pub fn new(library: &Library) -> Result<Driver, Error> {
        let driver = Driver { functions: Functions::load(library)? };
        // SAFETY: takes a number, which must be 0.
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
            // SAFETY: any number may be given; the driver writes a pointer to a constant string, or null.
            unsafe {
                (self.functions.cuGetErrorString)(code, &raw mut text);
                text_at(text)
            }
        })
    }

    /// The highest version of CUDA that the driver supports, as its number.
    ///
    /// # Errors
    /// The call fails.
    pub fn version(&self) -> Result<i32, Error> {
        let mut version = 0;
        // SAFETY: the pointer is to a live integer.
        self.check("cuDriverGetVersion", unsafe { (self.functions.cuDriverGetVersion)(&raw mut version) })?;
        Ok(version)
    }

    /// All GPUs in the driver's order.
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
        let (mut raw, mut memory_bytes, mut name) = (0, 0, [0u8; 256]);
        // SAFETY: all pointers are to live values of the types in the header; the name is truncated to the given
        // length.
        unsafe {
            self.check("cuDeviceGet", (call.cuDeviceGet)(&raw mut raw, index))?;
            self.check("cuDeviceGetName", (call.cuDeviceGetName)(name.as_mut_ptr().cast(), name.len() as i32, raw))?;
            self.check("cuDeviceTotalMem", (call.cuDeviceTotalMem_v2)(&raw mut memory_bytes, raw))?;
        }
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: the pointer is to a live integer.
            self.check("cuDeviceGetAttribute", unsafe { (call.cuDeviceGetAttribute)(&raw mut value, which, raw) })?;
            Ok::<i32, Error>(value)
        };
        let name =
            CStr::from_bytes_until_nul(&name).map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        Ok(Device {
            raw,
            name,
            memory_bytes,
            multiprocessors: attribute(MULTIPROCESSOR_COUNT)?,
            capability: (attribute(COMPUTE_CAPABILITY_MAJOR)?, attribute(COMPUTE_CAPABILITY_MINOR)?),
        })
    }

    /// Makes the primary context of a device current on this thread. It stays until the process ends.
    ///
    /// # Errors
    /// A call fails.
    pub fn context(self, device: &Device) -> Result<Context, Error> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the device was listed by this driver.
        let code = unsafe { (self.functions.cuDevicePrimaryCtxRetain)(&raw mut context, device.raw) };
        self.check("cuDevicePrimaryCtxRetain", code)?;
        // SAFETY: the context was just retained and is never released.
        self.check("cuCtxSetCurrent", unsafe { (self.functions.cuCtxSetCurrent)(context) })?;
        Ok(Context { driver: self, thread: PhantomData })
    }
}

/// The context of one device, current on the thread that created it and bound to that thread.
pub struct Context {
    driver: Driver,
    thread: PhantomData<*const ()>,
}

impl Context {
    /// Waits for all work on the device.
    ///
    /// # Errors
    /// The work failed.
    pub fn synchronize(&self) -> Result<(), Error> {
        // SAFETY: takes nothing; the context is current on this thread, which `self` cannot leave.
        self.driver.check("cuCtxSynchronize", unsafe { (self.driver.functions.cuCtxSynchronize)() })
    }

    /// Allocates memory of the device, filled with zeros.
    ///
    /// # Errors
    /// There is not enough memory.
    pub fn zeros(&self, bytes: usize) -> Result<Buffer<'_>, Error> {
        let call = &self.driver.functions;
        let mut address = 0;
        // SAFETY: the pointer is to a live integer.
        self.driver.check("cuMemAlloc", unsafe { (call.cuMemAlloc_v2)(&raw mut address, bytes) })?;
        let buffer = Buffer { context: self, address, bytes };
        // SAFETY: the range was just allocated.
        self.driver.check("cuMemsetD8", unsafe { (call.cuMemsetD8_v2)(address, 0, bytes) })?;
        Ok(buffer)
    }

    /// Allocates memory of the device with a copy of `values`.
    ///
    /// # Errors
    /// There is not enough memory.
    pub fn upload<T: Pod>(&self, values: &[T]) -> Result<Buffer<'_>, Error> {
        let buffer = self.zeros(size_of_val(values))?;
        // SAFETY: both ranges have the same number of bytes; when the call returns the source may be freed.
        let code =
            unsafe { (self.driver.functions.cuMemcpyHtoD_v2)(buffer.address, values.as_ptr().cast(), buffer.bytes) };
        self.driver.check("cuMemcpyHtoD", code)?;
        Ok(buffer)
    }

    /// Compiles a program for `device`, on which this context is, and loads it.
    ///
    /// # Errors
    /// The compiler's messages, or the driver refuses the machine code.
    pub fn load(&self, device: &Device, program: Program, nvrtc: &Nvrtc) -> Result<Loaded<'_>, Error> {
        let (major, minor) = device.capability;
        let compiled = program.compile(nvrtc, &format!("sm_{major}{minor}"))?;
        let call = &self.driver.functions;
        let mut module = std::ptr::null_mut();
        // SAFETY: a CUBIN states its own length in its header (ELF), and the driver copies what it needs.
        let code = unsafe { (call.cuModuleLoadData)(&raw mut module, compiled.cubin.as_ptr().cast()) };
        self.driver.check("cuModuleLoadData", code)?;
        Ok(Loaded { context: self, program, module: Handle { raw: module, destroy: call.cuModuleUnload } })
    }

    /// Seconds of one call of `work`: the smallest of several measurements, each over `calls` calls by the device's own
    /// clock.
    ///
    /// # Errors
    /// Those of `work`, and of the events.
    pub fn time(&self, calls: usize, mut work: impl FnMut() -> Result<(), Error>) -> Result<f64, Error> {
        const MEASUREMENTS: usize = 5;
        let (start, end) = (self.event()?, self.event()?);
        let call = &self.driver.functions;
        let record = |event: &Handle| {
            // SAFETY: the event lives; the stream is the default one.
            self.driver.check("cuEventRecord", unsafe { (call.cuEventRecord)(event.raw, std::ptr::null_mut()) })
        };
        work()?;
        let mut best = f64::INFINITY;
        for _ in 0..MEASUREMENTS {
            record(&start)?;
            for _ in 0..calls {
                work()?;
            }
            record(&end)?;
            // SAFETY: the event lives.
            self.driver.check("cuEventSynchronize", unsafe { (call.cuEventSynchronize)(end.raw) })?;
            let mut milliseconds = 0.0;
            // SAFETY: both events were recorded and are done; the pointer is to a live number.
            let code = unsafe { (call.cuEventElapsedTime)(&raw mut milliseconds, start.raw, end.raw) };
            self.driver.check("cuEventElapsedTime", code)?;
            best = best.min(f64::from(milliseconds) / 1e3 / calls as f64);
        }
        Ok(best)
    }

    fn event(&self) -> Result<Handle, Error> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer is to a live handle; 0 requests an event with a time.
        self.driver.check("cuEventCreate", unsafe { (self.driver.functions.cuEventCreate)(&raw mut raw, 0) })?;
        Ok(Handle { raw, destroy: self.driver.functions.cuEventDestroy_v2 })
    }
}

/// Memory of the device.
pub struct Buffer<'a> {
    context: &'a Context,
    address: u64,
    bytes: usize,
}

impl Buffer<'_> {
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its address on the device, for the calls of other libraries.
    pub(crate) fn pointer(&self) -> Pointer {
        std::ptr::with_exposed_provenance_mut(self.address as usize)
    }

    /// Copies `range` of its elements, once all work is done.
    ///
    /// # Errors
    /// The range is out of bounds, or earlier work failed.
    pub fn download<T: Pod>(&self, range: std::ops::Range<usize>) -> Result<Vec<T>, Error> {
        self.context.synchronize()?;
        if range.end * size_of::<T>() > self.bytes {
            let text = format!("elements to {} of {} bytes each, of {} bytes", range.end, size_of::<T>(), self.bytes);
            return Err(Error::refused("download", text));
        }
        let mut values = vec![T::zeroed(); range.len()];
        let from = self.address + (range.start * size_of::<T>()) as u64;
        // SAFETY: the range is within this allocation, as just checked, and the vector has as many bytes; any bytes are
        // a `T`.
        let code = unsafe {
            (self.context.driver.functions.cuMemcpyDtoH_v2)(values.as_mut_ptr().cast(), from, size_of_val(&values[..]))
        };
        self.context.driver.check("cuMemcpyDtoH", code)?;
        Ok(values)
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated by `zeros`, freed once; the driver waits for work that uses it. The result could not be
        // used.
        let _ = unsafe { (self.context.driver.functions.cuMemFree_v2)(self.address) };
    }
}

impl Memory for &Buffer<'_> {
    fn bytes(&self) -> usize {
        self.bytes
    }
}

/// A program on the device.
pub struct Loaded<'a> {
    context: &'a Context,
    program: Program,
    module: Handle,
}

impl Loaded<'_> {
    /// Launches a kernel of this program.
    ///
    /// # Errors
    /// The call is for another program, or the device refuses it.
    pub fn launch(&self, call: &Call<&Buffer<'_>>) -> Result<(), Error> {
        if call.program != self.program {
            return Err(Error::refused(
                call.kernel,
                format!("a call for {:?}, launched in {:?}", call.program, self.program),
            ));
        }
        let functions = &self.context.driver.functions;
        let name =
            CString::new(call.kernel).map_err(|_| Error::refused("cuModuleGetFunction", "a zero in the name"))?;
        let mut function = std::ptr::null_mut();
        // SAFETY: the module lives; the name is a C string.
        let code = unsafe { (functions.cuModuleGetFunction)(&raw mut function, self.module.raw, name.as_ptr()) };
        self.context.driver.check("cuModuleGetFunction", code)?;
        // SAFETY: the function is of a module that lives.
        let code = unsafe {
            (functions.cuFuncSetAttribute)(function, MAX_DYNAMIC_SHARED_SIZE_BYTES, call.shared_bytes as i32)
        };
        self.context.driver.check("cuFuncSetAttribute", code)?;
        // The driver reads as many bytes as the kernel declares; eight are enough for every kind.
        let value = |argument: &Argument<&Buffer<'_>>| match argument {
            Argument::Reads(memory) | Argument::Writes(memory) | Argument::Updates(memory) => memory.address,
            Argument::Absent => 0,
            Argument::Float(value) => value.to_bits().into(),
            Argument::Int(value) => u64::from(*value),
        };
        let mut values: Vec<u64> = call.arguments.iter().map(value).collect();
        let mut pointers: Vec<Pointer> = values.iter_mut().map(|value| std::ptr::from_mut(value).cast()).collect();
        // SAFETY: a call is made by the functions of `kernels` only, which check that memory is as large as its kernel needs; the tests of
        // `switchyard-cuda-reference` compare the arguments with those that the kernel declares, and execute it. The program is
        // the one that the call is for, as just checked. Each pointer is to eight live bytes, and a narrower type is at their start
        // on the little-endian machines that CUDA runs on.
        let code = unsafe {
            (functions.cuLaunchKernel)(
                function,
                call.blocks,
                1,
                1,
                call.threads,
                1,
                1,
                call.shared_bytes,
                std::ptr::null_mut(),
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.context.driver.check("cuLaunchKernel", code)
    }
}
