//! Failures change the facts that they should, and no others.
#![allow(clippy::unwrap_used)]

mod common;

use common::{gpu, link, message, nic, roots, stage, status, status_of};
use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use std::time::Duration;
use switchyard_crds::gpu_topology::{
    FabricSummary, Facts, GPUTopologyStatus, Gpu, LinkKind, RowRemapping, SourceState,
};
use switchyard_node_agent::Roots;
use switchyard_scenes::{Driver, FabricFailure, Failures, Xid};

/// Reports before and after a failure.
fn reports_before_and_after(name: &str, failures: Failures) -> (GPUTopologyStatus, GPUTopologyStatus) {
    let stage = stage(name);
    let before = status(&stage);
    stage.set(&failures);
    let after = status(&stage);
    stage.set(&Failures::default());
    assert_eq!(status(&stage), before, "{failures:?} leaves nothing behind");
    assert_ne!(before, after, "{failures:?}");
    (before, after)
}

/// Asserts that only this GPU changed, and that it changed as `expected` does.
fn assert_only_gpu_changed(
    before: &GPUTopologyStatus,
    after: &GPUTopologyStatus,
    index: u32,
    expected: impl Fn(&mut Gpu),
) {
    let mut wanted = before.clone();
    expected(&mut wanted.gpus[index as usize]);
    assert_eq!(*after, wanted);
}

#[test]
fn a_lost_gpu_removes_itself_and_its_links() {
    let (before, after) = reports_before_and_after("hgx-h100", Failures { lost: vec![3], ..Failures::default() });
    let lost = gpu(&before, 3).uuid.clone();
    assert_eq!((after.gpu_count, after.gpus.len()), (Some(8), 7), "the driver still counts it");
    let text = message(&after, Facts::GPUs);
    assert!(
        text.contains("GPU3: ") && text.contains("on the PCI bus, and not described by the driver: 0000:61:00.0"),
        "{text}"
    );
    let mut wanted = before;
    wanted.gpus.retain(|gpu| gpu.uuid != lost);
    wanted.links.retain(|link| link.a != lost && link.b != lost);
    wanted.sources.clone_from(&after.sources);
    wanted.nvswitch.as_mut().unwrap().gpus = Some(7);
    assert_eq!(after, wanted);
}

#[test]
fn nvlinks_that_are_down() {
    let failures = Failures { nvlinks_down: [(1, "4,16-17".to_owned())].into(), ..Failures::default() };
    let (before, after) = reports_before_and_after("hgx-h100", failures);
    let nvlinks = gpu(&after, 1).nvlinks.clone().unwrap();
    assert_eq!((nvlinks.up, nvlinks.down.as_slice()), (15, &[4, 16, 17][..]));
    let mut wanted = before.clone();
    wanted.gpus[1].nvlinks = Some(nvlinks);
    let own = before.gpus[1].uuid.clone();
    for link in wanted.links.iter_mut().filter(|link| link.kind == LinkKind::NVLink && (link.a == own || link.b == own))
    {
        (link.count, link.megabytes_per_second) = (Some(15), Some(15 * 26_562));
    }
    assert_eq!(after, wanted);
}

#[test]
fn a_mesh_with_one_link_down() {
    // The first link of GPU0 connects to GPU1.
    let failures = Failures { nvlinks_down: [(0, "0".to_owned())].into(), ..Failures::default() };
    let (_, after) = reports_before_and_after("dgx-1v", failures);
    assert!(link(&after, 0, 1, LinkKind::NVLink).is_none(), "it was the only one");
    assert_eq!(link(&after, 0, 3, LinkKind::NVLink).unwrap().count, Some(2));
}

#[test]
fn half_the_lanes() {
    let failures =
        Failures { gpu_width: [(2, 8)].into(), nic_width: [("mlx5_1".to_owned(), 4)].into(), ..Failures::default() };
    let (before, after) = reports_before_and_after("pcie-8", failures);
    let pcie = gpu(&after, 2).pcie_link.as_ref().unwrap();
    assert_eq!((pcie.width, pcie.max_width), (Some(8), Some(16)));
    let pcie = nic(&after, "mlx5_1").pcie_link.as_ref().unwrap();
    assert_eq!((pcie.width, pcie.max_width, pcie.generation), (Some(4), Some(16), Some(5)));
    let mut wanted = before;
    wanted.gpus[2].pcie_link.as_mut().unwrap().width = Some(8);
    let slow = wanted.nics.iter_mut().find(|nic| nic.rdma_device.as_deref() == Some("mlx5_1")).unwrap();
    slow.pcie_link.as_mut().unwrap().width = Some(4);
    assert_eq!(after, wanted);
}

