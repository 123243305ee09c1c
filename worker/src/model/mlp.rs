//! Multi-layer perceptron for images or features.

use super::Model;
use crate::data::Kind;
use crate::nn::layers::{Activation, CrossEntropy, Linear, Target, features, pixels};
use crate::nn::{Graph, Initial, ModelError};
use switchyard_worker_contract::config;

/// Parameters are named `layers.0.weight` and so on.
#[derive(Debug, Clone)]
pub struct Mlp {
    config: config::Mlp,
}

impl Mlp {
    /// Checks the shape.
    ///
    /// # Errors
    /// A width is 0.
    pub fn new(config: &config::Mlp) -> Result<Mlp, ModelError> {
        for &size in &config.hidden_sizes {
            super::check_sizes(&[("hidden size", size)])?;
        }
        Ok(Mlp { config: config.clone() })
    }
}

impl Model for Mlp {
    fn words(&self) -> String {
        let sizes: Vec<String> = self.config.hidden_sizes.iter().map(u32::to_string).collect();
        format!("MLP {}", if sizes.is_empty() { "without hidden layers".into() } else { sizes.join("-") })
    }

    fn build(&self, graph: &mut Graph) -> Result<(), ModelError> {
        let (mut x, classes) = match *graph.kind() {
            Kind::Images { classes, .. } => (pixels(graph, "input", true)?, classes),
            Kind::Features { classes, .. } => (features(graph, "input")?, classes),
            _ => return Err(ModelError::Data { expected: "images or features", got: graph.kind().words() }),
        };
        let activation = match self.config.activation {
            config::Activation::Relu => Activation::Relu,
            config::Activation::Gelu => Activation::Gelu,
        };
        let sizes = self.config.hidden_sizes.iter().map(|&size| size as usize).chain([classes as usize]);
        let last = self.config.hidden_sizes.len();
        for (index, outputs) in sizes.enumerate() {
            // PyTorch's default initialisation of linear layers.
            let bound = Initial::Uniform(1.0 / (graph.width(x) as f32).sqrt());
            let linear = Linear::new(outputs).initial(bound).initial_bias(bound);
            let linear = if index < last { linear.activation(activation) } else { linear };
            x = linear.add(graph, &format!("layers.{index}"), x)?;
        }
        CrossEntropy { target: Target::Classes, count: true }.add(graph, "loss", x)
    }
}
