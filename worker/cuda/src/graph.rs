//! cuDNN's graph calls, as far as one operation needs them: descriptors with typed attributes, a plan, and its
//! execution.
#![allow(unsafe_code)]

use crate::cudnn::Cudnn;
use crate::driver::Buffer;
use crate::error::Error;
use crate::library::{Handle, Library, Pointer, functions};
use std::ffi::{c_char, c_void};

functions!(Functions {
    cudnnBackendCreateDescriptor(i32, *mut Pointer) -> i32;
    cudnnBackendDestroyDescriptor(Pointer) -> i32;
    cudnnBackendSetAttribute(Pointer, i32, i32, i64, *const c_void) -> i32;
    cudnnBackendGetAttribute(Pointer, i32, i32, i64, *mut i64, Pointer) -> i32;
    cudnnBackendFinalize(Pointer) -> i32;
    cudnnBackendExecute(Pointer, Pointer, Pointer) -> i32;
    cudnnGetLastErrorString(*mut c_char, usize) -> ();
});

const ENGINECFG_DESCRIPTOR: i32 = 3;
const ENGINEHEUR_DESCRIPTOR: i32 = 4;
const EXECUTION_PLAN_DESCRIPTOR: i32 = 5;
const OPERATIONGRAPH_DESCRIPTOR: i32 = 15;
const VARIANT_PACK_DESCRIPTOR: i32 = 16;
const TENSOR_DESCRIPTOR: i32 = 17;

const ENGINEHEUR_MODE: i32 = 200;
const ENGINEHEUR_OPERATION_GRAPH: i32 = 201;
const ENGINEHEUR_RESULTS: i32 = 202;
const EXECUTION_PLAN_HANDLE: i32 = 400;
const EXECUTION_PLAN_ENGINE_CONFIG: i32 = 401;
const EXECUTION_PLAN_WORKSPACE_SIZE: i32 = 402;
const OPERATIONGRAPH_HANDLE: i32 = 800;
const OPERATIONGRAPH_OPS: i32 = 801;
const TENSOR_BYTE_ALIGNMENT: i32 = 900;
const TENSOR_DATA_TYPE: i32 = 901;
const TENSOR_DIMENSIONS: i32 = 902;
const TENSOR_STRIDES: i32 = 903;
const TENSOR_UNIQUE_ID: i32 = 906;
const TENSOR_IS_BY_VALUE: i32 = 908;
const VARIANT_PACK_UNIQUE_IDS: i32 = 1000;
const VARIANT_PACK_DATA_POINTERS: i32 = 1001;
const VARIANT_PACK_WORKSPACE: i32 = 1003;

const TYPE_HANDLE: i32 = 0;
const TYPE_DATA_TYPE: i32 = 1;
const TYPE_BOOLEAN: i32 = 2;
const TYPE_INT64: i32 = 3;
const TYPE_VOID_PTR: i32 = 6;
const TYPE_HEUR_MODE: i32 = 8;
const TYPE_BACKEND_DESCRIPTOR: i32 = 15;

const HEUR_MODE_FALLBACK: i32 = 2;
const HEUR_MODE_A: i32 = 3;

/// Type of the elements of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Element {
    F32 = 0,
    Bf16 = 9,
}

