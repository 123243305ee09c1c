//! The checkpoint commands on a temporary directory.

use super::*;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use switchyard_checkpoint::format::CheckpointInfo;
use switchyard_checkpoint::{Manifest, Plan, Progress, Role, TensorSpec};

/// Checkpoints of one tensor and its moments, written by two ranks: complete ones for these steps,
/// and an unfinished one for step 1500.
fn folder(steps: &[u64]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::new(&Disk, folder.path());
    let spec = |name: &str, role| TensorSpec {
        name: name.into(),
        shape: vec![4, 2],
        role,
        export_axes: None,
        export_names: Vec::new(),
    };
    let plan = Plan::new(vec![spec("w", Role::Weight), spec("optimizer.m.w", Role::Optimizer)], 2).unwrap();
    for step in steps.iter().chain([&1500]) {
        let state = BTreeMap::from(["w", "optimizer.m.w"].map(|name| (name.to_string(), vec![*step as f32; 8])));
        let id = CheckpointId { attempt: 1, step: *step };
        let shards = (0..2).map(|rank| store.write_shard("gpt", id, rank, &plan, &state).unwrap()).collect();
        if *step != 1500 {
            let progress = Progress::new(&()).unwrap();
            let about =
                CheckpointInfo { job: "gpt".into(), id, config: String::new(), created: 1_700_000_000, progress };
            store.publish(&Manifest::new(about, plan.clone(), shards).unwrap()).unwrap();
        }
    }
    folder
}

fn selector(folder: &Path, step: Option<u64>) -> SelectorArgs {
    SelectorArgs { directory: folder.to_path_buf(), step, attempt: None }
}

fn damage(folder: &Path, step: u64) -> PathBuf {
    let file = folder.join(CheckpointId { attempt: 1, step }.directory()).join("rank-1.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    file
}

#[test]
fn a_list_has_a_row_per_checkpoint() {
    let folder = folder(&[500, 1000]);
    fs::remove_file(folder.path().join("step-000000500.attempt-1/rank-0.safetensors")).unwrap();
    let Ok(answer) = list(&selector(folder.path(), None)) else { panic!("a list") };
    let missing = folder.path().join("step-000000500.attempt-1/rank-0.safetensors");
    let size = answer.value["checkpoints"][1]["bytes"].as_u64().map(binary).unwrap();
    assert_eq!(
        answer.text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect::<Vec<_>>(),
        [
            "STEP ATTEMPT JOB RANKS SIZE CREATED STATE".to_string(),
            "1,500 1 - - - - incomplete".to_string(),
            format!("1,000 1 gpt 2 {size} 2023-11-14T22:13:20Z complete"),
            "500 1 - - - - damaged".to_string(),
            format!("{}: cannot find it: No such file or directory (os error 2)", missing.display()),
        ]
    );
    let row = &answer.value["checkpoints"][0];
    assert_eq!(*row, json!({"step": 1500, "attempt": 1, "state": "Incomplete"}), "unknown is absent");
    assert_eq!((answer.kind, answer.exit), ("CheckpointList", Exit::Done));
}

#[test]
fn damage_has_an_exit_code_and_a_location() {
    let folder = folder(&[500, 1000]);
    let Ok(answer) = verify(&selector(folder.path(), None)) else { panic!("an answer") };
    assert_eq!(answer.exit, Exit::Done, "{}", answer.text);
    let states = |answer: &CommandOutput| -> Vec<String> {
        let rows = answer.value["checkpoints"].as_array().unwrap();
        rows.iter().map(|row| row["state"].as_str().unwrap().to_string()).collect()
    };
    assert_eq!(states(&answer), ["Incomplete", "Verified", "Verified"]);

    let file = damage(folder.path(), 500);
    let Ok(answer) = verify(&selector(folder.path(), None)) else { panic!("an answer") };
    assert_eq!(
        (states(&answer), answer.exit),
        (["Incomplete", "Verified", "Damaged"].map(String::from).into(), Exit::CheckpointRefused)
    );
    let last = answer.text.lines().last().unwrap();
    assert!(last.starts_with(&format!("{}: damaged: chunk 0, bytes 0 to ", file.display())), "{last}");
    assert!(last.ends_with("it holds the header, optimizer.m.w"), "{last}");
    let exit = |step| verify(&selector(folder.path(), Some(step))).map(|answer| answer.exit).ok();
    let refused = Some(Exit::CheckpointRefused);
    assert_eq!([500, 1000, 1500].map(exit), [refused, Some(Exit::Done), refused]);
    let empty = tempfile::tempdir().unwrap();
    assert_eq!(verify(&selector(empty.path(), None)).map(|answer| answer.exit).ok(), refused);
}

#[test]
fn an_export_uses_the_newest_or_the_named_step() {
    let folder = folder(&[500, 1000]);
    let to = folder.path().join("model.safetensors");
    let run = |step| export_model(&ExportArgs { selector: selector(folder.path(), step), to: to.clone() });
    let Ok(answer) = run(None) else { panic!("an export") };
    let bytes = fs::metadata(&to).unwrap().len();
    assert_eq!(answer.text, format!("{}: 1 tensor of step 1,000, attempt 1, {}", to.display(), binary(bytes)));
    let value = json!({"file": to.display().to_string(), "step": 1000, "attempt": 1, "tensors": 1, "bytes": bytes});
    assert_eq!(answer.value, value);

    fs::remove_file(&to).unwrap();
    damage(folder.path(), 1000);
    let Err(Failure { message: error, exit }) = run(None) else { panic!("a refusal") };
    assert!(error.contains("damaged: chunk 0") && error.contains("--step"), "{error}");
    assert!(exit == Exit::CheckpointRefused && !to.exists(), "{error}");
    assert!(run(Some(500)).is_ok() && to.exists());
    let Err(Failure { message: error, exit }) = run(Some(1500)) else { panic!("a refusal") };
    assert!(error.ends_with("got no complete checkpoint; expected one") && exit == Exit::CheckpointRefused, "{error}");
}

#[test]
fn missing_checkpoints_are_a_usage_error() {
    let folder = folder(&[500]);
    let refused = |args: SelectorArgs| match list(&args) {
        Err(Failure { message, exit: Exit::Usage }) => message,
        _ => panic!("a refusal"),
    };
    let missing = folder.path().join("missing");
    let error = refused(selector(&missing, None));
    assert_eq!(error, format!("{}: not a directory; expected the directory of a job's checkpoints", missing.display()));
    let error = refused(selector(folder.path(), Some(7)));
    assert!(error.ends_with("got no such checkpoint; expected one of the existing ones: steps 1,500, 500"), "{error}");
}
