//! The two directions of a channel during an operation.

use super::{
    super::{
        error::Cause,
        frame::{HEADER, Header},
        op_context::OpError,
        plan::{Action, Step},
    },
    CHUNK, Executor, Format, Lane, Prepared, Task,
};
use std::{io, ops::Range};

/// Minimum bytes worth a system call while more are on their way.
const WORTH_SENDING: usize = 64 << 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Flow {
    /// Waits for another stream of this rank.
    #[default]
    Held,
    /// The channel is full, or nothing has arrived.
    Blocked,
    Finished,
}

/// Progress of one direction.
#[derive(Default)]
pub(super) struct Cursor {
    header: [u8; HEADER],
    /// Bytes of the header that have been sent or received.
    header_bytes: usize,
    /// Position among the lane's steps, and the bucket of that step.
    step: usize,
    bucket: usize,
    /// Received bytes of an incomplete element.
    carry: [u8; 8],
    carried: usize,
    pub flow: Flow,
}

/// The part of the staging buffer that is valid, and what it holds.
#[derive(Default)]
pub(super) struct Staged {
    /// Position in `done`.
    item: usize,
    /// Wire bytes of that item.
    bytes: Range<usize>,
}

/// The next part that a stream moves.
struct Item {
    step: Step,
    /// Position in `done`.
    index: usize,
    elements: Range<usize>,
    /// Wire bytes: all, moved, and movable so far.
    end: usize,
    offset: usize,
    available: usize,
}

