//! Each check on a fixture where it applies and finds nothing, and on the same fixture with one
//! fault.

use crate::preflight::gangs::by_hand;
use crate::preflight::stage::{Stage, before, registered};
use serde_json::json;
use std::fmt::Write;
use switchyard_crds::PreflightSeverity::{Block, Warn};
use switchyard_crds::gpu_topology::*;
use switchyard_crds::{PreflightFinding, PreflightSeverity, PreflightStatus};
use switchyard_fabric::preflight::CHECKS;

/// Fixture names of nodes and job, a change that makes the check applicable, the fault, and its
/// severity.
struct Case {
    check: i32,
    severity: PreflightSeverity,
    scene: (&'static str, &'static str),
    base: fn(&mut Stage),
    fault: fn(&mut Stage),
}

pub const INFINIBAND: (&str, &str) = ("hgx-h100-infiniband", "torch");
const HOST: (&str, &str) = ("hgx-h100-infiniband", "torch-host-network");
const PART: (&str, &str) = ("hgx-h100-infiniband", "mpi-part-of-node-own-values");
const ROCE: (&str, &str) = ("h200-roce-v4", "torch");

const fn case(
    check: i32,
    severity: PreflightSeverity,
    scene: (&'static str, &'static str),
    fault: fn(&mut Stage),
) -> Case {
    Case { check, severity, scene, base: |_| {}, fault }
}

