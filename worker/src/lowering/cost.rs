//! Memory traffic and arithmetic of each op of a step.

use super::launch::{Cudnn, Launch, Span, Work};
use super::plan::Plan;
use super::refused::Refused;
use super::update::Update;
use crate::cpu::Format;
use crate::cpu::attention::AttentionShape;
use crate::nn::Form;
use switchyard_cuda::cublaslt::{self, Matrix, Product};
use switchyard_cuda::operation::Operation;
use switchyard_worker_contract::prediction::{Arithmetic, Cost, Part};

/// Alignment in bytes of addresses and rows that lets tensor cores read a GEMM operand directly.
const TENSOR: usize = 16;

/// An op and its cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costed {
    pub part: Part,
    /// See [`Work::name`].
    pub name: &'static str,
    pub cost: Cost,
    /// Whether its tensors are 16-bit.
    pub half: bool,
    /// Whether tensor cores can read its operands directly.
    pub aligned: bool,
}

/// The forward and backward costs of a micro-batch, in the order of [`Works`](super::Works).
/// `adds`: whether it adds to earlier ones.
pub(super) fn pass_costs(plan: &Plan, update: &Update, adds: bool) -> Result<Vec<Costed>, Refused> {
    let half = plan.format() != Format::F32;
    let mut all = Vec::new();
    for Launch { layer, work, backward } in ordered_launches(plan, adds)? {
        let part = if backward { Part::Backward } else { Part::Forward };
        all.push(Costed { half, ..op_cost(part, &work, plan.form(&layer)) });
    }
    for call in update.losses(&plan.losses(), adds, |span| span)? {
        all.push(op_cost(Part::Backward, &Work::Kernel(call), None));
    }
    Ok(all)
}

/// The layers of these costs, in the same order; ops without a layer, such as the loss's, have
/// an empty name.
pub(super) fn layers(plan: &Plan, update: &Update, adds: bool) -> Result<Vec<String>, Refused> {
    let layers = ordered_launches(plan, adds)?.into_iter().map(|launch| launch.layer);
    let losses = update.losses(&plan.losses(), adds, |span| span)?;
    Ok(layers.chain(losses.iter().map(|_| String::new())).collect())
}

/// Forward before backward.
fn ordered_launches(plan: &Plan, adds: bool) -> Result<Vec<Launch<Span>>, Refused> {
    let mut launches = plan.launches(adds, |span| span)?;
    launches.sort_by_key(|launch| launch.backward);
    Ok(launches)
}

/// The costs after the last micro-batch.
pub(super) fn update_costs(update: &Update) -> Result<Vec<Costed>, Refused> {
    let calls = update.launches(|span| span)?;
    Ok(calls.into_iter().map(|call| op_cost(Part::Update, &Work::Kernel(call), None)).collect())
}

/// `form`: the layer's form.
fn op_cost(part: Part, work: &Work<Span>, form: Option<&Form>) -> Costed {
    let (flops, needed_flops, arithmetic) = arithmetic(work, form);
    let aligned = match work {
        Work::Product(Product { left, right, result, .. }) => [left, right, result].into_iter().all(is_aligned),
        Work::Cudnn(Cudnn { operation: Operation::Convolution(of), .. }) => {
            [of.channels, of.filters].iter().all(|width| (width * of.element.bytes()).is_multiple_of(TENSOR))
        }
        // Attention rejects unaligned heads.
        _ => arithmetic != Arithmetic::Scalar,
    };
    let cost = Cost { bytes: bytes(work) as f64, flops, needed_flops, arithmetic };
    Costed { part, name: work.name(), cost, half: false, aligned }
}

fn is_aligned(matrix: &Matrix<Span>) -> bool {
    matrix.memory.at.is_multiple_of(TENSOR) && (matrix.pitch * matrix.format.bytes()).is_multiple_of(TENSOR)
}

/// Bytes that must be read and written.
fn bytes(work: &Work<Span>) -> usize {
    let (reads, writes) = (work.reads(), work.writes());
    let longest = |spans: &mut dyn Iterator<Item = &Span>| spans.map(|span| span.bytes).max();
    // Only some rows of a table are accessed: as many as are on the other side.
    let most = match work.name() {
        "embedding" | "gather" => longest(&mut writes.iter()),
        "scatter" | "embedding_gradient" | "embedding_runs" => {
            longest(&mut reads.iter().filter(|span| !writes.contains(span)))
        }
        _ => None,
    };
    reads.iter().chain(&writes).map(|span| span.bytes.min(most.unwrap_or(usize::MAX))).sum()
}

/// Executed FLOPs, required FLOPs, and the arithmetic unit.
fn arithmetic(work: &Work<Span>, form: Option<&Form>) -> (f64, f64, Arithmetic) {
    match (work, form) {
        (Work::Product(product), _) => {
            let flops = flops(product);
            (flops, flops, gemm_arithmetic(product.left.format))
        }
        // Each direction multiplies each pixel of each window once.
        (Work::Cudnn(Cudnn { operation: Operation::Convolution(of), .. }), Some(Form::Convolution(shape))) => {
            let flops = 2.0 * shape.output_len() as f64 * shape.window_len() as f64;
            (flops, flops, gemm_arithmetic(of.element.into()))
        }
        (Work::Cudnn(Cudnn { operation: Operation::Attention(of), .. }), Some(Form::Attention(shape))) => {
            let [done, needed] = attention(work.name(), shape);
            (done, needed, gemm_arithmetic(of.shape.element.into()))
        }
        // Our attention computes in f32, without tensor cores.
        (Work::Kernel(call), Some(Form::Attention(shape))) => {
            let [done, needed] = attention(call.kernel(), shape);
            (done, needed, Arithmetic::Scalar)
        }
        _ => (0.0, 0.0, Arithmetic::Scalar),
    }
}

fn flops(product: &Product<Span>) -> f64 {
    let inner = if product.left.is_transposed { product.left.rows } else { product.left.columns };
    2.0 * (product.result.rows * product.result.columns) as f64 * inner as f64
}

fn gemm_arithmetic(format: cublaslt::Format) -> Arithmetic {
    match format {
        cublaslt::Format::F32 => Arithmetic::F32,
        cublaslt::Format::Bf16 => Arithmetic::Bf16,
        cublaslt::Format::F16 => Arithmetic::F16,
        cublaslt::Format::Fp8(_) => Arithmetic::Fp8,
    }
}

/// Forward multiplies scores and values. Backward needs the gradients of scores, queries, keys and
/// values. It recomputes the scores; our own kernels also recompute their gradient, once for the
/// queries and once for the keys and values. A causal mask halves the scores to compute.
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
