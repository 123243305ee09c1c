//! The chart's DaemonSet.

use super::*;

/// Limits on the agent pod's permissions.
#[tokio::test(flavor = "multi_thread")]
async fn the_daemon_set_is_accepted_with_minimal_rights() -> Result<()> {
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
    assert!(container["resources"]["limits"]["cpu"].is_null(), "a limit would be reported as the machine's");
    // Every flag in the manifest must exist in the program.
    let help = Program::new(agent_program(), plane().folder(), ["--help"]).run(TIMEOUT).stdout;
    for argument in container["args"].as_array().context("no arguments")? {
        let flag = argument.as_str().unwrap_or_default().split('=').next().unwrap_or_default();
        assert!(help.contains(&format!("{flag} <")), "the program lacks the flag {flag}\n{help}");
    }
    Ok(())
}
