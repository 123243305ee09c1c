//! cuDNN: its handle, and convolutions with the calls that are deprecated since 9.0 and still exist in 9.26. The graph
//! calls are in `graph`.
#![allow(unsafe_code)]

use crate::driver::Buffer;
use crate::error::Error;
use crate::find::CUDNN;
use crate::library::{Handle, Library, Pointer, check, functions, text_at};
use std::ffi::c_char;

functions!(Functions {
    cudnnGetVersion() -> usize;
    cudnnGetErrorString(i32) -> *const c_char;
    cudnnCreate(*mut Pointer) -> i32;
    cudnnDestroy(Pointer) -> i32;
    cudnnCreateTensorDescriptor(*mut Pointer) -> i32;
    cudnnDestroyTensorDescriptor(Pointer) -> i32;
    cudnnSetTensor4dDescriptor(Pointer, i32, i32, i32, i32, i32, i32) -> i32;
    cudnnCreateFilterDescriptor(*mut Pointer) -> i32;
    cudnnDestroyFilterDescriptor(Pointer) -> i32;
    cudnnSetFilter4dDescriptor(Pointer, i32, i32, i32, i32, i32, i32) -> i32;
    cudnnCreateConvolutionDescriptor(*mut Pointer) -> i32;
    cudnnDestroyConvolutionDescriptor(Pointer) -> i32;
    cudnnSetConvolution2dDescriptor(Pointer, i32, i32, i32, i32, i32, i32, i32, i32) -> i32;
    cudnnSetConvolutionMathType(Pointer, i32) -> i32;
    cudnnFindConvolutionForwardAlgorithmEx(
        Pointer, Pointer, Pointer, Pointer, Pointer, Pointer, Pointer, Pointer, i32, *mut i32,
        *mut Found, Pointer, usize,
    ) -> i32;
    cudnnFindConvolutionBackwardDataAlgorithmEx(
        Pointer, Pointer, Pointer, Pointer, Pointer, Pointer, Pointer, Pointer, i32, *mut i32,
        *mut Found, Pointer, usize,
    ) -> i32;
    cudnnFindConvolutionBackwardFilterAlgorithmEx(
        Pointer, Pointer, Pointer, Pointer, Pointer, Pointer, Pointer, Pointer, i32, *mut i32,
        *mut Found, Pointer, usize,
    ) -> i32;
    cudnnConvolutionForward(
        Pointer, *const f32, Pointer, Pointer, Pointer, Pointer, Pointer, i32, Pointer, usize,
        *const f32, Pointer, Pointer,
    ) -> i32;
    cudnnConvolutionBackwardData(
        Pointer, *const f32, Pointer, Pointer, Pointer, Pointer, Pointer, i32, Pointer, usize,
        *const f32, Pointer, Pointer,
    ) -> i32;
    cudnnConvolutionBackwardFilter(
        Pointer, *const f32, Pointer, Pointer, Pointer, Pointer, Pointer, i32, Pointer, usize,
        *const f32, Pointer, Pointer,
    ) -> i32;
});

const NHWC: i32 = 1;
const FLOAT: i32 = 0;
const BFLOAT16: i32 = 9;
const CROSS_CORRELATION: i32 = 1;
const TENSOR_OP_MATH: i32 = 1;

/// `cudnnConvolutionFwdAlgoPerf_t` and its counterparts for the other two directions.
#[repr(C)]
#[derive(Clone, Copy)]
struct Found {
    algorithm: i32,
    status: i32,
    milliseconds: f32,
    workspace_bytes: usize,
    determinism: i32,
    math: i32,
    reserved: [i32; 3],
}

/// A convolution of square images with square filters, in NHWC and in bf16 with sums in f32.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub images: usize,
    pub channels: usize,
    /// Height and width of an image.
    pub size: usize,
    pub filters: usize,
    /// Height and width of a filter.
    pub window: usize,
    pub stride: usize,
    pub padding: usize,
}

impl Shape {
    /// Height and width of the result.
    pub fn result(&self) -> usize {
        (self.size + 2 * self.padding - self.window) / self.stride + 1
    }

    /// Elements of the images, the filters and the results.
    pub fn elements(&self) -> [usize; 3] {
        [
            self.images * self.size * self.size * self.channels,
            self.filters * self.window * self.window * self.channels,
            self.images * self.result() * self.result() * self.filters,
        ]
    }
}

/// Which of images, filters and results is computed from the other two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Forward,
    /// The gradient of the images.
    Images,
    /// The gradient of the filters.
    Filters,
}

/// The library, on the current device once it is started.
pub struct Cudnn {
    functions: Functions,
    handle: Option<Handle>,
}

impl Cudnn {
    /// Looks up the functions. Only [`Cudnn::start`] needs a GPU.
    ///
    /// # Errors
    /// A function is missing.
    pub fn new(library: &Library) -> Result<Cudnn, Error> {
        Ok(Cudnn { functions: Functions::load(library)?, handle: None })
    }

