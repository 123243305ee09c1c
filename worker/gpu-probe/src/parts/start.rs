//! Seconds from the start of the worker to its first step, with an empty cache and with the one
//! that this leaves. All other parts share a cache.

use super::{Probe, gather, steps};
use crate::numbers::short;
use crate::outcome::Outcome;
use crate::scratch;
use serde_json::{Value, json};
use switchyard_worker_contract::config::{EngineConfig, Length};

/// Largest number of seconds from the start to the first step with a warm cache.
const GOAL: f64 = 3.0;

pub(super) fn run(probe: &Probe) -> Result<Value, Outcome> {
    let (_, device) = probe.require_device()?;
    let failed = |error: std::io::Error| Outcome::failed("cache", error.to_string());
    let cache = scratch::folder("start-cache").map_err(failed)?;
    let worker = probe.worker()?.with_cache(&cache);
    let case = steps::gpt_124m_case(probe);
    // `inspect` would fill the cache.
    let batch = if probe.rehearse { 2 } else { 1 };
    let config = EngineConfig { length: Length::Steps(2), fetch_every_steps: 1, ..case.with(batch) };
    let files = || std::fs::read_dir(&cache).map(Iterator::count).map_err(failed);
    let start = |cached: &str| -> Result<Value, Outcome> {
        let before = files()?;
        let ran = worker.train(&format!("start-{cached}"), &config, 1)?;
        Ok(json!({"filesBefore": before, "filesAfter": files()?, "secondsToFirstReport": short(ran.seconds_to_first)}))
    };
    let (cold, warm) = (start("cold"), start("warm"));
    let is_used = matches!((&cold, &warm), (Ok(cold), Ok(warm)) if cold["filesAfter"].as_u64() > Some(0)
        && cold["filesAfter"] == warm["filesAfter"]);
    let seconds = warm.as_ref().ok().and_then(|warm| warm["secondsToFirstReport"].as_f64());
    let figures = json!({
        "device": device.name, "goal": GOAL, "isWithinGoal": seconds.map(|seconds| seconds <= GOAL),
    });
    let rows = vec![(json!({"cache": "cold"}), cold), (json!({"cache": "warm"}), warm)];
    let figures = gather(figures, "starts", rows)?;
    match is_used {
        true => Ok(figures),
        false => Err(Outcome::Failed {
            call: "cache".into(),
            code: None,
            text: "got another number of files after the warm start; expected it to add none".into(),
            figures: Some(figures),
        }),
    }
}
