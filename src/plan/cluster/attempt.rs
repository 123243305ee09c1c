//! The current attempt: its pods by node rank, and facts about them as a group.

use super::view::{DEFAULT_SCHEDULER, PodView};
use super::{JobSnapshot, clock};
use crate::ValidJob;
use crate::status::Draft;
use jiff::{SignedDuration, Timestamp};
use switchyard_crds::{PlacedNode, conditions};

/// Time within which a scheduler is expected to report on a pod.
const SCHEDULER_RESPONSE_TIME: SignedDuration = SignedDuration::from_secs(10);
/// How long a gang keeps its nodes if no scheduler reports on its pods and its scheduler has never
/// been observed.
const NO_SCHEDULER_TIMEOUT: SignedDuration = SignedDuration::from_secs(60);

/// The current attempt and its pods.
pub(super) struct Attempt<'a> {
    pub snapshot: JobSnapshot<'a>,
    pub valid: &'a ValidJob,
    pub number: u32,
    /// Pods of this attempt by node rank, `None` if the pod does not exist.
    pub pods: Vec<Option<&'a PodView>>,
    /// The gang is placed: gates may be lifted, and a missing pod has been deleted.
    pub placed: bool,
}

impl<'a> Attempt<'a> {
    pub fn of(snapshot: &JobSnapshot<'a>, valid: &'a ValidJob, number: u32) -> Attempt<'a> {
        let mut pods = vec![None; valid.request.nodes as usize];
        for pod in snapshot.pods.iter().copied().filter(|pod| pod.attempt == number) {
            if let Some(slot) = pods.get_mut(pod.node_rank as usize) {
                *slot = Some(pod);
            }
        }
        let status = snapshot.job.status.as_ref();
        let placed = status.is_some_and(|status| status.is(conditions::PLACED));
        Attempt { snapshot: *snapshot, valid, number, pods, placed }
    }

    pub fn now(&self) -> Timestamp {
        self.snapshot.rules.now
    }

    pub fn duration(&self) -> SignedDuration {
        let since = self.snapshot.job.status.as_ref().and_then(|status| status.attempt_time.as_ref());
        since.map(|since| self.now().duration_since(since.0)).unwrap_or_default()
    }

    pub fn existing(&self) -> Vec<&'a PodView> {
        self.pods.iter().copied().flatten().collect()
    }

    pub fn all(&self, is: impl Fn(&PodView) -> bool) -> bool {
        self.pods.iter().all(|pod| pod.is_some_and(&is))
    }

    pub fn count(&self, is: impl Fn(&PodView) -> bool) -> usize {
        self.pods.iter().flatten().filter(|pod| is(pod)).count()
    }

    /// Whether the pod of this rank exists but has lost its labels.
    pub fn is_unlabelled(&self, node_rank: u32) -> bool {
        self.snapshot.unlabelled.contains_key(&self.valid.pod_name(self.number, node_rank))
    }

    /// When the gang was placed.
    pub fn placed_at(&self) -> Option<Timestamp> {
        let status = self.snapshot.job.status.as_ref()?;
        status.condition(conditions::PLACED).map(|condition| condition.last_transition_time.0)
    }

    pub fn draft(&self) -> Draft<'a> {
        let mut draft = Draft::new(self.snapshot.job, self.now());
        let pods = self.existing();
        draft.count(&pods, self.valid.request.nodes as i32);
        draft.newest_figures(&self.snapshot, &pods);
        draft
    }

    /// Whether the job is complete: all pods that it waits for have succeeded.
    pub fn is_complete(&self) -> bool {
        let mut awaited = (0..).zip(&self.pods).filter(|(rank, _)| self.valid.awaits(*rank)).peekable();
        awaited.peek().is_some() && awaited.all(|(_, pod)| pod.is_some_and(PodView::has_succeeded))
    }

    /// Planned node and devices of a pod.
    pub fn planned(&self, node_rank: u32) -> Option<&'a PlacedNode> {
        let nodes = &self.snapshot.job.status.as_ref()?.placement.as_ref()?.nodes;
        let first = i32::try_from(self.valid.first_rank(node_rank)).ok()?;
        // The list is written in rank order, but check the rank because a status can be edited.
        let by_rank = nodes.get(node_rank as usize).filter(|node| node.first_rank == first);
        by_rank.or_else(|| nodes.iter().find(|node| node.first_rank == first))
    }

    /// Time limit for binding the gang.
    pub fn schedule_timeout(&self) -> SignedDuration {
        let requested = SignedDuration::from_secs(self.snapshot.job.spec.gang_policy.schedule_timeout_seconds.into());
        let requested = requested.min(self.snapshot.longest_schedule_timeout);
        if !self.snapshot.scheduler_is_known && self.all(|pod| self.unresponsive_scheduler(pod).is_some()) {
            requested.min(NO_SCHEDULER_TIMEOUT)
        } else {
            requested
        }
    }

    /// Message for an unbound pod that no scheduler has reported on. `None` if one has, or still
    /// has time to.
    pub fn unresponsive_scheduler(&self, pod: &PodView) -> Option<String> {
        let is_silent = pod.node.is_none() && !pod.gated && pod.unschedulable.is_none();
        let by = self.scheduler_report_due(self.placed_at()?);
        (is_silent && clock::is_over(by, SCHEDULER_RESPONSE_TIME, self.now())).then(|| {
            let name = self.valid.of_pod(pod.node_rank).pod.spec.scheduler_name.as_deref().unwrap_or(DEFAULT_SCHEDULER);
            if self.snapshot.scheduler_is_known {
                return format!("the scheduler {name} has not reported on it yet");
            }
            format!("no scheduler has reported on it: is there one named {name} (spec.template.spec.schedulerName)?")
        })
    }

    /// When an unresponsive scheduler is reported.
    pub fn scheduler_report_due(&self, placed: Timestamp) -> Timestamp {
        placed.saturating_add(SCHEDULER_RESPONSE_TIME).unwrap_or(Timestamp::MAX)
    }

    /// Deadline for the scheduler to bind the gang.
    pub fn schedule_deadline(&self, placed: Timestamp) -> Timestamp {
        placed.saturating_add(self.schedule_timeout()).unwrap_or(Timestamp::MAX)
    }
}
