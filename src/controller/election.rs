//! Leader election by a Lease, so that one controller works and the others wait. It saves work; correctness does not hang on it.
//!
//! Only the time since *this* process saw the Lease change counts, never the times written in it: clocks of other machines are
//! not ours (client-go#448). A leader that could not renew within its deadline stops before another one may begin, and
//! [`Leading`] reads the clock whenever it is asked, so that a process that was stopped for a while does not go on as leader
//! in the moment before its election task runs again.

mod decide;
mod leading;
#[cfg(test)]
mod tests;

pub use decide::Timing;
pub(super) use leading::{Clock, Leading, boot_time, channel};

use super::clock::notable;
use decide::{Action, Role, Seen, decide};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::PostParams;
use kube::{Api, Client};
use leading::Leader;
use std::sync::Arc;
use std::time::Duration;
use switchyard_crds::labels::{LEADER_CLOCK_SKEW, LEADER_MEMORY, LEADER_POLICIES, LEADER_VERSION, LEASE};
use switchyard_service::ServerClock;
use tokio::sync::watch::Receiver;
use tracing::{info, warn};

/// A Lease that claims to last longer is not believed: nobody could take over.
const LONGEST: Duration = Duration::from_secs(3600);

/// Trouble of this time is not expected to pass soon.
const MINUTE: Duration = Duration::from_secs(60);
/// Between two tries after that.
const LONG_PAUSE: Duration = Duration::from_secs(7);

/// A candidate.
pub(super) struct Candidate {
    pub client: Client,
    pub namespace: String,
    pub identity: String,
    pub timing: Timing,
    pub clock: Clock,
    /// Sets the times in the Lease, which candidates do not use.
    pub server: Arc<ServerClock>,
    pub memory: LeaseMemory,
    /// What the leader says of the admission policies, for `switchyard doctor cluster`.
    pub policies: Receiver<Option<String>>,
}

/// What a leader leaves in its Lease for the next one.
pub(super) struct LeaseMemory {
    /// Returns the leader's state.
    pub save: Box<dyn Fn() -> Option<String> + Send + Sync>,
    /// Takes over the state of the previous leader.
    pub recall: Box<dyn Fn(&str) + Send + Sync>,
}

/// The Lease as this process last saw it.
#[derive(Debug, Default)]
struct View {
    /// `None`: there is none, as far as we know.
    lease: Option<Lease>,
    /// When what it says (not its labels) was first seen so, since the machine started. The holder of a Lease that was deleted
    /// is remembered, since it may not know yet.
    since: Duration,
    spec: LeaseSpec,
}

impl View {
    /// Takes in what the API server showed.
    fn see(&mut self, lease: Option<Lease>, now: Duration) {
        if let Some(spec) = lease.as_ref().map(|lease| lease.spec.clone().unwrap_or_default())
            && (spec != self.spec || self.since.is_zero())
        {
            self.spec = spec;
            self.since = now;
        }
        self.lease = lease;
    }

    fn seen(&self, now: Duration, timing: &Timing) -> Seen<'_> {
        let promised = self.spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
        let promised = promised.map(Duration::from_secs).filter(|promised| !promised.is_zero() && *promised <= LONGEST);
        Seen {
            holder: self.spec.holder_identity.as_deref().unwrap_or_default(),
            unchanged: now.saturating_sub(self.since),
            lasts: promised.unwrap_or(timing.duration),
        }
    }
}

fn lease_memory(lease: Option<&Lease>) -> Option<&str> {
    lease?.metadata.annotations.as_ref()?.get(LEADER_MEMORY).map(String::as_str)
}

impl Candidate {
    /// Takes part until `stop`, and gives the Lease back. Tells `leader` whenever something changes.
    pub async fn run(self, leader: Leader, mut stop: Receiver<bool>) {
        let mut view = View::default();
        let mut role = Role::Standby;
        let mut trouble: Option<String> = None;
        let mut well = (self.clock)();
        while !*stop.borrow() {
            let pause = match self.round(&mut view, &mut role, &leader).await {
                Ok(pause) => {
                    well = (self.clock)();
                    if trouble.take().is_some() {
                        info!("the Lease can be read and written again");
                    }
                    pause
                }
                Err(text) => {
                    // The same trouble once, not at every try.
                    if trouble.as_ref() != Some(&text) {
                        warn!(error = text, "the Lease cannot be read or written; it is tried again");
                        trouble = Some(text);
                    }
                    let is_long = role == Role::Standby && (self.clock)().saturating_sub(well) > MINUTE;
                    if is_long { self.timing.retry.max(LONG_PAUSE) } else { self.timing.retry }
                }
            };
            let _ = tokio::time::timeout(self.shortened(self.until_deadline(role, pause)), stop.changed()).await;
        }
        leader.lost();
        if matches!(role, Role::Leading { .. }) {
            self.release(view).await;
        }
    }

