//! The queue of jobs that wait for room. The rules are in `plan::cluster::queue_order` and
//! `plan::cluster::forecast`; this module applies them to the index.
//!
//! ```text
//! job ─> standing ─┬─> order         position of a job, and the head of the queue
//!                  ├─> head          the head's reservation, at most for reservation_limit
//!                  ├─> preemption    jobs that make way for the head
//!                  └─> backfill      reserved nodes that a job behind the head may use
//! plan of the job ─> settle ─> entries (changes worth a new plan)
//! fairness, predictor ─> order, reservation          forecast: start times
//! room ─> preemption, reservation
//! ```
//!
//! All callers go through the same two calls around a plan: [`Index::standing`] before it, and
//! [`Index::settle`] after it.

mod backfill;
mod entries;
mod fairness;
mod forecast;
mod head;
mod leader_state;
mod order;
mod placement_delay;
mod predictor;
mod preemption;
mod reservation;
mod reservation_limit;
mod room;

pub use fairness::Weights;
pub use leader_state::LeaderState;
pub use placement_delay::PlacementDelay;
pub use predictor::PredictorSettings;
pub use preemption::PreemptionPlan;
pub use reservation::Reservation;

use crate::index::Index;
use crate::job::{JobId, Key, key_of};
use entries::{QueueEntry, WakeCondition};
use fairness::Fairness;
use forecast::Forecasts;
use jiff::{SignedDuration, Timestamp};
use predictor::Predictor;
use std::collections::{BTreeMap, BTreeSet};
use switchyard_crds::TrainJob;
use switchyard_plan::cluster::forecast::EARLY;
use switchyard_plan::cluster::queue_order::{JobAhead, Slowdown};
use switchyard_plan::cluster::queue_policy::PolicySettings;
use switchyard_plan::cluster::{Demand, PlacementRequest, PlacementRules, WaitReason};

/// The administrator's settings of the queue.
#[derive(Debug, Clone, PartialEq)]
pub struct QueueSettings {
    /// Upper bound on the time for which the head may hold its reservation; `None` if unbounded.
    pub longest_reservation: Option<SignedDuration>,
    /// Estimates run times of jobs without limits; `None` disables the estimates.
    pub predictor: Option<PredictorSettings>,
    /// Orders the queue by past usage of the namespaces; `None` disables fair share.
    pub weights: Option<Weights>,
    /// Which jobs of equal priority come first, and whether they preempt others.
    pub policy: PolicySettings,
    /// How long gangs wait for a better placement; `None` if they do not.
    pub placement_delay: Option<PlacementDelay>,
    /// Priority classes whose `preemptionPolicy: Never` applies to the scheduler only.
    pub gang_classes: BTreeSet<String>,
    /// Whether messages in a job's status name jobs of other namespaces.
    pub names_others: bool,
    /// See [`Slowdown::longest`].
    pub longest_limit: SignedDuration,
    /// See [`EARLY`].
    pub early: i32,
}

impl Default for QueueSettings {
    fn default() -> QueueSettings {
        QueueSettings {
            longest_reservation: None,
            predictor: None,
            weights: None,
            policy: PolicySettings::default(),
            placement_delay: None,
            gang_classes: BTreeSet::new(),
            names_others: false,
            longest_limit: Slowdown::default().longest,
            early: EARLY,
        }
    }
}

/// The queued jobs, and the reservation of the first of them.
#[derive(Debug, Default)]
pub struct Queue {
    settings: QueueSettings,
    entries: BTreeMap<Key, QueueEntry>,
    /// The time at which the queue was last ordered, which determines how late each job is.
    slowdown: Slowdown,
    reservation: Option<Reservation>,
    /// Jobs that held a reservation for too long, and until when they get none.
    cooldowns: BTreeMap<Key, Timestamp>,
    /// UID of the job that held the reservation under an earlier leader, and since when.
    previous_holder: Option<(String, Timestamp)>,
    /// Jobs that wait for a better placement, and since when they could have started.
    startable_since: BTreeMap<Key, Timestamp>,
    predictor: Option<Predictor>,
    fairness: Option<Fairness>,
    forecasts: Forecasts,
}

