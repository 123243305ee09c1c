//! `/healthz`, `/readyz` and `/metrics`. The last one is public, or served over TLS to authorized
//! readers.

mod auth;
mod tls;

use self::auth::{AuthError, Authorizer};
use self::tls::Tls;
use super::election::Leadership;
use super::metrics::Metrics;
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, HeaderMap, HeaderName};
use axum::routing::get;
use axum::serve::Listener;
use kube::Client;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::watch::Receiver;

/// A main loop without progress for this long is hung, because it normally wakes every second.
const HUNG_AFTER: Duration = Duration::from_secs(30);

/// Health of the main loop and the watches.
pub(super) struct Health {
    watches: Vec<String>,
    state: Mutex<HealthState>,
}

struct HealthState {
    tick: Instant,
    /// State of each watch by name: listed, or the last error.
    watches: BTreeMap<String, Result<(), String>>,
}

impl Health {
    /// Starts with a live main loop and watches that have not listed anything yet.
    pub fn new(watches: impl IntoIterator<Item = String>) -> Health {
        let watches = watches.into_iter().collect();
        Health { watches, state: Mutex::new(HealthState { tick: Instant::now(), watches: BTreeMap::new() }) }
    }

    fn state(&self) -> MutexGuard<'_, HealthState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the main loop is alive.
    pub fn tick(&self) {
        self.state().tick = Instant::now();
    }

    /// Records that a watch has completed its list.
    pub fn listed(&self, watch: &str) {
        self.state().watches.insert(watch.to_string(), Ok(()));
    }

    /// Records an error of a watch that has not completed its first list.
    pub fn watch_failed(&self, watch: &str, error: &str) {
        let mut state = self.state();
        if state.watches.get(watch).is_none_or(Result::is_err) {
            state.watches.insert(watch.to_string(), Err(error.to_string()));
        }
    }

    /// Watches that must be listed before work can start, one line each.
    pub fn missing(&self) -> Vec<String> {
        let state = self.state();
        self.watches
            .iter()
            .filter_map(|watch| match state.watches.get(watch) {
                Some(Ok(())) => None,
                Some(Err(error)) => Some(format!("cannot watch {watch}: {error}")),
                None => Some(format!("{watch}: the first list is not complete")),
            })
            .collect()
    }
}

/// State shared by the endpoints.
#[derive(Clone)]
pub(super) struct Endpoints {
    pub health: Arc<Health>,
    pub metrics: Arc<Metrics>,
    pub leadership: Leadership,
    /// Sets the gauges before the metrics are scraped.
    pub gauges: Arc<dyn Fn() + Send + Sync>,
}

/// Access to the metrics.
pub(super) enum MetricsAccess {
    /// Public, on the listener of the other endpoints.
    Public,
    /// Authorized readers only, on a separate listener.
    Authorized(TcpListener, Client),
}

/// Serves the endpoints until `stop`.
pub(super) async fn serve(
    listener: TcpListener,
    endpoints: Endpoints,
    metrics_access: MetricsAccess,
    stop: Receiver<bool>,
) {
    let public = Router::new().route("/healthz", get(healthz)).route("/readyz", get(readyz));
    match metrics_access {
        MetricsAccess::Public => {
            serve_on(listener, public.route("/metrics", get(metrics)).with_state(endpoints), stop).await
        }
        MetricsAccess::Authorized(secure, client) => {
            let state = (endpoints.clone(), Arc::new(Authorizer::new(client)));
            let authorized = Router::new().route("/metrics", get(authorized_metrics)).with_state(state);
            match Tls::new(secure) {
                Ok(tls) => {
                    let public = serve_on(listener, public.with_state(endpoints), stop.clone());
                    tokio::join!(public, serve_on(tls, authorized, stop));
                }
                Err(error) => {
                    tracing::error!(%error, "cannot create a certificate; not serving metrics");
                    serve_on(listener, public.with_state(endpoints), stop).await;
                }
            }
        }
    }
}

async fn serve_on<L: Listener>(listener: L, router: Router, mut stop: Receiver<bool>)
where
    L::Addr: std::fmt::Debug,
{
    let stopped = async move {
        let _ = stop.wait_for(|stop| *stop).await;
    };
    if let Err(error) = axum::serve(listener, router).with_graceful_shutdown(stopped).await {
        tracing::warn!(%error, "the HTTP server failed; health and metrics are no longer served");
    }
}

