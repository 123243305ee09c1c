//! Replays the kernel launches that `cargo xtask gpu bundle` recorded on the executor, and compares
//! the device's memory with the executor's.

mod compare;

use super::{Probe, gather};
use crate::numbers::short;
use crate::outcome::Outcome;
use compare::{Comparison, Memory, Tolerance, compare};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;
use switchyard_cuda::Error;
use switchyard_cuda::driver::{Buffer, Context, Loaded, Stream};
use switchyard_cuda::kernels::recorded::{BYTES, CASES, Case, Kept};
use switchyard_cuda::kernels::{Format, Program};
use switchyard_cuda::nvrtc::Nvrtc;

/// Formats that tolerate small differences where arithmetic is approximate.
const APPROXIMATE: [(&str, Format); 3] = [("f32", Format::F32), ("bf16", Format::Bf16), ("fp16", Format::F16)];

/// Accumulated results of a kernel.
#[derive(Default)]
struct Row {
    cases: usize,
    wrong_cases: usize,
    is_exact: bool,
    comparison: Comparison,
}

pub(super) fn run(probe: &Probe) -> Result<Value, Outcome> {
    let (context, device) = probe.start()?;
    let vectors = Vectors::read(&probe.vectors()?)?;
    let mut launcher = Launcher { nvrtc: probe.nvrtc()?, stream: context.stream()?, context, loaded: Vec::new() };
    let start = Instant::now();
    launcher.load_all(&vectors.cases);
    let seconds = start.elapsed().as_secs_f64();
    let mut rows: BTreeMap<String, Row> = BTreeMap::new();
    let mut ended = None;
    for (number, case) in vectors.cases.iter().enumerate() {
        let row = rows.entry(case.launch.kernel().to_owned()).or_default();
        // A failed device gives no further results.
        if let Err(outcome) = launcher.replay(&vectors, case, number, row) {
            ended = Some((json!({"kernel": case.launch.kernel(), "case": number}), Err(outcome)));
            break;
        }
    }
    let played: usize = rows.values().map(|row| row.cases).sum();
    let tolerance = |(name, format)| {
        let Tolerance { relative, of_largest, absolute } = Tolerance::of(format, false);
        json!({"numbers": name, "relative": relative, "ofLargest": of_largest, "absolute": absolute})
    };
    let what = json!({
        "device": device.name, "cases": vectors.cases.len(), "played": played, "programs": launcher.loaded.len(),
        "compileSeconds": short(seconds),
        "tolerances": APPROXIMATE.map(tolerance),
    });
    let rows = rows.into_iter().map(|(kernel, row)| figures(&kernel, row)).chain(ended);
    gather(what, "kernels", rows.collect())
}

fn figures(kernel: &str, row: Row) -> (Value, Result<Value, Outcome>) {
    let Row { cases, wrong_cases, is_exact, comparison } = row;
    let figures = json!({
        "kernel": kernel, "cases": cases, "wrongCases": wrong_cases, "isExact": is_exact, "bytes": comparison.bytes, "numbers": comparison.numbers,
        "different": comparison.different, "largestError": short(comparison.error), "ofAllowed": short(comparison.of_allowed),
    });
    let text = |wrong| format!("{wrong_cases} of {cases} cases are wrong; the first: {wrong}");
    (figures, comparison.mismatch.map_or_else(|| Ok(json!({})), |wrong| Err(Outcome::failed(kernel, text(wrong)))))
}

/// The recorded launches.
struct Vectors {
    cases: Vec<Case>,
    bytes: Vec<u8>,
}

impl Vectors {
    fn read(folder: &Path) -> Result<Vectors, Outcome> {
        let failed = |file: &Path, text: String| Outcome::failed("vectors", format!("{}: {text}", file.display()));
        let [cases, bytes] = [CASES, BYTES].map(|name| folder.join(name));
        let text = std::fs::read_to_string(&cases).map_err(|error| failed(&cases, error.to_string()))?;
        let lines = text.lines().enumerate().map(|(line, text)| {
            text.parse().map_err(|error: Error| failed(&cases, format!("line {}: {error}", line + 1)))
        });
        let lines = lines.collect::<Result<Vec<_>, _>>()?;
        if lines.is_empty() {
            return Err(failed(&cases, "no cases, expected at least one".into()));
        }
        let content = std::fs::read(&bytes).map_err(|error| failed(&bytes, error.to_string()))?;
        Ok(Vectors { cases: lines, bytes: content })
    }

