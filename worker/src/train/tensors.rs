//! The tensors of a checkpoint, and where their values are in an engine.

use super::TrainError;
use super::engine::{Array, Engine, Held, Moment};
use std::collections::HashMap;
use std::ops::Range;
use switchyard_checkpoint::format::Fault;
use switchyard_checkpoint::{Role, TensorSink, TensorSpec};

/// The tensors of a checkpoint that all ranks have in common.
pub(super) fn tensors(engine: &dyn Engine) -> Vec<TensorSpec> {
    let mut tensors: Vec<TensorSpec> = of_parameters(engine, String::new(), Role::Weight).collect();
    for moment in engine.moments().into_iter().filter(|moment| moment.held != Held::ByEach) {
        tensors.extend(of_parameters(engine, prefix(moment, 0), Role::Optimizer));
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

/// The tensors of a checkpoint that only this rank has.
pub(super) fn private_tensors(engine: &dyn Engine, rank: u32) -> Vec<TensorSpec> {
    let own = engine.moments().into_iter().filter(|moment| moment.held == Held::ByEach);
    own.flat_map(|moment| of_parameters(engine, prefix(moment, rank), Role::Optimizer)).collect()
}

fn of_parameters(engine: &dyn Engine, prefix: String, role: Role) -> impl Iterator<Item = TensorSpec> {
    let export = role == Role::Weight;
    engine.layout().parameters.iter().map(move |parameter| TensorSpec {
        name: format!("{prefix}{}", parameter.name),
        shape: parameter.shape.clone(),
        role,
        export_axes: parameter.export_axes.clone().filter(|_| export),
        export_names: if export { parameter.export_names.clone() } else { Vec::new() },
    })
}

/// Prefix of parameter names for an optimizer array of a rank.
fn prefix(Moment { name, held }: Moment, rank: u32) -> String {
    if held == Held::ByEach { format!("optimizer.{name}.rank-{rank}.") } else { format!("optimizer.{name}.") }
}

/// Maps tensor names to ranges of an engine's arrays.
pub(super) struct TensorIndex {
    ranges: HashMap<String, (Array, Range<usize>)>,
}

impl TensorIndex {
    /// Index of the tensors of this rank.
    pub fn new(engine: &dyn Engine, rank: u32) -> TensorIndex {
        let mut ranges = HashMap::new();
        let moments = engine.moments();
        for parameter in &engine.layout().parameters {
            ranges.insert(parameter.name.clone(), (Array::Weights, parameter.range()));
            for (number, moment) in moments.iter().enumerate() {
                ranges.insert(prefix(*moment, rank) + &parameter.name, (Array::Moments(number), parameter.range()));
            }
        }
        let mut at = 0;
        for (name, len) in engine.statistics() {
            ranges.insert(name, (Array::Statistics, at..at + len));
            at += len;
        }
        TensorIndex { ranges }
    }

    pub fn find(&self, name: &str) -> Option<(Array, Range<usize>)> {
        self.ranges.get(name).cloned()
    }
}

/// Writes the tensors of a checkpoint into an engine.
pub(super) struct EngineSink<'a> {
    engine: &'a mut dyn Engine,
    index: TensorIndex,
    failed: Option<TrainError>,
}

impl<'a> EngineSink<'a> {
    pub fn new(engine: &'a mut dyn Engine, rank: u32) -> EngineSink<'a> {
        let index = TensorIndex::new(engine, rank);
        EngineSink { engine, index, failed: None }
    }

    /// Ends the writes.
    ///
    /// # Errors
    /// The engine failed.
    pub fn finish(self) -> Result<(), TrainError> {
        self.failed.map_or(Ok(()), Err)
    }
}

impl TensorSink for EngineSink<'_> {
    fn write(&mut self, tensor: &TensorSpec, from: usize, values: &[f32]) -> Result<(), Fault> {
        if let Some((array, range)) = self.index.find(&tensor.name)
            && self.failed.is_none()
        {
            self.failed = self.engine.write(array, range.start + from, values).err();
        }
        Ok(())
    }
}
