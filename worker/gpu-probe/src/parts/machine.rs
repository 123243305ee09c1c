//! Facts about the machine, and the current state of the GPU.

use super::Probe;
use crate::outcome::Outcome;
use crate::version;
use serde_json::{Value, json};
use std::process::{Command, Stdio};

/// Fields queried from `nvidia-smi`, which comes with the driver.
const FACTS: &str = "name,driver_version,vbios_version,memory.total,power.limit,clocks.max.sm,clocks.max.memory";
const STATE: &str = "temperature.gpu,power.draw,clocks.sm,clocks.mem,clocks_event_reasons.active,memory.used";

pub(super) fn facts(probe: &Probe) -> Result<Value, Outcome> {
    let first = |file: &str| std::fs::read_to_string(file).ok().map(|text| text.trim().to_owned());
    let cpu = std::fs::read_to_string("/proc/cpuinfo").ok().and_then(|info| {
        let line = info.lines().find_map(|line| line.strip_prefix("model name"))?;
        Some(line.trim_start_matches([' ', '\t', ':']).to_owned())
    });
    Ok(json!({
        "probe": version::OWN,
        "worker": probe.worker().is_ok(),
        "cpu": cpu,
        "cores": std::thread::available_parallelism().map_or(1, usize::from),
        "kernel": first("/proc/sys/kernel/osrelease"),
        "gpu": query(FACTS),
        "state": state(),
    }))
}

/// Temperature, power, clocks and throttling reasons; null without `nvidia-smi`.
pub(super) fn state() -> Value {
    query(STATE)
}

/// The values of these fields for each GPU, by name.
fn query(fields: &str) -> Value {
    let mut command = Command::new("nvidia-smi");
    command.arg(format!("--query-gpu={fields}")).arg("--format=csv,noheader").stdin(Stdio::null());
    let Ok(output) = command.output() else { return Value::Null };
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        return text.trim().into();
    }
    let pairs = |line: &str| {
        let pairs = fields.split(',').zip(line.split(',')).map(|(name, value)| (name.to_owned(), value.trim().into()));
        Value::Object(pairs.collect())
    };
    text.lines().map(pairs).collect()
}
