//! Convolutions by cuDNN: whether it computes one, which needs a description of a device and no device; and the plan that it made, on a device.
//!
//! ```text
//! Properties ──┐
//! Convolution ─┴─ ask ── Accepted: a text, and bytes of workspace ── Planned: on the device ── run
//! ```
#![allow(unsafe_code)]

use crate::cublaslt::Arithmetic;
use crate::cudnn::{
    ALIGNMENT, BFLOAT16, Cudnn, ENGINEHEUR_DESCRIPTOR, ENGINEHEUR_MODE, ENGINEHEUR_OPERATION_GRAPH,
    EXECUTION_PLAN_DESCRIPTOR, EXECUTION_PLAN_ENGINE_CONFIG, EXECUTION_PLAN_HANDLE, EXECUTION_PLAN_WORKSPACE_SIZE,
    FLOAT, HALF, HEUR_MODE_A, HEUR_MODE_FALLBACK, OPERATIONGRAPH_DESCRIPTOR, OPERATIONGRAPH_OPS, TensorLayout,
    VARIANT_PACK_DATA_POINTERS, VARIANT_PACK_DESCRIPTOR, VARIANT_PACK_UNIQUE_IDS, VARIANT_PACK_WORKSPACE, Value,
};
use crate::driver::{Span, Stream};
use crate::error::Error;
use crate::kernels::{Element, Memory};
use crate::library::Handle;

const CONVOLUTION_DESCRIPTOR: i32 = 1;
const DEVICEPROP_DESCRIPTOR: i32 = 38;

const COMP_TYPE: i32 = 100;
const CONV_MODE: i32 = 101;
const DILATIONS: i32 = 102;
const FILTER_STRIDES: i32 = 103;
const POST_PADDINGS: i32 = 104;
const PRE_PADDINGS: i32 = 105;
const SPATIAL_DIMS: i32 = 106;
const ENGINEHEUR_DEVICEPROP: i32 = 204;
const EXECUTION_PLAN_JSON: i32 = 405;
const EXECUTION_PLAN_DEVICEPROP: i32 = 407;
const DEVICEPROP_DEVICE_ID: i32 = 2700;
const DEVICEPROP_JSON: i32 = 2702;

const CROSS_CORRELATION: i32 = 1;

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

/// Which of images, filters and results is computed from the other two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Direction {
    Forward,
    /// The gradient of the images.
    Images,
    /// The gradient of the filters.
    Filters,
}

impl Direction {
    /// The kind of the operation, its first attribute, which is a factor of the result, and those of images, filters and results.
    fn numbers(self) -> (i32, i32, [i32; 3]) {
        match self {
            Direction::Forward => (10, 700, [704, 703, 705]),
            Direction::Images => (12, 706, [710, 709, 711]),
            Direction::Filters => (11, 712, [716, 715, 717]),
        }
    }
}

/// A convolution of images in NHWC with square filters, `[filters][window][window][channels]` without gaps. Sums are in 32 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Convolution {
    pub direction: Direction,
    /// Of all three tensors.
    pub element: Element,
    /// To what the result holds.
    pub adds: bool,
    pub arithmetic: Arithmetic,
    pub images: usize,
    pub height: usize,
    pub width: usize,
    pub channels: usize,
    /// From one pixel of an image to the next, in numbers. What is between is neither read nor written.
    pub pitch: usize,
    pub filters: usize,
    /// The same of a result.
    pub result_pitch: usize,
    /// Height and width of a filter.
    pub window: usize,
    pub stride: usize,
    pub padding: usize,
}

impl Convolution {
    /// What a plan is made for: all but the addresses.
    pub fn kind(&self) -> String {
        format!("{self:?}")
    }

    /// Height and width of a result; `None` if the filter is larger than an image.
    pub fn result(&self) -> Option<[usize; 2]> {
        let side =
            |side: usize| Some((side + 2 * self.padding).checked_sub(self.window)?.checked_div(self.stride)? + 1);
        Some([side(self.height)?, side(self.width)?])
    }

