//! Folds a run directory while it is read, in bounded memory regardless of the run's length.

use super::documents::{Document, Documents, Node, Process};
use super::events::{EventLine, Events};
use super::fold::Fold;
use super::kernels::KernelFacts;
use super::markup::shortened;
use super::sample::{Line, Sample};
use std::collections::BTreeMap;
use switchyard_worker_contract::event::Event;
use switchyard_worker_contract::kernels::KernelTimes;
use switchyard_worker_contract::layers::LayerTimes;
use switchyard_worker_contract::prediction::Gpu;

/// Most ranks tracked separately; no job has more.
const MAX_RANKS: usize = 4096;
/// Most notes about unreadable data.
const MAX_NOTES: usize = 50;

/// Everything known about a run.
#[derive(Debug, Default)]
pub struct Record {
    pub(super) documents: Documents,
    pub(super) events: Events,
    /// From the ranks' records.
    steps: BTreeMap<u32, Fold>,
    /// From progress events, for runs without records.
    progress: BTreeMap<u32, Fold>,
    /// From ranks that were profiled on CPUs.
    layers: BTreeMap<u32, LayerTimes>,
    /// From ranks that were profiled on GPUs.
    kernels: BTreeMap<u32, KernelTimes>,
    /// The GPUs' capabilities from a device file.
    gpu: Option<Gpu>,
    pub(super) synthetic_step_ms: Option<f64>,
    pub(super) notes: Vec<String>,
}

impl Record {
    /// Creates an empty record.
    pub fn new() -> Record {
        Record::default()
    }

    /// Reads a document in the run directory. Adds a note if it is unreadable.
    pub fn document(&mut self, document: Document, text: &str) {
        if let Err(fault) = self.documents.read(document, text) {
            self.note(fault);
        }
    }

    /// Reads a line of `events.jsonl`; lines must come in order.
    pub fn event_line(&mut self, line: &str) {
        let line: EventLine = match serde_json::from_str(line) {
            Ok(line) => line,
            Err(_) => {
                self.events.unreadable += 1;
                return;
            }
        };
        if let Event::Progress(progress) = &line.event {
            let end_us = line.time.map(|time| time.as_microsecond());
            if let Some(sample) = Sample::of_progress(progress, line.attempt, end_us) {
                add(&mut self.progress, line.rank, &sample);
            }
        }
        self.events.add(&line);
    }

    /// Reads a line of a rank's step record. Lines must come in order, one rank after another,
    /// ascending.
    pub fn step_line(&mut self, rank: u32, line: &str) {
        let sample = serde_json::from_str::<Line>(line).ok().and_then(|line| Sample::of_line(&line));
        match sample {
            Some(sample) => add(&mut self.steps, rank, &sample),
            None => fold_of(&mut self.steps, rank).into_iter().for_each(|fold| fold.unreadable += 1),
        }
    }

    /// Reads a rank's kernel times. Adds a note if they are unreadable.
    pub fn kernel_times(&mut self, rank: u32, text: &str) {
        match serde_json::from_str::<KernelTimes>(text) {
            Ok(times) if times.steps > 0 => drop(self.kernels.insert(rank, times)),
            Ok(_) => self.note(format!("the kernels of rank {rank} were timed in no step")),
            Err(error) => self.note(format!("the kernels of rank {rank} cannot be read: {error}")),
        }
    }

    /// Reads a rank's layer times. Adds a note if they are unreadable.
    pub fn layer_times(&mut self, rank: u32, text: &str) {
        match serde_json::from_str::<LayerTimes>(text) {
            Ok(times) if times.steps > 0 => drop(self.layers.insert(rank, times)),
            Ok(_) => self.note(format!("the layers of rank {rank} were timed in no step")),
            Err(error) => self.note(format!("the layers of rank {rank} cannot be read: {error}")),
        }
    }

    /// Sets the capabilities of the run's GPUs, which its kernels are compared with.
    pub fn device(&mut self, gpu: Gpu) {
        self.gpu = Some(gpu);
    }

    /// Kernels of this rank, otherwise of the first profiled one.
    pub(super) fn kernels(&self, rank: u32) -> Option<KernelFacts> {
        let (rank, times) = self.kernels.get_key_value(&rank).or(self.kernels.first_key_value())?;
        Some(KernelFacts { rank: *rank, times: times.clone(), gpu: self.gpu.clone() })
    }

