//! Are the GPUs healthy, and do they run as fast as they could?

use super::{Advice, Basis, Change, Chart, Finding, Rule};
use crate::report::facts::Facts;
use switchyard_worker_contract::gpu::{GpuFault, GpuReport, SlowedBy};

/// Lowered clocks are reported above this share of time, percent.
const SLOWED: f64 = 10.0;
/// Seconds of observation needed for a meaningful share.
const WATCHED: f64 = 10.0;
/// Most GPUs to name.
const NAMED: usize = 4;

const WHERE: &str = "NVML reports of the GPUs";

/// The GPU reports of a job; otherwise the finding to return.
fn gpus(facts: &Facts) -> Result<&[GpuReport], Finding> {
    match (facts.gpus.as_slice(), facts.on_gpu) {
        ([], Some(true)) => Err(Finding::Unknown(WHERE)),
        ([], _) => Err(Finding::NotApplicable),
        (gpus, _) => Ok(gpus),
    }
}

/// The first GPUs, and the number of the others.
fn named(all: &[String]) -> String {
    let more = all.len().saturating_sub(NAMED);
    let first = all.iter().take(NAMED).cloned().collect::<Vec<_>>().join("; ");
    if more > 0 { format!("{first}; {more} more") } else { first }
}

fn place(gpu: &GpuReport) -> String {
    format!("GPU {} of rank {}", gpu.bus, gpu.rank)
}

/// Advice without a gain in time.
fn check_gpu(evidence: String, what: &str, urgent: bool) -> Finding {
    let changes = vec![Change::outside_manifest(what.to_owned(), None, Basis::Guess)];
    Finding::Advice(Advice { evidence, changes, urgent, parts: &[], chart: Chart::Placement })
}

pub(super) const ERRORS: Rule = Rule {
    id: "gpu-errors",
    question: 1,
    threshold: "The driver reported a critical error (XID), a memory error that ECC could not mend, or the loss of a GPU.",
    gain: "None: the result is in doubt, which comes before speed.",
    source: "NVIDIA's XID catalogue",
    check: |facts| {
        let gpus = match gpus(facts) {
            Ok(gpus) => gpus,
            Err(finding) => return finding,
        };
        let errors = gpus.iter().filter_map(|gpu| {
            let trouble = gpu.worst_fault();
            let is_error = matches!(trouble, Some(GpuFault::Xid { .. } | GpuFault::Lost | GpuFault::MemoryErrors));
            trouble.filter(|_| is_error).map(|trouble| format!("{}: {trouble}", place(gpu)))
        });
        let errors: Vec<String> = errors.collect();
        if errors.is_empty() {
            return Finding::Fine("the driver reported no error of a GPU".into());
        }
        let what =
            "look at the kernel log of the node (`dmesg | grep -i xid`) and test the GPU before it is used again";
        check_gpu(format!("The driver reported errors. {}.", named(&errors)), what, true)
    },
};

pub(super) const CLOCKS: Rule = Rule {
    id: "gpu-clocks",
    question: 1,
    threshold: "The clocks of a GPU are lowered in ≥ 10 % of at least 10 s. By its power limit: a note, since that is usual under full load.",
    gain: "Not known.",
    source: "ours; the reasons are those of NVML",
    check: |facts| {
        let gpus = match gpus(facts) {
            Ok(gpus) => gpus,
            Err(finding) => return finding,
        };
        let slowed = |causes: &[SlowedBy]| -> Vec<String> {
            let of = |gpu: &GpuReport| -> Vec<String> {
                let shares = causes.iter().map(|by| (*by, gpu.slowed_percent(*by)));
                let much = shares.filter(|(_, percent)| gpu.seconds >= WATCHED && *percent >= SLOWED);
                much.map(|(by, percent)| {
                    let heat = match gpu.highest_celsius {
                        Some(celsius) if by == SlowedBy::Temperature => format!(" (up to {celsius} °C)"),
                        _ => String::new(),
                    };
                    format!("{}: by {} for {percent:.0} % of the time{heat}", place(gpu), by.label())
                })
                .collect()
            };
            gpus.iter().flat_map(of).collect()
        };
        let unusual = slowed(&[SlowedBy::Temperature, SlowedBy::PowerBrake, SlowedBy::Hardware]);
        if !unusual.is_empty() {
            let what = "check the node's cooling and power supply";
            return check_gpu(format!("Clocks were lowered. {}.", named(&unusual)), what, false);
        }
        match slowed(&[SlowedBy::Power]) {
            usual if usual.is_empty() => Finding::Fine("clocks were not lowered for long".into()),
            usual => Finding::Note(format!("clocks were lowered. {}", named(&usual)), Chart::Placement),
        }
    },
};

