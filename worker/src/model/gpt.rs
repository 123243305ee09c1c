//! Decoder-only transformer: learned positions, pre-LN blocks, causal attention, GELU (Radford and others 2019).
//!
//! ```text
//! x = tokens + positions
//! block:  m = x + proj(attention(qkv(norm1(x))));  x = m + proj(gelu(fc(norm2(m))))
//! logits = head(norm(x))
//! ```
//!
//! The names of the parameters are those of GPT-2. Linear weights are `[outputs, inputs]`.

use super::layout::{Initial, Layout};
use super::plan::{BlockPlaces, Place, Plan, at};
use super::{GradientSink, Model, ModelError, initialise};
use crate::cpu::attention::{AttentionForward, AttentionShape, attention, attention_backward};
use crate::cpu::{AlignedBuffer, Cpu, Epilogue, Gemm, Isa, Matrix, Pool, ops};
use std::sync::Arc;
use switchyard_worker_contract::config;

/// Ordinals of a block's parameters; a pair is a weight and the bias after it.
#[derive(Debug, Clone, Copy)]
struct BlockParameters {
    contract: usize,
    expand: usize,
    norm2: usize,
    project: usize,
    qkv: usize,
    norm1: usize,
}

/// Ordinals of all parameters.
#[derive(Debug, Clone)]
struct Parameters {
    /// `None`: the token embedding is the head.
    head: Option<usize>,
    norm: usize,
    blocks: Vec<BlockParameters>,
    positions: usize,
    tokens: usize,
}

/// A GPT for micro-batches of a fixed size.
pub struct Gpt {
    shape: AttentionShape,
    vocabulary: usize,
    layout: Layout,
    parameters: Parameters,
    plan: Plan,
    cpu: Cpu,
    gemm: Gemm,
    arena: AlignedBuffer,
    inputs: Vec<u16>,
    targets: Vec<u16>,
}

/// Standard deviation of initial weights.
const DEVIATION: f32 = 0.02;

fn lay_out(config: &config::Gpt) -> (Layout, Parameters) {
    let (layers, hidden) = (config.layers as usize, config.hidden_size as usize);
    let (context, vocabulary) = (config.context_length as usize, config.vocabulary_size as usize);
    let mut layout = Layout::default();
    let normal = Initial::Normal(DEVIATION);
    // The residual stream is a sum of 2 * layers projections (GPT-2, section 2.3).
    let residual = Initial::Normal(DEVIATION / ((2 * layers) as f32).sqrt());
    let head =
        (!config.tied_head).then(|| layout.push("lm_head.weight".to_owned(), &[vocabulary, hidden], true, normal));
    let norm = push_pair(&mut layout, "transformer.ln_f", &[hidden], false, Initial::Constant(1.0));
    let mut blocks = Vec::new();
    for layer in (0..layers).rev() {
        let mut pair = |name: &str, shape: &[usize], initial| {
            push_pair(&mut layout, &format!("transformer.h.{layer}.{name}"), shape, shape.len() > 1, initial)
        };
        blocks.push(BlockParameters {
            contract: pair("mlp.c_proj", &[hidden, 4 * hidden], residual),
            expand: pair("mlp.c_fc", &[4 * hidden, hidden], normal),
            norm2: pair("ln_2", &[hidden], Initial::Constant(1.0)),
            project: pair("attn.c_proj", &[hidden, hidden], residual),
            qkv: pair("attn.c_attn", &[3 * hidden, hidden], normal),
            norm1: pair("ln_1", &[hidden], Initial::Constant(1.0)),
        });
    }
    blocks.reverse();
    let positions = layout.push("transformer.wpe.weight".to_owned(), &[context, hidden], true, normal);
    let tokens = layout.push("transformer.wte.weight".to_owned(), &[vocabulary, hidden], true, normal);
    (layout, Parameters { head, norm, blocks, positions, tokens })
}

/// A weight and its bias (`shape[0]` zeros).
fn push_pair(layout: &mut Layout, name: &str, shape: &[usize], decay: bool, initial: Initial) -> usize {
    let weight = layout.push(format!("{name}.weight"), shape, decay, initial);
    layout.push(format!("{name}.bias"), &shape[..1], false, Initial::Constant(0.0));
    weight
}