    /// Starts the library on the current device.
    ///
    /// # Errors
    /// The call fails.
    pub fn start(&mut self) -> Result<(), Error> {
        // SAFETY: the pointer is to a live handle.
        let make = |raw: *mut Pointer| unsafe { (self.functions.cudnnCreate)(raw) };
        self.handle = Some(self.create("cudnnCreate", self.functions.cudnnDestroy, make)?);
        Ok(())
    }

    /// The version number.
    pub fn version(&self) -> usize {
        // SAFETY: takes nothing.
        unsafe { (self.functions.cudnnGetVersion)() }
    }

    pub(crate) fn check(&self, call: &str, code: i32) -> Result<(), Error> {
        // SAFETY: any number may be passed; the result is a constant string.
        check(CUDNN.name, call, code, || unsafe { text_at((self.functions.cudnnGetErrorString)(code)) })
    }

    pub(crate) fn create(
        &self,
        call: &str,
        destroy: unsafe extern "C" fn(Pointer) -> i32,
        make: impl FnOnce(*mut Pointer) -> i32,
    ) -> Result<Handle, Error> {
        let mut raw = std::ptr::null_mut();
        self.check(call, make(&raw mut raw))?;
        Ok(Handle { raw, destroy })
    }

    /// The raw handle; an error if the library was not started.
    pub(crate) fn raw(&self) -> Result<Pointer, Error> {
        let started = self.handle.as_ref().map(|handle| handle.raw);
        started.ok_or_else(|| Error::refused("cudnn", "cuDNN was not started"))
    }

    /// Creates the descriptors of a convolution.
    ///
    /// # Errors
    /// A call fails.
    pub fn convolution(&self, shape: Shape) -> Result<Convolution<'_>, Error> {
        let call = &self.functions;
        let number = |value: usize| value as i32;
        let tensor = |channels: usize, size: usize| {
            // SAFETY: the pointer is to a live handle.
            let make = |raw: *mut Pointer| unsafe { (call.cudnnCreateTensorDescriptor)(raw) };
            let handle = self.create("cudnnCreateTensorDescriptor", call.cudnnDestroyTensorDescriptor, make)?;
            let [n, c, s] = [shape.images, channels, size].map(number);
            // SAFETY: the descriptor was just made.
            let code = unsafe { (call.cudnnSetTensor4dDescriptor)(handle.raw, NHWC, BFLOAT16, n, c, s, s) };
            self.check("cudnnSetTensor4dDescriptor", code)?;
            Ok::<Handle, Error>(handle)
        };
        let (x, y) = (tensor(shape.channels, shape.size)?, tensor(shape.filters, shape.result())?);
        // SAFETY: the pointer is to a live handle.
        let make = |raw: *mut Pointer| unsafe { (call.cudnnCreateFilterDescriptor)(raw) };
        let w = self.create("cudnnCreateFilterDescriptor", call.cudnnDestroyFilterDescriptor, make)?;
        let [k, c, r] = [shape.filters, shape.channels, shape.window].map(number);
        // SAFETY: the descriptor was just made.
        let code = unsafe { (call.cudnnSetFilter4dDescriptor)(w.raw, BFLOAT16, NHWC, k, c, r, r) };
        self.check("cudnnSetFilter4dDescriptor", code)?;
        // SAFETY: the pointer is to a live handle.
        let make = |raw: *mut Pointer| unsafe { (call.cudnnCreateConvolutionDescriptor)(raw) };
        let how = self.create("cudnnCreateConvolutionDescriptor", call.cudnnDestroyConvolutionDescriptor, make)?;
        let [p, s] = [shape.padding, shape.stride].map(number);
        // SAFETY: the descriptor was just made.
        let code =
            unsafe { (call.cudnnSetConvolution2dDescriptor)(how.raw, p, p, s, s, 1, 1, CROSS_CORRELATION, FLOAT) };
        self.check("cudnnSetConvolution2dDescriptor", code)?;
        Ok(Convolution { cudnn: self, shape, x, w, y, how })
    }
}

/// A convolution with its descriptors.
pub struct Convolution<'a> {
    cudnn: &'a Cudnn,
    shape: Shape,
    x: Handle,
    w: Handle,
    y: Handle,
    how: Handle,
}

/// An algorithm for one direction of a convolution.
#[derive(Debug, Clone, Copy)]
pub struct Algorithm {
    direction: Direction,
    number: i32,
    /// The math type with which it was found; it only works with this one.
    math: i32,
    workspace_bytes: usize,
}

