//! Layer norm, forward and backward.

use super::{Argument, Call, JOINED_COLUMNS, Memory, Program, Rows, Source, sizes};
use crate::error::Error;

pub(super) static SOURCE: Source =
    Source { name: "layer_norm.cu", text: include_str!("layer_norm.cu"), arithmetic: "--use_fast_math" };
const THREADS: u32 = 256;
/// Numbers of a row that a warp holds in registers; wider rows have 2 or 4 warps.
const PER_WARP: u32 = 1024;
const WARPS: u32 = THREADS / 32;
/// Backward keeps 8 bytes for each column in shared memory, of which a kernel can declare 48 KiB.
const WIDEST: u32 = 4 * PER_WARP;

/// Layer norm of one width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerNorm {
    rows: Rows,
    count: u32,
}

/// What backward reads and writes.
#[derive(Debug, Clone, Copy)]
pub struct Backward<M> {
    pub dy: M,
    pub x: M,
    pub gamma: M,
    pub saved: M,
    pub dx: M,
    /// Sums of each block, [`LayerNorm::partial_bytes`].
    pub partial: M,
}

impl LayerNorm {
    /// `count` rows.
    ///
    /// # Errors
    /// A width or pitch that the kernels cannot have.
    pub fn new(rows: Rows, count: u32) -> Result<LayerNorm, Error> {
        rows.check("layer_norm")?;
        if rows.width > WIDEST || count == 0 {
            let text = format!("{count} rows of width {}, expected at least one of at most {WIDEST}", rows.width);
            return Err(Error::refused("layer_norm", text));
        }
        Ok(LayerNorm { rows, count })
    }

    pub fn program(&self) -> Program {
        self.rows.program(&SOURCE)
    }

    fn blocks(&self, most: u32) -> u32 {
        let rows_at_once = WARPS / self.rows.width.div_ceil(PER_WARP).next_power_of_two();
        self.count.div_ceil(rows_at_once).min(most).max(1)
    }

    /// Size of the partial sums of backward on at most `most` blocks.
    pub fn partial_bytes(&self, most: u32) -> usize {
        self.blocks(most) as usize * 2 * self.rows.width as usize * 4
    }

    fn parameter_bytes(&self) -> usize {
        self.rows.width as usize * 4
    }

    fn saved_bytes(&self) -> usize {
        self.count as usize * 8
    }

    /// `y` = normalised rows of `x` times `gamma` plus `beta`; `saved` gets mean and 1 / standard deviation of each row, in `f32` like
    /// the parameters. On at most `most` blocks.
    ///
    /// # Errors
    /// Memory that is too small.
    pub fn forward<M: Memory>(&self, most: u32, x: M, [gamma, beta]: [M; 2], y: M, saved: M) -> Result<Call<M>, Error> {
        let (all, parameter) = (self.rows.bytes(self.count), self.parameter_bytes());
        let memory = [
            ("x", x, all),
            ("gamma", gamma, parameter),
            ("beta", beta, parameter),
            ("y", y, all),
            ("saved", saved, self.saved_bytes()),
        ];
        sizes("layer_norm_forward", &memory)?;
        Ok(Call {
            program: self.program(),
            kernel: "layer_norm_forward",
            blocks: self.blocks(most),
            threads: THREADS,
            shared_bytes: 0,
            arguments: vec![
                Argument::Reads(x),
                Argument::Reads(gamma),
                Argument::Reads(beta),
                Argument::Writes(y),
                Argument::Writes(saved),
                Argument::Int(self.count),
            ],
        })
    }

    /// `dx` and the sums of each block for the gradients of the parameters; `add`: what is in `dx` stays in the sum.
    ///
    /// # Errors
    /// Memory that is too small.
    pub fn backward<M: Memory>(&self, most: u32, on: Backward<M>, add: bool) -> Result<Call<M>, Error> {
        let Backward { dy, x, gamma, saved, dx, partial } = on;
        let all = self.rows.bytes(self.count);
        let memory = [
            ("dy", dy, all),
            ("x", x, all),
            ("gamma", gamma, self.parameter_bytes()),
            ("saved", saved, self.saved_bytes()),
            ("dx", dx, all),
            ("partial", partial, self.partial_bytes(most)),
        ];
        sizes("layer_norm_backward", &memory)?;
        Ok(Call {
            program: self.program(),
            kernel: "layer_norm_backward",
            blocks: self.blocks(most),
            threads: THREADS,
            shared_bytes: 0,
            arguments: vec![
                Argument::Reads(dy),
                Argument::Reads(x),
                Argument::Reads(gamma),
                Argument::Reads(saved),
                if add { Argument::Updates(dx) } else { Argument::Writes(dx) },
                Argument::Writes(partial),
                Argument::Int(self.count),
                Argument::Int(add.into()),
            ],
        })
    }

    /// The gradients of the parameters from the sums that [`LayerNorm::backward`] wrote on at most `most` blocks; `add`: what is in them
    /// stays in the sum.
    ///
    /// # Errors
    /// Memory that is too small.
    pub fn parameters<M: Memory>(&self, most: u32, partial: M, gradients: [M; 2], add: bool) -> Result<Call<M>, Error> {
        let [d_gamma, d_beta] = gradients;
        let memory = [
            ("partial", partial, self.partial_bytes(most)),
            ("d_gamma", d_gamma, self.parameter_bytes()),
            ("d_beta", d_beta, self.parameter_bytes()),
        ];
        sizes("layer_norm_parameters", &memory)?;
        let gradient = |memory| if add { Argument::Updates(memory) } else { Argument::Writes(memory) };
        Ok(Call {
            program: self.program(),
            kernel: "layer_norm_parameters",
            blocks: (2 * self.rows.width).div_ceil(JOINED_COLUMNS),
            threads: THREADS,
            shared_bytes: 0,
            arguments: vec![
                Argument::Reads(partial),
                gradient(d_gamma),
                gradient(d_beta),
                Argument::Int(self.blocks(most)),
                Argument::Int(add.into()),
            ],
        })
    }
}
