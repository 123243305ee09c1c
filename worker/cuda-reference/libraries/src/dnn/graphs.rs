//! Finalized descriptors: tensors, operations, graphs, and their engines.

use super::attributes::{self, Attributes};
use super::engines::{Computation, Configuration, EXACT, Engine, FUSED, ROUNDED, UNORDERED, fault_applies, kind_of};
use super::flows::{self, OperationParameters};
use super::plans::{Pack, Plan};
use super::{BAD_PARAM, CallResult, DUPLICATED_ENTRIES, NOT_INITIALIZED, SHAPE_MISMATCH, refused, unsupported};
use crate::abi;
use crate::fault;
use crate::gpu::convolution::{Operation, Shape, Window, is_nhwc};
use crate::gpu::dataflow::{Dataflow, MODES, Node, OperationKind};
use crate::gpu::tensor::{Place, Tensor};
use crate::numbers::Format;
use std::sync::Arc;

/// A short description of the reference GPU.
const OURS: &str = r#"{"deviceName":"Switchyard reference GPU","deviceVer":900,"multiProcessorCount":132}"#;

const NHWC: &str = "strides that are not those of NHWC";

/// A finalized descriptor.
#[derive(Debug)]
pub(super) enum Finalized {
    Tensor(Tensor),
    Window(Window),
    Operation(Box<Shape>),
    OperationParameters(OperationParameters),
    Node(Node),
    /// Whether it is for a handle, and so needs no described device.
    Graph(Computation, bool),
    /// Device properties as JSON.
    Device(String),
    Heuristic(Vec<Configuration>),
    Engine(Engine),
    Configuration(Configuration),
    Plan(Plan),
    Pack(Pack),
}

impl Finalized {
    pub(super) fn kind(&self) -> i32 {
        match self {
            Finalized::Tensor(_) => attributes::TENSOR,
            Finalized::Window(_) => attributes::WINDOW,
            Finalized::Operation(shape) => kind_of(shape.operation),
            Finalized::OperationParameters(parameters) => parameters.kind(),
            Finalized::Node(node) => flows::kind_of(node),
            Finalized::Graph(..) => attributes::GRAPH,
            Finalized::Device(_) => attributes::DEVICE,
            Finalized::Heuristic(_) => attributes::HEURISTIC,
            Finalized::Engine(_) => attributes::ENGINE,
            Finalized::Configuration(_) => attributes::CONFIGURATION,
            Finalized::Plan(_) => attributes::PLAN,
            Finalized::Pack(_) => attributes::PACK,
        }
    }
}

/// Finalizes a descriptor whose required attributes are all set.
pub(super) fn finalized(call: &str, kind: i32, of: &Attributes<Finalized>) -> CallResult<Finalized> {
    match kind {
        attributes::TENSOR => tensor(call, of).map(Finalized::Tensor),
        attributes::WINDOW => window(call, of).map(Finalized::Window),
        attributes::FORWARD => operation(call, Operation::Forward, of, 700, [704, 703, 705]),
        attributes::IMAGES => operation(call, Operation::Images, of, 706, [710, 709, 711]),
        attributes::FILTERS => operation(call, Operation::Filters, of, 712, [716, 715, 717]),
        attributes::POINTWISE | attributes::PRODUCT | attributes::REDUCTION => {
            parameters(call, kind, of).map(Finalized::OperationParameters)
        }
        attributes::OF_POINTWISE | attributes::OF_PRODUCT | attributes::OF_REDUCTION | attributes::RESHAPE => {
            node(call, kind, of).map(Finalized::Node)
        }
        attributes::GRAPH => graph(call, of).map(|computation| Finalized::Graph(computation, of.has(800))),
        attributes::DEVICE => device(call, of).map(Finalized::Device),
        attributes::HEURISTIC => heuristic(call, of).map(Finalized::Heuristic),
        attributes::PLAN => plan(call, of).map(Finalized::Plan),
        attributes::PACK => Pack::new(call, &of.longs(1000), &of.longs(1001), of.long(1003)).map(Finalized::Pack),
        _ => refused(call, BAD_PARAM, &format!("kind {kind} is filled by the library")),
    }
}

/// Parses the parameters of an operation.
fn parameters(call: &str, kind: i32, of: &Attributes<Finalized>) -> CallResult<OperationParameters> {
    let (precision, kind) = match kind {
        attributes::PRODUCT => (1500, OperationKind::Product),
        attributes::REDUCTION => match of.int(1600) {
            0 => (1601, OperationKind::Reduction { max: false }),
            3 => (1601, OperationKind::Reduction { max: true }),
            other => return refused(call, BAD_PARAM, &format!("reduction {other}")),
        },
        _ => (1, OperationKind::Pointwise(of.int(0).into(), of.long(9) as u64)),
    };
    if of.int(precision) != 0 {
        return refused(call, BAD_PARAM, "accumulation that is not in FP32");
    }
    if let OperationKind::Pointwise(mode, _) = kind
        && !MODES.iter().any(|(known, _)| *known == mode)
    {
        return refused(call, BAD_PARAM, &format!("pointwise mode {mode}"));
    }
    Ok(OperationParameters(kind))
}

