//! A gRPC server on a unix socket, through which the kubelet calls a node's plugins.

use anyhow::{Context, Result};
use bytes::{BufMut, Bytes, BytesMut};
use futures::future::BoxFuture;
use h2::server::SendResponse;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use prost::Message;
use std::path::Path;
use std::sync::Arc;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;

/// Bytes before a message: a flag and the length.
const FRAME_HEADER: usize = 5;

/// Response to a call.
pub(super) enum Answer {
    /// One message, then the end of the stream.
    Message(Vec<u8>),
    /// One message; the stream then stays open until the server stops.
    Open(Vec<u8>),
    /// Unimplemented method.
    Unknown,
}

impl Answer {
    pub(super) fn of(message: &impl Message) -> Answer {
        Answer::Message(message.encode_to_vec())
    }
}

/// Handles a call, given its path (`/package.Service/Method`) and message.
pub(super) type Handler = Arc<dyn Fn(String, Bytes) -> BoxFuture<'static, Result<Answer>> + Send + Sync>;

/// A server; it stops on drop, with all calls.
#[derive(Debug)]
pub(super) struct Server {
    _tasks: JoinSet<()>,
}

impl Server {
    /// Listens on a new socket.
    pub(super) fn start(socket: &Path, handler: Handler) -> Result<Server> {
        let _ = std::fs::remove_file(socket);
        let listener = UnixListener::bind(socket).with_context(|| socket.display().to_string())?;
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let handler = Arc::clone(&handler);
                // Ignore errors: a caller may disconnect at any time, and sees its own failures.
                connections.spawn(async move { drop(connection(stream, handler).await) });
            }
        });
        Ok(Server { _tasks: tasks })
    }
}

async fn connection(stream: UnixStream, handler: Handler) -> Result<()> {
    let mut connection = h2::server::handshake(stream).await?;
    let mut calls = JoinSet::new();
    while let Some(call) = connection.accept().await {
        let (request, respond) = call?;
        calls.spawn(answer(request, respond, Arc::clone(&handler)));
    }
    Ok(())
}

async fn answer(request: Request<h2::RecvStream>, mut respond: SendResponse<Bytes>, handler: Handler) -> Result<()> {
    let path = request.uri().path().to_string();
    let mut body = request.into_body();
    let mut sent = BytesMut::new();
    while let Some(part) = body.data().await {
        let part = part?;
        body.flow_control().release_capacity(part.len())?;
        sent.extend_from_slice(&part);
    }
    anyhow::ensure!(sent.len() >= FRAME_HEADER, "{path}: a call without a message");
    let message = sent.freeze().slice(FRAME_HEADER..);
    let head = |status: &str| {
        Response::builder().header("content-type", "application/grpc").header("grpc-status", status).body(())
    };
    let (message, is_open) = match handler(path, message).await {
        Ok(Answer::Message(message)) => (message, false),
        Ok(Answer::Open(message)) => (message, true),
        // gRPC status codes: 12 is UNIMPLEMENTED, 13 is INTERNAL.
        Ok(Answer::Unknown) => {
            respond.send_response(head("12")?, true)?;
            return Ok(());
        }
        Err(error) => {
            let mut response = head("13")?;
            response.headers_mut().insert("grpc-message", HeaderValue::from_str(&format!("{error:#}"))?);
            respond.send_response(response, true)?;
            return Ok(());
        }
    };
    let mut frame = BytesMut::with_capacity(FRAME_HEADER + message.len());
    frame.put_u8(0);
    frame.put_u32(u32::try_from(message.len())?);
    frame.put_slice(&message);
    let response = Response::builder().header("content-type", "application/grpc").body(())?;
    let mut stream = respond.send_response(response, false)?;
    stream.send_data(frame.freeze(), false)?;
    if is_open {
        return std::future::pending().await;
    }
    let status = (HeaderName::from_static("grpc-status"), HeaderValue::from_static("0"));
    stream.send_trailers(HeaderMap::from_iter([status]))?;
    Ok(())
}
