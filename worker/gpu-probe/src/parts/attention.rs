//! Attention as a single node of cuDNN's graph, without the C++ front end.
//!
//! The node has no attribute for a causal mask: by itself it only computes `softmax(scale * Q K^T) V` (header of 9.26).

use super::Probe;
use crate::numbers::{pattern, relative_error, short};
use crate::outcome::Outcome;
use half::bf16;
use serde_json::{Value, json};
use switchyard_cuda::Error;
use switchyard_cuda::cudnn::Cudnn;
use switchyard_cuda::driver::{Buffer, Context};
use switchyard_cuda::graph::{Element, Graph, Operation, Tensor};
use switchyard_cuda::version;

/// A descriptor of an operation and the first version that has it.
struct Node {
    kind: i32,
    since: usize,
    name: &'static str,
}

const FORWARD: Node = Node { kind: 41, since: 91_300, name: "CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR" };
const BACKWARD: Node = Node { kind: 43, since: 91_700, name: "CUDNN_BACKEND_OPERATION_SDPA_BWD_DESCRIPTOR" };

/// Batch, heads, tokens and width of a head.
#[derive(Debug, Clone, Copy)]
struct Shape {
    batch: usize,
    heads: usize,
    tokens: usize,
    width: usize,
}

/// Small enough for the CPU.
const CHECKED: Shape = Shape { batch: 2, heads: 2, tokens: 128, width: 64 };
/// GPT-2 of 124 million parameters, 8 sequences.
const TIMED: Shape = Shape { batch: 8, heads: 12, tokens: 1024, width: 64 };

impl Shape {
    fn elements(&self) -> usize {
        self.batch * self.heads * self.tokens * self.width
    }

    /// Operations of a product of scores.
    fn product(&self) -> f64 {
        2.0 * (self.elements() * self.tokens) as f64
    }

    fn scale(&self) -> f32 {
        1.0 / (self.width as f32).sqrt()
    }

    fn numbers(&self) -> [i64; 4] {
        [self.batch, self.heads, self.tokens, self.width].map(|number| number as i64)
    }

    /// In the layout that linear layers produce: batch, tokens, heads, width.
    fn tensor(&self, id: i64) -> Tensor {
        let [b, h, s, d] = self.numbers();
        Tensor {
            id,
            element: Element::Bf16,
            dimensions: [b, h, s, d],
            strides: [s * h * d, d, h * d, 1],
            by_value: false,
        }
    }

    /// Logarithms of the sums of a softmax, one per row.
    fn statistics(&self, id: i64) -> Tensor {
        let [b, h, s, _] = self.numbers();
        Tensor { id, element: Element::F32, dimensions: [b, h, s, 1], strides: [h * s, s, 1, 1], by_value: false }
    }
}

fn scale(id: i64) -> Tensor {
    Tensor { id, element: Element::F32, dimensions: [1; 4], strides: [1; 4], by_value: true }
}

fn check_version(cudnn: &Cudnn, node: &Node) -> Result<(), Outcome> {
    let have = cudnn.version();
    if have >= node.since {
        return Ok(());
    }
    let [have, since] = [have, node.since].map(|number| version::library(number as i64));
    Err(Outcome::absent(format!("cuDNN {have} has no {}: {since} is the first", node.name)))
}

fn forward_operation(graph: &Graph<'_>, shape: &Shape) -> Result<Operation, Error> {
    // Q, K, V, O, statistics, scale.
    let tensors = (2800..2804).zip(1..).map(|(attribute, id)| (attribute, shape.tensor(id)));
    let tensors: Vec<_> = tensors.chain([(2804, shape.statistics(5)), (2805, scale(6))]).collect();
    graph.operation(FORWARD.kind, &tensors)
}

fn backward_operation(graph: &Graph<'_>, shape: &Shape) -> Result<Operation, Error> {
    // Q, K, V, O, statistics, scale, then dQ, dK, dV and dO.
    let inputs = (2851..2855).zip(1..).map(|(attribute, id)| (attribute, shape.tensor(id)));
    let gradients = (2859..2863).zip(7..).map(|(attribute, id)| (attribute, shape.tensor(id)));
    let between = [(2855, shape.statistics(5)), (2856, scale(6))];
    graph.operation(BACKWARD.kind, &inputs.chain(between).chain(gradients).collect::<Vec<_>>())
}

