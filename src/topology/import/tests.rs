#![allow(clippy::unwrap_used)]

use super::*;
use crate::matrix::parse;
use switchyard_core::placement::gpus::Shape;
use switchyard_crds::gpu_topology::{FactSource, Facts, SourceState};

/// Matrices of real machines that their owners published; `tests/fixtures/topo/README.md` lists the
/// sources.
pub(super) const FIXTURES: [(&str, &str); 14] = [
    ("F1", include_str!("../../../tests/fixtures/topo/f01-dgx-1v.txt")),
    ("F2", include_str!("../../../tests/fixtures/topo/f02-dgx-a100.txt")),
    ("F3", include_str!("../../../tests/fixtures/topo/f03-h100.txt")),
    ("F3b", include_str!("../../../tests/fixtures/topo/f03b-hgx-h100.txt")),
    ("F4", include_str!("../../../tests/fixtures/topo/f04-h200.txt")),
    ("F4 in a VM", include_str!("../../../tests/fixtures/topo/f04-h200-vm.txt")),
    ("F6", include_str!("../../../tests/fixtures/topo/f06-gb200.txt")),
    ("F6b", include_str!("../../../tests/fixtures/topo/f06b-gb300.txt")),
    ("F7", include_str!("../../../tests/fixtures/topo/f07-l40s.txt")),
    ("F8", include_str!("../../../tests/fixtures/topo/f08-a30.txt")),
    ("F9", include_str!("../../../tests/fixtures/topo/f09-pcie-8.txt")),
    ("F10", include_str!("../../../tests/fixtures/topo/f10-b200.txt")),
    ("F12", include_str!("../../../tests/fixtures/topo/f12-dgx-2.txt")),
    ("F15", include_str!("../../../tests/fixtures/topo/f15-nps4.txt")),
];

pub(super) fn options() -> Options {
    Options { name: "box".to_owned(), ..Options::default() }
}

pub(super) fn imported(text: &str, options: &Options) -> Imported {
    import(&parse(text).unwrap(), options).unwrap()
}

fn status(text: &str, options: &Options) -> GPUTopologyStatus {
    imported(text, options).topology.status.unwrap()
}

fn fixture(name: &str) -> &'static str {
    FIXTURES.iter().find(|(known, _)| *known == name).unwrap().1
}

fn word(class: Reported) -> &'static str {
    match class {
        Reported::Internal | Reported::PIX => "PIX",
        Reported::PXB => "PXB",
        Reported::PHB => "PHB",
        Reported::NODE => "NODE",
        Reported::SYS => "SYS",
    }
}

/// The classes of a matrix as the result shows them: links between GPUs, otherwise paths and NUMA
/// nodes.
pub(super) fn words(status: &GPUTopologyStatus) -> Vec<Vec<String>> {
    let gpus = status.gpus.iter().map(|gpu| (&gpu.pcie_path, gpu.numa_node, Some(&gpu.uuid)));
    let nics = status.nics.iter().map(|nic| (&nic.pcie_path, nic.numa_node, None));
    let devices: Vec<_> = gpus.chain(nics).collect();
    let word = |a: usize, b: usize| {
        let ((path_a, numa_a, uuid_a), (path_b, numa_b, uuid_b)) = (devices[a.min(b)], devices[a.max(b)]);
        let link = status.links.iter().find(|link| Some(&link.a) == uuid_a && Some(&link.b) == uuid_b);
        match link {
            Some(Link { count: Some(count), .. }) => format!("NV{count}"),
            Some(Link { path_class: Some(class), .. }) => self::word(*class).to_owned(),
            _ => path_class(path_a, path_b, numa_a, numa_b).word().to_owned(),
        }
    };
    (0..devices.len()).map(|a| (0..devices.len()).map(|b| word(a, b)).collect()).collect()
}

/// Splits a text into rows (label, cells, rest) independently of the parser.
fn rows(text: &str) -> Vec<Vec<&str>> {
    let mut rows: Vec<Vec<&str>> = Vec::new();
    let cells = ["X", "PIX", "PXB", "PHB", "NODE", "SYS"];
    let is_cell = |word: &str| cells.contains(&word) || word.starts_with("NV");
    for line in text.lines().take_while(|line| !line.starts_with("Legend")) {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            [label, first, ..] if is_cell(first) && !is_cell(label) => rows.push(words),
            // The second half of a row.
            [first, ..] if is_cell(first) => rows.last_mut().unwrap().extend(words),
            _ => {}
        }
    }
    rows
}

