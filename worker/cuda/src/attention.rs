//! Self-attention as cuDNN graphs: graphs of many operations that cuDNN fuses into one kernel per
//! direction.
//!
//! Queries, keys and values are parts of the same rows, as in [`crate::kernels::attention`]. The
//! saved tensor is the same, too: the softmax log-sum-exp of the scaled scores, per query and head.
//! The two implementations are therefore interchangeable between forward and backward.
//!
//! ```text
//! forward    scores = scale Q K^T, masked    out = softmax(scores) V    saved = log(sum(e^scores))
//! backward   P = e^(scores - saved)           dV = P^T dO
//!            dS = scale P (dO V^T - sum(dO out))    dK = dS^T Q    dQ = dS K
//! ```

use crate::cudnn::{BFLOAT16, BOOLEAN, Cudnn, FLOAT, HALF, INT32, Place, TensorLayout};
use crate::driver::Span;
use crate::error::Error;
use crate::graph::{Builder, Graph, Pointwise, Reduction};
use crate::kernels::Element;
use crate::kernels::attention::Shape;
use crate::library::Pointer;

/// Attention of a [`Shape`], 16-bit only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attention {
    pub shape: Shape,
    /// Whether to compute the gradient of queries, keys and values instead of the output.
    pub backward: bool,
}

/// Indices of the memories with three tensors in each row: queries, keys and values, or their
/// gradients.
const QKV: usize = 0;
const D_QKV: usize = 4;

/// Tensor ids in a graph.
mod id {
    pub(super) const QUERIES: i64 = 1;
    pub(super) const KEYS: i64 = 2;
    pub(super) const VALUES: i64 = 3;
    pub(super) const OUT: i64 = 4;
    pub(super) const SAVED: i64 = 5;
    pub(super) const D_OUT: i64 = 6;
    pub(super) const D_QUERIES: i64 = 7;
    pub(super) const D_KEYS: i64 = 8;
    pub(super) const D_VALUES: i64 = 9;
    pub(super) const MEANS: i64 = 10;
    pub(super) const SCALE: i64 = 20;
    pub(super) const MASKED: i64 = 21;
    pub(super) const ONE: i64 = 22;
    /// First id of the virtual tensors between operations.
    pub(super) const BETWEEN: i64 = 100;
}

/// Smallest workspace of an attention.
const ALIGNMENT_BYTES: usize = 256;

/// Tensor axes.
const QUERY: usize = 2;
const KEY: usize = 3;

/// The transposed view of the same memory.
fn transposed(tensor: TensorLayout) -> TensorLayout {
    let TensorLayout { mut dimensions, mut strides, .. } = tensor;
    dimensions.swap(2, 3);
    strides.swap(2, 3);
    TensorLayout { dimensions, strides, ..tensor }
}

/// Contiguous.
fn packed(id: i64, data_type: i32, dimensions: [i64; 4], place: Place) -> TensorLayout {
    let [_, b, c, d] = dimensions;
    TensorLayout { id, data_type, dimensions, strides: [b * c * d, c * d, d, 1], place }
}

impl Attention {
    fn sizes(&self) -> [i64; 4] {
        let Shape { batch, heads, context, head_size, .. } = self.shape;
        [batch, heads, context, head_size].map(i64::from)
    }

    fn data_type(&self) -> i32 {
        match self.shape.element {
            Element::F32 => FLOAT,
            Element::F16 => HALF,
            Element::Bf16 => BFLOAT16,
        }
    }

    /// Rows of all heads, with `parts` heads' rows interleaved.
    fn rows(&self, id: i64, parts: i64) -> TensorLayout {
        let [_, heads, context, size] = self.sizes();
        let pitch = parts * heads * size;
        let strides = [context * pitch, size, pitch, 1];
        TensorLayout { id, data_type: self.data_type(), dimensions: self.sizes(), strides, place: Place::Device }
    }

    /// One f32 per query and head.
    fn each(&self, id: i64, place: Place) -> TensorLayout {
        let [batch, heads, context, _] = self.sizes();
        packed(id, FLOAT, [batch, heads, context, 1], place)
    }

    /// Scratch bytes of a backward pass: one f32 per query and head.
    pub fn scratch_bytes(&self) -> usize {
        self.each(id::MEANS, Place::Device).bytes()
    }

    /// Workspace bytes that cuDNN 9.19 requests on an H100 and an H200. Its backward pass stores
    /// the 16-bit score gradients, in tiles of 64 queries and 128 keys.
    pub fn workspace_bytes(&self) -> usize {
        let Shape { batch, heads, context, .. } = self.shape;
        let [heads, context] = [batch as usize * heads as usize, context as usize];
        let scores = heads * context.next_multiple_of(64) * context.next_multiple_of(128);
        ALIGNMENT_BYTES + if self.backward { 2 * scores } else { 0 }
    }

