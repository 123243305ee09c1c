//! End-to-end tests on real kubelets: images, `helm install`, agents, `kubectl apply`, a model that
//! trains, exact GPUs, access control, and component failures.
//!
//! Needs everything that `tests/nodes.rs` needs, and the archives of `cargo xtask images`.

mod claims;
mod faults;
mod first_job;
mod gpu_nodes;
mod isolation;
mod leftovers;
mod memory;
mod preemption;
mod random_jobs;
mod third_party;
mod times;
mod worth;

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use switchyard_plan::resources::bytes_per_second;
use switchyard_tests::chart::helm;
use switchyard_tests::nodes::{Nodes, NodesOptions, missing};
use switchyard_tests::{Ended, Program, TIMEOUT, found, programs_of, root, target};

/// Real nodes with this tree's images, and the programs that a user has on the PATH.
pub(crate) struct Cluster {
    pub nodes: Nodes,
    path: String,
    /// Working folder for commands that write files.
    pub folder: tempfile::TempDir,
}

impl Cluster {
    pub fn start(count: u8) -> Result<Cluster> {
        if let Some(what) = missing()? {
            bail!("{what}");
        }
        let images = target().join("images");
        let nodes =
            Nodes::start(&NodesOptions::new(count), |part, time| println!("{part}: {:.1} s", time.as_secs_f64()))?;
        let begin = Instant::now();
        for name in ["switchyard-controller", "switchyard-node-agent", "switchyard-worker"] {
            let archive = images.join(format!("{name}.tar"));
            ensure!(archive.is_file(), "no {}: run `cargo xtask images`", archive.display());
            nodes.import(&archive)?;
        }
        println!("images imported: {:.1} s", begin.elapsed().as_secs_f64());
        let folder = tempfile::tempdir()?;
        let programs = folder.path().join("bin");
        fs::create_dir(&programs)?;
        let kubectl = programs_of(&["kubernetes"])?[0].join("kubectl");
        let switchyard = switchyard_tests::programs().join("switchyard");
        for (name, program) in [
            ("kubectl", kubectl.as_path()),
            ("helm", helm()),
            ("switchyard", &switchyard),
            ("kubectl-switchyard", &switchyard),
        ] {
            ensure!(program.is_file(), "no {}: run `cargo xtask images`", program.display());
            symlink(program, programs.join(name))?;
        }
        let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap_or_default());
        Ok(Cluster { nodes, path, folder })
    }

    /// Runs a user's command line in this folder.
    fn line(&self, folder: &Path, line: &str) -> Ended {
        let config = self.nodes.plane.kubeconfig("admin").display().to_string();
        let home = self.folder.path().display().to_string();
        let shell = Program::new(Path::new("/bin/sh"), folder, ["-euc", line]);
        shell.env("PATH", &self.path).env("KUBECONFIG", &config).env("HOME", &home).run(TIMEOUT)
    }

    /// Runs a command line that must succeed in the repository root; returns its output.
    pub fn sh(&self, line: &str) -> Result<String> {
        let ended = self.line(root(), line);
        ensure!(ended.code == Some(0), "{line}: exit {:?}\n{}{}", ended.code, ended.stdout, ended.stderr);
        println!("{:5.1} s  {line}", ended.time.as_secs_f64());
        Ok(ended.stdout)
    }

    /// Installs the chart as docs/install.md describes, and waits for its pods.
    pub fn install(&self) -> Result<()> {
        self.install_with("")
    }

    /// The same with additional `helm install` arguments.
    pub fn install_with(&self, arguments: &str) -> Result<()> {
        self.sh("kubectl create namespace switchyard-system")?;
        self.sh("kubectl label namespace switchyard-system pod-security.kubernetes.io/enforce=privileged")?;
        self.sh(&format!(
            "helm install switchyard charts/switchyard --namespace switchyard-system --wait {arguments}"
        ))?;
        Ok(())
    }

    /// Creates a namespace with Pod Security `restricted`.
    pub fn team(&self, name: &str) -> Result<()> {
        self.sh(&format!("kubectl create namespace {name}"))?;
        self.sh(&format!("kubectl label namespace {name} pod-security.kubernetes.io/enforce=restricted"))?;
        Ok(())
    }

    pub fn apply(&self, namespace: &str, object: &Value) -> Result<()> {
        let ended = self.nodes.plane.kubectl_with(&["--namespace", namespace, "apply", "-f", "-"], &object.to_string());
        ensure!(ended.code == Some(0), "{}", ended.stderr);
        Ok(())
    }

    /// Gets an object; `None` if not found.
    pub fn get(&self, namespace: &str, kind: &str, name: &str) -> Result<Option<Value>> {
        let ended = self.nodes.plane.kubectl(&["--namespace", namespace, "get", kind, name, "-o", "json"]);
        match ended.code {
            Some(0) => Ok(Some(serde_json::from_str(&ended.stdout)?)),
            _ if ended.stderr.contains("NotFound") => Ok(None),
            _ => bail!("{}", ended.stderr),
        }
    }

    pub fn job(&self, namespace: &str, name: &str) -> Result<Value> {
        self.get(namespace, JOBS, name)?.with_context(|| format!("no TrainJob {namespace}/{name}"))
    }

    /// Waits until a job satisfies `is`, and returns it.
    pub fn wait_job(&self, namespace: &str, name: &str, what: &str, is: impl Fn(&Value) -> bool) -> Result<Value> {
        let found = found(&format!("{what}: {name}"), TIMEOUT, || Ok(Some(self.job(namespace, name)?).filter(&is)));
        found.with_context(|| {
            let pods = self.nodes.plane.kubectl(&["--namespace", namespace, "describe", "pods"]).stdout;
            format!("{:#}\n{pods}", self.job(namespace, name).unwrap_or_default()["status"])
        })
    }

    /// Suspends or resumes a job of the team; returns whether it still existed.
    pub fn suspend(&self, name: &str, value: bool) -> Result<bool> {
        let patch = json!({"spec": {"suspend": value}}).to_string();
        let arguments = ["--namespace", TEAM, "patch", JOBS, name, "--type", "merge", "--patch", &patch];
        let ended = self.nodes.plane.kubectl(&arguments);
        ensure!(ended.code == Some(0) || ended.stderr.contains("NotFound"), "{}", ended.stderr);
        Ok(ended.code == Some(0))
    }

    pub fn no_pods(&self) -> Result<()> {
        let pods = format!("kubectl --namespace {TEAM} get pods -o name");
        self.until("the pods are gone", || Ok(self.sh(&pods)?.is_empty())).map(drop)
    }

    /// Waits until `is` holds; returns the elapsed time.
    pub fn until(&self, what: &str, is: impl Fn() -> Result<bool>) -> Result<Duration> {
        let elapsed = switchyard_tests::until(what, TIMEOUT, is)?;
        println!("{:5.1} s  until {what}", elapsed.as_secs_f64());
        Ok(elapsed)
    }
}

