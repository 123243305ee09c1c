//! Flash attention in f32, forward and backward: the score matrix is never materialised. cuDNN
//! computes 16-bit attention where it can: see [`crate::attention`].

use super::{Argument, Call, Element, Memory, Program, Source, sizes};
use crate::error::Error;

pub(super) static SOURCE: Source =
    Source { name: "attention.cu", text: include_str!("attention.cu"), arithmetic: "--use_fast_math" };
const THREADS: u32 = 128;
/// Queries, or keys, per tile.
const TILE: u32 = 32;
const MAX_WIDTH: u32 = 128;

/// Heads of equal size over sequences of equal length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    pub element: Element,
    /// Number of sequences.
    pub batch: u32,
    /// Tokens per sequence.
    pub context: u32,
    pub heads: u32,
    /// Elements per head: a multiple of 16 bytes, at most 128.
    pub head_size: u32,
    /// Whether a token attends only to itself and earlier tokens.
    pub causal: bool,
}

/// Self-attention of a shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attention(Shape);

/// Memory of backward.
#[derive(Debug, Clone, Copy)]
pub struct Backward<M> {
    pub qkv: M,
    /// The output of forward.
    pub out: M,
    pub saved: M,
    pub d_out: M,
    /// [`Attention::saved_bytes`].
    pub means: M,
    pub d_qkv: M,
}

impl Attention {
    /// # Errors
    /// The kernels do not support the sizes.
    pub fn new(shape: Shape) -> Result<Attention, Error> {
        let Shape { element, batch, context, heads, head_size, .. } = shape;
        let vector = 16 / element.bytes() as u32;
        let numbers = [batch, context, heads, 3 * MAX_WIDTH].iter().try_fold(1u32, |all, size| all.checked_mul(*size));
        let is_whole = head_size.is_multiple_of(vector) && (vector..=MAX_WIDTH).contains(&head_size);
        if !is_whole || numbers.is_none_or(|numbers| numbers == 0) {
            let text = format!(
                "{batch} x {context} tokens, {heads} heads of {head_size}, expected heads of a multiple of {vector}, at most {MAX_WIDTH}, and \
                 fewer than 2^32 numbers"
            );
            return Err(Error::refused("attention", text));
        }
        Ok(Attention(shape))
    }

    pub fn program(&self) -> Program {
        let Shape { element, head_size, .. } = self.0;
        Program {
            source: &SOURCE,
            definitions: vec![format!("-DELEMENT={}", element.name()), format!("-DHEAD={head_size}")],
        }
    }

    /// Bytes of the saved tensor: one `f32` per query and head.
    pub fn saved_bytes(&self) -> usize {
        4 * self.rows() * self.0.heads as usize
    }

    /// Tokens of all sequences.
    fn rows(&self) -> usize {
        self.0.batch as usize * self.0.context as usize
    }

    fn out_bytes(&self) -> usize {
        self.rows() * self.0.heads as usize * self.0.head_size as usize * self.0.element.bytes()
    }

    /// Shared memory of `tiles` f32 tiles, and of the weights of `weights` pairs of tiles.
    fn shared_bytes(&self, (tiles, weights): (u32, u32)) -> u32 {
        // An odd number of vectors per row.
        let pitch = 16 * ((self.0.head_size / 4) | 1);
        TILE * (tiles * pitch + 4 * weights * TILE)
    }

    /// `shared_bytes`: maximum shared memory per block. `tiles`: [`Attention::shared_bytes`].
    fn call<M>(
        &self,
        kernel: &'static str,
        (max_blocks, shared_bytes): (u32, u32),
        tiles: (u32, u32),
        mut arguments: Vec<Argument<M>>,
    ) -> Result<Call<M>, Error> {
        let needed = self.shared_bytes(tiles);
        if needed > shared_bytes {
            let text = format!("{shared_bytes} bytes of shared memory, expected at least {needed}");
            return Err(Error::refused(kernel, text));
        }
        let count = self.0.batch * self.0.heads;
        // Scores become base-2 exponents.
        let scale = std::f64::consts::LOG2_E / f64::from(self.0.head_size).sqrt();
        let sizes = [count, self.0.heads, self.0.context, self.0.causal.into()];
        arguments.extend(sizes.map(Argument::Int));
        arguments.push(Argument::Float(scale as f32));
        let blocks = (count * self.0.context.div_ceil(TILE)).min(max_blocks).max(1);
        Ok(Call { program: self.program(), kernel, blocks, threads: THREADS, shared_bytes: needed, arguments })
    }

    /// `out` (rows of all heads) = attention of `qkv` (rows of the queries of all heads, their
    /// keys, their values). `saved` receives what backward needs, [`Attention::saved_bytes`]. Runs
    /// on at most `max_blocks` blocks with `shared_bytes` each.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn forward<M: Memory>(
        &self,
        max_blocks: u32,
        shared_bytes: u32,
        qkv: M,
        out: M,
        saved: M,
    ) -> Result<Call<M>, Error> {
        let all = self.out_bytes();
        sizes("attention", &[("qkv", qkv, 3 * all), ("out", out, all), ("saved", saved, self.saved_bytes())])?;
        let arguments = vec![Argument::Reads(qkv), Argument::Writes(out), Argument::Writes(saved)];
        self.call("attention", (max_blocks, shared_bytes), (3, 1), arguments)
    }

    /// Computes the gradient of `qkv` in two calls on at most `max_blocks` blocks with
    /// `shared_bytes` each. The result does not depend on the number of blocks.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn backward<M: Memory>(
        &self,
        max_blocks: u32,
        shared_bytes: u32,
        on: Backward<M>,
    ) -> Result<[Call<M>; 2], Error> {
        let Backward { qkv, out, saved, d_out, means, d_qkv } = on;
        let (all, each) = (self.out_bytes(), self.saved_bytes());
        let memory = [
            ("qkv", qkv, 3 * all),
            ("out", out, all),
            ("saved", saved, each),
            ("d_out", d_out, all),
            ("means", means, each),
            ("d_qkv", d_qkv, 3 * all),
        ];
        sizes("attention_queries", &memory)?;
        let queries = vec![
            Argument::Reads(qkv),
            Argument::Reads(out),
            Argument::Reads(d_out),
            Argument::Reads(saved),
            Argument::Writes(means),
            Argument::Writes(d_qkv),
        ];
        let keys = vec![
            Argument::Reads(qkv),
            Argument::Reads(d_out),
            Argument::Reads(saved),
            Argument::Reads(means),
            Argument::Writes(d_qkv),
        ];
        Ok([
            self.call("attention_queries", (max_blocks, shared_bytes), (4, 1), queries)?,
            self.call("attention_keys", (max_blocks, shared_bytes), (4, 2), keys)?,
        ])
    }
}
