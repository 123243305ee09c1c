//! Backfill: which reserved resources a job behind the head of the queue may use.

use super::reservation::Reservation;
use crate::index::Index;
use crate::job::{JobId, attempt_of, placement_of};
use jiff::Timestamp;
use switchyard_crds::TrainJob;
use switchyard_plan::cluster::queue_order::{Basis, JobAhead};

impl Index {
    /// Shares that a job may ignore: its own from earlier attempts that it is about to release, the
    /// held GPUs of its own and of lower-priority jobs, and the reservation of the head of the
    /// queue if that job is behind it, or can only start after this one ends or makes way.
    pub(crate) fn ignorable_takers(&self, job: &TrainJob, now: Timestamp) -> Vec<String> {
        let id = &JobId::of(&job.metadata);
        let position = self.queue_position(job);
        let mut takers = Vec::new();
        if placement_of(job).is_none() && job.status.as_ref().is_some_and(|status| status.placement.is_some()) {
            let attempt = attempt_of(job);
            takers.extend(self.takers_of(id, |of| of < attempt));
        }
        for (other, restart_holds) in &self.restart_holds {
            let is_lower = || {
                let other = self.job_of(other).map(|job| self.queue_position(job));
                !position.is_demoted() && other.is_some_and(|other| other.priority() < position.priority())
            };
            if other == id || is_lower() {
                takers.extend(restart_holds.iter().cloned());
            }
        }
        if let Some(held) = &self.queue.reservation {
            let makes_way = || held.is_open_to_preemptible(job, now, &self.queue.settings.policy);
            let is_behind = held.job != *id && position >= held.position;
            let is_free = !is_behind || self.backfill_basis(held, job, now).is_some() || makes_way();
            // Only a job of higher priority may take the nodes of a restarting gang.
            let can_keep_nodes = self.restart_holds.contains_key(id) && held.position.priority() <= position.priority();
            let own = job.status.as_ref().and_then(|status| status.placement.as_ref()).filter(|_| can_keep_nodes);
            let own: Vec<&str> = own.iter().flat_map(|own| &own.nodes).map(|node| node.node_name.as_str()).collect();
            let nodes = held.nodes.iter().map(|node| node.node_name.as_str());
            takers.extend(held.takers().zip(nodes).filter(|(_, node)| is_free || own.contains(node)).map(|(t, _)| t));
        }
        takers
    }

    /// The job ahead of this one that holds a reservation.
    pub(super) fn job_ahead(&self, job: &TrainJob, now: Timestamp) -> Option<JobAhead> {
        let id = JobId::of(&job.metadata);
        let held = self
            .queue
            .reservation
            .as_ref()
            .filter(|held| held.job != id && held.position < self.queue_position(job))?;
        Some(JobAhead {
            name: self.name_for(job, &held.position),
            nodes: held.nodes.iter().map(|node| node.node_name.clone()).collect(),
            start: held.start,
            ends_before: self.backfill_basis(held, job, now),
        })
    }

    fn backfill_basis(&self, held: &Reservation, job: &TrainJob, now: Timestamp) -> Option<Basis> {
        held.backfill_basis(job, now, self.queue.predictor.as_ref())
    }
}