/// The namespace of the training jobs.
pub(crate) const TEAM: &str = "team";
pub(crate) const JOBS: &str = "trainjobs.training.switchyard.dev";

/// The summary condition of a job.
fn summary(job: &Value) -> Option<&Value> {
    job["status"]["conditions"].as_array()?.iter().find(|condition| condition["type"] == "Succeeded")
}

/// The stage of a job.
pub(crate) fn stage(job: &Value) -> &str {
    summary(job).and_then(|summary| summary["reason"].as_str()).unwrap_or("-")
}

/// The message of the summary condition.
pub(crate) fn message(job: &Value) -> &str {
    summary(job).and_then(|summary| summary["message"].as_str()).unwrap_or_default()
}

/// Predicted bus bandwidth of a job, MB/s; `None` if its status has no prediction.
pub(crate) fn predicted(job: &Value) -> Result<Option<i64>> {
    let rate: Option<Quantity> = serde_json::from_value(job["status"]["placement"]["predictedBusBandwidth"].clone())?;
    rate.map(|rate| Ok((bytes_per_second(&rate).context("no rate")? / 1e6) as i64)).transpose()
}

/// Loads an example manifest.
pub(crate) fn example(name: &str) -> Result<Value> {
    let path: PathBuf = root().join("examples").join(name);
    Ok(serde_saphyr::from_str(&fs::read_to_string(path)?)?)
}
