//! The connection of commands to a running cluster.

use crate::failure::Failure;
use kube::Client;
use std::sync::Arc;
use switchyard_service::{Connection, client, connect};

/// Runs work that waits for the network.
///
/// # Errors
/// The error of `work`, or no runtime can be created.
pub(crate) fn wait_for<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| Failure::unexpected(format!("cannot start: {error}")))?.block_on(work)
}

/// A client, and the namespace of its context.
///
/// # Errors
/// There is no kubeconfig, or it cannot be used.
pub(crate) async fn open(connection: &Connection) -> Result<(Client, String), Failure> {
    let config = connect(connection).await.map_err(Failure::usage)?;
    let namespace = config.default_namespace.clone();
    let client = client(config, "switchyard", Arc::new(|_, _, _| {})).map_err(Failure::usage)?;
    Ok((client, namespace))
}