const CASES: [Case; 43] = [
    case(1, Block, INFINIBAND, |stage| {
        let nodes = stage.items.iter_mut().filter(|item| item["kind"] == "Node");
        nodes.for_each(|node| {
            drop(node["status"]["allocatable"].as_object_mut().unwrap().remove("rdma/hca_shared_devices_a"))
        });
    }),
    case(1, Block, INFINIBAND, |stage| stage.ports(1, |nic| nic.state = Some("Down".into()))),
    Case {
        base: |stage| stage.env("NCCL_SOCKET_IFNAME", "=eno1"),
        ..case(2, Block, HOST, |stage| {
            stage.node(1, |status| status.host.as_mut().unwrap().default_route = Some("ens3f0".into()));
        })
    },
    Case { base: |_| {}, ..case(2, Warn, HOST, |stage| stage.env("NCCL_SOCKET_IFNAME", "bond7")) },
    case(2, Block, HOST, |stage| stage.env("NCCL_SOCKET_IFNAME", "lo")),
    Case {
        base: |stage| stage.env("NCCL_IB_GID_INDEX", "3"),
        ..case(3, Block, ROCE, |stage| {
            stage.node(1, |status| {
                status.nics[2].gids = vec![
                    GidGroup { kind: GidType::RoCEv1, family: Some(GidFamily::IPv4), count: 1, first_index: 4 },
                    GidGroup { kind: GidType::RoCEv2, family: Some(GidFamily::IPv4), count: 1, first_index: 5 },
                ];
            });
        })
    },
    case(3, Block, ROCE, |stage| stage.ports(0, |nic| nic.gids.retain(|group| group.kind == GidType::RoCEv1))),
    case(4, Warn, INFINIBAND, |stage| stage.ports(1, |nic| nic.mtu_bytes = Some(2044))),
    case(4, Warn, INFINIBAND, |stage| stage.node(1, |status| status.nics[0].rate_megabits_per_second = Some(200_000))),
    case(4, Warn, INFINIBAND, |stage| {
        stage.node(0, |status| {
            let watch = status.nics[0].port_watch.as_mut().unwrap();
            (watch.last_error, watch.errors) = (Some(before(20)), vec!["symbol_error".into(), "packet_seq_err".into()]);
        });
    }),
    Case {
        base: |stage| stage.env("NCCL_IB_HCA", "=mlx5_0:1,mlx5_1:1"),
        ..case(5, Block, INFINIBAND, |stage| {
            stage.ports(1, |nic| nic.rdma_device = nic.rdma_device.as_ref().map(|name| name.replace("mlx5_", "rocep")));
        })
    },
    case(5, Warn, INFINIBAND, |stage| {
        stage.env("NCCL_IB_HCA", "mlx5_1");
        stage.node(0, |status| {
            let mut other = status.nics[1].clone();
            (other.name, other.rdma_device, other.state) =
                ("mlx5_1/2".into(), Some("mlx5_10".into()), Some("Down".into()));
            status.nics.push(other);
        });
    }),
    case(5, Block, INFINIBAND, |stage| {
        stage.ports(0, |nic| nic.char_device.as_mut().unwrap().state = FileState::Missing)
    }),
    case(6, Block, ROCE, |stage| stage.node(1, |status| status.nics[0].gids.clear())),
    case(7, Block, INFINIBAND, |stage| shared_memory(stage, "64Mi")),
    case(7, Warn, INFINIBAND, |stage| shared_memory(stage, "4Gi")),
    case(7, Warn, INFINIBAND, |stage| shared_memory(stage, "300Gi")),
    case(8, Block, INFINIBAND, |stage| {
        stage.all(|status| status.host.as_mut().unwrap().locked_memory_limit = Some("8388608".into()));
    }),
    case(9, Block, INFINIBAND, |stage| {
        stage.node(1, |status| {
            let bridge = status.gpus[0].pcie_path[1].clone();
            status.host.as_mut().unwrap().acs.as_mut().unwrap().redirecting = vec![bridge];
        });
    }),
    case(10, Warn, INFINIBAND, |stage| {
        stage.all(|status| {
            let host = status.host.as_mut().unwrap();
            (host.peermem, host.dma_buf) = (Some(ModuleState::NotLoaded), Some(DmaBuf::Unlikely));
        });
    }),
    case(10, Warn, INFINIBAND, |stage| {
        stage.node(0, |status| {
            // Behind separate root ports, away from every switch.
            for (number, gpu) in status.gpus.iter_mut().enumerate() {
                gpu.pcie_path =
                    vec![format!("pci0000:f{number}"), format!("0000:f{number}:01.0"), "0000:f1:00.0".into()];
            }
        });
    }),
    Case {
        base: clear_env,
        ..case(11, Warn, PART, |stage| {
            stage.node(0, |status| status.gpus[7].fabric.as_mut().unwrap().state = FabricState::InProgress);
        })
    },
    Case {
        base: rack,
        ..case(12, Warn, INFINIBAND, |stage| {
            stage.node(1, |status| status.fabric.as_mut().unwrap().clique_id = Some(2));
        })
    },
    Case {
        base: rack,
        ..case(12, Block, INFINIBAND, |stage| {
            stage.all(|status| status.host.as_mut().unwrap().imex_channels.clear());
        })
    },
    Case {
        base: rack,
        ..case(12, Block, INFINIBAND, |stage| {
            stage.node(0, |status| {
                let health = status.gpus[2].fabric.as_mut().unwrap().health.as_mut().unwrap();
                (health.summary, health.faults) =
                    (FabricSummary::Unhealthy, vec!["RouteUnhealthy".into(), "InsufficientNVLinks".into()]);
            });
        })
    },
    Case {
        base: clear_env,
        ..case(13, Block, PART, |stage| {
            stage.node(1, |status| {
                let lost = status.gpus.pop().unwrap();
                status.links.retain(|link| link.a != lost.uuid && link.b != lost.uuid);
            });
        })
    },
    Case {
        base: clear_env,
        ..case(13, Warn, PART, |stage| {
            let node = stage.items.iter_mut().find(|item| item["kind"] == "Node").unwrap();
            node["status"]["allocatable"]["nvidia.com/gpu"] = json!("7");
        })
    },
    Case {
        base: clear_env,
        ..case(14, Warn, PART, |stage| {
            stage.node(1, |status| status.gpus[6].health.as_mut().unwrap().recovery_action = "GPUReset".into());
        })
    },
    case(14, Warn, INFINIBAND, |stage| {
        stage.node(1, |status| status.gpus[2].ecc.as_mut().unwrap().row_remapping = Some(RowRemapping::Pending));
    }),
    case(15, Warn, INFINIBAND, |stage| {
        stage.node(1, |status| status.gpus[2].pcie_link.as_mut().unwrap().width = Some(8))
    }),
    case(15, Warn, INFINIBAND, |stage| {
        stage.node(1, |status| status.nics[2].pcie_link.as_mut().unwrap().generation = Some(3))
    }),
    case(16, Warn, INFINIBAND, |stage| {
        stage.node(0, |status| *status.gpus[5].nvlinks.as_mut().unwrap() = NvLinks { up: 17, down: vec![11] });
    }),
    case(17, Block, INFINIBAND, |stage| stage.set("/spec/trainer/numProcPerNode", json!(16))),
    case(17, Block, INFINIBAND, |stage| stage.env("CUDA_VISIBLE_DEVICES", "0,1")),
    Case { base: |_| {}, ..case(19, Warn, INFINIBAND, |stage| stage.env("NCCL_TOPO_FILE", "/opt/topo.xml")) },
    case(20, Block, HOST, |stage| stage.node(1, |status| status.host.as_mut().unwrap().default_route = None)),
    case(21, Warn, INFINIBAND, |stage| {
        stage.all(|status| {
            let kubelet = status.host.as_mut().unwrap().kubelet.as_mut().unwrap();
            (kubelet.topology_manager, kubelet.cpu_manager) = (Some("none".into()), Some("none".into()));
        });
    }),
    Case {
        base: |stage| stage.env("NCCL_DEBUG", "WARN"),
        ..case(22, Warn, INFINIBAND, |stage| stage.env("NCCL_P2P_DISABLE", "1"))
    },
    case(23, Warn, INFINIBAND, |stage| {
        stage.node(1, |status| status.host.as_mut().unwrap().driver = Some("535.161.08".into()))
    }),
    case(23, Warn, INFINIBAND, |stage| stage.silence(1)),
    case(24, Warn, INFINIBAND, |stage| {
        stage.node(1, |status| status.nics[5].port_watch.as_mut().unwrap().last_link_down = Some(before(12)));
    }),
    case(25, Warn, INFINIBAND, |stage| stage.all(|status| lose(status, "nvidia3"))),
    case(26, Block, INFINIBAND, |stage| stage.all(|status| lose(status, "nvidia-uvm"))),
];

