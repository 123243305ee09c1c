//! Properties of every machine and every text.
#![allow(clippy::unwrap_used)]

use super::tests::{FIXTURES, imported, options, words};
use super::*;
use crate::matrix::parse;
use proptest::prelude::*;

/// Invariants of every result.
fn check(matrix: &Matrix, status: &GPUTopologyStatus) {
    let paths: Vec<&Vec<String>> =
        status.gpus.iter().map(|gpu| &gpu.pcie_path).chain(status.nics.iter().map(|nic| &nic.pcie_path)).collect();
    let last: BTreeSet<&String> = paths.iter().map(|path| path.last().unwrap()).collect();
    assert_eq!(last.len(), matrix.devices(), "bus ids are unique");
    for path in &paths {
        assert!(
            path.len() >= 3
                && path[0].starts_with("pci")
                && path.iter().all(|part| part.len() == 12 || part.len() == 10)
        );
    }
    let uuids: BTreeSet<&String> = status.gpus.iter().map(|gpu| &gpu.uuid).collect();
    assert_eq!(uuids.len(), status.gpus.len());
    assert!(uuids.iter().all(|uuid| uuid.len() <= 96));
    assert!(
        status.sources.iter().all(|source| source.message.as_ref().is_none_or(|text| text.chars().count() <= 1024))
    );
    let words = words(status);
    for (a, b) in pairs(matrix.devices()) {
        let (stated, shown) = (matrix.class(a, b), PathClass::from_word(&words[a][b]));
        assert!(stated.is_none() || shown >= stated, "{a} {b}: {stated:?} became {shown:?}, which is nearer");
    }
}

/// A device of a real machine: NUMA node, root complex, root port, switch.
type Spot = (u32, u32, u32, u32);

fn class_of(a: Spot, b: Spot) -> PathClass {
    match (a.0 == b.0, a.1 == b.1, a.2 == b.2, a.3 == b.3) {
        (true, true, true, true) => PathClass::Pix,
        (true, true, true, false) => PathClass::Pxb,
        (true, true, false, _) => PathClass::Phb,
        (true, false, ..) => PathClass::Node,
        (false, ..) => PathClass::Sys,
    }
}

prop_compose! {
    /// The text of a real machine, and the classes of all its devices.
    fn machine()(
        gpus in 2usize..7,
        nics in 0usize..5,
        spots in proptest::collection::vec((0u32..2, 0u32..2, 0u32..2, 0u32..2), 11),
        nvlink in proptest::collection::vec(any::<bool>(), 36),
    ) -> (String, Vec<Vec<String>>) {
        let mut spots = spots;
        // One GPU in each NUMA node, because the NICs of a node without GPUs have no known NUMA
        // node.
        (spots[0].0, spots[1].0) = (0, 1);
        let labels: Vec<String> =
            (0..gpus).map(|gpu| format!("GPU{gpu}")).chain((0..nics).map(|nic| format!("NIC{nic}"))).collect();
        let cell = |a: usize, b: usize| {
            let (low, high) = (a.min(b), a.max(b));
            match (a == b, high < gpus && nvlink[low * 6 + high]) {
                (true, _) => "X".to_owned(),
                (_, true) => "NV4".to_owned(),
                _ => class_of(spots[a], spots[b]).word().to_owned(),
            }
        };
        let cells: Vec<Vec<String>> =
            (0..labels.len()).map(|a| (0..labels.len()).map(|b| cell(a, b)).collect()).collect();
        let mut text = format!("\t{}\tCPU Affinity\tNUMA Affinity\n", labels.join("\t"));
        for (at, label) in labels.iter().enumerate() {
            let numa = spots[at].0;
            let affinity = if at < gpus { format!("\t{}-{}\t{numa}", numa * 8, numa * 8 + 7) } else { String::new() };
            text.push_str(&format!("{label}\t{}{affinity}\n", cells[at].join("\t")));
        }
        (text, cells)
    }
}

/// One edit of a text: relative position, operation, and new text.
type Edit = (f64, u8, String);

