//! The networks available to a program.

use super::{Bert, Gpt, Mlp, Model, ResNet};
use crate::nn::ModelError;
use std::collections::BTreeMap;
use switchyard_worker_contract::config;

/// Builds a model from the parameters in its manifest (`engine.model.custom.parameters`).
pub type Build = fn(&BTreeMap<String, String>) -> Result<Box<dyn Model>, ModelError>;

/// Switchyard's own networks, and a program's custom networks by name.
#[derive(Debug, Clone, Default)]
pub struct Registry {
    custom: BTreeMap<String, Build>,
}

impl Registry {
    /// A registry of Switchyard's own networks.
    pub fn new() -> Registry {
        Registry::default()
    }

    /// Adds a network for manifests with `model: {type: Custom, custom: {name: NAME}}`.
    pub fn with(mut self, name: &str, build: Build) -> Registry {
        self.custom.insert(name.to_owned(), build);
        self
    }

    /// Creates the model of a configuration.
    ///
    /// # Errors
    /// A size is invalid, or the name is unknown.
    pub fn model(&self, config: &config::Model) -> Result<Box<dyn Model>, ModelError> {
        Ok(match config {
            config::Model::Gpt(gpt) => Box::new(Gpt::new(gpt)?),
            config::Model::Bert(bert) => Box::new(Bert::new(bert)?),
            config::Model::ResNet(resnet) => Box::new(ResNet::new(*resnet)?),
            config::Model::Mlp(mlp) => Box::new(Mlp::new(mlp)?),
            config::Model::Custom(custom) => match self.custom.get(&custom.name) {
                Some(build) => build(&custom.parameters)?,
                None => return Err(ModelError::Unknown { got: custom.name.clone(), has: self.names() }),
            },
        })
    }

    fn names(&self) -> String {
        if self.custom.is_empty() {
            return "none: start your own program, with `switchyard run --worker FILE` or in a cluster with trainer.image".into();
        }
        self.custom.keys().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
    }
}
