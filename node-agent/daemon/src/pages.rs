//! `/healthz`, `/readyz` and `/metrics`.

use crate::metrics::Metrics;
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, HeaderName};
use axum::routing::get;
use jiff::Timestamp;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::net::TcpListener;

/// State behind the health pages.
#[derive(Debug)]
pub(crate) struct Health(Mutex<HealthState>);

#[derive(Debug)]
struct HealthState {
    /// Why the scan in progress counts as hung.
    hangs: Option<String>,
    /// Why the server lacks the current facts.
    missing: Option<String>,
    observed: Option<Timestamp>,
}

impl Health {
    pub fn new() -> Health {
        let missing = Some("the machine has not been described yet".into());
        Health(Mutex::new(HealthState { hangs: None, missing, observed: None }))
    }

    fn state(&self) -> MutexGuard<'_, HealthState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a scan ended, or that it hangs.
    pub fn scanned(&self, hangs: Option<String>) {
        self.state().hangs = hangs;
    }

    /// Records that the server has the facts read at this time.
    pub fn in_sync(&self, observed: Option<Timestamp>) {
        let mut state = self.state();
        (state.missing, state.observed) = (None, observed);
    }

    /// Records that the server lacks the latest facts.
    pub fn not_written(&self, why: String) {
        self.state().missing = Some(why);
    }
}

/// Data sources of the pages.
#[derive(Clone)]
pub(crate) struct Pages {
    pub health: Arc<Health>,
    pub metrics: Arc<Metrics>,
}

pub(crate) async fn serve(listener: TcpListener, pages: Pages) {
    let router = Router::new()
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .with_state(pages);
    if let Err(error) = axum::serve(listener, router).await {
        tracing::warn!(%error, "health and metrics are no longer served");
    }
}

fn page(fault: Option<&String>, code: StatusCode) -> (StatusCode, String) {
    fault.map_or((StatusCode::OK, "ok\n".into()), |fault| (code, format!("{fault}\n")))
}

async fn healthz(State(pages): State<Pages>) -> (StatusCode, String) {
    page(pages.health.state().hangs.as_ref(), StatusCode::INTERNAL_SERVER_ERROR)
}

async fn readyz(State(pages): State<Pages>) -> (StatusCode, String) {
    page(pages.health.state().missing.as_ref(), StatusCode::SERVICE_UNAVAILABLE)
}

async fn metrics(State(pages): State<Pages>) -> ([(HeaderName, &'static str); 1], String) {
    let observed = pages.health.state().observed;
    ([(CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], pages.metrics.text(observed))
}
