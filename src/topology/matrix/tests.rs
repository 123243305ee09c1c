#![allow(clippy::unwrap_used)]

use super::*;

const SMALL: &str = "\
        GPU0  GPU1  NIC0  CPU Affinity  NUMA Affinity  GPU NUMA ID
GPU0     X    NV4   PXB   0-3,8-11      0              N/A
GPU1    NV4    X    PIX   0-3,8-11      0              N/A
NIC0    PXB   PIX    X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)

NIC Legend:

  NIC0: mlx5_0
";

fn faults(text: &str) -> String {
    parse(text).unwrap_err().to_string()
}

#[test]
fn every_layout_of_a_matrix_parses_equally() {
    let expected = parse(SMALL).unwrap();
    assert_eq!(expected.gpus.len(), 2);
    assert_eq!(expected.nvlinks(0, 1), Some(4));
    assert_eq!(expected.class(0, 2), Some(PathClass::Pxb));
    assert_eq!(expected.gpus[1].cpus.as_ref().unwrap().to_string(), "0-3,8-11");
    assert_eq!(expected.nics, [Nic { label: "NIC0".into(), device: Some("mlx5_0".into()) }]);
    let with = |from: &str, to: &str| SMALL.replace(from, to);
    let forms = [
        ("tabs", SMALL.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join("\t") + "\n").collect()),
        ("Windows", with("\n", "\r\n")),
        ("blank lines between", with("\n", "\n\n")),
        ("prompts", format!("\u{feff}me@box:~$ nvidia-smi topo -m\n{SMALL}me@box:~$ exit\n")),
        ("escapes", with("GPU0  GPU1", "\u{1b}[4mGPU0\u{1b}[0m \u{1b}[4;1mGPU1")),
        ("escapes that lost their first character", with("GPU0  GPU1", "[4mGPU0[0m \u{fffd}[4mGPU1")),
        ("a wrapped row", with("NV4   PXB   0-3", "NV4\n  PXB   0-3")),
        ("a row wrapped before its lists", with("PXB   0-3", "PXB\n   0-3")),
        ("a wrapped header", with("NIC0  CPU", "NIC0\n   CPU")),
        ("a header wrapped inside a title", with("GPU NUMA ID", "GPU NUMA\n ID")),
        ("merged rows", with("N/A\nGPU1", "N/A GPU1")),
        ("rows in another order", {
            let lines: Vec<&str> = SMALL.lines().collect();
            [&[lines[0], lines[3], lines[2], lines[1]], &lines[4..]].concat().join("\n")
        }),
        ("the names of devices as columns and no legend", {
            let end = SMALL.find("Legend").unwrap();
            SMALL[..end].replace("NIC0", "mlx5_0")
        }),
    ];
    for (form, text) in forms {
        let mut matrix = parse(&text).unwrap_or_else(|faults| panic!("{form}: {faults}\n{text}"));
        matrix.nics[0].label = "NIC0".to_owned();
        assert_eq!(matrix, expected, "{form}");
    }
}

#[test]
fn missing_facts_are_unknown() {
    // Without NIC rows, the GPU rows give the distances between GPUs and NICs.
    let matrix = parse("GPU0 NIC0 NIC1\nGPU0 X PIX SYS").unwrap();
    assert_eq!((matrix.class(1, 0), matrix.class(1, 1)), (Some(PathClass::Pix), Some(PathClass::Same)));
    assert_eq!(matrix.cell(1, 2), None);
    assert_eq!(matrix.gpus[0], Gpu::default());
    assert_eq!(matrix.nics[0], Nic { label: "NIC0".into(), device: None });

    let matrix = parse("GPU0 CPU Affinity NUMA Affinity GPU NUMA ID\nGPU0 X N/A N/A N/A").unwrap();
    assert_eq!(matrix.gpus[0], Gpu::default());
    let matrix = parse("GPU3 CPU Affinity NUMA Affinity GPU NUMA ID\nGPU3 X 0-71 0,3-9,11-17 2").unwrap();
    assert_eq!(matrix.gpus[0].numa.as_ref().unwrap().to_string(), "0,3-9,11-17");
    assert_eq!((matrix.gpus[0].index, matrix.gpus[0].memory_numa), (3, Some(2)));
    // Used by old drivers.
    assert_eq!(parse("GPU0 GPU1\nGPU0 X SOC\nGPU1 SOC X").unwrap().class(0, 1), Some(PathClass::Sys));
}

