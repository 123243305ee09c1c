//! Preemption: which running jobs make way for the head of the queue.

use super::room::WithoutJobs;
use crate::index::Index;
use crate::job::{JobId, Key, attempt_of, is_live, key_of, placement_of};
use crate::usage::UsageOverlay;
use jiff::Timestamp;
use switchyard_core::units::grouped;
use switchyard_crds::{PlacedNode, Preemption, TrainJob};
use switchyard_plan::cluster::PlacementRequest;
use switchyard_plan::cluster::clock::exceeds_placed_limit;
use switchyard_plan::cluster::queue_order::{PreemptionOrder, QueuePosition};
use switchyard_plan::job::{pods, total_gpus};

/// Preemption victims, and the nodes that the preempting job would get.
pub struct PreemptionPlan {
    pub victims: Vec<Key>,
    pub(super) nodes: Vec<PlacedNode>,
}

/// The head of the queue, as the queue policy sees it.
pub(super) struct PolicyHead {
    /// Its position without its reservation, which must not make it older than running jobs.
    position: QueuePosition,
    gpus: i64,
}

impl PolicyHead {
    pub(super) fn of(index: &Index, request: &PlacementRequest<'_>) -> PolicyHead {
        // A node without GPUs counts as one, as in the cost.
        let gpus = i64::try_from(total_gpus(request.job)).unwrap_or(i64::MAX).max(pods(request.job).into());
        PolicyHead { position: index.position_without_reservation(request.job), gpus }
    }

    /// From when it may preempt a running job by the policy; `None` if never.
    pub(super) fn preempts_from(
        &self,
        index: &Index,
        job: &TrainJob,
        theirs: &QueuePosition,
        now: Timestamp,
    ) -> Option<Timestamp> {
        index.queue.settings.policy.preemptible_from(job, theirs, &self.position, self.gpus, now)
    }

    /// The cost and the gain of preempting all of these jobs, in GPU seconds. Jobs that exceed the
    /// limit of their placement make way at any cost.
    fn cost_and_gain(&self, index: &Index, jobs: Vec<&TrainJob>, now: Timestamp) -> (i64, i64) {
        let policy = &index.queue.settings.policy;
        let jobs: Vec<&TrainJob> = jobs.into_iter().filter(|job| !exceeds_placed_limit(job, now)).collect();
        let cost: i64 = jobs.iter().map(|job| policy.cost(job, now)).sum();
        (cost, policy.gain(jobs.into_iter(), self.gpus, now))
    }
}

impl Index {
    /// When the head of the queue can next preempt jobs by the policy, if that is not now.
    pub(super) fn preemption_due(&self, key: &Key, now: Timestamp) -> Option<Timestamp> {
        let held = self.queue.reservation.as_ref().filter(|_| self.queue.settings.policy.preempts())?;
        let holder = self.job_of(&held.job).filter(|holder| key_of(&holder.metadata) == *key);
        holder.and(held.start).map(|(at, _)| at).filter(|at| *at > now && !held.is_vacated)
    }

    /// Whether a job may preempt others, according to its policy and the priority classes of its
    /// pods.
    fn preempts(&self, job: &TrainJob) -> bool {
        let pods = self.job_states.get(&JobId::of(&job.metadata)).into_iter().flat_map(|state| state.pods.values());
        let mut never = pods.filter_map(|pod| pod.never_preempts.as_ref());
        job.spec.topology_policy.preemption == Preemption::LowerPriority
            && never.all(|class| self.queue.settings.gang_classes.contains(class))
    }

    /// Selects the jobs to preempt; none if enough nodes are already being vacated. `None` if
    /// preemption would not help.
    pub fn plan_preemption(
        &mut self,
        request: &PlacementRequest<'_>,
        position: &QueuePosition,
    ) -> Option<PreemptionPlan> {
        let now = request.rules.now;
        let preempts = self.preempts(request.job);
        let by_policy = self.queue.settings.policy.preempts();
        let is_possible = preempts || by_policy || self.jobs.values().any(|job| exceeds_placed_limit(job, now));
        if position.is_demoted() || !is_possible {
            return None;
        }
        let head = PolicyHead::of(self, request);
        let mut leaving = Vec::new();
        let mut candidates = Vec::new();
        for (key, job) in &self.jobs {
            let id = &JobId::of(&job.metadata);
            let attempt = attempt_of(job);
            let is_preempted = self.job_states.get(id).is_some_and(|state| state.preempted_attempt == Some(attempt));
            leaving.extend(self.takers_of(id, |of| of < attempt || is_preempted || !is_live(job)));
            if placement_of(job).is_none() || is_preempted {
                continue;
            }
            let theirs = self.queue_position(job);
            let is_lower = preempts && theirs.priority() < position.priority();
            let is_overdue = theirs.priority() <= position.priority() && exceeds_placed_limit(job, now);
            let makes_way = || head.preempts_from(self, job, &theirs, now).is_some_and(|from| from <= now);
            if is_lower || is_overdue || makes_way() {
                let order = PreemptionOrder::of(job, &theirs, now);
                let order = if by_policy && !is_lower { order.by_start(job) } else { order };
                candidates.push((order, key.clone(), self.takers_of(id, |of| of == attempt)));
            }
        }
        candidates.sort_by(|a, b| a.0.cmp(&b.0));
        let (candidates, takers): (Vec<(PreemptionOrder, Key)>, Vec<Vec<String>>) =
            candidates.into_iter().map(|(order, key, takers)| ((order, key), takers)).unzip();
        let mut usage = UsageOverlay::new(&mut self.usage, &leaving);
        let (chosen, nodes) = WithoutJobs::new(request, &mut usage, &takers).fewest()?;
        drop(usage);
        let by_policy = |candidate: &&usize| !(preempts && candidates[**candidate].0.priority() < position.priority());
        let jobs = chosen.iter().filter(by_policy).filter_map(|candidate| self.jobs.get(&candidates[*candidate].1));
        let (cost, gain) = head.cost_and_gain(self, jobs.map(|job| &**job).collect(), now);
        if cost > gain {
            return None;
        }
        let victims: Vec<Key> = chosen.into_iter().map(|candidate| candidates[candidate].1.clone()).collect();
        for (number, key) in victims.iter().enumerate() {
            let Some(job) = self.jobs.get(key) else { continue };
            let attempt = attempt_of(job);
            let name = self.name_for(job, position);
            let is_lower = preempts && self.queue_position(job).priority() < position.priority();
            let mut to = match self.queue.settings.policy.policy {
                _ if is_lower || exceeds_placed_limit(job, now) => format!("{name} (priority {})", position.priority()),
                policy => format!(
                    "{name}, which comes first in the queue (queue policy {policy:?}: loses {} GPU seconds, gains {})",
                    grouped(cost.unsigned_abs()),
                    grouped(gain.unsigned_abs())
                ),
            };
            if exceeds_placed_limit(job, now) {
                to.push_str("; its limit was raised after placement, and the original limit has passed");
            }
            if let Some(state) = self.job_states.get_mut(&JobId::of(&job.metadata)) {
                state.preempted_attempt = Some(attempt);
                state.preempted_by = Some(to);
                state.preemption_gain = if number == 0 { gain } else { 0 };
            }
        }
        Some(PreemptionPlan { victims, nodes })
    }
}
