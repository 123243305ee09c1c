//! Residual networks (He et al. 2016), version 1.5 as in torchvision: a bottleneck's stride is in
//! its 3 x 3 convolution.
//!
//! ```text
//! basic block       relu(norm(3x3) ) -> norm(3x3) + x -> relu
//! bottleneck        relu(norm(1x1)) -> relu(norm(3x3)) -> norm(1x1 to 4 times as many) + x -> relu
//! ```
//!
//! Where sizes change, `x` passes through a 1 x 1 convolution and a norm. Parameters are named as
//! in torchvision.

use super::Model;
use crate::data::Kind;
use crate::nn::layers::{BatchNorm, Convolution, CrossEntropy, Linear, Target, average_pool, max_pool, pixels};
use crate::nn::{Graph, Initial, ModelError, Tensor};
use switchyard_worker_contract::config::{self, ResNetDepth, Stem};

#[derive(Debug, Clone, Copy)]
pub struct ResNet {
    config: config::ResNet,
}

impl ResNet {
    /// Checks the shape.
    ///
    /// # Errors
    /// The width is 0.
    pub fn new(config: config::ResNet) -> Result<ResNet, ModelError> {
        super::check_sizes(&[("width", config.width)])?;
        Ok(ResNet { config })
    }

    /// Blocks per stage, and the ratio of a block's output width to the width of its 3 x 3
    /// convolutions.
    fn stages(&self) -> ([usize; 4], usize) {
        match self.config.depth {
            ResNetDepth::D18 => ([2, 2, 2, 2], 1),
            ResNetDepth::D50 => ([3, 4, 6, 3], 4),
        }
    }

    fn block(
        &self,
        graph: &mut Graph,
        name: &str,
        x: Tensor,
        width: usize,
        stride: usize,
    ) -> Result<Tensor, ModelError> {
        let outputs = width * self.stages().1;
        let shortcut = if stride != 1 || graph.width(x) != outputs {
            let convolution = Convolution { outputs, kernel: 1, stride, padding: 0 };
            let x = convolution.add(graph, &format!("{name}.downsample.0"), x)?;
            BatchNorm::default().add(graph, &format!("{name}.downsample.1"), x)?
        } else {
            x
        };
        let convolutions = match self.config.depth {
            ResNetDepth::D18 => vec![(width, 3, stride), (width, 3, 1)],
            ResNetDepth::D50 => vec![(width, 1, 1), (width, 3, stride), (outputs, 1, 1)],
        };
        let mut y = x;
        for (index, &(outputs, kernel, stride)) in convolutions.iter().enumerate() {
            let convolution = Convolution { outputs, kernel, stride, padding: kernel / 2 };
            y = convolution.add(graph, &format!("{name}.conv{}", index + 1), y)?;
            let norm = BatchNorm::default().relu();
            let norm = if index + 1 == convolutions.len() { norm.residual(shortcut) } else { norm };
            y = norm.add(graph, &format!("{name}.bn{}", index + 1), y)?;
        }
        Ok(y)
    }
}

impl Model for ResNet {
    fn words(&self) -> String {
        let depth = match self.config.depth {
            ResNetDepth::D18 => 18,
            ResNetDepth::D50 => 50,
        };
        let width = self.config.width;
        if width == 64 { format!("ResNet-{depth}") } else { format!("ResNet-{depth} of width {width}") }
    }

    fn build(&self, graph: &mut Graph) -> Result<(), ModelError> {
        let Kind::Images { classes, .. } = *graph.kind() else {
            return Err(ModelError::Data { expected: "images", got: graph.kind().words() });
        };
        let width = self.config.width as usize;
        let x = pixels(graph, "input", false)?;
        let stem = match self.config.stem {
            Stem::Small => Convolution { outputs: width, kernel: 3, stride: 1, padding: 1 },
            Stem::ImageNet => Convolution { outputs: width, kernel: 7, stride: 2, padding: 3 },
        };
        let x = stem.add(graph, "conv1", x)?;
        let mut x = BatchNorm::default().relu().add(graph, "bn1", x)?;
        if self.config.stem == Stem::ImageNet {
            x = max_pool(graph, "maxpool", x, 3, 2, 1)?;
        }
        for (stage, blocks) in self.stages().0.into_iter().enumerate() {
            for block in 0..blocks {
                let stride = if stage > 0 && block == 0 { 2 } else { 1 };
                let name = format!("layer{}.{block}", stage + 1);
                x = graph.block(|graph| self.block(graph, &name, x, width << stage, stride))?;
            }
        }
        let x = average_pool(graph, "avgpool", x)?;
        // PyTorch's default initialisation of linear layers.
        let bound = Initial::Uniform(1.0 / (graph.width(x) as f32).sqrt());
        let logits = Linear::new(classes as usize).initial(bound).initial_bias(bound).add(graph, "fc", x)?;
        CrossEntropy { target: Target::Classes, count: true }.add(graph, "loss", logits)
    }
}
