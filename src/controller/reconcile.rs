//! One reconcile of one job: snapshot, plan, apply, status.
//!
//! ```text
//! index ─> JobSnapshot ─> plan (no client) ─> apply ─> status ─> events
//! ```

mod cleanup;
mod missing_slices;
mod unreadable;

use super::Context;
use super::progress::reports_progress;
use super::queue::Pass;
use crate::apply::{ApiError, Applied, Cause, Retry};
use jiff::Timestamp;
use kube::Resource;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use switchyard_crds::conditions::STEPS_MADE;
use switchyard_crds::{DeviceAllocation, TrainJob, TrainJobStatus};
use switchyard_ledger::devices::Devices;
use switchyard_ledger::index::{Index, JobState};
use switchyard_ledger::job::{JobId, Key, attempt_of, changes_placement, message_of, placement_in, stage_of};
use switchyard_ledger::pending_writes;
use switchyard_ledger::pending_writes::{CacheState, PendingWrites};
use switchyard_ledger::usage::{Usage, UsageOverlay};
use switchyard_plan::cluster::blocker::WriteError;
use switchyard_plan::cluster::events::{self, EventDraft};
use switchyard_plan::cluster::view::PodView;
use switchyard_plan::cluster::{self, Action, JobSnapshot, PlacementRules, Premise, Reconciliation, Silence};
use switchyard_plan::objects::Kind;
use tracing::{debug, info, warn};

/// Upper bound on the time until a job with a conflict is reconciled again.
const RECHECK: Duration = Duration::from_secs(1);

/// Spacing of deferred plans. It is several times the duration of such a plan with 10,000 nodes, so
/// that other plans run in between.
const DEFERRAL: Duration = Duration::from_millis(50);

/// How often a job that waits for room checks whether another job of its namespace could use its
/// quota.
const QUOTA_RECHECK: Duration = Duration::from_secs(10);

/// Result of a reconcile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Outcome {
    /// Nothing to do.
    Quiet,
    /// Something was written.
    Wrote,
    /// The cache does not show the last write yet.
    Behind,
    /// The API server refused a write.
    Refused,
}

/// The plan for a job, and its inputs.
struct Planned {
    job: Arc<TrainJob>,
    id: JobId,
    plan: Reconciliation,
    /// End of the backoff for creates that were dropped from the plan.
    held: Option<Instant>,
    /// Whether another writer is undoing our writes.
    is_contested: bool,
}

impl Context {
    pub(super) async fn reconcile(&self, key: &Key, pass: Pass) -> Outcome {
        if pass == Pass::Optional && !self.index().needs_planning(key) {
            return Outcome::Quiet;
        }
        let unreadable = self.index().unreadable.get(key).cloned();
        if let Some(job) = unreadable {
            return self.report_unreadable(key, job).await;
        }
        if let Some(outcome) = self.check_slices(key).await {
            return outcome;
        }
        if !self.index().jobs.contains_key(key) {
            return self.clean_up(key).await;
        }
        if self.defer_if_futile(key, Instant::now()) {
            return Outcome::Quiet;
        }
        let planned = match self.plan(key, self.now(), Instant::now()) {
            Ok(Some(planned)) => planned,
            Ok(None) => return Outcome::Quiet,
            Err(until) => {
                self.index().mark_plan_due(key);
                // A change in the cache triggers a plan earlier; this covers a watch that lost an
                // event.
                self.queue.add(key.clone(), until);
                return Outcome::Behind;
            }
        };
        self.apply_plan(key, planned).await
    }

    /// Defers a plan that cannot find a placement, so that plans that can find one go first,
    /// including plans of jobs that arrive meanwhile. Returns whether it was deferred.
    fn defer_if_futile(&self, key: &Key, now: Instant) -> bool {
        let rules = self.rules(self.now());
        let mut index = self.index();
        if !index.enqueue_unplanned(key, rules) {
            return false;
        }
        let later = now + DEFERRAL * u32::try_from(index.queue.len()).unwrap_or(u32::MAX);
        drop(index);
        self.queue.add(key.clone(), later);
        true
    }