impl Queue {
    /// Changes the settings. Forgets the run times and the usage of ended jobs.
    pub fn configure(&mut self, change: impl FnOnce(&mut QueueSettings)) {
        change(&mut self.settings);
        self.predictor = self.settings.predictor.map(Predictor::new);
        self.fairness = self.settings.weights.clone().map(Fairness::new);
        self.slowdown.longest = self.settings.longest_limit;
    }

    /// The number of queued jobs.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub fn contains(&self, key: &Key) -> bool {
        self.entries.contains_key(key)
    }

    /// The queued jobs, by namespace and name.
    pub fn keys(&self) -> impl Iterator<Item = &Key> {
        self.entries.keys()
    }

    /// The reservation of the head of the queue.
    pub fn reservation(&self) -> Option<&Reservation> {
        self.reservation.as_ref()
    }

    /// Makes the head choose its nodes again at the next opportunity.
    pub(crate) fn invalidate_reservation(&mut self) {
        if let Some(held) = &mut self.reservation {
            held.is_stale = true;
        }
    }

    /// Learns from a job that has ended.
    pub(crate) fn learn(&mut self, job: &TrainJob) {
        self.predictor.iter_mut().for_each(|predictor| predictor.learn(job));
        self.fairness.iter_mut().for_each(|fairness| fairness.learn(job));
    }

    #[cfg(test)]
    pub(crate) fn set_time(&mut self, now: Timestamp) {
        self.slowdown.at = now;
    }

    #[cfg(test)]
    pub(crate) fn remove(&mut self, key: &Key) {
        self.entries.remove(key);
    }
}

/// What the queue grants a job for its next plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Standing {
    /// The job ahead that holds a reservation.
    pub ahead: Option<JobAhead>,
    /// Until when the job may not reserve nodes.
    pub cooldown_until: Option<Timestamp>,
    /// Takers whose shares do not block the job.
    pub ignorable: Vec<String>,
    /// Jobs to reconcile, because the reservation was recomputed or has expired.
    pub others: BTreeSet<Key>,
}

/// What follows from a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Settlement {
    /// Other jobs to reconcile, in this order.
    pub jobs: Vec<Key>,
    /// When the planned job must be planned again, whatever happens.
    pub recheck: Option<Timestamp>,
}

impl Index {
    /// The standing of a job that is about to be planned. Updates the order of the queue and the
    /// head's reservation first.
    pub fn standing(&mut self, job: &TrainJob, rules: PlacementRules<'_>) -> Standing {
        let others = self.refresh_reservation(job, rules);
        Standing {
            ahead: self.job_ahead(job, rules.now),
            cooldown_until: self.cooldown_until(&key_of(&job.metadata)),
            ignorable: self.ignorable_takers(job, rules.now),
            others,
        }
    }

    /// Records the plan of a job with this standing: `waits` says why it found no placement;
    /// `None` if it found one, or needs none.
    pub fn settle(
        &mut self,
        job: &TrainJob,
        standing: Standing,
        waits: Option<WaitReason>,
        rules: PlacementRules<'_>,
    ) -> Settlement {
        let key = key_of(&job.metadata);
        let mut others = standing.others;
        others.extend(match waits {
            Some(reason) => self.enqueue(&key, reason, rules),
            None => self.leave_queue(&key, &JobId::of(&job.metadata)),
        });
        let recheck = self.reservation_ends(&key).into_iter().chain(self.preemption_due(&key, rules.now)).min();
        Settlement { jobs: self.in_order(others), recheck }
    }

