//! What cuDNN computes as a whole: whether it does, which needs a description of a device and no device; and the plan that it made, on a device.
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

/// Engines that are asked of a heuristic: more than it was ever seen to propose.
const MOST_ENGINES: usize = 64;

/// The first version whose plans for a described device are official.
pub const SINCE: usize = 91_100;
/// The major version whose calls these are.
pub const MAJOR: usize = 9;

/// One thing that cuDNN is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Convolution(Convolution),
    Attention(Attention),
}

impl Operation {
    /// What a plan is made for: all but the addresses.
    pub fn kind(&self) -> String {
        format!("{self:?}")
    }

    /// Its tensors outside of the graph, those of the device in the order of [`Planned::new`].
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

    /// Whether cuDNN can compute it with the same bits in every run. Its gradient of attention adds up gradients of queries in whatever order
    /// blocks come, and no note of its engines says so.
    pub fn is_deterministic(&self) -> bool {
        !matches!(self, Operation::Attention(Attention { backward: true, .. }))
    }

    /// Whether an engine with these notes may compute it. Sums of 32 bits are added in the usual way; exact 32-bit numbers are multiplied as
    /// they are. `deterministic`: every run has the same bits.
    fn may_have(&self, notes: &[i32], deterministic: bool) -> bool {
        if deterministic && !self.is_deterministic() {
            return false;
        }
        let is_exact = matches!(self, Operation::Convolution(convolution) if convolution.is_exact());
        let never = [REDUCED_PRECISION_REDUCTION, FFT].into_iter().chain(WINOGRAD);
        let unordered = deterministic.then_some(NONDETERMINISTIC);
        let rounded = [TENSOR_CORE, DOWN_CONVERT_INPUTS].into_iter().filter(|_| is_exact);
        !never.chain(unordered).chain(rounded).any(|note| notes.contains(&note))
    }
}

/// What an engine must be for a caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Every run has the same bits.
    pub deterministic: bool,
    /// Memory beside the tensors, at most.
    pub workspace_bytes: usize,
}

/// What cuDNN knows of a device.
pub struct Properties(Handle);

impl Properties {
    /// Of a device of this machine, by the number that it has in this process.
    ///
    /// # Errors
    /// A call fails.
    pub fn of(cudnn: &Cudnn, device: i32) -> Result<Properties, Error> {
        Properties::with(cudnn, DEVICEPROP_DEVICE_ID, &Value::Int32(device))
    }

    /// Of a device that need not be there, in the JSON in which cuDNN describes one.
    ///
    /// # Errors
    /// cuDNN does not read it.
    pub fn described(cudnn: &Cudnn, json: &str) -> Result<Properties, Error> {
        Properties::with(cudnn, DEVICEPROP_JSON, &Value::Text(json.as_bytes()))
    }

    /// The JSON in which cuDNN describes the device; [`Properties::described`] takes it where that is not.
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
    /// Memory that it needs beside its tensors.
    pub workspace_bytes: usize,
    /// The plan, in words that only this version of the library knows.
    pub plan: String,
}

/// Asks cuDNN for the first plan of those that its heuristics propose, best first, that is exact enough and within the limits. Needs no device.
///
/// # Errors
/// There is none; of what the library says of its proposals the first.
pub fn ask(cudnn: &Cudnn, device: &Properties, operation: &Operation, limits: Limits) -> Result<Accepted, Error> {
    let graph = operation.graph(cudnn)?;
    let mut first = None;
    for mode in [HEUR_MODE_A, HEUR_MODE_FALLBACK] {
        let engines = proposed(cudnn, device, &graph.descriptor, mode).unwrap_or_else(|error| {
            first.get_or_insert(error);
            Vec::new()
        });
        for engine in &engines {
            let tried = cudnn.notes(engine).and_then(|notes| match operation.may_have(&notes, limits.deterministic) {
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
    cudnn.engines(&heuristic, MOST_ENGINES)
}

fn plan(cudnn: &Cudnn, device: &Properties, engine: &Handle) -> Result<Accepted, Error> {
    let plan = cudnn.descriptor(EXECUTION_PLAN_DESCRIPTOR)?;
    cudnn.set(&plan, EXECUTION_PLAN_ENGINE_CONFIG, &Value::Descriptors(&[engine.raw]))?;
    cudnn.set(&plan, EXECUTION_PLAN_DEVICEPROP, &Value::Descriptors(&[device.0.raw]))?;
    cudnn.finalize(&plan, "plan")?;
    let workspace_bytes = cudnn.integer(&plan, EXECUTION_PLAN_WORKSPACE_SIZE)?;
    Ok(Accepted { workspace_bytes, plan: cudnn.text(&plan, EXECUTION_PLAN_JSON)? })
}

/// A plan on a device, and the memory that it works on.
pub struct Planned {
    // Dropped before the library's handle.
    plan: Handle,
    pack: Handle,
    /// Numbers of the host, to which the pack points.
    _numbers: Vec<f32>,
    cudnn: Cudnn,
    spans: Vec<Span>,
}

impl Planned {
    /// Makes a plan ready on the device on which cuDNN was started. `spans`: of a convolution images, filters and results; of attention what
    /// [`Attention::spans`] says. `workspace` is used by no other stream while the plan runs.
    ///
    /// # Errors
    /// cuDNN does not take the plan; memory is too small or not aligned to 16 bytes; a call fails.
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

    /// Whether cuDNN takes the plan on the device on which it was started.
    ///
    /// # Errors
    /// It does not.
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
    /// A buffer is gone, or a call fails.
    pub fn run(&self, stream: &Stream) -> Result<(), Error> {
        stream.uses("cudnn", self.spans.iter().copied())?;
        stream.context().make_current()?;
        // SAFETY: the memory is as large as the tensors and the workspace, as `new` has checked, and lives, as just checked; freeing a buffer
        // waits for the work. Numbers of the host live as long as the plan.
        unsafe { self.cudnn.execute(&self.plan, &self.pack, stream) }
    }
}

#[cfg(test)]
mod tests;
