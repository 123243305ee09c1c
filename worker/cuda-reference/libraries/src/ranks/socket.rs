//! Messages between ranks and the root: frames on an abstract Unix socket.

use bytemuck::{Pod, Zeroable};
use std::io::{self, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

/// Kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// To the root: a [`Hello`].
    Hello,
    /// To the root: a [`Call`], then the data.
    Call,
    /// To the root: this rank makes no more calls.
    Bye,
    /// All ranks have joined. One byte: whether the next rank is on the same host.
    Ready,
    /// The sum.
    Sum,
    /// Reason why the communicator is refused.
    Refused,
    /// How the ranks' calls differ.
    Wrong,
    /// A lost rank.
    Lost,
    /// No rank makes any more calls.
    Done,
}

const KINDS: [Kind; 9] =
    [Kind::Hello, Kind::Call, Kind::Bye, Kind::Ready, Kind::Sum, Kind::Refused, Kind::Wrong, Kind::Lost, Kind::Done];

/// Identity of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Hello {
    pub(crate) rank: u64,
    pub(crate) world: u64,
    /// Equal for two ranks on one GPU.
    pub(crate) device: u64,
    /// Equal for two ranks on one host.
    pub(crate) host: u64,
}

/// A collective call of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Call {
    /// Number within this communicator, from 1.
    pub(crate) number: u64,
    /// Number among the calls of all communicators of the device, from 1.
    pub(crate) place: u64,
    /// `ncclDataType_t`.
    pub(crate) data_type: u64,
    /// `ncclRedOp_t`.
    pub(crate) operation: u64,
    pub(crate) count: u64,
}

pub(crate) fn listen(name: &[u8]) -> io::Result<UnixListener> {
    UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)
}

pub(crate) fn connect(name: &[u8]) -> io::Result<UnixStream> {
    UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)
}

pub(crate) fn send(mut stream: &UnixStream, kind: Kind, body: &[&[u8]]) -> io::Result<()> {
    let bytes: usize = body.iter().map(|part| part.len()).sum();
    let mut frame = vec![kind as u8];
    frame.extend((bytes as u64).to_le_bytes());
    body.iter().for_each(|part| frame.extend(*part));
    stream.write_all(&frame)
}

pub(crate) fn receive(mut stream: &UnixStream) -> io::Result<(Kind, Vec<u8>)> {
    let mut head = [0; 9];
    stream.read_exact(&mut head)?;
    let [kind, bytes @ ..] = head;
    let kind = *KINDS.get(usize::from(kind)).ok_or(io::ErrorKind::InvalidData)?;
    let mut body = vec![0; u64::from_le_bytes(bytes) as usize];
    stream.read_exact(&mut body)?;
    Ok((kind, body))
}
