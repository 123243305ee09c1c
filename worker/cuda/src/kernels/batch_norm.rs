//! Batch norm, with an optional residual addition and ReLU, forward and backward.

use super::{Argument, COLUMN_THREADS, Call, JOINED_COLUMNS, Memory, Program, Rows, Source, sizes};
use crate::error::Error;

// Without fast math, which flushes denormals.
pub(super) static SOURCE: Source =
    Source { name: "batch_norm.cu", text: include_str!("batch_norm.cu"), arithmetic: "--fmad=true" };

/// Batch norm of `count` rows of channels: the pixels of all images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchNorm {
    rows: Rows,
    count: u32,
}

/// Memory of forward.
#[derive(Debug, Clone, Copy)]
pub struct Forward<M> {
    pub x: M,
    /// Added after the norm.
    pub residual: Option<M>,
    pub gamma: M,
    pub beta: M,
    /// Mean and 1 / standard deviation per channel, [`BatchNorm::saved_bytes`].
    pub saved: M,
    pub y: M,
}

/// Memory of backward.
#[derive(Debug, Clone, Copy)]
pub struct Backward<M> {
    pub x: M,
    /// The output, if there was a ReLU.
    pub y: Option<M>,
    /// Gradient of the output. With `y` it becomes the gradient before ReLU, which is also the
    /// gradient of the residual.
    pub dy: M,
    pub gamma: M,
    pub saved: M,
    /// Partial sums per block, [`BatchNorm::partial_bytes`].
    pub partial: M,
    /// [`BatchNorm::factors_bytes`].
    pub factors: M,
    pub d_gamma: M,
    pub d_beta: M,
    pub dx: M,
}

impl BatchNorm {
    /// # Errors
    /// The kernels do not support the width or pitch, or there are too few rows for a variance.
    pub fn new(rows: Rows, count: u32) -> Result<BatchNorm, Error> {
        rows.check("batch_norm")?;
        if !(2..1 << 31).contains(&count) {
            return Err(Error::refused(
                "batch_norm",
                format!("{count} rows, expected at least two and fewer than 2^31"),
            ));
        }
        Ok(BatchNorm { rows, count })
    }

    pub fn program(&self) -> Program {
        self.rows.program(&SOURCE)
    }

    /// Bytes of `kinds` values per channel.
    fn channel_bytes(&self, kinds: usize) -> usize {
        4 * kinds * (self.rows.width as usize).next_multiple_of(4)
    }

    pub fn saved_bytes(&self) -> usize {
        self.channel_bytes(2)
    }

    /// Bytes that [`BatchNorm::backward`] passes from the parameter gradients to the input
    /// gradient.
    pub fn factors_bytes(&self) -> usize {
        self.channel_bytes(3)
    }

    /// Bytes of all blocks' partial sums, forward and backward, on at most `max_blocks` blocks.
    pub fn partial_bytes(&self, max_blocks: u32) -> usize {
        self.channel_bytes(2 * self.rows.columns(self.count, max_blocks).1 as usize)
    }

    /// Bytes of each channel's mean and unbiased variance, contiguous.
    fn statistics_bytes(&self) -> usize {
        8 * self.rows.width as usize
    }

    /// A kernel whose threads keep to their columns.
    fn over_rows<M>(&self, kernel: &'static str, max_blocks: u32, arguments: Vec<Argument<M>>) -> Call<M> {
        let (tiles, parts) = self.rows.columns(self.count, max_blocks);
        self.call(kernel, tiles * parts, arguments)
    }

    fn call<M>(&self, kernel: &'static str, blocks: u32, arguments: Vec<Argument<M>>) -> Call<M> {
        Call { program: self.program(), kernel, blocks, threads: COLUMN_THREADS, shared_bytes: 0, arguments }
    }