    /// Images, filters and results.
    fn tensors(&self) -> Result<[TensorLayout; 3], Error> {
        let Convolution { images, height, width, channels, pitch, filters, result_pitch, window, .. } = *self;
        let refused =
            || Error::refused("convolution", format!("a filter larger than the image, or sizes of 0: {self:?}"));
        let [result_height, result_width] = self.result().ok_or_else(refused)?;
        if [images, channels, filters, window].contains(&0) || pitch < channels || result_pitch < filters {
            return Err(refused());
        }
        let data_type = match self.element {
            Element::F32 => FLOAT,
            Element::F16 => HALF,
            Element::Bf16 => BFLOAT16,
        };
        let tensor = |id, dimensions: [usize; 4], pitch: usize| {
            let [_, _, height, width] = dimensions;
            let strides = [height * width * pitch, 1, width * pitch, pitch];
            let [dimensions, strides] = [dimensions, strides].map(|four| four.map(|number| number as i64));
            TensorLayout { id, data_type, dimensions, strides, by_value: false }
        };
        Ok([
            tensor(1, [images, channels, height, width], pitch),
            tensor(2, [filters, channels, window, window], channels),
            tensor(3, [images, filters, result_height, result_width], result_pitch),
        ])
    }

    /// Whether an engine with these notes may compute it. Every run has the same bits, and sums of 32 bits in the usual order; 32-bit numbers
    /// are multiplied as [`Arithmetic`] says.
    fn may_have(&self, notes: &[i32]) -> bool {
        let never = [REDUCED_PRECISION_REDUCTION, FFT, NONDETERMINISTIC].into_iter().chain(WINOGRAD);
        let is_exact = self.element == Element::F32 && self.arithmetic == Arithmetic::Ieee;
        let rounded = [TENSOR_CORE, DOWN_CONVERT_INPUTS].into_iter().filter(|_| is_exact);
        !never.chain(rounded).any(|note| notes.contains(&note))
    }

    /// A graph of one operation. It keeps copies of what it is made of.
    fn graph(&self, cudnn: &Cudnn) -> Result<Graph, Error> {
        let tensors = self.tensors()?;
        let tensors = [cudnn.tensor(&tensors[0])?, cudnn.tensor(&tensors[1])?, cudnn.tensor(&tensors[2])?];
        let [images, filters, results] = tensors.each_ref().map(|tensor| tensor.raw);
        let window = cudnn.descriptor(CONVOLUTION_DESCRIPTOR)?;
        let both = |number: usize| [number as i64; 2];
        cudnn.set(&window, COMP_TYPE, &Value::DataType(FLOAT))?;
        cudnn.set(&window, CONV_MODE, &Value::ConvolutionMode(CROSS_CORRELATION))?;
        cudnn.set(&window, SPATIAL_DIMS, &Value::Integers(&[2]))?;
        cudnn.set(&window, DILATIONS, &Value::Integers(&both(1)))?;
        cudnn.set(&window, FILTER_STRIDES, &Value::Integers(&both(self.stride)))?;
        cudnn.set(&window, PRE_PADDINGS, &Value::Integers(&both(self.padding)))?;
        cudnn.set(&window, POST_PADDINGS, &Value::Integers(&both(self.padding)))?;
        cudnn.finalize(&window, "convolution")?;
        let (kind, first, attributes) = self.direction.numbers();
        let operation = cudnn.descriptor(kind)?;
        cudnn.set(&operation, first, &Value::Float(1.0))?;
        cudnn.set(&operation, first + 1, &Value::Float(if self.adds { 1.0 } else { 0.0 }))?;
        cudnn.set(&operation, first + 2, &Value::Descriptors(&[window.raw]))?;
        for (attribute, tensor) in attributes.into_iter().zip([images, filters, results]) {
            cudnn.set(&operation, attribute, &Value::Descriptors(&[tensor]))?;
        }
        cudnn.finalize(&operation, "operation")?;
        let graph = cudnn.descriptor(OPERATIONGRAPH_DESCRIPTOR)?;
        cudnn.set(&graph, OPERATIONGRAPH_OPS, &Value::Descriptors(&[operation.raw]))?;
        cudnn.finalize(&graph, "operation graph")?;
        Ok(Graph { graph, _parts: (operation, window, tensors) })
    }
}

/// A graph and what it is made of, which lives as long.
struct Graph {
    graph: Handle,
    _parts: (Handle, Handle, [Handle; 3]),
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

    fn with(cudnn: &Cudnn, attribute: i32, value: &Value<'_>) -> Result<Properties, Error> {
        let descriptor = cudnn.descriptor(DEVICEPROP_DESCRIPTOR)?;
        cudnn.set(&descriptor, attribute, value)?;
        cudnn.finalize(&descriptor, "properties of a device")?;
        Ok(Properties(descriptor))
    }
}

/// How cuDNN computes a convolution.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Accepted {
    /// Memory that it needs beside its tensors.
    pub workspace_bytes: usize,
    /// The plan, in words that only this version of the library knows.
    pub plan: String,
}

