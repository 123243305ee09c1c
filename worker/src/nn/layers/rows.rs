//! Row selection.

use crate::cpu::Cpu;
use crate::cpu::ops;
use crate::cpu::values::with_format;
use crate::nn::{Backward, Flow, Form, Forward, Graph, INPUTS, Layer, ModelError, Needs, Tensor};

/// The rows to select.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pick {
    /// [`crate::data::Batch::positions`], the same number per sample: the tokens to predict.
    Positions(usize),
    /// The first row of each sample.
    First,
}

/// Selects rows: `[batch, context, width]` to `[rows, width]`.
///
/// # Errors
/// The input has the wrong number of axes.
pub fn pick_rows(graph: &mut Graph, name: &str, x: Tensor, pick: Pick) -> Result<Tensor, ModelError> {
    let &[batch, context, width] = graph.shape(x) else {
        return Err(graph.mismatch(name, x, "[batch, context, width]"));
    };
    let (count, fixed) = match pick {
        Pick::Positions(each) => (batch * each, Vec::new()),
        Pick::First => (batch, (0..batch).map(|sample| (sample * context) as u32).collect()),
    };
    let layer = Rows { count, of: batch * context, width, fixed };
    graph.add(name, layer, &[x], &[], &[], &[count, width])
}

/// Selects `count` rows of `[of, width]`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rows {
    pub count: usize,
    pub of: usize,
    pub width: usize,
    /// Fixed row indices; if empty, [`crate::data::Batch::positions`] selects the rows.
    pub fixed: Vec<u32>,
}

impl Rows {
    fn index<'a>(&'a self, positions: &'a [u32]) -> &'a [u32] {
        if self.fixed.is_empty() { positions } else { &self.fixed }
    }
}

impl Layer for Rows {
    fn kind(&self) -> &'static str {
        "Rows"
    }

    fn form(&self) -> Form {
        Form::Rows(self.clone())
    }

    fn needs(&self, _: &Cpu) -> Needs {
        Needs { flow: [Flow::Accumulate; INPUTS], ..Needs::default() }
    }

    fn forward(&mut self, cx: &mut Forward<'_>) {
        let index = self.index(&cx.batch.positions);
        with_format!(cx.output.format(), E => {
            ops::gather_rows::<E>(&cx.kernels.cpu, index, cx.inputs[0].of::<E>(), self.width, cx.output.of::<E>());
        });
    }

    fn backward(&mut self, cx: &mut Backward<'_>) {
        let index = self.index(&cx.batch.positions);
        let Some((mut dx, add)) = cx.d_inputs[0].target() else { return };
        with_format!(dx.format(), E => {
            let dx = dx.of::<E>();
            if !add {
                dx.fill(bytemuck::Zeroable::zeroed());
            }
            // Rows are distinct, so nothing is rounded twice.
            ops::scatter_add_rows::<E, E>(&cx.kernels.cpu, index, cx.d_output.of::<E>(), self.width, dx);
        });
    }
}
