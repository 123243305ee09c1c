//! docs/first-job.md, command by command, and what must be so between them.

use crate::{Cluster, JOBS, example, stage};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fs;
use switchyard_tests::{Program, root, target};

/// What the test does itself: the cluster, and where programs are.
const OURS: [&str; 2] = ["cargo xtask", "export "];

/// The commands of the page, a list for each block.
fn blocks() -> Result<Vec<Vec<String>>> {
    let text = fs::read_to_string(root().join("docs/first-job.md"))?;
    let blocks = text.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap_or_default());
    let is_users = |line: &&str| !line.is_empty() && !OURS.iter().any(|ours| line.starts_with(ours));
    Ok(blocks.map(|block| block.lines().filter(is_users).map(str::to_owned).collect()).collect())
}

#[test]
fn the_page_leads_to_a_trained_model() -> Result<()> {
    let cluster = Cluster::start(2)?;
    let mut watched = None;
    for line in blocks()?.concat() {
        // A report is written where the command is given; the repository is not the place in a test.
        let line =
            line.replace("switchyard report", &format!("cd {}; switchyard report", cluster.folder.path().display()));
        let said = cluster.sh(&line)?;
        if line.contains("get gputopologies") {
            agents_report(&cluster)?;
        }
        if line.contains("--watch") {
            watched = Some(said.clone());
            trained(&cluster, &said)?;
        }
        if line.contains("get trainjobs") {
            ensure!(said.contains("Complete") && said.contains("100"), "{said}");
        }
        if line.contains("--rank 2") {
            let events: Vec<Value> = said.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
            ensure!(!events.is_empty() && events.iter().all(|event| event["rank"] == 2), "{said}");
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
    Ok(())
}

/// Every node has its description, and it is of this machine.
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

/// All stages were shown in their order, and the loss is that of the same job on one machine without a cluster.
fn trained(cluster: &Cluster, watched: &str) -> Result<()> {
    let lines: Vec<&str> = watched.lines().collect();
    let last = lines.last().context("nothing was watched")?;
    ensure!(last.contains("Complete") && last.contains("step=150/150"), "{watched}");
    let at = |word: &str| lines.iter().position(|line| line.contains(word));
    ensure!(at("Running").is_some() && at("Running") < at("->Complete"), "{watched}");

    let job = cluster.job("team", "gpt-cluster")?;
    ensure!(stage(&job) == "Complete", "{job:#}");
    let mut alone = example("gpt-cluster.yaml")?;
    alone["spec"]["template"] = Value::Null;
    alone["spec"]["trainer"] = serde_json::json!({"numProcPerNode": 4, "cpuThreads": 1});
    alone["spec"]["engine"]["data"]["path"] = "text".into();
    let folder = cluster.folder.path();
    fs::create_dir(folder.join("text"))?;
    for entry in fs::read_dir(root().join("docs"))? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            fs::copy(entry.path(), folder.join("text").join(entry.file_name()))?;
        }
    }
    fs::write(folder.join("alone.json"), alone.to_string())?;
    let run =
        Program::new(&target().join("release/switchyard"), folder, ["run", "alone.json", "--run-dir", "alone", "-q"]);
    let ended = run.run(crate::PATIENCE);
    ensure!(ended.code == Some(0), "{}", ended.stderr);
    let status: Value = serde_saphyr::from_str(&fs::read_to_string(folder.join("alone/status.yaml"))?)?;
    let loss = |job: &Value, name: &str| -> Result<f64> {
        let text =
            job["status"]["trainerStatus"][name].as_str().with_context(|| format!("no {name}: {:#}", job["status"]))?;
        Ok(text.parse()?)
    };
    for name in ["loss", "validationLoss"] {
        let (here, there) = (loss(&status, name)?, loss(&job, name)?);
        println!("         {name}: {there} in the cluster, {here} on one machine");
        ensure!((here - there).abs() <= 1e-4 * here, "{name}: {there} in the cluster, {here} on one machine");
    }
    Ok(())
}
