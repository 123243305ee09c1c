#![allow(clippy::unwrap_used)]

use super::super::tests::fixtures::machine;
use super::*;

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
