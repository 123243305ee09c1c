//! What a user sees of a job in a cluster: status, logs, report, and support bundle.

use super::training::Training;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::process::Command;
use switchyard_tests::{ControlPlane, Ended, Running, TIMEOUT};

/// A value that must not appear in a support bundle.
const SECRET: &str = "hunter2-of-the-user";

/// Starts `switchyard` in the test's namespace.
fn start(scene: &Training, arguments: &[&str]) -> Running {
    let config = ControlPlane::shared().kubeconfig("admin").display().to_string();
    let place = ["--kubeconfig", &config, "--namespace", &scene.namespace];
    scene.folder.switchyard(arguments.iter().chain(&place)).start()
}

fn ask(scene: &Training, arguments: &[&str]) -> Ended {
    start(scene, arguments).wait(TIMEOUT)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_can_be_watched_reported_and_archived() -> Result<()> {
    let scene = Training::new("watch").await?;
    let nothing = ask(&scene, &["status", "gpt"]);
    assert_eq!(nothing.code, Some(2), "{}", nothing.stderr);
    assert!(nothing.stderr.contains("no TrainJob") && nothing.stderr.contains("there is none"), "{}", nothing.stderr);
    let mut job = scene.job("gpt", &scene.data(), 200);
    job["spec"]["trainer"]["env"] = json!([{"name": "TOKEN", "value": SECRET}]);
    scene.jobs.create(job).await?;
    let watched = start(&scene, &["status", "gpt", "--watch"]);
    let watched = watched.wait(5 * TIMEOUT);
    assert_eq!(watched.code, Some(0), "{}", watched.stderr);
    let lines: Vec<&str> = watched.stdout.lines().collect();
    let last = lines.last().context("no line")?;
    assert!(last.contains("->Complete ") && last.contains("step=200/200"), "{}", watched.stdout);
    assert!(!watched.stdout.contains('\u{1b}'), "escape codes in a pipe");

    let table = ask(&scene, &["status"]).stdout;
    assert!(table.starts_with("NAME") && table.contains("gpt   Complete") && table.contains("100 %"), "{table}");
    let one: Value = serde_json::from_str(&ask(&scene, &["status", "gpt", "-o", "json"]).stdout)?;
    assert_eq!((&one["kind"], &one["stage"]), (&json!("JobStatus"), &json!("Complete")));
    assert_eq!(one["pods"].as_array().map(Vec::len), Some(2), "{one:#}");

    let all = ask(&scene, &["logs", "gpt"]).stdout;
    assert!(all.contains("[node 0] ") && all.contains("[node 1] "), "{all}");
    let first = ask(&scene, &["logs", "gpt", "--rank", "1"]);
    assert_eq!(first.code, Some(0), "{}", first.stderr);
    let events: Vec<Value> = first.stdout.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    assert!(!events.is_empty() && events.iter().all(|event| event["rank"] == 1), "{}", first.stdout);
    let few = ask(&scene, &["logs", "gpt", "--node-rank", "0", "--tail", "2"]).stdout;
    assert_eq!(few.lines().count(), 2, "{few}");
    let none = ask(&scene, &["logs", "gpt", "--rank", "5"]);
    assert!(none.code == Some(2) && none.stderr.contains("the job has ranks 0 to 1"), "{}", none.stderr);

    uses_the_contexts_namespace(&scene)?;
    let report = ask(&scene, &["report", "gpt", "-o", "json"]);
    assert_eq!(report.code, Some(0), "{}", report.stderr);
    let report: Value = serde_json::from_str(&report.stdout)?;
    assert_eq!(
        (&report["verdict"]["steps"], &report["verdict"]["totalSteps"]),
        (&json!(200), &json!(200)),
        "{report:#}"
    );
    assert!(report["verdict"]["lastLoss"].as_f64() < report["verdict"]["firstLoss"].as_f64());
    assert!(scene.folder.join("runs/gpt-cluster/report.html").is_file());

    let bundle = ask(&scene, &["support-bundle", "--out", "bundle.tar.gz"]);
    assert_eq!(bundle.code, Some(0), "{}", bundle.stderr);
    // The job has ended without a failure, so it must be named explicitly.
    let named = ask(&scene, &["support-bundle", "gpt", "--out", "named.tar.gz"]);
    assert_eq!(named.code, Some(0), "{}", named.stderr);
    let text = unpacked(&scene, "named.tar.gz")?;
    for part in ["cluster.json", "/gpt-1-0.trainer.log", "/events.txt", "README.txt", "versions.json", "/gpt-1.json"] {
        assert!(text.contains(part), "no {part} in\n{}", text.lines().take(40).collect::<Vec<_>>().join("\n"));
    }
    assert!(text.contains("\"event\":\"finished\"") && !text.contains(SECRET), "a secret left the cluster");
    let full = ask(&scene, &["support-bundle", "gpt", "--out", "/dev/full/b.tar.gz"]);
    assert_eq!(full.code, Some(1), "{}", full.stderr);
    Ok(())
}

/// Letter M: the report advised more threads than the CPU limit of the pod has.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_report_advises_no_threads_beyond_the_pods_cpu_limit() -> Result<()> {
    let scene = Training::new("advice").await?;
    let cores = std::thread::available_parallelism()?.get();
    for (name, limit) in [("one", "1"), ("two", "2")] {
        let mut job = scene.job(name, &scene.data(), 200);
        job["spec"]["trainer"] = json!({"numNodes": 1, "cpuThreads": 1});
        job["spec"]["template"]["spec"]["containers"] =
            json!([{"name": "trainer", "resources": {"limits": {"cpu": limit}}}]);
        scene.jobs.create(job).await?;
        scene.jobs.wait_stage(name, "Complete").await?;
        let report = ask(&scene, &["report", name, "-o", "json"]);
        assert_eq!(report.code, Some(0), "{}", report.stderr);
        let report: Value = serde_json::from_str(&report.stdout)?;
        let advice = report["advice"].as_array().context("advice")?;
        let is_advised = advice.iter().any(|item| item["rule"] == "too-few-threads");
        assert_eq!(is_advised, limit == "2" && cores > 1, "limit {limit}, {cores} cores: {advice:#?}");
    }
    Ok(())
}