impl Gpt {
    /// A model with all its memory: `batch` sequences per micro-batch, computed by `pool` with the kernels of `isa`.
    pub fn new(config: &config::Gpt, batch: usize, pool: Arc<Pool>, isa: Isa) -> Result<Gpt, ModelError> {
        let (hidden, heads) = (config.hidden_size as usize, config.heads as usize);
        let (context, vocabulary) = (config.context_length as usize, config.vocabulary_size as usize);
        let sizes = [
            ("batch size", batch),
            ("layers", config.layers as usize),
            ("hidden size", hidden),
            ("heads", heads),
            ("context length", context),
            ("vocabulary size", vocabulary),
        ];
        if let Some((name, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(ModelError::Zero(name));
        }
        if hidden % heads != 0 {
            return Err(ModelError::Heads { hidden, heads });
        }
        if vocabulary > 1 << 16 {
            return Err(ModelError::Vocabulary(vocabulary));
        }
        let shape = AttentionShape { batch, context, heads, head_size: hidden / heads };
        let plan = Plan::new(&shape, config.layers as usize, vocabulary, pool.threads())?;
        let (layout, parameters) = lay_out(config);
        let rows = batch * context;
        let cpu = Cpu { pool, isa };
        Ok(Gpt {
            shape,
            vocabulary,
            layout,
            parameters,
            arena: AlignedBuffer::try_zeroed(plan.len).map_err(|_| ModelError::Memory(plan.len >> 18))?,
            plan,
            gemm: Gemm::new(cpu.clone()),
            cpu,
            inputs: vec![0; rows],
            targets: vec![0; rows],
        })
    }

    fn rows(&self) -> usize {
        self.shape.batch * self.shape.context
    }

    /// `y` = x W^T + bias, and `residual` if there is one.
    fn linear(&mut self, weights: &[f32], pair: usize, x: Place, residual: Option<Place>, y: Place) {
        let rows = self.shape.batch * self.shape.context;
        let weight = matrix(&self.layout, pair, weights);
        let bias = self.layout.of(pair + 1, weights);
        let inputs = self.layout.parameters[pair].shape[1];
        match residual {
            None => {
                let [x, y] = at(&mut self.arena, [x, y]);
                self.gemm.multiply(Matrix::new(x, rows, inputs), weight.t(), y, Epilogue::Bias(bias));
            }
            Some(residual) => {
                let [x, r, y] = at(&mut self.arena, [x, residual, y]);
                self.gemm.multiply(Matrix::new(x, rows, inputs), weight.t(), y, Epilogue::BiasAndMatrix(bias, r));
            }
        }
    }

    fn norm(&mut self, weights: &[f32], pair: usize, x: Place, y: Place, saved: Place) {
        let (gamma, beta) = (self.layout.of(pair, weights), self.layout.of(pair + 1, weights));
        let [x, y, saved] = at(&mut self.arena, [x, y, saved]);
        ops::layer_norm(&self.cpu, x, gamma, beta, y, saved);
    }

    fn block_forward(&mut self, weights: &[f32], parameters: BlockParameters, places: BlockPlaces) {
        let b = places;
        self.norm(weights, parameters.norm1, b.input, b.norm1, b.norm1_saved);
        self.linear(weights, parameters.qkv, b.norm1, None, b.qkv);
        let places = [b.qkv, b.attention, b.attention_saved, self.plan.scratch];
        let [qkv, out, saved, scratch] = at(&mut self.arena, places);
        attention(&self.cpu, &self.shape, qkv, out, saved, scratch);
        self.linear(weights, parameters.project, b.attention, Some(b.input), b.middle);
        self.norm(weights, parameters.norm2, b.middle, b.norm2, b.norm2_saved);
        self.linear(weights, parameters.expand, b.norm2, None, b.wide);
        let [wide, active] = at(&mut self.arena, [b.wide, b.active]);
        ops::gelu(&self.cpu, wide, active);
        self.linear(weights, parameters.contract, b.active, Some(b.middle), b.output);
    }

    /// Gradient of a weight from the gradient `dy` of its output and its input `x`.
    fn weight_gradient(&mut self, weight: usize, dy: Place, x: Place, sink: &mut dyn GradientSink) {
        let rows = self.shape.batch * self.shape.context;
        let shape = &self.layout.parameters[weight].shape;
        let [dy, x] = at(&mut self.arena, [dy, x]);
        let epilogue = if sink.accumulate() { Epilogue::Accumulate } else { Epilogue::Overwrite };
        let (dy, x) = (Matrix::new(dy, rows, shape[0]), Matrix::new(x, rows, shape[1]));
        self.gemm.multiply(dy.t(), x, sink.gradient(weight), epilogue);
    }

    /// Gradient `dx` of a linear layer's input from the gradient `dy` of its output.
    fn input_gradient(&mut self, weights: &[f32], weight: usize, dy: Place, dx: Place) {
        let rows = self.shape.batch * self.shape.context;
        let outputs = self.layout.parameters[weight].shape[0];
        let [dy, dx] = at(&mut self.arena, [dy, dx]);
        let weight = matrix(&self.layout, weight, weights);
        self.gemm.multiply(Matrix::new(dy, rows, outputs), weight, dx, Epilogue::Overwrite);
    }

    /// Gradients of weight and bias of a linear layer; both are finished.
    fn linear_gradients(&mut self, pair: usize, dy: Place, x: Place, sink: &mut dyn GradientSink) {
        self.weight_gradient(pair, dy, x, sink);
        sink.finished(pair);
        let [dy, partials] = at(&mut self.arena, [dy, self.plan.partials]);
        let accumulate = sink.accumulate();
        ops::column_sums(&self.cpu, dy, partials, sink.gradient(pair + 1), accumulate);
        sink.finished(pair + 1);
    }

    /// Backward of a layer norm from `d_narrow` to `d_stream`; both parameters are finished.
    fn norm_backward(
        &mut self,
        weights: &[f32],
        pair: usize,
        (x, saved): (Place, Place),
        add: bool,
        sink: &mut dyn GradientSink,
    ) {
        let gamma = self.layout.of(pair, weights);
        let places = [self.plan.d_narrow, x, saved, self.plan.d_stream, self.plan.partials];
        let [dy, x, saved, dx, partials] = at(&mut self.arena, places);
        let accumulate = sink.accumulate();
        let gradients = sink.gradients2(pair, pair + 1);
        ops::layer_norm_backward(&self.cpu, dy, x, gamma, saved, dx, add, partials, gradients, accumulate);
        sink.finished(pair);
        sink.finished(pair + 1);
    }

    fn block_backward(
        &mut self,
        weights: &[f32],
        parameters: BlockParameters,
        b: BlockPlaces,
        sink: &mut dyn GradientSink,
    ) {
        let Plan { d_stream, d_narrow, d_wide, d_qkv, partials, scratch, .. } = self.plan;
        self.linear_gradients(parameters.contract, d_stream, b.active, sink);
        self.input_gradient(weights, parameters.contract, d_stream, d_wide);
        let accumulate = sink.accumulate();
        let [wide, dy, sums] = at(&mut self.arena, [b.wide, d_wide, partials]);
        ops::gelu_backward(&self.cpu, wide, dy, sums, sink.gradient(parameters.expand + 1), accumulate);
        self.weight_gradient(parameters.expand, d_wide, b.norm2, sink);
        sink.finished(parameters.expand);
        sink.finished(parameters.expand + 1);
        self.input_gradient(weights, parameters.expand, d_wide, d_narrow);
        self.norm_backward(weights, parameters.norm2, (b.middle, b.norm2_saved), true, sink);

        self.linear_gradients(parameters.project, d_stream, b.attention, sink);
        self.input_gradient(weights, parameters.project, d_stream, d_narrow);
        let places = [b.qkv, b.attention, b.attention_saved, d_narrow, d_qkv, scratch];
        let [qkv, out, saved, d_out, d_qkv_data, scratch] = at(&mut self.arena, places);
        let forward = AttentionForward { qkv, out, saved };
        attention_backward(&self.cpu, &self.shape, forward, d_out, d_qkv_data, scratch);
        self.linear_gradients(parameters.qkv, d_qkv, b.norm1, sink);
        self.input_gradient(weights, parameters.qkv, d_qkv, d_narrow);
        self.norm_backward(weights, parameters.norm1, (b.input, b.norm1_saved), true, sink);
    }

    /// Ordinal of the weights of the output layer.
    fn head(&self) -> usize {
        self.parameters.head.unwrap_or(self.parameters.tokens)
    }
}

/// A linear layer's weights.
fn matrix<'a>(layout: &Layout, ordinal: usize, weights: &'a [f32]) -> Matrix<'a> {
    let shape = &layout.parameters[ordinal].shape;
    Matrix::new(layout.of(ordinal, weights), shape[0], shape[1])
}

