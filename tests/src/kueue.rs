//! Runs a real Kueue, built by `cargo xtask programs kueue`, against a control plane on this
//! machine.
//!
//! Only its pod integration is enabled. Its webhooks are served on loopback. Files that its pod
//! would mount under `/etc/kueue` are provided in a mount namespace, which requires root.

use crate::ControlPlane;
use crate::TIMEOUT;
use crate::control_plane::{Daemon, self_signed};
use crate::ports::free_port;
use anyhow::{Context, Result, ensure};
use k8s_openapi::ByteString;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// Installs Kueue's CRDs and webhooks, starts it, and waits until it accepts pods. `settings` are
/// merged into its configuration.
///
/// # Errors
/// A file is missing from the folder, or Kueue does not become ready. The error contains the end of
/// its log.
pub async fn start(plane: &ControlPlane, folder: &Path, settings: Value) -> Result<Daemon> {
    let own = plane.folder().join("kueue");
    let certificates = own.join("etc/kueue/metrics/certs");
    fs::create_dir_all(&certificates)?;
    let (certificate, key) = self_signed()?;
    fs::write(certificates.join("tls.crt"), &certificate)?;
    fs::write(certificates.join("tls.key"), key)?;
    let [webhooks, health] = [free_port()?, free_port()?];
    let mut config = json!({
        "apiVersion": "config.kueue.x-k8s.io/v1beta2", "kind": "Configuration", "namespace": "kueue-system",
        "health": {"healthProbeBindAddress": format!("127.0.0.1:{health}")}, "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": webhooks, "certDir": "/etc/kueue/metrics/certs"},
        "leaderElection": {"leaderElect": false}, "internalCertManagement": {"enable": false},
        "integrations": {"frameworks": ["pod"]}, "featureGates": {"VisibilityOnDemand": false}, "clientConnection": {"qps": 300, "burst": 500},
        "controller": {"groupKindConcurrency": {"Pod": 5, "Workload.kueue.x-k8s.io": 10, "ClusterQueue.kueue.x-k8s.io": 5}},
    });
    crate::merge(&mut config, settings);
    fs::write(own.join("config.json"), config.to_string())?;
    let kubectl = |arguments: &[&str], input: &str| {
        let ended = plane.kubectl_with(arguments, input);
        ensure!(ended.code == Some(0), "kubectl {}: {}", arguments.join(" "), ended.stderr);
        Ok(())
    };
    let crds = folder.join("data/crd/bases").display().to_string();
    kubectl(&["apply", "--server-side", "-f", &crds], "")?;
    kubectl(&["wait", "--for=condition=Established", "--timeout=600s", "crd", "--all"], "")?;
    kubectl(&["create", "namespace", "kueue-system"], "")?;
    // Kueue sees this machine's /etc, with its certificates added.
    let script = r#"cp -a /etc/. "$0/etc/" && mount --bind "$0/etc" /etc && exec "$@""#;
    let manager = folder.join("kueue").display().to_string();
    let config = format!("--config={}", own.join("config.json").display());
    let arguments =
        ["--mount", "--", "sh", "-c", script, &own.display().to_string(), &manager, &config].map(String::from);
    let environment = [("KUBECONFIG", plane.kubeconfig("admin").display().to_string())];
    let mut kueue = Daemon::start(Path::new("unshare"), &arguments, &environment, &plane.folder().join("kueue.log"))?;
    let address = ([127, 0, 0, 1], health).into();
    let is_ready = || Ok(crate::page(address, "/readyz").is_some_and(|page| page.starts_with("HTTP/1.1 200")));
    kueue.until("ready", TIMEOUT, is_ready)?;
    let manifests = folder.join("data/webhook/manifests.yaml");
    let text = fs::read_to_string(&manifests).with_context(|| manifests.display().to_string())?;
    let configurations: Vec<Value> = serde_saphyr::from_multiple(&text)?;
    for mut configuration in configurations {
        on_loopback(&mut configuration, webhooks, &certificate);
        kubectl(&["apply", "--server-side", "-f", "-"], &configuration.to_string())?;
    }
    Ok(kueue)
}

/// Returns the version that Kueue logs at startup.
///
/// # Errors
/// The log has no version.
pub fn version(kueue: &Daemon) -> Result<String> {
    let log = fs::read_to_string(&kueue.log)?;
    let after = log.split(r#""gitVersion":""#).nth(1).and_then(|rest| rest.split('"').next());
    Ok(after.context("no gitVersion in Kueue's log")?.into())
}

/// Keeps the webhooks for pods and for Kueue's own kinds, and redirects them to this loopback port.
fn on_loopback(configuration: &mut Value, port: u16, authority: &str) {
    let Some(webhooks) = configuration["webhooks"].as_array_mut() else { return };
    webhooks.retain(|webhook| {
        let rule = &webhook["rules"][0];
        rule["apiGroups"][0] == "kueue.x-k8s.io" || rule["resources"][0] == "pods"
    });
    for webhook in webhooks {
        let path = webhook["clientConfig"]["service"]["path"].as_str().unwrap_or_default();
        webhook["clientConfig"] = json!({"url": format!("https://127.0.0.1:{port}{path}"), "caBundle": ByteString(authority.as_bytes().to_vec())});
    }
}
