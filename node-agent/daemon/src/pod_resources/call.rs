//! Unary gRPC calls over a Unix socket: HTTP/2 with prior knowledge, one framed message each way,
//! the status in the trailers.

use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderMap, Request, StatusCode};
use prost::Message;
use std::io;
use std::path::Path;
use tokio::net::UnixStream;

/// Longest response in bytes: the limit of the kubelet's own clients.
const MAX_RESPONSE: usize = 16 << 20;
/// Compression flag and length.
const FRAME_HEADER: usize = 5;

#[derive(Debug, thiserror::Error)]
pub(super) enum CallError {
    /// Nothing listens on the socket.
    #[error("{0}")]
    Connect(#[from] io::Error),
    /// The connection broke, or is not HTTP/2.
    #[error("connection: {0}")]
    Http(#[from] h2::Error),
    /// The other side is not a gRPC server.
    #[error("HTTP status {0}; expected 200")]
    Status(StatusCode),
    /// The server returned an error.
    #[error("gRPC status {code}: {message}")]
    Refused { code: String, message: String },
    #[error("the answer is longer than {MAX_RESPONSE} bytes")]
    TooLong,
    /// The response is not one framed message.
    #[error("the answer is malformed: {0}")]
    Malformed(String),
}

/// Calls `method` (`/package.Service/Method`) with an empty message.
pub(super) async fn call<Response: Message + Default>(socket: &Path, method: &str) -> Result<Response, CallError> {
    let stream = UnixStream::connect(socket).await?;
    let (requests, connection) = h2::client::handshake(stream).await?;
    let mut answer = std::pin::pin!(exchange(requests, method));
    // The connection must be polled for the call to make progress. A server can respond and close
    // it at once.
    tokio::select! {
        answer = &mut answer => return answer,
        ended = connection => ended?,
    }
    answer.await
}

async fn exchange<Response: Message + Default>(
    requests: h2::client::SendRequest<Bytes>,
    method: &str,
) -> Result<Response, CallError> {
    let request = Request::post(format!("http://localhost{method}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())
        .map_err(|error| CallError::Malformed(error.to_string()))?;
    let (response, mut body) = requests.ready().await?.send_request(request, false)?;
    // An empty message: uncompressed, length 0.
    body.send_data(Bytes::from_static(&[0; FRAME_HEADER]), true)?;
    let (head, mut answer) = response.await?.into_parts();
    if head.status != StatusCode::OK {
        return Err(CallError::Status(head.status));
    }
    // An error without a message carries its status in the headers.
    check_status(&head.headers)?;
    let mut bytes = BytesMut::new();
    while let Some(chunk) = answer.data().await {
        let chunk = chunk?;
        if bytes.len() + chunk.len() > MAX_RESPONSE {
            return Err(CallError::TooLong);
        }
        answer.flow_control().release_capacity(chunk.len())?;
        bytes.put(chunk);
    }
    match answer.trailers().await? {
        Some(trailers) if trailers.contains_key("grpc-status") => check_status(&trailers)?,
        _ => return Err(CallError::Malformed("no grpc-status after the message".into())),
    }
    unframe(&bytes)
}

fn check_status(headers: &HeaderMap) -> Result<(), CallError> {
    let text = |name: &str| {
        headers.get(name).map(|value| String::from_utf8_lossy(value.as_bytes()).chars().take(256).collect())
    };
    match text("grpc-status") {
        None => Ok(()),
        Some(code) if code == "0" => Ok(()),
        Some(code) => Err(CallError::Refused { code, message: text("grpc-message").unwrap_or_default() }),
    }
}

fn unframe<Response: Message + Default>(bytes: &[u8]) -> Result<Response, CallError> {
    let malformed = |text: String| CallError::Malformed(text);
    let Some((header, message)) = bytes.split_first_chunk::<FRAME_HEADER>() else {
        return Err(malformed(format!("{} bytes; expected at least {FRAME_HEADER}", bytes.len())));
    };
    let [flag, length @ ..] = *header;
    if flag != 0 {
        return Err(malformed(format!("compression flag {flag}; expected 0, as none was offered")));
    }
    let length = u32::from_be_bytes(length) as usize;
    if length != message.len() {
        return Err(malformed(format!("{} bytes; expected the {length} of its header", message.len())));
    }
    Response::decode(message).map_err(|error| malformed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod_resources::messages::ListResponse;
    use proptest::prelude::*;

    fn frame(message: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0];
        bytes.extend((message.len() as u32).to_be_bytes());
        bytes.extend(message);
        bytes
    }

    #[test]
    fn malformed_frames_are_rejected() {
        let fault = |bytes: &[u8]| unframe::<ListResponse>(bytes).unwrap_err().to_string();
        assert!(fault(&[0, 0]).contains("2 bytes; expected at least 5"));
        assert!(fault(&[1, 0, 0, 0, 0]).contains("compression flag 1"));
        assert!(fault(&[0, 0, 0, 0, 3, 1]).contains("1 bytes; expected the 3"));
        // Field 1 as a message of 5 bytes, of which only one follows.
        assert!(fault(&frame(&[0x0a, 5, 0])).contains("malformed"));
        assert_eq!(unframe::<ListResponse>(&frame(&[])).unwrap(), ListResponse::default());
    }

    #[test]
    fn an_error_status_is_reported() {
        let mut headers = HeaderMap::new();
        assert!(check_status(&headers).is_ok());
        headers.insert("grpc-status", "12".parse().unwrap());
        headers.insert("grpc-message", "unknown method List".parse().unwrap());
        assert_eq!(check_status(&headers).unwrap_err().to_string(), "gRPC status 12: unknown method List");
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = unframe::<ListResponse>(&bytes);
            let _ = unframe::<ListResponse>(&frame(&bytes));
        }
    }
}
