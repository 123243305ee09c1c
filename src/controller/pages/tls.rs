//! A listener that speaks TLS, with a certificate made at the start: readers of metrics that send a token need privacy, and whom they read is
//! said by the Service. As in controller-runtime.

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

/// Handshakes at a time.
const HANDSHAKES: usize = 64;
/// Time for one: whoever opens connections and says nothing keeps nobody out.
const DEADLINE: Duration = Duration::from_secs(10);
/// Pause after the system refuses a connection, such as for want of file descriptors.
const PAUSE: Duration = Duration::from_secs(1);

type Connection = (TlsStream<TcpStream>, SocketAddr);

/// Connections whose handshake is done.
pub(super) struct Tls {
    address: SocketAddr,
    ready: mpsc::Receiver<Connection>,
}

impl Tls {
    /// # Errors
    /// The listener has no address, or the certificate cannot be made.
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
            // Only when the runtime ends.
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }
}

/// Accepts connections until nobody takes them.
async fn accept(listener: TcpListener, acceptor: TlsAcceptor, sender: mpsc::Sender<Connection>) {
    let turns = Arc::new(Semaphore::new(HANDSHAKES));
    loop {
        let turn = Arc::clone(&turns).acquire_owned().await.expect("invariant: the semaphore is never closed");
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = sender.closed() => return,
        };
        let Ok((stream, from)) = accepted else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let (acceptor, sender) = (acceptor.clone(), sender.clone());
        tokio::spawn(async move {
            if let Ok(Ok(stream)) = tokio::time::timeout(DEADLINE, acceptor.accept(stream)).await {
                let _ = sender.send((stream, from)).await;
            }
            drop(turn);
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