impl Convolution<'_> {
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    fn set_math(&self, math: i32) -> Result<(), Error> {
        // SAFETY: the descriptor lives.
        let code = unsafe { (self.cudnn.functions.cudnnSetConvolutionMathType)(self.how.raw, math) };
        self.cudnn.check("cudnnSetConvolutionMathType", code)
    }

    fn check_buffers(&self, buffers: [&Buffer; 3]) -> Result<(), Error> {
        let needed = self.shape.elements().map(|elements| elements * 2);
        let given = buffers.map(Buffer::bytes);
        if needed.iter().zip(given).any(|(needed, given)| *needed > given) {
            return Err(Error::refused(
                "convolution",
                format!("buffers of {given:?} bytes, expected at least {needed:?}"),
            ));
        }
        Ok(())
    }

    /// The three tensors in the order of the direction's calls; the one that is written is last.
    fn operands(&self, direction: Direction, [x, w, y]: [&Buffer; 3]) -> [(Pointer, Pointer); 3] {
        let [x, w, y] = [(self.x.raw, x.pointer()), (self.w.raw, w.pointer()), (self.y.raw, y.pointer())];
        match direction {
            Direction::Forward => [x, w, y],
            Direction::Images => [w, y, x],
            Direction::Filters => [x, y, w],
        }
    }

    /// The fastest algorithm according to cuDNN's own measurement. Overwrites the result of the direction.
    ///
    /// # Errors
    /// A buffer is too small, a call fails, or no algorithm works.
    pub fn fastest(&self, direction: Direction, buffers: [&Buffer; 3], workspace: &Buffer) -> Result<Algorithm, Error> {
        self.check_buffers(buffers)?;
        self.set_math(TENSOR_OP_MATH)?;
        let call = &self.cudnn.functions;
        let (name, find) = match direction {
            Direction::Forward => {
                ("cudnnFindConvolutionForwardAlgorithmEx", call.cudnnFindConvolutionForwardAlgorithmEx)
            }
            Direction::Images => {
                ("cudnnFindConvolutionBackwardDataAlgorithmEx", call.cudnnFindConvolutionBackwardDataAlgorithmEx)
            }
            Direction::Filters => {
                ("cudnnFindConvolutionBackwardFilterAlgorithmEx", call.cudnnFindConvolutionBackwardFilterAlgorithmEx)
            }
        };
        let [first, second, written] = self.operands(direction, buffers);
        const MOST: usize = 8;
        let empty = Found {
            algorithm: 0,
            status: -1,
            milliseconds: 0.0,
            workspace_bytes: 0,
            determinism: 0,
            math: 0,
            reserved: [0; 3],
        };
        let (mut found, mut count) = ([empty; MOST], 0);
        // SAFETY: handles are alive, and the buffers are as large as their descriptors say, as just checked; at most
        // `MOST` results are written.
        let code = unsafe {
            find(
                self.cudnn.raw()?,
                first.0,
                first.1,
                second.0,
                second.1,
                self.how.raw,
                written.0,
                written.1,
                MOST as i32,
                &raw mut count,
                found.as_mut_ptr(),
                workspace.pointer(),
                workspace.bytes(),
            )
        };
        self.cudnn.check(name, code)?;
        let count = usize::try_from(count).unwrap_or(0).min(MOST);
        let fits = |found: &&Found| found.status == 0 && found.workspace_bytes <= workspace.bytes();
        let best = found[..count].iter().filter(fits).min_by(|a, b| a.milliseconds.total_cmp(&b.milliseconds));
        let best = best.ok_or_else(|| Error::refused(name, "no algorithm works"))?;
        Ok(Algorithm { direction, number: best.algorithm, math: best.math, workspace_bytes: best.workspace_bytes })
    }

    /// Launches one direction.
    ///
    /// # Errors
    /// A buffer is too small, or the call fails.
    pub fn run(&self, algorithm: Algorithm, buffers: [&Buffer; 3], workspace: &Buffer) -> Result<(), Error> {
        self.check_buffers(buffers)?;
        if workspace.bytes() < algorithm.workspace_bytes {
            let text = format!("{} bytes of workspace, expected {}", workspace.bytes(), algorithm.workspace_bytes);
            return Err(Error::refused("convolution", text));
        }
        self.set_math(algorithm.math)?;
        let call = &self.cudnn.functions;
        let (name, run) = match algorithm.direction {
            Direction::Forward => ("cudnnConvolutionForward", call.cudnnConvolutionForward),
            Direction::Images => ("cudnnConvolutionBackwardData", call.cudnnConvolutionBackwardData),
            Direction::Filters => ("cudnnConvolutionBackwardFilter", call.cudnnConvolutionBackwardFilter),
        };
        let [first, second, written] = self.operands(algorithm.direction, buffers);
        let (one, zero) = (1.0f32, 0.0f32);
        // SAFETY: as in `fastest`; the two factors are read before the call returns; freeing a buffer waits for the
        // work.
        let code = unsafe {
            run(
                self.cudnn.raw()?,
                &raw const one,
                first.0,
                first.1,
                second.0,
                second.1,
                self.how.raw,
                algorithm.number,
                workspace.pointer(),
                algorithm.workspace_bytes,
                &raw const zero,
                written.0,
                written.1,
            )
        };
        self.cudnn.check(name, code)
    }
}
