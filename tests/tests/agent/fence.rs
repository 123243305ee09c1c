//! What an agent may do: its rights, and the policy that lets it write about its own node only.

use super::*;
use switchyard_tests::{Ended, agent_token};

/// Verb, resource (with `.group` and `/subresource`), and whether an agent may.
const RIGHTS: [(&str, &str, bool); 16] = [
    ("get", "gputopologies.training.switchyard.dev", true),
    ("create", "gputopologies.training.switchyard.dev", true),
    ("patch", "gputopologies.training.switchyard.dev", true),
    ("patch", "gputopologies.training.switchyard.dev/status", true),
    ("get", "nodes", true),
    ("list", "gputopologies.training.switchyard.dev", false),
    ("update", "gputopologies.training.switchyard.dev", false),
    ("delete", "gputopologies.training.switchyard.dev", false),
    ("update", "gputopologies.training.switchyard.dev/status", false),
    ("get", "trainjobs.training.switchyard.dev", false),
    ("list", "nodes", false),
    ("patch", "nodes", false),
    ("get", "nodes/proxy", false),
    ("get", "pods", false),
    ("get", "secrets", false),
    ("create", "serviceaccounts/token", false),
];

#[test]
fn an_agent_has_the_rights_it_needs_and_no_others() {
    let mut faults = Vec::new();
    for (verb, resource, may) in RIGHTS {
        let (kind, sub) = resource.split_once('/').unwrap_or((resource, ""));
        let asked = ["auth", "can-i", verb, kind, "--subresource", sub, "--as", USER, "-n", SYSTEM];
        let answer = plane().kubectl(&asked).stdout;
        if (answer.trim() == "yes") != may {
            faults.push(format!("{verb} {resource}: {}", answer.trim()));
        }
    }
    assert!(faults.is_empty(), "{faults:?}");
}

/// Applies a GPUTopology or its status with a token.
fn apply(token: &str, node: &str, subresource: Option<&str>) -> Ended {
    let mut object = json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "GPUTopology", "metadata": {"name": node}, "spec": {},
    });
    let mut arguments = vec!["apply", "--server-side", "--field-manager", "test", "-f", "-", "--token", token];
    if let Some(subresource) = subresource {
        object["status"] = json!({"gpuCount": 8});
        arguments.extend(["--subresource", subresource]);
    }
    // The administrator's kubeconfig has a token of its own.
    let server = plane().url();
    let authority = plane().folder().join("ca.crt").display().to_string();
    arguments.extend(["--kubeconfig", "/dev/null", "--server", &server, "--certificate-authority", &authority]);
    plane().kubectl_with(&arguments, &object.to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_writes_about_its_own_node_only() -> Result<()> {
    let own = Scene::new("agent-own").await?;
    let other = Scene::new("agent-other").await?;
    let topology: GPUTopology = serde_json::from_value(json!({"metadata": {"name": other.node}, "spec": {}}))?;
    other.api().create(&Default::default(), &topology).await?;
    let bound = agent_token(own.plane, Some(own.node))?;
    let unbound = agent_token(own.plane, None)?;

    // An API server takes a policy into account a moment after it has been made.
    let give_up = Instant::now() + PATIENCE;
    while apply(&bound, other.node, None).code == Some(0) {
        ensure!(Instant::now() < give_up, "another node's object was written");
        std::thread::sleep(Duration::from_millis(100));
    }
    for (token, subresource, expected) in [
        (&bound, None, "metadata.name: got agent-other; expected agent-own, the node of this agent"),
        (&bound, Some("status"), "metadata.name: got agent-other; expected agent-own, the node of this agent"),
        (&unbound, None, "metadata.name: got agent-other; expected a token that names a node"),
        (&unbound, Some("status"), "metadata.name: got agent-other; expected a token that names a node"),
    ] {
        let ended = apply(token, other.node, subresource);
        assert_eq!(ended.code, Some(1), "{subresource:?}: {}", ended.stdout);
        assert!(ended.stderr.contains(expected), "{subresource:?}: {}", ended.stderr);
    }
    for subresource in [None, Some("status")] {
        let ended = apply(&bound, own.node, subresource);
        assert_eq!(ended.code, Some(0), "{subresource:?}: {}", ended.stderr);
    }
    Ok(())
}

/// What the pod of the agent is allowed to be.
#[tokio::test(flavor = "multi_thread")]
async fn the_daemon_set_is_taken_and_asks_for_nothing_more() -> Result<()> {
    let found = plane().kubectl(&["get", "daemonset", "switchyard-node-agent", "-n", SYSTEM, "-o", "json"]);
    let set: Value = serde_json::from_str(&found.stdout).with_context(|| found.stderr)?;
    let pod = &set["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    assert_eq!(
        container["securityContext"],
        json!({
            "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}, "privileged": false,
            "readOnlyRootFilesystem": true, "runAsUser": 0,
        })
    );
    let mounts = container["volumeMounts"].as_array().context("no mounts")?;
    assert!(mounts.iter().all(|mount| mount["readOnly"] == true), "{mounts:?}");
    assert!(container["resources"]["limits"]["cpu"].is_null(), "a limit would be told as one of the machine");
    // Every flag is one of the program's.
    let help = Program::new(agent_program(), plane().folder(), ["--help"]).run(PATIENCE).stdout;
    for argument in container["args"].as_array().context("no arguments")? {
        let flag = argument.as_str().unwrap_or_default().split('=').next().unwrap_or_default();
        assert!(help.contains(&format!("{flag} <")), "{flag} is no flag of\n{help}");
    }
    Ok(())
}
