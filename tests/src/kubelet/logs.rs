//! The subset of the kubelet's HTTPS endpoint that `kubectl logs` and the API server's `pods/log`
//! use.

use super::Shared;
use crate::control_plane::self_signed;
use anyhow::{Context, Result};
use axum::Router;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::routing::get;
use jiff::Timestamp;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// Source of a pod's log.
#[derive(Debug, Clone)]
pub(super) enum Log {
    /// Text set by a test.
    Text(String),
    /// File written by processes.
    File(PathBuf),
}

pub(super) fn read(shared: &Shared, namespace: &str, pod: &str) -> Option<String> {
    let log = shared.state().logs.get(&(namespace.into(), pod.into())).cloned()?;
    Some(match log {
        Log::Text(text) => text,
        Log::File(path) => String::from_utf8_lossy(&std::fs::read(path).ok()?).into_owned(),
    })
}

/// Serves on a free port and returns the port.
pub(super) async fn serve(shared: Shared) -> Result<u16> {
    let (certificate, key) = self_signed()?;
    let certificate = CertificateDer::from_pem_slice(certificate.as_bytes()).context("own certificate")?;
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).context("own key")?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)?;
    let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
    let port = listener.local_addr()?.port();
    let router = Router::new().route("/containerLogs/{namespace}/{pod}/{container}", get(answer)).with_state(shared);
    let listener = Tls { listener, acceptor: TlsAcceptor::from(Arc::new(config)) };
    tokio::spawn(async move { axum::serve(listener, router).await });
    Ok(port)
}

async fn answer(
    State(shared): State<Shared>,
    Path((namespace, pod, container)): Path<(String, String, String)>,
    Query(query): Query<HashMap<String, String>>,
) -> (StatusCode, String) {
    let container_log = read(&shared, &namespace, &format!("{pod}/{container}"));
    let Some(text) = container_log.or_else(|| read(&shared, &namespace, &pod)) else {
        return (StatusCode::NOT_FOUND, format!("no log of pod {namespace}/{pod}"));
    };
    let number = |name: &str| query.get(name).and_then(|text| text.parse::<usize>().ok());
    let mut lines: Vec<&str> = text.split_inclusive('\n').collect();
    if let Some(tail) = number("tailLines") {
        lines.drain(..lines.len().saturating_sub(tail));
    }
    // A container runtime records the arrival time of each line; here, all lines arrive now.
    let time = query.get("timestamps").filter(|value| *value == "true").map(|_| format!("{} ", Timestamp::now()));
    let mut text: String = lines.iter().flat_map(|line| [time.as_deref().unwrap_or_default(), line]).collect();
    if let Some(limit) = number("limitBytes")
        && text.len() > limit
    {
        let mut end = limit;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
    }
    (StatusCode::OK, text)
}

/// A TLS listener; connections that fail the handshake are dropped.
struct Tls {
    listener: TcpListener,
    acceptor: TlsAcceptor,
}

impl axum::serve::Listener for Tls {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            if let Ok((stream, address)) = self.listener.accept().await
                && let Ok(stream) = self.acceptor.accept(stream).await
            {
                return (stream, address);
            }
        }
    }

    fn local_addr(&self) -> std::io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}
