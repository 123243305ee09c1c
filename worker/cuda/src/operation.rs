//! cuDNN operations: support queries, which need only a device's description, and execution plans
//! on a device.
//!
//! ```text
//! Properties ──┐
//! Operation  ──┴─ ask ── Accepted: a text, and bytes of workspace ── Planned: on the device ── run
//! ```
#![allow(unsafe_code)]

use crate::attention::Attention;
use crate::convolution::Convolution;
use crate::cudnn::{
    ALIGNMENT, Cudnn, ENGINEHEUR_DESCRIPTOR, ENGINEHEUR_MODE, ENGINEHEUR_OPERATION_GRAPH, EXECUTION_PLAN_DESCRIPTOR,
    EXECUTION_PLAN_ENGINE_CONFIG, EXECUTION_PLAN_HANDLE, EXECUTION_PLAN_WORKSPACE_SIZE, HEUR_MODE_A,
    HEUR_MODE_FALLBACK, Place, TensorLayout, VARIANT_PACK_DATA_POINTERS, VARIANT_PACK_DESCRIPTOR,
    VARIANT_PACK_UNIQUE_IDS, VARIANT_PACK_WORKSPACE, Value,
};
use crate::driver::{Span, Stream};
use crate::error::Error;
use crate::graph::Graph;
use crate::kernels::Memory;
use crate::library::{Handle, Pointer};

const DEVICEPROP_DESCRIPTOR: i32 = 38;

const ENGINEHEUR_DEVICEPROP: i32 = 204;
const EXECUTION_PLAN_JSON: i32 = 405;
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