/// Whether cuDNN knows both nodes and accepts their tensors, which needs no GPU. Whether an engine runs them does.
pub(super) fn nodes(probe: &Probe) -> Result<Value, Outcome> {
    let cudnn = Cudnn::new(&probe.cudnn()?)?;
    let graph = Graph::new(&cudnn);
    check_version(&cudnn, &FORWARD)?;
    forward_operation(&graph, &TIMED)?;
    check_version(&cudnn, &BACKWARD)?;
    backward_operation(&graph, &TIMED)?;
    Ok(json!({"accepted": [FORWARD.name, BACKWARD.name]}))
}

/// The tensors of one attention on the device.
struct Tensors {
    /// Q, K, V, O, statistics.
    forward: [Buffer; 5],
    /// dQ, dK, dV, dO.
    gradients: [Buffer; 4],
}

impl Tensors {
    fn new(context: &Context, shape: &Shape) -> Result<Tensors, Error> {
        let input = |seed| {
            let values: Vec<bf16> = (0..shape.elements()).map(|index| bf16::from_f32(pattern(seed, index))).collect();
            context.upload(&values)
        };
        let zeros = || context.zeros(2 * shape.elements());
        let statistics = context.zeros(4 * shape.batch * shape.heads * shape.tokens)?;
        Ok(Tensors {
            forward: [input(1)?, input(2)?, input(3)?, zeros()?, statistics],
            gradients: [zeros()?, zeros()?, zeros()?, input(4)?],
        })
    }
}

/// Runs forward and, if requested, backward; returns the results and the seconds of the last pass.
fn compute(context: &Context, graph: &Graph<'_>, shape: &Shape, backward: bool) -> Result<(Vec<Vec<f32>>, f64), Error> {
    let tensors = Tensors::new(context, shape)?;
    let plan = graph.plan(forward_operation(graph, shape)?)?;
    let workspace = context.zeros(plan.workspace_bytes.max(1))?;
    let buffers = tensors.forward.each_ref();
    let stream = context.default_stream();
    let run = || plan.run(&buffers, shape.scale(), &workspace, &stream);
    run()?;
    if !backward {
        let seconds = context.time(&stream, 10, run)?;
        return Ok((vec![read(&tensors.forward[3], shape)?], seconds));
    }
    let plan = graph.plan(backward_operation(graph, shape)?)?;
    let workspace = context.zeros(plan.workspace_bytes.max(1))?;
    let buffers: Vec<&Buffer> = tensors.forward.iter().chain(&tensors.gradients).collect();
    let seconds = context.time(&stream, 10, || plan.run(&buffers, shape.scale(), &workspace, &stream))?;
    let [dq, dk, dv, _] = &tensors.gradients;
    Ok((vec![read(dq, shape)?, read(dk, shape)?, read(dv, shape)?], seconds))
}

fn read(buffer: &Buffer, shape: &Shape) -> Result<Vec<f32>, Error> {
    Ok(buffer.download::<bf16>(0..shape.elements())?.iter().map(|value| value.to_f32()).collect())
}

pub(super) fn forward(probe: &Probe) -> Result<Value, Outcome> {
    measure(probe, false)
}

pub(super) fn backward(probe: &Probe) -> Result<Value, Outcome> {
    measure(probe, true)
}

