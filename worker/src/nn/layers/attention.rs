//! Self-attention over interleaved queries, keys and values.

use crate::cpu::Cpu;
use crate::cpu::attention::{self, AttentionForward, AttentionShape};
use crate::cpu::values::with_format;
use crate::nn::{Backward, Form, Forward, Graph, Layer, ModelError, Needs, Tensor};

/// Scaled dot-product attention: `[batch, context, 3 hidden]` to `[batch, context, hidden]`.
#[derive(Debug, Clone, Copy)]
pub struct Attention {
    /// Must divide the hidden size.
    pub heads: usize,
    /// Whether a token attends only to itself and earlier tokens.
    pub causal: bool,
}

impl Attention {
    /// Appends the layer.
    ///
    /// # Errors
    /// The input is not three times as wide as a multiple of the heads.
    pub fn add(self, graph: &mut Graph, name: &str, qkv: Tensor) -> Result<Tensor, ModelError> {
        let &[batch, context, width] = graph.shape(qkv) else {
            return Err(graph.mismatch(name, qkv, "[batch, context, 3 x hidden size]"));
        };
        if self.heads == 0 || !width.is_multiple_of(3 * self.heads) {
            return Err(ModelError::Heads { hidden: width / 3, heads: self.heads });
        }
        let shape = AttentionShape {
            batch,
            context,
            heads: self.heads,
            head_size: width / 3 / self.heads,
            causal: self.causal,
        };
        graph.add(name, Heads(shape), &[qkv], &[], &[], &[batch, context, width / 3])
    }
}

struct Heads(AttentionShape);

impl Layer for Heads {
    fn kind(&self) -> &'static str {
        "Attention"
    }

    fn form(&self) -> Form {
        Form::Attention(self.0)
    }

    fn needs(&self, cpu: &Cpu) -> Needs {
        let scratch = self.0.scratch_len() * cpu.pool.threads();
        Needs {
            inputs: [true, false, false],
            output: true,
            saved: self.0.saved_len(),
            scratch,
            backward_scratch: scratch,
            ..Needs::default()
        }
    }

    fn forward(&mut self, cx: &mut Forward<'_>) {
        let cpu = &cx.kernels.cpu;
        with_format!(cx.output.format(), E => {
            attention::attention::<E>(cpu, &self.0, cx.inputs[0].of::<E>(), cx.output.of::<E>(), cx.saved, cx.scratch);
        });
    }

    fn backward(&mut self, cx: &mut Backward<'_>) {
        // The input comes from a layer with parameters and has no other reader, so the gradient is
        // written, not added.
        let Some((mut d_qkv, _)) = cx.d_inputs[0].target() else { return };
        let cpu = &cx.kernels.cpu;
        with_format!(d_qkv.format(), E => {
            let forward = AttentionForward { qkv: cx.inputs[0].of::<E>(), out: cx.output.of::<E>(), saved: cx.saved };
            attention::attention_backward::<E>(
                cpu, &self.0, forward, cx.d_output.of::<E>(), d_qkv.of::<E>(), cx.scratch,
            );
        });
    }
}
