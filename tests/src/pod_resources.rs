//! A kubelet endpoint that reports device assignments: gRPC over a unix socket, with replies that a
//! test controls byte by byte.
//!
//! Messages are encoded by hand from the field numbers in the kubelet's `api.proto`, and share no
//! code with the agent.

use anyhow::{Context, Result};
use bytes::Bytes;
use h2::server::SendResponse;
use http::{HeaderMap, HeaderValue, Request, Response};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::oneshot;

/// Response to a call.
#[derive(Debug, Clone)]
pub enum Reply {
    /// A message with correct framing.
    Message(Vec<u8>),
    /// These bytes, unmodified.
    Raw(Vec<u8>),
    /// This gRPC status.
    Refused(u16),
    /// No response.
    Silence,
}

/// Responses to `List` and `GetAllocatableResources`.
type Replies = Arc<Mutex<(Reply, Reply)>>;

/// The server; it stops on drop.
#[derive(Debug)]
pub struct PodResources {
    /// Path of the socket.
    pub socket: PathBuf,
    replies: Replies,
    _stop: oneshot::Sender<()>,
}

impl PodResources {
    /// Listens on a new socket in this folder. Initially no device is in use.
    ///
    /// # Errors
    /// The socket cannot be created.
    pub fn start(folder: &Path) -> Result<PodResources> {
        let socket = folder.join("kubelet.sock");
        let _ = std::fs::remove_file(&socket);
        let listener = std::os::unix::net::UnixListener::bind(&socket)?;
        listener.set_nonblocking(true)?;
        let replies: Replies = Arc::new(Mutex::new((Reply::Message(Vec::new()), Reply::Message(Vec::new()))));
        let (stop, stopped) = oneshot::channel();
        let served = Arc::clone(&replies);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        std::thread::Builder::new().name("pod-resources".into()).spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    _ = serve(listener, served) => {}
                    _ = stopped => {}
                }
            });
        })?;
        Ok(PodResources { socket, replies, _stop: stop })
    }

    /// Sets the responses to `List` and `GetAllocatableResources`.
    pub fn set(&self, list: Reply, allocatable: Reply) {
        *self.replies.lock().unwrap_or_else(PoisonError::into_inner) = (list, allocatable);
    }
}

async fn serve(listener: std::os::unix::net::UnixListener, replies: Replies) -> Result<()> {
    let listener = UnixListener::from_std(listener)?;
    loop {
        let (stream, _) = listener.accept().await?;
        tokio::spawn(connection(stream, Arc::clone(&replies)));
    }
}

async fn connection(stream: UnixStream, replies: Replies) -> Result<()> {
    let mut connection = h2::server::handshake(stream).await?;
    while let Some(call) = connection.accept().await {
        let (request, respond) = call?;
        let (list, allocatable) = replies.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let reply = match request.uri().path() {
            "/v1.PodResourcesLister/List" => list,
            "/v1.PodResourcesLister/GetAllocatableResources" => allocatable,
            _ => Reply::Refused(12),
        };
        tokio::spawn(answer(request, respond, reply));
    }
    Ok(())
}

async fn answer(request: Request<h2::RecvStream>, mut respond: SendResponse<Bytes>, reply: Reply) -> Result<()> {
    let is_grpc = request.headers().get("content-type").is_some_and(|kind| kind == "application/grpc");
    let mut body = request.into_body();
    let sent = body.data().await.context("a call has a message")??;
    let head = |status: u16| Response::builder().status(status).header("content-type", "application/grpc");
    let bytes = match reply {
        // The request message of both calls is empty.
        _ if !is_grpc || sent[..] != [0; 5] => {
            respond.send_response(head(415).body(())?, true)?;
            return Ok(());
        }
        Reply::Silence => return std::future::pending().await,
        Reply::Refused(code) => {
            respond.send_response(head(200).header("grpc-status", code).body(())?, true)?;
            return Ok(());
        }
        Reply::Raw(bytes) => bytes,
        Reply::Message(message) => {
            let mut bytes = vec![0];
            bytes.extend(u32::try_from(message.len())?.to_be_bytes());
            bytes.extend(message);
            bytes
        }
    };
    let mut stream = respond.send_response(head(200).body(())?, false)?;
    stream.send_data(bytes.into(), false)?;
    let trailers =
        HeaderMap::from_iter([(http::HeaderName::from_static("grpc-status"), HeaderValue::from_static("0"))]);
    stream.send_trailers(trailers)?;
    Ok(())
}

/// Encodes a message of strings and nested messages, given field numbers and contents.
pub fn message<'a>(fields: impl IntoIterator<Item = (u8, &'a [u8])>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (number, content) in fields {
        // Wire type 2: a length, followed by that many bytes.
        bytes.push(number << 3 | 2);
        let mut length = content.len();
        while length >= 0x80 {
            bytes.push((length & 0x7f) as u8 | 0x80);
            length >>= 7;
        }
        bytes.push(length as u8);
        bytes.extend(content);
    }
    bytes
}
