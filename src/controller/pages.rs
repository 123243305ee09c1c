//! `/healthz`, `/readyz` and `/metrics`. The last one is public, or served over TLS to authorized
//! readers.

mod access;
mod tls;

use self::access::{Access, Refused};
use self::tls::Tls;
use super::election::Leading;
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
const ALIVE: Duration = Duration::from_secs(30);

/// Health of the main loop and the watches.
pub(super) struct Health {
    watches: Vec<String>,
    facts: Mutex<Facts>,
}

struct Facts {
    tick: Instant,
    /// State of each watch by name: listed, or the last error.
    watches: BTreeMap<String, Result<(), String>>,
}

impl Health {
    /// Starts with a live main loop and watches that have not listed anything yet.
    pub fn new(watches: impl IntoIterator<Item = String>) -> Health {
        let watches = watches.into_iter().collect();
        Health { watches, facts: Mutex::new(Facts { tick: Instant::now(), watches: BTreeMap::new() }) }
    }

    fn facts(&self) -> MutexGuard<'_, Facts> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the main loop is alive.
    pub fn tick(&self) {
        self.facts().tick = Instant::now();
    }

    /// Records that a watch has completed its list.
    pub fn listed(&self, watch: &str) {
        self.facts().watches.insert(watch.to_string(), Ok(()));
    }

    /// Records an error of a watch that has not completed its first list.
    pub fn watch_failed(&self, watch: &str, error: &str) {
        let mut facts = self.facts();
        if facts.watches.get(watch).is_none_or(Result::is_err) {
            facts.watches.insert(watch.to_string(), Err(error.to_string()));
        }
    }

    /// Watches that must be listed before work can start, one line each.
    pub fn missing(&self) -> Vec<String> {
        let facts = self.facts();
        self.watches
            .iter()
            .filter_map(|watch| match facts.watches.get(watch) {
                Some(Ok(())) => None,
                Some(Err(error)) => Some(format!("{watch} cannot be watched: {error}")),
                None => Some(format!("{watch} are not listed yet")),
            })
            .collect()
    }
}

/// Sources of the pages.
#[derive(Clone)]
pub(super) struct Pages {
    pub health: Arc<Health>,
    pub metrics: Arc<Metrics>,
    pub leading: Leading,
    /// Sets the gauges before the metrics are scraped.
    pub gauges: Arc<dyn Fn() + Send + Sync>,
}

/// Access to the metrics.
pub(super) enum Readers {
    /// Public, on the listener of the other pages.
    All,
    /// Authorized readers only, on a listener of their own.
    Known(TcpListener, Client),
}

/// Serves the pages until `stop`.
pub(super) async fn serve(listener: TcpListener, pages: Pages, readers: Readers, stop: Receiver<bool>) {
    let open = Router::new().route("/healthz", get(healthz)).route("/readyz", get(readyz));
    match readers {
        Readers::All => serve_on(listener, open.route("/metrics", get(metrics)).with_state(pages), stop).await,
        Readers::Known(secure, client) => {
            let state = (pages.clone(), Arc::new(Access::new(client)));
            let closed = Router::new().route("/metrics", get(metrics_for_readers)).with_state(state);
            match Tls::new(secure) {
                Ok(tls) => {
                    let open = serve_on(listener, open.with_state(pages), stop.clone());
                    tokio::join!(open, serve_on(tls, closed, stop));
                }
                Err(error) => {
                    tracing::error!(%error, "the metrics are not served: no certificate");
                    serve_on(listener, open.with_state(pages), stop).await;
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
        tracing::warn!(%error, "health and metrics are not served any more");
    }
}

async fn healthz(State(pages): State<Pages>) -> (StatusCode, String) {
    alive(pages.health.facts().tick.elapsed())
}

/// The liveness response for a main loop that last made progress this long ago.
fn alive(age: Duration) -> (StatusCode, String) {
    if age < ALIVE {
        (StatusCode::OK, "ok\n".into())
    } else {
        (StatusCode::INTERNAL_SERVER_ERROR, format!("the main loop has not moved for {} s\n", age.as_secs()))
    }
}

async fn readyz(State(pages): State<Pages>) -> (StatusCode, String) {
    let missing = pages.health.missing();
    if missing.is_empty() {
        let role = if pages.leading.now() { "leading" } else { "standing by" };
        (StatusCode::OK, format!("ok, {role}\n"))
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, missing.join("\n") + "\n")
    }
}

async fn metrics_for_readers(
    State((pages, access)): State<(Pages, Arc<Access>)>,
    headers: HeaderMap,
) -> Result<([(HeaderName, &'static str); 1], String), Refused> {
    access.check(&headers).await?;
    Ok(metrics(State(pages)).await)
}

async fn metrics(State(pages): State<Pages>) -> ([(HeaderName, &'static str); 1], String) {
    (pages.gauges)();
    ([(CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], pages.metrics.text())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::election::{boot_time, channel};
    use crate::metrics::Counts;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    const PATIENCE: Duration = Duration::from_secs(30);

    /// Status line, headers and body of a page.
    async fn page(address: std::net::SocketAddr, path: &str) -> String {
        let ask = async {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).await.unwrap();
            text
        };
        tokio::time::timeout(PATIENCE, ask).await.expect("an answer within 30 s")
    }

    #[tokio::test]
    async fn the_pages_tell_what_is_missing_and_end_when_told() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (leader, leading) = channel(boot_time);
        let (stop, stopped) = tokio::sync::watch::channel(false);
        let health = Arc::new(Health::new(["Pod", "Node"].map(String::from)));
        let metrics = Arc::new(Metrics::new());
        let gauges = Arc::new({
            let metrics = Arc::clone(&metrics);
            move || metrics.gauges(&Counts::default(), (7, Duration::ZERO), false)
        });
        let pages = Pages { health: Arc::clone(&health), metrics, leading, gauges };
        let server = tokio::spawn(serve(listener, pages, Readers::All, stopped));

        assert!(page(address, "/healthz").await.starts_with("HTTP/1.1 200"));
        health.watch_failed("Pod", "forbidden");
        let ready = page(address, "/readyz").await;
        assert!(ready.starts_with("HTTP/1.1 503"), "{ready}");
        assert!(ready.ends_with("Pod cannot be watched: forbidden\nNode are not listed yet\n"), "{ready}");
        health.listed("Pod");
        health.listed("Node");
        // A listed watch stays listed, so a later failure does not end readiness.
        health.watch_failed("Pod", "gone");
        assert!(page(address, "/readyz").await.ends_with("ok, standing by\n"));
        leader.forever();
        assert!(page(address, "/readyz").await.ends_with("ok, leading\n"));
        let metrics = page(address, "/metrics").await;
        assert!(metrics.contains("switchyard_queue_depth 7") && metrics.ends_with("# EOF\n"), "{metrics}");
        assert!(page(address, "/other").await.starts_with("HTTP/1.1 404"));

        stop.send_replace(true);
        tokio::time::timeout(PATIENCE, server).await.expect("ends within 30 s").unwrap();
        assert!(TcpStream::connect(address).await.is_err());
    }

    #[test]
    fn a_main_loop_that_hangs_is_told() {
        assert_eq!(alive(ALIVE - Duration::from_secs(1)).0, StatusCode::OK);
        let (code, text) = alive(ALIVE);
        assert_eq!(
            (code, text.as_str()),
            (StatusCode::INTERNAL_SERVER_ERROR, "the main loop has not moved for 30 s\n")
        );
    }
}
