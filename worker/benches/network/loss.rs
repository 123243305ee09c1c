//! Validation loss after equal samples, against a run that exchanges all gradients of every step.

use super::hosts::Hosts;
use super::training::train;
use super::{Options, Outcome, with};
use serde_json::{Value, json};

const HOSTS: usize = 4;
/// Fast: this part measures no time.
const BITS_PER_SECOND: u64 = 10_000_000_000;

struct Task {
    name: &'static str,
    engine: Value,
    steps: u64,
    /// The optimizers of top-k and of the others.
    sgd: Value,
    adam: Value,
}

fn tasks() -> [Task; 2] {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let text = json!({
        "model": {"type": "GPT", "gpt": {"layers": 2, "hiddenSize": 64, "heads": 4, "contextLength": 64}},
        "data": {"format": "Text", "path": format!("{root}/src"), "include": ["**/*.rs"]},
        "batchSizePerProcess": 4, "evaluation": {"everySteps": 0, "batches": 50},
    });
    let digits = json!({
        "model": {"type": "MLP", "mlp": {"hiddenSizes": [128, 128]}}, "labelSmoothing": "0.1",
        "data": {"format": "CSV", "path": format!("{root}/target/data/digits.csv"), "validationFraction": "0.2"},
        "batchSizePerProcess": 16, "evaluation": {"everySteps": 0, "batches": "All"},
    });
    let adam = |rate: &str| json!({"type": "AdamW", "learningRate": rate});
    let sgd = |rate: &str| json!({"type": "SGD", "learningRate": rate, "momentum": "0.9", "gradientClipNorm": "1.0"});
    [
        Task { name: "text", engine: text, steps: 960, sgd: sgd("0.1"), adam: adam("0.002") },
        Task { name: "digits", engine: digits, steps: 640, sgd: sgd("0.05"), adam: adam("0.002") },
    ]
}

pub fn measure(options: &Options) -> Outcome<Value> {
    let hosts = Hosts::start(HOSTS, BITS_PER_SECOND)?;
    let mut rows = Vec::new();
    for task in tasks() {
        let local = json!({"type": "Local", "everySteps": 16,
            "outerOptimizer": {"type": "Nesterov", "learningRate": "0.7", "momentum": "0.5"}});
        let top_k = |ratio: &str| json!({"communication": {"compression": {"type": "TopK", "ratio": ratio}}});
        let geo = json!({"communication": {"mode": "ParameterServer",
            "parameterServer": {"servers": 1, "updates": "Geo", "everySteps": 16}}});
        // The optimizer, the remedy, batches that are merged, its fields.
        let cases = [
            ("AdamW", "none", 1, json!({})),
            ("AdamW", "f16 on the wire", 1, json!({"overlap": {"wireType": "FP16"}})),
            ("AdamW", "4 batches merged, f16", 4, json!({"overlap": {"wireType": "FP16"}, "batchMerge": 4})),
            ("AdamW", "Local, every 16 steps", 1, json!({"sync": local})),
            ("AdamW", "Geo, every 16 steps", 1, geo),
            ("SGD", "none", 1, json!({})),
            ("SGD", "top-k, 1 %", 1, top_k("0.01")),
            ("SGD", "top-k, 0.1 %", 1, top_k("0.001")),
        ];
        let mut reference = f64::NAN;
        for (optimizer, remedy, merge, more) in cases {
            let optimize = if optimizer == "SGD" { &task.sgd } else { &task.adam };
            let engine = with(task.engine.clone(), json!({"steps": task.steps / merge, "optimizer": optimize}));
            let trained = train(options, &hosts, &with(engine, more))?;
            let loss = trained.validation_loss;
            if remedy == "none" {
                reference = loss;
            }
            let difference = 100.0 * (loss / reference - 1.0);
            println!("  {:<7} {optimizer:<6} {remedy:<24} {loss:.4} nats, {difference:+.1} %", task.name);
            rows.push(json!({
                "task": task.name, "optimizer": optimizer, "remedy": remedy, "validationLoss": loss,
                "differencePercent": difference, "accuracy": trained.accuracy,
            }));
        }
    }
    Ok(json!({"hosts": HOSTS, "goalPercent": 1.0, "rows": rows}))
}
