//! What descriptors become when they are finalized: tensors, an operation, the engines for it.

use super::attributes::{self as known, Attributes};
use super::engines::{Configuration, EXACT, Engine, FUSED, ROUNDED, UNORDERED, Whole, kind_of, meets};
use super::flows::{self, How};
use super::plans::{Pack, Plan};
use super::{Answer, BAD_PARAM, DUPLICATED_ENTRIES, NOT_INITIALIZED, SHAPE_MISMATCH, refused, unsupported};
use crate::abi;
use crate::fault;
use crate::gpu::convolution::{Operation, Shape, Window, is_nhwc};
use crate::gpu::dataflow::{Dataflow, Does, MODES, Node};
use crate::gpu::tensor::{Place, Tensor};
use crate::numbers::Format;
use std::sync::Arc;

/// The reference GPU, in fewer words than a real one has.
const OURS: &str = r#"{"deviceName":"Switchyard reference GPU","deviceVer":900,"multiProcessorCount":132}"#;

const NHWC: &str = "strides that are not those of NHWC";

/// A descriptor that is finalized.
#[derive(Debug)]
pub(super) enum Made {
    Tensor(Tensor),
    Window(Window),
    Operation(Box<Shape>),
    How(How),
    Node(Node),
    Graph(Whole),
    /// In JSON.
    Device(String),
    Heuristic(Vec<Configuration>),
    Engine(Engine),
    Configuration(Configuration),
    Plan(Plan),
    Pack(Pack),
}

impl Made {
    pub(super) fn kind(&self) -> i32 {
        match self {
            Made::Tensor(_) => known::TENSOR,
            Made::Window(_) => known::WINDOW,
            Made::Operation(shape) => kind_of(shape.operation),
            Made::How(how) => how.kind(),
            Made::Node(node) => flows::kind_of(node),
            Made::Graph(_) => known::GRAPH,
            Made::Device(_) => known::DEVICE,
            Made::Heuristic(_) => known::HEURISTIC,
            Made::Engine(_) => known::ENGINE,
            Made::Configuration(_) => known::CONFIGURATION,
            Made::Plan(_) => known::PLAN,
            Made::Pack(_) => known::PACK,
        }
    }
}

/// What a descriptor with these attributes, which has all that it needs, becomes.
pub(super) fn made(call: &str, kind: i32, of: &Attributes<Made>) -> Answer<Made> {
    match kind {
        known::TENSOR => tensor(call, of).map(Made::Tensor),
        known::WINDOW => window(call, of).map(Made::Window),
        known::FORWARD => operation(call, Operation::Forward, of, 700, [704, 703, 705]),
        known::IMAGES => operation(call, Operation::Images, of, 706, [710, 709, 711]),
        known::FILTERS => operation(call, Operation::Filters, of, 712, [716, 715, 717]),
        known::POINTWISE | known::PRODUCT | known::REDUCTION => how(call, kind, of).map(Made::How),
        known::OF_POINTWISE | known::OF_PRODUCT | known::OF_REDUCTION | known::RESHAPE => {
            node(call, kind, of).map(Made::Node)
        }
        known::GRAPH => graph(call, of).map(Made::Graph),
        known::DEVICE => device(call, of).map(Made::Device),
        known::HEURISTIC => heuristic(call, of).map(Made::Heuristic),
        known::PLAN => plan(call, of).map(Made::Plan),
        known::PACK => Pack::new(call, &of.longs(1000), &of.longs(1001), of.long(1003)).map(Made::Pack),
        _ => refused(call, BAD_PARAM, &format!("kind {kind} is filled by the library")),
    }
}

/// What a descriptor of a kind of operation says.
fn how(call: &str, kind: i32, of: &Attributes<Made>) -> Answer<How> {
    let (precision, does) = match kind {
        known::PRODUCT => (1500, Does::Product),
        known::REDUCTION => match of.int(1600) {
            0 => (1601, Does::Reduction { max: false }),
            3 => (1601, Does::Reduction { max: true }),
            other => return refused(call, BAD_PARAM, &format!("reduction {other}")),
        },
        _ => (1, Does::Pointwise(of.int(0).into(), of.long(9) as u64)),
    };
    if of.int(precision) != 0 {
        return refused(call, BAD_PARAM, "sums in another format than 32 bits");
    }
    if let Does::Pointwise(mode, _) = does
        && !MODES.iter().any(|(known, _)| *known == mode)
    {
        return refused(call, BAD_PARAM, &format!("pointwise mode {mode}"));
    }
    Ok(How(does))
}

/// An operation with its tensors.
fn node(call: &str, kind: i32, of: &Attributes<Made>) -> Answer<Node> {
    let (how, inputs, output) = match kind {
        known::OF_PRODUCT => (Some(1523), &[1520, 1521][..], 1522),
        known::OF_REDUCTION => (Some(1612), &[1610][..], 1611),
        known::OF_POINTWISE => (Some(750), &[751, 752, 758][..], 753),
        _ => (None, &[2200][..], 2201),
    };
    let does = match how.map(|name| of.part(name)) {
        None => Does::Reshape,
        Some(Some(Made::How(How(does)))) => *does,
        Some(_) => return refused(call, BAD_PARAM, "no descriptor of what is done"),
    };
    let tensor = |name: &i32| match of.part(*name) {
        Some(Made::Tensor(tensor)) => Some(tensor.clone()),
        _ => None,
    };
    let inputs: Vec<Tensor> = inputs.iter().filter(|name| of.has(**name)).filter_map(tensor).collect();
    let Some(output) = tensor(&output) else {
        return refused(call, BAD_PARAM, "no tensor for the result");
    };
    let node = Node { does, inputs, output };
    if flows::kind_of(&node) != kind {
        return refused(call, BAD_PARAM, "a descriptor of what another operation does");
    }
    if !node.fits() {
        return refused(call, SHAPE_MISMATCH, &format!("axes that do not fit: {node:?}"));
    }
    Ok(node)
}

