//! Kernels on the device.

use super::{Context, Object, Span, Stream};
use crate::error::Error;
use crate::kernels::{Argument, Call, Program};
use crate::library::Pointer;
use crate::nvrtc::Nvrtc;
use std::ffi::CString;
use std::sync::{Arc, Mutex, PoisonError};

/// Kernel attribute: maximum dynamic shared memory per launch.
pub(super) const MAX_DYNAMIC_SHARED_SIZE_BYTES: i32 = 8;
/// Our kernels have fewer arguments; a fixed limit avoids allocating on launch.
const MAX_ARGUMENTS: usize = 32;

/// A program loaded on the device.
pub struct Loaded {
    program: Program,
    module: Arc<Object>,
    /// Kernels launched so far.
    kernels: Mutex<Vec<Arc<Kernel>>>,
}

struct Kernel {
    name: &'static str,
    /// An address owned by the module.
    raw: usize,
    /// Parameter sizes in bytes, as declared in the machine code.
    parameters: Vec<usize>,
    shared_bytes: u32,
}

impl Context {
    /// Compiles a program for this device and loads it.
    ///
    /// # Errors
    /// The compiler's messages, or the driver refuses the machine code.
    pub fn load(&self, program: Program, nvrtc: &Nvrtc) -> Result<Loaded, Error> {
        let compiled = program.compile(nvrtc, &self.device().architecture())?;
        self.load_code(program, &compiled.cubin)
    }

    /// Loads a program's complete machine code, as compiled for this device.
    ///
    /// # Errors
    /// The driver rejects it.
    pub fn load_code(&self, program: Program, cubin: &[u8]) -> Result<Loaded, Error> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: a CUBIN states its own length in its header (ELF), and the driver copies what it
        // needs.
        self.call("cuModuleLoadData", |call| unsafe { (call.cuModuleLoadData)(&raw mut raw, cubin.as_ptr().cast()) })?;
        let module = Object { context: self.clone(), raw, destroy: self.inner.driver.functions.cuModuleUnload };
        Ok(Loaded { program, module: Arc::new(module), kernels: Mutex::default() })
    }
}

impl Loaded {
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Queues a kernel launch of this program.
    ///
    /// # Errors
    /// The call is for another program, a buffer has been freed, or the device rejects it.
    pub fn launch(&self, call: &Call<Span>, stream: &Stream) -> Result<(), Error> {
        if call.program != self.program {
            return Err(Error::refused(
                call.kernel,
                format!("a call for {:?}, launched in {:?}", call.program, self.program),
            ));
        }
        let kernel = self.kernel(call)?;
        let given = || call.arguments.iter().map(|argument| value(argument).1);
        if !given().eq(kernel.parameters.iter().copied()) || call.arguments.len() > MAX_ARGUMENTS {
            let text = format!(
                "arguments of {:?} bytes, expected {:?}, and at most {MAX_ARGUMENTS}",
                given().collect::<Vec<_>>(),
                kernel.parameters
            );
            return Err(Error::refused(call.kernel, text));
        }
        let spans = call.arguments.iter().filter_map(|argument| match argument {
            Argument::Reads(span) | Argument::Writes(span) | Argument::Updates(span) => Some(*span),
            Argument::Absent | Argument::Int(_) | Argument::Float(_) => None,
        });
        stream.uses(call.kernel, spans)?;
        stream.record_object(&self.module);
        let mut values = [0u64; MAX_ARGUMENTS];
        values.iter_mut().zip(&call.arguments).for_each(|(to, argument)| *to = value(argument).0);
        let mut pointers = values.each_mut().map(|value| std::ptr::from_mut(value).cast());
        // SAFETY: calls are made only by the functions in `kernels`, which check that memory is as
        // large as the kernel needs; the tests in `switchyard-cuda-reference` execute them. The
        // program matches the call, the number and sizes of its arguments match the kernel's, and
        // its buffers are alive, as just checked; freeing one waits for the kernel. Each pointer is
        // to eight live bytes, and narrower types are at their start on the little-endian machines
        // that CUDA supports.
        stream.context().call("cuLaunchKernel", |functions| unsafe {
            (functions.cuLaunchKernel)(
                std::ptr::with_exposed_provenance_mut(kernel.raw),
                call.blocks,
                1,
                1,
                call.threads,
                1,
                1,
                call.shared_bytes,
                stream.raw(),
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })
    }

    /// The kernel of a call, configured for at least the call's shared memory.
    fn kernel(&self, call: &Call<Span>) -> Result<Arc<Kernel>, Error> {
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |kernel: &&Arc<Kernel>| kernel.name == call.kernel && kernel.shared_bytes >= call.shared_bytes;
        if let Some(kernel) = kernels.iter().find(fits) {
            return Ok(Arc::clone(kernel));
        }
        let kernel = Arc::new(self.look_up(call.kernel, call.shared_bytes)?);
        kernels.retain(|other| other.name != call.kernel);
        kernels.push(Arc::clone(&kernel));
        Ok(kernel)
    }

    fn look_up(&self, name: &'static str, shared_bytes: u32) -> Result<Kernel, Error> {
        let context = &self.module.context;
        let text = CString::new(name).map_err(|_| Error::refused("cuModuleGetFunction", "a zero in the name"))?;
        let mut raw: Pointer = std::ptr::null_mut();
        // SAFETY: the module is alive; the name is a C string.
        context.call("cuModuleGetFunction", |call| unsafe {
            (call.cuModuleGetFunction)(&raw mut raw, self.module.raw, text.as_ptr())
        })?;
        // SAFETY: the function belongs to a live module.
        context.call("cuFuncSetAttribute", |call| unsafe {
            (call.cuFuncSetAttribute)(raw, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes as i32)
        })?;
        context.make_current()?;
        let size = |index| {
            let (mut offset, mut bytes) = (0, 0);
            let functions = &context.inner.driver.functions;
            // SAFETY: the function belongs to a live module; the pointers are to live integers. The
            // call fails for indices beyond the last parameter.
            let code = unsafe { (functions.cuFuncGetParamInfo)(raw, index, &raw mut offset, &raw mut bytes) };
            (code == 0).then_some(bytes)
        };
        let parameters = (0..).map_while(size).collect();
        Ok(Kernel { name, raw: raw.expose_provenance(), parameters, shared_bytes })
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // Launches need the code. Failed work is finished, too.
        let _ = self.module.context.synchronize();
    }
}

/// The raw value of an argument, and its size in bytes.
fn value(argument: &Argument<Span>) -> (u64, usize) {
    match argument {
        Argument::Reads(span) | Argument::Writes(span) | Argument::Updates(span) => (span.address, 8),
        Argument::Absent => (0, 8),
        Argument::Float(value) => (value.to_bits().into(), 4),
        Argument::Int(value) => (u64::from(*value), 4),
    }
}
