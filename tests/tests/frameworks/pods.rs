//! Runs the planner's pods as local processes with the pods' command, environment and files. Each
//! pod name resolves to a loopback address.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Container, EnvVar, Pod};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use switchyard_crds::names::TRAINER;
use switchyard_plan::objects::{self, Defaults};
use switchyard_plan::validate;
use switchyard_tests::{Ended, Program, TIMEOUT};
use switchyard_worker_contract::pod::CONFIG_DIR;

const NAMESPACE: &str = "team";
const ATTEMPT: u32 = 1;

/// Parameters of a framework test.
pub struct Launch<'a> {
    pub framework: &'a str,
    pub nodes: u32,
    pub processes: Option<u32>,
    pub command: &'a [&'a str],
    pub env: &'a [(&'a str, &'a str)],
    /// Folder of the interpreter, first on the PATH.
    pub programs: &'a Path,
}

/// Runs the job; returns the output of each pod in node order. All pods must succeed.
pub fn run(launch: &Launch<'_>) -> Result<Vec<String>> {
    let mut trainer = json!({
        "framework": launch.framework, "image": "image", "numNodes": launch.nodes, "command": launch.command,
        "env": launch.env.iter().map(|(name, value)| json!({"name": name, "value": value})).collect::<Vec<_>>(),
    });
    if let Some(processes) = launch.processes {
        trainer["numProcPerNode"] = processes.into();
    }
    run_spec(&json!({"trainer": trainer}), launch.programs)
}

/// Runs the job with this spec; returns the output of each pod in node order. All pods must
/// succeed.
pub fn run_spec(spec: &Value, programs: &Path) -> Result<Vec<String>> {
    let folder = tempfile::Builder::new().prefix("switchyard-frameworks-").tempdir()?;
    let document = json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "job"}, "spec": spec,
    });
    let mut job = switchyard_crds::validate::train_job(&document).map_err(|faults| anyhow::anyhow!("{faults:?}"))?;
    job.metadata.namespace = Some(NAMESPACE.into());
    job.metadata.uid = Some("5d3f8a52-4a44-4d2a-9d0e-0123456789ab".into());
    let valid = validate(&job).map_err(|faults| anyhow::anyhow!("{faults:?}"))?;
    let config = folder.path().join("config");
    fs::create_dir(&config)?;
    let map = objects::config_map(&job, &valid, ATTEMPT);
    for (name, text) in map.iter().flat_map(|map| map.data.iter().flatten()) {
        fs::write(config.join(name), text)?;
    }
    let pods: Vec<Pod> =
        (0..valid.request.nodes).map(|rank| objects::pod(&job, &valid, &Defaults::default(), ATTEMPT, rank)).collect();
    let started: Result<Vec<_>> = pods.iter().map(|pod| Ok(program(pod, &pods, &config, programs)?.start())).collect();
    let ended: Vec<Ended> = started?.into_iter().map(|running| running.wait(TIMEOUT)).collect();
    for (rank, ended) in ended.iter().enumerate() {
        ensure!(ended.code == Some(0), "node {rank}: {:?}\n{}\n{}", ended.code, ended.stdout, ended.stderr);
    }
    Ok(ended.into_iter().map(|ended| ended.stdout).collect())
}

fn trainer(pod: &Pod) -> Option<&Container> {
    pod.spec.as_ref()?.containers.iter().find(|container| container.name == TRAINER)
}

fn name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

/// Address of a node.
fn address(rank: usize) -> String {
    format!("127.78.0.{}", rank + 1)
}

/// A pod as a local process.
fn program(pod: &Pod, all: &[Pod], config: &Path, programs: &Path) -> Result<Program> {
    let rank = all.iter().position(|other| name(other) == name(pod)).context("the pod is not in the list")?;
    let container = trainer(pod).context("no trainer")?;
    let resolved = |text: &str| {
        let names =
            all.iter().enumerate().map(|(rank, pod)| (format!("{}.job.{NAMESPACE}.svc", name(pod)), address(rank)));
        names.fold(text.to_owned(), |text, (name, address)| text.replace(&name, &address))
    };
    let mounted =
        |text: String| text.strip_prefix(CONFIG_DIR).map_or(text.clone(), |rest| format!("{}{rest}", config.display()));
    let mut env: BTreeMap<String, String> = BTreeMap::new();
    for entry in container.env.iter().flatten() {
        let value = mounted(resolved(&value_of(entry, rank, &env)?));
        env.insert(entry.name.clone(), value);
    }
    let own = config.with_file_name(format!("node-{rank}"));
    fs::create_dir(&own)?;
    let mut words: Vec<String> = container.command.iter().chain(&container.args).flatten().cloned().collect();
    let host = pod.spec.as_ref().and_then(|spec| spec.hostname.clone());
    if let Some(host) = host.filter(|_| env.keys().any(|name| name.starts_with("PRTE_"))) {
        words = with_host_name(&host, words);
    }
    let mut command = vec!["-i".to_owned(), format!("PATH={}:/usr/bin:/bin", programs.display())];
    command.extend([("HOME", &own), ("TMPDIR", &own)].map(|(name, folder)| format!("{name}={}", folder.display())));
    command.extend(env.iter().map(|(name, value)| format!("{name}={value}")));
    command.extend(words);
    Ok(Program::new(Path::new("/usr/bin/env"), &own, command))
}

/// Resolves a variable like a kubelet: references to earlier variables, and pod fields.
fn value_of(entry: &EnvVar, rank: usize, before: &BTreeMap<String, String>) -> Result<String> {
    if let Some(source) = &entry.value_from {
        let path = source.field_ref.as_ref().map(|field| field.field_path.as_str());
        ensure!(path == Some("status.podIP"), "{}: {path:?} is not supported here", entry.name);
        return Ok(address(rank));
    }
    let value = entry.value.clone().unwrap_or_default();
    Ok(before.iter().fold(value, |text, (name, known)| text.replace(&format!("$({name})"), known)))
}

/// Gives the process its pod's host name. Without privileges, this needs a user namespace in which
/// the user is root.
fn with_host_name(host: &str, words: Vec<String>) -> Vec<String> {
    let mut all: Vec<String> = vec!["unshare".into(), "--uts".into()];
    if !rustix::process::geteuid().is_root() {
        all.push("--map-root-user".into());
    }
    all.extend(["--", "sh", "-c", r#"hostname "$0" && exec "$@""#, host].map(str::to_owned));
    all.extend(words);
    all
}

/// Path of a script next to this file.
pub fn script(name: &str) -> String {
    switchyard_tests::root().join("tests/tests/frameworks").join(name).display().to_string()
}

/// Program folder of the Python interpreter that a variable names.
pub fn python(variable: &str) -> Result<PathBuf> {
    let path = std::env::var_os(variable).map(PathBuf::from);
    let path = path.with_context(|| format!("{variable} is not set: `cargo xtask test --frameworks` sets it"))?;
    Ok(path.parent().context("the interpreter has no parent folder")?.to_path_buf())
}

/// Parses a line of a test script into a map.
pub fn fields(line: &str) -> BTreeMap<String, String> {
    let pairs = line.split_whitespace().filter_map(|word| word.split_once('='));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// Version of a package.
pub fn version(programs: &Path, expression: &str) -> Result<Value> {
    let output = Command::new(programs.join("python3")).args(["-c", expression]).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?.trim().into())
}
