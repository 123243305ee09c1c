//! Encoder for masked-language modelling (Devlin et al. 2019): post-LN blocks, full attention,
//! GELU; optionally with next-sentence prediction.
//!
//! ```text
//! x = norm(tokens + positions + segments)
//! block:  m = norm(x + proj(attention(qkv(x))));  x = norm(m + proj(gelu(fc(m))))
//! masked: logits = decoder(norm(gelu(dense(x[masked]))))   the decoder shares the token embedding
//! next sentence: logits = classifier(tanh(pooler(x of the first token)))
//! ```
//!
//! Only masked positions are decoded, a fixed number per sequence: an eighth of the work of
//! decoding all positions.

use super::Model;
use super::transformer::{DEVIATION, Sizes};
use crate::data::Kind;
use crate::nn::layers::{Activation, Attention, CrossEntropy, Embedding, LayerNorm, Linear, Pick, Target, pick_rows};
use crate::nn::{Graph, Initial, ModelError, Parameter, Tensor};
use switchyard_worker_contract::config;

#[derive(Debug, Clone)]
pub struct Bert {
    config: config::Bert,
}

impl Bert {
    /// Checks the shape.
    ///
    /// # Errors
    /// A size is 0, or heads do not divide the hidden size.
    pub fn new(config: &config::Bert) -> Result<Bert, ModelError> {
        let sizes = Sizes {
            layers: config.layers,
            hidden: config.hidden_size,
            heads: config.heads,
            context: config.context_length,
            vocabulary: config.vocabulary_size,
        };
        sizes.check()?;
        Ok(Bert { config: config.clone() })
    }

    fn block(&self, graph: &mut Graph, layer: u32, x: Tensor) -> Result<Tensor, ModelError> {
        let (hidden, heads) = (self.config.hidden_size as usize, self.config.heads as usize);
        let normal = Initial::Normal(DEVIATION);
        let name = |part: &str| format!("bert.encoder.layer.{layer}.{part}");
        // A single GEMM here; three layers in the published model.
        let parts = ["query", "key", "value"].map(|part| name(&format!("attention.self.{part}")));
        let qkv = Linear::new(3 * hidden).initial(normal).exported_as(parts);
        let qkv = qkv.add(graph, &name("attention.self.qkv"), x)?;
        let attention = Attention { heads, causal: false }.add(graph, &name("attention.self"), qkv)?;
        let dense = Linear::new(hidden).initial(normal).residual(x);
        let middle = dense.add(graph, &name("attention.output.dense"), attention)?;
        let middle = LayerNorm.add(graph, &name("attention.output.LayerNorm"), middle)?;
        let expand = Linear::new(4 * hidden).initial(normal).activation(Activation::Gelu);
        let wide = expand.add(graph, &name("intermediate.dense"), middle)?;
        let contract = Linear::new(hidden).initial(normal).residual(middle);
        let out = contract.add(graph, &name("output.dense"), wide)?;
        LayerNorm.add(graph, &name("output.LayerNorm"), out)
    }

    fn next_sentence(&self, graph: &mut Graph, x: Tensor) -> Result<(), ModelError> {
        let hidden = self.config.hidden_size as usize;
        let normal = Initial::Normal(DEVIATION);
        let first = pick_rows(graph, "bert.pooler", x, Pick::First)?;
        let dense = Linear::new(hidden).initial(normal).activation(Activation::Tanh);
        let pooled = dense.add(graph, "bert.pooler.dense", first)?;
        let logits = Linear::new(2).initial(normal).add(graph, "cls.seq_relationship", pooled)?;
        CrossEntropy { target: Target::NextSentence, count: false }.add(graph, "loss.next_sentence", logits)
    }

    fn masked(&self, graph: &mut Graph, x: Tensor, tokens: Parameter, rows: usize) -> Result<(), ModelError> {
        let (hidden, vocabulary) = (self.config.hidden_size as usize, self.config.embedding_rows() as usize);
        let hidden_places = pick_rows(graph, "cls.predictions", x, Pick::Positions(rows))?;
        let dense = Linear::new(hidden).initial(Initial::Normal(DEVIATION)).activation(Activation::Gelu);
        let dense = dense.add(graph, "cls.predictions.transform.dense", hidden_places)?;
        let norm = LayerNorm.add(graph, "cls.predictions.transform.LayerNorm", dense)?;
        // In the published model, the bias is next to the decoder, not in it.
        let decoder = Linear::new(vocabulary).shared(tokens).exported_as(["cls.predictions".to_owned()]);
        let logits = decoder.add(graph, "cls.predictions.decoder", norm)?;
        CrossEntropy { target: Target::Classes, count: true }.add(graph, "loss.masked", logits)
    }
}

impl Model for Bert {
    fn words(&self) -> String {
        format!("BERT {}x{}", self.config.layers, self.config.hidden_size)
    }

    fn build(&self, graph: &mut Graph) -> Result<(), ModelError> {
        let Kind::Masked(masking) = *graph.kind() else {
            return Err(ModelError::Data { expected: "masked tokens", got: graph.kind().words() });
        };
        let embedding = Embedding {
            context: masking.context as usize,
            width: self.config.hidden_size as usize,
            tokens: ("bert.embeddings.word_embeddings.weight", self.config.embedding_rows() as usize),
            positions: "bert.embeddings.position_embeddings.weight",
            segments: Some(("bert.embeddings.token_type_embeddings.weight", 2)),
            deviation: DEVIATION,
        };
        let (x, tokens) = embedding.add(graph, "bert.embeddings")?;
        let mut x = LayerNorm.add(graph, "bert.embeddings.LayerNorm", x)?;
        for layer in 0..self.config.layers {
            x = graph.block(|graph| self.block(graph, layer, x))?;
        }
        if self.config.next_sentence {
            self.next_sentence(graph, x)?;
        }
        self.masked(graph, x, tokens, masking.predictions as usize)
    }
}
