//! One operation of cuDNN as a graph: descriptors, a plan, and its execution.
#![allow(unsafe_code)]

use crate::cudnn::{
    BFLOAT16, Cudnn, ENGINEHEUR_DESCRIPTOR, ENGINEHEUR_MODE, ENGINEHEUR_OPERATION_GRAPH, EXECUTION_PLAN_DESCRIPTOR,
    EXECUTION_PLAN_ENGINE_CONFIG, EXECUTION_PLAN_HANDLE, EXECUTION_PLAN_WORKSPACE_SIZE, FLOAT, HEUR_MODE_A,
    HEUR_MODE_FALLBACK, OPERATIONGRAPH_DESCRIPTOR, OPERATIONGRAPH_HANDLE, OPERATIONGRAPH_OPS, TensorLayout,
    VARIANT_PACK_DATA_POINTERS, VARIANT_PACK_DESCRIPTOR, VARIANT_PACK_UNIQUE_IDS, VARIANT_PACK_WORKSPACE, Value,
};
use crate::driver::{Buffer, Stream};
use crate::error::Error;
use crate::library::{Handle, Pointer};

/// Type of the elements of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    F32,
    Bf16,
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

    fn layout(&self) -> TensorLayout {
        let Tensor { id, element, dimensions, strides, by_value } = *self;
        let data_type = match element {
            Element::F32 => FLOAT,
            Element::Bf16 => BFLOAT16,
        };
        TensorLayout { id, data_type, dimensions, strides, by_value }
    }
}

/// The graph calls. Plans need a started cuDNN, operations do not.
pub struct Graph<'a> {
    cudnn: &'a Cudnn,
}

impl<'a> Graph<'a> {
    pub fn new(cudnn: &'a Cudnn) -> Graph<'a> {
        Graph { cudnn }
    }

    /// Creates an operation of `kind`, whose attributes are the given tensors. Needs no GPU.
    ///
    /// # Errors
    /// cuDNN does not know the operation, or refuses its tensors.
    pub fn operation(&self, kind: i32, tensors: &[(i32, Tensor)]) -> Result<Operation, Error> {
        let operation = self.cudnn.descriptor(kind)?;
        let mut kept = Vec::new();
        for (attribute, tensor) in tensors {
            let descriptor = self.cudnn.tensor(&tensor.layout())?;
            self.cudnn.set(&operation, *attribute, &Value::Descriptors(&[descriptor.raw]))?;
            kept.push(descriptor);
        }
        self.cudnn.finalize(&operation, "operation")?;
        let tensors = tensors.iter().map(|(_, tensor)| (tensor.id, tensor.bytes())).collect();
        Ok(Operation { descriptor: operation, _tensors: kept, tensors })
    }

    /// A plan for a graph of one operation.
    ///
    /// # Errors
    /// A call fails, or no engine accepts the graph.
    pub fn plan(&self, operation: Operation) -> Result<ExecutionPlan<'a>, Error> {
        let cudnn = self.cudnn;
        let graph = cudnn.descriptor(OPERATIONGRAPH_DESCRIPTOR)?;
        cudnn.set(&graph, OPERATIONGRAPH_HANDLE, &Value::Library(cudnn.raw()?))?;
        cudnn.set(&graph, OPERATIONGRAPH_OPS, &Value::Descriptors(&[operation.descriptor.raw]))?;
        cudnn.finalize(&graph, "operation graph")?;
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
                        return Ok(ExecutionPlan { cudnn, plan, tensors: operation.tensors, workspace_bytes });
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
        let heuristic = self.cudnn.descriptor(ENGINEHEUR_DESCRIPTOR)?;
        self.cudnn.set(&heuristic, ENGINEHEUR_OPERATION_GRAPH, &Value::Descriptors(&[graph.raw]))?;
        self.cudnn.set(&heuristic, ENGINEHEUR_MODE, &Value::Heuristic(mode))?;
        self.cudnn.finalize(&heuristic, "heuristic")?;
        self.cudnn.engines(&heuristic, MOST)
    }

    fn plan_with(&self, engine: &Handle) -> Result<(Handle, usize), Error> {
        let plan = self.cudnn.descriptor(EXECUTION_PLAN_DESCRIPTOR)?;
        self.cudnn.set(&plan, EXECUTION_PLAN_HANDLE, &Value::Library(self.cudnn.raw()?))?;
        self.cudnn.set(&plan, EXECUTION_PLAN_ENGINE_CONFIG, &Value::Descriptors(&[engine.raw]))?;
        self.cudnn.finalize(&plan, "plan")?;
        let workspace_bytes = self.cudnn.integer(&plan, EXECUTION_PLAN_WORKSPACE_SIZE)?;
        Ok((plan, workspace_bytes))
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
pub struct ExecutionPlan<'a> {
    cudnn: &'a Cudnn,
    plan: Handle,
    /// See [`Operation`].
    tensors: Vec<(i64, Option<usize>)>,
    /// Memory that it needs besides its tensors.
    pub workspace_bytes: usize,
}

impl ExecutionPlan<'_> {
    /// Queues the graph: `buffers` are those of the tensors on the device in the order in which they were given, and
    /// `value` is the number for all tensors in host memory.
    ///
    /// # Errors
    /// Buffers are missing or too small, or a call fails.
    pub fn run(&self, buffers: &[&Buffer], value: f32, workspace: &Buffer, stream: &Stream) -> Result<(), Error> {
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
        let pack = self.cudnn.descriptor(VARIANT_PACK_DESCRIPTOR)?;
        self.cudnn.set(&pack, VARIANT_PACK_UNIQUE_IDS, &Value::Integers(&ids))?;
        self.cudnn.set(&pack, VARIANT_PACK_DATA_POINTERS, &Value::Pointers(&pointers))?;
        self.cudnn.set(&pack, VARIANT_PACK_WORKSPACE, &Value::Pointers(&[workspace.pointer()]))?;
        self.cudnn.finalize(&pack, "variant pack")?;
        // SAFETY: the buffers are as large as their tensors, as checked above; host numbers are read before the call returns, and freeing a
        // buffer waits for the work.
        unsafe { self.cudnn.execute(&self.plan, &pack, stream) }
    }
}