async fn healthz(State(endpoints): State<Endpoints>) -> (StatusCode, String) {
    liveness(endpoints.health.state().tick.elapsed())
}

/// The liveness response for a main loop that last made progress this long ago.
fn liveness(age: Duration) -> (StatusCode, String) {
    if age < HUNG_AFTER {
        (StatusCode::OK, "ok\n".into())
    } else {
        (StatusCode::INTERNAL_SERVER_ERROR, format!("the main loop has made no progress for {} s\n", age.as_secs()))
    }
}

async fn readyz(State(endpoints): State<Endpoints>) -> (StatusCode, String) {
    let missing = endpoints.health.missing();
    if missing.is_empty() {
        let role = if endpoints.leadership.is_held() { "leading" } else { "standing by" };
        (StatusCode::OK, format!("ok, {role}\n"))
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, missing.join("\n") + "\n")
    }
}

async fn authorized_metrics(
    State((endpoints, authorizer)): State<(Endpoints, Arc<Authorizer>)>,
    headers: HeaderMap,
) -> Result<([(HeaderName, &'static str); 1], String), AuthError> {
    authorizer.check(&headers).await?;
    Ok(metrics(State(endpoints)).await)
}

async fn metrics(State(endpoints): State<Endpoints>) -> ([(HeaderName, &'static str); 1], String) {
    (endpoints.gauges)();
    ([(CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], endpoints.metrics.text())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::election::{boot_time, channel};
    use crate::metrics::Counts;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    const TIMEOUT: Duration = Duration::from_secs(30);

    /// Status line, headers and body of the response to a request.
    async fn http_get(address: std::net::SocketAddr, path: &str) -> String {
        let fetch = async {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).await.unwrap();
            text
        };
        tokio::time::timeout(TIMEOUT, fetch).await.expect("a response within 30 s")
    }

    #[tokio::test]
    async fn the_endpoints_report_missing_watches_and_stop_on_request() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (leader, leadership) = channel(boot_time);
        let (stop, stopped) = tokio::sync::watch::channel(false);
        let health = Arc::new(Health::new(["Pod", "Node"].map(String::from)));
        let metrics = Arc::new(Metrics::new());
        let gauges = Arc::new({
            let metrics = Arc::clone(&metrics);
            move || metrics.set_gauges(&Counts::default(), (7, Duration::ZERO), false)
        });
        let endpoints = Endpoints { health: Arc::clone(&health), metrics, leadership, gauges };
        let server = tokio::spawn(serve(listener, endpoints, MetricsAccess::Public, stopped));

        assert!(http_get(address, "/healthz").await.starts_with("HTTP/1.1 200"));
        health.watch_failed("Pod", "forbidden");
        let ready = http_get(address, "/readyz").await;
        assert!(ready.starts_with("HTTP/1.1 503"), "{ready}");
        assert!(ready.ends_with("cannot watch Pod: forbidden\nNode: the first list is not complete\n"), "{ready}");
        health.listed("Pod");
        health.listed("Node");
        // A listed watch stays listed, so a later failure does not end readiness.
        health.watch_failed("Pod", "gone");
        assert!(http_get(address, "/readyz").await.ends_with("ok, standing by\n"));
        leader.lead_forever();
        assert!(http_get(address, "/readyz").await.ends_with("ok, leading\n"));
        let metrics = http_get(address, "/metrics").await;
        assert!(metrics.contains("switchyard_queue_depth 7") && metrics.ends_with("# EOF\n"), "{metrics}");
        assert!(http_get(address, "/other").await.starts_with("HTTP/1.1 404"));

        stop.send_replace(true);
        tokio::time::timeout(TIMEOUT, server).await.expect("ends within 30 s").unwrap();
        assert!(TcpStream::connect(address).await.is_err());
    }

    #[test]
    fn a_hung_main_loop_fails_the_liveness_check() {
        assert_eq!(liveness(HUNG_AFTER - Duration::from_secs(1)).0, StatusCode::OK);
        let (code, text) = liveness(HUNG_AFTER);
        assert_eq!(
            (code, text.as_str()),
            (StatusCode::INTERNAL_SERVER_ERROR, "the main loop has made no progress for 30 s\n")
        );
    }
}