    /// Reassembles the content of an allocation.
    fn bytes(&self, ranges: &[Range<usize>]) -> Result<Vec<u8>, Outcome> {
        let part = |range: &Range<usize>| {
            let text = || format!("{BYTES} has {} bytes, expected those of {range:?}", self.bytes.len());
            self.bytes.get(range.clone()).ok_or_else(|| Outcome::failed("vectors", text()))
        };
        Ok(ranges.iter().map(part).collect::<Result<Vec<_>, _>>()?.concat())
    }
}

/// The device, and the programs compiled for it.
struct Launcher {
    nvrtc: Nvrtc,
    context: Context,
    stream: Stream,
    loaded: Vec<Loaded>,
}

impl Launcher {
    /// Compiles and loads all programs, on all cores. [`Launcher::load`] repeats those that fail
    /// and reports the error with the launch.
    fn load_all(&mut self, cases: &[Case]) {
        let mut programs: Vec<Program> = Vec::new();
        for program in cases.iter().filter_map(|case| case.launch.program().ok()) {
            if !programs.contains(&program) {
                programs.push(program);
            }
        }
        let (next, loaded) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(programs.len());
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    while let Some(program) = programs.get(next.fetch_add(1, Ordering::Relaxed)) {
                        if let Ok(new) = self.context.load(program.clone(), &self.nvrtc) {
                            loaded.lock().unwrap_or_else(PoisonError::into_inner).push(new);
                        }
                    }
                });
            }
        });
        self.loaded = loaded.into_inner().unwrap_or_else(PoisonError::into_inner);
    }

    /// Loads a program if necessary; returns its index in `loaded`.
    fn load(&mut self, program: &Program) -> Result<usize, Error> {
        if let Some(index) = self.loaded.iter().position(|loaded| loaded.program() == program) {
            return Ok(index);
        }
        self.loaded.push(self.context.load(program.clone(), &self.nvrtc)?);
        Ok(self.loaded.len() - 1)
    }

    /// Replays a launch and compares all of its memory. An error means that device, compiler or
    /// files are unusable.
    fn replay(&mut self, vectors: &Vectors, case: &Case, number: usize, row: &mut Row) -> Result<(), Outcome> {
        let all = |kept: fn(&Kept) -> &[Range<usize>]| {
            case.buffers.iter().map(|buffer| vectors.bytes(kept(buffer))).collect::<Result<Vec<_>, _>>()
        };
        let (before, expected) = (all(|kept| &kept.before)?, all(|kept| &kept.after)?);
        let buffers = before.iter().map(|bytes| self.context.upload(bytes)).collect::<Result<Vec<Buffer>, Error>>()?;
        let call = case
            .launch
            .call(|place| buffers.get(place.buffer)?.part(place.offset..place.offset.checked_add(place.bytes)?))?;
        let (index, written) = (self.load(call.program())?, case.launch.written()?);
        self.loaded[index].launch(&call, &self.stream)?;
        row.cases += 1;
        row.is_exact = call.program().is_exact();
        let mut is_wrong = false;
        for (index, (buffer, kept)) in buffers.iter().zip(&case.buffers).enumerate() {
            let got = buffer.download::<u8>(0..buffer.bytes())?;
            let own = written.iter().filter(|(place, _)| place.buffer == index);
            let own: Vec<_> = own.map(|(place, format)| (place.offset..place.offset + place.bytes, *format)).collect();
            let memory = Memory { before: &before[index], expected: &expected[index], got: &got };
            let comparison = compare(memory, &own, row.is_exact);
            is_wrong |= comparison.mismatch.is_some();
            row.comparison
                .join(comparison, |wrong| format!("case {number}, `{}`, {wrong}; {}", kept.name, case.launch));
        }
        row.wrong_cases += usize::from(is_wrong);
        Ok(())
    }
}