impl Executor {
    /// The next unfinished part of a stream; advances the cursor over finished ones.
    fn item(
        done: &[usize],
        cursor: &mut Cursor,
        lane: &Lane,
        (prepared, task): (&Prepared, &Task<'_>),
    ) -> Option<Item> {
        let (buckets, size) = (task.parts.buckets.len(), task.format.wire_size());
        while let Some(&number) = lane.steps.get(cursor.step) {
            while cursor.bucket < buckets {
                let step = prepared.program.steps[number];
                let elements = task.parts.range(cursor.bucket, step.chunk);
                let index = number * buckets + cursor.bucket;
                let (end, offset) = (elements.len() * size, done[index]);
                if offset < end {
                    let before = prepared.program.after(number).iter();
                    let available = before.map(|step| done[step * buckets + cursor.bucket]).fold(end, usize::min);
                    return Some(Item { step, index, elements, end, offset, available });
                }
                cursor.bucket += 1;
            }
            (cursor.step, cursor.bucket) = (cursor.step + 1, 0);
        }
        None
    }

    /// Sends what is ready; returns the bytes sent.
    pub(super) fn send(
        &mut self,
        number: usize,
        lane: &Lane,
        header: &[u8; HEADER],
        (prepared, task): (&Prepared, &Task<'_>),
        data: &[u8],
    ) -> Result<usize, OpError> {
        let cursor = &mut self.sends[number];
        let Some(channel) = &self.peers[lane.peer].outgoing else { return Err(self.missing(lane.peer)) };
        let mut total = 0;
        if cursor.header_bytes < HEADER {
            total = match channel.try_write(&header[cursor.header_bytes..]) {
                Ok(sent) => sent,
                Err(error) => return Err(self.lost(lane.peer, &error)),
            };
            cursor.header_bytes += total;
            cursor.flow = Flow::Blocked;
            if cursor.header_bytes < HEADER {
                return Ok(total);
            }
        }
        let Some(item) = Executor::item(&self.done, cursor, lane, (prepared, task)) else {
            cursor.flow = Flow::Finished;
            return Ok(total);
        };
        let ready = item.available.saturating_sub(item.offset);
        if ready == 0 || (ready < WORTH_SENDING && item.available < item.end) {
            cursor.flow = Flow::Held;
            return Ok(total);
        }
        let part = match task.format {
            Format::Plain(data_type, _) => {
                let start = item.elements.start * data_type.size() + item.offset;
                &data[start..start + ready.min(CHUNK)]
            }
            Format::Rounded { wire, scale } => {
                let (size, staged) = (wire.size(), &mut self.staged);
                if staged.item != item.index || !staged.bytes.contains(&item.offset) {
                    let first = item.offset / size;
                    let count = (item.available / size - first).min(self.staging.len());
                    let from = &data[4 * (item.elements.start + first)..][..4 * count];
                    wire.encode(bytemuck::cast_slice(from), &mut self.staging[..count], scale);
                    *staged = Staged { item: item.index, bytes: first * size..(first + count) * size };
                }
                let bytes: &[u8] = bytemuck::cast_slice(&self.staging);
                &bytes[item.offset - staged.bytes.start..staged.bytes.len()]
            }
        };
        match channel.try_write(part) {
            Ok(sent) => {
                self.done[item.index] += sent;
                cursor.flow = Flow::Blocked;
                Ok(total + sent)
            }
            Err(error) => Err(self.lost(lane.peer, &error)),
        }
    }

    /// Receives and combines what has arrived; returns the bytes received.
    pub(super) fn receive(
        &mut self,
        number: usize,
        lane: &Lane,
        (prepared, task): (&Prepared, &Task<'_>),
        data: &mut [u8],
    ) -> Result<usize, OpError> {
        let cursor = &mut self.receives[number];
        let Some(channel) = &self.peers[lane.peer].incoming else { return Err(self.missing(lane.peer)) };
        cursor.flow = Flow::Blocked;
        if cursor.header_bytes < HEADER {
            let got = match channel.try_read(&mut cursor.header[cursor.header_bytes..]) {
                Ok(got) => got,
                Err(error) => return Err(self.lost(lane.peer, &error)),
            };
            cursor.header_bytes += got;
            if cursor.header_bytes == HEADER {
                let raw = cursor.header;
                self.check_header(lane.peer, &raw, task)?;
            }
            return Ok(got);
        }
        let Some(item) = Executor::item(&self.done, cursor, lane, (prepared, task)) else {
            cursor.flow = Flow::Finished;
            return Ok(0);
        };
        let want = item.available.saturating_sub(item.offset).min(CHUNK);
        if want <= cursor.carried {
            cursor.flow = Flow::Held;
            return Ok(0);
        }
        let (size, memory) = (task.format.wire_size(), task.format.memory_size());
        if matches!(task.format, Format::Plain(..)) && item.step.action == Action::Copy {
            let start = item.elements.start * memory + item.offset;
            return match channel.try_read(&mut data[start..start + want]) {
                Ok(got) => {
                    self.done[item.index] += got;
                    Ok(got)
                }
                Err(error) => Err(self.lost(lane.peer, &error)),
            };
        }
        let scratch: &mut [u8] = bytemuck::cast_slice_mut(&mut self.scratch);
        let carried = cursor.carried;
        scratch[..carried].copy_from_slice(&cursor.carry[..carried]);
        let got = match channel.try_read(&mut scratch[carried..want]) {
            Ok(got) => got,
            Err(error) => return Err(self.lost(lane.peer, &error)),
        };
        let whole = (carried + got) / size;
        let first = item.elements.start + item.offset / size;
        let mine = &mut data[memory * first..memory * (first + whole)];
        task.format.combine(&scratch[..whole * size], mine, item.step.action);
        cursor.carried = carried + got - whole * size;
        cursor.carry[..cursor.carried].copy_from_slice(&scratch[whole * size..carried + got]);
        self.done[item.index] += whole * size;
        Ok(got)
    }

    fn check_header(&self, peer: usize, raw: &[u8; HEADER], task: &Task<'_>) -> Result<(), OpError> {
        let rank = self.peers[peer].rank;
        let header = Header::decode(raw).map_err(|error| {
            OpError::Known(Cause::failed(rank, format!("sent something other than an operation: {error}")))
        })?;
        if (header.kind, header.attempt) != (task.header.kind, task.header.attempt) {
            let text = format!("sent {:?} of attempt {} where an operation was due", header.kind, header.attempt);
            return Err(OpError::Known(Cause::failed(rank, text)));
        }
        if header != task.header { Err(OpError::Known((task.mismatch)(rank, &header))) } else { Ok(()) }
    }

    fn missing(&self, peer: usize) -> OpError {
        self.lost(peer, &io::ErrorKind::NotConnected.into())
    }
}
