//! A small network with an identity layer that runs test hooks.
#![allow(clippy::unwrap_used, reason = "a test helper may end the test")]

use crate::plain;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use switchyard_worker::cpu::Cpu;
use switchyard_worker::model::Registry;
use switchyard_worker::nn::layers::{CrossEntropy, Linear, Target, pixels};
use switchyard_worker::nn::{Backward, Forward, Graph, Layer, ModelError, Needs};
use switchyard_worker_contract::config::{Custom, EngineConfig, Model};

/// Called in each pass of the layer.
pub type Hook = Arc<dyn Fn() + Send + Sync>;

struct Hooked {
    len: usize,
    forward: Hook,
    backward: Hook,
}

impl Layer for Hooked {
    fn kind(&self) -> &'static str {
        "Hooked"
    }

    fn needs(&self, _: &Cpu) -> Needs {
        Needs::default()
    }

    fn forward(&mut self, cx: &mut Forward<'_>) {
        (self.forward)();
        cx.output.of::<f32>()[..self.len].copy_from_slice(&cx.inputs[0].of::<f32>()[..self.len]);
    }

    fn backward(&mut self, cx: &mut Backward<'_>) {
        (self.backward)();
        let dy = cx.d_output.shared();
        if let Some((mut d, add)) = cx.d_inputs[0].target() {
            for (d, dy) in d.of::<f32>().iter_mut().zip(dy.of::<f32>()) {
                *d = dy + if add { *d } else { 0.0 };
            }
        }
    }
}

struct Network {
    forward: Hook,
    backward: Hook,
}

impl switchyard_worker::model::Model for Network {
    fn words(&self) -> String {
        "a network with hooks".into()
    }

    fn build(&self, graph: &mut Graph) -> Result<(), ModelError> {
        let input = pixels(graph, "input", true)?;
        let hidden = Linear::new(6).add(graph, "hidden", input)?;
        let (shape, len) = (graph.shape(hidden).to_vec(), graph.len(hidden));
        let (forward, backward) = (Arc::clone(&self.forward), Arc::clone(&self.backward));
        let hooked = graph.add("hooked", Hooked { len, forward, backward }, &[hidden], &[], &[], &shape)?;
        let output = Linear::new(4).add(graph, "output", hooked)?;
        CrossEntropy { target: Target::Classes, count: true }.add(graph, "loss", output)
    }
}

thread_local! {
    static HOOKS: RefCell<Option<(Hook, Hook)>> = const { RefCell::new(None) };
}

/// Models whose hooked layer calls these functions. The rank's blueprint must be created on the
/// same thread.
pub fn registry(forward: Hook, backward: Hook) -> Registry {
    HOOKS.set(Some((forward, backward)));
    Registry::new().with("hooked", |_| {
        let (forward, backward) = HOOKS.with_borrow(Clone::clone).unwrap();
        Ok(Box::new(Network { forward, backward }))
    })
}

/// Trains that network on synthetic images.
pub fn config() -> EngineConfig {
    let model = Model::Custom(Custom { name: "hooked".into(), parameters: BTreeMap::new() });
    EngineConfig { model, ..plain::resnet() }
}
