//! PyTorch's side: `torch_engine.py` in a process that stays alive through all rounds.

use super::Outcome;
use super::case::{BATCHES, Case};
use super::ours::Ours;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, serialize_to_file};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;
use switchyard_worker::cpu::Format;
use switchyard_worker::data::Kind;
use switchyard_worker::nn::ParameterSlot;
use switchyard_worker_contract::config::Rule;

/// OpenMP threads spin for some milliseconds after their last parallel region before they sleep.
const SETTLE_TIME: Duration = Duration::from_millis(30);

/// The common starting point of both sides.
pub struct Inputs {
    weights: PathBuf,
    batches: PathBuf,
}

struct Tensor {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn save(file: &Path, tensors: &[Tensor]) -> Outcome<()> {
    let views: Result<Vec<_>, _> = tensors
        .iter()
        .map(|t| TensorView::new(t.dtype, t.shape.clone(), &t.bytes).map(|view| (t.name.as_str(), view)))
        .collect();
    Ok(serialize_to_file(views?, None, file)?)
}

/// A parameter in the axis order of the peer's layers: `nn.Conv2d`, and `nn.Linear` for all
/// matrices.
fn exported(parameter: &ParameterSlot, own: &[f32]) -> Tensor {
    let identity: Vec<usize> = (0..parameter.shape.len()).collect();
    let axes = parameter.export_axes.as_ref().filter(|axes| axes.len() > 2).unwrap_or(&identity);
    let strides: Vec<usize> = (0..parameter.shape.len()).map(|i| parameter.shape[i + 1..].iter().product()).collect();
    let shape: Vec<usize> = axes.iter().map(|&axis| parameter.shape[axis]).collect();
    let mut bytes = Vec::with_capacity(4 * own.len());
    for index in 0..own.len() {
        let (mut rest, mut from) = (index, 0);
        for (size, &axis) in shape.iter().zip(axes).rev() {
            from += rest % size * strides[axis];
            rest /= size;
        }
        bytes.extend(own[from].to_le_bytes());
    }
    Tensor { name: parameter.name.clone(), dtype: Dtype::F32, shape, bytes }
}

/// Writes our side's weights and the batches.
pub fn write_inputs(folder: &Path, case: &Case, ours: &Ours) -> Outcome<Inputs> {
    let inputs = Inputs { weights: folder.join("weights.safetensors"), batches: folder.join("batches.safetensors") };
    let parameters = ours.layout().parameters.iter();
    let weights: Vec<Tensor> = parameters.map(|p| exported(p, &ours.weights[p.range()])).collect();
    save(&inputs.weights, &weights)?;
    let mut tensors = Vec::new();
    for index in 0..BATCHES {
        let batch = case.batch(index);
        let mut add = |name: &str, dtype, shape: &[usize], bytes: Vec<u8>| {
            if !bytes.is_empty() {
                tensors.push(Tensor { name: format!("{index}.{name}"), dtype, shape: shape.to_vec(), bytes });
            }
        };
        let words = |numbers: &[u32]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>();
        let rows = [case.samples, batch.tokens.len() / case.samples];
        add("tokens", Dtype::I32, &rows, words(&batch.tokens));
        add("segments", Dtype::U8, &rows, batch.segments);
        add("positions", Dtype::I32, &[batch.positions.len()], words(&batch.positions));
        add("targets", Dtype::I32, &[batch.targets.len()], words(&batch.targets));
        if let Kind::Images { height, width, channels, .. } = case.kind {
            let shape = [case.samples, height as usize, width as usize, channels as usize];
            add("pixels", Dtype::U8, &shape, batch.pixels);
        }
        let values: Vec<u8> = batch.values.iter().flat_map(|value| value.to_le_bytes()).collect();
        add("values", Dtype::F32, &[case.samples, batch.values.len() / case.samples], values);
    }
    save(&inputs.batches, &tensors)?;
    Ok(inputs)
}

/// The Python process.
pub struct Peer {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    tuned: bool,
    /// PyTorch's version and its description of the CPU.
    pub version: Value,
}

impl Peer {
    pub fn start(
        python: &Path,
        case: &Case,
        inputs: &Inputs,
        format: Format,
        threads: usize,
        tuned: bool,
        avx2: bool,
    ) -> Outcome<Peer> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/torch_engine.py");
        let config = json!({
            "threads": threads, "tuned": tuned, "model": case.peer_model(), "weights": inputs.weights,
            "batches": inputs.batches, "batches_count": BATCHES,
            "precision": if format == Format::F32 { "f32" } else { "bf16" },
            "optimizer": if matches!(case.optimizer.rule, Rule::AdamW(_)) { "adamw" } else { "sgd" },
            "rate": case.optimizer.learning_rate, "decay": case.optimizer.weight_decay,
        });
        let mut command = Command::new(python);
        if avx2 {
            // PyTorch's own kernels, and the two libraries that it uses for matrix products.
            command.env("ATEN_CPU_CAPABILITY", "avx2");
            command.env("MKL_ENABLE_INSTRUCTIONS", "AVX2").env("ONEDNN_MAX_CPU_ISA", "AVX2");
        }
        command.arg(script).arg(config.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("cannot start {}: {error}", python.display()))?;
        let (to, from) = (child.stdin.take().ok_or("no input")?, child.stdout.take().ok_or("no output")?);
        let mut peer = Peer { child, to, from: BufReader::new(from), tuned, version: Value::Null };
        peer.version = peer.response()?;
        Ok(peer)
    }

    pub fn name(&self) -> &'static str {
        if self.tuned { "torch tuned" } else { "torch" }
    }

    fn response(&mut self) -> Outcome<Value> {
        let mut line = String::new();
        if self.from.read_line(&mut line)? == 0 {
            return Err(format!("the {} process ended", self.name()).into());
        }
        std::thread::sleep(SETTLE_TIME);
        Ok(serde_json::from_str(&line)?)
    }

    fn request<T: serde::de::DeserializeOwned>(&mut self, word: &str, count: usize) -> Outcome<Vec<T>> {
        writeln!(self.to, "{word} {count}")?;
        self.to.flush()?;
        Ok(serde_json::from_value(self.response()?)?)
    }

    /// Losses of steps that cycle through the batches.
    pub fn losses(&mut self, count: usize) -> Outcome<Vec<f64>> {
        self.request("losses", count)
    }

    /// Wall-clock and CPU milliseconds of steps on the first batch.
    pub fn steps(&mut self, count: usize) -> Outcome<Vec<[f64; 2]>> {
        self.request("steps", count)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have exited on its own.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
