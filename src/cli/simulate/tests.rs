//! The example trace on the example cluster.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::args::Command;
use clap::Parser;
use std::path::PathBuf;

fn example(file: &str) -> String {
    format!("{}/../../examples/clusters/{file}", env!("CARGO_MANIFEST_DIR"))
}

fn parsed(trace: &str, more: &[&str]) -> (Cli, SimulateArgs) {
    let snapshot = example("two-racks.json");
    let words = ["switchyard", "--quiet", "simulate", "--trace", trace, "--snapshot", &snapshot];
    let mut cli = Cli::try_parse_from(words.iter().chain(more)).unwrap();
    let Command::Simulate(args) = std::mem::replace(&mut cli.command, Command::Version) else { unreachable!() };
    (cli, args)
}

fn replays(more: &[&str]) -> Result<(Input, SimulateArgs, Vec<Outcome>), Failure> {
    let (cli, args) = parsed(&example("jobs.csv"), more);
    let (mut input, outcomes) = outcomes(&cli, &args)?;
    input.trace = "jobs.csv".into();
    Ok((input, args, outcomes))
}

#[test]
fn without_a_cluster_the_snapshot_is_mentioned() {
    let mut cli = Cli::try_parse_from(["switchyard", "simulate", "--kubeconfig", "/nonexistent/config"]).unwrap();
    let Command::Simulate(args) = std::mem::replace(&mut cli.command, Command::Version) else { unreachable!() };
    let error = outcomes(&cli, &args).err().unwrap().message;
    assert!(error.contains("/nonexistent/config") && error.contains("--snapshot FILE"), "{error}");
}

#[test]
fn the_table_of_the_example() {
    let (input, args, outcomes) =
        replays(&["--more-racks", "1", "--rules", "switchyard,strict-fifo,kueue-like"]).unwrap();
    insta::assert_snapshot!(table::table(&input, &args, &outcomes, 160));
}

/// Regression: pipes and narrow terminals had half of the documented columns.
#[test]
fn a_narrow_table_has_every_column() {
    let (input, args, outcomes) = replays(&["--node-failures", "1", "--rules", "switchyard,kueue-like"]).unwrap();
    let headings = |width: usize| {
        let table = table::table(&input, &args, &outcomes, width);
        assert!(!table.contains("a wider window"), "{table}");
        let lines = table.lines().filter(|line| line.starts_with("RULE"));
        let headings = lines.flat_map(|line| line.split("  ").map(str::trim)).map(str::to_owned);
        headings.filter(|heading| !heading.is_empty()).collect::<std::collections::BTreeSet<String>>()
    };
    assert_eq!(headings(100), headings(200));
    assert_eq!(headings(200).len(), 12);
}

/// Regression: the second of two nodes with the same name replaced the first.
#[test]
fn two_nodes_of_the_same_name_are_refused() {
    let snapshot = std::fs::read_to_string(example("two-racks.json")).unwrap();
    let mut cluster: serde_json::Value = serde_json::from_str(&snapshot).unwrap();
    let items = cluster["items"].as_array_mut().unwrap();
    let node = items.iter().find(|item| item["kind"] == "Node").unwrap().clone();
    items.push(node);
    let last = items.len() - 1;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), cluster.to_string()).unwrap();
    let trace = example("jobs.csv");
    let words = ["switchyard", "--quiet", "simulate", "--trace", &trace, "--snapshot", file.path().to_str().unwrap()];
    let mut cli = Cli::try_parse_from(words).unwrap();
    let Command::Simulate(args) = std::mem::replace(&mut cli.command, Command::Version) else { unreachable!() };
    let message = outcomes(&cli, &args).err().unwrap().message;
    assert_eq!(message, format!("items[{last}] (Node gpu-01): the snapshot has two nodes of this name"));
}

/// Regression: only commas separated the rules.
#[test]
fn rules_are_separated_by_commas_or_spaces() {
    let rules = |words: &[&str]| parsed("trace", words).1.rules.len();
    assert_eq!((rules(&["--rules", "switchyard,easy"]), rules(&["--rules", "switchyard", "easy"])), (2, 2));
}

/// The example's controller has the default settings.
#[test]
fn the_configured_rule_has_the_settings_of_the_controller() {
    let figures = |changes: &[&str], other: &str| {
        let changes = changes.iter().flat_map(|change| ["--queue", change]);
        let words: Vec<&str> =
            ["--limits", "none", "--rules", "configured", other].into_iter().chain(changes).collect();
        let (input, args, outcomes) = replays(&words).unwrap();
        let own = input.json(&args, &outcomes);
        assert_eq!(own["queueIsAssumed"], false);
        (outcomes[0].figures.clone(), outcomes[1].figures.clone(), own["preemptionSeconds"].clone())
    };
    let (configured, default, cost) = figures(&[], "switchyard-least-attained");
    assert_eq!((&configured, cost), (&default, 120.into()));
    let changes = ["queue-policy=FirstComeFirstServed", "queue-predictor=None", "preemption-seconds=30"];
    let (changed, first_come, cost) = figures(&changes, "switchyard");
    assert_eq!((&changed, cost), (&first_come, 30.into()));
    assert_ne!(changed, configured);
}