#[test]
fn an_unknown_numa_node_stays_unknown() {
    let (before, after) = reports_before_and_after("l40s-4", Failures { numa_unknown: vec![1], ..Failures::default() });
    let mut wanted = before;
    wanted.gpus[1].numa_node = None;
    // Without a known NUMA node, two devices cannot be reported as near.
    let (a, b) = (wanted.gpus[0].uuid.clone(), wanted.gpus[1].uuid.clone());
    let pair = wanted.links.iter_mut().find(|link| link.a == a && link.b == b).unwrap();
    pair.path_class = Some(switchyard_crds::gpu_topology::PathClass::SYS);
    assert_eq!(after, wanted);
}

#[test]
fn memory_and_recovery() {
    let (before, after) =
        reports_before_and_after("hgx-h100", Failures { rows_pending: vec![0], ..Failures::default() });
    assert_only_gpu_changed(&before, &after, 0, |gpu| {
        gpu.ecc.as_mut().unwrap().row_remapping = Some(RowRemapping::Pending)
    });
    let both = Failures { rows_pending: vec![5], rows_failed: vec![5], ..Failures::default() };
    let (before, after) = reports_before_and_after("hgx-h100", both);
    assert_only_gpu_changed(&before, &after, 5, |gpu| {
        gpu.ecc.as_mut().unwrap().row_remapping = Some(RowRemapping::Failed)
    });
    let (before, after) =
        reports_before_and_after("hgx-h100", Failures { recovery: [(7, 9)].into(), ..Failures::default() });
    assert_only_gpu_changed(&before, &after, 7, |gpu| {
        gpu.health.as_mut().unwrap().recovery_action = "Code9".to_owned()
    });
}

#[test]
fn unhealthy_fabric() {
    let place = |failure| Failures { fabric: [(1, failure)].into(), ..Failures::default() };
    let degraded = FabricFailure { mask: Some(0x1a9), summary: Some(3), ..FabricFailure::default() };
    let (_, after) = reports_before_and_after("gb200-tray", place(degraded));
    let health = after.fabric.as_ref().unwrap().health.as_ref().unwrap();
    assert_eq!(
        (health.summary, health.faults.as_slice()),
        (FabricSummary::LimitedCapacity, &["DegradedBandwidth".to_owned()][..])
    );

    let elsewhere = FabricFailure { clique: Some(1), ..FabricFailure::default() };
    let (_, after) = reports_before_and_after("gb200-tray", place(elsewhere));
    assert_eq!(after.fabric, None);
    assert_eq!(gpu(&after, 1).fabric.as_ref().unwrap().clique_id, Some(1));
    assert!(
        message(&after, Facts::Fabric).starts_with("GPU1 not in the same fabric position"),
        "{}",
        message(&after, Facts::Fabric)
    );

    let late = FabricFailure { state: Some(2), ..FabricFailure::default() };
    let (_, after) = reports_before_and_after("gb200-tray", place(late));
    assert_eq!((after.fabric, after.gpus.len()), (None, 4));
}

#[test]
fn a_driver_that_restarts() {
    let (before, after) =
        reports_before_and_after("hgx-h100", Failures { driver: Driver::Restarting, ..Failures::default() });
    assert_eq!((after.gpu_count, after.gpus.len(), after.links.len()), (None, 0, 0));
    assert!(message(&after, Facts::GPUs).starts_with("8 NVIDIA GPUs on the PCI bus, but NVML does not work"));
    assert_eq!((&after.nics, &after.cpus, &after.numa_nodes), (&before.nics, &before.cpus, &before.numa_nodes));
    assert_eq!(after.nvswitch.unwrap().devices, Some(4));
}

