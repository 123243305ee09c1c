//! Frames: a fixed 32-byte header, then at most `limit` bytes of payload.
//!
//! ```text
//! 0 magic u32 | 4 version u8 | 5 kind u8 | 6 zero u16 | 8 attempt u32 | 12 tag u32
//! 16 sequence u32 | 20 length u64 | 28 checksum of the first 28 bytes u32   (little endian)
//! ```
//!
//! The checksum detects a different protocol on the port; attackers are the handshake's job.

use xxhash_rust::xxh3::xxh3_64;

/// Header length in bytes.
pub(super) const HEADER: usize = 32;
/// Protocol version; must be equal on both sides.
pub(super) const VERSION: u8 = 3;
/// Largest payload before authentication.
pub(super) const LIMIT_UNAUTHENTICATED: u64 = 256;
/// Most bytes that rank 0 gathers from each rank.
pub(super) const MAX_GATHER: usize = 16 << 20;
/// Largest control payload after authentication; fits the roster of the largest group.
pub(super) const LIMIT_AUTHENTICATED: u64 = 4 << 20;

const MAGIC: u32 = 0x6479_7753;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    Hello = 1,
    Challenge,
    Proof,
    Verdict,
    Join,
    Roster,
    Heartbeat,
    Abort,
    Failed,
    Agree,
    Agreed,
    Leave,
    Goodbye,
    Operation,
    Descriptor,
    Clock,
    Gather,
    AllGather,
    Gathered,
}

impl Kind {
    const ALL: [Kind; 19] = [
        Kind::Hello,
        Kind::Challenge,
        Kind::Proof,
        Kind::Verdict,
        Kind::Join,
        Kind::Roster,
        Kind::Heartbeat,
        Kind::Abort,
        Kind::Failed,
        Kind::Agree,
        Kind::Agreed,
        Kind::Leave,
        Kind::Goodbye,
        Kind::Operation,
        Kind::Descriptor,
        Kind::Clock,
        Kind::Gather,
        Kind::AllGather,
        Kind::Gathered,
    ];
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub kind: Kind,
    pub attempt: u32,
    /// Bucket of an operation; otherwise 0.
    pub tag: u32,
    pub sequence: u32,
    /// Payload bytes.
    pub length: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum FrameError {
    #[error("not a frame of this protocol")]
    Foreign,
    #[error("protocol version {0}, expected {VERSION}")]
    Version(u8),
    #[error("damaged header")]
    Damaged,
    #[error("unknown kind of frame {0}")]
    Kind(u8),
    #[error("frame of {0} bytes, at most {1} expected")]
    TooLong(u64, u64),
}

impl Header {
    pub fn control(kind: Kind, attempt: u32, sequence: u32, payload: &[u8]) -> Header {
        Header { kind, attempt, tag: 0, sequence, length: payload.len() as u64 }
    }

    pub fn encode(&self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        out[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4] = VERSION;
        out[5] = self.kind as u8;
        out[8..12].copy_from_slice(&self.attempt.to_le_bytes());
        out[12..16].copy_from_slice(&self.tag.to_le_bytes());
        out[16..20].copy_from_slice(&self.sequence.to_le_bytes());
        out[20..28].copy_from_slice(&self.length.to_le_bytes());
        let sum = checksum(&out[..28]);
        out[28..].copy_from_slice(&sum.to_le_bytes());
        out
    }

    pub fn decode(bytes: &[u8; HEADER]) -> Result<Header, FrameError> {
        if le32(&bytes[0..]) != MAGIC {
            return Err(FrameError::Foreign);
        }
        if bytes[4] != VERSION {
            return Err(FrameError::Version(bytes[4]));
        }
        if le32(&bytes[28..]) != checksum(&bytes[..28]) || bytes[6] != 0 || bytes[7] != 0 {
            return Err(FrameError::Damaged);
        }
        let kind = Kind::ALL.into_iter().find(|kind| *kind as u8 == bytes[5]).ok_or(FrameError::Kind(bytes[5]))?;
        let length = u64::from(le32(&bytes[20..])) | u64::from(le32(&bytes[24..])) << 32;
        Ok(Header { kind, attempt: le32(&bytes[8..]), tag: le32(&bytes[12..]), sequence: le32(&bytes[16..]), length })
    }
}

/// Encodes header and payload into one buffer.
pub(super) fn encode(kind: Kind, attempt: u32, sequence: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER + payload.len());
    out.extend_from_slice(&Header::control(kind, attempt, sequence, payload).encode());
    out.extend_from_slice(payload);
    out
}

