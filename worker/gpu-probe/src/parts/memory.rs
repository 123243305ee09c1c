//! Memory that training takes on the device: in bf16 beside f32, and the largest batches of the same memory. The worker's plan knows it to
//! the byte before anything is allocated; two steps of the largest batch show that the device agrees.

use super::steps::{self, Case};
use super::{Probe, gather};
use crate::numbers::{mib, short};
use crate::outcome::Outcome;
use crate::worker::Worker;
use serde_json::{Value, json};
use switchyard_worker_contract::config::{EngineConfig, Length, Precision};
use switchyard_worker_contract::exit::Exit;

/// What cards have that many people have; devices that can be lent have more, so that both numbers are about the same limit there.
const LIMIT: u64 = 24 << 30;
/// Of the device's memory, what the engine takes by default.
const FRACTION: f64 = 0.9;
/// Samples of a micro-batch in f32 whose memory is the limit of a rehearsal.
const REHEARSED: u32 = 9;
/// Memory in bf16 as a share of that in f32.
const GOAL: f64 = 0.6;
/// The largest batch in bf16 as a multiple of that in f32.
const BATCH_GOAL: f64 = 2.0;
const STEPS: u64 = 2;
/// The smallest batch: of one sample a batch norm over single pixels has no deviation.
const FIRST: u32 = 2;
/// Guesses by a line through what is known, before the middle is taken.
const GUESSES: usize = 8;

pub(super) fn run(probe: &Probe) -> Result<Value, Outcome> {
    let (_, device) = probe.present()?;
    let worker = probe.worker()?;
    let limit = LIMIT.min((device.memory_bytes as f64 * FRACTION) as u64);
    let models = [("gpt", steps::gpt_124m_case(probe)), ("resnet", steps::resnet50_case(probe))];
    let rows = models.map(|(name, case)| (json!({"model": name}), of(probe, &worker, name, &case, limit)));
    gather(json!({"device": device.name}), "models", Vec::from(rows))
}

fn of(probe: &Probe, worker: &Worker, name: &str, case: &Case, limit: u64) -> Result<Value, Outcome> {
    let config = |precision: Precision, batch| EngineConfig { precision, ..case.with(batch) };
    let half = case.with(1).precision;
    let need = |precision: Precision| move |batch| bytes(worker, &config(precision, batch));
    let [f32, bf16] = [need(Precision::Fp32), need(half)];
    let limit = match probe.rehearse {
        true => f32(REHEARSED)?.ok_or_else(|| Outcome::failed("memory", "a tiny batch does not fit"))?,
        false => limit,
    };
    let ((plain_batch, plain), (half_batch, half_bytes)) = (largest(limit, f32)?, largest(limit, bf16)?);
    let same = bf16(plain_batch)?.ok_or_else(|| {
        Outcome::failed("memory", format!("a batch of {plain_batch} fits in f32 and not in bf16, expected less"))
    })?;
    let config = EngineConfig { length: Length::Steps(STEPS), fetch_every_steps: 1, ..config(half, half_batch) };
    let ran = worker.train(&format!("memory-{name}"), &config, 1)?;
    let (ratio, batches) = (same as f64 / plain as f64, f64::from(half_batch) / f64::from(plain_batch));
    Ok(json!({
        "batch": plain_batch, "f32MiB": mib(plain), "bf16MiB": mib(same), "ratio": short(ratio), "goal": GOAL,
        "isWithinGoal": ratio <= GOAL, "limitMiB": mib(limit), "largestF32": plain_batch, "largestBf16": half_batch,
        "largestBf16MiB": mib(half_bytes), "batchRatio": short(batches), "batchGoal": BATCH_GOAL,
        "isWithinBatchGoal": batches >= BATCH_GOAL, "trainedSteps": ran.progress.len(),
        "loss": ran.progress.last().map(|last| short(last.loss)),
    }))
}