#[test]
fn functions_missing_in_an_old_driver() {
    let stage = stage("hgx-h100");
    let before = status(&stage);
    // Each function contributes only its own facts.
    type Change = fn(&mut GPUTopologyStatus);
    let cases: [(&str, Change); 8] = [
        ("nvmlDeviceGetGpuFabricInfoV", |status| {
            status.fabric = None;
            status.gpus.iter_mut().for_each(|gpu| gpu.fabric = None);
        }),
        ("nvmlDeviceGetRemappedRows", |status| {
            status.gpus.iter_mut().for_each(|gpu| gpu.ecc.as_mut().unwrap().row_remapping = None);
        }),
        ("nvmlDeviceGetEccMode", |status| {
            status.gpus.iter_mut().for_each(|gpu| gpu.ecc.as_mut().unwrap().mode = None);
        }),
        ("nvmlDeviceGetMigMode", |status| status.gpus.iter_mut().for_each(|gpu| gpu.mig = None)),
        // The kernel also knows these two.
        ("nvmlDeviceGetCurrPcieLinkWidth", |_| {}),
        ("nvmlDeviceGetMaxPcieLinkGeneration", |_| {}),
        ("nvmlDeviceGetFieldValues", |status| {
            status.gpus.iter_mut().for_each(|gpu| gpu.health = None);
            status.links.iter_mut().for_each(|link| link.megabytes_per_second = None);
        }),
        ("nvmlSystemGetCudaDriverVersion_v2", |status| status.host.as_mut().unwrap().cuda_version = None),
    ];
    for (function, change) in cases {
        let mut wanted = before.clone();
        change(&mut wanted);
        stage.set_missing(&[function]);
        let after = status(&stage);
        wanted.sources.clone_from(&after.sources);
        assert_eq!(after, wanted, "{function}");
    }
    let without = |function: &str| {
        stage.set_missing(&[function]);
        status(&stage)
    };
    let no_init = without("nvmlInit_v2");
    assert_eq!((no_init.gpu_count, no_init.gpus.len()), (None, 0));
    let no_uuid = without("nvmlDeviceGetUUID");
    assert_eq!((no_uuid.gpu_count, no_uuid.gpus.len()), (Some(8), 0));
    // Keeps the library open, so it comes last.
    assert_eq!(without("nvmlShutdown").gpus, before.gpus, "the wrapper would panic");
}

#[test]
fn version_2_of_the_fabric_has_no_summary() {
    let stage = stage("gb200-tray");
    let summary = FabricFailure { summary: Some(0), ..FabricFailure::default() };
    let all = (0..4).map(|gpu| (gpu, summary.clone())).collect();
    let before = status(&stage);
    stage.set(&Failures { fabric: all, ..Failures::default() });
    assert_eq!(status(&stage).fabric, before.fabric, "the mask says the same");
}

#[test]
fn a_file_that_is_not_a_library() {
    let stage = stage("no-gpu");
    stage.tree.file("text.so", "no library");
    let status = status_of(&Roots { nvml_library: Some(stage.tree.path("text.so")), ..roots(&stage) });
    assert_eq!((status.gpu_count, status.gpus.len()), (Some(0), 0));
    assert_eq!(status.source(Facts::GPUs).unwrap().state, SourceState::Complete);
}

#[test]
fn errors_come_as_events() {
    let stage = stage("hgx-h100");
    let past = Xid { gpu: 2, xid: 31 };
    stage.set(&Failures { xids: vec![past], ..Failures::default() });
    let nvml = Nvml::builder().lib_path(stage.library().as_os_str()).init().unwrap();
    let mut events = nvml.create_event_set().unwrap();
    for index in [2, 5] {
        let device = nvml.device_by_index(index).unwrap();
        events = device.register_events(EventTypes::CRITICAL_XID_ERROR, events).map_err(|error| error.error).unwrap();
    }
    assert!(matches!(events.wait(20), Err(NvmlError::Timeout)), "what is past is past");
    let xids = vec![past, Xid { gpu: 4, xid: 48 }, Xid { gpu: 5, xid: 79 }];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(30));
            stage.set(&Failures { xids, lost: vec![5], ..Failures::default() });
        });
        let event = events.wait(5000).unwrap();
        assert!(event.event_type.contains(EventTypes::CRITICAL_XID_ERROR));
        assert!(matches!(event.event_data, Some(XidError::Value(79))), "{event:?}");
    });
    assert!(matches!(events.wait(20), Err(NvmlError::Timeout)), "GPU4 was not registered");
    // A scan while another session waits for events.
    let status = status(&stage);
    assert_eq!(status.gpus.len(), 7);
    assert!(nvml.device_count().is_ok(), "the session is still there");
}
