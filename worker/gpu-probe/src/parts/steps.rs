//! Step time of the worker versus PyTorch on the same GPU, in alternating rounds.

use super::machine::state;
use super::{Probe, gather};
use crate::jobs::{CLASSES, half, job, synthetic};
use crate::numbers::{mib, short};
use crate::outcome::Outcome;
use crate::peaks::peak;
use crate::torch::Peer;
use crate::worker::{Worker, check_paths};
use serde_json::{Value, json};
use std::path::Path;
use switchyard_worker_contract::config::*;
use switchyard_worker_contract::event::GpuPaths;

/// Micro-batch sizes to try, largest first.
const BATCHES: [u32; 5] = [16, 8, 4, 2, 1];

/// A model to measure.
pub(super) struct Case {
    config: EngineConfig,
    /// Batches to try, largest first.
    batches: Vec<u32>,
    /// The model as `torch_engine.py` names it.
    peer: Value,
    /// Tokens per sample; 1 for other data.
    pub(super) items: u32,
    steps: u64,
    rounds: usize,
    /// PyTorch's compile mode. Short steps are dominated by launches, which CUDA graphs save.
    compile: &'static str,
}

/// The precision as `torch_engine.py` names it.
fn precision_name(precision: Precision) -> &'static str {
    match precision {
        Precision::Fp32 => "f32",
        Precision::Amp(Amp { compute_type: HalfType::Bf16, .. }) => "bf16",
        Precision::Amp(Amp { compute_type: HalfType::Fp16, .. }) => "fp16",
    }
}

fn bf16() -> Precision {
    half(HalfType::Bf16, LossScaling::Static { scale: 1.0 })
}

/// PyTorch's defaults.
const SCALE: LossScaling = LossScaling::Dynamic {
    initial_scale: 65536.0,
    growth_factor: 2.0,
    backoff_factor: 0.5,
    growth_interval_steps: 2000,
};

/// A GPT in bf16.
fn gpt([layers, hidden_size, heads, context_length, vocabulary_size]: [u32; 5]) -> Case {
    let model = Gpt { layers, hidden_size, heads, context_length, vocabulary_size, tied_head: true };
    Case {
        peer: json!({
            "kind": "gpt", "layers": layers, "hidden": hidden_size, "heads": heads, "context": context_length,
            "vocabulary": vocabulary_size,
        }),
        config: EngineConfig { precision: bf16(), ..job(Model::Gpt(model), synthetic(4096, None), 1) },
        batches: BATCHES.to_vec(),
        items: context_length,
        steps: 40,
        rounds: 3,
        compile: "default",
    }
}

pub(super) fn gpt_124m_case(probe: &Probe) -> Case {
    gpt(if probe.rehearse { [1, 16, 2, 8, 64] } else { [12, 768, 12, 1024, 50_304] })
}

pub(super) fn gpt_124m(probe: &Probe) -> Result<Value, Outcome> {
    measure(probe, gpt_124m_case(probe))
}

/// PyTorch computes in bf16.
pub(super) fn gpt_124m_fp8(probe: &Probe) -> Result<Value, Outcome> {
    let mut case = gpt_124m_case(probe);
    case.config.gpu.matmul = Matmul::Fp8;
    measure(probe, case)
}

pub(super) fn gpt_tiny(probe: &Probe) -> Result<Value, Outcome> {
    let case = gpt(if probe.rehearse { [1, 16, 2, 8, 64] } else { [4, 256, 4, 128, 1024] });
    measure(probe, Case { batches: vec![8], steps: 400, compile: "reduce-overhead", ..case })
}

pub(super) fn bert_base(probe: &Probe) -> Result<Value, Outcome> {
    let [layers, hidden_size, heads, context_length, vocabulary_size] =
        if probe.rehearse { [1, 16, 2, 12, 61] } else { [12, 768, 12, 128, 30_522] };
    let (masked_fraction, next_sentence) = (0.15, false);
    let model = Bert { layers, hidden_size, heads, context_length, vocabulary_size, masked_fraction, next_sentence };
    let peer = json!({
        "kind": "bert", "layers": layers, "hidden": hidden_size, "heads": heads, "context": context_length,
        "rows": model.embedding_rows(), "predictions": model.predictions(),
    });
    let config =
        EngineConfig { precision: half(HalfType::Fp16, SCALE), ..job(Model::Bert(model), synthetic(8192, None), 1) };
    let batches = vec![128, 64, 32, 16];
    measure(probe, Case { config, batches, peer, items: context_length, steps: 60, rounds: 3, compile: "default" })
}