/// A convolution, or operations that go on from each other.
fn graph(call: &str, of: &Attributes<Made>) -> Answer<Whole> {
    if let [one] = of.parts(801)
        && let Made::Operation(shape) = &**one
    {
        return Ok(Whole::Convolution(shape.clone()));
    }
    let node = |part: &Arc<Made>| match &**part {
        Made::Node(node) => Some(node.clone()),
        _ => None,
    };
    let Some(nodes) = of.parts(801).iter().map(node).collect() else {
        return refused(call, BAD_PARAM, "a graph of what is no operation, or of a convolution and others");
    };
    match Dataflow::new(nodes) {
        Ok(flow) => Ok(Whole::Dataflow(flow)),
        Err(text) => refused(call, BAD_PARAM, &text),
    }
}

/// From a text, or from the configuration of an engine for a device.
fn plan(call: &str, of: &Attributes<Made>) -> Answer<Plan> {
    let is_here = of.has(400);
    if of.has(405) {
        return Plan::read(call, is_here, &String::from_utf8_lossy(of.bytes(405)));
    }
    match of.part(401) {
        Some(Made::Configuration(configuration)) if is_here || of.has(407) => Ok(Plan::new(configuration, is_here)),
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

/// Numbers that are all greater than 0.
fn positive<const N: usize>(call: &str, numbers: &[i64]) -> Answer<[u64; N]> {
    let all: Option<Vec<u64>> =
        numbers.iter().map(|number| u64::try_from(*number).ok().filter(|number| *number > 0)).collect();
    match all.and_then(|all| all.try_into().ok()) {
        Some(numbers) => Ok(numbers),
        None => refused(call, BAD_PARAM, &format!("sizes or strides {numbers:?}")),
    }
}

fn tensor(call: &str, of: &Attributes<Made>) -> Answer<Tensor> {
    let place = match (of.is_true(907), of.is_true(908)) {
        (false, false) => Place::Device,
        (true, false) => Place::Between,
        (false, true) => Place::Host,
        (true, true) => return refused(call, BAD_PARAM, "a tensor that is virtual and of the host"),
    };
    // Indices and truths are between operations only, and are numbers like others there.
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

fn window(call: &str, of: &Attributes<Made>) -> Answer<Window> {
    if (of.int(100), of.int(101), of.long(106)) != (0, 1, 2) {
        return refused(call, BAD_PARAM, "sums in another format than 32 bits, flipped filters, or not two dimensions");
    }
    let [dilations, strides] = [positive(call, &of.longs(102))?, positive(call, &of.longs(103))?];
    let padding = |name: i32| of.longs(name).iter().map(|number| *number as u64).collect::<Vec<_>>();
    let [after, before] = [padding(104), padding(105)];
    if after.iter().chain(&before).any(|number| *number > 1 << 20) {
        return refused(call, BAD_PARAM, "a padding that is negative or very large");
    }
    Ok(Window { dilations, strides, before: [before[0], before[1]], after: [after[0], after[1]] })
}

fn operation(call: &str, operation: Operation, of: &Attributes<Made>, first: i32, names: [i32; 3]) -> Answer<Made> {
    let (
        Some(Made::Window(window)),
        [Some(Made::Tensor(images)), Some(Made::Tensor(filters)), Some(Made::Tensor(results))],
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
    Ok(Made::Operation(Box::new(shape)))
}

/// By its number, or in words.
fn device(call: &str, of: &Attributes<Made>) -> Answer<String> {
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

/// The engines for a graph, of which the last is also what the fall-back mode knows.
fn heuristic(call: &str, of: &Attributes<Made>) -> Answer<Vec<Configuration>> {
    let (Some(Made::Graph(whole)), Some(Made::Device(_))) = (of.part(201), of.part(204)) else {
        return refused(call, BAD_PARAM, "no graph, or no device");
    };
    match whole {
        Whole::Convolution(shape) => check_convolution(shape)?,
        Whole::Dataflow(flow) => flows::check(flow)?,
    }
    if fault::requested().is_ok_and(|faults| meets(faults.cudnn_refused, whole)) {
        return unsupported("the fault that was asked for");
    }
    let engines = match (of.int(200), whole) {
        (3, Whole::Convolution(_)) => &[UNORDERED, ROUNDED, EXACT][..],
        (2, Whole::Convolution(_)) => &[EXACT],
        (3, Whole::Dataflow(_)) => &[FUSED],
        (2, Whole::Dataflow(_)) => &[],
        (mode, _) => return refused(call, BAD_PARAM, &format!("mode {mode}")),
    };
    Ok(engines.iter().map(|engine| Configuration { whole: whole.clone(), engine: *engine }).collect())
}

fn check_convolution(shape: &Shape) -> Answer<()> {
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