/// An operation with its tensors.
fn node(call: &str, kind: i32, of: &Attributes<Finalized>) -> CallResult<Node> {
    let (parameters, inputs, output) = match kind {
        attributes::OF_PRODUCT => (Some(1523), &[1520, 1521][..], 1522),
        attributes::OF_REDUCTION => (Some(1612), &[1610][..], 1611),
        attributes::OF_POINTWISE => (Some(750), &[751, 752, 758][..], 753),
        _ => (None, &[2200][..], 2201),
    };
    let operation = match parameters.map(|name| of.part(name)) {
        None => OperationKind::Reshape,
        Some(Some(Finalized::OperationParameters(OperationParameters(operation)))) => *operation,
        Some(_) => return refused(call, BAD_PARAM, "no operation parameters"),
    };
    let tensor = |name: &i32| match of.part(*name) {
        Some(Finalized::Tensor(tensor)) => Some(tensor.clone()),
        _ => None,
    };
    let inputs: Vec<Tensor> = inputs.iter().filter(|name| of.has(**name)).filter_map(tensor).collect();
    let Some(output) = tensor(&output) else {
        return refused(call, BAD_PARAM, "no tensor for the result");
    };
    let node = Node { kind: operation, inputs, output };
    if flows::kind_of(&node) != kind {
        return refused(call, BAD_PARAM, "the parameters of another operation");
    }
    if !node.fits() {
        return refused(call, SHAPE_MISMATCH, &format!("axes that do not fit: {node:?}"));
    }
    Ok(node)
}

/// A convolution, or a chain of operations.
fn graph(call: &str, of: &Attributes<Finalized>) -> CallResult<Computation> {
    if let [one] = of.parts(801)
        && let Finalized::Operation(shape) = &**one
    {
        return Ok(Computation::Convolution(shape.clone()));
    }
    let node = |part: &Arc<Finalized>| match &**part {
        Finalized::Node(node) => Some(node.clone()),
        _ => None,
    };
    let Some(nodes) = of.parts(801).iter().map(node).collect() else {
        return refused(
            call,
            BAD_PARAM,
            "a graph with a part that is not an operation, or with a convolution among others",
        );
    };
    match Dataflow::new(nodes) {
        Ok(flow) => Ok(Computation::Dataflow(flow)),
        Err(text) => refused(call, BAD_PARAM, &text),
    }
}

/// From an engine configuration, for a handle's device or a described one.
fn plan(call: &str, of: &Attributes<Finalized>) -> CallResult<Plan> {
    let is_here = of.has(400);
    match of.part(401) {
        Some(Finalized::Configuration(Configuration { computation, .. }))
            if fault::requested().is_ok_and(|faults| fault_applies(faults.cudnn_untaken, computation)) =>
        {
            unsupported("injected fault")
        }
        Some(Finalized::Configuration(configuration)) if is_here || of.has(407) => {
            Ok(Plan::new(configuration, is_here))
        }
        _ => refused(call, BAD_PARAM, "a plan without a configuration, or without a device"),
    }
}

fn format(data_type: i32) -> Option<Format> {
    match data_type {
        0 => Some(Format::F32),
        2 => Some(Format::F16),
        9 => Some(Format::Bf16),
        _ => None,
    }
}

/// Requires that all numbers are positive.
fn positive<const N: usize>(call: &str, numbers: &[i64]) -> CallResult<[u64; N]> {
    let all: Option<Vec<u64>> =
        numbers.iter().map(|number| u64::try_from(*number).ok().filter(|number| *number > 0)).collect();
    match all.and_then(|all| all.try_into().ok()) {
        Some(numbers) => Ok(numbers),
        None => refused(call, BAD_PARAM, &format!("sizes or strides {numbers:?}")),
    }
}

fn tensor(call: &str, of: &Attributes<Finalized>) -> CallResult<Tensor> {
    let place = match (of.is_true(907), of.is_true(908)) {
        (false, false) => Place::Device,
        (true, false) => Place::Between,
        (false, true) => Place::Host,
        (true, true) => return refused(call, BAD_PARAM, "a tensor that is virtual and of the host"),
    };
    // Indices and booleans exist only between operations, where they are represented like other
    // numbers.
    let format = match of.int(901) {
        4 | 11 if place == Place::Between => Some(Format::F32),
        data_type => format(data_type),
    };
    let Some(format) = format else {
        return refused(call, BAD_PARAM, &format!("a tensor of type {}", of.int(901)));
    };
    let alignment = of.long(900) as u64;
    if !alignment.is_power_of_two() || (alignment < format.bytes() && place != Place::Between) {
        return refused(call, BAD_PARAM, &format!("a tensor at a multiple of {} bytes", of.long(900)));
    }
    let dimensions = positive(call, &of.longs(902))?;
    let strides = positive(call, &of.longs(903))?;
    if place == Place::Host && dimensions != [1; 4] {
        return refused(call, BAD_PARAM, "more than one number of the host");
    }
    Ok(Tensor { id: of.long(906), format, alignment, dimensions, strides, place })
}

