//! Every change of fields must be a patch that the API and the plan accept and that changes the
//! job.

use super::tests::{CASES, healthy};
use super::{Advice, Finding, RULES};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use switchyard_crds::validate::train_job;
use switchyard_plan::{ValidJob, validate};

/// Rules whose advice is not about the manifest.
const OUTSIDE: [&str; 6] = ["gpu-errors", "gpu-clocks", "gpu-link", "gaps-between-steps", "placement", "straggler"];

fn valid(document: &Value) -> Result<ValidJob, String> {
    let job = train_job(document).map_err(|faults| format!("{faults:?}"))?;
    validate(&job).map_err(|faults| format!("{faults:?}"))
}

/// Merges as in RFC 7386. Validation treats null as absent.
fn merge(document: &mut Value, patch: &Value) {
    match patch.as_object() {
        Some(fields) => {
            if !document.is_object() {
                *document = json!({});
            }
            fields.iter().for_each(|(name, value)| merge(&mut document[name], value));
        }
        None => *document = patch.clone(),
    }
}

/// Jobs with most fields at their bounds or near the advised values.
fn documents() -> Vec<Value> {
    let gpt = |hidden: u32| json!({"type": "GPT", "gpt": {"layers": 2, "hiddenSize": hidden, "heads": 4, "contextLength": 16}});
    let text = json!({"format": "Text", "path": "data"});
    let made = json!({"format": "Synthetic"});
    let images = json!({"format": "Synthetic", "image": {"height": 8, "width": 8, "channels": 3}});
    let models = [
        (gpt(128), text.clone()),
        (gpt(132), text),
        (json!({"type": "MLP", "mlp": {"hiddenSizes": [8, 13]}}), made),
        (json!({"type": "ResNet", "resnet": {"depth": 18, "width": 9}}), images),
    ];
    let amp = |compute: &str, scaling: Value| json!({"mode": "AMP", "computeType": compute, "lossScaling": scaling});
    let precisions = [
        json!({}),
        json!({"mode": "AMP"}),
        json!({"mode": "AMP", "computeType": "FP16"}),
        amp("FP16", json!({"type": "Static", "scale": "1024"})),
        amp("FP16", json!({"type": "Dynamic", "growthIntervalSteps": 100})),
        amp("BF16", json!({"type": "Static", "scale": "0.00333"})),
    ];
    let overlaps = [
        json!({}),
        json!({"mode": "Disabled", "bucketSizeMiB": 4}),
        json!({"syncAllReduce": "Enabled", "wireType": "BF16", "bucketSizeMiB": 1024}),
    ];
    let optimizers = [json!({}), json!({"type": "SGD", "learningRate": "0.00033333333"})];
    let schedules = [json!({"type": "Linear", "finalLearningRate": "0.0003"}), Value::Null];
    let checkpoints =
        [("everySteps", 100), ("periodSeconds", 60), ("everySteps", 1_000_000_000)].map(|(field, value)| {
            let mut checkpoint = json!({"path": "c"});
            checkpoint[field] = json!(value);
            checkpoint
        });
    let readers = [json!({}), json!({"doubleBuffer": "Disabled", "workers": 256})];
    let numbers = [(1, 1, 1), (7, 4096, 1_000_000), (64, 3, 1), (65_536, 1, 1)];
    let job = |i: usize| {
        let ((model, data), (batch, merge, fetch)) = (&models[i % models.len()], numbers[i % 5 % numbers.len()]);
        json!({
            "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "job"},
            "spec": {
                "trainer": {"numProcPerNode": 2}, "checkpoint": checkpoints[i % checkpoints.len()],
                "engine": {
                    "model": model, "data": data, "precision": precisions[i / 2 % precisions.len()],
                    "overlap": overlaps[i / 3 % overlaps.len()], "optimizer": optimizers[i % 2],
                    "schedule": schedules[i / 2 % 2], "reader": readers[i / 4 % 2], "steps": 600,
                    "batchSizePerProcess": batch, "batchMerge": merge, "fetchEverySteps": fetch,
                },
            },
        })
    };
    let mut on_gpu = job(0);
    (on_gpu["spec"]["engine"]["device"], on_gpu["spec"]["engine"]["cudaGraphs"]) = (json!("Cuda"), json!("Disabled"));
    let mut sharded = job(0);
    sharded["spec"]["engine"]["sharding"] = json!("Optimizer");
    let in_stages = [0, 2].map(|number| {
        let mut job = job(number);
        job["spec"]["engine"]["parallelism"] = json!({"pipelineStages": 2});
        job
    });
    (0..12).map(job).chain([on_gpu, sharded]).chain(in_stages).collect()
}

#[test]
fn every_field_change_is_a_patch_that_the_api_and_the_plan_accept() {
    let mut patched: BTreeSet<&str> = BTreeSet::new();
    for document in documents() {
        let before = valid(&document).unwrap_or_else(|faults| panic!("{faults}: {document}"));
        let mut seen: BTreeSet<String> = BTreeSet::new();
        for (_, change, ..) in CASES {
            let mut facts = healthy();
            change(&mut facts);
            facts.engine = before.engine.clone();
            for rule in &RULES {
                let Finding::Advice(Advice { changes, .. }) = (rule.check)(&facts) else { continue };
                for change in changes {
                    let Some(patch) = &change.patch else {
                        let sets = change.what.split('`').skip(1).step_by(2).any(|code| code.contains(": "));
                        assert!(!sets, "{}: sets a field without a patch: {}", rule.id, change.what);
                        continue;
                    };
                    patched.insert(rule.id);
                    if !seen.insert(patch.to_string()) {
                        continue;
                    }
                    let mut after = document.clone();
                    merge(&mut after, patch);
                    let after = valid(&after).unwrap_or_else(|faults| panic!("{}: {}: {faults}", rule.id, change.what));
                    assert_ne!(after, before, "{}: {} changes nothing", rule.id, change.what);
                }
            }
        }
    }
    for (rule, ..) in CASES {
        assert_ne!(patched.contains(rule), OUTSIDE.contains(&rule), "{rule}");
    }
}