    /// Computes from `x`: `saved`, and `statistics`, the mean and the unbiased variance of each
    /// channel. Runs on at most `max_blocks` blocks, but at least one per 512 bytes of a row.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn statistics<M: Memory>(
        &self,
        max_blocks: u32,
        x: M,
        partial: M,
        saved: M,
        statistics: M,
    ) -> Result<[Call<M>; 2], Error> {
        let memory = [
            ("x", x, self.rows.bytes(self.count)),
            ("partial", partial, self.partial_bytes(max_blocks)),
            ("saved", saved, self.saved_bytes()),
            ("statistics", statistics, self.statistics_bytes()),
        ];
        sizes("batch_norm_statistics", &memory)?;
        let count = Argument::Int(self.count);
        let moments = vec![Argument::Reads(x), Argument::Writes(partial), count];
        let joined = vec![
            Argument::Reads(partial),
            Argument::Writes(saved),
            Argument::Writes(statistics),
            Argument::Int(self.rows.columns(self.count, max_blocks).1),
            count,
        ];
        Ok([
            self.over_rows("batch_norm_moments", max_blocks, moments),
            self.call("batch_norm_statistics", self.rows.width.div_ceil(JOINED_COLUMNS), joined),
        ])
    }

    /// Computes `saved` from the running `statistics`, for evaluation.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn running<M: Memory>(&self, statistics: M, saved: M) -> Result<Call<M>, Error> {
        let memory = [("statistics", statistics, self.statistics_bytes()), ("saved", saved, self.saved_bytes())];
        sizes("batch_norm_running", &memory)?;
        let arguments = vec![Argument::Reads(statistics), Argument::Writes(saved)];
        Ok(self.call("batch_norm_running", self.rows.width.div_ceil(COLUMN_THREADS), arguments))
    }

    /// `y` from `x` and the saved statistics; `relu`: whether to apply ReLU. Blocks as in
    /// [`BatchNorm::statistics`].
    ///
    /// # Errors
    /// The memory is too small.
    pub fn forward<M: Memory>(&self, max_blocks: u32, on: Forward<M>, relu: bool) -> Result<Call<M>, Error> {
        let Forward { x, residual, gamma, beta, saved, y } = on;
        let (all, parameter) = (self.rows.bytes(self.count), 4 * self.rows.width as usize);
        let mut memory = vec![
            ("x", x, all),
            ("gamma", gamma, parameter),
            ("beta", beta, parameter),
            ("saved", saved, self.saved_bytes()),
            ("y", y, all),
        ];
        memory.extend(residual.map(|residual| ("residual", residual, all)));
        sizes("batch_norm_forward", &memory)?;
        let arguments = vec![
            Argument::Reads(x),
            residual.map_or(Argument::Absent, Argument::Reads),
            Argument::Reads(gamma),
            Argument::Reads(beta),
            Argument::Reads(saved),
            Argument::Writes(y),
            Argument::Int(self.count),
            Argument::Int(relu.into()),
        ];
        Ok(self.over_rows("batch_norm_forward", max_blocks, arguments))
    }

    /// Computes all gradients; `adds` and `adds_input`: whether to add to the parameter gradients
    /// and to `dx`. Blocks as in [`BatchNorm::statistics`].
    ///
    /// # Errors
    /// The memory is too small.
    pub fn backward<M: Memory>(
        &self,
        max_blocks: u32,
        on: Backward<M>,
        adds: bool,
        adds_input: bool,
    ) -> Result<[Call<M>; 3], Error> {
        let Backward { x, y, dy, gamma, saved, partial, factors, d_gamma, d_beta, dx } = on;
        let (all, parameter) = (self.rows.bytes(self.count), 4 * self.rows.width as usize);
        let mut memory = vec![
            ("x", x, all),
            ("dy", dy, all),
            ("dx", dx, all),
            ("gamma", gamma, parameter),
            ("d_gamma", d_gamma, parameter),
            ("d_beta", d_beta, parameter),
            ("saved", saved, self.saved_bytes()),
            ("partial", partial, self.partial_bytes(max_blocks)),
            ("factors", factors, self.factors_bytes()),
        ];
        memory.extend(y.map(|y| ("y", y, all)));
        sizes("batch_norm_backward", &memory)?;
        let (reads, count) = (Argument::Reads, Argument::Int(self.count));
        let gradient = |memory, adds| if adds { Argument::Updates(memory) } else { Argument::Writes(memory) };
        let masked = if y.is_some() { Argument::Updates(dy) } else { Argument::Reads(dy) };
        let sums =
            vec![reads(x), y.map_or(Argument::Absent, reads), masked, reads(saved), Argument::Writes(partial), count];
        let parameters = vec![
            reads(partial),
            reads(gamma),
            reads(saved),
            Argument::Writes(factors),
            gradient(d_gamma, adds),
            gradient(d_beta, adds),
            Argument::Int(self.rows.columns(self.count, max_blocks).1),
            count,
            Argument::Int(adds.into()),
        ];
        let add = Argument::Int(adds_input.into());
        let input = vec![reads(x), reads(dy), reads(saved), reads(factors), gradient(dx, adds_input), count, add];
        Ok([
            self.over_rows("batch_norm_backward", max_blocks, sums),
            self.call("batch_norm_parameters", self.rows.width.div_ceil(JOINED_COLUMNS), parameters),
            self.over_rows("batch_norm_input", max_blocks, input),
        ])
    }
}
