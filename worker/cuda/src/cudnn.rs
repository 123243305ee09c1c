//! cuDNN: its handle, and descriptors with typed attributes, from which graphs are built (`graph`).
#![allow(unsafe_code)]

use crate::driver::Stream;
use crate::error::Error;
use crate::find::CUDNN;
use crate::library::{Handle, Library, Pointer, check, functions, text_at};
use std::ffi::{c_char, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

functions!(Functions {
    cudnnGetVersion() -> usize;
    cudnnGetCudartVersion() -> usize;
    cudnnGetErrorString(i32) -> *const c_char;
    cudnnGetLastErrorString(*mut c_char, usize) -> ();
    cudnnCreate(*mut Pointer) -> i32;
    cudnnDestroy(Pointer) -> i32;
    cudnnSetStream(Pointer, Pointer) -> i32;
    cudnnBackendCreateDescriptor(i32, *mut Pointer) -> i32;
    cudnnBackendDestroyDescriptor(Pointer) -> i32;
    cudnnBackendSetAttribute(Pointer, i32, i32, i64, *const c_void) -> i32;
    cudnnBackendGetAttribute(Pointer, i32, i32, i64, *mut i64, Pointer) -> i32;
    cudnnBackendFinalize(Pointer) -> i32;
    cudnnBackendExecute(Pointer, Pointer, Pointer) -> i32;
});

pub(crate) const FLOAT: i32 = 0;
pub(crate) const HALF: i32 = 2;
pub(crate) const INT32: i32 = 4;
pub(crate) const BFLOAT16: i32 = 9;
pub(crate) const BOOLEAN: i32 = 11;

const ENGINE_DESCRIPTOR: i32 = 2;
pub(crate) const ENGINECFG_DESCRIPTOR: i32 = 3;
pub(crate) const ENGINEHEUR_DESCRIPTOR: i32 = 4;
pub(crate) const EXECUTION_PLAN_DESCRIPTOR: i32 = 5;
pub(crate) const OPERATIONGRAPH_DESCRIPTOR: i32 = 15;
pub(crate) const VARIANT_PACK_DESCRIPTOR: i32 = 16;
const TENSOR_DESCRIPTOR: i32 = 17;

pub(crate) const ENGINEHEUR_MODE: i32 = 200;
pub(crate) const ENGINEHEUR_OPERATION_GRAPH: i32 = 201;
const ENGINEHEUR_RESULTS: i32 = 202;
const ENGINECFG_ENGINE: i32 = 300;
pub(crate) const EXECUTION_PLAN_HANDLE: i32 = 400;
pub(crate) const EXECUTION_PLAN_ENGINE_CONFIG: i32 = 401;
pub(crate) const EXECUTION_PLAN_WORKSPACE_SIZE: i32 = 402;
pub(crate) const OPERATIONGRAPH_HANDLE: i32 = 800;
pub(crate) const OPERATIONGRAPH_OPS: i32 = 801;
const TENSOR_BYTE_ALIGNMENT: i32 = 900;
const TENSOR_DATA_TYPE: i32 = 901;
const TENSOR_DIMENSIONS: i32 = 902;
const TENSOR_STRIDES: i32 = 903;
const TENSOR_UNIQUE_ID: i32 = 906;
const TENSOR_IS_VIRTUAL: i32 = 907;
const TENSOR_IS_BY_VALUE: i32 = 908;
pub(crate) const VARIANT_PACK_UNIQUE_IDS: i32 = 1000;
pub(crate) const VARIANT_PACK_DATA_POINTERS: i32 = 1001;
pub(crate) const VARIANT_PACK_WORKSPACE: i32 = 1003;
const ENGINE_NUMERICAL_NOTE: i32 = 1303;

const TYPE_HANDLE: i32 = 0;
const TYPE_DATA_TYPE: i32 = 1;
const TYPE_BOOLEAN: i32 = 2;
const TYPE_INT64: i32 = 3;
const TYPE_FLOAT: i32 = 4;
const TYPE_VOID_PTR: i32 = 6;
const TYPE_CONVOLUTION_MODE: i32 = 7;
const TYPE_HEUR_MODE: i32 = 8;
const TYPE_NUMERICAL_NOTE: i32 = 11;
const TYPE_POINTWISE_MODE: i32 = 14;
const TYPE_BACKEND_DESCRIPTOR: i32 = 15;
const TYPE_REDUCTION_OPERATOR: i32 = 18;
const TYPE_INT32: i32 = 23;
const TYPE_CHAR: i32 = 24;

pub(crate) const HEUR_MODE_FALLBACK: i32 = 2;
pub(crate) const HEUR_MODE_A: i32 = 3;

/// Upper bound of the numerical notes per engine, with a margin for future notes.
const MAX_NOTES: usize = 32;

/// Alignment of device tensor addresses in bytes.
pub(crate) const ALIGNMENT: usize = 16;

/// An attribute value; cuDNN derives the element size from its type.
pub(crate) enum Value<'a> {
    Library(Pointer),
    DataType(i32),
    Boolean(bool),
    Integers(&'a [i64]),
    Int32(i32),
    Float(f32),
    Pointers(&'a [Pointer]),
    ConvolutionMode(i32),
    Pointwise(i32),
    Reduction(i32),
    Heuristic(i32),
    Text(&'a [u8]),
    Descriptors(&'a [Pointer]),
}

/// A four-dimensional tensor with strides in elements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct TensorLayout {
    /// Tensor id, which binds memory to it.
    pub id: i64,
    pub data_type: i32,
    pub dimensions: [i64; 4],
    pub strides: [i64; 4],
    pub place: Place,
}

/// Location of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Place {
    Device,
    /// A host constant.
    Host(f32),
    /// Virtual: between two operations of a graph.
    Between,
}

impl TensorLayout {
    /// The value of a host constant.
    pub(crate) fn number(&self) -> Option<f32> {
        match self.place {
            Place::Host(number) => Some(number),
            Place::Device | Place::Between => None,
        }
    }

    /// Bytes from its first to its last element.
    pub(crate) fn bytes(&self) -> usize {
        let last: i64 =
            self.dimensions.iter().zip(self.strides).map(|(dimension, stride)| (dimension - 1) * stride).sum();
        usize::try_from(last + 1).unwrap_or(usize::MAX).saturating_mul(self.number_bytes())
    }

    fn number_bytes(&self) -> usize {
        match self.data_type {
            HALF | BFLOAT16 => 2,
            BOOLEAN => 1,
            _ => 4,
        }
    }
}

/// The library, on the current device once it is started. Clones share it.
#[derive(Clone)]
pub struct Cudnn {
    inner: Arc<Inner>,
}

struct Inner {
    functions: Functions,
    /// Behind a mutex because it has a single current stream.
    handle: Option<Mutex<Handle>>,
}

impl Cudnn {
    /// Resolves the functions. Only [`Cudnn::start`] needs a GPU.
    ///
    /// # Errors
    /// A function is missing.
    pub fn new(library: &Library) -> Result<Cudnn, Error> {
        Ok(Cudnn { inner: Arc::new(Inner { functions: Functions::load(library)?, handle: None }) })
    }

    /// Initialises the library on the device of the current context.
    ///
    /// # Errors
    /// A function is missing, or the call fails.
    pub fn start(library: &Library) -> Result<Cudnn, Error> {
        let mut inner = Inner { functions: Functions::load(library)?, handle: None };
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer is to a live handle.
        let code = unsafe { (inner.functions.cudnnCreate)(&raw mut raw) };
        inner.check("cudnnCreate", code)?;
        inner.handle = Some(Mutex::new(Handle { raw, destroy: inner.functions.cudnnDestroy }));
        Ok(Cudnn { inner: Arc::new(inner) })
    }

    fn call(&self) -> &Functions {
        &self.inner.functions
    }

    /// The version number.
    pub fn version(&self) -> usize {
        // SAFETY: no arguments.
        unsafe { (self.call().cudnnGetVersion)() }
    }

    /// The major CUDA version that it was built for.
    pub fn cuda_major(&self) -> usize {
        // SAFETY: no arguments.
        unsafe { (self.call().cudnnGetCudartVersion)() / 1000 }
    }

    fn check(&self, call: &str, code: i32) -> Result<(), Error> {
        self.inner.check(call, code)
    }

    fn handle(&self) -> Result<MutexGuard<'_, Handle>, Error> {
        let handle = self.inner.handle.as_ref().ok_or_else(|| Error::refused("cudnn", "cuDNN was not started"))?;
        Ok(handle.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The raw handle; an error if the library was not started.
    pub(crate) fn raw(&self) -> Result<Pointer, Error> {
        Ok(self.handle()?.raw)
    }

    pub(crate) fn descriptor(&self, kind: i32) -> Result<Handle, Error> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer is to a live handle.
        let code = unsafe { (self.call().cudnnBackendCreateDescriptor)(kind, &raw mut raw) };
        self.check(&format!("cudnnBackendCreateDescriptor({kind})"), code)?;
        Ok(Handle { raw, destroy: self.call().cudnnBackendDestroyDescriptor })
    }

    pub(crate) fn set(&self, descriptor: &Handle, attribute: i32, value: &Value<'_>) -> Result<(), Error> {
        let (kind, count, address): (i32, usize, *const c_void) = match value {
            Value::Library(pointer) => (TYPE_HANDLE, 1, std::ptr::from_ref(pointer).cast()),
            Value::DataType(number) => (TYPE_DATA_TYPE, 1, std::ptr::from_ref(number).cast()),
            Value::Boolean(boolean) => (TYPE_BOOLEAN, 1, std::ptr::from_ref(boolean).cast()),
            Value::Integers(list) => (TYPE_INT64, list.len(), list.as_ptr().cast()),
            Value::Int32(number) => (TYPE_INT32, 1, std::ptr::from_ref(number).cast()),
            Value::Float(number) => (TYPE_FLOAT, 1, std::ptr::from_ref(number).cast()),
            Value::Pointers(list) => (TYPE_VOID_PTR, list.len(), list.as_ptr().cast()),
            Value::ConvolutionMode(mode) => (TYPE_CONVOLUTION_MODE, 1, std::ptr::from_ref(mode).cast()),
            Value::Pointwise(mode) => (TYPE_POINTWISE_MODE, 1, std::ptr::from_ref(mode).cast()),
            Value::Reduction(mode) => (TYPE_REDUCTION_OPERATOR, 1, std::ptr::from_ref(mode).cast()),
            Value::Heuristic(mode) => (TYPE_HEUR_MODE, 1, std::ptr::from_ref(mode).cast()),
            Value::Text(bytes) => (TYPE_CHAR, bytes.len(), bytes.as_ptr().cast()),
            Value::Descriptors(list) => (TYPE_BACKEND_DESCRIPTOR, list.len(), list.as_ptr().cast()),
        };
        // SAFETY: the address is of `count` live elements of the kind; cuDNN copies them, and
        // rejects an attribute of another kind.
        let code =
            unsafe { (self.call().cudnnBackendSetAttribute)(descriptor.raw, attribute, kind, count as i64, address) };
        self.check(&format!("cudnnBackendSetAttribute({attribute})"), code)
    }

    pub(crate) fn finalize(&self, descriptor: &Handle, what: &str) -> Result<(), Error> {
        // SAFETY: the descriptor is alive.
        let code = unsafe { (self.call().cudnnBackendFinalize)(descriptor.raw) };
        self.check(&format!("cudnnBackendFinalize({what})"), code)
    }

    /// Reads the values of an attribute, at most `into.len()` of them; returns their number.
    ///
    /// # Safety
    /// `T` has the size of values of this type, and any bit pattern is a valid `T`.
    unsafe fn get<T>(&self, of: &Handle, (attribute, kind): (i32, i32), into: &mut [T]) -> Result<usize, Error> {
        let mut count = 0i64;
        // SAFETY: the descriptor is alive; cuDNN writes at most the given number of values, and
        // their count.
        let code = unsafe {
            (self.call().cudnnBackendGetAttribute)(
                of.raw,
                attribute,
                kind,
                into.len() as i64,
                &raw mut count,
                into.as_mut_ptr().cast(),
            )
        };
        self.check(&format!("cudnnBackendGetAttribute({attribute})"), code)?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    pub(crate) fn integer(&self, of: &Handle, attribute: i32) -> Result<usize, Error> {
        let mut value = [0i64];
        // SAFETY: 64 bits each.
        unsafe { self.get(of, (attribute, TYPE_INT64), &mut value) }?;
        Ok(usize::try_from(value[0]).unwrap_or(0))
    }

    pub(crate) fn text(&self, of: &Handle, attribute: i32) -> Result<String, Error> {
        // SAFETY: a byte each.
        let bytes = unsafe { self.get::<u8>(of, (attribute, TYPE_CHAR), &mut []) }?;
        let mut text = vec![0u8; bytes];
        // SAFETY: the same.
        let bytes = unsafe { self.get(of, (attribute, TYPE_CHAR), &mut text) }?;
        text.truncate(bytes);
        String::from_utf8(text).map_err(|_| Error::refused("cudnnBackendGetAttribute", "a text that is not UTF-8"))
    }

    /// At most `max` engine configurations that a heuristic proposes, best first.
    pub(crate) fn engines(&self, heuristic: &Handle, max: usize) -> Result<Vec<Handle>, Error> {
        let engines = (0..max).map(|_| self.descriptor(ENGINECFG_DESCRIPTOR)).collect::<Result<Vec<_>, _>>()?;
        let mut list: Vec<Pointer> = engines.iter().map(|engine| engine.raw).collect();
        // SAFETY: cuDNN fills the live descriptors of the list.
        let count = unsafe { self.get(heuristic, (ENGINEHEUR_RESULTS, TYPE_BACKEND_DESCRIPTOR), &mut list) }?;
        Ok(engines.into_iter().take(count).collect())
    }

    /// The numerical notes of a configuration's engine.
    pub(crate) fn notes(&self, configuration: &Handle) -> Result<Vec<i32>, Error> {
        let engine = self.descriptor(ENGINE_DESCRIPTOR)?;
        // SAFETY: cuDNN fills the live descriptor.
        unsafe { self.get(configuration, (ENGINECFG_ENGINE, TYPE_BACKEND_DESCRIPTOR), &mut [engine.raw]) }?;
        let mut notes = vec![0i32; MAX_NOTES];
        // SAFETY: 32 bits each.
        let count = unsafe { self.get(&engine, (ENGINE_NUMERICAL_NOTE, TYPE_NUMERICAL_NOTE), &mut notes) }?;
        notes.truncate(count);
        Ok(notes)
    }

    pub(crate) fn tensor(&self, tensor: &TensorLayout) -> Result<Handle, Error> {
        let descriptor = self.descriptor(TENSOR_DESCRIPTOR)?;
        let alignment = if tensor.place == Place::Device { ALIGNMENT } else { tensor.number_bytes() };
        self.set(&descriptor, TENSOR_UNIQUE_ID, &Value::Integers(&[tensor.id]))?;
        self.set(&descriptor, TENSOR_DATA_TYPE, &Value::DataType(tensor.data_type))?;
        self.set(&descriptor, TENSOR_BYTE_ALIGNMENT, &Value::Integers(&[alignment as i64]))?;
        self.set(&descriptor, TENSOR_DIMENSIONS, &Value::Integers(&tensor.dimensions))?;
        self.set(&descriptor, TENSOR_STRIDES, &Value::Integers(&tensor.strides))?;
        match tensor.place {
            Place::Device => {}
            Place::Host(_) => self.set(&descriptor, TENSOR_IS_BY_VALUE, &Value::Boolean(true))?,
            Place::Between => self.set(&descriptor, TENSOR_IS_VIRTUAL, &Value::Boolean(true))?,
        }
        self.finalize(&descriptor, "tensor")?;
        Ok(descriptor)
    }

    /// Queues a plan in a stream.
    ///
    /// # Safety
    /// Plan and pack are finalized descriptors of this library. The memory that the pack names
    /// matches the plan's tensors, is alive, and is not freed before the execution finishes.
    pub(crate) unsafe fn execute(&self, plan: &Handle, pack: &Handle, stream: &Stream) -> Result<(), Error> {
        let handle = self.handle()?;
        // SAFETY: handle and stream are alive.
        let code = unsafe { (self.call().cudnnSetStream)(handle.raw, stream.raw()) };
        self.check("cudnnSetStream", code)?;
        // SAFETY: as the caller promises.
        let code = unsafe { (self.call().cudnnBackendExecute)(handle.raw, plan.raw, pack.raw) };
        self.check("cudnnBackendExecute", code)
    }
}

impl Inner {
    /// Adds the library's message about the last call to the error.
    fn check(&self, call: &str, code: i32) -> Result<(), Error> {
        check(CUDNN.name, call, code, || {
            // SAFETY: any code is valid; the result is a constant string.
            let text = unsafe { text_at((self.functions.cudnnGetErrorString)(code)) };
            let mut more = [0u8; 1024];
            // SAFETY: cuDNN writes at most the given number of bytes.
            unsafe { (self.functions.cudnnGetLastErrorString)(more.as_mut_ptr().cast(), more.len()) };
            let end = more.iter().position(|byte| *byte == 0).unwrap_or(more.len());
            format!("{text}: {}", String::from_utf8_lossy(&more[..end]).trim())
        })
    }
}

#[cfg(test)]
mod tests;
