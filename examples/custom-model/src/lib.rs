//! A custom network in Switchyard's engine.
//!
//! | file | content |
//! |---|---|
//! | `gate.rs` | a [`Layer`](switchyard_worker::nn::Layer): forward, a hand-written backward, a parameter, any number format |
//! | `model.rs` | a [`Model`](switchyard_worker::model::Model): layers of Switchyard and this one, settings from the manifest |
//! | `main.rs` | the program: all of `switchyard-worker`, plus this network |
//! | `../tests/model.rs` | the checks that every new layer needs: its gradient against finite differences of the loss, and a few steps |
//!
//! The engine provides the rest: memory planned before the first step, mixed precision, overlapped
//! reductions, readers, checkpoints, profiles and reports. In the repository:
//!
//! ```text
//! cargo xtask run --worker switchyard-example-custom-model examples/custom-model.yaml
//! ```
//!
//! In a cluster the program goes into your own image: `trainer.image`.
#![forbid(unsafe_code)]

mod gate;
mod model;

pub use gate::Gate;
pub use model::SqueezeExcite;

use switchyard_worker::model::Registry;

/// Switchyard's networks, plus `squeeze-excite` for `engine.model.custom.name`.
pub fn registry() -> Registry {
    Registry::new().with("squeeze-excite", |parameters| Ok(Box::new(SqueezeExcite::new(parameters)?)))
}
