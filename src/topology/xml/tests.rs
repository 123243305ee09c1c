#![allow(clippy::unwrap_used)]

use super::*;
use crate::import::{self, NicRate, Options};
use crate::nccl::NcclPaths;
use crate::{matrix, report};
use switchyard_crds::gpu_topology::{Cpus, GPUTopologyStatus, Gpu, LinkKind, Nic, NumaNode, PcieLink};

#[cfg(test)]
mod properties;

/// The files of tests/fixtures/topo-xml.
pub(super) const FILES: [(&str, &str); 6] = [
    ("passthrough", include_str!("../../../tests/fixtures/topo-xml/passthrough.xml")),
    ("flat", include_str!("../../../tests/fixtures/topo-xml/flat.xml")),
    ("dump", include_str!("../../../tests/fixtures/topo-xml/dump.xml")),
    ("bare", include_str!("../../../tests/fixtures/topo-xml/bare.xml")),
    ("domain", include_str!("../../../tests/fixtures/topo-xml/domain.xml")),
    ("web", include_str!("../../../tests/fixtures/topo-xml/web.xml")),
];

/// Matrices of tests/fixtures/topo, each with a GPU model.
const MACHINES: [(&str, &str, &str); 14] = [
    ("F1", "V100", include_str!("../../../tests/fixtures/topo/f01-dgx-1v.txt")),
    ("F2", "A100", include_str!("../../../tests/fixtures/topo/f02-dgx-a100.txt")),
    ("F3", "H100", include_str!("../../../tests/fixtures/topo/f03-h100.txt")),
    ("F3b", "H100", include_str!("../../../tests/fixtures/topo/f03b-hgx-h100.txt")),
    ("F4", "H200", include_str!("../../../tests/fixtures/topo/f04-h200.txt")),
    ("F4 in a VM", "H200", include_str!("../../../tests/fixtures/topo/f04-h200-vm.txt")),
    ("F6", "GB200", include_str!("../../../tests/fixtures/topo/f06-gb200.txt")),
    ("F6b", "GB300", include_str!("../../../tests/fixtures/topo/f06b-gb300.txt")),
    ("F7", "L40S", include_str!("../../../tests/fixtures/topo/f07-l40s.txt")),
    ("F8", "A30", include_str!("../../../tests/fixtures/topo/f08-a30.txt")),
    ("F9", "L40S", include_str!("../../../tests/fixtures/topo/f09-pcie-8.txt")),
    ("F10", "B200", include_str!("../../../tests/fixtures/topo/f10-b200.txt")),
    ("F12", "V100", include_str!("../../../tests/fixtures/topo/f12-dgx-2.txt")),
    ("F15", "L40S", include_str!("../../../tests/fixtures/topo/f15-nps4.txt")),
];

fn file(name: &str) -> &'static str {
    FILES.iter().find(|(known, _)| *known == name).unwrap().1
}

fn machine_of(name: &str) -> NcclGraph {
    NcclGraph::read(&parse(file(name)).document, None)
}

fn imported(text: &str, gpu_model: &str) -> GPUTopologyStatus {
    let rates = vec![NicRate { nic: None, megabits_per_second: 400_000 }];
    let options = Options { name: "box".into(), gpu_model: Some(gpu_model.into()), rates };
    import::import(&matrix::parse(text).unwrap(), &options).unwrap().topology.status.unwrap()
}

/// All findings in a text, one per line.
fn found(text: &str, status: Option<&GPUTopologyStatus>) -> Vec<String> {
    let parsed = parse(text);
    let mut findings = check(&parsed);
    findings.extend(status.map_or(Findings::default(), |status| check_against(&parsed.document, status)));
    let line = |finding: Finding| {
        let lines = finding.lines.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        format!("{lines} {} {}: {} -> {}", finding.rule.severity.word(), finding.rule.name, finding.got, finding.fix)
    };
    findings.into_sorted().into_iter().map(line).collect()
}

/// Wraps a text in the usual tags.
fn framed(inner: &str) -> String {
    format!("<system version=\"1\">\n<cpu numaid=\"0\" arch=\"arm64\">\n{inner}\n</cpu>\n</system>\n")
}

#[test]
fn published_files() {
    let all: Vec<String> =
        FILES.iter().map(|(name, text)| format!("{name}\n  {}", found(text, None).join("\n  "))).collect();
    insta::assert_snapshot!(all.join("\n"));
}

