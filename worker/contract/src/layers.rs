//! Times of a rank's layers in the profiled steps.

use serde::{Deserialize, Serialize};

/// `record/rank-R.layers.json` in a run directory; from CPUs only.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LayerTimes {
    /// Attempt that was profiled.
    pub attempt: u32,
    /// Profiled steps. Of each, the times are those of its last micro-batch, summed.
    pub steps: u64,
    /// In forward order.
    pub layers: Vec<LayerTime>,
}

/// A layer of the network.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LayerTime {
    /// Name, unique in the network.
    pub name: String,
    /// Kind, such as `Linear` or `Convolution`.
    pub kind: String,
    /// Parameters whose gradients are final after the layer's backward pass.
    pub parameters: u64,
    /// Seconds of the forward pass.
    pub forward_seconds: f64,
    /// Seconds of the backward pass.
    pub backward_seconds: f64,
}

impl LayerTimes {
    /// Adds a step of the same network.
    pub fn add(&mut self, step: Vec<LayerTime>) {
        self.steps += 1;
        if self.layers.is_empty() {
            self.layers = step;
            return;
        }
        for (sum, layer) in self.layers.iter_mut().zip(step) {
            sum.forward_seconds += layer.forward_seconds;
            sum.backward_seconds += layer.backward_seconds;
        }
    }
}
