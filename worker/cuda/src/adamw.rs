//! The AdamW kernel: source, machine code, and a launch that checks its arguments.
#![allow(unsafe_code)]

use crate::driver::{Argument, Buffer, Context, Kernel};
use crate::error::Error;
use crate::nvrtc::Nvrtc;

const SOURCE: &str = include_str!("adamw.cu");
const THREADS: u32 = 256;

/// Machine code of the kernel.
pub struct Cubin(Vec<u8>);

impl Cubin {
    /// Compiles the kernel; `options` name the architecture and the folders of headers.
    ///
    /// # Errors
    /// The compiler's messages, or that it produced no machine code.
    pub fn compile(nvrtc: &Nvrtc, options: &[String]) -> Result<Cubin, Error> {
        let cubin = nvrtc.cubin("adamw.cu", SOURCE, options)?;
        // A CUBIN is an ELF file; anything else would be PTX or nothing.
        if !cubin.starts_with(b"\x7fELF") {
            return Err(Error::refused("nvrtcGetCUBIN", format!("{} bytes that are not an ELF file", cubin.len())));
        }
        Ok(Cubin(cubin))
    }

    /// Size of the machine code.
    pub fn bytes(&self) -> usize {
        self.0.len()
    }
}

/// The kernel on a device.
pub struct AdamW<'a> {
    kernel: Kernel<'a>,
}

impl<'a> AdamW<'a> {
    /// Loads the machine code.
    ///
    /// # Errors
    /// It is for another kind of device.
    pub fn load(context: &'a Context, cubin: &Cubin) -> Result<AdamW<'a>, Error> {
        Ok(AdamW { kernel: context.kernel(&cubin.0, "adamw")? })
    }

    /// Launches one step of `count` parameters: buffers of weights, first and second moments and gradients in `f32`,
    /// and of weights in bf16; settings in the order of the kernel's arguments.
    ///
    /// # Errors
    /// A buffer is too small, or the device refuses.
    pub fn launch(
        &self,
        blocks: u32,
        buffers: [&Buffer<'_>; 5],
        settings: [f32; 8],
        count: usize,
    ) -> Result<(), Error> {
        let needed = [4, 4, 4, 4, 2].map(|bytes| bytes * count);
        let given = buffers.map(Buffer::bytes);
        // The kernel counts in `int`, in steps of the size of its grid.
        let steps = i32::try_from(count + (blocks * THREADS) as usize).is_ok();
        if !steps || needed.iter().zip(given).any(|(needed, given)| *needed > given) {
            return Err(Error::refused("adamw", format!("buffers of {given:?} bytes for {count} parameters")));
        }
        let numbers = settings.map(Argument::Float).into_iter().chain([Argument::Int(count as i32)]);
        let arguments: Vec<Argument<'_>> = buffers.map(Argument::Buffer).into_iter().chain(numbers).collect();
        // SAFETY: these are the arguments of the kernel in `adamw.cu`, the only source of a `Cubin`; it touches the
        // first `count` elements of each buffer, which exist, as just checked.
        unsafe { self.kernel.launch(blocks, THREADS, &arguments) }
    }
}
