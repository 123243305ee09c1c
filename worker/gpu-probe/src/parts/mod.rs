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
mod optimizer;
mod products;
mod rates;
mod sanitizer;
mod steps;
mod streams;
mod training;
mod vectors;

use crate::outcome::Outcome;
use crate::worker::Worker;
use serde_json::{Value, json};
use std::path::PathBuf;
use switchyard_cuda::driver::{Context, Device, Driver};
use switchyard_cuda::find::{CUBLASLT, CUDNN, DRIVER, NVRTC, Places};
use switchyard_cuda::nvrtc::Nvrtc;
use switchyard_cuda::{Error, Library};

/// Arguments shared by all parts.
pub(crate) struct Probe {
    pub(crate) places: Places,
    /// Index of the device.
    pub(crate) device: usize,
    /// Compute capability to compile for if there is no device, as `major * 10 + minor`.
    pub(crate) capability: u32,
    /// The interpreter whose packages are searched and whose PyTorch is benchmarked.
    pub(crate) python: Option<PathBuf>,
    /// The worker program, if not the one next to the probe.
    pub(crate) worker: Option<PathBuf>,
    /// Folder of recorded launches, if not the one next to the probe.
    pub(crate) vectors: Option<PathBuf>,
    /// Use small sizes.
    pub(crate) rehearse: bool,
}

pub(crate) struct Part {
    pub(crate) name: &'static str,
    /// Short description of what the part checks.
    pub(crate) title: &'static str,
    /// Seconds after which it counts as hung. Libraries are up to 500 MB and may be on a slow disk.
    pub(crate) limit: u64,
    pub(crate) run: fn(&Probe) -> Result<Value, Outcome>,
}

/// All parts, most valuable first: what is installed, whether training is correct, how fast it is,
/// and what only a future engine may use.
pub(crate) const PARTS: [Part; 36] = [
    Part { name: "machine", title: "the machine", limit: 60, run: machine::facts },
    Part { name: "driver", title: "driver and devices", limit: 60, run: libraries::driver },
    Part { name: "cublaslt", title: "cuBLASLt", limit: 60, run: libraries::cublaslt },
    Part { name: "nvrtc", title: "NVRTC", limit: 60, run: libraries::nvrtc },
    Part { name: "compile", title: "AdamW kernel to a CUBIN", limit: 60, run: optimizer::compile },
    Part { name: "adamw", title: "AdamW kernel vs the CPU", limit: 120, run: optimizer::run },
    Part { name: "streams", title: "copies, events, graphs", limit: 60, run: streams::run },
    Part { name: "rates", title: "copies, products, launches", limit: 120, run: rates::run },
    Part { name: "vectors", title: "every kernel vs the executor", limit: 240, run: vectors::run },
    Part { name: "training-mlp", title: "MLP training vs the CPU", limit: 120, run: training::mlp },
    Part { name: "training-gpt", title: "GPT training vs the CPU", limit: 240, run: training::gpt },
    Part { name: "training-bert", title: "BERT training vs the CPU", limit: 240, run: training::bert },
    Part { name: "training-resnet", title: "ResNet training vs the CPU", limit: 240, run: training::resnet },
    Part { name: "resume", title: "checkpoints across devices", limit: 180, run: training::resume },
    Part { name: "steps-gpt", title: "steps of GPT-124M, bf16", limit: 300, run: steps::gpt_124m },
    Part {
        name: "steps-gpt-unordered",
        title: "the same, nondeterministic",
        limit: 300,
        run: steps::gpt_124m_unordered,
    },
    Part { name: "steps-gpt-tiny", title: "steps of a tiny GPT, bf16", limit: 200, run: steps::gpt_tiny },
    Part { name: "steps-bert", title: "steps of BERT base, fp16", limit: 300, run: steps::bert_base },
    Part { name: "steps-resnet", title: "steps of ResNet-50, bf16", limit: 300, run: steps::resnet50 },
    Part { name: "input-resnet", title: "input of ResNet-50", limit: 240, run: input::resnet },
    Part { name: "steps-mlp", title: "steps of an MLP, f32", limit: 200, run: steps::mlp },
    Part { name: "steps-gpt-fp8", title: "steps of GPT-124M, bf16 and FP8", limit: 300, run: steps::gpt_124m_fp8 },
    Part { name: "memory", title: "memory of bf16 vs f32", limit: 300, run: memory::run },
    Part { name: "kernels-gpt", title: "kernels of GPT-124M, bf16", limit: 180, run: kernels::gpt },
    Part { name: "kernels-resnet", title: "kernels of ResNet-50, bf16", limit: 180, run: kernels::resnet },
    Part { name: "products", title: "cuBLASLt at GPT shapes", limit: 180, run: products::run },
    Part {
        name: "memcheck",
        title: "compute-sanitizer: memory",
        limit: 120,
        run: |probe| sanitizer::run(probe, "memcheck"),
    },
    Part {
        name: "racecheck",
        title: "compute-sanitizer: races",
        limit: 120,
        run: |probe| sanitizer::run(probe, "racecheck"),
    },
    Part {
        name: "synccheck",
        title: "compute-sanitizer: barriers",
        limit: 120,
        run: |probe| sanitizer::run(probe, "synccheck"),
    },
    Part {
        name: "initcheck",
        title: "compute-sanitizer: init",
        limit: 120,
        run: |probe| sanitizer::run(probe, "initcheck"),
    },
    Part { name: "counters", title: "Nsight Compute on GPT-124M", limit: 240, run: counters::gpt },
    Part { name: "nccl", title: "NCCL", limit: 60, run: libraries::nccl },
    Part { name: "all-reduce", title: "NCCL with one rank", limit: 120, run: all_reduce::run },
    Part { name: "cudnn", title: "cuDNN", limit: 60, run: libraries::cudnn },
    Part { name: "attention", title: "attention: cuDNN vs ours", limit: 180, run: attention::run },
    Part { name: "convolutions", title: "cuDNN at ResNet-50 shapes", limit: 300, run: convolutions::run },
];

impl Probe {
    /// The driver, if it is installed and has devices.
    fn driver(&self) -> Result<Driver, Error> {
        Driver::new(&self.places.open(&DRIVER)?.library)
    }

    /// The requested device. Its absence is an outcome, not a failure.
    fn require_device(&self) -> Result<(Driver, Device), Outcome> {
        let driver = self.driver().map_err(|error| match Outcome::from(error) {
            Outcome::Absent { reason, looked_for } => {
                Outcome::Absent { reason: format!("no GPU: {reason}"), looked_for }
            }
            other => other,
        })?;
        let device = self.selected(&driver)?;
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
        let own = || std::env::current_exe().map(|probe| probe.with_file_name("vectors"));
        let folder = self.vectors.clone().map_or_else(own, Ok);
        let folder = folder.map_err(|error| Outcome::failed("current_exe", error.to_string()))?;
        if !folder.is_dir() {
            let looked_for = vec![folder.display().to_string()];
            return Err(Outcome::Absent { reason: "no vectors".into(), looked_for });
        }
        Ok(folder)
    }

    fn selected(&self, driver: &Driver) -> Result<Device, Outcome> {
        let devices = driver.devices()?;
        let missing = || Outcome::absent(format!("no device {}: there are {}", self.device, devices.len()));
        devices.get(self.device).cloned().ok_or_else(missing)
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
