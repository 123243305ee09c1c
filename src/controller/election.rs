//! Leader election by a Lease, so that one controller works and the others wait. It saves work; correctness does not hang on it.
//!
//! Only the time since *this* process saw the Lease change counts, never the times written in it: clocks of other machines are
//! not ours (client-go#448). A leader that could not renew within its deadline stops before another one may begin.

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::PostParams;
use kube::{Api, Client, ResourceExt};
use std::time::Duration;
use tokio::sync::watch::{Receiver, Sender};
use tracing::{info, warn};

/// Name of the Lease.
const LEASE: &str = "switchyard-controller";

/// Times of the election.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// A Lease that nobody renews for this long is free.
    pub duration: Duration,
    /// A leader that could not renew for this long stops. Shorter than `duration`.
    pub renew_deadline: Duration,
    /// Pause between two tries.
    pub retry: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        // As Kubernetes' own controllers.
        Timing {
            duration: Duration::from_secs(15),
            renew_deadline: Duration::from_secs(10),
            retry: Duration::from_secs(2),
        }
    }
}

/// What this process knows about the Lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Seen<'a> {
    /// There is none.
    Absent,
    /// Somebody holds it, and it has been seen unchanged for this long.
    Held { holder: &'a str, unchanged: Duration },
}

/// What to do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    /// Make the Lease.
    Create,
    /// Write our name into it.
    Take,
    /// Write it again.
    Renew,
    /// Leave it alone.
    Wait,
}

/// Decides from what was seen. Pure.
fn decide(me: &str, seen: Seen<'_>, timing: &Timing) -> Action {
    match seen {
        Seen::Absent => Action::Create,
        Seen::Held { holder, .. } if holder == me => Action::Renew,
        Seen::Held { holder: "", .. } => Action::Take,
        Seen::Held { unchanged, .. } if unchanged >= timing.duration => Action::Take,
        Seen::Held { .. } => Action::Wait,
    }
}

/// Time since the machine started, also while it sleeps or the process is stopped.
fn boot_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// A candidate.
pub(super) struct Candidate {
    pub client: Client,
    pub namespace: String,
    pub identity: String,
    pub timing: Timing,
}

/// The record of the Lease as it was last seen, and when it was first seen so.
type Observed = Option<(String, Duration)>;

impl Candidate {
    /// Takes part until `stop`, and gives the Lease back. Tells `leader` whenever that changes.
    pub async fn run(self, leader: Sender<bool>, mut stop: Receiver<bool>) {
        let mut observed: Observed = None;
        let mut renewed: Option<Duration> = None;
        let mut trouble: Option<String> = None;
        while !*stop.borrow() {
            let before = boot_time();
            let step = tokio::time::timeout(self.timing.renew_deadline, self.step(&mut observed)).await;
            match step.unwrap_or_else(|_| Err("the API server does not answer".to_string())) {
                Ok(true) => renewed = Some(before),
                Ok(false) => renewed = None,
                // The same trouble once, not at every try.
                Err(text) if trouble.as_ref() != Some(&text) => {
                    warn!(error = text, "the Lease cannot be read or written");
                    trouble = Some(text);
                }
                Err(_) => {}
            }
            self.tell(&leader, renewed);
            // Woken more often than it writes: a process that was stopped finds out at once.
            let _ = tokio::time::timeout(self.jittered(before), stop.changed()).await;
            self.tell(&leader, renewed);
        }
        if renewed.is_some() {
            leader.send_replace(false);
            self.release().await;
        }
    }

    fn tell(&self, leader: &Sender<bool>, renewed: Option<Duration>) {
        let leads = renewed.is_some_and(|renewed| boot_time().saturating_sub(renewed) < self.timing.renew_deadline);
        let changed = leader.send_if_modified(|before| std::mem::replace(before, leads) != leads);
        if changed {
            let identity = self.identity.as_str();
            if leads { info!(identity, "leading") } else { warn!(identity, "not leading any more") }
        }
    }

