//! The parts of the probe. Each is one check with its own outcome.

mod all_reduce;
mod attention;
mod convolutions;
mod counters;
mod input;
mod kernels;
mod libraries;
mod machine;
mod memory;
mod products;
mod rates;
mod sanitizer;
mod start;
mod steps;
mod streams;
mod training;
mod vectors;

use crate::cpu_losses::CpuLosses;
use crate::outcome::Outcome;
use crate::worker::Worker;
use serde_json::{Value, json};
use std::path::PathBuf;
use switchyard_cuda::driver::{Context, Device, Driver};
use switchyard_cuda::find::{CUBLASLT, CUDNN, DRIVER, NVRTC, Places};
use switchyard_cuda::nvrtc::Nvrtc;
use switchyard_cuda::{Error, Library};
pub(crate) use training::record_cpu_losses;

/// Arguments shared by all parts.
pub(crate) struct Probe {
    pub(crate) places: Places,
    /// Index of the device.
    pub(crate) device: usize,
    /// The interpreter whose packages are searched and whose PyTorch is benchmarked.
    pub(crate) python: Option<PathBuf>,
    /// The worker program, if not the one next to the probe.
    pub(crate) worker: Option<PathBuf>,
    /// Folder of recorded launches, if not the one next to the probe.
    pub(crate) vectors: Option<PathBuf>,
    /// File of recorded losses, if not the one next to the probe.
    pub(crate) cpu_losses: Option<PathBuf>,
    /// Folder of the results.
    pub(crate) out: Option<PathBuf>,
    /// Use small sizes.
    pub(crate) rehearse: bool,
}

pub(crate) struct Part {
    pub(crate) name: &'static str,
    /// Short description of what the part checks.
    pub(crate) title: &'static str,
    /// Estimated seconds on an H100 with PyTorch, a warm driver and the cached kernels of the parts
    /// before it.
    pub(crate) expected: u64,
    /// Seconds after which it counts as hung. Libraries are up to 500 MB and may be on a slow disk.
    pub(crate) limit: u64,
    pub(crate) run: fn(&Probe) -> Result<Value, Outcome>,
}

const fn part(
    name: &'static str,
    title: &'static str,
    (expected, limit): (u64, u64),
    run: fn(&Probe) -> Result<Value, Outcome>,
) -> Part {
    Part { name, title, expected, limit, run }
}

/// All parts, those that settle most first: whether the riskiest libraries work and kernels are
/// correct, whether training is, the speed goals, and then everything else. `--budget` follows this
/// order.
pub(crate) const PARTS: [Part; 34] = [
    part("machine", "the machine", (2, 60), machine::facts),
    part("driver", "driver and devices", (3, 60), libraries::driver),
    part("cublaslt", "cuBLASLt", (2, 60), libraries::cublaslt),
    part("nvrtc", "NVRTC", (2, 60), libraries::nvrtc),
    part("nccl", "NCCL", (2, 60), libraries::nccl),
    part("cudnn", "cuDNN", (4, 60), libraries::cudnn),
    part("streams", "copies, events, graphs", (3, 60), streams::run),
    part("rates", "copies, products, launches", (20, 120), rates::run),
    part("vectors", "every kernel vs the executor", (30, 240), vectors::run),
    part("attention", "cuDNN attention vs the CPU", (15, 180), attention::run),
    part("convolutions", "cuDNN at ResNet-50 shapes", (40, 300), convolutions::run),
    part("training-gpt", "GPT training vs the CPU", (45, 240), training::gpt),
    part("training-resnet", "ResNet training vs the CPU", (35, 240), training::resnet),
    part("steps-gpt", "steps of GPT-124M, bf16", (100, 300), steps::gpt_124m),
    part("kernels-gpt", "kernels of GPT-124M, bf16", (25, 180), kernels::gpt),
    part("steps-resnet", "steps of ResNet-50, bf16", (90, 300), steps::resnet50),
    part("kernels-resnet", "kernels of ResNet-50, bf16", (30, 180), kernels::resnet),
    part("steps-bert", "steps of BERT base, fp16", (70, 300), steps::bert_base),
    part("start", "cold and warm start", (20, 120), start::run),
    part("products", "cuBLASLt at GPT shapes", (15, 180), products::run),
    part("all-reduce", "NCCL with one rank", (5, 120), all_reduce::run),
    part("training-bert", "BERT training vs the CPU", (40, 240), training::bert),
    part("memcheck", "compute-sanitizer: memory", (30, 120), |probe| sanitizer::run(probe, "memcheck")),
    part("resume", "checkpoints across devices", (20, 180), training::resume),
    part("training-mlp", "MLP training vs the CPU", (8, 120), training::mlp),
    part("input-resnet", "input of ResNet-50", (75, 240), input::resnet),
    part("counters", "Nsight Compute on GPT-124M", (60, 240), counters::gpt),
    part("steps-gpt-fp8", "steps of GPT-124M, bf16 and FP8", (60, 300), steps::gpt_124m_fp8),
    part("steps-gpt-tiny", "steps of a tiny GPT, bf16", (45, 200), steps::gpt_tiny),
    part("steps-mlp", "steps of an MLP, f32", (40, 200), steps::mlp),
    part("racecheck", "compute-sanitizer: races", (30, 120), |probe| sanitizer::run(probe, "racecheck")),
    part("synccheck", "compute-sanitizer: barriers", (30, 120), |probe| sanitizer::run(probe, "synccheck")),
    part("initcheck", "compute-sanitizer: init", (30, 120), |probe| sanitizer::run(probe, "initcheck")),
    part("memory", "memory of bf16 vs f32", (40, 300), memory::run),
];

