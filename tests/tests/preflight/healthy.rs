//! No false alarms: healthy machines of every cloud and type produce no findings.

use crate::preflight::scenes::{JOBS, SCENES};
use crate::preflight::stage::Stage;
use switchyard_tests::gpus::MACHINES;

/// The job that deliberately sets values that are wrong on most nodes.
const OWN_FAULTS: &str = "mpi-part-of-node-own-values";
/// A fixture that is itself faulty: no device plugin offers its RDMA ports.
const NOT_OFFERED: &str = "b200-rdma-not-offered";

#[test]
fn healthy_scenes_raise_nothing() {
    let mut count = 0;
    for scene in SCENES.iter().filter(|scene| scene.name != NOT_OFFERED) {
        for job in &JOBS {
            let mut stage = Stage::new(scene.name, job.name);
            if job.name == OWN_FAULTS {
                stage.set("/spec/trainer/env", serde_json::json!([]));
            }
            // A job that requires RDMA waits without it, and is not checked.
            let Ok(fabric) = stage.fabric() else { continue };
            let preflight = fabric.preflight.unwrap();
            assert_eq!(preflight.findings, [], "{} {}", scene.name, job.name);
            assert_eq!(preflight.passed + preflight.not_applicable, 27);
            count += 1;
        }
    }
    assert!(count >= 60, "{count}");
}

#[test]
fn machines_of_every_kind_raise_nothing() {
    let mut far = Vec::new();
    for machine in &MACHINES {
        let stage = Stage::for_machine(machine);
        let mut findings = stage.look().findings;
        // Correct on these machines: no NIC shares a switch with these GPUs.
        let is_far =
            |finding: &switchyard_crds::PreflightFinding| finding.message.contains("no NIC is on the PCIe switch");
        if findings.iter().any(is_far) {
            far.push(machine.fixture);
        }
        findings.retain(|finding| !is_far(finding));
        assert_eq!(findings, [], "{}", machine.fixture);
    }
    insta::with_settings!({snapshot_path => "golden", prepend_module_to_snapshot => false}, {
        insta::assert_snapshot!("machines_without_near_nics", far.join("\n"));
    });
}
