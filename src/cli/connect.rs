//! Connects commands to a running cluster.

use crate::failure::Failure;
use kube::Client;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use switchyard_service::{Connection, ServerClock, client, connect};

/// Runs `work` to completion.
///
/// # Errors
/// `work` failed, or no runtime could be created.
pub(crate) fn wait_for<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| Failure::unexpected(format!("cannot start: {error}")))?.block_on(work)
}

/// The cluster that a command talks to.
pub(crate) struct Cluster {
    pub client: Client,
    /// Namespace of the context.
    pub namespace: String,
    /// Address of the API server.
    pub server: String,
    /// Its clock, once it has answered.
    pub clock: Arc<ServerClock>,
}

/// Connects to the cluster of the kubeconfig.
///
/// # Errors
/// There is no kubeconfig, or it is invalid.
pub(crate) async fn open(connection: &Connection) -> Result<Cluster, Failure> {
    let config = connect(connection).await.map_err(Failure::usage)?;
    let (namespace, server) = (config.default_namespace.clone(), config.cluster_url.to_string());
    let clock = Arc::<ServerClock>::default();
    let client = client(config, "switchyard", Arc::new(|_, _, _| {}), Arc::clone(&clock)).map_err(Failure::usage)?;
    Ok(Cluster { client, namespace, server, clock })
}

/// How long to wait for a response before telling the user.
const NOTICE_DELAY: Duration = Duration::from_secs(2);

/// Awaits a response from an API server, and reports on standard error if it takes long.
pub(crate) async fn answer<T>(server: &str, request: impl Future<Output = T>) -> T {
    let mut request = pin!(request);
    tokio::select! {
        answer = &mut request => answer,
        () = tokio::time::sleep(NOTICE_DELAY) => {
            anstream::eprintln!("waiting for the API server at {server}, which has not answered for {} s", NOTICE_DELAY.as_secs());
            request.await
        }
    }
}

/// An error message for people: the API server's message, or why there was no response. The
/// client's own text contains Rust debug output.
pub(crate) fn error_message(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) if !status.message.is_empty() => status.message.clone(),
        kube::Error::Api(status) => format!("the API server answered with code {} {}", status.code, status.reason),
        error => {
            let mut text = error.to_string();
            let mut cause = std::error::Error::source(error);
            while let Some(inner) = cause {
                let more = inner.to_string();
                if !text.contains(&more) {
                    text = format!("{text}: {more}");
                }
                cause = inner.source();
            }
            text
        }
    }
}

#[cfg(test)]
mod tests {
    use super::error_message;

    /// `doctor` printed `Status { status: Some(Failure), code: 403, …, continue_: None }`.
    #[test]
    fn errors_contain_no_rust_debug_output() {
        let status = |message: &str| kube::core::Status::failure(message, "Forbidden").boxed();
        let said =
            error_message(&kube::Error::Api(status("pods \"a-1-0\" is forbidden: User \"b\" cannot get resource")));
        assert_eq!(said, "pods \"a-1-0\" is forbidden: User \"b\" cannot get resource");
        assert_eq!(error_message(&kube::Error::Api(status(""))), "the API server answered with code 0 Forbidden");
        let refused = std::io::Error::new(std::io::ErrorKind::ConnectionRefused, "connection refused");
        let said = error_message(&kube::Error::Service(Box::new(refused)));
        assert!(said.contains("connection refused") && !said.contains('{'), "{said}");
    }
}
