//! Leader election with a Lease: one controller works while the others stand by. It avoids
//! duplicate work; correctness does not depend on it.
//!
//! Only the time since *this* process saw the Lease change counts, never the times written in it,
//! because clocks of other machines may differ (client-go#448). A leader that could not renew
//! within its deadline stops before another one can start. [`Leadership`] reads the clock on every
//! call, so that a process that was suspended does not act as leader before its election task runs
//! again.

mod decide;
mod leadership;
#[cfg(test)]
mod tests;

pub use decide::Timing;
pub(super) use leadership::{Clock, Leadership, boot_time, channel};

use super::clock::reportable;
use decide::{Action, LeaseView, Role, decide};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::PostParams;
use kube::{Api, Client};
use leadership::Leader;
use std::sync::Arc;
use std::time::Duration;
use switchyard_crds::labels::{LEADER_CLOCK_SKEW, LEADER_MEMORY, LEADER_POLICIES, LEADER_VERSION, LEASE};
use switchyard_service::ServerClock;
use tokio::sync::watch::Receiver;
use tracing::{info, warn};

/// Longer lease durations are not trusted, because no candidate could take over.
const MAX_LEASE_DURATION: Duration = Duration::from_secs(3600);

/// An error that lasts this long is not expected to pass soon.
const LONG_OUTAGE: Duration = Duration::from_secs(60);
/// Pause between two tries after that.
const SLOW_RETRY: Duration = Duration::from_secs(7);

/// A candidate for leadership.
pub(super) struct Candidate {
    pub client: Client,
    pub namespace: String,
    pub identity: String,
    pub timing: Timing,
    pub clock: Clock,
    /// Provides the times that are written in the Lease. Candidates do not use them.
    pub server: Arc<ServerClock>,
    pub memory: LeaseMemory,
    /// The leader's report on the admission policies, for `switchyard doctor cluster`.
    pub policies: Receiver<Option<String>>,
}

/// State that a leader passes to the next one in its Lease.
pub(super) struct LeaseMemory {
    /// Returns the leader's state.
    pub save: Box<dyn Fn() -> Option<String> + Send + Sync>,
    /// Takes over the state of the previous leader.
    pub restore: Box<dyn Fn(&str) + Send + Sync>,
}

/// The Lease as this process last saw it.
#[derive(Debug, Default)]
struct LeaseCache {
    /// `None` if it does not exist, as far as this process knows.
    lease: Option<Lease>,
    /// When its spec was first seen in this state, as time since boot. After the Lease is deleted,
    /// the last spec is kept, because its holder may not have noticed yet.
    since: Duration,
    spec: LeaseSpec,
}

impl LeaseCache {
    /// Records a response of the API server.
    fn update(&mut self, lease: Option<Lease>, now: Duration) {
        if let Some(spec) = lease.as_ref().map(|lease| lease.spec.clone().unwrap_or_default())
            && (spec != self.spec || self.since.is_zero())
        {
            self.spec = spec;
            self.since = now;
        }
        self.lease = lease;
    }

    fn view(&self, now: Duration, timing: &Timing) -> LeaseView<'_> {
        let declared = self.spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
        let declared =
            declared.map(Duration::from_secs).filter(|declared| !declared.is_zero() && *declared <= MAX_LEASE_DURATION);
        LeaseView {
            holder: self.spec.holder_identity.as_deref().unwrap_or_default(),
            unchanged: now.saturating_sub(self.since),
            valid_for: declared.unwrap_or(timing.duration),
        }
    }
}

fn lease_memory(lease: Option<&Lease>) -> Option<&str> {
    lease?.metadata.annotations.as_ref()?.get(LEADER_MEMORY).map(String::as_str)
}

