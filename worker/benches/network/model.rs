//! A model of 250 MB on four hosts at 1 Gbit/s: the step with each remedy.

use super::hosts::Hosts;
use super::links::torch;
use super::training::{Mlp, train};
use super::{Options, Outcome, median, range};
use serde_json::{Value, json};
use std::path::Path;

const HOSTS: usize = 4;
const GIGABIT: u64 = 1_000_000_000;
const MODEL: Mlp = Mlp { layers: 17, width: 1976 };
/// Steps before those that count: in the first, memory is touched for the first time, and 16 bits
/// on the wire have no scale yet.
const WARM_UPS: u64 = 2;

struct Case {
    name: &'static str,
    /// Fields of `engine`.
    engine: Value,
    steps: u64,
    /// Micro-batches in a step.
    merge: u64,
    /// Seconds beyond computation and micro-batch, at most.
    goal: Option<f64>,
}

/// Local steps that the run never ends: nothing but short messages.
fn alone(merge: u64) -> Value {
    json!({"sync": {"type": "Local", "everySteps": 1000}, "batchMerge": merge})
}

fn servers(count: u64, more: Value) -> Value {
    let servers = super::with(json!({"servers": count}), more);
    json!({"communication": {"mode": "ParameterServer", "parameterServer": servers}})
}

fn cases() -> Vec<Case> {
    let case = |name, engine, steps, merge, goal| Case { name, engine, steps, merge, goal };
    // Whole periods of 16, each with one exchange.
    const PERIOD: u64 = 16;
    vec![
        case("f32", json!({}), 3, 1, Some(3.2 * 1.05)),
        case("f16 on the wire", json!({"overlap": {"wireType": "FP16"}}), 4, 1, Some(1.6 * 1.05)),
        case("4 batches merged, f16", json!({"overlap": {"wireType": "FP16"}, "batchMerge": 4}), 2, 4, Some(0.40)),
        case("Local, every 16 steps", json!({"sync": {"type": "Local", "everySteps": PERIOD}}), PERIOD, 1, Some(0.21)),
        case(
            "top-k, 0.1 %",
            json!({"communication": {"compression": {"type": "TopK", "ratio": "0.001"}}}),
            5,
            1,
            Some(0.10),
        ),
        case("sharded optimizer", json!({"sharding": "Optimizer"}), 3, 1, None),
        case("2 parameter servers", servers(2, json!({})), 2, 1, None),
        case("4 parameter servers", servers(4, json!({})), 3, 1, None),
        case(
            "4 parameter servers, Geo 16",
            servers(4, json!({"updates": "Geo", "everySteps": PERIOD})),
            PERIOD,
            1,
            None,
        ),
    ]
}

/// A side's rounds, in seconds.
#[derive(Default)]
struct Rounds {
    step: Vec<f64>,
    beyond: Vec<f64>,
    /// Bytes that the busiest host sends in a step.
    sent: Vec<f64>,
}