fn window(call: &str, of: &Attributes<Finalized>) -> CallResult<Window> {
    if (of.int(100), of.int(101), of.long(106)) != (0, 1, 2) {
        return refused(call, BAD_PARAM, "accumulation that is not in FP32, flipped filters, or not two dimensions");
    }
    let [dilations, strides] = [positive(call, &of.longs(102))?, positive(call, &of.longs(103))?];
    let padding = |name: i32| of.longs(name).iter().map(|number| *number as u64).collect::<Vec<_>>();
    let [after, before] = [padding(104), padding(105)];
    if after.iter().chain(&before).any(|number| *number > 1 << 20) {
        return refused(call, BAD_PARAM, "a padding that is negative or very large");
    }
    Ok(Window { dilations, strides, before: [before[0], before[1]], after: [after[0], after[1]] })
}

fn operation(
    call: &str,
    operation: Operation,
    of: &Attributes<Finalized>,
    first: i32,
    names: [i32; 3],
) -> CallResult<Finalized> {
    let (
        Some(Finalized::Window(window)),
        [Some(Finalized::Tensor(images)), Some(Finalized::Tensor(filters)), Some(Finalized::Tensor(results))],
    ) = (of.part(first + 2), names.map(|name| of.part(name)))
    else {
        return refused(call, BAD_PARAM, "a window or tensors that are of another kind");
    };
    let ids = [images.id, filters.id, results.id];
    if ids[0] == ids[1] || ids[1] == ids[2] || ids[0] == ids[2] {
        return refused(call, DUPLICATED_ENTRIES, &format!("two tensors of one number: {ids:?}"));
    }
    let shape = Shape {
        operation,
        images: images.clone(),
        filters: filters.clone(),
        results: results.clone(),
        window: *window,
        alpha: of.float(first),
        beta: of.float(first + 1),
    };
    if !shape.fits() {
        return refused(call, SHAPE_MISMATCH, &format!("sides that do not fit: {shape:?}"));
    }
    Ok(Finalized::Operation(Box::new(shape)))
}

/// By number, or as JSON.
fn device(call: &str, of: &Attributes<Finalized>) -> CallResult<String> {
    if of.has(2700) {
        return match abi::devices() {
            Ok(count) if usize::try_from(of.int(2700)).is_ok_and(|number| number < count) => Ok(OURS.to_owned()),
            _ => refused(call, NOT_INITIALIZED, &format!("there is no device {}", of.int(2700))),
        };
    }
    let text = String::from_utf8_lossy(of.bytes(2702));
    if !text.trim_start().starts_with('{') || !text.contains("\"deviceVer\"") {
        return refused(call, BAD_PARAM, "no device, by number or in JSON");
    }
    Ok(text.into_owned())
}

/// Engines for a graph; fallback mode returns only the last one.
fn heuristic(call: &str, of: &Attributes<Finalized>) -> CallResult<Vec<Configuration>> {
    let computation = match (of.part(201), of.part(204)) {
        (Some(Finalized::Graph(computation, true)), None)
        | (Some(Finalized::Graph(computation, false)), Some(Finalized::Device(_))) => computation,
        _ => return refused(call, BAD_PARAM, "no graph, or not either a handle or a device"),
    };
    match computation {
        Computation::Convolution(shape) => check_convolution(shape)?,
        Computation::Dataflow(flow) => flows::check(flow)?,
    }
    if fault::requested().is_ok_and(|faults| fault_applies(faults.cudnn_refused, computation)) {
        return unsupported("injected fault");
    }
    let engines = match (of.int(200), computation) {
        (3, Computation::Convolution(_)) => &[UNORDERED, ROUNDED, EXACT][..],
        (2, Computation::Convolution(_)) => &[EXACT],
        (3, Computation::Dataflow(_)) => &[FUSED],
        (2, Computation::Dataflow(_)) => &[],
        (mode, _) => return refused(call, BAD_PARAM, &format!("mode {mode}")),
    };
    Ok(engines.iter().map(|engine| Configuration { computation: computation.clone(), engine: *engine }).collect())
}

fn check_convolution(shape: &Shape) -> CallResult<()> {
    let tensors = [&shape.images, &shape.filters, &shape.results];
    let formats = tensors.map(|tensor| tensor.format);
    if formats.iter().any(|format| *format != formats[0]) {
        return unsupported(&format!("formats {formats:?}"));
    }
    if tensors.into_iter().any(|tensor| !is_nhwc(tensor) || tensor.place != Place::Device) {
        return unsupported(NHWC);
    }
    Ok(())
}