/// Value of an attribute; cuDNN derives the element size from its type.
enum Value<'a> {
    Library(Pointer),
    Element(Element),
    Boolean(bool),
    Integers(&'a [i64]),
    Pointers(&'a [Pointer]),
    Heuristic(i32),
    Descriptors(&'a [Pointer]),
}

/// A tensor: dimensions (batch, heads, tokens, width) with their strides in elements.
pub struct Tensor {
    /// Its number in the graph, by which memory is assigned to it.
    pub id: i64,
    pub element: Element,
    pub dimensions: [i64; 4],
    pub strides: [i64; 4],
    /// A single number in host memory.
    pub by_value: bool,
}

impl Tensor {
    /// Bytes from its first to its last element on the device; `None` for a number in host memory.
    fn bytes(&self) -> Option<usize> {
        let last: i64 =
            self.dimensions.iter().zip(self.strides).map(|(dimension, stride)| (dimension - 1) * stride).sum();
        let element = match self.element {
            Element::F32 => 4,
            Element::Bf16 => 2,
        };
        (!self.by_value).then(|| usize::try_from(last + 1).unwrap_or(0) * element)
    }
}

/// The graph calls. Plans need a started cuDNN, operations do not.
pub struct Graph<'a> {
    functions: Functions,
    cudnn: &'a Cudnn,
}

impl<'a> Graph<'a> {
    /// Looks up the functions.
    ///
    /// # Errors
    /// A function is missing.
    pub fn new(library: &Library, cudnn: &'a Cudnn) -> Result<Graph<'a>, Error> {
        Ok(Graph { functions: Functions::load(library)?, cudnn })
    }

    /// Same as `Cudnn::check`, with the additional text of the graph calls.
    fn check(&self, call: &str, code: i32) -> Result<(), Error> {
        self.cudnn.check(call, code).map_err(|error| match error {
            Error::Call { library, call, code, text } => {
                let mut more = [0u8; 1024];
                // SAFETY: cuDNN writes at most as many bytes as it is told to.
                unsafe { (self.functions.cudnnGetLastErrorString)(more.as_mut_ptr().cast(), more.len()) };
                let end = more.iter().position(|byte| *byte == 0).unwrap_or(more.len());
                let text = format!("{text}: {}", String::from_utf8_lossy(&more[..end]).trim());
                Error::Call { library, call, code, text }
            }
            other => other,
        })
    }

    fn descriptor(&self, kind: i32) -> Result<Handle, Error> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer is to a live handle.
        let code = unsafe { (self.functions.cudnnBackendCreateDescriptor)(kind, &raw mut raw) };
        self.check(&format!("cudnnBackendCreateDescriptor({kind})"), code)?;
        Ok(Handle { raw, destroy: self.functions.cudnnBackendDestroyDescriptor })
    }

    fn set(&self, descriptor: &Handle, attribute: i32, value: &Value<'_>) -> Result<(), Error> {
        let (kind, count, address): (i32, usize, *const c_void) = match value {
            Value::Library(pointer) => (TYPE_HANDLE, 1, std::ptr::from_ref(pointer).cast()),
            Value::Element(element) => (TYPE_DATA_TYPE, 1, std::ptr::from_ref(element).cast()),
            Value::Boolean(boolean) => (TYPE_BOOLEAN, 1, std::ptr::from_ref(boolean).cast()),
            Value::Integers(list) => (TYPE_INT64, list.len(), list.as_ptr().cast()),
            Value::Pointers(list) => (TYPE_VOID_PTR, list.len(), list.as_ptr().cast()),
            Value::Heuristic(mode) => (TYPE_HEUR_MODE, 1, std::ptr::from_ref(mode).cast()),
            Value::Descriptors(list) => (TYPE_BACKEND_DESCRIPTOR, list.len(), list.as_ptr().cast()),
        };
        // SAFETY: the address is of as many live elements of the kind as are given; cuDNN copies them, and refuses an
        // attribute of another kind.
        let code = unsafe {
            (self.functions.cudnnBackendSetAttribute)(descriptor.raw, attribute, kind, count as i64, address)
        };
        self.check(&format!("cudnnBackendSetAttribute({attribute})"), code)
    }

    fn finalize(&self, descriptor: &Handle, what: &str) -> Result<(), Error> {
        // SAFETY: the descriptor lives.
        let code = unsafe { (self.functions.cudnnBackendFinalize)(descriptor.raw) };
        self.check(&format!("cudnnBackendFinalize({what})"), code)
    }

    fn tensor(&self, tensor: &Tensor) -> Result<Handle, Error> {
        const ALIGNMENT: i64 = 16;
        let descriptor = self.descriptor(TENSOR_DESCRIPTOR)?;
        let alignment = if tensor.by_value { size_of::<f32>() as i64 } else { ALIGNMENT };
        self.set(&descriptor, TENSOR_UNIQUE_ID, &Value::Integers(&[tensor.id]))?;
        self.set(&descriptor, TENSOR_DATA_TYPE, &Value::Element(tensor.element))?;
        self.set(&descriptor, TENSOR_BYTE_ALIGNMENT, &Value::Integers(&[alignment]))?;
        self.set(&descriptor, TENSOR_DIMENSIONS, &Value::Integers(&tensor.dimensions))?;
        self.set(&descriptor, TENSOR_STRIDES, &Value::Integers(&tensor.strides))?;
        if tensor.by_value {
            self.set(&descriptor, TENSOR_IS_BY_VALUE, &Value::Boolean(true))?;
        }
        self.finalize(&descriptor, "tensor")?;
        Ok(descriptor)
    }

    /// Creates an operation of `kind`, whose attributes are the given tensors. Needs no GPU.
    ///
    /// # Errors
    /// cuDNN does not know the operation, or refuses its tensors.
    pub fn operation(&self, kind: i32, tensors: &[(i32, Tensor)]) -> Result<Operation, Error> {
        let operation = self.descriptor(kind)?;
        let mut kept = Vec::new();
        for (attribute, tensor) in tensors {
            let descriptor = self.tensor(tensor)?;
            self.set(&operation, *attribute, &Value::Descriptors(&[descriptor.raw]))?;
            kept.push(descriptor);
        }
        self.finalize(&operation, "operation")?;
        let tensors = tensors.iter().map(|(_, tensor)| (tensor.id, tensor.bytes())).collect();
        Ok(Operation { descriptor: operation, _tensors: kept, tensors })
    }

    /// A plan for a graph of one operation.
    ///
    /// # Errors
    /// A call fails, or no engine accepts the graph.
    pub fn plan(&self, operation: Operation) -> Result<ExecutionPlan<'_, 'a>, Error> {
        let graph = self.descriptor(OPERATIONGRAPH_DESCRIPTOR)?;
        self.set(&graph, OPERATIONGRAPH_HANDLE, &Value::Library(self.cudnn.raw()?))?;
        self.set(&graph, OPERATIONGRAPH_OPS, &Value::Descriptors(&[operation.descriptor.raw]))?;
        self.finalize(&graph, "operation graph")?;
        // The error of the engine that the heuristic prefers says most.
        let mut first = None;
        for mode in [HEUR_MODE_A, HEUR_MODE_FALLBACK] {
            let engines = self.engines(&graph, mode).unwrap_or_else(|error| {
                first.get_or_insert(error);
                Vec::new()
            });
            for engine in &engines {
                match self.plan_with(engine) {
                    Ok((plan, workspace_bytes)) => {
                        return Ok(ExecutionPlan { graph: self, plan, tensors: operation.tensors, workspace_bytes });
                    }
                    Err(error) => {
                        first.get_or_insert(error);
                    }
                }
            }
        }
        Err(first.unwrap_or_else(|| Error::refused("cudnnBackendGetAttribute(202)", "the heuristic names no engine")))
    }

    /// Engine configurations that the heuristic proposes, best first.
    fn engines(&self, graph: &Handle, mode: i32) -> Result<Vec<Handle>, Error> {
        const MOST: usize = 8;
        let heuristic = self.descriptor(ENGINEHEUR_DESCRIPTOR)?;
        self.set(&heuristic, ENGINEHEUR_OPERATION_GRAPH, &Value::Descriptors(&[graph.raw]))?;
        self.set(&heuristic, ENGINEHEUR_MODE, &Value::Heuristic(mode))?;
        self.finalize(&heuristic, "heuristic")?;
        let mut engines = (0..MOST).map(|_| self.descriptor(ENGINECFG_DESCRIPTOR)).collect::<Result<Vec<_>, _>>()?;
        let mut list: Vec<Pointer> = engines.iter().map(|engine| engine.raw).collect();
        let mut count = 0i64;
        // SAFETY: cuDNN fills the live descriptors of the list, and writes their number.
        let code = unsafe {
            (self.functions.cudnnBackendGetAttribute)(
                heuristic.raw,
                ENGINEHEUR_RESULTS,
                TYPE_BACKEND_DESCRIPTOR,
                MOST as i64,
                &raw mut count,
                list.as_mut_ptr().cast(),
            )
        };
        self.check("cudnnBackendGetAttribute(202)", code)?;
        engines.truncate(usize::try_from(count).unwrap_or(0));
        Ok(engines)
    }

    fn plan_with(&self, engine: &Handle) -> Result<(Handle, usize), Error> {
        let plan = self.descriptor(EXECUTION_PLAN_DESCRIPTOR)?;
        self.set(&plan, EXECUTION_PLAN_HANDLE, &Value::Library(self.cudnn.raw()?))?;
        self.set(&plan, EXECUTION_PLAN_ENGINE_CONFIG, &Value::Descriptors(&[engine.raw]))?;
        self.finalize(&plan, "plan")?;
        let (mut bytes, mut count) = (0i64, 0i64);
        // SAFETY: cuDNN writes one integer and the count.
        let code = unsafe {
            (self.functions.cudnnBackendGetAttribute)(
                plan.raw,
                EXECUTION_PLAN_WORKSPACE_SIZE,
                TYPE_INT64,
                1,
                &raw mut count,
                (&raw mut bytes).cast(),
            )
        };
        self.check("cudnnBackendGetAttribute(402)", code)?;
        Ok((plan, usize::try_from(bytes).unwrap_or(0)))
    }
}

/// One operation with its tensors, finalized.
pub struct Operation {
    descriptor: Handle,
    _tensors: Vec<Handle>,
    /// Number of each tensor, and its bytes on the device; `None` for a number in host memory.
    tensors: Vec<(i64, Option<usize>)>,
}

/// A graph that is ready to run.
pub struct ExecutionPlan<'g, 'a> {
    graph: &'g Graph<'a>,
    plan: Handle,
    /// See [`Operation`].
    tensors: Vec<(i64, Option<usize>)>,
    /// Memory that it needs besides its tensors.
    pub workspace_bytes: usize,
}

impl ExecutionPlan<'_, '_> {
    /// Launches the graph: `buffers` are those of the tensors on the device in the order in which they were given, and
    /// `value` is the number for all tensors in host memory.
    ///
    /// # Errors
    /// Buffers are missing or too small, or a call fails.
    pub fn run(&self, buffers: &[&Buffer], value: f32, workspace: &Buffer) -> Result<(), Error> {
        let needed: Vec<usize> =
            self.tensors.iter().filter_map(|(_, bytes)| *bytes).chain([self.workspace_bytes]).collect();
        let given: Vec<usize> = buffers.iter().copied().chain([workspace]).map(Buffer::bytes).collect();
        if needed.len() != given.len() || needed.iter().zip(&given).any(|(needed, given)| needed > given) {
            return Err(Error::refused("run", format!("buffers of {given:?} bytes, expected at least {needed:?}")));
        }
        let mut buffers = buffers.iter();
        let mut value = value;
        let host: Pointer = (&raw mut value).cast();
        let pointers: Vec<Pointer> = self
            .tensors
            .iter()
            .map(|(_, bytes)| bytes.and_then(|_| buffers.next()).map_or(host, |buffer| buffer.pointer()))
            .collect();
        let ids: Vec<i64> = self.tensors.iter().map(|(id, _)| *id).collect();
        let graph = self.graph;
        let pack = graph.descriptor(VARIANT_PACK_DESCRIPTOR)?;
        graph.set(&pack, VARIANT_PACK_UNIQUE_IDS, &Value::Integers(&ids))?;
        graph.set(&pack, VARIANT_PACK_DATA_POINTERS, &Value::Pointers(&pointers))?;
        graph.set(&pack, VARIANT_PACK_WORKSPACE, &Value::Pointers(&[workspace.pointer()]))?;
        graph.finalize(&pack, "variant pack")?;
        // SAFETY: plan and pack are alive; the buffers are as large as their tensors, as checked above; host numbers
        // are read before the call returns, and freeing a buffer waits for the work.
        let code = unsafe { (graph.functions.cudnnBackendExecute)(graph.cudnn.raw()?, self.plan.raw, pack.raw) };
        graph.check("cudnnBackendExecute", code)
    }
}
