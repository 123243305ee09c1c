//! cuDNN operations: plans from cuDNN's heuristics, bound to memory and queued.
//!
//! ```text
//! Operation ── Plan: an engine, and its workspace ── Planned: with memory ── run
//! ```
#![allow(unsafe_code)]

use crate::attention::Attention;
use crate::convolution::{Convolution, Direction};
use crate::cudnn::{
    ALIGNMENT, Cudnn, ENGINEHEUR_DESCRIPTOR, ENGINEHEUR_MODE, ENGINEHEUR_OPERATION_GRAPH, EXECUTION_PLAN_DESCRIPTOR,
    EXECUTION_PLAN_ENGINE_CONFIG, EXECUTION_PLAN_HANDLE, EXECUTION_PLAN_WORKSPACE_SIZE, HEUR_MODE_A,
    HEUR_MODE_FALLBACK, Place, TensorLayout, VARIANT_PACK_DATA_POINTERS, VARIANT_PACK_DESCRIPTOR,
    VARIANT_PACK_UNIQUE_IDS, VARIANT_PACK_WORKSPACE, Value,
};
use crate::driver::{Span, Stream};
use crate::error::Error;
use crate::graph::Graph;
use crate::kernels::attention::Shape;
use crate::kernels::{Argument, Memory};
use crate::library::{Handle, Pointer};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

const DEVICEPROP_DESCRIPTOR: i32 = 38;

const ENGINEHEUR_DEVICEPROP: i32 = 204;
const EXECUTION_PLAN_DEVICEPROP: i32 = 407;
const DEVICEPROP_DEVICE_ID: i32 = 2700;
const DEVICEPROP_JSON: i32 = 2702;

/// Numerical notes of engines.
const TENSOR_CORE: i32 = 0;
const DOWN_CONVERT_INPUTS: i32 = 1;
const REDUCED_PRECISION_REDUCTION: i32 = 2;
const FFT: i32 = 3;
const NONDETERMINISTIC: i32 = 4;
const WINOGRAD: [i32; 4] = [5, 6, 7, 8];

/// Maximum number of engine configurations to request from a heuristic; more than we have ever seen
/// proposed.
const MAX_ENGINES: usize = 64;

/// First supported version.
pub const SINCE: usize = 91_100;
/// The major version whose API is used here.
pub const MAJOR: usize = 9;

/// An operation to query or run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Convolution(Convolution),
    Attention(Attention),
}

impl Operation {
    /// How it uses its memory. A convolution has images, filters and results. Attention has the
    /// rows of queries, keys and values, the output, and the saved tensor. Its gradient also has
    /// the output's gradient, the rows' gradients, and scratch memory of
    /// [`Attention::scratch_bytes`].
    pub fn arguments<M: Copy>(&self, memory: &[M]) -> Vec<Argument<M>> {
        let is_written = |index: usize| match self {
            Operation::Convolution(of) => index == of.direction.written(),
            Operation::Attention(Attention { backward, .. }) => index >= if *backward { 4 } else { 1 },
        };
        let adds = matches!(self, Operation::Convolution(of) if of.adds);
        let argument = |(index, memory): (usize, &M)| match is_written(index) {
            false => Argument::Reads(*memory),
            true if adds => Argument::Updates(*memory),
            true => Argument::Writes(*memory),
        };
        memory.iter().enumerate().map(argument).collect()
    }

    /// The tensors outside the graph; device tensors are in the order of [`Operation::spans`].
    fn tensors(&self) -> Result<Vec<TensorLayout>, Error> {
        match self {
            Operation::Convolution(convolution) => Ok(convolution.tensors()?.to_vec()),
            Operation::Attention(attention) => attention.tensors(),
        }
    }

    /// The spans of the tensors on the device, from the memory of [`Operation::arguments`].
    fn spans(&self, memory: &[Span]) -> Result<Vec<Span>, Error> {
        match self {
            Operation::Convolution(_) => Ok(memory.to_vec()),
            Operation::Attention(attention) => attention.spans(memory),
        }
    }

