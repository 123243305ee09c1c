//! The main loop: reconciles queued jobs concurrently while this controller leads.

use super::election::{self, Candidate, LeaseMemory, boot_time};
use super::endpoints::{self, Endpoints, Health, MetricsAccess};
use super::metrics::{Counts, Metrics};
use super::queue::{Queue, Schedule};
use super::reconcile::Outcome;
use super::{
    Context, Error, Settings, admissions, clock, log_heads, policies, progress, provisioning, reader, taints, volumes,
    warnings, watch,
};
use crate::apply::Executor;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use switchyard_ledger::index::Index;
use switchyard_ledger::queue::LeaderState;
use switchyard_plan::cluster::events::{EventDraft, Severity};
use switchyard_service::ServerClock;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::sync::watch::{Receiver, channel};
use tracing::{Instrument, debug, info, info_span, warn};

/// How often every job is reconciled without a change. This should find nothing to do.
const RESYNC: Duration = Duration::from_secs(600);
/// How long running reconciles may take after `stop`.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which the main loop reports that it is alive.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// Runs the controller until `stop` becomes true.
///
/// # Errors
/// Cannot bind the HTTP address, or the kubeconfig is invalid.
pub async fn run(settings: Settings, config: kube::Config, mut stop: Receiver<bool>) -> Result<(), Error> {
    let metrics = Arc::new(Metrics::new());
    let on_response = {
        let metrics = Arc::clone(&metrics);
        Arc::new(move |verb, resource, status| metrics.request(verb, resource, status))
    };
    let clock = Arc::<ServerClock>::default();
    let client = switchyard_service::client(config, "switchyard-controller", on_response, Arc::clone(&clock))
        .map_err(Error::Config)?;
    let address = settings.listen;
    let listener = TcpListener::bind(address).await.map_err(|error| Error::Listen { address, error })?;
    let metrics_access = match settings.secure_metrics {
        Some(address) => {
            let secure = TcpListener::bind(address).await.map_err(|error| Error::SecureMetrics { address, error })?;
            info!(secure_metrics = %secure.local_addr().unwrap_or(address), "serving metrics to authorized readers only");
            MetricsAccess::Authorized(secure, client.clone())
        }
        None => MetricsAccess::Public,
    };
    let (leader, leadership) = election::channel(boot_time);
    let reporter = Reporter { controller: "switchyard-controller".into(), instance: Some(settings.identity.clone()) };
    let mut index = Index::default();
    index.queue.configure(|queue| queue.clone_from(&settings.queue));
    let context = Context {
        executor: Executor::new(client.clone()),
        recorder: Recorder::new(client.clone(), reporter),
        client: client.clone(),
        index: Arc::new(Mutex::new(index)),
        queue: Queue::default(),
        metrics,
        health: Arc::new(Health::new(watch::names(&settings))),
        leadership,
        clock,
        events_failing: Arc::default(),
        settings: Arc::new(settings),
    };
    let settings = &context.settings;
    info!(identity = settings.identity, listen = %listener.local_addr().unwrap_or(address), "starting the controller");
    watch::start(&context);
    let endpoints = Endpoints {
        health: Arc::clone(&context.health),
        metrics: Arc::clone(&context.metrics),
        leadership: context.leadership.clone(),
        gauges: Arc::new({
            let context = context.clone();
            move || {
                let counts = Counts::of(&context.index());
                context.metrics.set_gauges(&counts, context.queue.depth(), context.is_leader());
                context.metrics.clock_skew(context.clock.skew());
            }
        }),
    };
    let http_server = tokio::spawn(endpoints::serve(listener, endpoints, metrics_access, stop.clone()));
    // Set after the last reconcile, so that this controller no longer works when the next leader
    // starts.
    let (end_candidacy, candidacy_ended) = channel(false);
    let (report, policies) = channel(None);
    let election = match settings.election {
        Some(timing) => {
            let (namespace, identity) = (settings.namespace.clone(), settings.identity.clone());
            let server = Arc::clone(&context.clock);
            let (source, target) = (context.clone(), context.clone());
            let memory = LeaseMemory {
                save: Box::new(move || source.index().leader_state().to_json()),
                restore: Box::new(move |text| target.index().restore(LeaderState::parse(text))),
            };
            let candidate =
                Candidate { client, namespace, identity, timing, clock: boot_time, server, memory, policies };
            Some(tokio::spawn(candidate.run(leader, candidacy_ended)))
        }
        None => {
            leader.lead_forever();
            None
        }
    };
    tokio::spawn(reader::run(context.clone(), progress::Progress, stop.clone()));
    tokio::spawn(reader::run(context.clone(), log_heads::LogHeads, stop.clone()));
    tokio::spawn(reader::run(context.clone(), warnings::Warnings, stop.clone()));
    tokio::spawn(reader::run(context.clone(), admissions::Admissions, stop.clone()));
    tokio::spawn(reader::run(context.clone(), volumes::Volumes::default(), stop.clone()));
    tokio::spawn(policies::run(context.clone(), report, stop.clone()));
    tokio::spawn(provisioning::run(context.clone(), stop.clone()));
    tokio::spawn(taints::run(context.clone(), stop.clone()));
    tokio::spawn(clock::run(context.clone(), stop.clone()));
    let running = Arc::new(Semaphore::new(settings.concurrent_reconciles));
    tokio::select! {
        () = reconcile_due(&context, &running) => {}
        _ = stop.wait_for(|stop| *stop) => {}
    }
    info!("stopping; waiting for running reconciles");
    let all = u32::try_from(settings.concurrent_reconciles).unwrap_or(u32::MAX);
    let _ = tokio::time::timeout(SHUTDOWN_TIMEOUT, running.acquire_many(all)).await;
    end_candidacy.send_replace(true);
    if let Some(election) = election {
        let _ = election.await;
    }
    let _ = tokio::time::timeout(HEARTBEAT, http_server).await;
    info!("stopped");
    Ok(())
}

