//! TLS listener with a certificate generated at startup, as in controller-runtime. It keeps the
//! tokens of readers private; readers know the endpoint by its Service, not by its certificate.

use axum::serve::Listener;
use rcgen::{CertifiedKey, generate_simple_self_signed};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::PrivatePkcs8KeyDer;
use tokio_rustls::server::TlsStream;

/// Upper bound on concurrent handshakes.
const MAX_HANDSHAKES: usize = 64;
/// Deadline of a handshake, so that idle connections do not block others.
const DEADLINE: Duration = Duration::from_secs(10);
/// Pause after the system refuses a connection, for example because of a lack of file descriptors.
const ACCEPT_BACKOFF: Duration = Duration::from_secs(1);

type Connection = (TlsStream<TcpStream>, SocketAddr);

/// Connections with a completed handshake.
pub(super) struct Tls {
    address: SocketAddr,
    ready: mpsc::Receiver<Connection>,
}

impl Tls {
    /// # Errors
    /// The listener has no address, or the certificate cannot be generated.
    pub fn new(listener: TcpListener) -> io::Result<Tls> {
        let address = listener.local_addr()?;
        let acceptor = TlsAcceptor::from(Arc::new(config()?));
        let (sender, ready) = mpsc::channel(1);
        tokio::spawn(accept(listener, acceptor, sender));
        Ok(Tls { address, ready })
    }
}

impl Listener for Tls {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> Connection {
        match self.ready.recv().await {
            Some(connection) => connection,
            // Happens only when the runtime shuts down.
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }
}

/// Accepts connections until the receiver is dropped.
async fn accept(listener: TcpListener, acceptor: TlsAcceptor, sender: mpsc::Sender<Connection>) {
    let permits = Arc::new(Semaphore::new(MAX_HANDSHAKES));
    loop {
        let permit = Arc::clone(&permits).acquire_owned().await.expect("invariant: the semaphore is never closed");
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = sender.closed() => return,
        };
        let Ok((stream, from)) = accepted else {
            tokio::time::sleep(ACCEPT_BACKOFF).await;
            continue;
        };
        let (acceptor, sender) = (acceptor.clone(), sender.clone());
        tokio::spawn(async move {
            if let Ok(Ok(stream)) = tokio::time::timeout(DEADLINE, acceptor.accept(stream)).await {
                let _ = sender.send((stream, from)).await;
            }
            drop(permit);
        });
    }
}

fn config() -> io::Result<ServerConfig> {
    let names = vec!["switchyard-controller".to_string(), "localhost".to_string()];
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed(names).map_err(io::Error::other)?;
    let key = PrivatePkcs8KeyDer::from(signing_key.serialize_der()).into();
    let config = ServerConfig::builder_with_provider(Arc::new(default_provider()));
    let config = config.with_safe_default_protocol_versions().map_err(io::Error::other)?.with_no_client_auth();
    config.with_single_cert(vec![cert.der().clone()], key).map_err(io::Error::other)
}