fn apply_edits(text: &str, edits: &[Edit]) -> String {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    for (place, kind, with) in edits {
        if lines.is_empty() {
            break;
        }
        let at = ((lines.len() - 1) as f64 * place) as usize;
        let mut words: Vec<String> = lines[at].split_whitespace().map(str::to_owned).collect();
        let word = ((words.len().saturating_sub(1)) as f64 * place.fract() * 7.0) as usize % words.len().max(1);
        match kind {
            0 => drop(lines.remove(at)),
            1 => lines.insert(at, lines[at].clone()),
            2 => lines.truncate(at),
            3 => lines.insert(at, with.clone()),
            4 if !words.is_empty() => {
                words[word].clone_from(with);
                lines[at] = words.join("\t");
            }
            5 if !words.is_empty() => {
                words.remove(word);
                lines[at] = words.join(" ");
            }
            6 => lines[at] = lines[at].chars().rev().collect(),
            7 => {
                let cut = lines[at].char_indices().nth(lines[at].chars().count() / 2).map_or(0, |(byte, _)| byte);
                lines.truncate(at + 1);
                lines[at].truncate(cut);
            }
            8 => lines[at] = words[..word].join(" ") + "\n" + &words[word..].join(" "),
            _ => lines[at].push_str(with),
        }
    }
    lines.join("\n")
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// The classes of any real machine survive a round trip.
    #[test]
    fn machines_round_trip((text, cells) in machine()) {
        let imported = imported(&text, &options());
        prop_assert!(imported.warnings.is_empty(), "{:?}", imported.warnings);
        prop_assert_eq!(words(imported.topology.status.as_ref().unwrap()), cells);
    }

    /// A broken text is rejected or understood; it never panics.
    #[test]
    fn no_text_panics(
        which in 0..FIXTURES.len(),
        edits in proptest::collection::vec(
            (0.0..1.0f64, 0u8..10, prop_oneof![
                "[A-Z]{1,4}[0-9]{0,3}", "[0-9,-]{1,12}", "\\PC{0,12}",
                Just("\u{1b}[4mGPU0".to_owned()), Just("N/A".to_owned()), Just("PIX".to_owned()), Just("NV0".to_owned()),
                Just("NIC0: x".to_owned()), Just("GPU1\tNIC9\tCPU Affinity".to_owned()),
            ]),
            0..6,
        ),
    ) {
        let text = apply_edits(FIXTURES[which].1, &edits);
        match parse(&text) {
            Ok(matrix) => {
                if let Ok(imported) = import(&matrix, &options()) {
                    check(&matrix, imported.topology.status.as_ref().unwrap());
                }
            }
            Err(faults) => prop_assert!(!faults.0.is_empty() && !faults.to_string().is_empty()),
        }
    }

    /// Arbitrary classes, including impossible ones.
    #[test]
    fn arbitrary_classes_never_come_out_nearer(
        classes in proptest::collection::vec(0usize..6, 45),
        numa in proptest::collection::vec(0u32..3, 6),
    ) {
        let words = ["PIX", "PXB", "PHB", "NODE", "SYS", "NV2"];
        let cell = |a: usize, b: usize| {
            let (low, high) = (a.min(b), a.max(b));
            if a == b {
                return "X";
            }
            let word = words[classes[high * (high - 1) / 2 + low]];
            if high > 5 && word == "NV2" { "SYS" } else { word }
        };
        let label = |at: usize| if at < 6 { format!("GPU{at}") } else { format!("NIC{}", at - 6) };
        let labels: Vec<String> = (0..10).map(label).collect();
        let mut text = format!("{} CPU Affinity NUMA Affinity\n", labels.join(" "));
        for (at, label) in labels.iter().enumerate() {
            let cells: Vec<&str> = (0..10).map(|other| cell(at, other)).collect();
            let affinity = numa.get(at).map(|node| format!(" N/A {node}")).unwrap_or_default();
            text.push_str(&format!("{label} {}{affinity}\n", cells.join(" ")));
        }
        let matrix = parse(&text).unwrap();
        check(&matrix, import(&matrix, &options()).unwrap().topology.status.as_ref().unwrap());
    }
}
