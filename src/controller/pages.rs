//! `/healthz`, `/readyz` and `/metrics`.

use super::watch::KINDS;
use super::{Context, reconcile};
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::watch::Receiver;

/// A main loop that did nothing for this long hangs: it wakes every second.
const ALIVE: Duration = Duration::from_secs(30);

/// What the pages tell.
pub(super) struct Health {
    state: Mutex<State_>,
}

struct State_ {
    tick: Instant,
    /// By kind: listed, or the last error.
    watches: BTreeMap<&'static str, Result<(), String>>,
}

impl Health {
    pub fn new() -> Health {
        Health { state: Mutex::new(State_ { tick: Instant::now(), watches: BTreeMap::new() }) }
    }

    fn state(&self) -> MutexGuard<'_, State_> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The main loop is alive.
    pub fn tick(&self) {
        self.state().tick = Instant::now();
    }

    /// A watch has shown all there is.
    pub fn listed(&self, kind: &'static str) {
        self.state().watches.insert(kind, Ok(()));
    }

    /// A watch that has not shown all yet failed.
    pub fn watch_failed(&self, kind: &'static str, error: &str) {
        let mut state = self.state();
        if state.watches.get(kind).is_none_or(Result::is_err) {
            state.watches.insert(kind, Err(error.to_string()));
        }
    }

    /// What is missing before work can begin, one line each.
    pub fn missing(&self) -> Vec<String> {
        let state = self.state();
        KINDS
            .iter()
            .filter_map(|kind| match state.watches.get(kind) {
                Some(Ok(())) => None,
                Some(Err(error)) => Some(format!("{kind} cannot be watched: {error}")),
                None => Some(format!("{kind} are not listed yet")),
            })
            .collect()
    }
}

/// Serves the pages until `stop`.
pub(super) async fn serve(listener: TcpListener, context: Context, mut stop: Receiver<bool>) {
    let router = Router::new()
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .with_state(context);
    let stopped = async move {
        let _ = stop.wait_for(|stop| *stop).await;
    };
    if let Err(error) = axum::serve(listener, router).with_graceful_shutdown(stopped).await {
        tracing::warn!(%error, "health and metrics are not served any more");
    }
}

async fn healthz(State(context): State<Context>) -> (StatusCode, String) {
    let age = context.health.state().tick.elapsed();
    if age < ALIVE {
        (StatusCode::OK, "ok\n".into())
    } else {
        (StatusCode::INTERNAL_SERVER_ERROR, format!("the main loop has not moved for {} s\n", age.as_secs()))
    }
}

async fn readyz(State(context): State<Context>) -> (StatusCode, String) {
    let missing = context.health.missing();
    if missing.is_empty() {
        let role = if context.leads() { "leading" } else { "standing by" };
        (StatusCode::OK, format!("ok, {role}\n"))
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, missing.join("\n") + "\n")
    }
}

async fn metrics(State(context): State<Context>) -> String {
    let stages = reconcile::stages(&context.index());
    context.metrics.gauges(&stages, context.queue.depth(), context.leads());
    context.metrics.text()
}
