//! The proxy: accepts plain HTTP on loopback, and forwards to the real API server.

use super::plan::{Call, Fault, Plan};
use super::stream::{self, Events};
use crate::ControlPlane;
use anyhow::Result;
use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{Response, StatusCode};
use axum::serve::ListenerExt;
use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig};
use rustix::process::{Pid, Signal, kill_process};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{oneshot, watch};

/// A proxy that treats calls according to a plan. It stops on drop.
pub struct Proxy {
    shared: Arc<Shared>,
    address: String,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
    kubeconfig: PathBuf,
}

struct Shared {
    client: RwLock<Client>,
    plan: RwLock<Plan>,
    events: Mutex<Events>,
    pods_held: watch::Sender<bool>,
    writes: AtomicU64,
    calls: AtomicU64,
    faults: AtomicU64,
    killed: AtomicBool,
    target: AtomicI32,
    log: Mutex<Vec<String>>,
}

impl Proxy {
    /// Starts a proxy in front of a control plane, for a controller with administrator rights.
    ///
    /// # Errors
    /// No client, or no port.
    pub async fn start(plane: &ControlPlane, name: &str) -> Result<Proxy> {
        let file = Kubeconfig::read_from(plane.kubeconfig("switchyard-controller"))?;
        let mut config = kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
        // Disable the client's retries, because only the controller's own retries are under test.
        config.default_retry = false;
        let shared = Arc::new(Shared {
            client: RwLock::new(Client::try_from(config.clone())?),
            plan: RwLock::new(Plan::Quiet),
            events: Mutex::default(),
            pods_held: watch::Sender::new(false),
            writes: AtomicU64::new(0),
            calls: AtomicU64::new(0),
            faults: AtomicU64::new(0),
            killed: AtomicBool::new(false),
            target: AtomicI32::new(0),
            log: Mutex::default(),
        });
        let (ready, is_ready) = oneshot::channel();
        let (stop, stopped) = oneshot::channel::<()>();
        let served = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("proxy".into()).spawn(move || {
            let Ok(runtime) = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build() else {
                return;
            };
            runtime.block_on(async {
                // Connections belong to the runtime that opened them, so this runtime needs its own
                // client.
                if let Ok(client) = Client::try_from(config) {
                    *served.client.write().unwrap_or_else(PoisonError::into_inner) = client;
                }
                let listener = TcpListener::bind(("127.0.0.1", 0)).await;
                let address = listener.as_ref().ok().and_then(|listener| listener.local_addr().ok());
                let _ = ready.send(address);
                let Ok(listener) = listener else { return };
                let router = Router::new().fallback(handle).with_state(served);
                tokio::select! {
                    _ = axum::serve(listener.tap_io(disable_nagle), router) => {}
                    _ = stopped => {}
                }
            });
            runtime.shutdown_background();
        })?;
        let address = is_ready.await?.ok_or_else(|| anyhow::anyhow!("no port for the proxy"))?;
        let address = format!("http://{address}");
        let kubeconfig = plane.kubeconfig_for(name, &address)?;
        Ok(Proxy { shared, address, stop: Some(stop), thread: Some(thread), kubeconfig })
    }

    /// Returns a kubeconfig that uses the proxy.
    pub fn kubeconfig(&self) -> PathBuf {
        self.kubeconfig.clone()
    }