    /// Reads the Lease once and acts on it. Returns how long to wait before the next time.
    async fn round(&self, view: &mut View, role: &mut Role, leader: &Leader) -> Result<Duration, String> {
        // First of all: was this process stopped for too long?
        self.step_down_if_late(role, leader);
        // A leader knows its own Lease; the version of a write shows whether it still does.
        if *role == Role::Standby || view.lease.is_none() {
            let lease = self.bounded(*role, self.api().get_opt(LEASE)).await?.map_err(|error| error.to_string())?;
            view.see(lease, (self.clock)());
        }
        let now = (self.clock)();
        match decide(&self.identity, now, *role, view.seen(now, &self.timing), &self.timing) {
            Action::Wait(pause) => Ok(pause),
            Action::StepDown(why) => {
                self.step_down(role, leader, &why);
                Ok(self.timing.retry)
            }
            Action::Write => self.write(now, view, role, leader).await,
        }
    }

    /// Writes our name into the Lease. The lead counts from before the call: that is what the others can have seen at the latest.
    async fn write(
        &self,
        before: Duration,
        view: &mut View,
        role: &mut Role,
        leader: &Leader,
    ) -> Result<Duration, String> {
        let lease = self.record(view.lease.clone(), *role);
        let api = self.api();
        let params = PostParams::default();
        let written = match view.lease {
            None => self.bounded(*role, api.create(&params, &lease)).await?,
            Some(_) => self.bounded(*role, api.replace(LEASE, &params, &lease)).await?,
        };
        match written {
            Ok(lease) => {
                view.see(Some(lease), (self.clock)());
                if *role == Role::Standby {
                    // Before anything is planned.
                    if let Some(memory) = lease_memory(view.lease.as_ref()) {
                        (self.memory.recall)(memory);
                    }
                    info!(identity = self.identity, "leading");
                }
                *role = Role::Leading { renewed: before };
                leader.until(before + self.timing.renew_deadline);
                self.step_down_if_late(role, leader);
                Ok(self.timing.retry)
            }
            // Another writer changed, created or deleted it: it is read again soon. A create that finds nothing lacks the namespace.
            Err(kube::Error::Api(status)) if status.code == 409 || status.code == 404 && view.lease.is_some() => {
                view.lease = None;
                Ok(self.timing.retry / 10)
            }
            Err(error) => Err(error.to_string()),
        }
    }

    fn step_down_if_late(&self, role: &mut Role, leader: &Leader) {
        if let Role::Leading { renewed } = *role
            && (self.clock)().saturating_sub(renewed) >= self.timing.renew_deadline
        {
            self.step_down(role, leader, "the Lease was not renewed in time");
        }
    }

    fn step_down(&self, role: &mut Role, leader: &Leader, why: &str) {
        leader.lost();
        *role = Role::Standby;
        warn!(identity = self.identity, why, "not leading any more");
    }

    /// A call that ends before the deadline of a leader does.
    async fn bounded<T>(&self, role: Role, call: impl Future<Output = T>) -> Result<T, String> {
        let most = self.timing.renew_deadline / 2;
        let late = || format!("the API server did not answer within {} s", most.as_secs_f32());
        tokio::time::timeout(self.until_deadline(role, most), call).await.map_err(|_| late())
    }

    /// This long, or up to the deadline of a leader.
    fn until_deadline(&self, role: Role, most: Duration) -> Duration {
        match role {
            Role::Standby => most,
            Role::Leading { renewed } => {
                most.min((renewed + self.timing.renew_deadline).saturating_sub((self.clock)()))
            }
        }
    }

    /// Shortened by up to a fifth, so that candidates do not write at the same moment.
    fn shortened(&self, pause: Duration) -> Duration {
        let mut random = [0; 1];
        // Without random bytes there is no spread; nothing depends on it.
        let _ = getrandom::fill(&mut random);
        pause - pause.mul_f64(f64::from(random[0]) / 256.0 / 5.0)
    }

    fn api(&self) -> Api<Lease> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// The Lease with our name in it; the resource version of the one before makes the write fail if it has changed.
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
            // That of an earlier leader.
            None => annotations.remove(LEADER_POLICIES),
        };
        // A candidate leaves what the last leader knew: it reads that once it leads.
        if role != Role::Standby {
            match (self.memory.save)() {
                Some(memory) => annotations.insert(LEADER_MEMORY.into(), memory),
                None => annotations.remove(LEADER_MEMORY),
            };
        }
        match notable(self.server.skew()) {
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
        // Whole seconds, rounded up: others must not take it before we have stopped.
        spec.lease_duration_seconds = Some(self.timing.duration.as_secs_f64().ceil() as i32);
        lease
    }

    /// Empties the Lease, so that the next leader need not wait. It fails if another candidate has changed it since.
    async fn release(&self, view: View) {
        let Some(mut lease) = view.lease else { return };
        lease.spec.get_or_insert_default().holder_identity = Some(String::new());
        let params = PostParams::default();
        match tokio::time::timeout(self.timing.retry, self.api().replace(LEASE, &params, &lease)).await {
            Ok(Ok(_)) => info!("the Lease is given back"),
            Ok(Err(error)) => warn!(%error, "the Lease cannot be given back; it runs out by itself"),
            Err(_) => warn!("the Lease cannot be given back in time; it runs out by itself"),
        }
    }
}