    fn graph(&self, cudnn: &Cudnn) -> Result<Graph, Error> {
        match self {
            Operation::Convolution(convolution) => convolution.graph(cudnn),
            Operation::Attention(attention) => attention.graph(cudnn),
        }
    }

    /// Whether an engine with these notes is acceptable. Winograd, FFT and reduced-precision
    /// accumulation are excluded; exact f32 operands must not be rounded. `deterministic` requires
    /// the same bits in every run.
    fn accepts(&self, notes: &[i32], deterministic: bool) -> bool {
        let is_exact = matches!(self, Operation::Convolution(convolution) if convolution.is_exact());
        let never = [REDUCED_PRECISION_REDUCTION, FFT].into_iter().chain(WINOGRAD);
        let unordered = deterministic.then_some(NONDETERMINISTIC);
        let rounded = [TENSOR_CORE, DOWN_CONVERT_INPUTS].into_iter().filter(|_| is_exact);
        !never.chain(unordered).chain(rounded).any(|note| notes.contains(&note))
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Operation::Convolution(of) => {
                let Convolution { images, height, width, channels, filters, window, stride, padding, .. } = of;
                write!(f, "convolution {images} x {height} x {width} x {channels} to {filters} channels, ")?;
                write!(f, "kernel {window}, stride {stride}, padding {padding}: ")?;
                f.write_str(match (of.direction, of.adds) {
                    (Direction::Forward, _) => "forward",
                    (Direction::Filters, _) => "gradient of the weights",
                    (Direction::Images, false) => "gradient of the input",
                    (Direction::Images, true) => "gradient of the input, added",
                })
            }
            Operation::Attention(Attention { shape, backward }) => {
                let Shape { batch, context, heads, head_size, causal, .. } = shape;
                let causal = if *causal { ", causal" } else { "" };
                write!(f, "attention {batch} x {context} x {}, {heads} heads{causal}: ", heads * head_size)?;
                f.write_str(if *backward { "gradient" } else { "forward" })
            }
        }
    }
}

/// Requirements on an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Whether every run must have the same bits.
    pub deterministic: bool,
    /// Maximum workspace bytes.
    pub workspace_bytes: usize,
}

/// A device's properties as cuDNN sees them.
pub struct Properties(Handle);

impl Properties {
    /// Properties of a device of this machine, by its ordinal in this process.
    ///
    /// # Errors
    /// A call fails.
    pub fn of(cudnn: &Cudnn, device: i32) -> Result<Properties, Error> {
        Properties::with(cudnn, DEVICEPROP_DEVICE_ID, &Value::Int32(device))
    }

    /// Properties of a device that need not be present, from cuDNN's JSON description.
    ///
    /// # Errors
    /// cuDNN cannot parse it.
    pub fn described(cudnn: &Cudnn, json: &str) -> Result<Properties, Error> {
        Properties::with(cudnn, DEVICEPROP_JSON, &Value::Text(json.as_bytes()))
    }

    /// cuDNN's JSON description of the device; [`Properties::described`] reads it on machines
    /// without the device.
    ///
    /// # Errors
    /// A call fails.
    pub fn json(&self, cudnn: &Cudnn) -> Result<String, Error> {
        cudnn.text(&self.0, DEVICEPROP_JSON)
    }

    fn with(cudnn: &Cudnn, attribute: i32, value: &Value<'_>) -> Result<Properties, Error> {
        let descriptor = cudnn.descriptor(DEVICEPROP_DESCRIPTOR)?;
        cudnn.set(&descriptor, attribute, value)?;
        cudnn.finalize(&descriptor, "properties of a device")?;
        Ok(Properties(descriptor))
    }
}

/// How cuDNN computes an operation on the device on which it was started.
pub struct Plan {
    /// The plan, its engine and its graph, dropped before the library's handle. Behind a mutex
    /// because two threads must not use a descriptor at once.
    descriptors: Mutex<(Handle, Handle, Graph)>,
    operation: Operation,
    workspace_bytes: usize,
    cudnn: Cudnn,
}