    /// Layers of this rank, otherwise of the first profiled one.
    pub(super) fn layers(&self, rank: u32) -> Option<(u32, LayerTimes)> {
        let (rank, times) = self.layers.get_key_value(&rank).or(self.layers.first_key_value())?;
        Some((*rank, times.clone()))
    }

    /// Sets the step time of the same job with synthetic data, ms. If it is equal, input is not the
    /// bottleneck.
    pub fn synthetic(&mut self, step_ms: f64) {
        self.synthetic_step_ms = Some(step_ms).filter(|ms| ms.is_finite() && *ms > 0.0);
    }

    /// Mean wall time of a step, ms.
    pub fn step_ms(&self) -> Option<f64> {
        let mean = self.ranks().values().find_map(|fold| fold.typical().mean())?;
        Some(mean.total()).filter(|ms| *ms > 0.0)
    }

    /// Adds a note that readers of the report must see.
    pub fn note(&mut self, text: String) {
        if self.notes.len() < MAX_NOTES {
            self.notes.push(shortened(&text, 300));
        }
    }

    /// Whether the ranks left step records; otherwise there are only progress events.
    pub(super) fn has_steps(&self) -> bool {
        self.steps.values().any(|fold| fold.last_step > 0)
    }

    /// Folded steps by rank.
    pub(super) fn ranks(&self) -> &BTreeMap<u32, Fold> {
        if self.has_steps() { &self.steps } else { &self.progress }
    }

    /// Ranks of the job.
    pub(super) fn world(&self) -> u32 {
        let nodes = self.documents.plan.iter().flat_map(|plan| &plan.nodes);
        let planned: usize = nodes.map(|node| node.processes.len()).sum();
        let seen = [self.ranks(), &self.progress].map(|folds| folds.last_key_value().map_or(0, |(rank, _)| rank + 1));
        let ready = self.events.ready.last_key_value().map_or(0, |(rank, _)| rank.saturating_add(1));
        seen.into_iter().chain([ready, planned as u32]).max().unwrap_or_default()
    }

    /// A rank's node and process in the plan.
    pub(super) fn planned(&self, rank: u32) -> Option<(&Node, &Process)> {
        let nodes = self.documents.plan.iter().flat_map(|plan| &plan.nodes);
        nodes.flat_map(|node| node.processes.iter().map(move |process| (node, process))).find(|(_, p)| p.rank == rank)
    }

    /// Everything that is missing or could not be read.
    pub(super) fn gaps(&self) -> Vec<String> {
        let mut gaps = self.notes.clone();
        if self.events.unreadable > 0 {
            gaps.push(format!("events.jsonl: {} lines cannot be read", self.events.unreadable));
        }
        let torn = self.steps.iter().filter(|(_, fold)| fold.unreadable > 0);
        gaps.extend(
            torn.take(MAX_NOTES)
                .map(|(rank, fold)| format!("steps of rank {rank}: {} lines cannot be read", fold.unreadable)),
        );
        if self.has_steps() {
            let without = |rank: &u32| self.steps.get(rank).is_none_or(|fold| fold.last_step == 0);
            let missing: Vec<u32> = (0..self.world().min(MAX_RANKS as u32)).filter(without).collect();
            if !missing.is_empty() {
                gaps.push(format!("no record of the steps of ranks {}", switchyard_core::units::rank_list(missing)));
            }
        } else if !self.progress.is_empty() {
            gaps.push(
                "no record of single steps: the figures are means of the intervals of progress events, checkpoints are within `other`, \
                 and what was hidden of an all-reduce is not known"
                    .into(),
            );
        } else {
            gaps.push("no record of steps and no progress events: no step is known".into());
        }
        gaps
    }
}

/// Adds a step of a rank. The first rank with a step also keeps the curves.
fn add(folds: &mut BTreeMap<u32, Fold>, rank: u32, sample: &Sample) {
    let first = folds.get(&rank).is_none_or(|fold| fold.last_step == 0);
    let with_curves = first && folds.values().all(|fold| fold.curves.is_none());
    if let Some(fold) = fold_of(folds, rank) {
        if with_curves {
            fold.curves = Some(Box::default());
        }
        fold.add(sample);
    }
}

/// The fold of a rank; `None` for ranks beyond the limit.
fn fold_of(folds: &mut BTreeMap<u32, Fold>, rank: u32) -> Option<&mut Fold> {
    ((rank as usize) < MAX_RANKS).then(|| folds.entry(rank).or_default())
}
