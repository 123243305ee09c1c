//! Runs docs/first-job-on-a-laptop.md command by command with checks in between, then the other
//! pages whose commands need real nodes.

use crate::e2e::{Cluster, JOBS, example, stage};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;
use switchyard_tests::documents::{Class, blocks, documents};
use switchyard_tests::{Program, programs, root};

/// The page that starts and ends with an empty cluster.
const PAGE: &str = "docs/first-job-on-a-laptop.md";

/// User commands from a page's blocks of this class.
fn commands(page: &str, class: &Class) -> Result<Vec<String>> {
    let blocks = blocks(page)?.into_iter().filter(|block| block.class().as_ref() == Ok(class));
    let all = blocks.flat_map(|block| block.commands()).filter(|command| !command.is_skipped());
    Ok(all.map(|command| command.line).collect())
}

#[test]
fn the_documented_steps_train_a_model_and_clean_up() -> Result<()> {
    let cluster = Cluster::start(2)?;
    first_job(&cluster)?;
    let mut others = Vec::new();
    for page in documents()?.into_iter().filter(|page| page != PAGE) {
        let lines = commands(&page, &Class::Cluster)?;
        if !lines.is_empty() {
            installed(&cluster, &page, &lines).with_context(|| page.clone())?;
            others.push(page);
        }
    }
    ensure!(others == ["charts/switchyard/README.md", "docs/install.md"], "{others:?}");
    Ok(())
}

/// Runs a page that installs Switchyard, then removes the installation for the next one.
fn installed(cluster: &Cluster, page: &str, lines: &[String]) -> Result<()> {
    for name in ["switchyard-controller", "switchyard-node-agent", "switchyard-worker"] {
        // The registry in the docs does not exist, so tag the images that the nodes already have.
        let name = format!("{name}:{}", env!("CARGO_PKG_VERSION"));
        cluster.nodes.tag(&format!("docker.io/library/{name}"), &format!("registry.example.com/{name}"))?;
    }
    for line in lines {
        cluster.sh(line)?;
        if line.starts_with("helm install") || line.starts_with("helm upgrade") {
            // With the images in place, the controller starts as documented.
            cluster
                .sh("kubectl -n switchyard-system rollout status deployment/switchyard-controller --timeout=600s")?;
            cluster.sh("kubectl -n switchyard-system rollout status daemonset/switchyard-node-agent --timeout=600s")?;
        }
    }
    let left = cluster.sh("helm list --namespace switchyard-system --short")?;
    if left.is_empty() {
        let crds = cluster.sh("kubectl get crds -o name")?;
        ensure!(!crds.contains(JOBS), "{page}: the CRDs are left: {crds}");
    } else {
        cluster.sh("helm uninstall switchyard --namespace switchyard-system --wait")?;
    }
    cluster.sh("kubectl delete namespace switchyard-system")?;
    Ok(())
}

/// Early losses must equal the single-machine losses, because the summation order does not matter
/// yet.
fn begins_alike(cluster: &str, standalone: &str) -> Result<()> {
    let loss_at = |log: &str, step: u64| {
        let event = events(log).find(|event| event["event"] == "progress" && event["step"] == step);
        event.and_then(|event| event["loss"].as_f64()).with_context(|| format!("no loss of step {step}"))
    };
    for step in [10, 20] {
        let (remote, local) = (loss_at(cluster, step)?, loss_at(standalone, step)?);
        ensure!((local - remote).abs() <= 1e-6 * local, "step {step}: {remote} in the cluster, {local} on one machine");
    }
    Ok(())
}

/// The events in a rank's log or a run directory.
pub(crate) fn events(log: &str) -> impl Iterator<Item = Value> {
    let events = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    // A run directory wraps each rank event with its attempt and time.
    events.map(|event| if event["event"].is_object() { event["event"].clone() } else { event })
}

/// Trains a job of the cluster on this machine, with as many processes. Returns the run directory.
pub(crate) fn run_alone(cluster: &Cluster, name: &str, job: &Value) -> Result<PathBuf> {
    let (folder, mut job) = (cluster.folder.path(), job.clone());
    let text = folder.join("text");
    if !text.is_dir() {
        fs::create_dir(&text)?;
        for entry in fs::read_dir(root().join("docs"))? {
            let entry = entry?;
            if entry.file_type()?.is_file() {
                fs::copy(entry.path(), text.join(entry.file_name()))?;
            }
        }
    }
    let trainer = &job["spec"]["trainer"];
    let processes = [&trainer["numNodes"], &trainer["numProcPerNode"]].map(|number| number.as_u64().unwrap_or(1));
    job["spec"]["trainer"] = json!({"numProcPerNode": processes[0] * processes[1], "cpuThreads": 1});
    job["spec"]["engine"]["data"]["path"] = "text".into();
    (job["spec"]["template"], job["spec"]["checkpoint"]) = (Value::Null, Value::Null);
    let manifest = format!("{name}.json");
    fs::write(folder.join(&manifest), job.to_string())?;
    // The same worker as in the image.
    let worker = programs().join("switchyard-worker").display().to_string();
    let arguments = ["run", &manifest, "--run-dir", name, "-q", "--worker", &worker];
    let ended = Program::new(&programs().join("switchyard"), folder, arguments).run(crate::e2e::TIMEOUT);
    ensure!(ended.code == Some(0), "{}", ended.stderr);
    Ok(folder.join(name))
}