/// First version that officially supports plans for a described device.
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
    /// The key of a plan: everything except the addresses.
    pub fn kind(&self) -> String {
        format!("{self:?}")
    }

    /// The tensors outside the graph; device tensors are in the order of [`Planned::new`].
    fn tensors(&self) -> Result<Vec<TensorLayout>, Error> {
        match self {
            Operation::Convolution(convolution) => Ok(convolution.tensors()?.to_vec()),
            Operation::Attention(attention) => attention.tensors(),
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

/// How cuDNN computes an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Accepted {
    /// Workspace bytes.
    pub workspace_bytes: usize,
    /// The serialised plan, valid only for this version of the library.
    pub plan: String,
}

/// Requests plans from cuDNN's heuristics, best first, and returns the first one that is
/// sufficiently exact and within the limits. Needs no device.
///
/// # Errors
/// There is no acceptable plan; the error is the library's first error about its proposals.
pub fn ask(cudnn: &Cudnn, device: &Properties, operation: &Operation, limits: Limits) -> Result<Accepted, Error> {
    let graph = operation.graph(cudnn)?;
    let mut first = None;
    for mode in [HEUR_MODE_A, HEUR_MODE_FALLBACK] {
        let engines = proposed(cudnn, device, &graph.descriptor, mode).unwrap_or_else(|error| {
            first.get_or_insert(error);
            Vec::new()
        });
        for engine in &engines {
            let tried = cudnn.notes(engine).and_then(|notes| match operation.accepts(&notes, limits.deterministic) {
                true => plan(cudnn, device, engine).map(Some),
                false => Ok(None),
            });
            match tried {
                Ok(Some(accepted)) if accepted.workspace_bytes <= limits.workspace_bytes => return Ok(accepted),
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

fn proposed(cudnn: &Cudnn, device: &Properties, graph: &Handle, mode: i32) -> Result<Vec<Handle>, Error> {
    let heuristic = cudnn.descriptor(ENGINEHEUR_DESCRIPTOR)?;
    cudnn.set(&heuristic, ENGINEHEUR_OPERATION_GRAPH, &Value::Descriptors(&[graph.raw]))?;
    cudnn.set(&heuristic, ENGINEHEUR_MODE, &Value::Heuristic(mode))?;
    cudnn.set(&heuristic, ENGINEHEUR_DEVICEPROP, &Value::Descriptors(&[device.0.raw]))?;
    cudnn.finalize(&heuristic, "heuristic")?;
    cudnn.engines(&heuristic, MAX_ENGINES)
}

fn plan(cudnn: &Cudnn, device: &Properties, engine: &Handle) -> Result<Accepted, Error> {
    let plan = cudnn.descriptor(EXECUTION_PLAN_DESCRIPTOR)?;
    cudnn.set(&plan, EXECUTION_PLAN_ENGINE_CONFIG, &Value::Descriptors(&[engine.raw]))?;
    cudnn.set(&plan, EXECUTION_PLAN_DEVICEPROP, &Value::Descriptors(&[device.0.raw]))?;
    cudnn.finalize(&plan, "plan")?;
    let workspace_bytes = cudnn.integer(&plan, EXECUTION_PLAN_WORKSPACE_SIZE)?;
    Ok(Accepted { workspace_bytes, plan: cudnn.text(&plan, EXECUTION_PLAN_JSON)? })
}

/// A plan on a device, and its memory.
pub struct Planned {
    // Dropped before the library's handle.
    plan: Handle,
    pack: Handle,
    /// Host constants that the pack points to.
    _numbers: Vec<f32>,
    cudnn: Cudnn,
    spans: Vec<Span>,
}

impl Planned {
    /// Prepares a plan on the device on which cuDNN was started. `spans`: images, filters and
    /// results of a convolution, or the result of [`Attention::spans`]. No other stream can use
    /// `workspace` while the plan runs.
    ///
    /// # Errors
    /// cuDNN rejects the plan; memory is too small or not 16-byte aligned; a call fails.
    pub fn new(
        cudnn: &Cudnn,
        operation: &Operation,
        accepted: &Accepted,
        spans: &[Span],
        workspace: Option<Span>,
    ) -> Result<Planned, Error> {
        let tensors = operation.tensors()?;
        let on_device: Vec<&TensorLayout> = tensors.iter().filter(|tensor| tensor.place == Place::Device).collect();
        if on_device.len() != spans.len() {
            let text = format!("{} tensors, expected {}: {operation:?}", spans.len(), on_device.len());
            return Err(Error::refused("cudnn", text));
        }
        for (tensor, span) in on_device.into_iter().zip(spans) {
            let needed = tensor.bytes();
            if span.bytes() < needed || (span.alignment() as usize) < ALIGNMENT {
                let (bytes, at) = (span.bytes(), span.alignment());
                let text = format!(
                    "{bytes} bytes at a multiple of {at}, expected {needed} at one of {ALIGNMENT}: {operation:?}"
                );
                return Err(Error::refused("cudnn", text));
            }
        }
        let (given, needed) = (workspace.map_or(0, |span| span.bytes()), accepted.workspace_bytes);
        if given < needed {
            return Err(Error::refused("cudnn", format!("a workspace of {given} bytes, expected at least {needed}")));
        }
        let plan = Planned::restored(cudnn, accepted)?;
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
        let spans = spans.iter().copied().chain(workspace).collect();
        Ok(Planned { plan, pack, _numbers: numbers, cudnn: cudnn.clone(), spans })
    }

    /// Checks that cuDNN accepts the plan on the device on which it was started.
    ///
    /// # Errors
    /// cuDNN rejects the plan.
    pub fn check(cudnn: &Cudnn, accepted: &Accepted) -> Result<(), Error> {
        Planned::restored(cudnn, accepted).map(drop)
    }

    fn restored(cudnn: &Cudnn, accepted: &Accepted) -> Result<Handle, Error> {
        let plan = cudnn.descriptor(EXECUTION_PLAN_DESCRIPTOR)?;
        cudnn.set(&plan, EXECUTION_PLAN_HANDLE, &Value::Library(cudnn.raw()?))?;
        cudnn.set(&plan, EXECUTION_PLAN_JSON, &Value::Text(accepted.plan.as_bytes()))?;
        cudnn.finalize(&plan, "plan")?;
        Ok(plan)
    }

    /// Queues the operation.
    ///
    /// # Errors
    /// A buffer has been freed, or a call fails.
    pub fn run(&self, stream: &Stream) -> Result<(), Error> {
        stream.uses("cudnn", self.spans.iter().copied())?;
        stream.context().make_current()?;
        // SAFETY: the memory is as large as the tensors and the workspace, as `new` checked, and is
        // alive, as just checked; freeing a buffer waits for the operation. Host constants live as
        // long as the plan.
        unsafe { self.cudnn.execute(&self.plan, &self.pack, stream) }
    }
}

#[cfg(test)]
mod tests;
