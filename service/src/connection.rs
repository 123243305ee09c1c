//! The connection to the API server. It does not throttle requests, because the server has priority
//! and fairness, and it counts them.

use crate::ServerClock;
use http::header::{HeaderValue, USER_AGENT};
use http::{Method, Request, Response};
use kube::client::{Body, ClientBuilder};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;
use tower::{Layer, Service};

/// How to reach the API server.
#[derive(Debug, Clone, Default)]
pub struct Connection {
    /// Path of a kubeconfig; `None` for the pod's service account or the environment's kubeconfig.
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig; `None` for the current one.
    pub context: Option<String>,
}

/// Reads the configuration, without connecting.
///
/// # Errors
/// No configuration was found, or it cannot be read; the error is one sentence.
pub async fn connect(connection: &Connection) -> Result<Config, String> {
    let options = KubeConfigOptions { context: connection.context.clone(), ..KubeConfigOptions::default() };
    if let Some(path) = &connection.kubeconfig {
        let file = Kubeconfig::read_from(path).map_err(|error| format!("--kubeconfig {}: {error}", path.display()))?;
        return Config::from_custom_kubeconfig(file, &options)
            .await
            .map_err(|error| format!("--kubeconfig {}: {error}", path.display()));
    }
    if connection.context.is_some() {
        return Config::from_kubeconfig(&options).await.map_err(|error| format!("--context: {error}"));
    }
    Config::infer().await.map_err(|error| {
        format!("no cluster: neither a pod's service account nor a kubeconfig was found ({error}); expected --kubeconfig FILE")
    })
}

/// Called after every request with its verb, its resource with subresource, and its status, which
/// is `None` without a response.
pub type Answered = Arc<dyn Fn(&'static str, String, Option<u16>) + Send + Sync>;

/// Builds the client of a program, which identifies itself as `program` with the version of this
/// workspace. `clock` follows the responses.
///
/// # Errors
/// The configuration has an invalid certificate or key.
pub fn client(
    mut config: Config,
    program: &str,
    answered: Answered,
    clock: Arc<ServerClock>,
) -> Result<Client, String> {
    let agent = HeaderValue::try_from(format!("{program}/{}", env!("CARGO_PKG_VERSION")));
    config.headers.push((USER_AGENT, agent.map_err(|error| format!("the program's name `{program}`: {error}"))?));
    let builder = ClientBuilder::try_from(config).map_err(|error| format!("cannot use the kubeconfig: {error}"))?;
    Ok(builder.with_layer(&Counted(answered, clock)).build())
}

/// A request in terms of RBAC: verb, and resource with subresource.
fn verb_and_resource(method: &Method, path: &str, query: &str) -> (&'static str, String) {
    // /api/v1 or /apis/GROUP/VERSION, optionally namespaces/NAME, then
    // RESOURCE[/NAME[/SUBRESOURCE]].
    let mut parts = path.trim_matches('/').split('/');
    let prefix = match parts.next() {
        Some("api") => 1,
        Some("apis") => 2,
        _ => return ("get", "other".into()),
    };
    let rest: Vec<&str> = parts.skip(prefix).collect();
    let rest = match rest.as_slice() {
        ["namespaces", _, rest @ ..] if !rest.is_empty() => rest,
        rest => rest,
    };
    let (resource, is_named) = match rest {
        [] => return ("get", "other".into()),
        [resource] => (resource.to_string(), false),
        [resource, _] => (resource.to_string(), true),
        [resource, _, sub, ..] => (format!("{resource}/{sub}"), true),
    };
    let verb = match *method {
        Method::GET if query.split('&').any(|pair| matches!(pair, "watch=true" | "watch=1")) => "watch",
        Method::GET if is_named => "get",
        Method::GET => "list",
        Method::POST => "create",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        _ => "other",
    };
    (verb, resource)
}

/// Counts requests by verb, resource and status.
struct Counted(Answered, Arc<ServerClock>);

impl<S> Layer<S> for Counted {
    type Service = Counting<S>;

    fn layer(&self, inner: S) -> Counting<S> {
        Counting { inner, answered: Arc::clone(&self.0), clock: Arc::clone(&self.1) }
    }
}

/// A service that counts its requests.
struct Counting<S> {
    inner: S,
    answered: Answered,
    clock: Arc<ServerClock>,
}

impl<S, B> Service<Request<Body>> for Counting<S>
where
    S: Service<Request<Body>, Response = Response<B>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = futures::future::BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let (answered, clock, sent) = (Arc::clone(&self.answered), Arc::clone(&self.clock), Instant::now());
        let (verb, resource) =
            verb_and_resource(request.method(), request.uri().path(), request.uri().query().unwrap_or_default());
        let answer = self.inner.call(request);
        Box::pin(async move {
            let result = answer.await;
            if let Ok(response) = &result {
                clock.observe(sent, response.headers());
            }
            answered(verb, resource, result.as_ref().ok().map(|response| response.status().as_u16()));
            result
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn requests_are_named_as_rights_are() {
        for (method, path, query, verb, resource) in [
            (Method::GET, "/api/v1/pods", "limit=500", "list", "pods"),
            (Method::GET, "/api/v1/pods", "labelSelector=a&watch=true", "watch", "pods"),
            (Method::GET, "/api/v1/namespaces/a/pods/b/log", "", "get", "pods/log"),
            (Method::GET, "/api/v1/namespaces/a", "", "get", "namespaces"),
            (Method::POST, "/api/v1/namespaces/a/secrets", "", "create", "secrets"),
            (Method::PUT, "/apis/coordination.k8s.io/v1/namespaces/a/leases/b", "", "update", "leases"),
            (Method::PUT, "/apis/x.y/v1/namespaces/pods/trainjobs/pods/status", "", "update", "trainjobs/status"),
            (
                Method::DELETE,
                "/apis/policy/v1/namespaces/a/poddisruptionbudgets/b",
                "",
                "delete",
                "poddisruptionbudgets",
            ),
            (Method::GET, "/version", "", "get", "other"),
            (Method::GET, "/apis/x.y/v1", "", "get", "other"),
        ] {
            assert_eq!(verb_and_resource(&method, path, query), (verb, resource.to_string()), "{method} {path}");
        }
    }

    /// The layer counts responses of the API server, and requests without a response.
    #[tokio::test]
    async fn answers_and_failures_are_counted() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let answered: Answered = {
            let seen = Arc::clone(&seen);
            Arc::new(move |verb, resource, status| seen.lock().unwrap().push((verb, resource, status)))
        };
        let answers = tower::service_fn(async |request: Request<Body>| match request.uri().path() {
            "/api/v1/nodes/a" => Ok(Response::new(Body::empty())),
            _ => Err(std::io::Error::other("no route")),
        });
        let mut service = Counted(answered, Arc::default()).layer(answers);
        for path in ["/api/v1/nodes/a", "/api/v1/nodes"] {
            let _ = service.call(Request::get(path).body(Body::empty()).unwrap()).await;
        }
        let nodes = || "nodes".to_string();
        assert_eq!(*seen.lock().unwrap(), [("get", nodes(), Some(200)), ("list", nodes(), None)]);
    }
}