pub(super) fn resnet50(probe: &Probe) -> Result<Value, Outcome> {
    measure(probe, resnet50_case(probe))
}

pub(super) fn resnet50_case(probe: &Probe) -> Case {
    let (width, side) = if probe.rehearse { (2, 32) } else { (64, 224) };
    let model = ResNet { depth: ResNetDepth::D50, stem: Stem::ImageNet, width };
    let peer = json!({
        "kind": "resnet", "depth": 50, "width": width, "small": false, "channels": 3, "side": side, "classes": CLASSES,
    });
    let config = job(Model::ResNet(model), synthetic(2048, Some(side)), 1);
    let optimizer = Optimizer { rule: Rule::Sgd(Momentum { momentum: 0.9, nesterov: false }), ..config.optimizer };
    let config = EngineConfig { precision: bf16(), optimizer, ..config };
    let batches = vec![256, 128, 64, 32, 16];
    Case { config, batches, peer, items: 1, steps: 40, rounds: 3, compile: "default" }
}

pub(super) fn mlp(probe: &Probe) -> Result<Value, Outcome> {
    let hidden = if probe.rehearse { 24 } else { 4096 };
    let model = Mlp { hidden_sizes: vec![hidden; 3], activation: Activation::Relu };
    let peer = json!({"kind": "mlp", "sizes": [16, hidden, hidden, hidden, CLASSES]});
    let config = job(Model::Mlp(model), synthetic(16_384, None), 1);
    measure(probe, Case { config, batches: vec![1024], peer, items: 1, steps: 200, rounds: 3, compile: "default" })
}

fn measure(probe: &Probe, case: Case) -> Result<Value, Outcome> {
    let (_, device) = probe.require_device()?;
    let worker = probe.worker()?;
    let case = if probe.rehearse { Case { batches: vec![2], steps: 4, rounds: 1, ..case } } else { case };
    let (config, ours) = fitting(&worker, &case)?;
    let batch = config.batch_size_per_process;
    let (numbers, before) = (precision_name(config.precision), state());
    let peers = [("torch", Value::Null), ("torch compiled", case.compile.into())];
    let peers = peers.map(|(name, compile)| (name, peer(&case, batch, numbers, &compile)));
    let mut peers = start_all(probe, &peers);
    let mut times = [const { Vec::new() }; 3];
    let mut own = Ok(());
    for _ in 0..case.rounds {
        own = own.and_then(|()| measure_worker(&worker, &config).map(|round| times[0].push(round)));
        for ((_, peer), times) in peers.iter_mut().zip(&mut times[1..]) {
            // After its first failure a side is not measured again.
            let round = peer.as_mut().ok().map(|peer| peer.milliseconds(case.steps));
            match round {
                Some(Ok(ms)) => times.push(Round { ms, ..Round::default() }),
                Some(Err(error)) => *peer = Err(error),
                None => {}
            }
        }
    }
    let per_second = f64::from(batch * case.items) * 1e3;
    let [own_times, torch, compiled] = times;
    let peak = peak(&device.name).map(|peak| peak.bf16).filter(|_| config.precision != Precision::Fp32);
    let with_mfu = |mut report: Value| {
        if let (Some(flops), Some(peak), Some(rate)) = (palm_flops(&config.model), peak, report["perSecond"].as_f64()) {
            report["mfu"] = short(flops * rate / (peak * 1e12)).into();
        }
        report
    };
    let own = own.and_then(|()| {
        let mut report = with_mfu(figures(&own_times, per_second));
        report["memoryMiB"] = mib(ours).into();
        check_paths(&own_times.last().map(|round| round.paths.clone()).unwrap_or_default(), report)
    });
    let mut rows = vec![(json!({"side": "switchyard"}), own)];
    for ((name, peer), times) in peers.into_iter().zip([torch, compiled]) {
        rows.push((json!({"side": name}), Ok(with_mfu(peer_figures(peer, &times, per_second)))));
    }
    let item = if case.items > 1 { "tokens" } else { "samples" };
    let what = json!({
        "device": device.name, "numbers": numbers, "batch": batch, "item": item, "rounds": case.rounds,
        "steps": case.steps, "stateBefore": before, "stateAfter": state(),
    });
    gather(what, "sides", rows)
}

