//! GPU memory of training: bf16 versus f32, and the largest batches that fit in the same memory.
//! The worker's plan computes it to the byte before anything is allocated; two steps of the largest
//! batch confirm it on the device.

use super::steps::{self, Case};
use super::{Probe, gather};
use crate::numbers::{mib, short};
use crate::outcome::Outcome;
use crate::worker::Worker;
use serde_json::{Value, json};
use switchyard_worker_contract::config::{EngineConfig, Length, Precision};
use switchyard_worker_contract::exit::Exit;

/// Memory of widespread GPUs. The devices we can borrow have more; a common limit keeps the figures
/// comparable.
const LIMIT: u64 = 24 << 30;
/// Fraction of the device's memory that the engine uses by default.
const FRACTION: f64 = 0.9;
/// In a rehearsal, the limit is the memory of this f32 batch.
const REHEARSED: u32 = 9;
/// Allowed memory in bf16 relative to f32.
const GOAL: f64 = 0.6;
/// Required largest batch in bf16 relative to f32.
const BATCH_GOAL: f64 = 2.0;
const STEPS: u64 = 2;
/// With one sample, a batch norm over single pixels has no variance.
const SMALLEST_BATCH: u32 = 2;
/// Interpolations before falling back to bisection.
const MAX_GUESSES: usize = 8;

pub(super) fn run(probe: &Probe) -> Result<Value, Outcome> {
    let (_, device) = probe.require_device()?;
    let worker = probe.worker()?;
    let limit = LIMIT.min((device.memory_bytes as f64 * FRACTION) as u64);
    let models = [("gpt", steps::gpt_124m_case(probe)), ("resnet", steps::resnet50_case(probe))];
    let rows = models.map(|(name, case)| (json!({"model": name}), measure(probe, &worker, name, &case, limit)));
    gather(json!({"device": device.name}), "models", Vec::from(rows))
}

fn measure(probe: &Probe, worker: &Worker, name: &str, case: &Case, limit: u64) -> Result<Value, Outcome> {
    let config = |precision: Precision, batch| EngineConfig { precision, ..case.with(batch) };
    let half = case.with(1).precision;
    let need = |precision: Precision| move |batch| bytes(worker, &config(precision, batch));
    let [f32, bf16] = [need(Precision::Fp32), need(half)];
    let limit = match probe.rehearse {
        true => f32(REHEARSED)?.ok_or_else(|| Outcome::failed("memory", "a tiny batch does not fit"))?,
        false => limit,
    };
    let ((plain_batch, plain), (half_batch, half_bytes)) = (largest(limit, f32)?, largest(limit, bf16)?);
    let same = bf16(plain_batch)?
        .ok_or_else(|| Outcome::failed("memory", format!("a batch of {plain_batch} fits in f32 but not in bf16")))?;
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

/// Bytes on the device; `None` if other processes leave too little.
fn bytes(worker: &Worker, config: &EngineConfig) -> Result<Option<u64>, Outcome> {
    match worker.inspect(config) {
        Ok(inspection) => match inspection.gpu_memory {
            Some(memory) => Ok(Some(memory.total())),
            None => Err(Outcome::failed("switchyard-worker inspect", "got no GPU memory; expected the plan's")),
        },
        Err(Outcome::Failed { code: Some(code), .. }) if code == Exit::NotPlaceable as i64 => Ok(None),
        Err(other) => Err(other),
    }
}

/// The largest batch within the limit, and its memory. Memory is almost linear in the batch, so
/// interpolation needs few queries.
fn largest(limit: u64, need: impl Fn(u32) -> Result<Option<u64>, Outcome>) -> Result<(u32, u64), Outcome> {
    let queries = need(SMALLEST_BATCH)?;
    let first = queries.filter(|bytes| *bytes <= limit).ok_or_else(|| {
        let got = queries.map_or("more than the device has".to_owned(), |bytes| format!("{bytes} bytes"));
        Outcome::failed("memory", format!("{SMALLEST_BATCH} samples need {got}, expected at most {limit}"))
    })?;
    let (mut fits, mut over, mut next) = ((SMALLEST_BATCH, first), None, SMALLEST_BATCH + 1);
    for guesses in 0.. {
        let bytes = need(next)?;
        match bytes {
            Some(bytes) if bytes <= limit => fits = (next, bytes),
            _ => over = Some(next),
        }
        if over == Some(fits.0 + 1) {
            break;
        }
        let middle = over.filter(|_| guesses >= MAX_GUESSES || bytes.is_none()).map(|over| fits.0.midpoint(over));
        let line = bytes.filter(|bytes| *bytes > first).map(|bytes| {
            let of_sample = (bytes - first) as f64 / f64::from(next - SMALLEST_BATCH);
            SMALLEST_BATCH + ((limit - first) as f64 / of_sample) as u32
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

    /// The result, and the number of queries.
    fn found(limit: u64, need: impl Fn(u32) -> Option<u64>) -> ((u32, u64), u32) {
        let queries = Cell::new(0);
        let counted = |batch| {
            queries.set(queries.get() + 1);
            Ok(need(batch))
        };
        (largest(limit, counted).unwrap(), queries.get())
    }

    #[test]
    fn the_largest_batch_is_found_with_few_queries() {
        let line = |batch: u32| Some(1000 + 70 * u64::from(batch));
        assert_eq!(found(1140, line).0, (2, 1140));
        assert_eq!(found(24_000, line).0, (328, 23_960));
        assert!(found(24_000, line).1 <= 5, "{:?}", found(24_000, line));
        // Larger batches need a workspace.
        let steps = |batch: u32| Some(1000 + 70 * u64::from(batch) + if batch > 40 { 500 } else { 0 });
        for limit in [1140, 1209, 3800, 3801, 4000, 4370, 4371, 9999] {
            let ((batch, bytes), queries) = found(limit, steps);
            assert!(
                Some(bytes) == steps(batch) && bytes <= limit && steps(batch + 1) > Some(limit),
                "{limit}: {batch}"
            );
            assert!(queries < 30, "{limit}: {queries}");
        }
        // Other processes use memory, so less than the limit fits.
        let (found, queries) = found(1_000_000, |batch| line(batch).filter(|bytes| *bytes < 8000));
        assert!(found == (99, 7930) && queries < 30, "{found:?} {queries}");
    }

    #[test]
    fn a_sample_that_does_not_fit_is_an_error() {
        let Err(Outcome::Failed { text, .. }) = largest(10, |_| Ok(Some(11))) else { panic!("it passed") };
        assert_eq!(text, "2 samples need 11 bytes, expected at most 10");
        assert!(largest(10, |_| Err(Outcome::failed("inspect", "no"))).is_err());
    }
}
