//! Runs a node agent on a stage.
#![allow(dead_code, clippy::unwrap_used)]

// Named so that cargo builds the shared library.
use switchyard_nvml_mock as _;

use jiff::Timestamp;
use switchyard_crds::gpu_topology::{FactSource, Facts, GPUTopologyStatus, Gpu, Link, LinkKind, Nic};
use switchyard_node_agent::{Roots, describe};
use switchyard_scenes::{Scene, Stage};

pub fn stage(name: &str) -> Stage {
    Stage::new(Scene::shipped(name).unwrap()).unwrap()
}

pub fn roots(stage: &Stage) -> Roots {
    Roots {
        sysfs: stage.tree.path("sys"),
        procfs: stage.tree.path("proc"),
        dev: stage.tree.path("dev"),
        nvml_library: Some(stage.library()),
        ..Roots::local("scene")
    }
}

pub fn status_of(roots: &Roots) -> GPUTopologyStatus {
    describe(roots, Timestamp::UNIX_EPOCH).unwrap().status.unwrap()
}

pub fn status(stage: &Stage) -> GPUTopologyStatus {
    status_of(&roots(stage))
}

pub fn source(status: &GPUTopologyStatus, facts: Facts) -> &FactSource {
    status.source(facts).unwrap_or_else(|| panic!("no source of {facts:?}"))
}

pub fn message(status: &GPUTopologyStatus, facts: Facts) -> &str {
    source(status, facts).message.as_deref().unwrap_or_default()
}

pub fn gpu(status: &GPUTopologyStatus, index: u32) -> &Gpu {
    status.gpus.iter().find(|gpu| gpu.index == index).unwrap_or_else(|| panic!("no GPU{index}"))
}

pub fn nic<'a>(status: &'a GPUTopologyStatus, device: &str) -> &'a Nic {
    let found = status.nics.iter().find(|nic| nic.rdma_device.as_deref() == Some(device));
    found.unwrap_or_else(|| panic!("no {device}: {:#?}", status.nics))
}

pub fn link(status: &GPUTopologyStatus, a: u32, b: u32, kind: LinkKind) -> Option<&Link> {
    let (a, b) = (&gpu(status, a).uuid, &gpu(status, b).uuid);
    status.links.iter().find(|link| link.a == *a && link.b == *b && link.kind == kind)
}
