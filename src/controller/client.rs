//! The connection to the API server: no throttle of our own (the server has priority and fairness), and every request counted.

use super::metrics::Metrics;
use http::{Request, Response};
use kube::client::{Body, ClientBuilder};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use std::path::PathBuf;
use std::sync::Arc;
use tower::{Layer, Service};

/// Where the API server is and who we are there.
#[derive(Debug, Clone, Default)]
pub struct Connection {
    /// A kubeconfig; `None`: the one of the pod, or of the environment.
    pub kubeconfig: Option<PathBuf>,
    /// Its context; `None`: the current one.
    pub context: Option<String>,
}

/// Reads the configuration. Nothing is connected yet.
///
/// # Errors
/// No configuration was found, or it cannot be read: one sentence.
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

/// Makes the client.
///
/// # Errors
/// The configuration has a certificate or key that cannot be used.
pub(super) fn client(config: Config, metrics: Arc<Metrics>) -> Result<Client, String> {
    let builder = ClientBuilder::try_from(config).map_err(|error| format!("cannot use the kubeconfig: {error}"))?;
    Ok(builder.with_layer(&Counted(metrics)).build())
}

/// Counts requests by method and status.
struct Counted(Arc<Metrics>);

impl<S> Layer<S> for Counted {
    type Service = Counting<S>;

    fn layer(&self, inner: S) -> Counting<S> {
        Counting { inner, metrics: Arc::clone(&self.0) }
    }
}

/// A service whose requests are counted.
struct Counting<S> {
    inner: S,
    metrics: Arc<Metrics>,
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
        let metrics = Arc::clone(&self.metrics);
        let method = request.method().to_string();
        let answer = self.inner.call(request);
        Box::pin(async move {
            let result = answer.await;
            metrics.request(&method, result.as_ref().ok().map(|response| response.status().as_u16()));
            result
        })
    }
}
