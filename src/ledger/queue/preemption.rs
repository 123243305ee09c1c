//! Preemption: which running jobs make way for the head of the queue.

use crate::index::Index;
use crate::job::{JobId, Key, attempt_of, is_live, placement_of};
use crate::usage::{Usage, UsageOverlay};
use switchyard_crds::{PlacedNode, Preemption, TrainJob};
use switchyard_plan::cluster::PlacementRequest;
use switchyard_plan::cluster::clock::exceeds_placed_limit;
use switchyard_plan::cluster::place_with_fabric::place_with_fabric;
use switchyard_plan::cluster::queue_order::{self, PreemptionOrder, QueuePosition};

/// Preemption victims, and the nodes that the preempting job would get.
pub struct PreemptionPlan {
    pub victims: Vec<Key>,
    pub(super) nodes: Vec<PlacedNode>,
}

/// The nodes a job would get if the shares of these takers were free.
fn place_without_takers(
    request: &PlacementRequest<'_>,
    usage: &mut Usage,
    takers: &[String],
) -> Option<Vec<PlacedNode>> {
    let overlay = UsageOverlay::new(usage, takers);
    place_with_fabric(request, overlay.nodes()).ok().map(|found| found.placed.status.nodes)
}

impl Index {
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
        if position.is_demoted() || !(preempts || self.jobs.values().any(|job| exceeds_placed_limit(job, now))) {
            return None;
        }
        let mut leaving = Vec::new();
        let mut candidates = Vec::new();
        for (key, job) in &self.jobs {
            let id = &JobId::of(&job.metadata);
            let attempt = attempt_of(job);
            let is_preempted = self.job_states.get(id).is_some_and(|state| state.preempted_attempt == Some(attempt));
            leaving.extend(self.takers_of(id, |of| of < attempt || is_preempted || !is_live(job)));
            let theirs = self.queue_position(job);
            let is_lower = preempts && theirs.priority() < position.priority();
            let is_overdue = theirs.priority() <= position.priority() && exceeds_placed_limit(job, now);
            if placement_of(job).is_some() && !is_preempted && (is_lower || is_overdue) {
                let order = PreemptionOrder::of(job, &theirs, now);
                candidates.push((order, key.clone(), self.takers_of(id, |of| of == attempt)));
            }
        }
        candidates.sort_by(|a, b| a.0.cmp(&b.0));
        let mut place_without = |without: &[usize]| {
            let theirs = without.iter().flat_map(|candidate| candidates[*candidate].2.iter());
            let takers: Vec<String> = leaving.iter().chain(theirs).cloned().collect();
            place_without_takers(request, &mut self.usage, &takers)
        };
        let chosen = queue_order::fewest(candidates.len(), |without| place_without(without).is_some())?;
        let nodes = place_without(&chosen)?;
        let victims: Vec<Key> = chosen.into_iter().map(|candidate| candidates[candidate].1.clone()).collect();
        for key in &victims {
            let Some(job) = self.jobs.get(key) else { continue };
            let attempt = attempt_of(job);
            let mut to = format!("{} (priority {})", self.name_for(job, position), position.priority());
            if exceeds_placed_limit(job, now) {
                to.push_str("; its limit was raised after placement, and the original limit has passed");
            }
            if let Some(state) = self.job_states.get_mut(&JobId::of(&job.metadata)) {
                state.preempted_attempt = Some(attempt);
                state.preempted_by = Some(to);
            }
        }
        Some(PreemptionPlan { victims, nodes })
    }
}
