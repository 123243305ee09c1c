//! A small convolutional network that weights its channels by the content of the whole image.
//!
//! ```text
//! stage      relu(norm(3x3)) -> gate(x, linear(relu(linear(mean over pixels of x))))
//! network    stages, each but the first with half the pixels and twice the channels -> mean over pixels -> linear ->
//! cross entropy
//! ```

use crate::gate::Gate;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use switchyard_worker::data::Kind;
use switchyard_worker::model::Model;
use switchyard_worker::nn::layers::{
    Activation, BatchNorm, Convolution, CrossEntropy, Linear, Target, average_pool, pixels,
};
use switchyard_worker::nn::{Graph, Initial, ModelError, Tensor};

/// Convolutions with squeeze-and-excitation (Hu, Shen and Sun 2018).
#[derive(Debug, Clone, Copy)]
pub struct SqueezeExcite {
    /// Channels of the first stage.
    width: usize,
    stages: usize,
    /// Factor by which a gate reduces the number of channels internally.
    reduction: usize,
}

impl SqueezeExcite {
    /// Reads `engine.model.custom.parameters`: `width` (channels of the first stage, 16), `stages`
    /// (2), `reduction` (4).
    ///
    /// # Errors
    /// A parameter is unknown, or is not a number in its range.
    pub fn new(parameters: &BTreeMap<String, String>) -> Result<SqueezeExcite, ModelError> {
        const KNOWN: [&str; 3] = ["width", "stages", "reduction"];
        if let Some((name, got)) = parameters.iter().find(|(name, _)| !KNOWN.contains(&name.as_str())) {
            let expected = format!("nothing: the parameters are {}", KNOWN.join(", "));
            return Err(ModelError::Parameter { name: name.clone(), got: got.clone(), expected });
        }
        let [width, stages, reduction] = KNOWN;
        Ok(SqueezeExcite {
            width: number(parameters, width, 16, 1..=1024)?,
            stages: number(parameters, stages, 2, 1..=4)?,
            reduction: number(parameters, reduction, 4, 1..=64)?,
        })
    }

    fn stage(&self, graph: &mut Graph, index: usize, x: Tensor) -> Result<Tensor, ModelError> {
        let name = |part: &str| format!("stages.{index}.{part}");
        let outputs = self.width << index;
        let stride = if index > 0 { 2 } else { 1 };
        let convolution = Convolution { outputs, kernel: 3, stride, padding: 1 };
        let x = convolution.add(graph, &name("conv"), x)?;
        let x = BatchNorm::default().relu().add(graph, &name("norm"), x)?;
        let squeezed = average_pool(graph, &name("squeeze"), x)?;
        let narrow = (outputs / self.reduction).max(1);
        let linear = |inputs: usize, outputs: usize| Linear::new(outputs).initial(Initial::Uniform(bound(inputs)));
        let hidden = linear(outputs, narrow).activation(Activation::Relu).add(graph, &name("reduce"), squeezed)?;
        let gates = linear(narrow, outputs).without_bias().add(graph, &name("expand"), hidden)?;
        Gate { open: 2.0 }.add(graph, &name("gate"), x, gates)
    }
}

impl Model for SqueezeExcite {
    fn words(&self) -> String {
        format!("squeeze-excite of width {} in {} stages", self.width, self.stages)
    }

    fn build(&self, graph: &mut Graph) -> Result<(), ModelError> {
        let Kind::Images { classes, .. } = *graph.kind() else {
            return Err(ModelError::Data { expected: "images", got: graph.kind().words() });
        };
        let mut x = pixels(graph, "input", false)?;
        for index in 0..self.stages {
            x = graph.block(|graph| self.stage(graph, index, x))?;
        }
        let x = average_pool(graph, "pool", x)?;
        let initial = Initial::Uniform(bound(graph.width(x)));
        let logits = Linear::new(classes as usize).initial(initial).add(graph, "fc", x)?;
        CrossEntropy { target: Target::Classes, count: true }.add(graph, "loss", logits)
    }
}

/// Magnitude bound of PyTorch's initial weights for a linear layer.
fn bound(inputs: usize) -> f32 {
    1.0 / (inputs as f32).sqrt()
}

fn number(
    parameters: &BTreeMap<String, String>,
    name: &str,
    default: usize,
    range: RangeInclusive<usize>,
) -> Result<usize, ModelError> {
    let Some(got) = parameters.get(name) else { return Ok(default) };
    got.parse().ok().filter(|number| range.contains(number)).ok_or_else(|| ModelError::Parameter {
        name: name.to_owned(),
        got: got.clone(),
        expected: format!("a whole number from {} to {}", range.start(), range.end()),
    })
}
