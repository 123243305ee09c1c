//! Byte streams between two ranks: a TCP connection per direction, or shared memory.

use super::{
    fifo::Stream,
    socket::{try_recv, try_send},
};
use std::{io, os::fd::OwnedFd, sync::Arc};

/// One direction between this rank and another.
pub(super) enum Channel {
    Tcp(Arc<OwnedFd>),
    Memory(Stream),
}

impl Channel {
    /// Returns the bytes written; 0 if the channel is full.
    pub fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Channel::Tcp(socket) => try_send(&**socket, bytes),
            Channel::Memory(stream) => Ok(stream.try_write(bytes)),
        }
    }

    /// Returns the bytes read; 0 if none are available now.
    pub fn try_read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Channel::Tcp(socket) => match try_recv(&**socket, buffer)? {
                None => Ok(0),
                Some(0) => Err(io::ErrorKind::UnexpectedEof.into()),
                Some(n) => Ok(n),
            },
            Channel::Memory(stream) => Ok(stream.try_read(buffer)),
        }
    }

    /// The socket, to wait for.
    pub fn socket(&self) -> Option<&Arc<OwnedFd>> {
        match self {
            Channel::Tcp(socket) => Some(socket),
            Channel::Memory(_) => None,
        }
    }
}

/// The channels with another rank. A rank that a plan does not use may have none.
pub(super) struct Peer {
    /// Global rank.
    pub rank: u32,
    pub outgoing: Option<Channel>,
    pub incoming: Option<Channel>,
}