    fn numbers(&self) -> Vec<TensorLayout> {
        let scale = 1.0 / f64::from(self.shape.head_size).sqrt();
        let one = |id, number| packed(id, FLOAT, [1; 4], Place::Host(number));
        let mut numbers = vec![one(id::SCALE, scale as f32)];
        numbers.extend(self.shape.causal.then(|| one(id::MASKED, f32::NEG_INFINITY)));
        numbers.extend(self.backward.then(|| one(id::ONE, 1.0)));
        numbers
    }

    /// The tensors outside the graph, in the order of [`Attention::spans`].
    ///
    /// # Errors
    /// The element type is f32.
    pub(crate) fn tensors(&self) -> Result<Vec<TensorLayout>, Error> {
        if self.shape.element == Element::F32 {
            return Err(Error::refused("attention", "numbers in 32 bits, expected 16"));
        }
        let [queries, keys, values] = [id::QUERIES, id::KEYS, id::VALUES].map(|id| self.rows(id, 3));
        let mut tensors = vec![queries, transposed(keys)];
        if self.backward {
            tensors.push(transposed(values));
            tensors.extend([self.rows(id::OUT, 1), self.each(id::SAVED, Place::Device), self.rows(id::D_OUT, 1)]);
            tensors.extend([id::D_QUERIES, id::D_KEYS, id::D_VALUES].map(|id| self.rows(id, 3)));
            tensors.push(self.each(id::MEANS, Place::Device));
        } else {
            tensors.extend([values, self.rows(id::OUT, 1), self.each(id::SAVED, Place::Device)]);
        }
        tensors.extend(self.numbers());
        Ok(tensors)
    }

    /// The query, key and value spans within the rows.
    fn parts(&self, rows: Span) -> Result<[Span; 3], Error> {
        let bytes = self.shape.heads as usize * self.shape.head_size as usize * self.shape.element.bytes();
        let of = |part: usize| {
            let end = crate::kernels::Memory::bytes(&rows);
            rows.part(part * bytes..end).ok_or_else(|| {
                Error::refused("attention", format!("{end} bytes of rows, expected at least {}", 3 * bytes))
            })
        };
        Ok([of(0)?, of(1)?, of(2)?])
    }

    /// The spans of [`Attention::tensors`] on the device, from the memory of
    /// [`Operation::arguments`](crate::operation::Operation::arguments).
    ///
    /// # Errors
    /// Rows of queries, keys and values, or of their gradients, are too short.
    pub(crate) fn spans(&self, memory: &[Span]) -> Result<Vec<Span>, Error> {
        let mut spans = Vec::new();
        for (index, span) in memory.iter().enumerate() {
            match index {
                QKV | D_QKV => spans.extend(self.parts(*span)?),
                _ => spans.push(*span),
            }
        }
        Ok(spans)
    }

    pub(crate) fn graph(&self, cudnn: &Cudnn) -> Result<Graph, Error> {
        let mut flow = Flow { attention: self, builder: Builder::new(cudnn), next: id::BETWEEN, known: Vec::new() };
        for tensor in self.tensors()? {
            let descriptor = flow.builder.tensor(&tensor)?;
            flow.known.push((tensor.id, descriptor));
        }
        if self.backward {
            flow.backward()?
        } else {
            flow.forward()?
        }
        flow.builder.graph()
    }
}

/// A graph under construction.
struct Flow<'a> {
    attention: &'a Attention,
    builder: Builder<'a>,
    next: i64,
    /// Descriptors of the tensors outside the graph.
    known: Vec<(i64, Pointer)>,
}