#[test]
fn syntax_errors_that_stop_nccl() {
    for (inner, got) in [
        ("\t<pci busid=\"0000:01:00.0\"/>", "a tab between tags"),
        ("<pci\tbusid=\"0000:01:00.0\"/>", "a tab or a new line within <pci>"),
        ("<pci\n busid=\"0000:01:00.0\"/>", "a tab or a new line within <pci>"),
        ("<pci busid=0000:01:00.0/>", "busid= of <pci> without quotes"),
        ("<pci busid=\"0000:01:00.0\"class=\"0x03\"/>", "two attributes of <pci> without a space"),
        ("<pci busid=\"0000:01:00.0\"></pci >", "spaces in </pci >"),
        ("<pci busid=\"0000:01:00.0\"/ >", "a space in the end of <pci>"),
        ("<pci busid=\"0000:01:00.0\"></gpu></pci>", "</gpu> without a beginning"),
        ("<pci busid=\"0000:01:00.0\">", "</cpu> before the end of <pci> of line 3"),
        ("hello", "text between tags: `hello`"),
        ("<!DOCTYPE topo>", "a declaration of XML"),
        ("<?php ?>", "a processing instruction"),
        ("<!--a=b-->", "first word has a `=`"),
        ("<!-- no end", "a comment without an end"),
        ("<pci busid=\"0000:01:00.0", "a quote without an end"),
        ("<pci busid=\"0000:01:00.0\"", "<pci without `>`"),
        ("< pci/>", "a tag without a name"),
        ("<pci =\"x\"/>", "a `=` without a name"),
    ] {
        let found = found(&framed(inner), None);
        assert!(found.iter().any(|line| line.contains("error syntax") && line.contains(got)), "{inner}: {found:#?}");
    }
    // XML forbids these but NCCL accepts them: two spaces, a value in single quotes, an ampersand,
    // an attribute without a value.
    let odd = "<pci busid='0000:01:00.0'  class=\"0x030200\" />\n<!--comment--><!-- a > b -->\n<pci busid=\"0000:02:00.0\"></pci>";
    assert_eq!(found(&framed(odd), None), Vec::<String>::new());
    assert_eq!(parse(&framed("<pci busid=\"a&amp;b\"/>")).document.elements[2].get("busid"), Some("a&amp;b"));
}

#[test]
fn limits_match_nccls_tables() {
    let limits = |inner: &str| {
        found(&framed(inner), None).into_iter().filter(|line| line.contains("error limit")).collect::<Vec<_>>()
    };
    let named = |length: usize| format!("<pci busid=\"0000:01:00.0\" class=\"{}\"/>", "0".repeat(length));
    assert!(limits(&named(253)).is_empty());
    assert!(limits(&named(254))[0].contains("254 characters in <pci>"));
    let attributes = |count: usize| {
        let all: Vec<String> = (0..count).map(|number| format!("a{number}=\"1\"")).collect();
        format!("<pci {}/>", all.join(" "))
    };
    assert!(limits(&attributes(16)).is_empty());
    assert!(limits(&attributes(17))[0].contains("17 attributes in <pci>"));
    let devices = |count: usize| "<pci/>".repeat(count);
    // Including <system> and <cpu>.
    assert!(limits(&devices(253)).is_empty());
    assert!(limits(&devices(254))[0].contains("256 tags"));
    assert!(limits(&devices(641)).iter().any(|line| line.contains("641 tags in one <cpu>")));
    assert!(found(&"<a>".repeat(5000), None).iter().any(|line| line.contains("more than 4096 tags")));
}

#[test]
fn one_system_of_version_1() {
    let text = |system: &str| found(&format!("{system}<cpu numaid=\"0\" arch=\"arm64\"></cpu></system>"), None);
    assert!(text("<system version=\"1\">").is_empty());
    assert!(text("<system>")[0].contains("no version"));
    assert!(text("<system version=\"2\">")[0].contains("version=\"2\""));
    assert!(found("<system version=\"1\"/><system version=\"1\"/>", None)[0].contains("2 <system>"));
    assert!(found("<system version=\"1\"/>", None)[0].contains("no <cpu>"));
}

/// A virtual machine with the devices of passthrough.xml.
fn guest() -> GPUTopologyStatus {
    let path = |domain: u32| vec![format!("pci{domain:04x}:00"), format!("{domain:04x}:00:00.0")];
    let bus_id = |domain: u32| Some(format!("{domain:04x}:00:00.0"));
    let numa_node = |number: u32| Some(u32::from(number > 2));
    let gpu = |number: u32| Gpu {
        index: number - 1,
        uuid: format!("GPU-{number}"),
        bus_id: bus_id(number),
        model: Some("NVIDIA H100".into()),
        numa_node: numa_node(number),
        pcie_path: path(number),
        pcie_link: Some(PcieLink { generation: Some(5), width: Some(16), ..PcieLink::default() }),
        ..Gpu::default()
    };
    let nic = |number: u32| Nic {
        name: format!("ib{number}"),
        bus_id: bus_id(0x100 + number),
        rdma_device: Some(format!("mlx5_{}", number - 1)),
        link_layer: Some("InfiniBand".into()),
        rate_megabits_per_second: Some(400_000),
        numa_node: numa_node(number),
        pcie_path: path(0x100 + number),
        ..Nic::default()
    };
    let node = |id: u32, cpus: &str| NumaNode { id, cpus: Some(cpus.into()), ..NumaNode::default() };
    GPUTopologyStatus {
        gpus: (1..=4).map(gpu).collect(),
        nics: (1..=4).map(nic).collect(),
        numa_nodes: vec![node(0, "0-47"), node(1, "48-95")],
        cpus: Some(Cpus {
            architecture: Some("x86_64".into()),
            vendor: Some("GenuineIntel".into()),
            ..Cpus::default()
        }),
        ..GPUTopologyStatus::default()
    }
}

