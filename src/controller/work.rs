//! The main loop: reconciles queued jobs concurrently while this controller leads.

use super::election::{self, Candidate, LeaseMemory, boot_time};
use super::metrics::{Counts, Metrics};
use super::pages::{self, Health, Pages, Readers};
use super::queue::{Queue, Schedule};
use super::reconcile::Outcome;
use super::{
    Context, Error, Settings, admissions, clock, openings, policies, progress, provisioning, reader, taints, volumes,
    warnings, watch,
};
use crate::apply::Executor;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use switchyard_ledger::fairness::{Fairness, Weights};
use switchyard_ledger::index::Index;
use switchyard_ledger::leader_state::LeaderState;
use switchyard_ledger::predictor::Predictor;
use switchyard_plan::cluster::events::{EventDraft, Severity};
use switchyard_service::ServerClock;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::sync::watch::{Receiver, channel};
use tracing::{Instrument, debug, info, info_span, warn};

/// How often every job is reconciled without a change. This should find nothing to do.
const RESYNC: Duration = Duration::from_secs(600);
/// How long running reconciles may take after `stop`.
const LAST_WORK: Duration = Duration::from_secs(10);
/// Interval at which the main loop reports that it is alive.
const TICK: Duration = Duration::from_secs(1);

/// Runs the controller until `stop` becomes true.
///
/// # Errors
/// Cannot bind the HTTP address, or the kubeconfig is invalid.
pub async fn run(settings: Settings, config: kube::Config, mut stop: Receiver<bool>) -> Result<(), Error> {
    let metrics = Arc::new(Metrics::new());
    let answered = {
        let metrics = Arc::clone(&metrics);
        Arc::new(move |verb, resource, status| metrics.request(verb, resource, status))
    };
    let clock = Arc::<ServerClock>::default();
    let client = switchyard_service::client(config, "switchyard-controller", answered, Arc::clone(&clock))
        .map_err(Error::Config)?;
    let address = settings.listen;
    let listener = TcpListener::bind(address).await.map_err(|error| Error::Listen { address, error })?;
    let readers = match settings.secure_metrics {
        Some(address) => {
            let secure = TcpListener::bind(address).await.map_err(|error| Error::SecureMetrics { address, error })?;
            info!(secure_metrics = %secure.local_addr().unwrap_or(address), "the metrics are for those who may read them");
            Readers::Known(secure, client.clone())
        }
        None => Readers::All,
    };
    let (leader, leading) = election::channel(boot_time);
    let reporter = Reporter { controller: "switchyard-controller".into(), instance: Some(settings.identity.clone()) };
    let mut index = Index::default();
    index.predictor = settings.predicts.then(Predictor::default);
    index.longest_reservation = Some(settings.longest_reservation);
    (index.gang_classes, index.names_others) = (settings.gang_classes.clone(), settings.names_others);
    index.fairness = (!settings.weights.is_empty()).then(|| Fairness::new(Weights::new(settings.weights.clone())));
    let context = Context {
        executor: Executor::new(client.clone()),
        recorder: Recorder::new(client.clone(), reporter),
        client: client.clone(),
        index: Arc::new(Mutex::new(index)),
        queue: Queue::default(),
        metrics,
        health: Arc::new(Health::new(watch::names(&settings))),
        leading,
        clock,
        silent: Arc::default(),
        settings: Arc::new(settings),
    };
    let settings = &context.settings;
    info!(identity = settings.identity, listen = %listener.local_addr().unwrap_or(address), "the controller starts");
    watch::start(&context);
    let pages = Pages {
        health: Arc::clone(&context.health),
        metrics: Arc::clone(&context.metrics),
        leading: context.leading.clone(),
        gauges: Arc::new({
            let context = context.clone();
            move || {
                let counts = Counts::of(&context.index());
                context.metrics.gauges(&counts, context.queue.depth(), context.leads());
                context.metrics.clock_skew(context.clock.skew());
            }
        }),
    };
    let pages = tokio::spawn(pages::serve(listener, pages, readers, stop.clone()));
    // Set after the last reconcile, so that this controller no longer works when the next leader
    // starts.
    let (retire, retired) = channel(false);
    let (report, policies) = channel(None);
    let election = match settings.election {
        Some(timing) => {
            let (namespace, identity) = (settings.namespace.clone(), settings.identity.clone());
            let server = Arc::clone(&context.clock);
            let (saved, recalled) = (context.clone(), context.clone());
            let memory = LeaseMemory {
                save: Box::new(move || saved.index().leader_state().to_json()),
                recall: Box::new(move |text| recalled.index().restore(LeaderState::parse(text))),
            };
            let candidate =
                Candidate { client, namespace, identity, timing, clock: boot_time, server, memory, policies };
            Some(tokio::spawn(candidate.run(leader, retired)))
        }
        None => {
            leader.forever();
            None
        }
    };
    tokio::spawn(reader::run(context.clone(), progress::Progress, stop.clone()));
    tokio::spawn(reader::run(context.clone(), openings::Openings, stop.clone()));
    tokio::spawn(reader::run(context.clone(), warnings::Warnings, stop.clone()));
    tokio::spawn(reader::run(context.clone(), admissions::Admissions, stop.clone()));
    tokio::spawn(reader::run(context.clone(), volumes::Volumes::default(), stop.clone()));
    tokio::spawn(policies::run(context.clone(), report, stop.clone()));
    tokio::spawn(provisioning::run(context.clone(), stop.clone()));
    tokio::spawn(taints::run(context.clone(), stop.clone()));
    tokio::spawn(clock::run(context.clone(), stop.clone()));
    let running = Arc::new(Semaphore::new(settings.concurrent_reconciles));
    tokio::select! {
        () = work(&context, &running) => {}
        _ = stop.wait_for(|stop| *stop) => {}
    }
    info!("stopping: no new work");
    let all = u32::try_from(settings.concurrent_reconciles).unwrap_or(u32::MAX);
    let _ = tokio::time::timeout(LAST_WORK, running.acquire_many(all)).await;
    retire.send_replace(true);
    if let Some(election) = election {
        let _ = election.await;
    }
    let _ = tokio::time::timeout(TICK, pages).await;
    info!("stopped");
    Ok(())
}

