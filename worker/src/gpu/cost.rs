//! What each work of a step moves and computes.

use super::format::number;
use super::launch::{Attention, Convolution, Launch, Matrix, Product, Span, Work};
use super::plan::Plan;
use super::refused::Refused;
use super::update::Update;
use crate::cpu::Format;
use crate::cpu::attention::AttentionShape;
use crate::nn::Form;
use switchyard_cuda::cublaslt;
use switchyard_worker_contract::prediction::{Arithmetic, Cost, Part};

/// Bytes of which addresses and rows of factors are multiples where tensor cores compute a product as it is.
const TENSOR: usize = 16;

/// A work, and its cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costed {
    pub part: Part,
    /// See [`Work::name`].
    pub name: &'static str,
    pub cost: Cost,
    /// Its tensors are in 16 bits.
    pub half: bool,
    /// Products that tensor cores can compute as they are.
    pub aligned: bool,
}

/// Forward and backward of a micro-batch, in the order of [`Works`](super::Works). `adds`: to earlier ones.
pub(super) fn of_pass(plan: &Plan, update: &Update, adds: bool) -> Result<Vec<Costed>, Refused> {
    let format = plan.format();
    let half = format != Format::F32;
    let mut all = Vec::new();
    for Launch { layer, work, backward } in in_order(plan, adds)? {
        let part = if backward { Part::Backward } else { Part::Forward };
        all.push(Costed { half, ..costed(part, &work, plan.form(&layer).map(|form| (form, format))) });
    }
    for call in update.losses(&plan.losses(), adds, |span| span)? {
        all.push(costed(Part::Backward, &Work::Kernel(call), None));
    }
    Ok(all)
}

/// The layers of these, in the same order; works that are of none, such as those of the loss, have no name.
pub(super) fn layers(plan: &Plan, update: &Update, adds: bool) -> Result<Vec<String>, Refused> {
    let layers = in_order(plan, adds)?.into_iter().map(|launch| launch.layer);
    let losses = update.losses(&plan.losses(), adds, |span| span)?;
    Ok(layers.chain(losses.iter().map(|_| String::new())).collect())
}

/// Forward before backward.
fn in_order(plan: &Plan, adds: bool) -> Result<Vec<Launch<Span>>, Refused> {
    let mut launches = plan.launches(adds, |span| span)?;
    launches.sort_by_key(|launch| launch.backward);
    Ok(launches)
}

/// What follows the last micro-batch.
pub(super) fn of_update(update: &Update) -> Result<Vec<Costed>, Refused> {
    let calls = update.launches(|span| span)?;
    Ok(calls.into_iter().map(|call| costed(Part::Update, &Work::Kernel(call), None)).collect())
}

/// `form`: that of the layer, and the format of its tensors.
fn costed(part: Part, work: &Work<Span>, form: Option<(&Form, Format)>) -> Costed {
    let (flops, needed_flops, arithmetic) = arithmetic(work, form);
    let aligned = match work {
        Work::Product(Product { left, right, result, .. }) => [left, right, result].into_iter().all(is_aligned),
        Work::Convolution(Convolution { kind, .. }) => [kind.shape.channels, kind.shape.outputs]
            .iter()
            .all(|width| (width * kind.format.size()).is_multiple_of(TENSOR)),
        // Attention refuses heads that are not.
        _ => arithmetic != Arithmetic::Scalar,
    };
    let cost = Cost { bytes: bytes(work) as f64, flops, needed_flops, arithmetic };
    Costed { part, name: work.name(), cost, half: false, aligned }
}

fn is_aligned(matrix: &Matrix<Span>) -> bool {
    matrix.memory.at.is_multiple_of(TENSOR) && (matrix.pitch * matrix.format.bytes()).is_multiple_of(TENSOR)
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

/// Floating-point operations, those that are needed, and what they are done with.
fn arithmetic(work: &Work<Span>, form: Option<(&Form, Format)>) -> (f64, f64, Arithmetic) {
    match (work, form) {
        (Work::Product(product), _) => {
            let flops = flops(product);
            (flops, flops, of_factors(product.left.format))
        }
        // Each direction multiplies each pixel of each window once.
        (Work::Convolution(Convolution { kind, .. }), _) => {
            let flops = 2.0 * kind.shape.output_len() as f64 * kind.shape.window_len() as f64;
            (flops, flops, of_factors(number(kind.format)))
        }
        (Work::Attention(Attention { kind, .. }), _) => {
            let [done, needed] = attention(work.name(), &kind.shape);
            (done, needed, of_factors(number(kind.format)))
        }
        (Work::Kernel(call), Some((Form::Attention(shape), format))) => {
            let [done, needed] = attention(call.kernel(), shape);
            // Our attention uses tensor cores for factors in 16 bits only.
            (done, needed, if format == Format::F32 { Arithmetic::Scalar } else { of_factors(number(format)) })
        }
        _ => (0.0, 0.0, Arithmetic::Scalar),
    }
}

fn flops(product: &Product<Span>) -> f64 {
    let inner = if product.left.is_transposed { product.left.rows } else { product.left.columns };
    2.0 * (product.result.rows * product.result.columns) as f64 * inner as f64
}

fn of_factors(format: cublaslt::Format) -> Arithmetic {
    match format {
        cublaslt::Format::F32 => Arithmetic::F32,
        cublaslt::Format::Bf16 => Arithmetic::Bf16,
        cublaslt::Format::F16 => Arithmetic::F16,
        cublaslt::Format::Fp8(_) => Arithmetic::Fp8,
    }
}

/// Forward multiplies scores and values. Backward needs the gradients of the scores, and of queries, keys and values; it computes scores again,
/// and in kernels of ours also their gradient, once for the queries and once for the keys and values. Of a causal mask half of the scores are computed.
fn attention(kernel: &str, shape: &AttentionShape) -> [f64; 2] {
    let products = match kernel {
        "attention" | "fused_attention" => [2.0, 2.0],
        "fused_attention_backward" => [5.0, 4.0],
        "attention_queries" => [3.0, 2.0],
        "attention_keys" => [4.0, 2.0],
        _ => [0.0, 0.0],
    };
    let scores = (shape.batch * shape.context) as f64 * shape.context as f64 * if shape.causal { 0.5 } else { 1.0 };
    products.map(|products| products * 2.0 * scores * shape.hidden() as f64)
}
