//! Speeds measured on this machine, from a file given to the agent.
//!
//! ```yaml
//! - {link: NVLink, megabytesPerSecond: 19800, source: "nvbandwidth 0.6, 2026-08-01"}
//! - {link: NIC, megabytesPerSecond: 47200.5, source: "ib_write_bw"}
//! ```

use crate::read::{self, Notes};
use serde_json::Value;
use serde_saphyr::options::NonFiniteFloatPolicy;
use std::path::Path;
use switchyard_crds::gpu_topology::{Measured, MeasuredLink};

/// Anything above this is a wrong unit rather than a link speed; today's links have less than a
/// hundredth of it.
const MOST: f64 = 1e9;

/// Parses a YAML or JSON list of `{link, megabytesPerSecond, source}`, sorted by link, with speeds
/// rounded to whole megabytes. Invalid entries are skipped and returned as faults; of two entries
/// for one link the first wins.
///
/// # Errors
/// The text is not a list.
pub fn parse(text: &str) -> Result<(Vec<Measured>, Vec<String>), String> {
    // Infinity and NaN are faults of their entry, not of the file.
    let options = serde_saphyr::options! { non_finite_float_policy: NonFiniteFloatPolicy::AsString };
    let entries: Vec<Value> = serde_saphyr::from_str_with_options(text, options)
        .map_err(|error| format!("expected a list of measured speeds: {error}"))?;
    let (mut measured, mut faults): (Vec<Measured>, Vec<String>) = (Vec::new(), Vec::new());
    for (position, value) in entries.iter().enumerate() {
        match entry(value) {
            Ok(found) if measured.iter().any(|other| other.link == found.link) => {
                faults.push(format!("[{position}].link: {:?} is there twice: the first counts", found.link));
            }
            Ok(found) => measured.push(found),
            Err(fault) => faults.push(format!("[{position}].{fault}")),
        }
    }
    measured.sort_by_key(|entry| entry.link);
    Ok((measured, faults))
}

fn entry(value: &Value) -> Result<Measured, String> {
    let field = |name: &str| value.get(name).unwrap_or(&Value::Null);
    let link = serde_json::from_value::<MeasuredLink>(field("link").clone())
        .map_err(|_| format!("link: got {}; expected NVLink, PCIe, Socket or NIC", field("link")))?;
    let speed = field("megabytesPerSecond");
    let number = speed.as_f64().filter(|speed| (1.0..MOST).contains(speed));
    let number =
        number.ok_or_else(|| format!("megabytesPerSecond: got {speed}; expected a number from 1 to {MOST:.0}"))?;
    let source = field("source").as_str().filter(|source| !source.trim().is_empty());
    let source = source.ok_or_else(|| format!("source: got {}; expected how it was measured", field("source")))?;
    Ok(Measured { link, megabytes_per_second: number.round() as u64, source: read::clip(source.trim(), 256) })
}

pub(crate) fn read(path: &Path, notes: &mut Notes) -> Option<Vec<Measured>> {
    let (measured, faults) = notes.parsed(path, parse)?;
    for fault in faults {
        notes.add(format!("{}{fault}", path.display()));
    }
    Some(measured)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_entry_affects_only_itself() {
        let text = "- {link: NIC, megabytesPerSecond: 47200.5, source: ib_write_bw}\n\
                    - {link: NVLink, megabytesPerSecond: .nan, source: x}\n\
                    - {link: NVLink, megabytesPerSecond: -1, source: x}\n\
                    - {link: PCIe, megabytesPerSecond: .inf, source: x}\n\
                    - {link: Wire, megabytesPerSecond: 1, source: x}\n\
                    - {link: Socket, megabytesPerSecond: 21000}\n\
                    - {link: NIC, megabytesPerSecond: 1, source: again}\n\
                    - nothing\n\
                    - {link: NVLink, megabytesPerSecond: 19800, source: nvbandwidth}\n";
        let (measured, faults) = parse(text).unwrap();
        let speeds: Vec<_> = measured.iter().map(|entry| (entry.link, entry.megabytes_per_second)).collect();
        assert_eq!(speeds, [(MeasuredLink::NVLink, 19_800), (MeasuredLink::NIC, 47_201)]);
        assert_eq!(faults.len(), 7, "{faults:#?}");
        assert!(faults[0].starts_with("[1].megabytesPerSecond: got \".nan\"; expected a number"), "{}", faults[0]);
        assert!(faults[3].starts_with("[4].link: got \"Wire\"; expected NVLink"), "{}", faults[3]);
        assert!(faults[4].starts_with("[5].source"), "{}", faults[4]);
        assert_eq!(parse("[]").unwrap(), (vec![], vec![]));
        assert!(parse(r#"[{"link": "PCIe", "megabytesPerSecond": 5e4, "source": "p2p"}]"#).unwrap().1.is_empty());
        assert!(parse("NIC: 3").unwrap_err().starts_with("expected a list"));
    }
}
