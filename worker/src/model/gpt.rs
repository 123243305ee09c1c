//! Decoder-only transformer: learned positions, pre-LN blocks, causal attention, GELU (Radford et
//! al. 2019).
//!
//! ```text
//! x = tokens + positions
//! block:  m = x + proj(attention(qkv(norm1(x))));  x = m + proj(gelu(fc(norm2(m))))
//! logits = head(norm(x))
//! ```
//!
//! Parameters are named as in GPT-2. Block weights are `[outputs, inputs]` here and exported as
//! `[inputs, outputs]`, as in the published model.

use super::Model;
use super::transformer::{DEVIATION, Sizes};
use crate::data::Kind;
use crate::nn::layers::{Activation, Attention, CrossEntropy, Embedding, LayerNorm, Linear, Target};
use crate::nn::{Graph, Initial, ModelError, Tensor};
use switchyard_worker_contract::config;

#[derive(Debug, Clone)]
pub struct Gpt {
    config: config::Gpt,
}

impl Gpt {
    /// Checks the shape.
    ///
    /// # Errors
    /// A size is 0, or heads do not divide the hidden size.
    pub fn new(config: &config::Gpt) -> Result<Gpt, ModelError> {
        let sizes = Sizes {
            layers: config.layers,
            hidden: config.hidden_size,
            heads: config.heads,
            context: config.context_length,
            vocabulary: config.vocabulary_size,
        };
        sizes.check()?;
        Ok(Gpt { config: config.clone() })
    }

    fn block(&self, graph: &mut Graph, layer: u32, x: Tensor) -> Result<Tensor, ModelError> {
        let (hidden, heads) = (self.config.hidden_size as usize, self.config.heads as usize);
        let normal = Initial::Normal(DEVIATION);
        // The residual stream is the sum of 2 * layers projections (GPT-2, section 2.3).
        let residual = Initial::Normal(DEVIATION / ((2 * self.config.layers) as f32).sqrt());
        let linear = |outputs| Linear::new(outputs).exported_transposed();
        let name = |part: &str| format!("transformer.h.{layer}.{part}");
        let norm = LayerNorm.add(graph, &name("ln_1"), x)?;
        let qkv = linear(3 * hidden).initial(normal).add(graph, &name("attn.c_attn"), norm)?;
        let heads = Attention { heads, causal: true }.add(graph, &name("attn"), qkv)?;
        let project = linear(hidden).initial(residual).residual(x);
        let middle = project.add(graph, &name("attn.c_proj"), heads)?;
        let norm = LayerNorm.add(graph, &name("ln_2"), middle)?;
        let expand = linear(4 * hidden).initial(normal).activation(Activation::Gelu);
        let wide = expand.add(graph, &name("mlp.c_fc"), norm)?;
        let contract = linear(hidden).initial(residual).residual(middle);
        contract.add(graph, &name("mlp.c_proj"), wide)
    }
}

impl Model for Gpt {
    fn words(&self) -> String {
        format!("GPT {}x{}", self.config.layers, self.config.hidden_size)
    }

    fn build(&self, graph: &mut Graph) -> Result<(), ModelError> {
        let Kind::Tokens { context, vocabulary } = *graph.kind() else {
            return Err(ModelError::Data { expected: "tokens", got: graph.kind().words() });
        };
        let (hidden, vocabulary) = (self.config.hidden_size as usize, vocabulary as usize);
        let embedding = Embedding {
            context: context as usize,
            width: hidden,
            tokens: ("transformer.wte.weight", vocabulary),
            positions: "transformer.wpe.weight",
            segments: None,
            deviation: DEVIATION,
        };
        let (mut x, tokens) = embedding.add(graph, "transformer.embedding")?;
        for layer in 0..self.config.layers {
            x = graph.block(|graph| self.block(graph, layer, x))?;
        }
        let norm = LayerNorm.add(graph, "transformer.ln_f", x)?;
        let head = Linear::new(vocabulary).without_bias().initial(Initial::Normal(DEVIATION));
        let head = if self.config.tied_head { head.shared(tokens) } else { head };
        let logits = head.add(graph, "lm_head", norm)?;
        CrossEntropy { target: Target::Classes, count: false }.add(graph, "loss", logits)
    }
}