impl Case {
    /// The job with this micro-batch size.
    pub(super) fn with(&self, batch: u32) -> EngineConfig {
        EngineConfig {
            batch_size_per_process: batch,
            length: Length::Steps(self.steps),
            fetch_every_steps: (self.steps / 4).max(1) as u32,
            optimizer: Optimizer { gradient_clip_norm: None, ..self.config.optimizer },
            ..self.config.clone()
        }
    }
}

/// The job with the largest batch that fits; in a rehearsal with a small one.
pub(super) fn largest(probe: &Probe, worker: &Worker, case: &Case) -> Result<EngineConfig, Outcome> {
    if probe.rehearse { Ok(case.with(2)) } else { Ok(fitting(worker, case)?.0) }
}

/// The job with the largest batch that fits, and its GPU memory in bytes.
fn fitting(worker: &Worker, case: &Case) -> Result<(EngineConfig, u64), Outcome> {
    let mut refused = Outcome::failed("batches", "none was tried");
    for batch in &case.batches {
        let config = case.with(*batch);
        match worker.inspect(&config) {
            Ok(inspection) => {
                let memory = inspection.gpu_memory.map_or(0, |memory| memory.total());
                return Ok((config, memory));
            }
            Err(outcome) => refused = outcome,
        }
    }
    Err(refused)
}

/// Milliseconds per step in a round; the parts are for our side only.
#[derive(Debug, Default)]
pub(super) struct Round {
    pub(super) ms: f64,
    pub(super) input: f64,
    pub(super) forward: f64,
    pub(super) backward: f64,
    pub(super) optimizer: f64,
    /// Seconds to the first report.
    pub(super) to_first: f64,
    pub(super) paths: GpuPaths,
}

/// FLOP per token of a training step, as PaLM counts them (<https://arxiv.org/abs/2204.02311>,
/// appendix B): 6 N + 12 L H Q T, with N weights except those of the positions, L layers, and H
/// heads of Q values over T tokens. Causal attention counts in full, recomputation not at all. MFU
/// is this rate divided by the peak on the data sheet. `None` for networks other than GPTs.
pub(super) fn palm_flops(model: &Model) -> Option<f64> {
    let Model::Gpt(gpt) = model else { return None };
    let [layers, hidden, tokens, words] =
        [gpt.layers, gpt.hidden_size, gpt.context_length, gpt.vocabulary_size].map(f64::from);
    let heads = if gpt.tied_head { 1.0 } else { 2.0 };
    // Per layer, four matrices for attention and eight for the MLP, their biases, and two norms.
    let weights = heads * words * hidden + layers * (12.0 * hidden * hidden + 13.0 * hidden) + 2.0 * hidden;
    Some(6.0 * weights + 12.0 * layers * hidden * tokens)
}

/// Measures one run of the worker.
pub(super) fn measure_worker(worker: &Worker, config: &EngineConfig) -> Result<Round, Outcome> {
    let ran = worker.train("steps", config, 1)?;
    // Skip the first report, while memory is touched and clocks rise.
    let reports = &ran.progress[1.min(ran.progress.len() - 1)..];
    let mean = |of: fn(&switchyard_worker_contract::event::Progress) -> f64| {
        reports.iter().map(of).sum::<f64>() / reports.len() as f64
    };
    Ok(Round {
        ms: mean(|report| report.step_ms),
        input: mean(|report| report.input_wait_ms),
        forward: mean(|report| report.forward_ms),
        backward: mean(|report| report.backward_ms),
        optimizer: mean(|report| report.optimizer_ms),
        to_first: ran.seconds_to_first,
        paths: ran.paths(),
    })
}