impl Flow<'_> {
    fn known(&self, id: i64) -> Pointer {
        let found = self.known.iter().find(|(known, _)| *known == id);
        found.expect("invariant: a graph names tensors of its direction").1
    }

    fn between(&mut self, data_type: i32, dimensions: [i64; 4]) -> Result<Pointer, Error> {
        self.next += 1;
        self.builder.tensor(&packed(self.next, data_type, dimensions, Place::Between))
    }

    /// A query x key matrix per head, in f32.
    fn scores_like(&mut self, data_type: i32) -> Result<Pointer, Error> {
        let [batch, heads, context, _] = self.attention.sizes();
        self.between(data_type, [batch, heads, context, context])
    }

    fn each_like(&mut self) -> Result<Pointer, Error> {
        let [batch, heads, context, _] = self.attention.sizes();
        self.between(FLOAT, [batch, heads, context, 1])
    }

    fn on_scores(&mut self, mode: Pointwise, of: &[Pointer]) -> Result<Pointer, Error> {
        let y = self.scores_like(FLOAT)?;
        self.builder.pointwise(mode, of, y)?;
        Ok(y)
    }

    /// Scaled query-key products.
    fn scores(&mut self) -> Result<Pointer, Error> {
        let products = self.scores_like(FLOAT)?;
        self.builder.multiply(self.known(id::QUERIES), self.known(id::KEYS), products)?;
        let scale = self.known(id::SCALE);
        self.on_scores(Pointwise::Multiply, &[products, scale])
    }

    /// Minus infinity for keys after their query.
    fn masked(&mut self, scores: Pointer) -> Result<Pointer, Error> {
        if !self.attention.shape.causal {
            return Ok(scores);
        }
        let [query, key] = [self.scores_like(INT32)?, self.scores_like(INT32)?];
        self.builder.index(QUERY as i64, scores, query)?;
        self.builder.index(KEY as i64, scores, key)?;
        let sees = self.scores_like(BOOLEAN)?;
        self.builder.pointwise(Pointwise::GreaterOrEqual, &[query, key], sees)?;
        let never = self.known(id::MASKED);
        self.on_scores(Pointwise::Select, &[scores, never, sees])
    }

    fn forward(&mut self) -> Result<(), Error> {
        let scores = self.scores()?;
        let scores = self.masked(scores)?;
        let [largest, total, logarithm] = [self.each_like()?, self.each_like()?, self.each_like()?];
        self.builder.reduce(Reduction::Max, scores, largest)?;
        let shifted = self.on_scores(Pointwise::Subtract, &[scores, largest])?;
        let powers = self.on_scores(Pointwise::Exponential, &[shifted])?;
        self.builder.reduce(Reduction::Add, powers, total)?;
        self.builder.pointwise(Pointwise::Logarithm, &[total], logarithm)?;
        self.builder.pointwise(Pointwise::Add, &[logarithm, largest], self.known(id::SAVED))?;
        let weights = self.scores_like(self.attention.data_type())?;
        self.builder.pointwise(Pointwise::Divide, &[powers, total], weights)?;
        self.builder.multiply(weights, self.known(id::VALUES), self.known(id::OUT))
    }

    fn backward(&mut self) -> Result<(), Error> {
        let [batch, heads, context, size] = self.attention.sizes();
        let data_type = self.attention.data_type();
        // sum(dO out) per query.
        let terms = self.between(FLOAT, [batch, heads, context, size])?;
        self.builder.pointwise(Pointwise::Multiply, &[self.known(id::D_OUT), self.known(id::OUT)], terms)?;
        let sums = self.each_like()?;
        self.builder.reduce(Reduction::Add, terms, sums)?;
        let means = self.known(id::MEANS);
        self.builder.pointwise(Pointwise::Multiply, &[sums, self.known(id::ONE)], means)?;

        let scores = self.scores()?;
        let saved = self.known(id::SAVED);
        let shifted = self.on_scores(Pointwise::Subtract, &[scores, saved])?;
        let shifted = self.masked(shifted)?;
        let weights = self.on_scores(Pointwise::Exponential, &[shifted])?;
        let for_values = self.transpose_scores(weights, data_type)?;
        self.builder.multiply(for_values, self.known(id::D_OUT), self.known(id::D_VALUES))?;

        let d_weights = self.scores_like(FLOAT)?;
        self.builder.multiply(self.known(id::D_OUT), self.known(id::VALUES), d_weights)?;
        let centred = self.on_scores(Pointwise::Subtract, &[d_weights, means])?;
        let weighted = self.on_scores(Pointwise::Multiply, &[centred, weights])?;
        let scale = self.known(id::SCALE);
        let y = self.scores_like(data_type)?;
        self.builder.pointwise(Pointwise::Multiply, &[weighted, scale], y)?;
        let d_scores = y;

        let for_keys = self.transpose_scores(d_scores, data_type)?;
        self.builder.multiply(for_keys, self.known(id::QUERIES), self.known(id::D_KEYS))?;
        self.next += 1;
        let keys = TensorLayout { place: Place::Between, ..self.attention.rows(self.next, 3) };
        let keys = self.builder.tensor(&keys)?;
        self.builder.reshape(self.known(id::KEYS), keys)?;
        // Without an f32 accumulation in between, cuDNN adds in a fixed order: it keeps the scores'
        // gradient in its workspace, as cudnn-frontend's `set_deterministic_algorithm` requests.
        self.builder.multiply(d_scores, keys, self.known(id::D_QUERIES))
    }

    /// Transposes a query x key matrix.
    fn transpose_scores(&mut self, scores: Pointer, data_type: i32) -> Result<Pointer, Error> {
        let [batch, heads, context, _] = self.attention.sizes();
        self.next += 1;
        let tensor = packed(self.next, data_type, [batch, heads, context, context], Place::Between);
        let y = self.builder.tensor(&transposed(tensor))?;
        self.builder.reshape(scores, y)?;
        Ok(y)
    }
}

#[cfg(test)]
mod tests;