fn measure(probe: &Probe, backward: bool) -> Result<Value, Outcome> {
    let (context, device) = probe.start()?;
    let cudnn = Cudnn::start(&probe.cudnn()?)?;
    let nodes: &[Node] = if backward { &[FORWARD, BACKWARD] } else { &[FORWARD] };
    nodes.iter().try_for_each(|node| check_version(&cudnn, node))?;
    let graph = Graph::new(&cudnn);
    let (got, _) = compute(&context, &graph, &CHECKED, backward)?;
    let reference = Reference::new(&CHECKED);
    let (wanted, names) = match backward {
        false => (vec![reference.o], vec!["O"]),
        true => (vec![reference.dq, reference.dk, reference.dv], vec!["dQ", "dK", "dV"]),
    };
    let errors: Vec<f64> = got.iter().zip(&wanted).map(|(got, wanted)| relative_error(got, wanted)).collect();
    // Eight bits of mantissa in probabilities, in the gradients of scores and in the results.
    let limit = 0.02;
    if let Some((error, name)) = errors.iter().zip(&names).find(|(error, _)| **error > limit) {
        return Err(Outcome::failed(
            "cudnnBackendExecute",
            format!("relative error {error:e} of {name}, expected at most {limit}"),
        ));
    }
    let (_, seconds) = compute(&context, &graph, &TIMED, backward)?;
    // Two products forward; five backward, of which the scores are computed again.
    let products = if backward { 5.0 } else { 2.0 };
    let errors: serde_json::Map<String, Value> =
        names.iter().map(|name| name.to_string()).zip(errors.iter().map(|error| short(*error).into())).collect();
    Ok(json!({
        "device": device.name,
        "relativeErrors": errors,
        "batch": TIMED.batch, "heads": TIMED.heads, "tokens": TIMED.tokens, "width": TIMED.width,
        "microseconds": short(seconds * 1e6),
        "TFLOPs": short(products * TIMED.product() / seconds / 1e12),
    }))
}

/// Attention and its gradients in f32, computed from the definition, in the layout of the device.
struct Reference {
    o: Vec<f32>,
    dq: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
}

impl Reference {
    fn new(shape: &Shape) -> Reference {
        let Shape { batch, heads, tokens, width } = *shape;
        let zeros = || vec![0.0f32; shape.elements()];
        let mut reference = Reference { o: zeros(), dq: zeros(), dk: zeros(), dv: zeros() };
        for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
            let at = |token: usize| ((b * tokens + token) * heads + h) * width;
            let row = |seed: u32, token: usize| (0..width).map(move |d| pattern(seed, at(token) + d));
            for i in 0..tokens {
                let dot = |first: u32, second: u32, j: usize| {
                    row(first, i).zip(row(second, j)).map(|(a, b)| a * b).sum::<f32>()
                };
                let scores: Vec<f32> = (0..tokens).map(|j| dot(1, 2, j) * shape.scale()).collect();
                let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let powers: Vec<f32> = scores.iter().map(|score| (score - largest).exp()).collect();
                let sum: f32 = powers.iter().sum();
                // dP = dO V^T; dS = P * (dP - rowsum(P * dP)).
                let of_probability: Vec<f32> = (0..tokens).map(|j| dot(4, 3, j)).collect();
                let mean: f32 =
                    powers.iter().zip(&of_probability).map(|(power, gradient)| power / sum * gradient).sum();
                for j in 0..tokens {
                    let probability = powers[j] / sum;
                    let of_score = probability * (of_probability[j] - mean) * shape.scale();
                    for d in 0..width {
                        reference.o[at(i) + d] += probability * pattern(3, at(j) + d);
                        reference.dq[at(i) + d] += of_score * pattern(2, at(j) + d);
                        reference.dk[at(j) + d] += of_score * pattern(1, at(i) + d);
                        reference.dv[at(j) + d] += probability * pattern(4, at(i) + d);
                    }
                }
            }
        }
        reference
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `<O, dO>` is linear in V, so its product with dV is the same number; the softmax is invariant to a shift of all
    /// scores, so the rows of dS sum to zero and dQ is invariant to a shift of K.
    #[test]
    fn the_gradients_belong_to_the_result() {
        let shape = Shape { batch: 1, heads: 2, tokens: 5, width: 4 };
        let reference = Reference::new(&shape);
        let inner = |values: &[f32], seed| -> f32 {
            values.iter().enumerate().map(|(i, value)| value * pattern(seed, i)).sum()
        };
        let output = inner(&reference.o, 4);
        assert!(output.abs() > 1e-3 && (inner(&reference.dv, 3) - output).abs() < 1e-5, "{output}");
        // Scores are linear in Q and in K: <dQ, Q> = <dS, S> = <dK, K>.
        let (of_q, of_k) = (inner(&reference.dq, 1), inner(&reference.dk, 2));
        assert!(of_q.abs() > 1e-4 && (of_q - of_k).abs() < 1e-5, "{of_q} and {of_k}");
    }
}
