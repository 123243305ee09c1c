//! How long each operation of a training step takes at least on a GPU whose rates are known.
//!
//! An operation moves each of its bytes once and computes at the full rate of the device, whichever takes longer; none is shorter than a
//! launch. Operations run one after another, as they do in the one stream of a rank.

use super::launch::{Launch, Product, Span, Work};
use super::plan::Plan;
use super::refused::Refused;
use super::update::Update;
use crate::cpu::Format;
use crate::cpu::attention::AttentionShape;
use crate::nn::Form;
use std::collections::BTreeMap;
use switchyard_worker_contract::prediction::{Bound, Gpu, Operation, Part};

/// What the launches of a kernel in a part of a step come to.
#[derive(Default)]
struct Sum {
    launches: u64,
    bytes: f64,
    flops: f64,
    seconds: f64,
    /// Of the seconds, those of operations that wait for memory, for arithmetic, and for the launch itself.
    bounds: [f64; 3],
}

/// A launch that is to be run so many times in a step.
struct Planned<'a> {
    part: Part,
    work: &'a Work<Span>,
    form: Option<&'a Form>,
    times: u64,
}

/// All operations of a step of so many micro-batches, the slowest first.
///
/// # Errors
/// None for a plan and an update that their constructors have returned.
pub(super) fn predict(plan: &Plan, update: &Update, micro_batches: u32, gpu: &Gpu) -> Result<Vec<Operation>, Refused> {
    let mut sums: BTreeMap<(Part, &'static str), Sum> = BTreeMap::new();
    let later = u64::from(micro_batches.saturating_sub(1));
    for (adds, times) in [(false, 1), (true, later)] {
        for Launch { layer, backward, work } in plan.launches(adds, |span| span)? {
            let part = if backward { Part::Backward } else { Part::Forward };
            sum(&mut sums, Planned { part, work: &work, form: plan.form(&layer), times }, gpu);
        }
        for call in update.losses(&plan.losses(), adds, |span| span)? {
            let work = Work::Kernel(call);
            sum(&mut sums, Planned { part: Part::Backward, work: &work, form: None, times }, gpu);
        }
    }
    for call in update.launches(|span| span)? {
        sum(&mut sums, Planned { part: Part::Update, work: &Work::Kernel(call), form: None, times: 1 }, gpu);
    }
    sums.retain(|_, sum| sum.launches > 0);
    let mut operations: Vec<Operation> = sums.into_iter().map(|(of, sum)| sum.operation(of)).collect();
    operations.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    Ok(operations)
}

fn sum(sums: &mut BTreeMap<(Part, &'static str), Sum>, of: Planned<'_>, gpu: &Gpu) {
    let Planned { part, work, form, times } = of;
    let sum = sums.entry((part, work.name())).or_default();
    let (bytes, (flops, rate)) = (bytes(work) as f64, arithmetic(work, form, gpu));
    let each = [bytes / gpu.bytes_per_second, flops / rate, gpu.launch_seconds.unwrap_or_default()];
    let seconds = each.into_iter().fold(0.0, f64::max);
    let bound = each.iter().position(|part| *part == seconds).unwrap_or_default();
    let times_f64 = times as f64;
    sum.launches += times;
    sum.bytes += times_f64 * bytes;
    sum.flops += times_f64 * flops;
    sum.seconds += times_f64 * seconds;
    sum.bounds[bound] += times_f64 * seconds;
}

impl Sum {
    fn operation(self, (part, name): (Part, &'static str)) -> Operation {
        let Sum { launches, bytes, flops, seconds, bounds: [memory, arithmetic, launch] } = self;
        let bound = match () {
            () if memory >= arithmetic && memory >= launch => Bound::Memory,
            () if arithmetic >= launch => Bound::Arithmetic,
            () => Bound::Launch,
        };
        Operation { part, name: name.to_owned(), launches, bytes, flops, seconds, bound }
    }
}

/// Bytes that have to be read and written.
fn bytes(work: &Work<Span>) -> usize {
    let (reads, writes) = (work.reads(), work.writes());
    let longest = |spans: &mut dyn Iterator<Item = &Span>| spans.map(|span| span.bytes).max();
    // Of a table only rows are used, as many as lie on the other side.
    let most = match work.name() {
        "embedding" | "gather" => longest(&mut writes.iter()),
        "scatter" | "embedding_gradient" | "embedding_runs" => {
            longest(&mut reads.iter().filter(|span| !writes.contains(span)))
        }
        _ => None,
    };
    reads.iter().chain(&writes).map(|span| span.bytes.min(most.unwrap_or(usize::MAX))).sum()
}

/// Floating-point operations, and how many the device computes in a second.
fn arithmetic(work: &Work<Span>, form: Option<&Form>, gpu: &Gpu) -> (f64, f64) {
    match (work, form) {
        (Work::Product(product), _) => (flops(product), rate(product.left.format, gpu)),
        // Our attention uses no tensor cores.
        (Work::Kernel(call), Some(Form::Attention(shape))) => (attention(call.kernel(), shape), gpu.flops_per_second),
        _ => (0.0, gpu.flops_per_second),
    }
}

fn flops(product: &Product<Span>) -> f64 {
    let inner = if product.left.is_transposed { product.left.rows } else { product.left.columns };
    2.0 * (product.result.rows * product.result.columns) as f64 * inner as f64
}

fn rate(format: Format, gpu: &Gpu) -> f64 {
    match format {
        Format::F32 => gpu.products.f32,
        Format::Bf16 => gpu.products.bf16,
        Format::F16 => gpu.products.f16,
    }
}

/// Forward multiplies scores and values. Backward computes the scores again, and their gradient, once for the queries and once for the keys
/// and values. Of a causal mask half of the scores are computed.
fn attention(kernel: &str, shape: &AttentionShape) -> f64 {
    let products = match kernel {
        "attention" => 2.0,
        "attention_queries" => 3.0,
        "attention_keys" => 4.0,
        _ => 0.0,
    };
    let scores = (shape.batch * shape.context) as f64 * shape.context as f64 * if shape.causal { 0.5 } else { 1.0 };
    products * 2.0 * scores * shape.hidden() as f64
}