#[test]
fn generated_file() {
    insta::assert_snapshot!(generate(&guest(), Content::Tree).unwrap());
    let mut status = guest();
    status.nics.reverse();
    status.gpus.swap(0, 3);
    assert_eq!(
        generate(&status, Content::Tree),
        generate(&guest(), Content::Tree),
        "the order of a report says nothing"
    );
}

#[test]
fn generated_file_with_devices() {
    let status = imported(MACHINES[1].2, MACHINES[1].1);
    insta::assert_snapshot!(generate(&status, Content::Devices).unwrap());
}

#[test]
fn unusable_reports_are_rejected() {
    let refused = |change: &dyn Fn(&mut GPUTopologyStatus)| {
        let mut status = guest();
        change(&mut status);
        generate(&status, Content::Tree).unwrap_err().to_string()
    };
    assert!(refused(&|status| status.gpus.clear()).contains("expected a machine with GPUs"));
    assert!(refused(&|status| status.gpus[2].pcie_path.clear()).contains("status.gpus[2]: got no pciePath"));
    // A volume management device has a domain of five digits.
    let vmd =
        |status: &mut GPUTopologyStatus| status.gpus[0].pcie_path = vec!["pci10000:00".into(), "10000:01:00.0".into()];
    assert!(refused(&vmd).contains("got \"10000:01:00.0\": expected a bus id"));
    let quote = |status: &mut GPUTopologyStatus| {
        status.nics[0].link_layer = None;
        status.nics[0].pcie_path = vec!["\"><gpu gdr=\"1".into()];
    };
    assert!(refused(&quote).contains("status.nics[0].pciePath"));
}

#[test]
fn nccl_merges_nics_of_one_bus() {
    let mut status = guest();
    for (nic, address) in status.nics.iter_mut().zip(["0101:00:00.0", "0101:00:00.1", "0101:00:02.3", "0104:00:00.0"]) {
        nic.bus_id = Some(address.into());
        nic.pcie_path = vec!["pci0101:00".into(), address.into()];
    }
    let made = generate(&status, Content::Devices).unwrap();
    assert_eq!(made.matches("0x020700").count(), 2, "{made}");
    let ports = NcclGraph::read(&parse(&made).document, None).nics;
    assert_eq!(ports.iter().filter(|port| port.bus_id == "0101:00:00.0").count(), 3);
    let own = framed("<pci busid=\"0101:00:02.3\" class=\"0x020700\"/>");
    assert!(
        found(&own, Some(&status))
            .iter()
            .any(|line| line.contains("merged-nic") && line.contains("busid=\"0101:00:00.0\""))
    );
    // EFA has its own transport, which does not merge NICs.
    status.nics.iter_mut().for_each(|nic| nic.link_layer = Some("Unspecified".into()));
    assert!(!found(&own, Some(&status)).iter().any(|line| line.contains("merged-nic")));
}

#[test]
fn file_against_its_machine() {
    let status = guest();
    assert_eq!(found(file("passthrough"), Some(&status)), Vec::<String>::new());
    let made = generate(&status, Content::Tree).unwrap();
    assert_eq!(found(&made, Some(&status)).len(), 1);
    assert!(found(&made, Some(&status))[0].contains("needless"));
    let crowded = file("passthrough").replace("</system>", &format!("{}</system>", "<cpu numaid=\"7\"/>".repeat(220)));
    assert!(
        found(&crowded, Some(&status)).iter().any(|line| line.contains("error limit") && line.contains("at most 228"))
    );
    let mut other = status;
    other.gpus[0].numa_node = Some(1);
    other.gpus[1].bus_id = Some("0102:00:00.0".into());
    other.nics[1].bus_id = Some("0002:00:00.0".into());
    other.nics[1].link_layer = None;
    other.nics[3].bus_id = Some("0105:00:00.0".into());
    let moved = file("passthrough").replace("ffff:ff:04.0", "0000:17:00.0");
    insta::assert_snapshot!(found(&moved, Some(&other)).join("\n"));
}

