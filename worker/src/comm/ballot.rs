//! Values exchanged by all ranks: their encoding on the way to rank 0 and back, and how rank 0
//! combines them.

use super::{
    error::format_ranks,
    frame::{self, Kind, LIMIT_AUTHENTICATED},
};

/// What rank 0 does with the ranks' values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Exchange {
    /// Check that they are equal.
    Agree,
    /// Return them on rank 0.
    Gather,
    /// Return them on all ranks.
    AllGather,
}

impl Exchange {
    /// Kind of the frame that carries a value to rank 0.
    pub fn kind(self) -> Kind {
        match self {
            Exchange::Agree => Kind::Agree,
            Exchange::Gather => Kind::Gather,
            Exchange::AllGather => Kind::AllGather,
        }
    }

    pub fn of(kind: Kind) -> Option<Exchange> {
        [Exchange::Agree, Exchange::Gather, Exchange::AllGather].into_iter().find(|exchange| exchange.kind() == kind)
    }
}

/// One rank's contribution to an exchange.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Ballot {
    pub exchange: Exchange,
    /// Each rank numbers its exchanges.
    pub sequence: u32,
    /// Describes the value in messages.
    pub subject: String,
    pub value: Vec<u8>,
}

/// Payload of a value's frame: length of the subject, subject, value.
pub(super) fn encode_value(what: &str, value: &[u8]) -> Vec<u8> {
    let mut out = (what.len() as u16).to_le_bytes().to_vec();
    out.extend_from_slice(what.as_bytes());
    out.extend_from_slice(value);
    out
}

pub(super) fn decode_value(payload: &[u8]) -> Option<(String, Vec<u8>)> {
    let (len, rest) = payload.split_at_checked(2)?;
    let (what, value) = rest.split_at_checked(usize::from(u16::from_le_bytes([len[0], len[1]])))?;
    Some((String::from_utf8(what.to_vec()).ok()?, value.to_vec()))
}

/// Payload of `Gathered`: length and bytes of each value.
pub(super) fn encode_values(values: &[Vec<u8>]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| (value.len() as u32).to_le_bytes().into_iter().chain(value.iter().copied()))
        .collect()
}

/// The values of `Gathered`; `None` if it is malformed.
pub(super) fn decode_values(mut payload: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut values = Vec::new();
    while !payload.is_empty() {
        let (len, rest) = payload.split_at_checked(4)?;
        let (value, rest) = rest.split_at_checked(frame::le32(len) as usize)?;
        values.push(value.to_vec());
        payload = rest;
    }
    Some(values)
}

/// Combines the ballots of all ranks, which are in rank order.
pub(super) fn tally(ballots: Vec<Ballot>) -> Result<Vec<Vec<u8>>, String> {
    let zero = &ballots[0];
    let differs = |ballot: &Ballot| {
        (ballot.sequence, &ballot.subject, ballot.exchange) != (zero.sequence, &zero.subject, zero.exchange)
    };
    if let Some((rank, other)) = (0u32..).zip(&ballots).find(|(_, ballot)| differs(ballot)) {
        return Err(format!(
            "rank {rank} asks for agreement on {} (its number {}), rank 0 on {} (its number {})",
            other.subject, other.sequence, zero.subject, zero.sequence
        ));
    }
    if zero.exchange == Exchange::Agree {
        return compare(&ballots).map(|()| Vec::new());
    }
    let bytes: usize = ballots.iter().map(|ballot| ballot.value.len() + 4).sum();
    if zero.exchange == Exchange::AllGather && bytes as u64 > LIMIT_AUTHENTICATED {
        return Err(format!(
            "{}: got {bytes} bytes from all ranks; expected at most {LIMIT_AUTHENTICATED}",
            zero.subject
        ));
    }
    Ok(ballots.into_iter().map(|ballot| ballot.value).collect())
}

/// Compares values. The error names the ranks that differ and their values.
fn compare(ballots: &[Ballot]) -> Result<(), String> {
    let mut groups: Vec<(&[u8], Vec<u32>)> = Vec::new();
    for (rank, ballot) in (0u32..).zip(ballots) {
        match groups.iter_mut().find(|(seen, _)| *seen == ballot.value) {
            Some((_, ranks)) => ranks.push(rank),
            None => groups.push((&ballot.value, vec![rank])),
        }
    }
    if groups.len() == 1 {
        return Ok(());
    }
    let list: Vec<String> = groups
        .iter()
        .take(4)
        .map(|(value, ranks)| {
            let has = if ranks.len() == 1 { "has" } else { "have" };
            format!("{} {has} {}", format_ranks(ranks), format_value(value))
        })
        .collect();
    Err(format!("the ranks disagree on {}: {}", ballots[0].subject, list.join("; ")))
}

/// Formats a value for an error message: text if it is printable, otherwise its first bytes in
/// hexadecimal.
fn format_value(value: &[u8]) -> String {
    if let Ok(text) = std::str::from_utf8(value)
        && text.chars().all(|c| !c.is_control())
    {
        let start: String = text.chars().take(200).collect();
        return if start.len() < text.len() { format!("{start:?}...") } else { format!("{start:?}") };
    }
    let hex: String = value.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    if value.len() > 16 { format!("0x{hex}... ({} bytes)", value.len()) } else { format!("0x{hex}") }
}