/// Asks cuDNN for the first plan of those that its heuristics propose, best first, that every run computes with the same bits in at most so
/// much memory. Needs no device.
///
/// # Errors
/// There is none; of what the library says of its proposals the first.
pub fn ask(
    cudnn: &Cudnn,
    device: &Properties,
    convolution: &Convolution,
    most_workspace_bytes: usize,
) -> Result<Accepted, Error> {
    let graph = convolution.graph(cudnn)?;
    let mut first = None;
    for mode in [HEUR_MODE_A, HEUR_MODE_FALLBACK] {
        let engines = proposed(cudnn, device, &graph.graph, mode).unwrap_or_else(|error| {
            first.get_or_insert(error);
            Vec::new()
        });
        for engine in &engines {
            let tried = cudnn.notes(engine).and_then(|notes| match convolution.may_have(&notes) {
                true => plan(cudnn, device, engine).map(Some),
                false => Ok(None),
            });
            match tried {
                Ok(Some(accepted)) if accepted.workspace_bytes <= most_workspace_bytes => return Ok(accepted),
                Ok(_) => {}
                Err(error) => drop(first.get_or_insert(error)),
            }
        }
    }
    let none = "no engine that is deterministic and exact enough in so much memory";
    Err(first.unwrap_or_else(|| Error::refused("convolution", none)))
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
    cudnn: Cudnn,
    spans: Vec<Span>,
}

impl Planned {
    /// Makes a plan ready on the device on which cuDNN was started. `spans`: images, filters and results. `workspace` is used by no other
    /// stream while the plan runs.
    ///
    /// # Errors
    /// cuDNN does not take the plan; memory is too small or not aligned to 16 bytes; a call fails.
    pub fn new(
        cudnn: &Cudnn,
        convolution: &Convolution,
        accepted: &Accepted,
        spans: [Span; 3],
        workspace: Option<Span>,
    ) -> Result<Planned, Error> {
        let tensors = convolution.tensors()?;
        for (tensor, span) in tensors.iter().zip(spans) {
            let last: i64 =
                tensor.dimensions.iter().zip(tensor.strides).map(|(dimension, stride)| (dimension - 1) * stride).sum();
            let needed = usize::try_from(last + 1).unwrap_or(usize::MAX).saturating_mul(convolution.element.bytes());
            if span.bytes() < needed || (span.alignment() as usize) < ALIGNMENT {
                let (bytes, at) = (span.bytes(), span.alignment());
                let text = format!(
                    "{bytes} bytes at a multiple of {at}, expected {needed} at one of {ALIGNMENT}: {convolution:?}"
                );
                return Err(Error::refused("convolution", text));
            }
        }
        let (given, needed) = (workspace.map_or(0, |span| span.bytes()), accepted.workspace_bytes);
        if given < needed {
            return Err(Error::refused(
                "convolution",
                format!("a workspace of {given} bytes, expected at least {needed}"),
            ));
        }
        let plan = Planned::restored(cudnn, accepted)?;
        let pack = cudnn.descriptor(VARIANT_PACK_DESCRIPTOR)?;
        let ids = tensors.each_ref().map(|tensor| tensor.id);
        cudnn.set(&pack, VARIANT_PACK_UNIQUE_IDS, &Value::Integers(&ids))?;
        cudnn.set(&pack, VARIANT_PACK_DATA_POINTERS, &Value::Pointers(&spans.map(Span::pointer)))?;
        let memory = workspace.map_or(std::ptr::null_mut(), Span::pointer);
        cudnn.set(&pack, VARIANT_PACK_WORKSPACE, &Value::Pointers(&[memory]))?;
        cudnn.finalize(&pack, "variant pack")?;
        let spans = spans.into_iter().chain(workspace).collect();
        Ok(Planned { plan, pack, cudnn: cudnn.clone(), spans })
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

    /// Queues the convolution.
    ///
    /// # Errors
    /// A buffer is gone, or a call fails.
    pub fn run(&self, stream: &Stream) -> Result<(), Error> {
        stream.uses("convolution", self.spans.iter().copied())?;
        stream.context().make_current()?;
        // SAFETY: the memory is as large as the tensors and the workspace, as `new` has checked, and lives, as just checked; freeing a buffer
        // waits for the work.
        unsafe { self.cudnn.execute(&self.plan, &self.pack, stream) }
    }
}

#[cfg(test)]
mod tests;