pub fn measure(options: &Options) -> Outcome<Value> {
    let hosts = Hosts::start(HOSTS, GIGABIT)?;
    let cases = cases();
    let mut ours: Vec<Rounds> = cases.iter().map(|_| Rounds::default()).collect();
    let mut peers: Vec<Rounds> = PEERS.iter().map(|_| Rounds::default()).collect();
    let mut computes = Vec::new();
    for _ in 0..options.rounds {
        let compute = [alone_seconds(options, &hosts, 1)?, alone_seconds(options, &hosts, 4)?];
        computes.push(compute[0]);
        for (case, rounds) in cases.iter().zip(&mut ours) {
            // Steps of a period start after a whole one.
            let from = WARM_UPS.max(if case.steps >= 16 { case.steps } else { 0 });
            let to = from + case.steps;
            let trained = train(options, &hosts, &MODEL.engine(to, &case.engine))?;
            let step = trained.step_ms(from, to) / 1e3;
            let beyond = (step - compute[usize::from(case.merge > 1)]) / case.merge as f64;
            println!("  {:<28} {step:>8.2} s a step, {beyond:>6.3} s beyond computation", case.name);
            rounds.step.push(step);
            rounds.beyond.push(beyond);
            rounds.sent.push(trained.sent.iter().fold(0, |most, sent| most.max(*sent)) as f64 / to as f64);
        }
        if let Some(python) = &options.python {
            let compute = peer_seconds(&hosts, python, "DDP", false)?;
            for (kind, rounds) in PEERS.iter().zip(&mut peers) {
                let step = peer_seconds(&hosts, python, kind, true)?;
                println!("  {kind:<28} {step:>8.2} s a step, {:>6.3} s beyond computation", step - compute);
                rounds.step.push(step);
                rounds.beyond.push(step - compute);
            }
        }
    }
    let mut rows: Vec<Value> = Vec::new();
    for (case, rounds) in cases.iter().zip(&ours) {
        let mut row = rounds.row("switchyard", case.name);
        row["goalSeconds"] = json!(case.goal);
        row["isMet"] = json!(case.goal.map(|goal| median(&rounds.beyond) <= goal));
        row["sentMBPerStep"] = json!(median(&rounds.sent) / 1e6);
        row["timesSentOfF32"] = json!(median(&rounds.sent) / median(&ours[0].sent));
        row["timesStepOfF32"] = json!(median(&rounds.step) / median(&ours[0].step));
        for (kind, peer) in PEERS.iter().zip(&peers).filter(|(_, peer)| !peer.step.is_empty()) {
            row["speedOf"][*kind] = json!(median(&peer.step) * case.merge as f64 / median(&rounds.step));
        }
        rows.push(row);
    }
    let peers = PEERS.iter().zip(&peers).filter(|(_, peer)| !peer.step.is_empty());
    rows.extend(peers.map(|(kind, rounds)| rounds.row("PyTorch over gloo", kind)));
    let megabytes = MODEL.parameters() as f64 * 4.0 / 1e6;
    // What a ring sends through each link.
    let floor = megabytes * 1e6 * 2.0 * (HOSTS as f64 - 1.0) / HOSTS as f64 / (GIGABIT as f64 / 8.0);
    Ok(json!({
        "hosts": HOSTS, "gigabits": 1, "megabytes": megabytes, "computeSeconds": median(&computes),
        "f32LinkSeconds": floor, "rows": rows,
    }))
}

impl Rounds {
    fn row(&self, side: &str, case: &str) -> Value {
        json!({
            "side": side, "case": case, "stepSeconds": median(&self.step), "beyondSeconds": median(&self.beyond),
            "beyondRange": range(&self.beyond),
        })
    }
}

/// Seconds of a step of `merge` micro-batches without an exchange. The last step averages.
fn alone_seconds(options: &Options, hosts: &Hosts, merge: u64) -> Outcome<f64> {
    let to = WARM_UPS + if merge > 1 { 2 } else { 6 };
    Ok(train(options, hosts, &MODEL.engine(to + 1, &alone(merge)))?.step_ms(WARM_UPS, to) / 1e3)
}

/// What PyTorch does over gloo; FSDP shards gradients and optimizer state (`SHARD_GRAD_OP`).
const PEERS: [&str; 3] = ["DDP", "DDP f16", "FSDP"];

fn peer_seconds(hosts: &Hosts, python: &Path, kind: &str, exchange: bool) -> Outcome<f64> {
    let role = json!({
        "role": "train", "kind": kind, "exchange": exchange, "layers": MODEL.layers, "width": MODEL.width,
        "features": Mlp::FEATURES, "classes": Mlp::CLASSES, "batch": Mlp::BATCH, "warmUps": WARM_UPS, "steps": 3,
    });
    let text = torch(hosts, python, |_| role.clone())?;
    let report = text.lines().find_map(|line| serde_json::from_str::<Value>(line).ok()?["stepSeconds"].as_f64());
    Ok(report.ok_or_else(|| format!("{kind}: got {text:?}, expected the seconds of a step"))?)
}
