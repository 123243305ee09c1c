//! Text format of cases: one per line, with tab-separated fields whose list items are separated by
//! spaces.
//!
//! ```text
//! sum.cu  version  -DWIDTH=33  sum  2 256 0  r0:0:80 w1:0:80 a i5  x=0-80>0-80 y=80-160>160-240
//! ```
//!
//! An argument is memory that is read, written or updated (buffer, offset, bytes), absent, an
//! integer, or the bits of a float. A buffer has a name, and the ranges of its bytes before and
//! after the launch.

use super::{Case, Kept, Place, Recorded};
use crate::error::Error;
use crate::kernels::Argument;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Recorded { source, definitions, version, kernel, blocks, threads, shared_bytes, arguments } = &self.launch;
        let arguments = list(arguments.iter().map(argument));
        let buffers = list(
            self.buffers
                .iter()
                .map(|Kept { name, before, after }| format!("{name}={}>{}", ranges(before), ranges(after))),
        );
        let definitions = list(definitions.iter().cloned());
        write!(
            f,
            "{source}\t{version:016x}\t{definitions}\t{kernel}\t{blocks} {threads} {shared_bytes}\t{arguments}\t{buffers}"
        )
    }
}

impl FromStr for Case {
    type Err = Error;

    fn from_str(line: &str) -> Result<Case, Error> {
        parse(line).ok_or_else(|| {
            Error::refused(
                "vectors",
                format!("{line:?}, expected source, version, definitions, kernel, grid, arguments and buffers"),
            )
        })
    }
}

fn list(parts: impl Iterator<Item = String>) -> String {
    parts.collect::<Vec<_>>().join(" ")
}

fn argument(argument: &Argument<Place>) -> String {
    let memory = |kind: char, Place { buffer, offset, bytes }: &Place| format!("{kind}{buffer}:{offset}:{bytes}");
    match argument {
        Argument::Reads(place) => memory('r', place),
        Argument::Writes(place) => memory('w', place),
        Argument::Updates(place) => memory('u', place),
        Argument::Absent => "a".to_owned(),
        Argument::Int(value) => format!("i{value}"),
        Argument::Float(value) => format!("f{:08x}", value.to_bits()),
    }
}

fn ranges(all: &[Range<usize>]) -> String {
    all.iter().map(|Range { start, end }| format!("{start}-{end}")).collect::<Vec<_>>().join(",")
}

fn parse(line: &str) -> Option<Case> {
    let fields: Vec<&str> = line.split('\t').collect();
    let [source, version, definitions, kernel, grid, arguments, buffers] = fields.try_into().ok()?;
    let [blocks, threads, shared_bytes] = numbers(grid, ' ')?;
    let launch = Recorded {
        source: source.to_owned(),
        definitions: definitions.split_whitespace().map(str::to_owned).collect(),
        version: u64::from_str_radix(version, 16).ok()?,
        kernel: kernel.to_owned(),
        blocks,
        threads,
        shared_bytes,
        arguments: arguments.split_whitespace().map(parse_argument).collect::<Option<_>>()?,
    };
    Some(Case { launch, buffers: buffers.split_whitespace().map(parse_buffer).collect::<Option<_>>()? })
}

fn parse_argument(text: &str) -> Option<Argument<Place>> {
    let (kind, rest) = text.split_at_checked(1)?;
    let place = || numbers(rest, ':').map(|[buffer, offset, bytes]| Place { buffer, offset, bytes });
    match kind {
        "r" => Some(Argument::Reads(place()?)),
        "w" => Some(Argument::Writes(place()?)),
        "u" => Some(Argument::Updates(place()?)),
        "a" => rest.is_empty().then_some(Argument::Absent),
        "i" => Some(Argument::Int(rest.parse().ok()?)),
        "f" => Some(Argument::Float(f32::from_bits(u32::from_str_radix(rest, 16).ok()?))),
        _ => None,
    }
}

fn parse_buffer(text: &str) -> Option<Kept> {
    let (name, rest) = text.split_once('=')?;
    let (before, after) = rest.split_once('>')?;
    let range = |text: &str| numbers(text, '-').map(|[start, end]| start..end);
    let ranges = |text: &str| text.split(',').map(range).collect::<Option<Vec<_>>>();
    Some(Kept { name: name.to_owned(), before: ranges(before)?, after: ranges(after)? })
}

/// Parses exactly N values.
fn numbers<T: FromStr, const N: usize>(text: &str, between: char) -> Option<[T; N]> {
    let all: Vec<T> = text.split(between).map(|number| number.parse().ok()).collect::<Option<_>>()?;
    all.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_round_trip() {
        let place = Place { buffer: 1, offset: 4, bytes: 80 };
        let arguments = vec![
            Argument::Reads(place),
            Argument::Writes(Place { buffer: 0, ..place }),
            Argument::Updates(place),
            Argument::Absent,
            Argument::Int(u32::MAX),
            Argument::Float(0.1),
            Argument::Float(f32::NEG_INFINITY),
        ];
        let buffer = |name: &str| Kept { name: name.into(), before: vec![0..80, 160..200], after: vec![7..9, 0..1] };
        for definitions in [vec!["-DELEMENT=bf16".to_owned(), "-DWIDTH=33".to_owned()], Vec::new()] {
            let launch = Recorded {
                source: "x.cu".into(),
                definitions,
                version: 77,
                kernel: "x".into(),
                blocks: 1,
                threads: 2,
                shared_bytes: 3,
                arguments: arguments.clone(),
            };
            let case = Case { launch, buffers: vec![buffer("x"), buffer("d_y")] };
            assert_eq!(case.to_string().parse::<Case>().unwrap(), case);
        }
    }

    #[test]
    fn malformed_cases_are_rejected() {
        let line = "x.cu\t0000000000000001\t\tx\t1 2 3\tr0:0:8 i5\tx=0-8>0-8";
        assert!(line.parse::<Case>().is_ok());
        for (from, to) in [
            ("1 2 3", "1 2"),
            ("r0", "q0"),
            ("0:8 ", "0 "),
            ("i5", "i-5"),
            ("x=", "x"),
            (">", ""),
            ("0-8", "0"),
            ("\t1", " 1"),
        ] {
            let text = line.replacen(from, to, 1).parse::<Case>().unwrap_err().to_string();
            assert!(
                text.ends_with("expected source, version, definitions, kernel, grid, arguments and buffers"),
                "{text}"
            );
        }
    }
}