impl Plan {
    /// Requests plans from cuDNN's heuristics, best first, and returns the first one that is
    /// sufficiently exact and within the limits. The library has been started.
    ///
    /// # Errors
    /// There is no acceptable plan; the error is the library's first error about its proposals.
    pub fn new(cudnn: &Cudnn, operation: &Operation, limits: Limits) -> Result<Plan, Error> {
        Plan::on(cudnn, None, operation, limits)
    }

    /// The same for a described device. The plan cannot run, and the library has not been started.
    ///
    /// # Errors
    /// See [`Plan::new`].
    pub fn described(cudnn: &Cudnn, device: &Properties, operation: &Operation, limits: Limits) -> Result<Plan, Error> {
        Plan::on(cudnn, Some(device), operation, limits)
    }

    fn on(cudnn: &Cudnn, device: Option<&Properties>, operation: &Operation, limits: Limits) -> Result<Plan, Error> {
        let graph = operation.graph(cudnn)?;
        let mut first = None;
        for mode in [HEUR_MODE_A, HEUR_MODE_FALLBACK] {
            let engines = proposed(cudnn, device, &graph, mode).unwrap_or_else(|error| {
                first.get_or_insert(error);
                Vec::new()
            });
            for engine in engines {
                let tried =
                    cudnn.notes(&engine).and_then(|notes| match operation.accepts(&notes, limits.deterministic) {
                        true => finalized(cudnn, device, &engine).map(Some),
                        false => Ok(None),
                    });
                match tried {
                    Ok(Some((plan, workspace_bytes))) if workspace_bytes <= limits.workspace_bytes => {
                        let (operation, cudnn) = (*operation, cudnn.clone());
                        let descriptors = Mutex::new((plan, engine, graph));
                        return Ok(Plan { descriptors, operation, workspace_bytes, cudnn });
                    }
                    Ok(_) => {}
                    Err(error) => drop(first.get_or_insert(error)),
                }
            }
        }
        let none = match limits.deterministic {
            true => "no engine that is deterministic and exact enough in so much memory",
            false => "no engine that is exact enough in so much memory",
        };
        Err(first.unwrap_or_else(|| Error::refused("cudnn", none)))
    }

    pub fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }
}

/// `device`: if the library has not been started.
fn proposed(cudnn: &Cudnn, device: Option<&Properties>, graph: &Graph, mode: i32) -> Result<Vec<Handle>, Error> {
    let heuristic = cudnn.descriptor(ENGINEHEUR_DESCRIPTOR)?;
    cudnn.set(&heuristic, ENGINEHEUR_OPERATION_GRAPH, &Value::Descriptors(&[graph.descriptor.raw]))?;
    cudnn.set(&heuristic, ENGINEHEUR_MODE, &Value::Heuristic(mode))?;
    if let Some(Properties(device)) = device {
        cudnn.set(&heuristic, ENGINEHEUR_DEVICEPROP, &Value::Descriptors(&[device.raw]))?;
    }
    cudnn.finalize(&heuristic, "heuristic")?;
    cudnn.engines(&heuristic, MAX_ENGINES)
}

/// A finalized plan, and its workspace in bytes.
fn finalized(cudnn: &Cudnn, device: Option<&Properties>, engine: &Handle) -> Result<(Handle, usize), Error> {
    let plan = cudnn.descriptor(EXECUTION_PLAN_DESCRIPTOR)?;
    cudnn.set(&plan, EXECUTION_PLAN_ENGINE_CONFIG, &Value::Descriptors(&[engine.raw]))?;
    match device {
        Some(Properties(device)) => cudnn.set(&plan, EXECUTION_PLAN_DEVICEPROP, &Value::Descriptors(&[device.raw]))?,
        None => cudnn.set(&plan, EXECUTION_PLAN_HANDLE, &Value::Library(cudnn.raw()?))?,
    }
    cudnn.finalize(&plan, "plan")?;
    let workspace_bytes = cudnn.integer(&plan, EXECUTION_PLAN_WORKSPACE_SIZE)?;
    Ok((plan, workspace_bytes))
}