impl Model for Gpt {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn initialise(&self, seed: u64, weights: &mut [f32]) {
        initialise::initialise(&self.layout, seed, weights);
    }

    fn forward(&mut self, weights: &[f32], inputs: &[u16], targets: &[u16]) -> f64 {
        let (rows, hidden) = (self.rows(), self.shape.hidden());
        assert_eq!(weights.len(), self.layout.len, "length of the weights");
        assert_eq!((inputs.len(), targets.len()), (rows, rows), "tokens of a micro-batch");
        for &token in inputs.iter().chain(targets) {
            assert!(usize::from(token) < self.vocabulary, "token {token} in a vocabulary of {}", self.vocabulary);
        }
        self.inputs.copy_from_slice(inputs);
        self.targets.copy_from_slice(targets);
        let tokens = self.layout.of(self.parameters.tokens, weights);
        let positions = self.layout.of(self.parameters.positions, weights);
        let [x] = at(&mut self.arena, [self.plan.embedded]);
        ops::embed(&self.cpu, inputs, tokens, positions, hidden, x);
        for layer in 0..self.plan.blocks.len() {
            self.block_forward(weights, self.parameters.blocks[layer], self.plan.blocks[layer]);
        }
        let Plan { norm, norm_saved, logits, inverses, losses, .. } = self.plan;
        self.norm(weights, self.parameters.norm, self.plan.last(), norm, norm_saved);
        let head = matrix(&self.layout, self.head(), weights);
        let [norm, logits, inverses, losses] = at(&mut self.arena, [norm, logits, inverses, losses]);
        self.gemm.multiply(Matrix::new(norm, rows, hidden), head.t(), logits, Epilogue::Overwrite);
        ops::cross_entropy(&self.cpu, logits, targets, inverses, losses);
        losses.iter().map(|&loss| f64::from(loss)).sum::<f64>() / rows as f64
    }