/// Under every rule, with perturbed inputs and node failures. The first third of the example is
/// enough.
#[test]
fn the_same_input_gives_the_same_bytes() {
    let rows = std::fs::read_to_string(example("jobs.csv")).unwrap();
    let trace = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(trace.path(), rows.split_inclusive('\n').take(21).collect::<String>()).unwrap();
    let json = || {
        let words = ["--seeds", "2", "--limits", "half", "--bandwidth", "levels", "--node-failures", "1"];
        let (cli, args) = parsed(trace.path().to_str().unwrap(), &words);
        let (input, outcomes) = outcomes(&cli, &args).unwrap();
        input.json(&args, &outcomes).to_string()
    };
    let first = json();
    assert!(first.contains(r#""limits":"half""#) && first.contains(r#""completionMean""#), "{first}");
    assert_eq!(first, json());
}

#[test]
fn a_worse_network_slows_jobs_down() {
    let (_, _, outcomes) = replays(&["--oversubscription", "8", "--rules", "switchyard"]).unwrap();
    assert_eq!(outcomes[1].cluster, "oversubscription 8, 8");
    // A ring over both racks crosses once in each direction, which 2 : 1 still supports.
    assert_eq!(outcomes[0].figures[0].slow_percent, 0.0);
    assert!(outcomes[1].figures[0].slow_percent > 0.0);
}

#[test]
fn node_failures_add_restarts_to_the_table() {
    let (input, args, outcomes) = replays(&["--node-failures", "1", "--rules", "switchyard,kueue-like"]).unwrap();
    assert!(outcomes.iter().all(|outcome| outcome.figures[0].restarts > 0));
    let table = table::table(&input, &args, &outcomes, 200);
    assert!(table.contains("RESTARTS") && table.contains("each node fails every 1 day;"), "{table}");
    assert_eq!(input.json(&args, &outcomes)["nodeFailuresEveryDays"], 1);
}

#[test]
fn invalid_input_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let with = |text: &str, more: &[&str]| {
        let path: PathBuf = folder.path().join("trace.csv");
        std::fs::write(&path, text).unwrap();
        let (cli, args) = parsed(path.to_str().unwrap(), more);
        let failure = outcomes(&cli, &args).err().unwrap();
        assert_eq!(failure.exit, Exit::Usage);
        failure.message.replace(folder.path().to_str().unwrap(), "")
    };
    let good = "submit_seconds,duration_seconds,gpus\n0,60,8\n";
    for (got, words) in [
        (
            with("submit_seconds,duration_seconds,gpus\n5,1,8\n4,1,8\n", &[]),
            "error[SY0001]: /trace.csv: line 3: submit_seconds: got `4`",
        ),
        (with("submit_seconds,duration_seconds,gpus\n5,1,65\n", &[]), "line 2: gpus: got `65`; expected 1 to 64"),
        (
            with(good, &["--limits", "trace"]),
            "--limits trace: /trace.csv has no limits (limit_seconds, or Timelimit of sacct)",
        ),
        (with(good, &["--oversubscription", "4,2"]), "--oversubscription: got 4,2; expected the second factor"),
        (with(good, &["--oversubscription", "1,2,3"]), "expected one factor or two"),
    ] {
        assert!(got.contains(words), "{got}");
    }
    let (cli, args) = parsed(folder.path().to_str().unwrap(), &[]);
    let message = outcomes(&cli, &args).err().unwrap().message;
    assert!(message.contains("expected a file with a trace of jobs"), "{message}");
}

#[test]
fn without_a_trace_the_jobs_of_the_cluster_are_replayed() {
    let snapshot = std::fs::read_to_string(example("two-racks.json")).unwrap();
    let mut cluster: serde_json::Value = serde_json::from_str(&snapshot).unwrap();
    let simulate_cluster = |cluster: &serde_json::Value| {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), cluster.to_string()).unwrap();
        let words = ["switchyard", "--quiet", "simulate", "--rules", "switchyard", "--snapshot"];
        let mut cli = Cli::try_parse_from(words.into_iter().chain([file.path().to_str().unwrap()])).unwrap();
        let Command::Simulate(args) = std::mem::replace(&mut cli.command, Command::Version) else { unreachable!() };
        outcomes(&cli, &args).map(|(input, _)| input)
    };
    assert!(simulate_cluster(&cluster).err().unwrap().message.contains("name a trace with --trace"));
    let job = cluster["items"].as_array_mut().unwrap().iter_mut().find(|item| item["kind"] == "TrainJob").unwrap();
    job["status"]["placedTime"] = "2026-11-20T11:57:50Z".into();
    job["status"]["completionTime"] = "2026-11-20T13:57:50Z".into();
    let input = simulate_cluster(&cluster).ok().unwrap();
    assert_eq!((input.rows.len(), input.rows[0].gpus, input.rows[0].duration), (1, 16, 7200.0));
    assert_eq!(input.format, Format::Objects);
}

#[test]
fn sacct_output_is_replayed_and_skipped_jobs_are_reported() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let text = "JobID|Submit|Elapsed|AllocTRES|Account|Timelimit\n\
                2|2024-05-02T03:05:00|00:10:00|gres/gpu=16,node=2|text|01:00:00\n\
                1|2024-05-02T03:04:00|00:10:00|gres/gpu=8,node=1|vision|01:00:00\n\
                1.batch|2024-05-02T03:04:00|00:10:00|gres/gpu=8,node=1|vision|\n\
                3|2024-05-02T03:06:00|00:10:00|cpu=8,node=1|text|01:00:00\n";
    std::fs::write(file.path(), text).unwrap();
    let (cli, args) = parsed(&file.path().to_string_lossy(), &["--rules", "switchyard"]);
    let (input, outcomes) = outcomes(&cli, &args).unwrap();
    assert_eq!(input.rows.iter().map(|row| (row.submit, row.gpus)).collect::<Vec<_>>(), [(0.0, 8), (60.0, 16)]);
    let json = input.json(&args, &outcomes);
    assert_eq!((&json["limits"], &json["jobsLeftOut"]), (&"trace".into(), &serde_json::json!({"without GPUs": 1})));
    assert!(table::table(&input, &args, &outcomes, 100).contains("left out  1 job without GPUs"));
}