impl Candidate {
    /// Takes part in the election until `stop`, then releases the Lease. Notifies `leader` of
    /// changes.
    pub async fn run(self, leader: Leader, mut stop: Receiver<bool>) {
        let mut cache = LeaseCache::default();
        let mut role = Role::Standby;
        let mut last_error: Option<String> = None;
        let mut last_success = (self.clock)();
        while !*stop.borrow() {
            let pause = match self.round(&mut cache, &mut role, &leader).await {
                Ok(pause) => {
                    last_success = (self.clock)();
                    if last_error.take().is_some() {
                        info!("the Lease is accessible again");
                    }
                    pause
                }
                Err(text) => {
                    // Log an error once, not at every try.
                    if last_error.as_ref() != Some(&text) {
                        warn!(error = text, "cannot read or write the Lease; retrying");
                        last_error = Some(text);
                    }
                    let is_long_outage =
                        role == Role::Standby && (self.clock)().saturating_sub(last_success) > LONG_OUTAGE;
                    if is_long_outage { self.timing.retry.max(SLOW_RETRY) } else { self.timing.retry }
                }
            };
            let _ = tokio::time::timeout(self.jittered(self.until_deadline(role, pause)), stop.changed()).await;
        }
        leader.stop();
        if matches!(role, Role::Leading { .. }) {
            self.release(cache).await;
        }
    }

    /// Reads the Lease once and acts on it. Returns the time to wait before the next round.
    async fn round(&self, cache: &mut LeaseCache, role: &mut Role, leader: &Leader) -> Result<Duration, String> {
        // Check first, because this process may have been suspended for too long.
        self.step_down_if_expired(role, leader);
        // A leader need not read its own Lease, because the version of its write shows whether the
        // Lease changed.
        if *role == Role::Standby || cache.lease.is_none() {
            let lease =
                self.with_timeout(*role, self.api().get_opt(LEASE)).await?.map_err(|error| error.to_string())?;
            cache.update(lease, (self.clock)());
        }
        let now = (self.clock)();
        match decide(&self.identity, now, *role, cache.view(now, &self.timing), &self.timing) {
            Action::Wait(pause) => Ok(pause),
            Action::StepDown(why) => {
                self.step_down(role, leader, &why);
                Ok(self.timing.retry)
            }
            Action::Write => self.write(now, cache, role, leader).await,
        }
    }

    /// Writes our identity into the Lease. The lead counts from before the call, because other
    /// candidates may have seen the write that early.
    async fn write(
        &self,
        before: Duration,
        cache: &mut LeaseCache,
        role: &mut Role,
        leader: &Leader,
    ) -> Result<Duration, String> {
        let lease = self.record(cache.lease.clone(), *role);
        let api = self.api();
        let params = PostParams::default();
        let written = match cache.lease {
            None => self.with_timeout(*role, api.create(&params, &lease)).await?,
            Some(_) => self.with_timeout(*role, api.replace(LEASE, &params, &lease)).await?,
        };
        match written {
            Ok(lease) => {
                cache.update(Some(lease), (self.clock)());
                if *role == Role::Standby {
                    // Recall the memory before anything is planned.
                    if let Some(memory) = lease_memory(cache.lease.as_ref()) {
                        (self.memory.restore)(memory);
                    }
                    info!(identity = self.identity, "started leading");
                }
                *role = Role::Leading { renewed: before };
                leader.extend_to(before + self.timing.renew_deadline);
                self.step_down_if_expired(role, leader);
                Ok(self.timing.retry)
            }
            // Another writer changed, created or deleted it, so read it again soon. A 404 on create
            // means that the namespace is missing.
            Err(kube::Error::Api(status)) if status.code == 409 || status.code == 404 && cache.lease.is_some() => {
                cache.lease = None;
                Ok(self.timing.retry / 10)
            }
            Err(error) => Err(error.to_string()),
        }
    }

    fn step_down_if_expired(&self, role: &mut Role, leader: &Leader) {
        if let Role::Leading { renewed } = *role
            && (self.clock)().saturating_sub(renewed) >= self.timing.renew_deadline
        {
            self.step_down(role, leader, "the Lease was not renewed in time");
        }
    }