/// More cases of [`CASES`]: a second fault of a check, with another message.
const MORE: [Case; 3] = [
    case(26, Warn, INFINIBAND, |stage| {
        stage.node(0, |status| status.host.as_mut().unwrap().open_files_limit = Some("1024".into()));
    }),
    case(26, Warn, INFINIBAND, |stage| {
        stage.all(|status| status.host.as_mut().unwrap().stack_limit = Some("Unlimited".into()))
    }),
    case(27, Warn, INFINIBAND, |stage| stage.set("/spec/trainer/resourcesPerNode/limits/memory", json!("16Gi"))),
];

fn shared_memory(stage: &mut Stage, size: &str) {
    stage.set(
        "/spec/template/spec",
        json!({
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}}],
            "containers": [{"name": "trainer", "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}]}],
        }),
    );
}

/// Removes the user's environment variables.
fn clear_env(stage: &mut Stage) {
    stage.set("/spec/trainer/env", json!([]));
}

fn lose(status: &mut GPUTopologyStatus, path: &str) {
    let files = &mut status.host.as_mut().unwrap().device_files;
    files.iter_mut().filter(|file| file.path == path).for_each(|file| file.state = FileState::Missing);
}

/// Puts all nodes into one NVLink domain.
fn rack(stage: &mut Stage) {
    stage.all(|status| {
        let place = Fabric {
            cluster_uuid: Some("5d0d1a2b-0000-4000-8000-000000000001".into()),
            clique_id: Some(1),
            ..registered()
        };
        status.gpus.iter_mut().for_each(|gpu| gpu.fabric = Some(place.clone()));
        status.fabric = Some(place);
        status.host.as_mut().unwrap().imex_channels = vec![0];
    });
}

fn all() -> impl Iterator<Item = &'static Case> {
    CASES.iter().chain(&MORE)
}

pub fn describe(status: &PreflightStatus) -> String {
    let line = |f: &PreflightFinding| format!("{} {:?} {}", f.check, f.severity, f.message);
    status.findings.iter().map(line).collect::<Vec<_>>().join("\n")
}