pub(super) const LINK: Rule = Rule {
    id: "gpu-link",
    question: 1,
    threshold: "The PCIe link of a GPU uses fewer lanes than it could.",
    gain: "Not known.",
    source: "ours: batches, checkpoints and reductions through host memory use it",
    check: |facts| {
        let gpus = match gpus(facts) {
            Ok(gpus) => gpus,
            Err(finding) => return finding,
        };
        let narrow = gpus.iter().filter_map(|gpu| {
            let width = gpu.pcie.filter(|width| width.lanes < width.most)?;
            Some(format!("{}: {} of {} lanes", place(gpu), width.lanes, width.most))
        });
        let narrow: Vec<String> = narrow.collect();
        if narrow.is_empty() {
            return Finding::Fine("PCIe links use all their lanes, as far as known".into());
        }
        check_gpu(
            format!("PCIe links are narrow. {}.", named(&narrow)),
            "reseat the card or its riser, or exclude the node",
            false,
        )
    },
};

#[cfg(test)]
mod tests {
    use super::*;
    use switchyard_worker_contract::gpu::{PcieWidth, Slowed};

    fn report() -> GpuReport {
        GpuReport { rank: 3, bus: "0000:17:00.0".into(), seconds: 100.0, ..GpuReport::default() }
    }

    fn check(rule: &Rule, gpus: &[GpuReport]) -> Finding {
        (rule.check)(&Facts { gpus: gpus.to_vec(), on_gpu: Some(true), ..Facts::default() })
    }

    fn advice(finding: Finding) -> Advice {
        match finding {
            Finding::Advice(advice) => advice,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn without_reports_there_is_no_finding() {
        for rule in [ERRORS, CLOCKS, LINK] {
            assert_eq!(check(&rule, &[]), Finding::Unknown(WHERE));
            assert_eq!((rule.check)(&Facts { on_gpu: Some(false), ..Facts::default() }), Finding::NotApplicable);
            assert!(matches!(check(&rule, &[report()]), Finding::Fine(_)));
        }
    }

    #[test]
    fn errors_come_before_speed() {
        let found = advice(check(&ERRORS, &[report(), GpuReport { rank: 4, xids: vec![31], ..report() }]));
        assert!(found.urgent);
        let expected = "The driver reported errors. GPU 0000:17:00.0 of rank 4: XID 31 (GPU memory page fault).";
        assert_eq!(found.evidence, expected);
        let many: Vec<GpuReport> = (0..9).map(|rank| GpuReport { rank, is_lost: true, ..report() }).collect();
        assert!(advice(check(&ERRORS, &many)).evidence.ends_with("; 5 more."));
    }

    #[test]
    fn the_power_limit_is_a_note_and_heat_is_advice() {
        let slowed =
            |by, seconds| GpuReport { slowed: vec![Slowed { by, seconds }], highest_celsius: Some(91), ..report() };
        let note = Finding::Note(
            "clocks were lowered. GPU 0000:17:00.0 of rank 3: by its power limit for 40 % of the time".into(),
            Chart::Placement,
        );
        assert_eq!(check(&CLOCKS, &[slowed(SlowedBy::Power, 40.0)]), note);
        assert!(matches!(check(&CLOCKS, &[slowed(SlowedBy::Power, 9.9)]), Finding::Fine(_)));
        let short = GpuReport { seconds: 9.0, ..slowed(SlowedBy::Temperature, 9.0) };
        assert!(matches!(check(&CLOCKS, &[short]), Finding::Fine(_)));
        let hot = advice(check(&CLOCKS, &[slowed(SlowedBy::Temperature, 25.0), slowed(SlowedBy::Power, 90.0)]));
        let expected =
            "Clocks were lowered. GPU 0000:17:00.0 of rank 3: by temperature for 25 % of the time (up to 91 °C).";
        assert_eq!((hot.evidence.as_str(), hot.urgent), (expected, false));
    }

    #[test]
    fn a_narrow_link_is_named() {
        let narrow = GpuReport { pcie: Some(PcieWidth { lanes: 4, most: 16 }), ..report() };
        let expected = "PCIe links are narrow. GPU 0000:17:00.0 of rank 3: 4 of 16 lanes.";
        assert_eq!(advice(check(&LINK, &[narrow])).evidence, expected);
    }
}