impl Probe {
    /// The requested device. Its absence is an outcome, not a failure.
    fn require_device(&self) -> Result<(Driver, Device), Outcome> {
        let driver = self.places.open(&DRIVER).and_then(|found| Driver::new(&found.library));
        let driver = driver.map_err(|error| match Outcome::from(error) {
            Outcome::Absent { reason, looked_for } => {
                Outcome::Absent { reason: format!("no GPU: {reason}"), looked_for }
            }
            other => other,
        })?;
        let devices = driver.devices()?;
        let missing = || Outcome::absent(format!("no device {}: there are {}", self.device, devices.len()));
        let device = devices.get(self.device).cloned().ok_or_else(missing)?;
        Ok((driver, device))
    }

    /// The requested device and a context on it.
    fn start(&self) -> Result<(Context, Device), Outcome> {
        let (driver, device) = self.require_device()?;
        Ok((driver.context(&device)?, device))
    }

    /// The worker program.
    fn worker(&self) -> Result<Worker, Outcome> {
        Worker::new(self.worker.as_deref(), self.python.as_deref(), self.device)
    }

    /// Folder of recorded launches.
    fn vectors(&self) -> Result<PathBuf, Outcome> {
        let folder = given_or_own(self.vectors.as_ref(), "vectors")?;
        if !folder.is_dir() {
            let looked_for = vec![folder.display().to_string()];
            return Err(Outcome::Absent { reason: "no vectors".into(), looked_for });
        }
        Ok(folder)
    }

    /// Recorded losses; none without the file.
    fn cpu_losses(&self) -> Result<CpuLosses, Outcome> {
        CpuLosses::read(&given_or_own(self.cpu_losses.as_ref(), "cpu-losses.json")?)
    }

    fn nvrtc(&self) -> Result<Nvrtc, Error> {
        Nvrtc::new(&self.places.open(&NVRTC)?.library)
    }

    /// cuDNN, loaded but not initialised.
    fn cudnn(&self) -> Result<Library, Error> {
        // cuDNN looks these up through the loader by name, and itself reports what it cannot do
        // without them.
        let _ = [CUBLASLT, NVRTC].map(|needed| self.places.open(&needed));
        Ok(self.places.open(&CUDNN)?.library)
    }
}

/// A path from the command line, or this name next to the probe.
fn given_or_own(given: Option<&PathBuf>, name: &str) -> Result<PathBuf, Outcome> {
    let own = || std::env::current_exe().map(|probe| probe.with_file_name(name));
    given.cloned().map_or_else(own, Ok).map_err(|error| Outcome::failed("current_exe", error.to_string()))
}

/// Combines the rows of a part with several measurements: failed rows do not hide the others, and
/// the first failure becomes the outcome. Each row starts with what was measured.
fn gather(mut figures: Value, list: &str, rows: Vec<(Value, Result<Value, Outcome>)>) -> Result<Value, Outcome> {
    let mut first = None;
    let rows: Vec<Value> = rows
        .into_iter()
        .map(|(mut row, result)| {
            match (result, &mut row) {
                (Ok(Value::Object(mut more)), Value::Object(row)) => row.append(&mut more),
                (Ok(other), _) => row["figure"] = other,
                (Err(outcome), _) => {
                    row["outcome"] = json!(outcome);
                    first.get_or_insert(outcome);
                }
            }
            row
        })
        .collect();
    figures[list] = rows.into();
    match first {
        None => Ok(figures),
        Some(Outcome::Failed { call, code, text, .. }) => {
            Err(Outcome::Failed { call, code, text, figures: Some(figures) })
        }
        Some(other) => Err(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_row_does_not_hide_the_others() {
        let good = || (json!({"n": 1}), Ok(json!({"ms": 2})));
        let all = gather(json!({"device": "x"}), "rows", vec![good(), good()]).unwrap();
        assert_eq!(all, json!({"device": "x", "rows": [{"n": 1, "ms": 2}, {"n": 1, "ms": 2}]}));
        let bad = (json!({"n": 2}), Err(Outcome::failed("call", "text")));
        let outcome = gather(json!({}), "rows", vec![good(), bad]).unwrap_err();
        let Outcome::Failed { call, figures: Some(figures), .. } = outcome else { panic!("{outcome:?}") };
        assert_eq!((call.as_str(), &figures["rows"][0]["ms"]), ("call", &json!(2)));
        assert_eq!(figures["rows"][1]["outcome"]["status"], "Failed");
    }
}