    fn rules(&self, now: Timestamp) -> PlacementRules<'_> {
        PlacementRules { defaults: &self.settings.defaults, levels: &self.settings.levels, now }
    }

    /// Plans while holding the index lock, so that the next plan sees this decision.
    fn plan(&self, key: &Key, now: Timestamp, instant: Instant) -> Result<Option<Planned>, Instant> {
        let mut guard = self.index();
        let index: &mut Index = &mut guard;
        let Some(job) = index.jobs.get(key).cloned() else { return Ok(None) };
        let id = JobId::of(&job.metadata);
        let (nodes, was_tripped) = (index.usage.nodes().len(), index.mass_outage.reason().is_some());
        index.mass_outage.update(nodes, self.settings.mass_outage_percent, now);
        match index.mass_outage.reason() {
            Some(reason) if !was_tripped => warn!("circuit breaker tripped: {reason}"),
            None if was_tripped => info!("circuit breaker reset: nodes report again"),
            _ => {}
        }
        let rules = self.rules(now);
        let standing = index.standing(&job, rules);
        let forecast = index.forecast(key, now);
        let quota_recipient = index.quota_recipient(&job, rules);
        let (avoided_nodes, avoidance_ends) = (index.avoided_nodes(&id, now), index.avoidance_ends(&id, now));
        match index.catch_up(&id, instant) {
            CacheState::Current => {}
            CacheState::Behind { until } => {
                // The jobs that must make way are already chosen.
                let others = index.in_order(standing.others);
                others.into_iter().for_each(|other| self.queue.schedule(other, instant, Pass::Optional));
                return Err(until);
            }
            CacheState::TimedOut => {
                warn!(job = %key, "the cache has not shown a write for {} s; continuing without it", pending_writes::CACHE_TIMEOUT.as_secs());
                self.metrics.cache_timed_out();
            }
        }
        index.note_missing(&id, now);
        let family = index.job_states.entry(id.clone()).or_default();
        family.note_refusals(&job, now);
        let is_deleted = |pod: &PodView| family.writes.was_deleted(&pod.uid, instant);
        let deleting: Vec<PodView> = family
            .pods
            .values()
            .filter(|pod| !pod.deleting && is_deleted(pod))
            .map(|pod| PodView { deleting: true, ..pod.clone() })
            .collect();
        let observed = family.pods.values();
        let pods: Vec<&PodView> =
            observed.map(|pod| deleting.iter().find(|deleted| deleted.uid == pod.uid).unwrap_or(pod)).collect();
        let conflict = family.writes.contested_object(instant).map(|what| WriteError {
            text: format!("another client keeps reverting {what}; this controller repeats the write every few seconds"),
            since: now,
            is_refusal: false,
        });
        let gives_way = family.preempted_by.clone().filter(|_| family.preempted_attempt == Some(attempt_of(&job)));
        // Ignore the shares that do not block this job.
        let usage = UsageOverlay::new(&mut index.usage, &standing.ignorable);
        let actual_gpus = gpus_of_pods(&job, family, &index.devices, &usage);
        let snapshot = JobSnapshot {
            job: &job,
            pods: &pods,
            unlabelled: &family.unlabelled,
            objects: &family.objects,
            nodes: usage.nodes(),
            missing: &index.missing,
            rules,
            actual: &actual_gpus,
            ahead: standing.ahead.as_ref(),
            forecast,
            cooldown_until: standing.cooldown_until,
            queue_length: index.queue.len(),
            preempted_by: gives_way.as_deref(),
            write_error: family.write_error.as_ref().or(conflict.as_ref()),
            // Ignore figures of an earlier attempt.
            summary: family.summary.as_ref().filter(|(of, _)| *of == attempt_of(&job)).map(|(_, summary)| summary),
            log_observations: family.log_observations.get(&attempt_of(&job)).unwrap_or(const { &BTreeMap::new() }),
            status_written: family.status_written,
            avoided_nodes: &avoided_nodes,
            quota_recipient: quota_recipient.as_ref().map(|key| key.name.as_str()),
            avoidance_ends,
            restricted: family.restricted,
            provisioning_class: index.provisioning_class.as_deref(),
            silence: Silence {
                grace: self.settings.node_grace,
                mass_outage: index.mass_outage.reason(),
                outage_ended: index.mass_outage.ended(),
                progress: family.progress.last(attempt_of(&job), job.status.as_ref()),
                progress_unread: reports_progress(&job)
                    && family.progress.is_first_read_due(attempt_of(&job), family.pods.values(), usage.nodes()),
            },
            scheduler_is_known: index.schedulers.is_known(&job),
            longest_schedule_timeout: self.settings.longest_schedule_timeout,
        };
        let start = Instant::now();
        let mut plan = cluster::plan(&snapshot);
        self.metrics.planned(start.elapsed());
        drop(usage);
        plan.actions
            .retain(|action| !matches!(action, Action::Delete { uid, .. } if family.writes.was_deleted(uid, instant)));
        let held = hold_back(&mut plan, &mut family.writes, &job, instant);
        // Record releases while still holding the plan lock: the job may end before the API call
        // returns.
        for action in &plan.actions {
            if let Action::Release { uid, .. } = action {
                family.writes.record_release(uid.clone());
            }
        }
        if plan.actions.is_empty() && held.is_none() {
            family.write_error = None;
        }
        let is_contested = family.writes.contested_object(instant).is_some();
        // Reserve the placement now; the watch cache does not show the decision yet.
        if let Some(next) = plan.status.as_ref().filter(|_| plan.actions.is_empty())
            && changes_placement(&job, next)
        {
            let attempt = next.attempt.unwrap_or(0).unsigned_abs();
            index.assume(&id, attempt, placement_in(next).cloned());
        }
        // Poll, because a job that lacks quota may find room without any change that wakes this
        // one.
        if plan.wait_reason.is_some() && !index.short_of_quota_in(&key.namespace).is_empty() {
            self.queue.add(key.clone(), instant + QUOTA_RECHECK);
        }
        let next = index.settle(&job, standing, plan.wait_reason, rules);
        drop(guard);
        if let Some(at) = next.recheck {
            self.queue.add(key.clone(), instant + Duration::try_from(at.duration_since(now)).unwrap_or_default());
        }
        next.jobs.into_iter().for_each(|other| self.queue.schedule(other, instant, Pass::Optional));
        Ok(Some(Planned { job, id, plan, held, is_contested }))
    }

    async fn apply_plan(&self, key: &Key, planned: Planned) -> Outcome {
        let Planned { job, id, plan, held, is_contested } = planned;
        if let Some(wake) = plan.wake {
            let wait = wake.duration_since(self.now());
            self.queue.add(key.clone(), Instant::now() + Duration::try_from(wait).unwrap_or_default());
        }
        if is_contested {
            // Clears the conflict from the status if it has ended by then.
            self.queue.add(key.clone(), Instant::now() + pending_writes::CONFLICT_WINDOW);
        }
        if let Some(until) = held {
            self.queue.add(key.clone(), until.max(Instant::now() + RECHECK / 10));
        }
        if !self.is_leader() {
            // Keep the key, because this process may lead again before it notices that it did not.
            self.queue.add(key.clone(), Instant::now());
            return Outcome::Behind;
        }
        if let Some(premise) = &plan.premise {
            match self.executor.verify(&key.namespace, premise, &id.uid).await {
                Ok(true) => {}
                Ok(false) => {
                    debug!(job = %key, ?premise, "premise no longer holds; waiting for the cache");
                    // Retry slowly: a node watch that lost its connection notices only after
                    // minutes, and meanwhile every job of such a node checks its premise.
                    let is_node_premise = matches!(premise, Premise::NodeGone(_) | Premise::NodeSilent(_));
                    self.queue.add(key.clone(), Instant::now() + if is_node_premise { RECHECK * 10 } else { RECHECK });
                    return Outcome::Behind;
                }
                Err(error) => return self.finish(key, Some(&id), Some(error)),
            }
        }
        let mut outcome = Outcome::Quiet;
        let mut first_error = None;
        if !plan.actions.is_empty() {
            debug!(job = %key, actions = plan.actions.len(), "applying");
            outcome = Outcome::Wrote;
            let applied = self.executor.apply(&key.namespace, &id.uid, plan.actions).await;
            first_error = self.record_applied(&id, applied);
        }
        let (mut next, mut events) = (plan.status, plan.events);
        if first_error.is_some()
            && let Some(now) = self.replan(key)
        {
            // Report the error in the status before anything is tried again.
            (next, events) = (now.status, now.events);
        }
        if let Some(next) = next {
            match self.write_status(key, &job, next, events).await {
                Ok(()) => {
                    outcome = Outcome::Wrote;
                }
                Err(error) => {
                    self.index().assume(&id, 0, None);
                    if error.cause == Cause::Invalid {
                        // The status is what was refused, so report it in an event.
                        let event = EventDraft::warning(events::REFUSED, error.to_string());
                        self.publish_events(&job.object_ref(&()), vec![event]).await;
                    }
                    first_error = first_error.or(Some(error));
                }
            }
        } else if plan.wait_reason.is_some() {
            self.publish_events(&job.object_ref(&()), events).await;
        }
        // A write that is still in backoff has not succeeded yet.
        if first_error.is_none() && held.is_some() {
            return outcome;
        }
        match self.finish(key, Some(&id), first_error) {
            Outcome::Refused => Outcome::Refused,
            _ => outcome,
        }
    }

    /// Records what was written, so that nothing is planned before the cache shows it. Returns an
    /// error, preferably one that needs backoff.
    fn record_applied(&self, job: &JobId, applied: Applied) -> Option<ApiError> {
        let now = Instant::now();
        let mut guard = self.index();
        let index = &mut *guard;
        let family = index.job_states.entry(job.clone()).or_default();
        for (kind, version) in applied.written {
            family.writes.record_write(kind, &version, now);
        }
        for uid in applied.deleted {
            family.writes.record_deletion(uid, now);
        }
        // The controller does not watch namespaces, and a cluster may enforce the level by default,
        // so the error is how it learns of it. It retries at once with a compliant pod and
        // reports nothing.
        if !family.restricted && applied.errors.iter().any(ApiError::violates_restricted_pod_security) {
            (family.restricted, family.write_error) = (true, None);
            if let Some(key) = family.key.clone() {
                self.queue.add(key, now);
            }
            return None;
        }
        // Stale writes are planned again and not reported.
        let reported = applied.errors.iter().find(|error| error.cause.retry() == Retry::BackOff).cloned();
        let status = family.key.as_ref().and_then(|key| index.jobs.get(key)).and_then(|job| job.status.as_ref());
        let before = family.write_error.take().or_else(|| WriteError::from_status(status?));
        family.write_error = reported.as_ref().map(|error| {
            let is_refusal = error.cause != Cause::Unreachable;
            WriteError::after(before.as_ref(), error.to_string(), is_refusal, self.now())
        });
        if family.write_error.as_ref().is_some_and(WriteError::is_quota)
            && !before.is_some_and(|before| before.is_quota())
        {
            index.mark_short_of_quota(job);
            // Wake the waiting jobs of the namespace, because they may hold the quota that this one
            // lacks.
            let waiting = index.queue.keys().filter(|key| key.namespace == job.namespace);
            waiting.for_each(|key| self.queue.add(key.clone(), now));
        }
        reported.or_else(|| applied.errors.into_iter().next())
    }

    /// Plans again with the error that was recorded. Returns the plan if it changes the status.
    fn replan(&self, key: &Key) -> Option<Reconciliation> {
        let planned = self.plan(key, self.now(), Instant::now()).ok()??;
        // Leave plans with a premise to a reconcile that verifies it.
        Some(planned.plan).filter(|plan| plan.status.is_some() && plan.premise.is_none())
    }

    async fn write_status(
        &self,
        key: &Key,
        job: &TrainJob,
        next: TrainJobStatus,
        events: Vec<EventDraft>,
    ) -> Result<(), ApiError> {
        let previous = job.status.clone();
        let version = self.executor.write_status(job, next.clone()).await?;
        let preemption_gain = {
            let mut index = self.index();
            let family = index.job_states.entry(JobId::of(&job.metadata)).or_default();
            let gain =
                family.preempted_attempt.filter(|of| *of == attempt_of(job)).map_or(0, |_| family.preemption_gain);
            family.status_written = Some(self.now());
            family.writes.record_status(next.attempt.unwrap_or(0).unsigned_abs(), &fingerprint(&next));
            if let Some(version) = version {
                family.writes.record_write("TrainJob", &version, Instant::now());
                index.record_status_version(key, &version);
            }
            gain
        };
        let stage = stage_of(&next);
        if stage != previous.as_ref().and_then(stage_of) {
            info!(job = %key, attempt = next.attempt, stage = stage.unwrap_or_default(), "{}", message_of(&next));
        }
        self.metrics.status_changed(job, previous.as_ref(), &next, preemption_gain, self.now());
        self.publish_events(&job.object_ref(&()), events).await;
        Ok(())
    }

    /// Schedules the next try according to the outcome.
    fn finish(&self, key: &Key, job: Option<&JobId>, error: Option<ApiError>) -> Outcome {
        let Some(error) = error else {
            self.queue.succeeded(key);
            return Outcome::Quiet;
        };
        self.metrics.refused(error.cause);
        if error.cause.retry() == Retry::OnChange {
            debug!(job = %key, error = %error, "stale write; planning again");
            // The change should arrive by watch; this covers the case that it does not.
            self.queue.add(key.clone(), Instant::now() + RECHECK);
            return Outcome::Refused;
        }
        let until = self.queue.failed(key);
        if let Some(job) = job
            && let Some(family) = self.index().job_states.get_mut(job)
        {
            family.writes.back_off(until);
        }
        warn!(job = %key, error = %error, retry_in_ms = until.saturating_duration_since(Instant::now()).as_millis() as u64, "write failed");
        Outcome::Refused
    }
}

