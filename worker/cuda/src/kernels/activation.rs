//! Bias and activation after a GEMM, forward and backward.

use super::{Argument, COLUMN_THREADS, Call, JOINED_COLUMNS, Memory, Program, Rows, Source, sizes};
use crate::error::Error;

pub(super) static SOURCE: Source =
    Source { name: "activation.cu", text: include_str!("activation.cu"), arithmetic: "--use_fast_math" };

/// An elementwise function, with the formulas of the CPU engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Function {
    /// Bias only, and column sums in backward.
    Identity,
    /// max(x, 0); NaN stays NaN.
    Relu,
    /// Tanh approximation.
    Gelu,
    Tanh,
}

impl Function {
    fn definition(self) -> &'static str {
        match self {
            Function::Identity => "-DFUNCTION=NONE",
            Function::Relu => "-DFUNCTION=RELU",
            Function::Gelu => "-DFUNCTION=GELU",
            Function::Tanh => "-DFUNCTION=TANH",
        }
    }
}

/// Bias and activation of `count` rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Activation {
    function: Function,
    rows: Rows,
    count: u32,
}

/// Memory of forward. `kept` and `y` can be the memory of `x`, but not both.
#[derive(Debug, Clone, Copy)]
pub struct Forward<M> {
    pub x: M,
    /// `f32`.
    pub bias: Option<M>,
    /// Receives `x` plus bias, which the backward pass of [`Function::Gelu`] needs.
    pub kept: Option<M>,
    pub y: M,
}

/// Memory of backward.
#[derive(Debug, Clone, Copy)]
pub struct Backward<M> {
    /// The tensor from which the derivative is computed: the input for [`Function::Gelu`],
    /// otherwise the output; unused for [`Function::Identity`].
    pub kept: M,
    /// Gradient of the output; becomes the gradient of the input.
    pub dy: M,
    /// Partial sums per block, [`Activation::partial_bytes`]; `None` without a bias.
    pub partial: Option<M>,
}

impl Activation {
    /// # Errors
    /// The kernels do not support the width or pitch.
    pub fn new(function: Function, rows: Rows, count: u32) -> Result<Activation, Error> {
        rows.check("activation")?;
        if count == 0 {
            return Err(Error::refused("activation", "0 rows, expected at least one"));
        }
        Ok(Activation { function, rows, count })
    }

    pub fn program(&self) -> Program {
        let mut program = self.rows.program(&SOURCE);
        program.definitions.push(self.function.definition().to_owned());
        program
    }

    /// Blocks side by side, and blocks that share the rows.
    fn grid(&self, max_blocks: u32) -> (u32, u32) {
        self.rows.columns(self.count, max_blocks)
    }

    /// Bytes of backward's partial sums on `max_blocks` blocks.
    pub fn partial_bytes(&self, max_blocks: u32) -> usize {
        self.grid(max_blocks).1 as usize * self.bias_bytes()
    }

    fn bias_bytes(&self) -> usize {
        self.rows.width as usize * 4
    }

    /// `y` = function of `x` plus `bias`. Runs on at most `max_blocks` blocks, but at least one per
    /// 512 bytes of a row.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn forward<M: Memory>(&self, max_blocks: u32, on: Forward<M>) -> Result<Call<M>, Error> {
        let Forward { x, bias, kept, y } = on;
        let all = self.rows.bytes(self.count);
        let mut memory = vec![("x", x, all), ("y", y, all)];
        memory.extend(bias.map(|bias| ("bias", bias, self.bias_bytes())));
        memory.extend(kept.map(|kept| ("kept", kept, all)));
        sizes("activation", &memory)?;
        let (tiles, parts) = self.grid(max_blocks);
        Ok(Call {
            program: self.program(),
            kernel: "activation",
            blocks: tiles * parts,
            threads: COLUMN_THREADS,
            shared_bytes: 0,
            arguments: vec![
                Argument::Reads(x),
                bias.map_or(Argument::Absent, Argument::Reads),
                kept.map_or(Argument::Absent, Argument::Writes),
                Argument::Writes(y),
                Argument::Int(self.count),
            ],
        })
    }

    /// Computes the gradient before the function, and each block's partial sums of the bias
    /// gradient. Blocks as in [`Activation::forward`].
    ///
    /// # Errors
    /// The memory is too small.
    pub fn backward<M: Memory>(&self, max_blocks: u32, on: Backward<M>) -> Result<Call<M>, Error> {
        let Backward { kept, dy, partial } = on;
        let all = self.rows.bytes(self.count);
        let is_identity = self.function == Function::Identity;
        let mut memory = vec![("dy", dy, all)];
        memory.extend(partial.map(|partial| ("partial", partial, self.partial_bytes(max_blocks))));
        memory.extend((!is_identity).then_some(("kept", kept, all)));
        sizes("activation_backward", &memory)?;
        let (tiles, parts) = self.grid(max_blocks);
        Ok(Call {
            program: self.program(),
            kernel: "activation_backward",
            blocks: tiles * parts,
            threads: COLUMN_THREADS,
            shared_bytes: 0,
            arguments: vec![
                if is_identity { Argument::Absent } else { Argument::Reads(kept) },
                if is_identity { Argument::Reads(dy) } else { Argument::Updates(dy) },
                partial.map_or(Argument::Absent, Argument::Writes),
                Argument::Int(self.count),
            ],
        })
    }

    /// Computes the bias gradient from the partial sums that [`Activation::backward`] wrote on
    /// `max_blocks` blocks; `add`: whether to add to it.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn bias<M: Memory>(&self, max_blocks: u32, partial: M, d_bias: M, add: bool) -> Result<Call<M>, Error> {
        let memory = [("partial", partial, self.partial_bytes(max_blocks)), ("d_bias", d_bias, self.bias_bytes())];
        sizes("activation_bias", &memory)?;
        Ok(Call {
            program: self.program(),
            kernel: "activation_bias",
            blocks: self.rows.width.div_ceil(JOINED_COLUMNS),
            threads: COLUMN_THREADS,
            shared_bytes: 0,
            arguments: vec![
                Argument::Reads(partial),
                if add { Argument::Updates(d_bias) } else { Argument::Writes(d_bias) },
                Argument::Int(self.grid(max_blocks).1),
                Argument::Int(add.into()),
            ],
        })
    }
}
