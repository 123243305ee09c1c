//! One end of a connection, and the loop that serves several of them.

use super::super::socket::{timespec, try_recv, try_send};
use super::message::{HEADER, Message};
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags},
    io::Errno,
};
use std::{collections::VecDeque, io, os::fd::OwnedFd, sync::Arc, time::Duration};

/// Upper bound of a wait without an event, in case a wake-up is lost.
const MOST_WAIT: Duration = Duration::from_secs(1);

/// Opens an eventfd that ends a [`wait`].
pub(super) fn wake_fd() -> io::Result<Arc<OwnedFd>> {
    Ok(Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
}

pub(super) fn wake(fd: &OwnedFd) {
    // The counter cannot overflow here, so the write cannot fail in a way that matters.
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

/// Waits until a link can be read, a link with a message to send can be written, or `wake` is
/// signalled.
pub(super) fn wait(links: &[Link], wake: &OwnedFd) -> io::Result<()> {
    let mut fds = vec![PollFd::new(wake, PollFlags::IN)];
    for link in links.iter().filter(|link| !link.closed) {
        let flags = if link.is_sending() { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        fds.push(PollFd::new(&*link.socket, flags));
    }
    match rustix::event::poll(&mut fds, Some(&timespec(MOST_WAIT))) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(errno) => return Err(errno.into()),
    }
    let _ = rustix::io::read(wake, &mut [0u8; 8]);
    Ok(())
}

/// A connection that never blocks.
pub(super) struct Link {
    socket: Arc<OwnedFd>,
    header: [u8; HEADER],
    header_bytes: usize,
    incoming: Option<(Message, Vec<u32>)>,
    received: usize,
    outgoing: VecDeque<Message>,
    sent: usize,
    /// The other end has closed the connection.
    pub closed: bool,
}

impl Link {
    pub fn new(socket: Arc<OwnedFd>) -> Link {
        Link {
            socket,
            header: [0; HEADER],
            header_bytes: 0,
            incoming: None,
            received: 0,
            outgoing: VecDeque::new(),
            sent: 0,
            closed: false,
        }
    }

    pub fn queue(&mut self, message: Message) {
        self.outgoing.push_back(message);
    }

    fn is_sending(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Sends what fits into the socket.
    pub fn write(&mut self) -> io::Result<()> {
        while let Some(message) = self.outgoing.front().filter(|_| !self.closed) {
            let (header, words) = (message.header(), bytemuck::cast_slice::<u32, u8>(&message.words));
            let part = if self.sent < HEADER { &header[self.sent..] } else { &words[self.sent - HEADER..] };
            let sent = try_send(&*self.socket, part)?;
            self.sent += sent;
            if self.sent == message.bytes() {
                self.outgoing.pop_front();
                self.sent = 0;
            } else if sent < part.len() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// The next message, if it has arrived. `most`: most words of it.
    pub fn read(&mut self, most: u64) -> io::Result<Option<Message>> {
        while !self.closed {
            if self.incoming.is_none() {
                let got = try_recv(&*self.socket, &mut self.header[self.header_bytes..])?;
                match self.count(got, self.header_bytes > 0)? {
                    None => return Ok(None),
                    Some(got) => self.header_bytes += got,
                }
                if self.header_bytes < HEADER {
                    continue;
                }
                self.header_bytes = 0;
                let (message, words) = Message::decode(&self.header).map_err(io::Error::other)?;
                if words > most {
                    let text = format!("a message of {words} words, at most {most} expected");
                    return Err(io::Error::other(text));
                }
                self.received = 0;
                self.incoming = Some((message, vec![0; words as usize]));
            }
            let Some((_, words)) = &mut self.incoming else { continue };
            let bytes = bytemuck::cast_slice_mut::<u32, u8>(words);
            if self.received < bytes.len() {
                let got = try_recv(&*self.socket, &mut bytes[self.received..])?;
                match self.count(got, true)? {
                    None => return Ok(None),
                    Some(got) => self.received += got,
                }
                continue;
            }
            let message = self.incoming.take();
            return Ok(message.map(|(message, words)| Message { words: Arc::new(words), ..message }));
        }
        Ok(None)
    }

    /// Checks what was received: `None` to wait for more. The end of the stream is an error inside
    /// a message.
    fn count(&mut self, got: Option<usize>, inside: bool) -> io::Result<Option<usize>> {
        match got {
            Some(0) if inside => Err(io::ErrorKind::UnexpectedEof.into()),
            Some(0) => {
                self.closed = true;
                Ok(None)
            }
            got => Ok(got),
        }
    }
}
