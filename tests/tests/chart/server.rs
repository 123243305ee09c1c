//! Validates every object of every values set with a dry run on a real API server; also checks Pod
//! Security.

use crate::chart::{MONITORING, files, installed};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::sync::OnceLock;
use switchyard_tests::chart::{RELEASE, objects, render};
use switchyard_tests::{ControlPlane, Options, SYSTEM, TIMEOUT, programs_of, refusal, until};

/// Arguments of a dry-run server-side apply.
const LOOK: [&str; 6] =
    ["apply", "--server-side", "--dry-run=server", "--validate=strict", "--field-manager=chart", "-f"];

/// A control plane for dry runs, with the Prometheus operator's CRDs and the namespaces of the
/// sets.
fn plane() -> &'static ControlPlane {
    static PLANE: OnceLock<ControlPlane> = OnceLock::new();
    PLANE.get_or_init(|| start().unwrap_or_else(|error| panic!("{error:#}")))
}

fn start() -> Result<ControlPlane> {
    let plane = ControlPlane::start(&Options::default())?;
    let crds = programs_of(&["prometheus-operator"])?.remove(0).join("data");
    for kind in ["servicemonitors", "podmonitors", "prometheusrules"] {
        let file = crds.join(format!("monitoring.coreos.com_{kind}.yaml")).display().to_string();
        must(&plane, &["apply", "--server-side", "-f", &file], "")?;
    }
    must(&plane, &["wait", "--for=condition=Established", "crd", "--all", "--timeout=600s"], "")?;
    for namespace in [SYSTEM, "training-system", "research", "teaching"] {
        must(&plane, &["create", "namespace", namespace], "")?;
    }
    Ok(plane)
}

pub(crate) fn must(plane: &ControlPlane, arguments: &[&str], input: &str) -> Result<String> {
    let ended = plane.kubectl_with(arguments, input);
    ensure!(ended.code == Some(0), "kubectl {arguments:?}: {}", ended.stderr);
    Ok(ended.stdout)
}

/// Submits each distinct object once and checks the reply.
#[test]
fn the_server_accepts_every_object_of_every_set() -> Result<()> {
    let plane = plane();
    for (name, path, _) in files("values") {
        let arguments = [&["--values", path.to_str().unwrap()][..], &MONITORING].concat();
        let text = render(&arguments)?;
        let expected = objects(&text)?.len();
        let output = must(plane, &[&LOOK[..], &["-"]].concat(), &text).with_context(|| name.clone())?;
        let applied = output.lines().filter(|line| line.ends_with("serverside-applied (server dry run)")).count();
        assert_eq!(applied, expected, "{name}: {output}");
    }
    // A field unknown to the schema, in a core object and in a monitoring CRD.
    for (kind, spec) in [
        (json!({"apiVersion": "apps/v1", "kind": "Deployment"}), json!({"replica": 2})),
        (
            json!({"apiVersion": "monitoring.coreos.com/v1", "kind": "ServiceMonitor"}),
            json!({"selector": {}, "endpoint": []}),
        ),
    ] {
        let mut faulty = kind;
        faulty["metadata"] = json!({"name": "faulty", "namespace": SYSTEM});
        faulty["spec"] = spec;
        let ended = plane.kubectl_with(&[&LOOK[..], &["-"]].concat(), &faulty.to_string());
        assert_ne!(ended.code, Some(0), "{faulty}");
    }
    Ok(())
}

/// The controller fits the `restricted` level. Agents need `privileged` because they use host
/// folders and the host network.
#[tokio::test]
async fn pods_fit_the_pod_security_level_that_is_documented() -> Result<()> {
    let plane = plane();
    let client = plane.client().await?;
    let levels = ["restricted", "baseline", "privileged"];
    for level in levels {
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": level,
            "labels": {"pod-security.kubernetes.io/enforce": level}}});
        must(plane, &["apply", "-f", "-"], &namespace.to_string())?;
        // Normally created by the controller manager, which does not run here.
        must(plane, &["create", "serviceaccount", "pods", "-n", level], "")?;
    }
    for (name, path, _) in files("values") {
        let arguments =
            [&["--set", "crds.enabled=false", "--values", path.to_str().unwrap()][..], &MONITORING].concat();
        for object in objects(&render(&arguments)?)? {
            let fits: &[&str] = match object["kind"].as_str() {
                Some("Deployment") => &levels,
                Some("DaemonSet") => &["privileged"],
                _ => continue,
            };
            for level in levels {
                let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "namespace": level},
                    "spec": object["spec"]["template"]["spec"]});
                pod["spec"]["serviceAccountName"] = "pods".into();
                // This server may lack the classes.
                for field in ["runtimeClassName", "priorityClassName"] {
                    pod["spec"].as_object_mut().unwrap().remove(field);
                }
                let answer = refusal(&client, None, level, &pod).await?;
                let refused = answer.as_ref().is_some_and(|message| message.contains("violates PodSecurity"));
                assert_eq!(!refused, fits.contains(&level), "{name} {} in {level}: {answer:?}", object["kind"]);
                assert!(refused || answer.is_none(), "{name} {}: {answer:?}", object["kind"]);
            }
        }
    }
    Ok(())
}

