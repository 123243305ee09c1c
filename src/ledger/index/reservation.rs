//! The reservation of the head of the queue, and backfill: which jobs may use it until the head can
//! start.

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

/// The reservation of the head of the queue.
#[derive(Debug)]
pub struct Reservation {
    pub job: JobId,
    pub turn: Turn,
    pub nodes: Vec<PlacedNode>,
    /// When the job can start there, provided that limits hold or run times stay the same. `None`
    /// if unknown, or if other jobs are being preempted for it.
    pub start: Option<(Timestamp, Basis)>,
    /// The start time that was first computed.
    pub first_start: Option<Timestamp>,
    /// When the reservation was computed.
    pub at: Timestamp,
    /// Since when the job has held a reservation.
    pub since: Timestamp,
    /// Whether resources were released or a limit changed since then.
    pub is_stale: bool,
}

impl Reservation {
    /// Names of the takers that hold its nodes in the usage.
    pub fn takers(&self) -> impl Iterator<Item = String> {
        (0..self.nodes.len()).map(|rank| format!("{HELD}{}/{rank}", self.job.uid))
    }

    /// The basis on which a job that starts now ends before the holder can start; `None` if it may
    /// still run then.
    pub fn is_begun_after(&self, job: &TrainJob, now: Timestamp, predictor: Option<&Predictor>) -> Option<Basis> {
        let (start, of_start) = self.start?;
        // A start promised by limits must not be delayed because of an estimate.
        let is_guess = of_start == Basis::RunTimes && self.first_start.is_some_and(|first| now <= first);
        let predictor = || predictor.filter(|_| is_guess);
        let (end, basis) = end_from(job, now)
            .map(|end| (end, Basis::Limits))
            .or_else(|| Some((predictor()?.end_of_next(job, now)?, Basis::RunTimes)))?;
        (end <= start).then_some(basis)
    }
}

/// Reserved nodes, and when their holder can start there.
pub(crate) type Place = (Vec<PlacedNode>, Option<(Timestamp, Basis)>);

impl Index {
    /// Where and when a job without room can start, once enough running jobs have reached their
    /// limits. `None` if jobs without a limit would have to end too, and there is no estimate for
    /// them.
    pub(crate) fn first_start(&mut self, question: &Question<'_>) -> Option<Place> {
        self.better_start(question).or_else(|| self.start_where(question, gang::fits))
    }

    /// Like `first_start`, for placements that satisfy `good`.
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
            // A job that ran past its limit can end at any moment.
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

    /// The latest end of a placed job; `None` if unknown, or if the job is not placed.
    pub(crate) fn end_of(&self, id: &JobId, now: Timestamp) -> Option<Timestamp> {
        let family = self.families.get(id)?;
        let known = family.key.as_ref().and_then(|key| self.jobs.get(key));
        let Some(job) = known.filter(|job| JobId::of(&job.metadata) == *id && is_live(job)) else {
            // The job is over or deleted, and its pods are being deleted.
            return Some(now);
        };
        // A job that was placed a moment ago starts now; the cache does not show its placement yet.
        let is_assumed = placement_of(job).is_none() && family.assumed.is_some();
        if is_assumed { end_from(job, now) } else { promised_end(job) }
    }
}

/// The smallest number of jobs with these takers that have to end, in this order, until every pod
/// of another job has room on a node of its own; `None` if even all of them are not enough.
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

/// The latest end of a job that is placed, or is placed now.
fn end_from(job: &TrainJob, now: Timestamp) -> Option<Timestamp> {
    let limit = job.spec.active_deadline_seconds.map(SignedDuration::from_secs);
    deadline(job).or_else(|| now.checked_add(limit?).ok())
}

/// Whether all reserved nodes are still usable.
pub(crate) fn is_usable(held: &Reservation, usage: &Usage) -> bool {
    let nodes = usage.nodes();
    held.nodes
        .iter()
        .all(|placed| nodes.get(&placed.node_name).is_some_and(|node| node.facts.ready && !node.facts.unschedulable))
}