fn checksum(bytes: &[u8]) -> u32 {
    xxh3_64(bytes) as u32
}

pub(super) fn le32(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// Assembles frames from the bytes of one connection. It never requests bytes beyond the current
/// frame, so that a connection can switch protocols after the handshake.
#[derive(Debug)]
pub(super) struct FrameReader {
    buffer: Vec<u8>,
    header: Option<Header>,
    limit: u64,
}

impl FrameReader {
    pub fn new(limit: u64) -> FrameReader {
        FrameReader { buffer: Vec::new(), header: None, limit }
    }

    /// Sets the payload limit from the next frame on.
    pub fn set_limit(&mut self, limit: u64) {
        self.limit = limit;
    }

    /// Bytes missing to complete the current header or frame; never 0.
    pub fn wanted(&self) -> usize {
        match self.header {
            None => HEADER - self.buffer.len(),
            Some(header) => header.length as usize - self.buffer.len(),
        }
    }

    /// Takes at most [`Self::wanted`] bytes; returns a frame when it is complete.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Option<(Header, Vec<u8>)>, FrameError> {
        debug_assert!(bytes.len() <= self.wanted());
        self.buffer.extend_from_slice(bytes);
        if self.header.is_none() && self.buffer.len() == HEADER {
            let mut raw = [0; HEADER];
            raw.copy_from_slice(&self.buffer);
            let header = Header::decode(&raw)?;
            if header.length > self.limit {
                return Err(FrameError::TooLong(header.length, self.limit));
            }
            self.buffer.clear();
            self.header = Some(header);
        }
        match self.header {
            Some(header) if self.buffer.len() as u64 == header.length => {
                self.header = None;
                Ok(Some((header, std::mem::take(&mut self.buffer))))
            }
            _ => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read_all(bytes: &[u8], limit: u64, piece: usize) -> Result<Vec<(Header, Vec<u8>)>, FrameError> {
        let mut reader = FrameReader::new(limit);
        let (mut frames, mut at) = (Vec::new(), 0);
        while at < bytes.len() {
            let n = reader.wanted().min(piece).min(bytes.len() - at);
            assert!(n > 0);
            frames.extend(reader.push(&bytes[at..at + n])?);
            assert!(reader.buffer.capacity() as u64 <= 4 * (limit + HEADER as u64));
            at += n;
        }
        Ok(frames)
    }

    proptest! {
        #[test]
        fn frames_survive_any_fragmentation(
            attempt: u32, sequence: u32, kind in 0usize..16, piece in 1usize..70,
            payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 1..5),
        ) {
            let bytes: Vec<u8> =
                payloads.iter().flat_map(|p| encode(Kind::ALL[kind], attempt, sequence, p)).collect();
            let frames = read_all(&bytes, 256, piece).unwrap();
            prop_assert_eq!(frames.len(), payloads.len());
            for ((header, payload), expected) in frames.iter().zip(&payloads) {
                prop_assert_eq!(payload, expected);
                prop_assert_eq!((header.kind, header.attempt, header.sequence), (Kind::ALL[kind], attempt, sequence));
            }
        }

        #[test]
        fn random_bytes_never_panic_and_are_foreign(bytes in prop::collection::vec(any::<u8>(), 32..300)) {
            prop_assume!(le32(&bytes) != MAGIC);
            prop_assert_eq!(read_all(&bytes, 256, 19), Err(FrameError::Foreign));
        }

        #[test]
        fn one_flipped_bit_in_a_header_is_noticed(byte in 0usize..32, bit in 0u8..8, length in 0u64..200) {
            let header = Header { kind: Kind::Join, attempt: 3, tag: 9, sequence: 77, length };
            let mut raw = header.encode();
            raw[byte] ^= 1 << bit;
            prop_assert!(Header::decode(&raw).is_err());
        }
    }

    #[test]
    fn a_length_beyond_the_limit_is_refused_before_any_payload() {
        let header = Header { kind: Kind::Hello, attempt: 1, tag: 0, sequence: 0, length: u64::MAX };
        assert_eq!(
            read_all(&header.encode(), LIMIT_UNAUTHENTICATED, 32),
            Err(FrameError::TooLong(u64::MAX, LIMIT_UNAUTHENTICATED))
        );
    }
}
