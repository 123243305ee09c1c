//! Every kernel with the launches of the tests on the executor, which `cargo xtask gpu bundle` has recorded: is the device's memory as the
//! executor's was?

mod judge;

use super::{Probe, gather};
use crate::numbers::short;
use crate::outcome::Outcome;
use judge::{Found, Memory, Tolerance, judge};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use switchyard_cuda::Error;
use switchyard_cuda::driver::{Buffer, Context, Loaded, Stream};
use switchyard_cuda::kernels::recorded::{BYTES, CASES, Case, Kept};
use switchyard_cuda::kernels::{Format, Program};
use switchyard_cuda::nvrtc::Nvrtc;

/// Formats whose numbers may differ a little where arithmetic is approximate.
const APPROXIMATE: [(&str, Format); 3] = [("f32", Format::F32), ("bf16", Format::Bf16), ("fp16", Format::F16)];

/// What was found of a kernel.
#[derive(Default)]
struct Row {
    cases: usize,
    wrong_cases: usize,
    is_exact: bool,
    found: Found,
}

pub(super) fn run(probe: &Probe) -> Result<Value, Outcome> {
    let (context, device) = probe.start()?;
    let vectors = Vectors::read(&probe.vectors()?)?;
    let mut launcher = Launcher { nvrtc: probe.nvrtc()?, stream: context.stream()?, context, loaded: Vec::new() };
    let mut rows: BTreeMap<String, Row> = BTreeMap::new();
    let mut ended = None;
    for (number, case) in vectors.cases.iter().enumerate() {
        let row = rows.entry(case.launch.kernel().to_owned()).or_default();
        // A device that has failed has no more results.
        if let Err(outcome) = launcher.play(&vectors, case, number, row) {
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
        "tolerances": APPROXIMATE.map(tolerance),
    });
    let rows = rows.into_iter().map(|(kernel, row)| figures(&kernel, row)).chain(ended);
    gather(what, "kernels", rows.collect())
}

fn figures(kernel: &str, row: Row) -> (Value, Result<Value, Outcome>) {
    let Row { cases, wrong_cases, is_exact, found } = row;
    let told = json!({
        "kernel": kernel, "cases": cases, "wrongCases": wrong_cases, "isExact": is_exact, "bytes": found.bytes, "numbers": found.numbers,
        "different": found.different, "largestError": short(found.error), "ofAllowed": short(found.of_allowed),
    });
    let text = |wrong| format!("{wrong_cases} of {cases} cases are wrong; the first: {wrong}");
    (told, found.wrong.map_or_else(|| Ok(json!({})), |wrong| Err(Outcome::failed(kernel, text(wrong)))))
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

    /// What was in an allocation.
    fn bytes(&self, ranges: &[Range<usize>]) -> Result<Vec<u8>, Outcome> {
        let part = |range: &Range<usize>| {
            let text = || format!("{BYTES} has {} bytes, expected those of {range:?}", self.bytes.len());
            self.bytes.get(range.clone()).ok_or_else(|| Outcome::failed("vectors", text()))
        };
        Ok(ranges.iter().map(part).collect::<Result<Vec<_>, _>>()?.concat())
    }
}

/// The device, and programs that were compiled for it.
struct Launcher {
    nvrtc: Nvrtc,
    context: Context,
    stream: Stream,
    loaded: Vec<Loaded>,
}

impl Launcher {
    /// Where the program is among those that are loaded.
    fn load(&mut self, program: &Program) -> Result<usize, Error> {
        if let Some(index) = self.loaded.iter().position(|loaded| loaded.program() == program) {
            return Ok(index);
        }
        self.loaded.push(self.context.load(program.clone(), &self.nvrtc)?);
        Ok(self.loaded.len() - 1)
    }

    /// Runs a launch and compares all of its memory. An error: device, compiler or file are of no use any more.
    fn play(&mut self, vectors: &Vectors, case: &Case, number: usize, row: &mut Row) -> Result<(), Outcome> {
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
            let found = judge(memory, &own, row.is_exact);
            is_wrong |= found.wrong.is_some();
            row.found.join(found, |wrong| format!("case {number}, `{}`, {wrong}; {}", kept.name, case.launch));
        }
        row.wrong_cases += usize::from(is_wrong);
        Ok(())
    }
}
