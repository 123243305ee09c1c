//! The tensors of a checkpoint, and where their numbers are in an engine.

use super::TrainError;
use super::engine::{Array, Engine};
use std::collections::HashMap;
use std::ops::Range;
use switchyard_checkpoint::{Role, TensorSink, TensorSpec};

/// The tensors of a checkpoint of this engine.
pub(super) fn tensors(engine: &dyn Engine) -> Vec<TensorSpec> {
    let of_parameters = |prefix: String, role, export: bool| {
        engine.layout().parameters.iter().map(move |parameter| TensorSpec {
            name: format!("{prefix}{}", parameter.name),
            shape: parameter.shape.clone(),
            role,
            export_axes: parameter.export_axes.clone().filter(|_| export),
            export_names: if export { parameter.export_names.clone() } else { Vec::new() },
        })
    };
    let mut tensors: Vec<TensorSpec> = of_parameters(String::new(), Role::Weight, true).collect();
    for array in engine.moments() {
        tensors.extend(of_parameters(prefix(array), Role::Optimizer, false));
    }
    tensors.extend(engine.statistics().into_iter().map(|(name, len)| TensorSpec {
        name,
        shape: vec![len],
        role: Role::Statistic,
        export_axes: None,
        export_names: Vec::new(),
    }));
    tensors
}

/// Prefix of a parameter's name for an array of the optimizer.
fn prefix(array: &str) -> String {
    format!("optimizer.{array}.")
}

/// Where each tensor of a checkpoint is.
pub(super) struct Names {
    places: HashMap<String, (Array, Range<usize>)>,
}

impl Names {
    pub fn new(engine: &dyn Engine) -> Names {
        let mut places = HashMap::new();
        let arrays = engine.moments();
        for parameter in &engine.layout().parameters {
            places.insert(parameter.name.clone(), (Array::Weights, parameter.range()));
            for (index, array) in arrays.iter().enumerate() {
                places.insert(prefix(array) + &parameter.name, (Array::Moments(index), parameter.range()));
            }
        }
        let mut at = 0;
        for (name, len) in engine.statistics() {
            places.insert(name, (Array::Statistics, at..at + len));
            at += len;
        }
        Names { places }
    }

    pub fn find(&self, name: &str) -> Option<(Array, Range<usize>)> {
        self.places.get(name).cloned()
    }
}

/// Takes the tensors of a checkpoint and writes them into an engine, one at a time.
pub(super) struct Sink<'a> {
    engine: &'a mut dyn Engine,
    names: Names,
    /// The tensor that is being read.
    current: Option<(String, Array, usize)>,
    numbers: Vec<f32>,
    failed: Option<TrainError>,
}

impl<'a> Sink<'a> {
    pub fn new(engine: &'a mut dyn Engine) -> Sink<'a> {
        let names = Names::new(engine);
        Sink { engine, names, current: None, numbers: Vec::new(), failed: None }
    }

    /// Writes the last tensor.
    ///
    /// # Errors
    /// The engine failed.
    pub fn finish(mut self) -> Result<(), TrainError> {
        self.flush();
        self.failed.map_or(Ok(()), Err)
    }

    fn flush(&mut self) {
        if let Some((_, array, from)) = self.current.take() {
            self.failed = self.failed.take().or(self.engine.write(array, from, &self.numbers).err());
        }
    }
}

impl TensorSink for Sink<'_> {
    fn tensor(&mut self, name: &str) -> Option<&mut [f32]> {
        if self.current.as_ref().is_none_or(|(current, ..)| current != name) {
            self.flush();
            let (array, range) = self.names.find(name)?;
            // A tensor may come in several parts, with others between them.
            self.numbers.resize(range.len(), 0.0);
            let read = self.engine.read(array, range.start, &mut self.numbers);
            self.failed = self.failed.take().or(read.err());
            self.current = Some((name.to_owned(), array, range.start));
        }
        Some(&mut self.numbers)
    }
}