#[test]
fn every_fixture_round_trips() {
    for (name, text) in FIXTURES {
        let status = status(text, &options());
        let printed = words(&status);
        let rows = rows(text);
        assert!(rows.len() >= status.gpus.len(), "{name}");
        for (row, words) in rows.iter().zip(&printed) {
            let expected: Vec<&str> = row.iter().skip(1).take(words.len()).copied().collect();
            assert_eq!(*words, expected, "{name}, row {}", row[0]);
        }
        // The text after the cells of GPUs.
        for (row, gpu) in rows.iter().zip(&status.gpus) {
            assert_eq!(row[0], format!("GPU{}", gpu.index), "{name}");
            let beside = &row[1 + printed.len()..];
            if let Some(list) = beside.get(1) {
                let id = list.split([',', '-']).next().unwrap().parse::<u32>().unwrap();
                assert_eq!(gpu.numa_node, Some(id), "{name}, row {}", row[0]);
                let node = status.numa_nodes.iter().find(|node| node.id == id).unwrap();
                assert_eq!(node.cpus.as_deref(), Some(beside[0]), "{name}, row {}", row[0]);
            }
        }
    }
}

#[test]
fn only_inexact_fixtures_warn() {
    for (name, text) in FIXTURES {
        let warnings = imported(text, &options()).warnings;
        let expected: &[&str] = match name {
            "F12" => &["the matrix has no NUMA affinity, so NUMA nodes are numbered by the CPUs of the GPUs"],
            "F15" => {
                &["SYS inside one NUMA node stays SYS in links, and reads as NODE from the NUMA nodes: GPU0-GPU1; \
                        GPU0-GPU2; GPU1-GPU2; and 3 more"]
            }
            _ => &[],
        };
        assert_eq!(warnings, expected, "{name}");
    }
}

#[test]
fn nvlink_hides_only_what_it_must() {
    let class = |name: &str, a: usize, b: usize| {
        let status = status(fixture(name), &options());
        let (a, b) = (&status.gpus[a], &status.gpus[b]);
        path_class(&a.pcie_path, &b.pcie_path, a.numa_node, b.numa_node).word()
    };
    // The NICs prove it: PIX to the same one; PXB and PIX to the same one; below different
    // switches.
    assert_eq!(class("F1", 2, 3), "PIX");
    assert_eq!(class("F4", 0, 1), "PXB");
    assert_eq!(class("F8", 2, 3), "PXB");
    assert_eq!(class("F2", 0, 1), "PXB");
    // Derived from NUMA nodes only.
    assert_eq!(class("F8", 0, 1), "NODE");
    assert_eq!(class("F2", 0, 2), "SYS");
    assert_eq!(class("F6", 0, 1), "NODE");
}

#[test]
fn known_models_give_nvlinks_a_route_and_a_speed() {
    let link = |name: &str, model: Option<&str>| {
        let options = Options { gpu_model: model.map(str::to_owned), ..options() };
        let link = status(fixture(name), &options).links.first().cloned().unwrap();
        (link.count, link.via, link.megabytes_per_second)
    };
    assert_eq!(link("F3", Some("NVIDIA H100 80GB HBM3")), (Some(18), Some(LinkVia::Switch), Some(478_116)));
    assert_eq!(link("F3", None), (Some(18), Some(LinkVia::Switch), None));
    // 1 + 1 + 2 + 2 are the six links of a V100: a mesh.
    assert_eq!(link("F1", Some("v100")), (Some(1), Some(LinkVia::Direct), Some(25_781)));
    assert_eq!(link("F1", None), (Some(1), Some(LinkVia::Direct), None));
    assert_eq!(link("F8", Some("A30")), (Some(4), Some(LinkVia::Direct), Some(100_000)));
    assert_eq!(link("F12", Some("V100")), (Some(6), Some(LinkVia::Switch), Some(154_686)));
    assert_eq!(link("F9", Some("L40S")), (None, None, None));
}