/// With its own FlowSchema, the controller does not queue behind other service accounts.
#[test]
fn the_controller_has_its_own_flow_schema() -> Result<()> {
    let plane = installed();
    let schema = get(plane, &["flowschema", "switchyard-controller"])?;
    let uid = schema["metadata"]["uid"].as_str().context("no UID")?.to_string();
    // Each response names its flow in a header. A new FlowSchema takes effect with a delay.
    let flow = |user: &str| plane.kubectl(&["--as", user, "get", "pods", "--all-namespaces", "-v=8"]).stderr;
    let controller = format!("system:serviceaccount:{SYSTEM}:switchyard-controller");
    until("in the controller's flow", TIMEOUT, || Ok(flow(&controller).contains(&uid)))
        .with_context(|| flow(&controller))?;
    ensure!(
        !flow(&format!("system:serviceaccount:{SYSTEM}:another")).contains(&uid),
        "the flow schema also applies to another account"
    );
    Ok(())
}

/// The text that helm prints after an installation.
#[test]
fn the_notes_count_the_agent_nodes() -> Result<()> {
    let plane = plane();
    for (name, labels) in [
        ("a", json!({"kubernetes.io/os": "linux", "feature.node.kubernetes.io/pci-10de.present": "true"})),
        ("b", json!({"kubernetes.io/os": "linux"})),
        ("c", json!({"kubernetes.io/os": "windows"})),
    ] {
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}});
        must(plane, &["create", "-f", "-"], &node.to_string())?;
    }
    let notes = |sets: &str| -> Result<String> {
        let all =
            ["install", RELEASE, ".", "--namespace", SYSTEM, "--create-namespace", "--dry-run=server", "--set", sets];
        let ended = plane.helm(&all);
        ensure!(ended.code == Some(0), "{}", ended.stderr);
        Ok(ended.stdout.split("NOTES:").nth(1).unwrap_or_default().to_string())
    };
    for (sets, words) in [
        (
            "nodeAgent.enabled=true",
            &["the selector finds 2 of 3 nodes", "rollout status deployment/switchyard-controller"][..],
        ),
        (
            "nodeAgent.gpuNodesOnly=true",
            &["the selector finds 1 of 3 nodes", "feature.node.kubernetes.io/pci-10de.present"],
        ),
        ("nodeAgent.nodeSelector.pool=gpu", &["the selector finds 0 of 3 nodes", "pool=gpu"]),
        ("crds.keep=false", &["crds.keep is off: `helm uninstall` deletes every TrainJob"]),
        ("admissionPolicy.enabled=false", &["every user who can create TrainJobs can do everything that pods can do"]),
    ] {
        let text = notes(sets)?;
        for word in words {
            assert!(text.contains(word), "{sets}: the notes lack `{word}`:\n{text}");
        }
        // Regression: a selector ended with a blank, and a paragraph followed a command without an
        // empty line.
        assert!(text.lines().all(|line| line.trim_end() == line), "{sets}: {text:?}");
        let is_command = |line: &str| line.starts_with("  ");
        let mut pairs = text.trim().lines().zip(text.trim().lines().skip(1));
        assert!(pairs.all(|(line, next)| !is_command(line) || next.is_empty() || is_command(next)), "{sets}:\n{text}");
        assert!(!text.contains("\n\n\n") && !text.contains("Wait until"), "{sets}:\n{text}");
    }
    let off = notes("nodeAgent.enabled=false")?;
    assert!(!off.contains("Node agents"), "{off}");
    Ok(())
}

/// Fetches objects as JSON.
pub fn get(plane: &ControlPlane, arguments: &[&str]) -> Result<Value> {
    Ok(serde_json::from_str(&must(plane, &[&["get"], arguments, &["-o", "json"]].concat(), "")?)?)
}
