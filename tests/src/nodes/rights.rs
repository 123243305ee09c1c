//! Checks whether this machine can run real nodes.

use super::{cgroups, settings};
use anyhow::Result;
use std::path::Path;
use std::process::{Command, Stdio};

/// Distribution programs that nodes need, in addition to the CNI plugins.
const TOOLS: [&str; 9] = ["busybox", "ip", "iptables", "mount", "nsenter", "runc", "setpriv", "tc", "unshare"];

/// Describes a missing requirement for real nodes as a sentence; `None` if all are met.
///
/// # Errors
/// The machine cannot be inspected.
pub fn missing() -> Result<Option<String>> {
    if !rustix::process::geteuid().is_root() {
        return Ok(Some("real nodes need root to create namespaces, mounts and cgroups".into()));
    }
    let search = std::env::var_os("PATH").unwrap_or_default();
    let is_absent = |program: &&&str| !std::env::split_paths(&search).any(|folder| folder.join(program).is_file());
    let absent: Vec<&str> = TOOLS.iter().filter(is_absent).copied().collect();
    if !absent.is_empty() {
        return Ok(Some(format!(
            "programs are missing: {}; `cargo xtask cluster up --nodes 2` installs them",
            absent.join(", ")
        )));
    }
    if !Path::new(settings::CNI).join("ptp").is_file() {
        return Ok(Some(format!("no CNI plug-ins in {} (package containernetworking-plugins)", settings::CNI)));
    }
    let mut unshare = Command::new("unshare");
    let output =
        unshare.args(["--mount", "--net", "--uts", "--pid", "--fork", "true"]).stdin(Stdio::null()).output()?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        return Ok(Some(format!("this process cannot create namespaces: {}", stderr.trim_end())));
    }
    // Probe with a real cgroup: what the machine refuses here it would refuse later as well.
    let probe = format!("switchyard-nodes-probe-{}", std::process::id());
    let made = if cgroups::hierarchies()?.is_empty() {
        Err(anyhow::anyhow!("none is mounted"))
    } else {
        cgroups::make(&probe)
    };
    let removed = cgroups::remove(&probe, std::time::Duration::from_secs(5));
    if let Err(error) = made.and(removed) {
        return Ok(Some(format!("this process cannot create cgroups: {error:#}")));
    }
    Ok(None)
}