#[test]
fn unknown_or_contradictory_models_warn() {
    let warnings = |name: &str, model: &str| {
        let options = Options { gpu_model: Some(model.to_owned()), ..options() };
        let imported = imported(fixture(name), &options);
        let status = imported.topology.status.unwrap();
        assert!(status.links.iter().all(|link| link.megabytes_per_second.is_none()), "{model}");
        assert_eq!(status.gpus[0].model.as_deref(), Some(model));
        imported.warnings
    };
    assert_eq!(warnings("F3", "X9000"), ["GPU model X9000 is unknown, and so is the speed of its NVLinks"]);
    assert_eq!(warnings("F3", "A100"), ["the matrix has NV18 and A100 has 12 NVLinks: speed left unknown"]);
    assert_eq!(warnings("F8", "L40S"), ["the matrix has NV4 and L40S has 0 NVLinks: speed left unknown"]);
}

#[test]
fn nics_take_names_from_the_legend_and_rates_from_the_options() {
    let rate = |nic: Option<&str>, gbps: u64| NicRate { nic: nic.map(str::to_owned), megabits_per_second: gbps * 1000 };
    let rates = vec![rate(None, 400), rate(Some("mlx5_10"), 25), rate(Some("NIC4"), 100)];
    let matrix = parse(fixture("F10")).unwrap();
    let status = import(&matrix, &Options { rates, ..options() }).unwrap().topology.status.unwrap();
    let nics: Vec<(&str, Option<&str>, Option<u64>)> = status
        .nics
        .iter()
        .map(|nic| (nic.name.as_str(), nic.rdma_device.as_deref(), nic.rate_megabits_per_second))
        .collect();
    assert_eq!(nics[0], ("mlx5_0", Some("mlx5_0"), Some(400_000)));
    assert_eq!(nics[2], ("mlx5_10", Some("mlx5_10"), Some(25_000)));
    assert_eq!(nics[4], ("mlx5_2", Some("mlx5_2"), Some(100_000)));
    assert!(status.nics.iter().all(|nic| nic.link_layer.is_none() && nic.state.is_none()));

    let unnamed = &self::status(fixture("F9"), &options()).nics[0];
    assert_eq!((unnamed.name.as_str(), &unnamed.rdma_device, unnamed.rate_megabits_per_second), ("NIC0", &None, None));
    let error = import(&matrix, &Options { rates: vec![rate(Some("eth0"), 1)], ..options() }).unwrap_err();
    assert!(error.to_string().starts_with("got a rate for eth0; expected one of the NICs of the matrix: mlx5_0, "));
}

#[test]
fn numa_cpus_require_agreement_of_all_rows() {
    let text = |cpus: [&str; 3]| {
        format!(
            "GPU0 GPU1 GPU2 CPU Affinity NUMA Affinity\nGPU0 X NODE SYS {} 0\nGPU1 NODE X SYS {} 0\nGPU2 SYS SYS X {} 1",
            cpus[0], cpus[1], cpus[2]
        )
    };
    let cpus = |list: [&str; 3]| {
        let status = status(&text(list), &options());
        let nodes: Vec<Option<String>> = status.numa_nodes.into_iter().map(|node| node.cpus).collect();
        (nodes, status.cpus.and_then(|cpus| cpus.usable))
    };
    let some = |list: &str| Some(list.to_owned());
    assert_eq!(cpus(["0-3", "0-3", "4-7"]), (vec![some("0-3"), some("4-7")], some("0-7")));
    assert_eq!(cpus(["0-3", "0-1", "4-7"]), (vec![None, some("4-7")], some("0-7")));
    assert_eq!(cpus(["0-7", "0-7", "4-7"]), (vec![None, None], some("0-7")), "a CPU is in one node only");
    assert_eq!(cpus(["N/A", "N/A", "N/A"]), (vec![None, None], None));
}

#[test]
fn inconsistent_classes_become_farther_and_warn() {
    let text = "GPU0 GPU1 NIC0 CPU Affinity NUMA Affinity
                GPU0 X NODE PIX 0-3 0
                GPU1 NODE X PIX 0-3 0
                NIC0 PIX PIX X";
    let imported = imported(text, &options());
    assert_eq!(
        imported.warnings,
        [
            "no PCIe tree has all of these classes, so contradictory ones are treated as farther: GPU1-NIC0 PIX as NODE, since \
          GPU0 is NODE to GPU1 and PIX to NIC0"
        ]
    );
    let status = imported.topology.status.unwrap();
    assert_eq!(words(&status), [["X", "NODE", "PIX"], ["NODE", "X", "NODE"], ["PIX", "NODE", "X"]]);
    let nics = status.source(Facts::NICs).unwrap();
    assert_eq!(nics.state, SourceState::Partial);
    assert!(nics.message.as_ref().unwrap().contains("GPU1-NIC0 PIX as NODE"));
}