/// Bytes on the device; `None` if others leave too little for them.
fn bytes(worker: &Worker, config: &EngineConfig) -> Result<Option<u64>, Outcome> {
    match worker.inspect(config) {
        Ok(inspection) => match inspection.gpu_memory {
            Some(memory) => Ok(Some(memory.total())),
            None => Err(Outcome::failed("switchyard-worker inspect", "no memory of a GPU, expected that of the plan")),
        },
        Err(Outcome::Failed { code: Some(code), .. }) if code == Exit::NotPlaceable as i64 => Ok(None),
        Err(other) => Err(other),
    }
}

/// The largest batch that needs no more than the limit, and what it needs. Need grows almost by a line, so few batches are asked about.
fn largest(limit: u64, need: impl Fn(u32) -> Result<Option<u64>, Outcome>) -> Result<(u32, u64), Outcome> {
    let asked = need(FIRST)?;
    let first = asked.filter(|bytes| *bytes <= limit).ok_or_else(|| {
        let got = asked.map_or("more than the device has".to_owned(), |bytes| format!("{bytes} bytes"));
        Outcome::failed("memory", format!("{FIRST} samples need {got}, expected at most {limit}"))
    })?;
    let (mut fits, mut over, mut next) = ((FIRST, first), None, FIRST + 1);
    for guesses in 0.. {
        let bytes = need(next)?;
        match bytes {
            Some(bytes) if bytes <= limit => fits = (next, bytes),
            _ => over = Some(next),
        }
        if over == Some(fits.0 + 1) {
            break;
        }
        let middle = over.filter(|_| guesses >= GUESSES || bytes.is_none()).map(|over| fits.0.midpoint(over));
        let line = bytes.filter(|bytes| *bytes > first).map(|bytes| {
            let of_sample = (bytes - first) as f64 / f64::from(next - FIRST);
            FIRST + ((limit - first) as f64 / of_sample) as u32
        });
        let guess = middle.or(line).unwrap_or(2 * fits.0);
        next = guess.clamp(fits.0 + 1, over.map_or(u32::MAX, |over| over - 1));
    }
    Ok(fits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// What is found, and how many batches were asked about.
    fn found(limit: u64, need: impl Fn(u32) -> Option<u64>) -> ((u32, u64), u32) {
        let asked = Cell::new(0);
        let counted = |batch| {
            asked.set(asked.get() + 1);
            Ok(need(batch))
        };
        (largest(limit, counted).unwrap(), asked.get())
    }

    #[test]
    fn the_largest_batch_is_found_with_few_questions() {
        let line = |batch: u32| Some(1000 + 70 * u64::from(batch));
        assert_eq!(found(1140, line).0, (2, 1140));
        assert_eq!(found(24_000, line).0, (328, 23_960));
        assert!(found(24_000, line).1 <= 5, "{:?}", found(24_000, line));
        // A workspace that other batches need.
        let steps = |batch: u32| Some(1000 + 70 * u64::from(batch) + if batch > 40 { 500 } else { 0 });
        for limit in [1140, 1209, 3800, 3801, 4000, 4370, 4371, 9999] {
            let ((batch, bytes), asked) = found(limit, steps);
            assert!(
                Some(bytes) == steps(batch) && bytes <= limit && steps(batch + 1) > Some(limit),
                "{limit}: {batch}"
            );
            assert!(asked < 30, "{limit}: {asked}");
        }
        // Others have memory, so that less than the limit fits.
        let (found, asked) = found(1_000_000, |batch| line(batch).filter(|bytes| *bytes < 8000));
        assert!(found == (99, 7930) && asked < 30, "{found:?} {asked}");
    }

    #[test]
    fn a_sample_that_does_not_fit_is_told() {
        let Err(Outcome::Failed { text, .. }) = largest(10, |_| Ok(Some(11))) else { panic!("it passed") };
        assert_eq!(text, "2 samples need 11 bytes, expected at most 10");
        assert!(largest(10, |_| Err(Outcome::failed("inspect", "no"))).is_err());
    }
}
