//! What follows a product of matrices: bias and activation, forward and backward.

use super::{Argument, COLUMN_THREADS, Call, JOINED_COLUMNS, Memory, Program, Rows, Source, sizes};
use crate::error::Error;

pub(super) static SOURCE: Source =
    Source { name: "activation.cu", text: include_str!("activation.cu"), arithmetic: "--use_fast_math" };

/// A function of each number, with the formulas of the engine on CPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Function {
    /// None: bias, and column sums in backward.
    Identity,
    /// The larger of the number and 0; NaN stays NaN.
    Relu,
    /// The form with tanh.
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

/// What forward reads and writes. `kept` and `y` may be the memory of `x`, but not both.
#[derive(Debug, Clone, Copy)]
pub struct Forward<M> {
    pub x: M,
    /// `f32`.
    pub bias: Option<M>,
    /// Gets `x` with the bias: what [`Function::Gelu`] needs for backward.
    pub kept: Option<M>,
    pub y: M,
}

/// What backward reads and writes.
#[derive(Debug, Clone, Copy)]
pub struct Backward<M> {
    /// What the function is derived from: its argument for [`Function::Gelu`], else its result; [`Function::Identity`] reads nothing.
    pub kept: M,
    /// The gradient of the result becomes that of the argument.
    pub dy: M,
    /// Sums of each block, [`Activation::partial_bytes`]; left out where there is no bias.
    pub partial: Option<M>,
}

impl Activation {
    /// # Errors
    /// A width or pitch that the kernels cannot have.
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

    /// Blocks beside each other, and blocks that share the rows.
    fn grid(&self, most: u32) -> (u32, u32) {
        self.rows.columns(self.count, most)
    }

    /// Size of the sums of backward on `most` blocks.
    pub fn partial_bytes(&self, most: u32) -> usize {
        self.grid(most).1 as usize * self.bias_bytes()
    }

    fn bias_bytes(&self) -> usize {
        self.rows.width as usize * 4
    }

    /// `y` = the function of `x` plus `bias`. On at most `most` blocks, but at least one for each 512 bytes of a row.
    ///
    /// # Errors
    /// Memory that is too small.
    pub fn forward<M: Memory>(&self, most: u32, on: Forward<M>) -> Result<Call<M>, Error> {
        let Forward { x, bias, kept, y } = on;
        let all = self.rows.bytes(self.count);
        let mut memory = vec![("x", x, all), ("y", y, all)];
        memory.extend(bias.map(|bias| ("bias", bias, self.bias_bytes())));
        memory.extend(kept.map(|kept| ("kept", kept, all)));
        sizes("activation", &memory)?;
        let (tiles, parts) = self.grid(most);
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

    /// The gradient before the function, and the sums of each block for the gradient of the bias. Blocks as in [`Activation::forward`].
    ///
    /// # Errors
    /// Memory that is too small.
    pub fn backward<M: Memory>(&self, most: u32, on: Backward<M>) -> Result<Call<M>, Error> {
        let Backward { kept, dy, partial } = on;
        let all = self.rows.bytes(self.count);
        let is_identity = self.function == Function::Identity;
        let mut memory = vec![("dy", dy, all)];
        memory.extend(partial.map(|partial| ("partial", partial, self.partial_bytes(most))));
        memory.extend((!is_identity).then_some(("kept", kept, all)));
        sizes("activation_backward", &memory)?;
        let (tiles, parts) = self.grid(most);
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

    /// The gradient of the bias from the sums that [`Activation::backward`] wrote on `most` blocks; `add`: what is in it stays in the sum.
    ///
    /// # Errors
    /// Memory that is too small.
    pub fn bias<M: Memory>(&self, most: u32, partial: M, d_bias: M, add: bool) -> Result<Call<M>, Error> {
        let memory = [("partial", partial, self.partial_bytes(most)), ("d_bias", d_bias, self.bias_bytes())];
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
                Argument::Int(self.grid(most).1),
                Argument::Int(add.into()),
            ],
        })
    }
}
