//! The Helm chart, rendered and installed by the real helm.

use crate::{ControlPlane, Ended, Program, SYSTEM, TIMEOUT, programs_of, root};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Release name in tests.
pub const RELEASE: &str = "switchyard";

/// Returns the path of helm, building it if necessary.
///
/// # Panics
/// The build failed.
pub fn helm() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let folders = programs_of(&["helm"]).unwrap_or_else(|error| panic!("{error:#}"));
        folders[0].join("helm")
    })
}

/// Folder of the chart.
pub fn chart() -> PathBuf {
    root().join("charts/switchyard")
}

/// Runs helm without a cluster, in the chart's folder.
pub fn run_helm(arguments: &[&str]) -> Ended {
    Program::new(helm(), &chart(), arguments).env("HOME", "/nonexistent").env("KUBECONFIG", "/nonexistent").run(TIMEOUT)
}

/// Runs `helm template` on the chart with additional arguments, such as `--set` and `--values`.
///
/// # Errors
/// helm fails; the error contains its message.
pub fn render(arguments: &[&str]) -> Result<String> {
    let all = [&["template", RELEASE, ".", "--namespace", SYSTEM][..], arguments].concat();
    let ended = run_helm(&all);
    ensure!(ended.code == Some(0), "{}", ended.stderr.trim());
    Ok(ended.stdout)
}

/// Parses the objects of a rendering.
///
/// # Errors
/// The rendering is not valid YAML.
pub fn objects(rendering: &str) -> Result<Vec<Value>> {
    let documents: Vec<Value> =
        serde_saphyr::from_multiple(rendering).context("the rendered chart is not valid YAML")?;
    Ok(documents.into_iter().filter(|document| !document.is_null()).collect())
}

/// Returns the `--admission-policy` arguments that a rendering passes to the controller.
pub fn policy_arguments(rendering: &[Value]) -> Vec<String> {
    let deployment = rendering.iter().find(|object| object["kind"] == "Deployment");
    let arguments = deployment.map(|object| &object["spec"]["template"]["spec"]["containers"][0]["args"]);
    let all = arguments.and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
    all.filter(|argument| argument.starts_with("--admission-policy=")).map(str::to_string).collect()
}

impl ControlPlane {
    /// Runs helm as the cluster's administrator.
    pub fn helm(&self, arguments: &[&str]) -> Ended {
        let home = self.folder().display().to_string();
        let config = self.kubeconfig("admin").display().to_string();
        Program::new(helm(), &chart(), arguments).env("KUBECONFIG", &config).env("HOME", &home).run(TIMEOUT)
    }

    /// Writes a kubeconfig for the controller's service account from the chart.
    ///
    /// # Errors
    /// The service account does not exist.
    pub fn controller_kubeconfig(&self) -> Result<PathBuf> {
        self.account_kubeconfig(SYSTEM, "switchyard-controller")
    }

    /// Writes a kubeconfig for a service account.
    ///
    /// # Errors
    /// The service account does not exist.
    pub fn account_kubeconfig(&self, namespace: &str, account: &str) -> Result<PathBuf> {
        let token = self.kubectl(&["create", "token", account, "-n", namespace]);
        ensure!(token.code == Some(0), "{}", token.stderr);
        let admin = std::fs::read_to_string(self.kubeconfig("admin"))?;
        // Replaced as a whole, because another test's controller of this account can be reading it.
        let mut file = tempfile::NamedTempFile::new_in(self.folder())?;
        file.write_all(admin.replace("token-admin", token.stdout.trim()).as_bytes())?;
        let path = self.folder().join(format!("{account}.kubeconfig"));
        file.persist(&path)?;
        Ok(path)
    }

    /// Applies the chart, rendered with these helm arguments, without the CRDs and without
    /// controller pods, because tests start their own.
    ///
    /// # Errors
    /// The chart does not render, or the API server rejects an object.
    pub fn apply_chart(&self, arguments: &[&str]) -> Result<()> {
        let text = render(&[&["--set", "crds.enabled=false,controller.replicas=0"], arguments].concat())?;
        for (arguments, input) in [(&["create", "namespace", SYSTEM][..], ""), (&["apply", "-f", "-"], &text)] {
            let ended = self.kubectl_with(arguments, input);
            ensure!(ended.code == Some(0), "kubectl {arguments:?}: {}", ended.stderr);
        }
        Ok(())
    }
}
