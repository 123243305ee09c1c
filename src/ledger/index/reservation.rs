//! What the head of the queue holds for itself, and who may use it until the head can begin.

use super::Index;
use crate::job::{JobId, is_live, placement_of};
use crate::predictor::Predictor;
use crate::usage::{HELD, Usage, Without};
use jiff::{SignedDuration, Timestamp};
use std::collections::{BTreeMap, BTreeSet};
use switchyard_crds::{PlacedNode, TrainJob};
use switchyard_plan::cluster::clock::{deadline, promised_end};
use switchyard_plan::cluster::find::find;
use switchyard_plan::cluster::reserve::{few, least};
use switchyard_plan::cluster::turn::{Basis, Turn};
use switchyard_plan::cluster::view::NodeView;
use switchyard_plan::cluster::{Demand, Question, gang};

/// What the head of the queue holds.
#[derive(Debug)]
pub struct Reservation {
    pub job: JobId,
    pub turn: Turn,
    pub nodes: Vec<PlacedNode>,
    /// When the job can begin there, if limits hold or run times are as before. `None`: nobody knows, or other jobs give way to it.
    pub start: Option<(Timestamp, Basis)>,
    /// When it could have begun as was found first.
    pub first_start: Option<Timestamp>,
    /// When that was found.
    pub at: Timestamp,
    /// Since when the job has held nodes.
    pub since: Timestamp,
    /// Something became free since then, or a limit changed.
    pub is_stale: bool,
}

impl Reservation {
    /// Names under which its nodes are taken in the usage.
    pub fn takers(&self) -> impl Iterator<Item = String> {
        (0..self.nodes.len()).map(|rank| format!("{HELD}{}/{rank}", self.job.uid))
    }

    /// By what a job ends before the one that holds these nodes can begin, if it starts now; `None`: by nothing.
    pub fn is_begun_after(&self, job: &TrainJob, now: Timestamp, predictor: Option<&Predictor>) -> Option<Basis> {
        let (start, of_start) = self.start?;
        // What limits promise, no guess puts off.
        let is_guess = of_start == Basis::RunTimes && self.first_start.is_some_and(|first| now <= first);
        let predictor = || predictor.filter(|_| is_guess);
        let (end, basis) = end_from(job, now)
            .map(|end| (end, Basis::Limits))
            .or_else(|| Some((predictor()?.end_of_next(job, now)?, Basis::RunTimes)))?;
        (end <= start).then_some(basis)
    }
}

/// Nodes that are held, and when their holder can begin there.
pub(crate) type Place = (Vec<PlacedNode>, Option<(Timestamp, Basis)>);

impl Index {
    /// Where and when a job that finds no room can begin, once enough of the jobs that run have ended by their limits. `None`: those without
    /// a limit would have to end too, and nobody guesses when.
    pub(crate) fn first_start(&mut self, question: &Question<'_>) -> Option<Place> {
        self.better_start(question).or_else(|| self.start_where(question, gang::fits))
    }

    /// The same for places that are good enough.
    pub(super) fn start_where(
        &mut self,
        question: &Question<'_>,
        good: impl Fn(&Question<'_>, &BTreeMap<String, NodeView>) -> bool,
    ) -> Option<Place> {
        let now = question.rules.now;
        let mut ending: Vec<(Timestamp, Basis, JobId)> = self
            .families
            .keys()
            .filter(|id| **id != JobId::of(&question.job.metadata))
            // One that ran longer than its limit ends at any moment.
            .filter_map(|id| {
                let by_limit = || Some((self.end_of(id, now)?, Basis::Limits));
                let guessed =
                    || Some((self.predictor.as_ref()?.end_of_running(self.job_of(id)?, now)?, Basis::RunTimes));
                let (end, basis) = by_limit().or_else(guessed)?;
                Some((end.max(now), basis, id.clone()))
            })
            .collect();
        ending.sort();
        let takers: Vec<Vec<String>> = ending.iter().map(|(.., id)| self.takers_of(id, |_| true)).collect();
        let few = few_ended(question, &mut self.usage, &takers)?;
        let usage = &mut self.usage;
        let fits = |ended: usize| good(question, Without::new(usage, &takers[..ended].concat()).nodes());
        let enough = least(few, ending.len(), fits)?;
        let at = ending[..enough].last().map_or(now, |(end, ..)| *end);
        let basis = ending[..enough].iter().map(|(_, basis, _)| *basis).max().unwrap_or(Basis::Limits);
        let without = Without::new(&mut self.usage, &takers[..enough].concat());
        find(question, without.nodes()).ok().map(|found| (found.placed.status.nodes, Some((at, basis))))
    }

    /// When a job that has a place has ended at the latest; `None`: nobody knows, or it has none.
    pub(crate) fn end_of(&self, id: &JobId, now: Timestamp) -> Option<Timestamp> {
        let family = self.families.get(id)?;
        let known = family.key.as_ref().and_then(|key| self.jobs.get(key));
        let Some(job) = known.filter(|job| JobId::of(&job.metadata) == *id && is_live(job)) else {
            // Its pods are being deleted.
            return Some(now);
        };
        // One that was placed a moment ago, which the cache does not show yet, begins now.
        let is_assumed = placement_of(job).is_none() && family.assumed.is_some();
        if is_assumed { end_from(job, now) } else { promised_end(job) }
    }
}

/// The fewest of the jobs with these takers that have to end, in this order, for all pods of another one to have room on a node each; `None`: not
/// even all of them.
fn few_ended(question: &Question<'_>, usage: &mut Usage, takers: &[Vec<String>]) -> Option<usize> {
    let demand = Demand::of(question);
    let open = usage.nodes().values().filter(|node| demand.has_room(node)).count();
    let mut without = Without::new::<&str>(usage, &[]);
    let gains = takers.iter().map(|takers| {
        let names: BTreeSet<String> =
            takers.iter().filter_map(|taker| Some(without.share(taker)?.node.clone())).collect();
        let with_room = |usage: &Usage| {
            names.iter().filter_map(|name| usage.nodes().get(name)).filter(|node| demand.has_room(node)).count()
        };
        let before = with_room(&without);
        without.and(takers);
        with_room(&without) - before
    });
    few(open, question.valid.request.nodes, gains)
}

/// When a job has ended at the latest, if it has a place or gets one now.
fn end_from(job: &TrainJob, now: Timestamp) -> Option<Timestamp> {
    let limit = job.spec.active_deadline_seconds.map(SignedDuration::from_secs);
    deadline(job).or_else(|| now.checked_add(limit?).ok())
}

/// Whether all nodes that are held may still be used.
pub(crate) fn is_usable(held: &Reservation, usage: &Usage) -> bool {
    let nodes = usage.nodes();
    held.nodes
        .iter()
        .all(|placed| nodes.get(&placed.node_name).is_some_and(|node| node.facts.ready && !node.facts.unschedulable))
}