    fn step_down(&self, role: &mut Role, leader: &Leader, why: &str) {
        leader.stop();
        *role = Role::Standby;
        warn!(identity = self.identity, why, "stopped leading");
    }

    /// Limits a call so that it ends before a leader's deadline.
    async fn with_timeout<T>(&self, role: Role, call: impl Future<Output = T>) -> Result<T, String> {
        let limit = self.timing.renew_deadline / 2;
        let message = || format!("the API server did not respond within {} s", limit.as_secs_f32());
        tokio::time::timeout(self.until_deadline(role, limit), call).await.map_err(|_| message())
    }

    /// `limit`, or the time up to a leader's deadline if that is shorter.
    fn until_deadline(&self, role: Role, limit: Duration) -> Duration {
        match role {
            Role::Standby => limit,
            Role::Leading { renewed } => {
                limit.min((renewed + self.timing.renew_deadline).saturating_sub((self.clock)()))
            }
        }
    }

    /// Shortens a pause by up to a fifth, so that candidates do not write at the same time.
    fn jittered(&self, pause: Duration) -> Duration {
        let mut random = [0; 1];
        // Without random bytes there is no jitter, which is harmless.
        let _ = getrandom::fill(&mut random);
        pause - pause.mul_f64(f64::from(random[0]) / 256.0 / 5.0)
    }

    fn api(&self) -> Api<Lease> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// The Lease with our identity. It keeps the resource version it was read with, so that the
    /// write fails if the Lease has changed.
    fn record(&self, before: Option<Lease>, role: Role) -> Lease {
        let now = MicroTime(self.server.now());
        let mut lease = before.unwrap_or_else(|| Lease {
            metadata: ObjectMeta {
                name: Some(LEASE.into()),
                namespace: Some(self.namespace.clone()),
                ..ObjectMeta::default()
            },
            spec: None,
        });
        let annotations = lease.metadata.annotations.get_or_insert_default();
        annotations.insert(LEADER_VERSION.into(), env!("CARGO_PKG_VERSION").into());
        match &*self.policies.borrow() {
            Some(report) => annotations.insert(LEADER_POLICIES.into(), report.clone()),
            // Remove the report of an earlier leader.
            None => annotations.remove(LEADER_POLICIES),
        };
        // A candidate keeps the last leader's memory, because it reads it once it leads.
        if role != Role::Standby {
            match (self.memory.save)() {
                Some(memory) => annotations.insert(LEADER_MEMORY.into(), memory),
                None => annotations.remove(LEADER_MEMORY),
            };
        }
        match reportable(self.server.skew()) {
            Some(skew) => annotations.insert(LEADER_CLOCK_SKEW.into(), skew.as_secs().to_string()),
            None => annotations.remove(LEADER_CLOCK_SKEW),
        };
        let spec: &mut LeaseSpec = lease.spec.get_or_insert_default();
        if spec.holder_identity.as_deref() != Some(&self.identity) {
            spec.holder_identity = Some(self.identity.clone());
            spec.acquire_time = Some(now.clone());
            spec.lease_transitions = Some(spec.lease_transitions.unwrap_or(0).saturating_add(1));
        }
        spec.renew_time = Some(now);
        // Whole seconds, rounded up, so that others do not take it before this process has stopped.
        spec.lease_duration_seconds = Some(self.timing.duration.as_secs_f64().ceil() as i32);
        lease
    }

    /// Clears the holder, so that the next leader need not wait. Fails if another candidate has
    /// changed the Lease since.
    async fn release(&self, cache: LeaseCache) {
        let Some(mut lease) = cache.lease else { return };
        lease.spec.get_or_insert_default().holder_identity = Some(String::new());
        let params = PostParams::default();
        match tokio::time::timeout(self.timing.retry, self.api().replace(LEASE, &params, &lease)).await {
            Ok(Ok(_)) => info!("released the Lease"),
            Ok(Err(error)) => warn!(%error, "cannot release the Lease; it will expire"),
            Err(_) => warn!("timed out releasing the Lease; it will expire"),
        }
    }
}