    fn backward(&mut self, weights: &[f32], scale: f32, sink: &mut dyn GradientSink) {
        let (rows, hidden) = (self.rows(), self.shape.hidden());
        assert_eq!(weights.len(), self.layout.len, "length of the weights");
        let Plan { norm, norm_saved, logits, inverses, d_stream, d_narrow, .. } = self.plan;
        let [d_logits, inverses] = at(&mut self.arena, [logits, inverses]);
        let each = (f64::from(scale) / rows as f64) as f32;
        ops::cross_entropy_backward(&self.cpu, d_logits, &self.targets, inverses, each);
        let head = self.head();
        self.weight_gradient(head, logits, norm, sink);
        if self.parameters.head.is_some() {
            sink.finished(head);
        }
        self.input_gradient(weights, head, logits, d_narrow);
        self.norm_backward(weights, self.parameters.norm, (self.plan.last(), norm_saved), false, sink);
        for layer in (0..self.plan.blocks.len()).rev() {
            self.block_backward(weights, self.parameters.blocks[layer], self.plan.blocks[layer], sink);
        }
        let Parameters { positions, tokens, .. } = self.parameters;
        let [dx] = at(&mut self.arena, [d_stream]);
        let accumulate = sink.accumulate();
        ops::position_backward(&self.cpu, dx, hidden, sink.gradient(positions), accumulate);
        sink.finished(positions);
        let d_tokens = sink.gradient(tokens);
        // A tied head has already written its part.
        if self.parameters.head.is_some() && !accumulate {
            d_tokens.fill(0.0);
        }
        ops::embed_backward(&self.cpu, &self.inputs, dx, hidden, d_tokens);
        sink.finished(tokens);
    }

    fn evaluate(&mut self, weights: &[f32], inputs: &[u16], targets: &[u16]) -> f64 {
        self.forward(weights, inputs, targets)
    }

    fn memory_bytes(&self) -> usize {
        4 * self.arena.len() + self.gemm.memory_bytes() + 2 * (self.inputs.len() + self.targets.len())
    }

    fn tokens_per_batch(&self) -> usize {
        self.rows()
    }
}