#[test]
fn incomplete_matrices_are_rejected() {
    let truncated = include_str!("../../../tests/fixtures/topo/refused/truncated.txt");
    assert_eq!(
        faults(truncated),
        "\
row GPU2: got no row, but a column in the header (line 1); expected one row for each; is the text cut off?
row GPU3: got no row, but a column in the header (line 1); expected one row for each; is the text cut off?"
    );
    let columns = include_str!("../../../tests/fixtures/topo/refused/cut-at-the-right.txt");
    assert_eq!(
        faults(columns),
        "\
line 2, row GPU0, column NIC0: got the end of the row after 4 cells; expected 5 cells
line 3, row GPU1, column NIC0: got the end of the row after 4 cells; expected 5 cells
line 4, row GPU2, column GPU3: got the end of the row after 3 cells; expected 5 cells"
            .to_owned()
            + "\nline 5, row GPU3, column NIC0: got the end of the row after 4 cells; expected 5 cells"
    );
    assert_eq!(
        faults("GPU0 NIC0 NIC1\nGPU0 X PIX SYS\nNIC0 PIX X SYS"),
        "row NIC1: got no row, but a column in the header (line 1); expected one row for each; is the text cut off?"
    );
    assert_eq!(
        faults(&SMALL.replace("NIC0: mlx5_0", "NIC0: mlx5_0\nNIC1: mlx5_1")),
        "line 14, row NIC1: got a name in the legend without a column; expected a column in the header; is the text cut off?"
    );
    for empty in ["", "\n\n", "GPU 0: NVIDIA H100 (UUID: GPU-0)", "GPU0 X PIX\nGPU1 PIX X"] {
        assert_eq!(
            faults(empty),
            "got no header; expected the output of `nvidia-smi topo -m`, header included: GPU0 GPU1 NIC0 CPU Affinity \
             NUMA Affinity"
        );
    }
    assert_eq!(
        faults("NIC0 NIC1\nNIC0 X PIX\nNIC1 PIX X"),
        "line 1: got 2 columns of NICs and none of a GPU; expected a column GPU0"
    );
}

#[test]
fn contradictory_matrices_are_rejected() {
    let asymmetric = include_str!("../../../tests/fixtures/topo/refused/asymmetric.txt");
    assert_eq!(
        faults(asymmetric),
        "\
line 4, row GPU2, column GPU0: got PHB; expected SYS as in row GPU0, column GPU2 (line 2)
line 6, row NIC0, column GPU3: got PXB; expected PIX as in row GPU3, column NIC0 (line 5)"
    );
    assert_eq!(
        faults("GPU0 GPU1\nGPU0 X PIX\nGPU1 PIX X\nGPU0 X PIX"),
        "line 4, row GPU0: got a second row; expected one; the first is in line 2"
    );
    assert_eq!(faults(&format!("{SMALL}{SMALL}")), "line 14: got a second header; expected one matrix");
    assert_eq!(
        faults("GPU0 GPU1\nGPU0 X PIX\nGPU1 PIX X\nGPU2 PIX PIX"),
        "line 4, row GPU2: got a row without a column; expected a column in the header (line 1)"
    );
    assert_eq!(faults("GPU0 NIC0 NIC0\nGPU0 X PIX PIX"), "line 1, column NIC0: got a second column; expected one");
}

#[test]
fn all_faults_are_reported_at_once() {
    let several = include_str!("../../../tests/fixtures/topo/refused/several.txt");
    assert_eq!(
        faults(several),
        "\
line 2, row GPU0, column GPU0: got PIX; expected X
line 2, row GPU0, column GPU1: got NV0; expected NV1 or more, or a class of PCIe
line 2, row GPU0, column NIC0: got NV4; expected PIX, PXB, PHB, NODE or SYS: NVLinks join GPUs only
line 3, row GPU1, column GPU0: got X; expected a class: X is for a device and itself
line 3, row GPU1, column NIC0: got NEAR; expected X, NV and a number, PIX, PXB, PHB, NODE or SYS
line 3, row GPU1: got extra after 5 words; expected 5 words, one for each column
line 2, row GPU0, column CPU Affinity: got 3-x; expected a list of CPUs, such as 0-31,64-95, or N/A
line 2, row GPU0, column NUMA Affinity: got none; expected a NUMA node or a list of them, such as 0,3-9, or N/A
line 9, row NIC0: got a second name in the legend; expected one"
    );
}

#[test]
fn limits() {
    let matrix = |gpus: usize, nics: usize| {
        let gpu = (0..gpus).map(|gpu| format!("GPU{gpu}"));
        let labels: Vec<String> = gpu.chain((0..nics).map(|nic| format!("NIC{nic}"))).collect();
        let row = |at: usize| {
            let cells: Vec<&str> = (0..labels.len()).map(|other| if at == other { "X" } else { "SYS" }).collect();
            format!("{} {}", labels[at], cells.join(" "))
        };
        format!("{}\n{}", labels.join(" "), (0..gpus).map(row).collect::<Vec<_>>().join("\n"))
    };
    assert_eq!(parse(&matrix(64, 256)).unwrap().devices(), 320);
    assert_eq!(faults(&matrix(65, 0)), "line 1: got 65 GPUs; expected at most 64");
    assert_eq!(faults(&matrix(1, 257)), "line 1: got 257 NICs; expected at most 256");
    let text = faults(&matrix(64, 0).replace("SYS", "FAR"));
    assert!(text.ends_with("\nand 4012 more") && text.lines().count() == 21, "{text}");
    assert!(faults("GPU0 GPU1\nGPU0 X \u{7}\u{1b}]0;x\nGPU1 PIX X").contains("got ]0;x; expected X, NV"));
}