    fn jittered(&self, at: Duration) -> Duration {
        // Spread by up to a fifth, so that candidates do not write at the same moment.
        let fifth = self.timing.retry / 5;
        self.timing.retry + fifth.mul_f64(f64::from(at.subsec_nanos() % 1000) / 1000.0)
    }

    fn api(&self) -> Api<Lease> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// One try. Answers whether the Lease is ours.
    async fn step(&self, observed: &mut Observed) -> Result<bool, String> {
        let lease = self.api().get_opt(LEASE).await.map_err(|error| error.to_string())?;
        let now = boot_time();
        let version = lease.as_ref().and_then(ResourceExt::resource_version).unwrap_or_default();
        if observed.as_ref().is_none_or(|(seen, _)| *seen != version) {
            *observed = Some((version, now));
        }
        let since = observed.as_ref().map_or(now, |(_, since)| *since);
        let holder = lease.as_ref().and_then(|lease| lease.spec.as_ref()?.holder_identity.as_deref());
        let seen = match &lease {
            None => Seen::Absent,
            Some(_) => Seen::Held { holder: holder.unwrap_or_default(), unchanged: now.saturating_sub(since) },
        };
        let action = decide(&self.identity, seen, &self.timing);
        let params = PostParams::default();
        let written = match (action, lease) {
            (Action::Wait, _) => return Ok(false),
            (Action::Create, _) | (_, None) => self.api().create(&params, &self.record(None)).await,
            (Action::Take | Action::Renew, Some(lease)) => {
                self.api().replace(LEASE, &params, &self.record(Some(lease))).await
            }
        };
        match written {
            Ok(_) => Ok(true),
            // Somebody else was faster.
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
            Err(error) => Err(error.to_string()),
        }
    }

    /// The Lease with our name in it; the resource version of the one before makes the write fail if it has changed.
    fn record(&self, before: Option<Lease>) -> Lease {
        let now = MicroTime(Timestamp::now());
        let mut lease = before.unwrap_or_else(|| Lease {
            metadata: ObjectMeta {
                name: Some(LEASE.into()),
                namespace: Some(self.namespace.clone()),
                ..ObjectMeta::default()
            },
            spec: None,
        });
        let spec: &mut LeaseSpec = lease.spec.get_or_insert_default();
        if spec.holder_identity.as_deref() != Some(&self.identity) {
            spec.holder_identity = Some(self.identity.clone());
            spec.acquire_time = Some(now.clone());
            spec.lease_transitions = Some(spec.lease_transitions.unwrap_or(0) + 1);
        }
        spec.renew_time = Some(now);
        spec.lease_duration_seconds = Some(self.timing.duration.as_secs() as i32);
        lease
    }

    /// Empties the Lease, so that the next one need not wait.
    async fn release(&self) {
        let release = async {
            let mut lease = self.api().get(LEASE).await?;
            let spec = lease.spec.get_or_insert_default();
            if spec.holder_identity.as_deref() == Some(&self.identity) {
                spec.holder_identity = Some(String::new());
                self.api().replace(LEASE, &PostParams::default(), &lease).await?;
            }
            Ok::<(), kube::Error>(())
        };
        match tokio::time::timeout(self.timing.retry, release).await {
            Ok(Ok(())) => info!("the Lease is given back"),
            Ok(Err(error)) => warn!(%error, "the Lease cannot be given back; it runs out by itself"),
            Err(_) => warn!("the Lease cannot be given back in time; it runs out by itself"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table() {
        let timing = Timing::default();
        let held = |holder, seconds| Seen::Held { holder, unchanged: Duration::from_secs(seconds) };
        for (seen, action) in [
            (Seen::Absent, Action::Create),
            (held("", 0), Action::Take),
            (held("me", 0), Action::Renew),
            (held("me", 99), Action::Renew),
            (held("other", 0), Action::Wait),
            (held("other", 14), Action::Wait),
            (held("other", 15), Action::Take),
        ] {
            assert_eq!(decide("me", seen, &timing), action, "{seen:?}");
        }
    }

    #[test]
    fn a_leader_stops_before_the_lease_is_free() {
        let timing = Timing::default();
        assert!(timing.renew_deadline + timing.retry < timing.duration);
    }
}
