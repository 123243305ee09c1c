//! GPUs and links from a mock of NVML that is compiled for the test.

mod fixture;

use fixture::Fixture;
use std::path::{Path, PathBuf};
use std::process::Command;
use switchyard_crds::gpu_topology::{
    Facts, GPUTopologyStatus, Link, LinkKind, LinkVia, MigMode, PathClass, SourceState,
};
use switchyard_node_agent::{Roots, describe};

/// Compiles the mock. `None`, with a note, where there is no compiler (a test binary copied to another machine).
fn mock(directory: &Path, flags: &[&str]) -> Option<PathBuf> {
    let library = directory.join("libnvidia-ml-mock.so");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/nvml_mock/library.rs");
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(compiler)
        .args(["--edition", "2024", "-C", "panic=abort", "-o"])
        .arg(&library)
        .args(flags)
        .arg(source)
        .output();
    match output {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(library)
        }
        Err(error) => {
            println!("SKIPPED: no Rust compiler to build the mock of NVML: {error}");
            None
        }
    }
}

fn status(roots: &Roots) -> GPUTopologyStatus {
    describe(roots, jiff::Timestamp::UNIX_EPOCH).expect("a description").status.expect("a status")
}

fn link(status: &GPUTopologyStatus, a: usize, b: usize, kind: LinkKind) -> Option<&Link> {
    let (a, b) = (&status.gpus[a].uuid, &status.gpus[b].uuid);
    status.links.iter().find(|link| &link.a == a && &link.b == b && link.kind == kind)
}

#[test]
fn gpus_and_links() {
    let fixture = Fixture::server();
    let switch = "pci0000:17/0000:17:01.0/0000:18:00.0";
    fixture.pci(&format!("{switch}/0000:19:01.0/0000:1b:00.0"), "0x10de", "0x030200", "0");
    fixture.pci("pci0000:80/0000:80:05.0/0000:c3:00.0", "0x10de", "0x030200", "-1");
    let Some(library) = mock(fixture.directory.path(), &[]) else { return };
    let status = status(&Roots { nvml_library: Some(library), ..fixture.roots() });

    assert_eq!((status.gpu_count, status.gpus.len()), (Some(5), 4), "the fifth is lost");
    let source = status.source(Facts::GPUs).expect("a source");
    assert_eq!(source.state, SourceState::Partial);
    let message = source.message.as_deref().expect("notes");
    assert!(message.contains("GPU4:") && message.contains("GPU1: place unknown"), "{message}");
    assert_eq!(status.host.as_ref().and_then(|host| host.driver.as_deref()), Some("580.82.07"));

    let gpu = &status.gpus[0];
    assert_eq!(gpu.uuid, "GPU-00000001-1111-2222-3333-444444444444");
    assert_eq!(gpu.bus_id.as_deref(), Some("0000:1b:00.0"));
    assert_eq!((gpu.model.as_deref(), gpu.memory_bytes), (Some("NVIDIA H100 80GB HBM3"), Some(80 << 30)));
    assert_eq!((gpu.numa_node, gpu.pcie_root.as_deref()), (Some(0), Some("pci0000:17")));
    assert_eq!(gpu.pcie_path.len(), 5);
    assert_eq!(gpu.mig.as_ref().map(|mig| mig.mode), Some(MigMode::Disabled));
    assert_eq!(status.gpus[1].mig.as_ref().map(|mig| mig.mode), Some(MigMode::Enabled));
    let action = |index: usize| status.gpus[index].health.as_ref().map(|health| health.recovery_action.as_str());
    assert_eq!((action(0), action(1), action(2)), (Some("None"), None, Some("NodeReboot")));
    assert_eq!(status.gpus[3].numa_node, None);

    let direct = link(&status, 0, 1, LinkKind::NVLink).expect("two GPUs with NVLinks");
    assert_eq!((direct.count, direct.via), (Some(2), Some(LinkVia::Direct)));
    assert_eq!(direct.megabytes_per_second, Some(20_000 + 21_000), "every link's own speed");
    let switched = link(&status, 2, 3, LinkKind::NVLink).expect("two GPUs at a switch");
    assert_eq!((switched.count, switched.via), (Some(17), Some(LinkVia::Switch)));
    assert_eq!(switched.megabytes_per_second, None, "the speed of one side is not known");
    assert!(link(&status, 0, 2, LinkKind::NVLink).is_none());
    assert_eq!(link(&status, 0, 1, LinkKind::PCIe).and_then(|link| link.path_class), Some(PathClass::PXB));
    assert_eq!(link(&status, 1, 3, LinkKind::PCIe).and_then(|link| link.path_class), Some(PathClass::SYS));
    assert_eq!(status.links.len(), 6 + 2);
}

#[test]
fn a_library_without_shutdown_does_not_panic() {
    let fixture = Fixture::server();
    let Some(library) = mock(fixture.directory.path(), &["--cfg", "no_shutdown"]) else { return };
    let status = status(&Roots { nvml_library: Some(library), ..fixture.roots() });
    assert_eq!(status.gpu_count, Some(5));
}

#[test]
fn a_file_that_is_no_library() {
    let fixture = Fixture::server();
    fixture.file("text.so", "no library");
    let status = status(&Roots { nvml_library: Some(fixture.path("text.so")), ..fixture.roots() });
    assert_eq!((status.gpu_count, status.gpus.len()), (Some(0), 0));
}
