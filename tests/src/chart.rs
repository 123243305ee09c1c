//! The Helm chart, as the real helm renders and installs it.

use crate::{ControlPlane, Ended, Program, SYSTEM, programs_of, root};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

/// Time for one call of helm, on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);
/// Name of the release in tests.
pub const RELEASE: &str = "switchyard";

/// The program, built if need be.
///
/// # Panics
/// It does not build.
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

/// Runs helm without a cluster, in the folder of the chart.
pub fn run_helm(arguments: &[&str]) -> Ended {
    Program::new(helm(), &chart(), arguments)
        .env("HOME", "/nonexistent")
        .env("KUBECONFIG", "/nonexistent")
        .run(PATIENCE)
}

/// `helm template` of the chart with more arguments, such as `--set` and `--values`.
///
/// # Errors
/// helm refuses; its words are in the error.
pub fn render(arguments: &[&str]) -> Result<String> {
    let all = [&["template", RELEASE, ".", "--namespace", SYSTEM][..], arguments].concat();
    let ended = run_helm(&all);
    ensure!(ended.code == Some(0), "{}", ended.stderr.trim());
    Ok(ended.stdout)
}

/// The objects of a rendering.
///
/// # Errors
/// It is no YAML.
pub fn objects(rendering: &str) -> Result<Vec<Value>> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(rendering).context("a rendering that is no YAML")?;
    Ok(documents.into_iter().filter(|document| !document.is_null()).collect())
}

/// What a rendering tells the controller of the admission policies.
pub fn policy_arguments(rendering: &[Value]) -> Vec<String> {
    let deployment = rendering.iter().find(|object| object["kind"] == "Deployment");
    let arguments = deployment.map(|object| &object["spec"]["template"]["spec"]["containers"][0]["args"]);
    let all = arguments.and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
    all.filter(|argument| argument.starts_with("--admission-policy=")).map(str::to_string).collect()
}

impl ControlPlane {
    /// Runs helm as administrator of this cluster.
    pub fn helm(&self, arguments: &[&str]) -> Ended {
        let home = self.folder().display().to_string();
        let config = self.kubeconfig("admin").display().to_string();
        Program::new(helm(), &chart(), arguments).env("KUBECONFIG", &config).env("HOME", &home).run(PATIENCE)
    }

    /// A kubeconfig of the account that the chart gives the controller.
    ///
    /// # Errors
    /// There is no such account.
    pub fn controller_kubeconfig(&self) -> Result<PathBuf> {
        let token = self.kubectl(&["create", "token", "switchyard-controller", "-n", SYSTEM]);
        ensure!(token.code == Some(0), "{}", token.stderr);
        let admin = std::fs::read_to_string(self.kubeconfig("admin"))?;
        let path = self.folder().join("chart.kubeconfig");
        std::fs::write(&path, admin.replace("token-admin", token.stdout.trim()))?;
        Ok(path)
    }

    /// Applies what the chart renders with these arguments of helm, but for the CRDs and for pods of the controller: tests start their own.
    ///
    /// # Errors
    /// The chart does not render, or the API server takes something not.
    pub fn apply_chart(&self, arguments: &[&str]) -> Result<()> {
        let text = render(&[&["--set", "crds.enabled=false,controller.replicas=0"], arguments].concat())?;
        for (arguments, input) in [(&["create", "namespace", SYSTEM][..], ""), (&["apply", "-f", "-"], &text)] {
            let ended = self.kubectl_with(arguments, input);
            ensure!(ended.code == Some(0), "kubectl {arguments:?}: {}", ended.stderr);
        }
        Ok(())
    }
}
