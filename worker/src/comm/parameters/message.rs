//! Messages between ranks and parameter servers: a fixed header, then 32-bit words.
//!
//! ```text
//! 0 kind u32 | 4 bucket u32 | 8 step u64 | 16 numbers 3 x u64 | 40 words u64   (little endian)
//! ```

use std::sync::Arc;

/// Header length in bytes.
pub(super) const HEADER: usize = 48;

/// Kind of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum MessageKind {
    /// Values of an array.
    Put = 1,
    /// Requests values of an array.
    Get,
    /// The values are complete: training begins.
    Start,
    /// Gradients of a bucket.
    Push,
    /// Requests the update of all buckets with the gradients pushed.
    Apply,
    /// Drops the gradients pushed.
    Skip,
    /// Values of an array.
    Values,
    /// Training can begin.
    Started,
    /// The gradients of a bucket have arrived; the updated weights follow an `Apply`.
    Sums,
    /// Updated weights of a bucket.
    Weights,
    /// A rank's first message to a dedicated server: what the server holds.
    Plan,
}

impl MessageKind {
    const ALL: [MessageKind; 11] = [
        MessageKind::Put,
        MessageKind::Get,
        MessageKind::Start,
        MessageKind::Push,
        MessageKind::Apply,
        MessageKind::Skip,
        MessageKind::Values,
        MessageKind::Started,
        MessageKind::Sums,
        MessageKind::Weights,
        MessageKind::Plan,
    ];
}

/// A message; the meaning of the fields depends on the kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    pub kind: MessageKind,
    pub bucket: u32,
    pub step: u64,
    pub numbers: [u64; 3],
    /// Bits of f32 values, mostly. Shared, because a server sends the same weights to all ranks.
    pub words: Arc<Vec<u32>>,
}

impl Message {
    /// A message without words.
    pub fn new(kind: MessageKind, bucket: u32, step: u64, numbers: [u64; 3]) -> Message {
        Message { kind, bucket, step, numbers, words: Arc::default() }
    }

    /// Adds values.
    #[must_use]
    pub fn with(self, values: &[f32]) -> Message {
        Message { words: Arc::new(bytemuck::cast_slice(values).to_vec()), ..self }
    }

    /// The words as values.
    pub fn values(&self) -> &[f32] {
        bytemuck::cast_slice(&self.words)
    }

    /// Length on the wire in bytes.
    pub(super) fn bytes(&self) -> usize {
        HEADER + 4 * self.words.len()
    }

    pub(super) fn header(&self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        out[..4].copy_from_slice(&(self.kind as u32).to_le_bytes());
        out[4..8].copy_from_slice(&self.bucket.to_le_bytes());
        let [a, b, c] = self.numbers;
        let fields = [self.step, a, b, c, self.words.len() as u64];
        for (to, field) in out[8..].as_chunks_mut().0.iter_mut().zip(fields) {
            *to = field.to_le_bytes();
        }
        out
    }

    /// Decodes a header: the message, and the number of its words.
    pub(super) fn decode(header: &[u8; HEADER]) -> Result<(Message, u64), String> {
        let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let kind = MessageKind::ALL.into_iter().find(|kind| *kind as u32 == word(0));
        let kind = kind.ok_or_else(|| format!("unknown kind of message {}", word(0)))?;
        Ok((Message::new(kind, word(4), long(8), [long(16), long(24), long(32)]), long(40)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_survive_the_wire() {
        for kind in MessageKind::ALL {
            let sent = Message::new(kind, 7, u64::MAX - 1, [1, 1 << 40, 3]).with(&[1.5, -0.0]);
            let (got, words) = Message::decode(&sent.header()).unwrap();
            assert_eq!((got.with(sent.values()), words), (sent, 2));
        }
        let mut damaged = Message::new(MessageKind::Push, 0, 0, [0; 3]).header();
        damaged[0] = 12;
        assert_eq!(Message::decode(&damaged), Err("unknown kind of message 12".to_owned()));
    }
}