/// Without `--namespace`, every job command uses the context's namespace.
fn uses_the_contexts_namespace(scene: &Training) -> Result<()> {
    let admin = std::fs::read_to_string(ControlPlane::shared().kubeconfig("admin"))?;
    let mut config: Value = serde_saphyr::from_str(&admin)?;
    config["contexts"][0]["context"]["namespace"] = scene.namespace.clone().into();
    std::fs::write(scene.folder.join("here.json"), config.to_string())?;
    let name = format!("{}/gpt", scene.namespace);
    std::fs::write(scene.folder.join("again.yaml"), scene.job("gpt", &scene.data(), 200).to_string())?;
    for (arguments, word) in [
        (&["explain", "gpt"][..], name.as_str()),
        (&["plan", "again.yaml", "--cluster"], &name),
        (&["whatif", "again.yaml"], &name),
        (&["status", "gpt"], "Complete"),
        (&["doctor", "gpt"], "no known error"),
    ] {
        let ended =
            scene.folder.switchyard(arguments.iter().chain(&["--kubeconfig", "here.json"])).start().wait(TIMEOUT);
        ensure!(
            ended.code == Some(0) && ended.stdout.contains(word),
            "{arguments:?}: {}{}",
            ended.stdout,
            ended.stderr
        );
    }
    let gone = ask(scene, &["explain", "gpt-gone"]);
    let (nothing, others) = gone.stderr.split_once("; there are ").unwrap_or_default();
    let is_named = others.split([',', ' ']).any(|word| word == name);
    ensure!(nothing.contains(&format!("no TrainJob {name}-gone")) && is_named, "{}", gone.stderr);
    Ok(())
}

/// Names and contents of an archive, as one text.
fn unpacked(scene: &Training, name: &str) -> Result<String> {
    let list = |arguments: &[&str]| -> Result<String> {
        let done = Command::new("tar").args(arguments).arg(scene.folder.join(name)).output()?;
        ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        Ok(String::from_utf8_lossy(&done.stdout).into_owned())
    };
    Ok(list(&["-tzf"])? + &list(&["-xzOf"])?)
}