/// Reconciles due jobs until it is stopped.
async fn work(context: &Context, running: &Arc<Semaphore>) {
    let mut leading = context.leading.clone();
    loop {
        wait_until_ready(context).await;
        while !leading.now() {
            context.health.tick();
            let _ = tokio::time::timeout(TICK, leading.changed()).await;
        }
        // Reconcile everything that may have changed under another leader. Use queue order instead
        // of the order in which the watches scheduled the jobs.
        context.queue.with(Schedule::clear);
        context.index().job_states.values_mut().for_each(|family| family.progress.reset_for_new_term());
        context.look_at_all();
        let mut resync = Instant::now() + RESYNC;
        while leading.now() {
            context.health.tick();
            if Instant::now() >= resync {
                context.look_at_all();
                resync = Instant::now() + RESYNC;
            }
            let Ok(turn) = Arc::clone(running).acquire_owned().await else { return };
            let Ok(key) = tokio::time::timeout(TICK, context.queue.next()).await else { continue };
            let context = context.clone();
            let span = info_span!("reconcile", job = %*key);
            tokio::spawn(
                async move {
                    let start = Instant::now();
                    let outcome = context.reconcile(&key, key.look).await;
                    drop(key);
                    context.metrics.reconciled(outcome.word(), start.elapsed());
                    drop(turn);
                }
                .instrument(span),
            );
        }
    }
}

/// Waits until all watches have listed, because plans from a partial cache would be wrong.
async fn wait_until_ready(context: &Context) {
    let mut told: Vec<String> = Vec::new();
    loop {
        context.health.tick();
        let missing = context.health.missing();
        if missing.is_empty() {
            info!("all kinds are listed");
            return;
        }
        if missing != told {
            debug!(missing = missing.join("; "), "not ready");
            told = missing;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

impl Outcome {
    fn word(self) -> &'static str {
        match self {
            Outcome::Quiet => "quiet",
            Outcome::Wrote => "wrote",
            Outcome::Behind => "behind",
            Outcome::Refused => "refused",
        }
    }
}

impl Context {
    pub(super) fn look_at_all(&self) {
        let now = Instant::now();
        let keys = self.index().all_in_order(self.now());
        for key in keys.into_iter().filter(|key| self.watches(key)) {
            self.queue.add(key, now);
        }
    }

    /// Sends events. They are informational; nothing depends on them.
    pub(super) async fn tell(&self, job: &ObjectReference, events: Vec<EventDraft>) {
        for event in events {
            let note: String = event.note.chars().take(1000).collect();
            let kind = match event.severity {
                Severity::Normal => EventType::Normal,
                Severity::Warning => EventType::Warning,
            };
            self.metrics.event(event.reason);
            let (reason, action) = (event.reason.to_string(), action(&note));
            let event = Event { type_: kind, reason, note: Some(note), action, secondary: None };
            match self.recorder.publish(&event, job).await {
                Ok(()) if self.silent.swap(false, Ordering::Relaxed) => info!("events can be sent again"),
                Ok(()) => {}
                // Log an error once, not with every event.
                Err(error) if !self.silent.swap(true, Ordering::Relaxed) => warn!(%error, "an event cannot be sent"),
                Err(error) => debug!(%error, "an event was not sent"),
            }
        }
    }
}

/// Derives the action of an event from its note. The recorder merges events with the same reason
/// and action, and keeps only the first note ("Restarting (x3): attempt 2 starts"), so events with
/// different notes need different actions.
fn action(note: &str) -> String {
    let mut hasher = DefaultHasher::new();
    note.hash(&mut hasher);
    format!("Reconcile{:016X}", hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::action;

    #[test]
    fn events_with_other_words_are_not_merged() {
        let [second, third] = ["attempt 2 starts: a", "attempt 3 starts: a"].map(action);
        assert!(second != third && second == action("attempt 2 starts: a") && second.len() <= 128);
    }
}