/// Reconciles due jobs until it is stopped.
async fn reconcile_due(context: &Context, running: &Arc<Semaphore>) {
    let mut leadership = context.leadership.clone();
    loop {
        wait_until_listed(context).await;
        while !leadership.is_held() {
            context.health.tick();
            let _ = tokio::time::timeout(HEARTBEAT, leadership.changed()).await;
        }
        // Reconcile everything that may have changed under another leader. Use queue order instead
        // of the order in which the watches scheduled the jobs.
        context.queue.with(Schedule::clear);
        context.index().job_states.values_mut().for_each(|family| family.progress.reset_for_new_term());
        context.requeue_all();
        let mut resync = Instant::now() + RESYNC;
        while leadership.is_held() {
            context.health.tick();
            if Instant::now() >= resync {
                context.requeue_all();
                resync = Instant::now() + RESYNC;
            }
            let Ok(permit) = Arc::clone(running).acquire_owned().await else { return };
            let Ok(key) = tokio::time::timeout(HEARTBEAT, context.queue.next()).await else { continue };
            let context = context.clone();
            let span = info_span!("reconcile", job = %*key);
            tokio::spawn(
                async move {
                    let start = Instant::now();
                    let outcome = context.reconcile(&key, key.pass).await;
                    drop(key);
                    context.metrics.reconciled(outcome.label(), start.elapsed());
                    drop(permit);
                }
                .instrument(span),
            );
        }
    }
}

/// Waits until all watches have listed, because plans from a partial cache would be wrong.
async fn wait_until_listed(context: &Context) {
    let mut logged: Vec<String> = Vec::new();
    loop {
        context.health.tick();
        let missing = context.health.missing();
        if missing.is_empty() {
            info!("all kinds are listed");
            return;
        }
        if missing != logged {
            debug!(missing = missing.join("; "), "not ready");
            logged = missing;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

impl Outcome {
    fn label(self) -> &'static str {
        match self {
            Outcome::Quiet => "quiet",
            Outcome::Wrote => "wrote",
            Outcome::Behind => "behind",
            Outcome::Refused => "refused",
        }
    }
}

impl Context {
    pub(super) fn requeue_all(&self) {
        let now = Instant::now();
        let keys = self.index().all_in_order(self.now());
        for key in keys.into_iter().filter(|key| self.is_watched(key)) {
            self.queue.add(key, now);
        }
    }

    /// Sends events. They are informational; nothing depends on them.
    pub(super) async fn publish_events(&self, job: &ObjectReference, events: Vec<EventDraft>) {
        for event in events {
            let note: String = event.note.chars().take(1000).collect();
            let kind = match event.severity {
                Severity::Normal => EventType::Normal,
                Severity::Warning => EventType::Warning,
            };
            self.metrics.event(event.reason);
            let (reason, action) = (event.reason.to_string(), action_for(&note));
            let event = Event { type_: kind, reason, note: Some(note), action, secondary: None };
            match self.recorder.publish(&event, job).await {
                Ok(()) if self.events_failing.swap(false, Ordering::Relaxed) => info!("events are sent again"),
                Ok(()) => {}
                // Log an error once, not with every event.
                Err(error) if !self.events_failing.swap(true, Ordering::Relaxed) => {
                    warn!(%error, "cannot send events")
                }
                Err(error) => debug!(%error, "cannot send an event"),
            }
        }
    }
}

/// Derives the action of an event from its note. The recorder merges events with the same reason
/// and action, and keeps only the first note ("Restarting (x3): attempt 2 starts"), so events with
/// different notes need different actions.
fn action_for(note: &str) -> String {
    let mut hasher = DefaultHasher::new();
    note.hash(&mut hasher);
    format!("Reconcile{:016X}", hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::action_for;

    #[test]
    fn events_with_different_notes_are_not_merged() {
        let [second, third] = ["attempt 2 starts: a", "attempt 3 starts: a"].map(action_for);
        assert!(second != third && second == action_for("attempt 2 starts: a") && second.len() <= 128);
    }
}