    /// Address of the proxy.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Applies this plan from now on, and restarts the count of writes from 1.
    pub fn set(&self, plan: Plan) {
        *self.shared.plan.write().unwrap_or_else(PoisonError::into_inner) = plan;
        self.shared.writes.store(0, Ordering::SeqCst);
        self.shared.killed.store(false, Ordering::SeqCst);
        self.shared.log.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Delays events of watches that start from now on, and cuts one in `cut_one_in` events
    /// together with its watch.
    pub fn set_events(&self, delay: Duration, cut_one_in: u64) {
        let mut events = self.shared.events.lock().unwrap_or_else(PoisonError::into_inner);
        *events = Events { delay, cut_one_in, ..events.clone() };
    }

    /// One in `one_in` watches that are cut expires, so that its client lists again and finds
    /// deletions by what the list lacks.
    pub fn expire_watches(&self, one_in: u64) {
        self.shared.events.lock().unwrap_or_else(PoisonError::into_inner).expire_one_in = one_in;
    }

    /// Delays and cuts only the events about this namespace and about cluster-scoped objects.
    pub fn set_namespace(&self, namespace: &str) {
        self.shared.events.lock().unwrap_or_else(PoisonError::into_inner).only = Some(namespace.to_string());
    }

    /// Holds back, or releases, the events of all pod watches.
    pub fn hold_pods(&self, held: bool) {
        self.shared.pods_held.send_replace(held);
    }

    /// Sets the process that faults kill.
    pub fn set_target(&self, pid: u32) {
        self.shared.target.store(i32::try_from(pid).unwrap_or(0), Ordering::SeqCst);
    }

    /// Number of writes since the plan was set.
    pub fn writes(&self) -> u64 {
        self.shared.writes.load(Ordering::SeqCst)
    }

    /// Number of calls so far.
    pub fn calls(&self) -> u64 {
        self.shared.calls.load(Ordering::SeqCst)
    }

    /// Number of faults so far.
    pub fn faults(&self) -> u64 {
        self.shared.faults.load(Ordering::SeqCst)
    }

    /// Number of watches cut so far.
    pub fn cuts(&self) -> u64 {
        self.shared.events.lock().unwrap_or_else(PoisonError::into_inner).cut.load(Ordering::Relaxed)
    }

    /// Returns whether the target was killed since the plan was set.
    pub fn has_killed(&self) -> bool {
        self.shared.killed.load(Ordering::SeqCst)
    }

    /// Calls since the plan was set, in order, without watches. Writes are numbered.
    pub fn log(&self) -> Vec<String> {
        self.shared.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn kill(&self) {
        self.killed.store(true, Ordering::SeqCst);
        if let Some(pid) = Pid::from_raw(self.target.load(Ordering::SeqCst)) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

/// Disables Nagle's algorithm: otherwise each watch event would wait for an acknowledgement.
fn disable_nagle(stream: &mut TcpStream) {
    let _ = stream.set_nodelay(true);
}

fn answer(status: u16) -> Response<Body> {
    let reason = match status {
        409 => "Conflict",
        429 => "TooManyRequests",
        503 => "ServiceUnavailable",
        _ => "InternalError",
    };
    let body = serde_json::json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status, "reason": reason, "message": "injected fault",
    });
    let mut response = Response::new(Body::from(body.to_string()));
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let headers = response.headers_mut();
    headers.insert("content-type", axum::http::HeaderValue::from_static("application/json"));
    if status == 429 {
        headers.insert("retry-after", axum::http::HeaderValue::from_static("1"));
    }
    response
}

/// Returns a response that breaks off, so that the client sees a dropped connection.
fn dropped_reply() -> Response<Body> {
    let stream = futures::stream::once(async { Err::<bytes::Bytes, _>(std::io::Error::other("injected fault")) });
    Response::new(Body::from_stream(stream))
}

async fn handle(State(shared): State<Arc<Shared>>, request: Request) -> Response<Body> {
    let (method, path) = (request.method().to_string(), request.uri().path().to_string());
    let is_watch = request.uri().query().is_some_and(|query| query.contains("watch=true"));
    let is_write = Call::is_write(&method, &path);
    let write =
        if is_write { shared.writes.fetch_add(1, Ordering::SeqCst) + 1 } else { shared.writes.load(Ordering::SeqCst) };
    shared.calls.fetch_add(1, Ordering::SeqCst);
    if !is_watch {
        let number = if is_write { format!("{write} ") } else { String::new() };
        shared.log.lock().unwrap_or_else(PoisonError::into_inner).push(format!("{number}{method} {path}"));
    }
    let call = Call { method, path, is_watch, write };
    let fault = shared.plan.read().unwrap_or_else(PoisonError::into_inner).decide(&call);
    if fault != Fault::Pass {
        shared.faults.fetch_add(1, Ordering::SeqCst);
    }
    match &fault {
        Fault::KillBefore => {
            shared.kill();
            return dropped_reply();
        }
        // The target is dead, so its calls in flight are lost as well.
        _ if shared.killed.load(Ordering::SeqCst) => return dropped_reply(),
        Fault::Answer(status) => return answer(*status),
        Fault::Delay(time) => tokio::time::sleep(*time).await,
        Fault::Hang => futures::future::pending::<()>().await,
        Fault::Pass | Fault::KillAfter | Fault::DropReply => {}
    }
    // Run to completion even if the target's connection breaks. Otherwise load would decide whether
    // the API server received a call before the kill, and half-created gangs would be rare.
    let forwarded = tokio::spawn({
        let shared = Arc::clone(&shared);
        async move { forward(&shared, request, is_watch).await }
    });
    let response = forwarded.await.unwrap_or_else(|_| answer(500));
    match fault {
        Fault::KillAfter => {
            shared.kill();
            dropped_reply()
        }
        Fault::DropReply => dropped_reply(),
        _ => response,
    }
}

async fn forward(shared: &Shared, request: Request, is_watch: bool) -> Response<Body> {
    let (mut parts, body) = request.into_parts();
    let is_pod_request = parts.uri.path().ends_with("/pods");
    // The client adds the address and its own token.
    parts.uri = parts.uri.path_and_query().map(|path| path.as_str().parse().unwrap_or_default()).unwrap_or_default();
    for name in ["host", "authorization", "content-length", "accept-encoding"] {
        parts.headers.remove(name);
    }
    let Ok(body) = axum::body::to_bytes(body, 16 << 20).await else { return answer(500) };
    let client = shared.client.read().unwrap_or_else(PoisonError::into_inner).clone();
    match client.send(http::Request::from_parts(parts, kube::client::Body::from(body.to_vec()))).await {
        Ok(response) => {
            let (parts, body) = response.into_parts();
            let data = http_body_util::BodyDataStream::new(body);
            let held = is_pod_request.then(|| shared.pods_held.subscribe());
            let events = shared.events.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let events = Events { held, ..events };
            let body = if is_watch && !events.is_noop() {
                Body::from_stream(stream::perturb(data, events))
            } else {
                Body::from_stream(data)
            };
            Response::from_parts(parts, body)
        }
        Err(_) => answer(503),
    }
}