#[test]
fn contradictory_numa_nodes_make_a_class_farther() {
    let text = "GPU0 GPU1 CPU Affinity NUMA Affinity\nGPU0 X NODE 0-3 0\nGPU1 NODE X 4-7 1";
    let imported = imported(text, &options());
    assert_eq!(imported.warnings, ["NODE between different NUMA nodes is taken as SYS: GPU0-GPU1"]);
    assert_eq!(words(&imported.topology.status.unwrap())[0][1], "SYS");
    // Without NUMA numbers there is no contradiction.
    let imported = self::imported("GPU0 GPU1 CPU Affinity\nGPU0 X NODE N/A\nGPU1 NODE X N/A", &options());
    assert_eq!((imported.warnings.len(), words(&imported.topology.status.unwrap())[0][1].as_str()), (0, "NODE"));
}

#[test]
fn the_same_text_gives_the_same_bytes() {
    for (_, text) in FIXTURES {
        let json = || serde_json::to_string(&imported(text, &options()).topology).unwrap();
        assert_eq!(json(), json());
    }
}

#[test]
fn full_result() {
    let text = "GPU0 GPU1 NIC0 CPU Affinity NUMA Affinity
                GPU0 X NV12 PXB 0-3 0
                GPU1 NV12 X PIX 0-3 0
                NIC Legend:
                NIC0: mlx5_0";
    let options = Options { gpu_model: Some("a100".to_owned()), ..options() };
    insta::assert_yaml_snapshot!(imported(text, &options).topology);
}