/// Medians over rounds. `per_second`: items per step, times 1000.
pub(super) fn figures(rounds: &[Round], per_second: f64) -> Value {
    let median = |of: fn(&Round) -> f64| short(median(rounds.iter().map(of).collect()));
    let ms = median(|round| round.ms);
    json!({
        "ms": ms, "perSecond": short(per_second / ms),
        "inputMs": median(|round| round.input), "forwardMs": median(|round| round.forward),
        "backwardMs": median(|round| round.backward), "optimizerMs": median(|round| round.optimizer),
        "secondsToFirstReport": median(|round| round.to_first),
    })
}

/// The median; of an even count, the upper one.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The configuration of a PyTorch peer.
fn peer(case: &Case, batch: u32, numbers: &str, compile: &Value) -> Value {
    let optimizer = if matches!(case.config.optimizer.rule, Rule::AdamW(_)) { "adamw" } else { "sgd" };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    json!({
        "threads": threads, "tuned": true, "device": "cuda", "compile": compile, "model": case.peer, "samples": batch,
        "precision": numbers, "optimizer": optimizer, "rate": case.config.optimizer.learning_rate,
        "decay": case.config.optimizer.weight_decay,
    })
}

/// Starts all peers at the same time: their imports and compilations take most of a minute and need
/// little of the GPU. Rounds begin when all are ready.
fn start_all<'a>(probe: &Probe, peers: &[(&'a str, Value); 2]) -> [(&'a str, Result<Peer, Outcome>); 2] {
    std::thread::scope(|scope| {
        let starting = peers.each_ref().map(|(name, config)| (*name, scope.spawn(move || start(probe, name, config))));
        starting.map(|(name, thread)| {
            (name, thread.join().unwrap_or_else(|_| Err(Outcome::failed("torch", "its thread panicked"))))
        })
    })
}

/// Starts a peer and runs its first steps, which include compilation and tuning.
fn start(probe: &Probe, name: &str, config: &Value) -> Result<Peer, Outcome> {
    let python = probe.python.as_deref().unwrap_or(Path::new("python3"));
    let mut peer = Peer::start(python, name, config, probe.device)?;
    peer.milliseconds(5)?;
    Ok(peer)
}

/// Figures of PyTorch. A missing or failing PyTorch is reported, but is not a failure of ours.
fn peer_figures(peer: Result<Peer, Outcome>, rounds: &[Round], per_second: f64) -> Value {
    let report = peer.and_then(|mut peer| Ok((peer.memory_bytes()?, peer.version.clone())));
    match report {
        Ok((memory, version)) => {
            let ms = short(median(rounds.iter().map(|round| round.ms).collect()));
            json!({"ms": ms, "perSecond": short(per_second / ms), "memoryMiB": mib(memory), "version": version})
        }
        Err(outcome) => json!({"missing": outcome}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_medians_of_rounds() {
        let rounds = [30.0, 10.0, 20.0].map(|ms| Round { ms, ..Round::default() });
        let figures = figures(&rounds, 1e3 * 64.0);
        assert_eq!((&figures["ms"], &figures["perSecond"]), (&json!(20.0), &json!(3200.0)));
    }

    /// 8.55e8 for GPT-2 with 124 million parameters, as in llm.c.
    #[test]
    fn palm_counts_weights_and_attention() {
        let [layers, hidden_size, heads, context_length, vocabulary_size] = [12, 768, 12, 1024, 50_304];
        let gpt = Gpt { layers, hidden_size, heads, context_length, vocabulary_size, tied_head: true };
        assert_eq!(palm_flops(&Model::Gpt(gpt)), Some(6.0 * 123_689_472.0 + 113_246_208.0));
        assert_eq!(palm_flops(&Model::Mlp(Mlp { hidden_sizes: vec![4], activation: Activation::Relu })), None);
    }

    #[test]
    fn a_missing_peer_is_reported() {
        let report = peer_figures(Err(Outcome::absent("no module named torch")), &[], 1.0);
        assert_eq!(report["missing"]["reason"], "no module named torch");
    }
}