#[test]
fn report_supplies_kinds_missing_from_the_file() {
    let mut status = guest();
    let address = ["0000:00:16.0", "0000:00:17.0", "0000:00:1a.0"];
    status.gpus.iter_mut().zip(address).for_each(|(gpu, address)| gpu.bus_id = Some(address.into()));
    status.nics[0].bus_id = Some("0000:00:1b.0".into());
    status.nics[0].link_layer = None;
    let machine = NcclGraph::read(&parse(file("bare")).document, Some(&status));
    assert_eq!((machine.gpus.len(), machine.nics.len(), machine.others.len()), (3, 1, 0));
    assert_eq!(machine_of("bare").others.len(), 4);
}

#[test]
fn differences_as_nccl_sees_them() {
    let changes = diff(&machine_of("flat"), &machine_of("passthrough")).unwrap();
    let lines: Vec<String> = changes.iter().map(|change| format!("{}: {}", change.subject(), change.what())).collect();
    insta::assert_snapshot!(lines.join("\n"));
    assert_eq!(diff(&machine_of("dump"), &machine_of("dump")).unwrap(), vec![]);
}

#[test]
fn paths_of_a_dump() {
    let machine = machine_of("dump");
    let (devices, coherent) = machine.devices().unwrap();
    let ways = NcclPaths::new(&devices, coherent);
    assert_eq!((ways.gpus(0, 1).word(), ways.gpu_rate(0, 1)), ("NVL", Some(18 * 20_600)));
    let nic = |gpu: usize, nic: usize| (machine.nics[nic].name.clone().unwrap(), ways.nic(gpu, nic).word());
    assert_eq!(nic(0, 0), ("mlx5_1".to_string(), "PIX"));
    assert_eq!(nic(0, 1), ("mlx5_0".to_string(), "SYS"));
    assert_eq!((devices.nics[0].rate, devices.socket_rate), (24_000, 22_000));
    assert_eq!(machine_of("domain").devices().unwrap().1, 0b11);
}

#[test]
fn matrices_round_trip() {
    for (name, model, text) in MACHINES {
        let mut status = imported(text, model);
        // NCCL groups devices of unknown NUMA nodes; a report keeps them apart. So each gets the
        // NUMA node of a GPU on its switch.
        status.gpus.iter_mut().for_each(|gpu| gpu.numa_node = gpu.numa_node.or(Some(0)));
        status.links.retain(|link| link.kind == LinkKind::NVLink);
        let gpus = status.gpus.clone();
        for nic in status.nics.iter_mut().filter(|nic| nic.numa_node.is_none()) {
            let near = gpus.iter().find(|gpu| gpu.pcie_path[..2] == nic.pcie_path[..2]);
            nic.numa_node = near.and_then(|gpu| gpu.numa_node).or(Some(0));
        }
        properties::assert_round_trip(name, &status);
        let made = generate(&status, Content::Tree).unwrap();
        let rest: Vec<String> = found(&made, None)
            .into_iter()
            .filter(|line| !line.contains("without arch") && !line.contains("without vendor"))
            .collect();
        assert_eq!(rest, Vec::<String>::new(), "{name}: a matrix does not say what CPUs there are");
    }
}

#[test]
fn the_table_of_rules_in_the_documentation() {
    let page = include_str!("../../../docs/tools.md");
    let (_, text) = page.split_once("## Topology files\n").unwrap();
    for rule in Rule::ALL {
        let row = format!("| `{}` | {} | {} |", rule.name, rule.severity.word(), rule.finds);
        assert!(text.contains(&row), "docs/tools.md: expected the row\n{row}");
    }
    assert_eq!(text.lines().filter(|line| line.starts_with("| `")).count(), Rule::ALL.len());
}

#[test]
fn files_from_the_field() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/field");
    let found = |name: &str| found(&std::fs::read_to_string(format!("{folder}/{name}.txt")).unwrap(), None);
    let graph = found("xml-graph-file");
    assert!(graph.len() == 1 && graph[0].contains("NCCL_GRAPH_FILE"), "{graph:#?}");
    assert_eq!(found("xml-one-cpu-without-arch"), [""; 0]);
    let two = found("xml-two-cpus-without-arch");
    assert!(two.len() == 2 && two.iter().all(|finding| finding.contains("warning unused-cpu")), "{two:#?}");
    for (name, words) in [("xml-hwloc", "a file of hwloc"), ("xml-rccl-xgmi", "a topology file of RCCL")] {
        let other = found(name);
        assert!(other.len() == 1 && other[0].contains(words), "{other:#?}");
    }
    let own = found("xml-nvlink-to-itself");
    assert!(own.iter().any(|finding| finding.contains("<nvlink> from a GPU to itself")), "{own:#?}");
    assert!(own.iter().all(|finding| finding.contains(" warning ")), "{own:#?}");
    assert_eq!(found("pass-xml-comments-after-devices"), [""; 0]);
}