/// Runs the page, and the blocks of other pages that inspect its job.
fn first_job(cluster: &Cluster) -> Result<()> {
    let mut watched = None;
    for line in commands(PAGE, &Class::Cluster)? {
        if line.contains("delete namespace team") {
            looked_at(cluster)?;
        }
        // `switchyard report` writes to the working folder, and a test must not write to the
        // repository.
        let line =
            line.replace("switchyard report", &format!("cd {}; switchyard report", cluster.folder.path().display()));
        let output = cluster.sh(&line)?;
        if line.contains("get gputopologies") {
            agents_report(cluster)?;
        }
        if line.contains("--watch") {
            watched = Some(output.clone());
            trained(cluster, &output)?;
        }
        if line.contains("get trainjobs") {
            ensure!(output.contains("Complete") && output.contains("100"), "{output}");
        }
        if line.contains("--rank 2") {
            let events: Vec<Value> = output.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
            ensure!(!events.is_empty() && events.iter().all(|event| event["rank"] == 2), "{output}");
            let first = cluster.sh(&line.replace("--rank 2", "--rank 0"))?;
            begins_alike(&first, &fs::read_to_string(cluster.folder.path().join("alone/events.jsonl"))?)?;
        }
    }
    watched.context("the page does not watch the job")?;
    ensure!(cluster.folder.path().join("runs/gpt-cluster-cluster/report.html").is_file(), "no report");
    let crds = cluster.sh("kubectl get crds -o name")?;
    ensure!(crds.contains(JOBS), "a CRD went with the release: {crds}");
    let left = cluster.sh(
        "kubectl get pods,services,configmaps,secrets,networkpolicies -A -l training.switchyard.dev/job-uid -o name",
    )?;
    ensure!(left.is_empty(), "left: {left}");
    cluster.sh("kubectl delete namespace switchyard-system")?;
    Ok(())
}

/// Runs other pages' commands on the completed job.
fn looked_at(cluster: &Cluster) -> Result<()> {
    let mut output = String::new();
    for page in documents()? {
        for line in commands(&page, &Class::Job)? {
            output.push_str(&cluster.sh(&line).with_context(|| page.clone())?);
        }
    }
    ensure!(output.matches("no known error").count() == 2, "expected two diagnoses without errors: {output}");
    Ok(())
}

/// Every node has a GPUTopology that describes this machine.
fn agents_report(cluster: &Cluster) -> Result<()> {
    let nodes = cluster.nodes.names();
    let reported = || -> Result<bool> {
        let list: Value =
            serde_json::from_str(&cluster.sh("kubectl get gputopologies.training.switchyard.dev -o json")?)?;
        let items = list["items"].as_array().cloned().unwrap_or_default();
        Ok(items.iter().filter(|item| !item["status"]["cpus"].is_null()).count() == nodes.len())
    };
    cluster.until("all agents report", reported)?;
    Ok(())
}

/// The watch showed all stages in order, and the loss equals that of the same job on one machine
/// without a cluster.
fn trained(cluster: &Cluster, watched: &str) -> Result<()> {
    let lines: Vec<&str> = watched.lines().collect();
    let last = lines.last().context("the watch printed nothing")?;
    ensure!(last.contains("Complete") && last.contains("step=150/150"), "{watched}");
    let at = |word: &str| lines.iter().position(|line| line.contains(word));
    ensure!(at("Running").is_some() && at("Running") < at("->Complete"), "{watched}");

    let job = cluster.job("team", "gpt-cluster")?;
    ensure!(stage(&job) == "Complete", "{job:#}");
    let alone = run_alone(cluster, "alone", &example("gpt-cluster.yaml")?)?;
    let status: Value = serde_saphyr::from_str(&fs::read_to_string(alone.join("status.yaml"))?)?;
    let loss = |job: &Value, name: &str| -> Result<f64> {
        let text =
            job["status"]["trainerStatus"][name].as_str().with_context(|| format!("no {name}: {:#}", job["status"]))?;
        Ok(text.parse()?)
    };
    for name in ["loss", "validationLoss"] {
        let (local, remote) = (loss(&status, name)?, loss(&job, name)?);
        println!("         {name}: {remote} in the cluster, {local} on one machine");
        // Gradients are summed in another order there. In a training with a steeply falling loss,
        // small rounding differences grow: by step 150 of this one to half a percent with some
        // texts, and to nothing with others.
        ensure!((local - remote).abs() <= 0.02 * local, "{name}: {remote} in the cluster, {local} on one machine");
    }
    Ok(())
}
