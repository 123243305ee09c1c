//! The inputs of a job's placement: its pods' requests, the nodes it avoids, its shares.

use super::Index;
use crate::devices::taker;
use crate::job::{JobId, attempt_of};
use crate::usage::Share;
use jiff::Timestamp;
use std::collections::BTreeMap;
use switchyard_crds::{PlacedNode, TrainJob};
use switchyard_plan::cluster::admitted::Admitted;
use switchyard_plan::cluster::{Avoided, PlacementRequest, PlacementRules, avoidance, ownership};
use switchyard_plan::objects::Kind;
use switchyard_plan::{ValidJob, validate};

impl Index {
    pub(crate) fn job_of(&self, id: &JobId) -> Option<&TrainJob> {
        let key = self.job_states.get(id)?.key.as_ref()?;
        self.jobs.get(key).map(|job| &**job).filter(|job| JobId::of(&job.metadata) == *id)
    }

    /// UIDs of the job's pods in the attempts that `is_of` selects, and the takers of their
    /// resource claims.
    pub fn takers_of(&self, job: &JobId, is_of: impl Fn(u32) -> bool) -> Vec<String> {
        let Some(state) = self.job_states.get(job) else { return Vec::new() };
        let pods = state.pods.values().filter(|pod| is_of(pod.attempt));
        // A claim is named after its pod, and keeps its devices for a while after the pod is gone.
        let is_named = |name: &str| ownership::position(name).is_some_and(|(attempt, _)| is_of(attempt));
        let is_theirs = |(kind, name): &(Kind, String)| *kind == Kind::ResourceClaim && is_named(name);
        let claims = state.objects.iter().filter(|(object, _)| is_theirs(object));
        pods.map(|pod| pod.uid.clone()).chain(claims.map(|(_, claim)| taker(&claim.uid))).collect()
    }

    /// The resource requests of the pods of the job's current attempt.
    pub fn admitted(&self, job: &TrainJob, valid: &ValidJob) -> Admitted {
        let attempt = attempt_of(job);
        let state = self.job_states.get(&JobId::of(&job.metadata));
        let pods = state.into_iter().flat_map(|state| state.pods.values()).filter(|pod| pod.attempt == attempt);
        Admitted::of(valid, job.status.as_ref(), pods)
    }

    /// Nodes that a job avoids because of its own failures there, or those of other jobs.
    pub fn avoided_nodes(&self, job: &JobId, now: Timestamp) -> BTreeMap<String, Avoided> {
        let status = self.job_of(job).and_then(|job| job.status.as_ref());
        let mut avoided_nodes =
            status.map(|status| avoidance::avoided(status, self.usage.nodes(), now)).unwrap_or_default();
        for (node, avoided) in self.incidents.avoided(job, self.usage.nodes(), now) {
            if !avoided.is_last_resort || !avoided_nodes.contains_key(&node) {
                avoided_nodes.insert(node, avoided);
            }
        }
        avoided_nodes
    }

    /// The earliest time at which one of the avoided nodes becomes usable again.
    pub fn avoidance_ends(&self, job: &JobId, now: Timestamp) -> Option<Timestamp> {
        let own = self.job_of(job).and_then(|job| avoidance::next(job.status.as_ref()?, now));
        own.into_iter().chain(self.incidents.next(self.usage.nodes(), now)).min()
    }

    /// Runs `f` with the placement request of the job as it is now; `None` if the job is
    /// invalid.
    pub(crate) fn with_request<R>(
        &mut self,
        job: &TrainJob,
        rules: PlacementRules<'_>,
        f: impl FnOnce(&mut Index, &PlacementRequest<'_>) -> R,
    ) -> Option<R> {
        let valid = validate(job).ok()?;
        let admitted = self.admitted(job, &valid);
        let avoided_nodes = self.avoided_nodes(&JobId::of(&job.metadata), rules.now);
        let request =
            PlacementRequest { job, valid: &valid, rules, admitted: &admitted, avoided_nodes: &avoided_nodes };
        Some(f(self, &request))
    }

    /// Gives each taker the share of one pod of the job, in rank order, on one of these nodes each.
    pub fn hold(&mut self, request: &PlacementRequest<'_>, takers: impl Iterator<Item = String>, nodes: &[PlacedNode]) {
        for ((taker, placed), rank) in takers.zip(nodes).zip(0..) {
            let share = Share {
                node: placed.node_name.clone(),
                amount: request.admitted.requests_of(request.valid, rank).clone(),
                gpus: placed.gpus.clone(),
                ..Share::default()
            };
            self.usage.set_share(&taker, Some(share));
        }
    }
}
