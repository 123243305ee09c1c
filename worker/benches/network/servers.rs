//! Parameter servers with one worker behind half of the rate.

use super::hosts::Hosts;
use super::training::{Mlp, train};
use super::{Options, Outcome, median, range};
use serde_json::{Value, json};

const WORKERS: usize = 4;
const SERVERS: usize = 2;
const GIGABIT: u64 = 1_000_000_000;
/// The last worker; servers are with the first and the third.
const SLOW: usize = WORKERS - 1;
const MODEL: Mlp = Mlp { layers: 9, width: 880 };
const WARM_UPS: u64 = 2;
const STEPS: u64 = 32;
const UPDATES: [(&str, &str); 3] = [
    ("Synchronous", r#"{"updates": "Synchronous"}"#),
    ("Asynchronous", r#"{"updates": "Asynchronous", "maxStaleness": 4}"#),
    ("Geo", r#"{"updates": "Geo", "everySteps": 16}"#),
];

pub fn measure(options: &Options) -> Outcome<Value> {
    let hosts = Hosts::start(WORKERS, GIGABIT)?;
    let mut rates = vec![Vec::new(); 2 * UPDATES.len()];
    for _ in 0..options.rounds {
        for (slow, rates) in [GIGABIT, GIGABIT / 2].into_iter().zip(rates.chunks_mut(UPDATES.len())) {
            hosts.limit(SLOW, slow)?;
            for ((_, updates), rates) in UPDATES.iter().zip(rates) {
                let servers = super::with(json!({"servers": SERVERS}), serde_json::from_str(updates)?);
                let more = json!({"communication": {"mode": "ParameterServer", "parameterServer": servers}});
                let trained = train(options, &hosts, &MODEL.engine(WARM_UPS + STEPS, &more))?;
                let samples = (WORKERS * Mlp::BATCH) as f64 * STEPS as f64;
                rates.push(samples / trained.seconds_after(WARM_UPS));
            }
        }
    }
    println!("# {WORKERS} workers, {SERVERS} servers, {:.0} MB", MODEL.parameters() as f64 * 4e-6);
    let rows = rates.iter().enumerate().map(|(index, measured)| {
        let (slow, update) = (index / UPDATES.len(), index % UPDATES.len());
        let times = median(measured) / median(&rates[slow * UPDATES.len()]);
        let rate = [1.0, 0.5][slow];
        println!(
            "  {:<14} last worker at {rate} Gbit/s: {:>8.1} samples/s, {times:.2} x synchronous",
            UPDATES[update].0,
            median(measured)
        );
        json!({
            "updates": UPDATES[update].0, "lastWorkerGigabits": rate, "samplesPerSecond": median(measured),
            "range": range(measured), "timesSynchronous": times,
        })
    });
    let rows: Vec<Value> = rows.collect();
    Ok(json!({"workers": WORKERS, "servers": SERVERS, "megabytes": MODEL.parameters() as f64 * 4e-6, "rows": rows}))
}