/// A plan and its memory.
pub struct Planned {
    // Dropped before the library's handle.
    pack: Handle,
    /// Host constants that the pack points to.
    _numbers: Vec<f32>,
    plan: Arc<Plan>,
    spans: Vec<Span>,
}

impl Planned {
    /// Binds a plan to the memory of [`Operation::arguments`]. No other stream can use `workspace`
    /// while the plan runs.
    ///
    /// # Errors
    /// Memory is too small or not 16-byte aligned; a call fails.
    pub fn new(plan: &Arc<Plan>, memory: &[Span], workspace: Option<Span>) -> Result<Planned, Error> {
        let Plan { operation, cudnn, workspace_bytes, .. } = &**plan;
        let (tensors, spans) = (operation.tensors()?, operation.spans(memory)?);
        let on_device: Vec<&TensorLayout> = tensors.iter().filter(|tensor| tensor.place == Place::Device).collect();
        if on_device.len() != spans.len() {
            let text = format!("{} tensors, expected {}: {operation:?}", spans.len(), on_device.len());
            return Err(Error::refused("cudnn", text));
        }
        for (tensor, span) in on_device.into_iter().zip(&spans) {
            let needed = tensor.bytes();
            if span.bytes() < needed || (span.alignment() as usize) < ALIGNMENT {
                let (bytes, at) = (span.bytes(), span.alignment());
                let text = format!(
                    "{bytes} bytes at a multiple of {at}, expected {needed} at one of {ALIGNMENT}: {operation:?}"
                );
                return Err(Error::refused("cudnn", text));
            }
        }
        let (given, needed) = (workspace.map_or(0, |span| span.bytes()), *workspace_bytes);
        if given < needed {
            return Err(Error::refused("cudnn", format!("a workspace of {given} bytes, expected at least {needed}")));
        }
        let mut numbers: Vec<f32> = tensors.iter().filter_map(TensorLayout::number).collect();
        let mut of_host = numbers.iter_mut();
        let mut of_device = spans.iter();
        let addresses: Option<Vec<Pointer>> = tensors
            .iter()
            .map(|tensor| match tensor.place {
                Place::Host(_) => of_host.next().map(|number| std::ptr::from_mut(number).cast()),
                _ => of_device.next().map(|span| span.pointer()),
            })
            .collect();
        let addresses = addresses.expect("invariant: each tensor has a number or a span");
        let ids: Vec<i64> = tensors.iter().map(|tensor| tensor.id).collect();
        let pack = cudnn.descriptor(VARIANT_PACK_DESCRIPTOR)?;
        cudnn.set(&pack, VARIANT_PACK_UNIQUE_IDS, &Value::Integers(&ids))?;
        cudnn.set(&pack, VARIANT_PACK_DATA_POINTERS, &Value::Pointers(&addresses))?;
        let memory = workspace.map_or(std::ptr::null_mut(), Span::pointer);
        cudnn.set(&pack, VARIANT_PACK_WORKSPACE, &Value::Pointers(&[memory]))?;
        cudnn.finalize(&pack, "variant pack")?;
        let spans = spans.into_iter().chain(workspace).collect();
        Ok(Planned { pack, _numbers: numbers, plan: Arc::clone(plan), spans })
    }

    /// Queues the operation.
    ///
    /// # Errors
    /// A buffer has been freed, or a call fails.
    pub fn run(&self, stream: &Stream) -> Result<(), Error> {
        stream.uses("cudnn", self.spans.iter().copied())?;
        stream.context().make_current()?;
        let descriptors = self.plan.descriptors.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the memory is as large as the tensors and the workspace, as `new` checked, and is
        // alive, as just checked; freeing a buffer waits for the operation. Host constants live as
        // long as the plan.
        unsafe { self.plan.cudnn.execute(&descriptors.0, &self.pack, stream) }
    }
}

#[cfg(test)]
mod tests;
