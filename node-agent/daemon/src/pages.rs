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

/// What the pages report.
#[derive(Debug)]
pub(crate) struct Health(Mutex<Told>);

#[derive(Debug)]
struct Told {
    /// Why the last scan has not ended.
    hangs: Option<String>,
    /// Why the server does not have the current facts.
    missing: Option<String>,
    observed: Option<Timestamp>,
}

impl Health {
    pub fn new() -> Health {
        let missing = Some("the machine has not been described yet".into());
        Health(Mutex::new(Told { hangs: None, missing, observed: None }))
    }

    fn state(&self) -> MutexGuard<'_, Told> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A scan ended, or hangs.
    pub fn scanned(&self, hangs: Option<String>) {
        self.state().hangs = hangs;
    }

    /// The server has the facts that were read at this time.
    pub fn in_sync(&self, observed: Option<Timestamp>) {
        let mut state = self.state();
        (state.missing, state.observed) = (None, observed);
    }

    /// The server does not have the newest facts.
    pub fn not_written(&self, why: String) {
        self.state().missing = Some(why);
    }
}

/// Where the pages get their content.
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