/// GPUs of the pods of the current attempt: from their claims, or else as reported by the kubelets.
fn gpus_of_pods(job: &TrainJob, family: &JobState, devices: &Devices, usage: &Usage) -> BTreeMap<u32, Vec<String>> {
    let status = job.status.as_ref();
    let (Some(allocation), attempt) = (status.and_then(|status| status.device_allocation), attempt_of(job)) else {
        return BTreeMap::new();
    };
    let namespace = job.metadata.namespace.as_deref().unwrap_or_default();
    let gpus_of = |pod: &PodView| {
        let gpus = match allocation {
            DeviceAllocation::Claims => {
                let claim = family.objects.get(&(Kind::ResourceClaim, pod.name.clone()))?;
                devices.allocated(&claim.uid)?
            }
            DeviceAllocation::Unknown => return None,
            DeviceAllocation::DevicePlugin => usage.assigned_gpus(pod.node.as_deref()?, namespace, &pod.name),
        };
        Some((pod.node_rank, gpus))
    };
    family.pods.values().filter(|pod| pod.attempt == attempt && !pod.is_over()).filter_map(gpus_of).collect()
}

/// Drops actions that must wait: creates and repairs during backoff, and repeated writes while
/// another controller is reverting them. Returns the end of the wait.
fn hold_back(plan: &mut Reconciliation, own: &mut PendingWrites, job: &TrainJob, now: Instant) -> Option<Instant> {
    let attempt = attempt_of(job);
    // A status that differs only in figures has the same text, and was not undone.
    let is_changed = job.status.as_ref().is_none_or(|status| own.is_status_changed(&fingerprint(status)));
    let is_write = |action: &Action| matches!(action, Action::Create(_) | Action::Repair(_));
    let status =
        plan.status.as_ref().map(fingerprint).filter(|status| is_changed && own.has_written_status(attempt, status));
    let mut until = own.backoff_until(now).filter(|_| plan.actions.iter().any(is_write));
    if until.is_none() {
        let mut undone = status.as_ref().map(|_| "the status".to_string());
        for action in &plan.actions {
            let (verb, object) = match action {
                // Secrets are created once per attempt without checking whether they exist, so this
                // is no sign of a conflict.
                Action::Create(switchyard_plan::objects::Object::Secret(_)) => continue,
                Action::Create(object) => ("create", object),
                Action::Repair(object) => ("repair", object),
                _ => continue,
            };
            let name = format!("{} {}", object.kind(), object.name());
            if own.record_creation(attempt, format!("{verb} {name}")) {
                undone = Some(name);
            }
        }
        until = undone.and_then(|what| own.try_repeat(&what, now).err());
        if until.is_some() && status.is_some() {
            (plan.status, plan.events) = (None, Vec::new());
        }
    }
    if until.is_some() {
        plan.actions.retain(|action| !is_write(action));
    }
    until
}

/// The content of a status without times and figures.
fn fingerprint(status: &TrainJobStatus) -> String {
    let conditions: Vec<_> = status
        .conditions
        .iter()
        // This message contains the last step, which is a figure.
        .map(|c| (&c.type_, &c.status, &c.reason, Some(&c.message).filter(|_| c.reason != STEPS_MADE)))
        .collect();
    format!("{:?}", (status.attempt, &status.restarts, &status.ready, &status.placement, conditions))
}

#[cfg(test)]
mod tests;