/// The matrix of a user.
fn field(name: &str) -> String {
    let path = format!("{}/../../tests/fixtures/field/{name}.txt", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(path).unwrap()
}

fn imported_from_the_field(name: &str) -> Imported {
    let matrix = parse(&field(name)).unwrap_or_else(|faults| panic!("{name}: {faults}"));
    import(&matrix, &Options { name: "n".into(), ..Options::default() }).unwrap()
}

#[test]
fn a_blank_cpu_list_leaves_the_numa_node_where_it_is() {
    let status = imported_from_the_field("topo-blank-cpu-cell").topology.status.unwrap();
    assert_eq!(status.gpus.iter().map(|gpu| gpu.numa_node).collect::<Vec<_>>(), [Some(0), Some(1)]);
    let cpus: Vec<_> = status.numa_nodes.iter().map(|node| (node.id, node.cpus.as_deref())).collect();
    assert_eq!(cpus, [(0, Some("0-35")), (1, None)]);
}

#[test]
fn numa_nodes_follow_from_the_cpus_of_old_drivers() {
    let imported = imported_from_the_field("topo-cpu-affinity-without-numa-column");
    let status = imported.topology.status.unwrap();
    assert_eq!(status.gpus.iter().map(|gpu| gpu.numa_node).collect::<Vec<_>>(), [Some(0), Some(0), Some(1), Some(1)]);
    let cpus: Vec<_> = status.numa_nodes.iter().filter_map(|node| node.cpus.as_deref()).collect();
    assert_eq!(cpus, ["0,8,16,24", "32,40,48,56"]);
    assert!(imported.warnings.iter().any(|line| line.contains("numbered by the CPUs")), "{:?}", imported.warnings);
}

#[test]
fn other_text_around_a_matrix_does_not_hide_it() {
    for (name, devices) in [
        ("topo-glued-header", 4),
        ("topo-section-after-matrix", 3),
        ("topo-p2p-after-matrix", 2),
        ("pass-topo-ansi-six", 0),
        ("pass-topo-dgx1-soc", 0),
        ("pass-topo-four-sncs", 0),
        ("topo-glued-cells", 8),
        ("topo-glued-numa", 8),
        ("pass-topo-virtual-phb-only", 8),
        ("pass-topo-indented-with-p2p", 2),
    ] {
        let matrix = parse(&field(name)).unwrap_or_else(|faults| panic!("{name}: {faults}"));
        assert!(devices == 0 || matrix.devices() == devices, "{name}: {} devices", matrix.devices());
    }
    let glued = parse(&field("topo-glued-header")).unwrap();
    assert_eq!(glued.gpus[1].cpus.as_ref().map(ToString::to_string).as_deref(), Some("28-55"));
    for (name, words) in [("topo-p2p-alone", "nvidia-smi topo -p2p"), ("topo-rocm-smi", "about AMD GPUs")] {
        let faults = parse(&field(name)).unwrap_err().to_string();
        assert!(faults.contains(words) && faults.lines().count() == 1, "{faults}");
    }
}

#[test]
fn cells_and_columns_without_a_space_between_are_separate() {
    let matrix = parse(&field("topo-glued-cells")).unwrap();
    let labels: Vec<&str> = matrix.nics.iter().map(|nic| nic.label.as_str()).collect();
    assert_eq!(labels, ["NIC0", "NIC1", "NIC2", "NIC3"]);
    let near = |gpu: usize| (4..8).filter(|nic| matrix.class(gpu, *nic) == Some(PathClass::Pix)).collect::<Vec<_>>();
    assert_eq!([0, 1, 2, 3].map(near), [vec![4], vec![5, 6], vec![], vec![7]]);
}

/// Regression: the NUMA node became the last digit of a CPU list, and the node was unknown.
#[test]
fn a_numa_node_is_separate_from_the_cpus_before_it() {
    let text = field("topo-glued-numa");
    let matrix = parse(&text).unwrap();
    let gpu = |gpu: &crate::matrix::Gpu| [&gpu.cpus, &gpu.numa].map(|list| list.as_ref().unwrap().to_string());
    let expected = [["0-55,112-167", "0"], ["0-55,112-167", "0"], ["56-111,168-223", "1"], ["56-111,168-223", "1"]];
    assert_eq!(matrix.gpus.iter().map(gpu).collect::<Vec<_>>(), expected);
    // 0-11 and node 1, or 0-1 and node 11.
    let faults = parse(&text.replace("56-111,168-2231", "0-111")).unwrap_err().to_string();
    assert!(faults.contains("row GPU2, column CPU Affinity: got 0-111; expected a space"), "{faults}");
}

#[test]
fn a_matrix_without_nvlinks_is_not_taken_for_a_machine_without() {
    let imported = imported_from_the_field("topo-mp-without-nvlinks");
    assert!(imported.warnings.iter().any(|line| line.contains("topo -mp")), "{:?}", imported.warnings);
    let sources = imported.topology.status.unwrap().sources;
    let links = sources.iter().find(|source| source.facts == Facts::Links).unwrap();
    assert!(links.message.as_ref().is_some_and(|message| message.contains("topo -mp")), "{links:?}");
}

#[test]
fn unknown_numa_nodes_and_those_of_gpu_memory_are_not_nodes_of_gpus() {
    let nodes = |name: &str| {
        let status = imported_from_the_field(name).topology.status.unwrap();
        status.gpus.iter().map(|gpu| gpu.numa_node).collect::<Vec<_>>()
    };
    assert_eq!(nodes("pass-topo-no-cpus-no-numa"), [None, None]);
    assert_eq!(nodes("pass-topo-gb200-memory-nodes"), [Some(0), Some(0), Some(1), Some(1)]);
}

/// Where rates tie because models and NICs are unknown, the nearer set wins.
#[test]
fn ties_go_to_the_nearest_gpus_and_nics() {
    let best = |name: &str, gpus: u8| {
        let status = imported_from_the_field(name).topology.status.unwrap();
        let shape = Shape::new(&crate::report::devices(&status).unwrap().devices);
        let set = shape.best_set(shape.all(), gpus, None).unwrap();
        (0..shape.gpus).filter(|gpu| set & 1 << gpu != 0).collect::<Vec<_>>()
    };
    assert_eq!(best("topo-best-crosses-sockets", 2), [1, 2]);
    assert_eq!(best("topo-best-crosses-sockets", 4), [1, 2, 3, 4]);
    assert_eq!(best("topo-best-ignores-near-nic", 1), [2]);
    assert_eq!(best("topo-best-ignores-near-nic", 2), [2, 3]);
    assert_eq!(best("pass-topo-tabs-phb-nic", 1), [2]);
    let sources = imported_from_the_field("topo-best-ignores-near-nic").topology.status.unwrap().sources;
    let says =
        |source: &FactSource| source.message.as_ref().is_some_and(|line| line.contains("assumed to be 10 Gbit/s"));
    assert!(sources.iter().any(says), "{sources:#?}");
}
