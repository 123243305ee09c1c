#![allow(clippy::unwrap_used)]

use super::super::tests::fixtures::machine;
use super::*;
use switchyard_crds::gpu_topology::Nic;

#[test]
fn for_graphviz() {
    insta::assert_snapshot!("f01-dgx-1v-dot", dot(&machine("f01-dgx-1v")));
    insta::assert_snapshot!("f04-h200-dot", dot(&machine("f04-h200")));
}

#[test]
fn pictures() {
    insta::assert_snapshot!("f01-dgx-1v-svg", svg(&machine("f01-dgx-1v")));
    insta::assert_snapshot!("f04-h200-svg", svg(&machine("f04-h200")));
}

/// As on machines that show every function of their NICs.
#[test]
fn many_equal_nics_of_a_switch_are_one_box() {
    let mut machine = machine("f04-h200");
    let few = svg(&machine);
    let status = machine.status.as_mut().unwrap();
    let functions = |nic: &Nic| {
        (0..9)
            .map(|function| Nic { name: format!("{}_{function}", nic.name), rdma_device: None, ..nic.clone() })
            .collect::<Vec<_>>()
    };
    status.nics = status.nics.iter().flat_map(functions).collect();
    assert_eq!(status.nics.len(), 36);
    let many = svg(&machine);
    let size = |picture: &str| picture.split_once("viewBox=").unwrap().1.split('\n').next().unwrap().to_owned();
    assert_eq!(size(&many), size(&few));
    assert_eq!(many.matches(">9 NICs</text>").count(), 4, "{many}");
    assert!(many.contains("_7, ") && many.contains("_8</title>"), "the title has every name: {many}");
    // A port that is down stays apart.
    let status = machine.status.as_mut().unwrap();
    status.nics[0].state = Some("Down".into());
    assert_eq!(svg(&machine).matches(">9 NICs</text>").count(), 3);
    assert_eq!(svg(&machine).matches(">8 NICs</text>").count(), 1);
}

#[test]
fn firmware_names_are_escaped() {
    let mut machine = machine("f04-h200");
    machine.metadata.name = Some("a\"]; b [label=\"\\".into());
    let status = machine.status.as_mut().unwrap();
    status.gpus[0].model = Some("<script>&\u{1b}[31m".into());
    status.nics[0].rdma_device = Some("x\" -- y\\\n".into());
    let drawn = dot(&machine);
    assert!(drawn.starts_with(r#"graph "a\"]; b [label=\"\\" {"#), "{drawn}");
    assert!(drawn.contains(r#""x\" -- y\\?"#) && !drawn.contains('\u{1b}'), "{drawn}");
    let picture = svg(&machine);
    assert!(picture.contains("&lt;script&gt;&amp;?[31m") && !picture.contains("<script"), "{picture}");
}

#[test]
fn a_switch_is_named_once() {
    let path = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let labels = |path: &[String]| {
        let mut drawing = Drawing {
            name: String::new(),
            numa: Vec::new(),
            devices: vec![Device { label: String::new(), detail: String::new(), is_gpu: true, is_faulty: false }],
            nvlinks: Vec::new(),
            socket_rate: None,
        };
        drawing.attach(&GPUTopologyStatus::default(), Some(0), path);
        let mut labels = Vec::new();
        let mut parts = &drawing.numa;
        while let Some(part) = parts.first() {
            labels.push(part.label.clone());
            parts = &part.parts;
        }
        labels[1..].join(" ")
    };
    assert_eq!(labels(&[]), "");
    assert_eq!(labels(&path("pci0000:00 00:05.0")), "pci0000:00");
    assert_eq!(labels(&path("pci0000:00 00:01.0 01:00.0")), "pci0000:00");
    assert_eq!(labels(&path("pci0000:00 00:01.0 01:00.0 02:00.0 03:00.0")), "pci0000:00 switch 01:00.0");
    let two = "pci0000:00 00:01.0 01:00.0 02:00.0 03:00.0 04:00.0 05:00.0";
    assert_eq!(labels(&path(two)), "pci0000:00 switch 01:00.0 switch 03:00.0");
}
