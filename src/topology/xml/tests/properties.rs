//! Properties that hold for every text and every machine.

use super::*;
use proptest::prelude::*;
use switchyard_core::devices::Devices;
use switchyard_crds::gpu_topology::{Link, LinkVia};

/// Runs everything that accepts a text.
fn exercise(text: &str) {
    let parsed = parse(text);
    for (position, element) in parsed.document.elements.iter().enumerate() {
        assert!(element.children.iter().all(|child| *child > position), "a tag comes before what is in it");
        assert!(element.line >= 1 && element.line as usize <= text.lines().count().max(1) + 1);
    }
    let status = guest();
    let machine = NcclGraph::read(&parsed.document, Some(&status));
    let _ = (check(&parsed), check_against(&parsed.document, &status));
    if let Ok(changes) = diff(&machine, &machine_of("passthrough")) {
        changes.iter().for_each(|change| drop((change.subject(), change.what())));
    }
}

/// Classes of all pairs, GPUs then NICs, row by row.
fn class_names(ways: NcclPaths<'_>, devices: &Devices, gpus: &[usize], nics: &[usize]) -> Vec<&'static str> {
    assert_eq!(gpus.len(), devices.gpus.len());
    let row = |gpu: usize| {
        let others = gpus.iter().map(move |other| ways.gpus(gpu, *other).word());
        others.chain(nics.iter().map(move |nic| ways.nic(gpu, *nic).word()))
    };
    gpus.iter().flat_map(|gpu| row(*gpu)).collect()
}

/// A file generated from a report and read back has the paths of the report.
pub(super) fn assert_round_trip(name: &str, status: &GPUTopologyStatus) {
    let text = generate(status, Content::Devices).unwrap();
    let machine = NcclGraph::read(&parse(&text).document, None);
    let named = report::devices(status).unwrap();
    let (devices, coherent) = machine.devices().unwrap();
    let gpu = |gpu: &Gpu| machine.gpus.iter().position(|own| Some(&own.bus_id) == gpu.bus_id.as_ref()).unwrap();
    let nic = |nic: &usize| {
        let name = status.nics[*nic].rdma_device.as_deref().unwrap_or(&status.nics[*nic].name);
        machine.nics.iter().position(|own| own.name.as_deref() == Some(name)).unwrap()
    };
    let own: (Vec<usize>, Vec<usize>) = (status.gpus.iter().map(gpu).collect(), named.nics.iter().map(nic).collect());
    let all: (Vec<usize>, Vec<usize>) = ((0..status.gpus.len()).collect(), (0..named.nics.len()).collect());
    assert_eq!(
        class_names(NcclPaths::new(&devices, coherent), &devices, &own.0, &own.1),
        class_names(NcclPaths::from_report(status, &named.devices), &named.devices, &all.0, &all.1),
        "{name}\n{text}"
    );
}

/// A device: NUMA node, root complex, root port, switch.
type Spot = (u32, u32, u32, u32);

prop_compose! {
    /// A machine whose devices are on switches: one switch per root port, or several below a common
    /// one. With `nvlinks`, there are links from GPU to GPU or to switches.
    fn machine()(
        gpus in 1usize..9,
        spots in proptest::collection::vec((0u32..2, 0u32..2, 0u32..2, 0u32..2), 1..17),
        cascaded in any::<bool>(),
        flat in any::<bool>(),
        nvlinks in proptest::collection::vec(0u32..3, 64),
        switched in any::<bool>(),
        generation in 3u32..6,
        model in proptest::sample::select(vec!["V100", "A100", "H100", "GB200", "L40S"]),
    ) -> GPUTopologyStatus {
        let spots: Vec<Spot> = spots;
        let path = |device: usize, spot: Spot| -> Vec<String> {
            let (numa, root, port, switch) = spot;
            let domain = numa * 2 + root;
            let own = format!("{domain:04x}:{:02x}:00.0", 0x80 + device);
            let mut path = vec![format!("pci{domain:04x}:00"), format!("{domain:04x}:00:{:02x}.0", 1 + port)];
            if flat {
                path[1] = format!("{domain:04x}:00:{:02x}.0", 8 + device);
            } else {
                let bus = 1 + port * 0x20;
                path.push(format!("{domain:04x}:{bus:02x}:00.0"));
                if cascaded {
                    path.push(format!("{domain:04x}:{:02x}:{switch:02x}.0", bus + 1));
                    path.push(format!("{domain:04x}:{:02x}:00.0", bus + 2 + switch * 2));
                }
                path.push(format!("{domain:04x}:{:02x}:{device:02x}.0", bus + 3 + switch * 2));
                path.push(own);
            }
            path
        };
        let gpu = |(device, spot): (usize, &Spot)| {
            let pcie_path = path(device, *spot);
            let pcie_link = Some(PcieLink { generation: Some(generation), width: Some(16), ..PcieLink::default() });
            Gpu {
                index: u32::try_from(device).unwrap(),
                uuid: format!("GPU-{device}"),
                bus_id: pcie_path.last().cloned(),
                model: Some(model.into()),
                numa_node: Some(spot.0),
                pcie_path,
                pcie_link,
                ..Gpu::default()
            }
        };
        let nic = |(device, spot): (usize, &Spot)| {
            let pcie_path = path(device, *spot);
            Nic {
                name: format!("eth{device}"),
                // As with EFA, for which NCCL merges no ports.
                rdma_device: Some(format!("rdmap{device}s0")),
                bus_id: pcie_path.last().cloned(),
                rate_megabits_per_second: Some(100_000),
                numa_node: Some(spot.0),
                pcie_path,
                ..Nic::default()
            }
        };
        let count = gpus.min(spots.len());
        let pairs = (0..count).flat_map(|a| (a + 1..count).map(move |b| (a, b)));
        let link = |(a, b): (usize, usize)| {
            let links = if switched { 12 } else { nvlinks[a * 8 + b] };
            (links > 0 && model != "L40S").then(|| Link {
                a: format!("GPU-{a}"),
                b: format!("GPU-{b}"),
                kind: LinkKind::NVLink,
                count: Some(links),
                via: Some(if switched { LinkVia::Switch } else { LinkVia::Direct }),
                megabytes_per_second: None,
                path_class: None,
            })
        };
        GPUTopologyStatus {
            gpus: spots.iter().enumerate().take(count).map(gpu).collect(),
            nics: spots.iter().enumerate().skip(count).map(nic).collect(),
            links: pairs.filter_map(link).collect(),
            ..GPUTopologyStatus::default()
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn every_machine_round_trips(status in machine()) {
        assert_round_trip("a random machine", &status);
        let tree = generate(&status, Content::Tree).unwrap();
        let errors: Vec<String> = found(&tree, Some(&status)).into_iter().filter(|line| !line.contains("without") && line.contains(" error ")).collect();
        prop_assert_eq!(errors, Vec::<String>::new(), "{}", tree);
    }

    #[test]
    fn no_text_panics(text in "[<>/=\"' \t\na-c!?-]{0,200}", any_text in "\\PC{0,200}") {
        exercise(&text);
        exercise(&any_text);
    }

    #[test]
    fn no_edit_of_a_file_panics(
        (which, cuts) in (0..FILES.len(), proptest::collection::vec((any::<prop::sample::Index>(), 0usize..30, "[<>/=\"\t a-z0-9]{0,8}"), 1..6)),
    ) {
        let mut text = FILES[which].1.to_string();
        for (at, length, with) in cuts {
            let start = at.index(text.len() + 1).min(text.len());
            let end = (start + length).min(text.len());
            text.replace_range(start..end, &with);
        }
        exercise(&text);
    }
}

#[test]
fn nesting_deeper_than_the_stack() {
    exercise(&"<pci>".repeat(60_000));
    exercise(&format!("<system version=\"1\"><cpu>{}", "<pci busid=\"0000:01:00.0\">".repeat(4000)));
}
