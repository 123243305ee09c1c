//! The node agent as deployed in a cluster: a DaemonSet pod that mounts its host's files and has
//! its account's rights. The hosts are mock machines: a sysfs tree and a mock NVML.

use crate::nodes::devices::{claim, reported_uses, visible};
use crate::nodes::{apply, cluster, kubectl, pod, wait_phase};
use anyhow::{Context, Result};
use k8s_openapi::api::rbac::v1::PolicyRule;
use kube::Api;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::os::unix::fs::symlink;
use switchyard_crds::gpu_topology::GPUTopology;
// Named so that cargo builds the shared library.
use switchyard_nvml_mock as _;
use switchyard_scenes::{Scene, Stage};
use switchyard_tests::drivers::ClaimDriver;
use switchyard_tests::gpus::{GpuNodes, uuids};
use switchyard_tests::nodes::{Image, Nodes};
use switchyard_tests::{SYSTEM, account, agent_program, found_async};

const NAME: &str = "switchyard-node-agent";

/// The agents of all nodes. Each finds its host's files below `hosts`, under its node name.
fn daemon_set(image: &str, hosts: &str) -> Value {
    let temporary = std::env::temp_dir().display().to_string();
    let host = |path: &str| format!("{hosts}/$(NODE_NAME)/{path}");
    let kubelet = "/var/lib/kubelet/pod-resources";
    let mount = |name: &str, path: &str| json!({"name": name, "mountPath": path, "readOnly": true});
    let volume = |name: &str, path: &str| json!({"name": name, "hostPath": {"path": path, "type": "Directory"}});
    json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": NAME, "namespace": SYSTEM}, "spec": {
        "selector": {"matchLabels": {"app": NAME}},
        "template": {"metadata": {"labels": {"app": NAME}}, "spec": {
            "serviceAccountName": NAME, "hostNetwork": true, "tolerations": [{"operator": "Exists"}],
            "terminationGracePeriodSeconds": 5, "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{
                "name": "agent", "image": image,
                "args": [
                    format!("--sysfs-root={}", host("sys")), format!("--proc-root={}", host("proc")),
                    format!("--dev-root={}", host("dev")), format!("--nvml-lib={}", host("libnvidia-ml.so.1")),
                    "--period-seconds=1", "--listen=0.0.0.0:9410",
                ],
                "env": [{"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
                "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]},
                    "readOnlyRootFilesystem": true, "runAsUser": 0},
                "readinessProbe": {"httpGet": {"path": "/readyz", "port": 9410}, "periodSeconds": 1},
                // A node's folder is a symlink to its mock machine, so both are mounted at their
                // original paths.
                "volumeMounts": [mount("hosts", &temporary), mount("pod-resources", kubelet)],
            }],
            "volumes": [volume("hosts", &temporary), volume("pod-resources", kubelet)],
        }},
    }})
}

/// The agent's report for a node, once it contains GPUs.
async fn report(nodes: &Nodes, node: &str) -> Result<GPUTopology> {
    let api = Api::<GPUTopology>::all(nodes.plane.client().await?);
    let report = found_async("reported with GPUs", crate::nodes::TIMEOUT, async || {
        Ok(api.get_opt(node).await?.filter(|report| !uuids(report).is_empty()))
    });
    let pods = || nodes.plane.kubectl(&["describe", "pods", "-n", SYSTEM]).stdout;
    report.await.with_context(|| format!("{node}\n{}", pods()))
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_in_pods_report_their_nodes_scenes() -> Result<()> {
    let nodes = cluster(2)?;
    nodes.plane.install_crds().await?;
    let folder = tempfile::tempdir()?;
    let mut stages = Vec::new();
    for (node, scene) in nodes.names().iter().zip(["h200-4nics", "hgx-h100"]) {
        let stage = Stage::new(Scene::shipped(scene)?)?;
        symlink(stage.tree.path(""), folder.path().join(node))?;
        stages.push(stage);
    }
    let mut image = Image { name: "switchyard-node-agent:bench", ..Image::default() };
    let program = "/switchyard-node-agent";
    image.add_program(agent_program(), program)?;
    image.command = vec![program.into()];
    nodes.import(&image.archive(folder.path())?)?;
    let rule = |group: &str, resource: &str, verbs: &[&str]| PolicyRule {
        api_groups: Some(vec![group.into()]),
        resources: Some(vec![resource.into()]),
        verbs: verbs.iter().map(ToString::to_string).collect(),
        ..PolicyRule::default()
    };
    let own = "training.switchyard.dev";
    let rules = [
        rule(own, "gputopologies", &["get", "create", "patch"]),
        rule(own, "gputopologies/status", &["patch"]),
        rule("", "nodes", &["get"]),
    ];
    account(&nodes.plane, NAME, &rules)?;
    apply(&nodes, &daemon_set(image.name, &folder.path().display().to_string()))?;

    let mut reports = Vec::new();
    for (node, stage) in nodes.names().iter().zip(&stages) {
        let report = report(&nodes, node).await?;
        let expected: Vec<String> = stage.machine.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        assert_eq!(uuids(&report), expected, "{node}");
        let status = report.status.as_ref().context("no status")?;
        let nics: BTreeSet<&str> = status.nics.iter().filter_map(|nic| nic.rdma_device.as_deref()).collect();
        assert_eq!(nics, stage.machine.ports.iter().map(|port| port.name.as_str()).collect(), "{node}");
        assert!(!status.links.is_empty(), "{node}: no links");
        reports.push(report);
    }
    kubectl(&nodes, &["rollout", "status", "daemonset", NAME, "-n", SYSTEM, "--timeout=600s"])?;

    // Agent, driver, scheduler, kubelet and container must agree on the devices.
    let gpus = GpuNodes::start(nodes.plane.client().await?).await?;
    let _driver = ClaimDriver::start(&nodes, &gpus, &reports[1]).await?;
    let wanted = [1, 4].map(|index| uuids(&reports[1])[index].clone());
    apply(&nodes, &claim("two", &wanted)?)?;
    let mut trainer = pod("trainer", None, "sleep 1000");
    trainer["spec"]["resourceClaims"] = json!([{"name": "gpus", "resourceClaimName": "two"}]);
    trainer["spec"]["containers"][0]["resources"] = json!({"claims": [{"name": "gpus"}]});
    apply(&nodes, &trainer)?;
    wait_phase(&nodes, "trainer", "Running")?;
    assert_eq!(visible(&nodes, "trainer")?, BTreeSet::from(wanted));
    let uses = reported_uses(&nodes, "node-2", "trainer").await?;
    let devices: Vec<&str> = uses.iter().map(|entry| entry.device.as_str()).collect();
    assert_eq!(devices, ["gpu-1", "gpu-4"], "{uses:#?}");
    Ok(())
}
