//! Measures the rate of each connection between neighbours before it is used. All members send to
//! the right at once, as in an all-reduce, but none waits for data from the left, so each
//! connection shows its own rate and not the slowest one's.

use super::error::CommError;
use super::socket::{poll_one, try_recv, try_send};
use super::state::Shared;
use rustix::event::PollFlags;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes per block; the first byte of a block is 1 if another block follows.
const BLOCK: usize = 64 << 10;
/// Minimum number of blocks: enough to leave TCP slow start behind.
const MIN_BLOCKS: usize = 16;
/// A sender starts no block after this time.
const SEND_TIME: Duration = Duration::from_millis(300);
/// Interval between checks for a failed group.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Measured rate of the connection from `from` to this rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ConnectionRate {
    pub from: u32,
    /// Bytes per second.
    pub rate: f64,
}

/// Sends to the right and receives from the left until the sender's time is up.
pub(super) fn probe(
    (outgoing, incoming): &(Arc<OwnedFd>, Arc<OwnedFd>),
    left: u32,
    shared: &Shared,
) -> Result<ConnectionRate, CommError> {
    let lost = |error: io::Error| CommError::system(format!("measure the connection from rank {left}"), error);
    let received = std::thread::scope(|scope| {
        let sending = scope.spawn(|| send(outgoing, shared));
        let received = receive(incoming, shared);
        let sent = match sending.join() {
            Ok(sent) => sent,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        sent.and(received)
    });
    let (bytes, time) = received.map_err(lost)?;
    Ok(ConnectionRate { from: left, rate: bytes as f64 / time.as_secs_f64().max(1e-9) })
}

fn send(to: &OwnedFd, shared: &Shared) -> io::Result<()> {
    let start = Instant::now();
    let mut block = vec![0; BLOCK];
    for number in 1.. {
        let is_last = number >= MIN_BLOCKS && start.elapsed() >= SEND_TIME;
        block[0] = u8::from(!is_last);
        let mut sent = 0;
        while sent < BLOCK {
            match try_send(to, &block[sent..])? {
                0 => wait(to, PollFlags::OUT, shared)?,
                count => sent += count,
            }
        }
        if is_last {
            break;
        }
    }
    Ok(())
}

/// Returns the bytes received, and the time from the first to the last byte.
fn receive(from: &OwnedFd, shared: &Shared) -> io::Result<(usize, Duration)> {
    let mut block = vec![0; BLOCK];
    let (mut bytes, mut start) = (0, None);
    loop {
        let mut filled = 0;
        while filled < BLOCK {
            match try_recv(from, &mut block[filled..])? {
                None => wait(from, PollFlags::IN, shared)?,
                Some(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Some(count) => {
                    start.get_or_insert_with(Instant::now);
                    filled += count;
                }
            }
        }
        bytes += BLOCK;
        if block[0] == 0 {
            return Ok((bytes, start.map(|start| start.elapsed()).unwrap_or_default()));
        }
    }
}

fn wait(socket: &OwnedFd, flags: PollFlags, shared: &Shared) -> io::Result<()> {
    shared.check().map_err(|error| io::Error::other(error.to_string()))?;
    poll_one(socket.as_fd(), flags, CHECK_INTERVAL)
}