#[test]
fn every_check_finds_its_fault_and_nothing_without_it() {
    for case in all() {
        let mut stage = Stage::new(case.scene.0, case.scene.1);
        (case.base)(&mut stage);
        if case.scene == PART {
            clear_env(&mut stage);
        }
        let before = stage.look();
        assert_eq!(describe(&before), "", "check {} before its fault", case.check);
        (case.fault)(&mut stage);
        let after = stage.look();
        let found: Vec<_> = after.findings.iter().filter(|finding| finding.check == case.check).collect();
        assert!(!found.is_empty(), "check {} finds nothing; found: {}", case.check, describe(&after));
        assert_eq!(found[0].severity, case.severity, "check {}: {}", case.check, found[0].message);
        for finding in found {
            assert!(finding.message.len() > 10 && finding.evidence.len() > 10 && finding.fix.len() > 10, "{finding:?}");
        }
    }
}

/// Checks that apply only with the fault: a topology file, interface names in a pod.
const NEED_A_SUBJECT: [i32; 2] = [2, 19];

#[test]
fn every_check_runs_and_passes_on_healthy_nodes() {
    for check in &CHECKS {
        let number = i32::from(check.number);
        let placed = case(BY_HAND, Warn, INFINIBAND, |_| {});
        let case = all().find(|case| case.check == number).or((number == BY_HAND).then_some(&placed));
        let case = case.unwrap_or_else(|| panic!("no scene for check {number}"));
        let mut stage = Stage::new(case.scene.0, case.scene.1);
        (case.base)(&mut stage);
        let status = stage.look();
        let skipped = status.skipped.iter().find(|skip| skip.check == number);
        let may = NEED_A_SUBJECT.contains(&number);
        assert!(may || skipped.is_none(), "check {number} is skipped: {skipped:?}");
        assert_eq!(
            usize::try_from(status.passed + status.not_applicable).unwrap(),
            CHECKS.len(),
            "check {number}: {}",
            describe(&status)
        );
    }
    assert!(CHECKS.iter().zip(1..).all(|(check, number)| check.number == number));
}

#[test]
fn a_topology_file_alone_passes_no_check() {
    // Only the image knows the file's content. Without contrary evidence the check reports that it
    // was skipped.
    let mut stage = Stage::new("azure-nd-h100-flat", "torch");
    stage.env("NCCL_TOPO_FILE", "/opt/microsoft/ndv5/topo.xml");
    let status = stage.look();
    assert!(
        status.skipped.iter().any(|skip| skip.check == 19 && skip.reason.contains("only the image has")),
        "{status:?}"
    );
    assert!(status.findings.iter().all(|finding| finding.check != 19));
}

/// Needs hand-made placements, because our planner never puts two pods of a gang on one node.
pub const BY_HAND: i32 = 18;

/// Formats a finding for review.
fn write_finding(text: &mut String, finding: &PreflightFinding) {
    let PreflightFinding { check, title, severity, message, effect, evidence, fix } = finding;
    assert_eq!(*title, CHECKS[*check as usize - 1].title);
    writeln!(text, "{severity:?} {check} {title}\n  {message}").unwrap();
    for (word, line) in
        [("found", evidence), ("effect", effect), ("fix", fix)].iter().filter(|(_, line)| !line.is_empty())
    {
        writeln!(text, "    {word:<7} {line}").unwrap();
    }
}

#[test]
fn messages_match_the_reviewed_text() {
    let mut text = String::new();
    for case in all() {
        let mut stage = Stage::new(case.scene.0, case.scene.1);
        (case.base)(&mut stage);
        (case.fault)(&mut stage);
        stage.found(case.check).iter().for_each(|finding| write_finding(&mut text, finding));
        text.push('\n');
    }
    write_finding(
        &mut text,
        crate::preflight::gangs::finding_for(&by_hand(&["rdma/ib"], &[4, 5, 6, 7], |_| {}), BY_HAND),
    );
    insta::with_settings!({snapshot_path => "golden", prepend_module_to_snapshot => false}, {
        insta::assert_snapshot!("messages", text);
    });
}
