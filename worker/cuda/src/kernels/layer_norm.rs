//! Layer norm, forward and backward.

use super::{Argument, Call, JOINED_COLUMNS, Memory, Program, Rows, Source, sizes};
use crate::error::Error;

pub(super) static SOURCE: Source =
    Source { name: "layer_norm.cu", text: include_str!("layer_norm.cu"), arithmetic: "--use_fast_math" };
const THREADS: u32 = 256;
/// Elements of a row that a warp holds in registers; wider rows use 2 or 4 warps.
const PER_WARP: u32 = 1024;
const WARPS: u32 = THREADS / 32;
/// Backward keeps 8 bytes per column in shared memory, of which a kernel can declare 48 KiB.
const MAX_WIDTH: u32 = 4 * PER_WARP;

/// Layer norm of one width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerNorm {
    rows: Rows,
    count: u32,
}

/// Memory of backward.
#[derive(Debug, Clone, Copy)]
pub struct Backward<M> {
    pub dy: M,
    pub x: M,
    pub gamma: M,
    pub saved: M,
    pub dx: M,
    /// Partial sums per block, [`LayerNorm::partial_bytes`].
    pub partial: M,
}

impl LayerNorm {
    /// Layer norm of `count` rows.
    ///
    /// # Errors
    /// The kernels do not support the width or pitch.
    pub fn new(rows: Rows, count: u32) -> Result<LayerNorm, Error> {
        rows.check("layer_norm")?;
        if rows.width > MAX_WIDTH || count == 0 {
            let text = format!("{count} rows of width {}, expected at least one of at most {MAX_WIDTH}", rows.width);
            return Err(Error::refused("layer_norm", text));
        }
        Ok(LayerNorm { rows, count })
    }

    pub fn program(&self) -> Program {
        self.rows.program(&SOURCE)
    }

    fn blocks(&self, max_blocks: u32) -> u32 {
        let rows_at_once = WARPS / self.rows.width.div_ceil(PER_WARP).next_power_of_two();
        self.count.div_ceil(rows_at_once).min(max_blocks).max(1)
    }

    /// Bytes of backward's partial sums on at most `max_blocks` blocks.
    pub fn partial_bytes(&self, max_blocks: u32) -> usize {
        self.blocks(max_blocks) as usize * 2 * self.rows.width as usize * 4
    }

    fn parameter_bytes(&self) -> usize {
        self.rows.width as usize * 4
    }

    fn saved_bytes(&self) -> usize {
        self.count as usize * 8
    }

    /// `y` = normalised rows of `x` times `gamma` plus `beta`; `saved` receives mean and 1 /
    /// standard deviation of each row. Parameters and `saved` are `f32`. Runs on at most
    /// `max_blocks` blocks.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn forward<M: Memory>(
        &self,
        max_blocks: u32,
        x: M,
        [gamma, beta]: [M; 2],
        y: M,
        saved: M,
    ) -> Result<Call<M>, Error> {
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
            blocks: self.blocks(max_blocks),
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

    /// Computes `dx`, and each block's partial sums of the parameter gradients; `add`: whether to
    /// add to `dx`.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn backward<M: Memory>(&self, max_blocks: u32, on: Backward<M>, add: bool) -> Result<Call<M>, Error> {
        let Backward { dy, x, gamma, saved, dx, partial } = on;
        let all = self.rows.bytes(self.count);
        let memory = [
            ("dy", dy, all),
            ("x", x, all),
            ("gamma", gamma, self.parameter_bytes()),
            ("saved", saved, self.saved_bytes()),
            ("dx", dx, all),
            ("partial", partial, self.partial_bytes(max_blocks)),
        ];
        sizes("layer_norm_backward", &memory)?;
        Ok(Call {
            program: self.program(),
            kernel: "layer_norm_backward",
            blocks: self.blocks(max_blocks),
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

    /// Computes the parameter gradients from the partial sums that [`LayerNorm::backward`] wrote on
    /// at most `max_blocks` blocks; `add`: whether to add to them.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn parameters<M: Memory>(
        &self,
        max_blocks: u32,
        partial: M,
        gradients: [M; 2],
        add: bool,
    ) -> Result<Call<M>, Error> {
        let [d_gamma, d_beta] = gradients;
        let memory = [
            ("partial", partial, self.partial_bytes(max_blocks)),
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
                Argument::Int(self.blocks(max_blocks)),
                Argument::Int(add.into()),
            ],
        })
    }
}