    /// Queues jobs, first the one that comes first, so that the head gets its reservation.
    pub(crate) fn enqueue_all(&mut self, mut jobs: Vec<Key>, rules: PlacementRules<'_>) {
        self.queue.slowdown.at = rules.now;
        jobs.sort_by_key(|key| self.jobs.get(key).map(|job| self.queue_position(job)));
        for key in jobs {
            self.enqueue(&key, WaitReason::Room { open: 0 }, rules);
        }
    }

    /// The limit of a job may have changed; `old` is `None` for a new job. Returns the nodes that
    /// other jobs can use now.
    pub(crate) fn limit_changed(&mut self, job: &JobId, old: Option<i64>, new: Option<i64>) -> BTreeSet<String> {
        if old != new {
            self.queue.invalidate_reservation();
        }
        // The job reached the head of the queue with a lower limit, so it loses its reservation.
        if new.unwrap_or(i64::MAX) > old.unwrap_or(i64::MAX) { self.release(job) } else { BTreeSet::new() }
    }

    /// A job found no placement and enters the queue. Returns the jobs to reconcile.
    pub(crate) fn enqueue(&mut self, key: &Key, reason: WaitReason, rules: PlacementRules<'_>) -> BTreeSet<Key> {
        let head = self.head();
        let Some(job) = self.jobs.get(key).cloned() else { return BTreeSet::new() };
        let position = self.queue_position(&job);
        let hopeless = reason == WaitReason::Fabric;
        let version = job.metadata.resource_version.clone();
        self.queue.entries.insert(
            key.clone(),
            QueueEntry { position, hopeless, wake_condition: WakeCondition::Anything, version, plan_due: false },
        );
        let (victims, freed) = match reason {
            WaitReason::Room { open } => self.enqueue_for_room(key, &job, open, rules),
            WaitReason::Fabric => (Vec::new(), self.release(&JobId::of(&job.metadata))),
        };
        let mut others = self.jobs_to_reconcile(key, head, &freed);
        others.extend(victims);
        others
    }

    /// Queues a job that lacks room. The head of the queue also reserves nodes, and may preempt
    /// jobs. Returns the preempted jobs, and the nodes on which reservations were released.
    fn enqueue_for_room(
        &mut self,
        key: &Key,
        job: &TrainJob,
        open: u32,
        rules: PlacementRules<'_>,
    ) -> (Vec<Key>, BTreeSet<String>) {
        let position = self.queue_position(job);
        let update_entry = |index: &mut Index, request: &PlacementRequest<'_>| {
            if let Some(entry) = index.queue.entries.get_mut(key) {
                entry.wake_condition = match request.valid.roles.is_empty() {
                    true => WakeCondition::nodes(Demand::of(request), request.valid.request.nodes, open),
                    // Room for a pod of any role can help.
                    false => WakeCondition::Anything,
                };
            }
            if index.head().as_ref() == Some(key) {
                index.reserve_for_head(request, &position)
            } else {
                (Vec::new(), index.release(&JobId::of(&job.metadata)))
            }
        };
        self.with_request(job, rules, update_entry).unwrap_or_default()
    }

    /// A job was placed, or left the queue: releases its reservation. Returns the other jobs to
    /// reconcile.
    pub(crate) fn leave_queue(&mut self, key: &Key, job: &JobId) -> BTreeSet<Key> {
        let head = self.head();
        self.queue.startable_since.remove(key);
        self.queue.cooldowns.remove(key);
        if self.queue.entries.remove(key).is_none() {
            return BTreeSet::new();
        }
        let freed = self.release(job);
        self.jobs_to_reconcile(key, head, &freed)
    }

    /// The other jobs to reconcile after a queued job was planned: those that can use the nodes it
    /// freed, and a new head of the queue.
    fn jobs_to_reconcile(&mut self, key: &Key, head: Option<Key>, freed: &BTreeSet<String>) -> BTreeSet<Key> {
        let mut others = self.jobs_helped_by(freed);
        others.extend(self.head().filter(|now| Some(now) != head.as_ref()));
        others.remove(key);
        others
    }
}
