//! Twenty steps with AdamW: every kernel on the executor, which checks each access, against the engine on CPUs.

use crate::TARGET;
use crate::executed::Gpu;
use crate::flat_gradients::FlatGradients;
use crate::network::{Build, LANGUAGE, NETWORKS, graph, language};
use crate::trial::{batch_of, cpu, gpt};
use switchyard_cuda::kernels::embedding::order;
use switchyard_cuda_reference::Span;
use switchyard_worker::cpu::{Format, Isa, Values, bf16};
use switchyard_worker::data::{Batch, Kind, Masking};
use switchyard_worker::gpu::{Launch, Memory, Plan, Table, Update, Work};
use switchyard_worker::model::initialise;
use switchyard_worker::nn::layers::Target;
use switchyard_worker::nn::{Graph, Layout, Network, Weights};
use switchyard_worker::optimizer::{Optimizer, Steps};
use switchyard_worker_contract::config::{self, Precision};

const STEPS: usize = 20;
const RATE: f64 = 0.01;
const ADAMW: config::Optimizer = config::Optimizer {
    rule: config::Rule::AdamW(config::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-8 }),
    learning_rate: RATE,
    weight_decay: 0.1,
    gradient_clip_norm: None,
    decay_exclusions: config::DecayExclusions::Vectors,
};
const BF16: Precision = Precision::Amp(config::Amp {
    compute_type: config::HalfType::Bf16,
    loss_scaling: config::LossScaling::Static { scale: 1.0 },
});

/// Another batch in each step.
fn batch(kind: &Kind, samples: usize, step: usize) -> Batch {
    let mut batch = batch_of(kind, samples);
    batch.values.iter_mut().enumerate().for_each(|(index, value)| *value += 0.1 * ((index + 3 * step) as f32).sin());
    if let Kind::Tokens { vocabulary, .. } | Kind::Masked(Masking { vocabulary, .. }) = *kind {
        batch.tokens.iter_mut().for_each(|token| *token = (*token + 7 * step as u32) % vocabulary);
    }
    batch
}

/// What a device gets of a batch.
fn inputs(batch: &Batch) -> Vec<(Memory, Vec<u8>)> {
    let bytes = |numbers: &[u32]| bytemuck::cast_slice(numbers).to_vec();
    let segments: Vec<u32> = batch.segments.iter().map(|&segment| segment.into()).collect();
    let all = [
        (Memory::Values, bytemuck::cast_slice(&batch.values).to_vec()),
        (Memory::Entries(Table::Tokens), bytes(&batch.tokens)),
        (Memory::Order(Table::Tokens), bytes(&order(&batch.tokens))),
        (Memory::Entries(Table::Segments), bytes(&segments)),
        (Memory::Order(Table::Segments), bytes(&order(&segments))),
        (Memory::Positions, bytes(&batch.positions)),
        (Memory::Targets(Target::Classes), bytes(&batch.targets)),
        (Memory::Targets(Target::NextSentence), bytes(&batch.next_sentence)),
    ];
    all.into_iter().filter(|(_, bytes)| !bytes.is_empty()).collect()
}

fn weights(layout: &Layout) -> Vec<f32> {
    let mut weights = vec![0.0; layout.len];
    initialise(layout, 3, &mut weights);
    weights
}

fn rounded(weights: &[f32]) -> Vec<bf16> {
    weights.iter().map(|&weight| bf16::from_f32(weight)).collect()
}

struct Trained {
    /// Of each step.
    losses: Vec<f64>,
    /// Right predictions of all steps.
    correct: u64,
    /// After the last step.
    weights: Vec<f32>,
}

impl Trained {
    /// The first difference beyond what the order of sums explains.
    fn difference(&self, expected: &Trained) -> Option<String> {
        let near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-4 * b;
        if let Some(step) = self.losses.iter().zip(&expected.losses).position(|pair| !near(pair)) {
            return Some(format!("step {step}: loss {}, expected {}", self.losses[step], expected.losses[step]));
        }
        if self.correct != expected.correct {
            return Some(format!("{} right predictions, expected {}", self.correct, expected.correct));
        }
        let apart = |(a, b): (&f32, &f32)| (a - b).abs() > 1e-3;
        let weight = self.weights.iter().zip(&expected.weights).position(apart)?;
        Some(format!("weight {weight}: {}, expected {}", self.weights[weight], expected.weights[weight]))
    }
}

/// Steps of so many micro-batches.
fn on_cpu(graph: Graph, micro_batches: usize) -> Trained {
    let (cpu, kind, samples) = (cpu(1, Isa::Portable), *graph.kind(), graph.batch());
    let is_half = graph.format() == Format::Bf16;
    let mut network = Network::new(graph, cpu.clone()).unwrap();
    let layout = network.layout().clone();
    let mut optimizer = Optimizer::new(&layout, &ADAMW, cpu.isa);
    let (mut weights, mut sink) = (weights(&layout), FlatGradients::new(&layout));
    let mut half = rounded(&weights);
    let (mut losses, mut correct) = (Vec::new(), 0);
    for step in 0..STEPS {
        let mut loss = 0.0;
        for micro_batch in 0..micro_batches {
            let batch = batch(&kind, samples, step * micro_batches + micro_batch);
            let given = Weights { master: &weights, half: is_half.then(|| Values::Bf16(&half)), statistics: &[] };
            let sums = network.forward(given, &batch);
            sink.accumulate = micro_batch > 0;
            network.backward(given, &batch, 1.0 / micro_batches as f32, &mut sink);
            loss += sums.loss / micro_batches as f64;
            correct += sums.correct;
        }
        optimizer.begin_step(RATE, 1.0);
        optimizer.apply(0..layout.len, &mut weights, &sink.gradients, None, &cpu.pool);
        half = rounded(&weights);
        losses.push(loss);
    }
    Trained { losses, correct, weights }
}

/// Steps of so many micro-batches. `plant`: a mistake in the launches of the first of each step.
fn on_gpu(
    graph: Graph,
    micro_batches: usize,
    seed: u64,
    plant: impl FnOnce(&mut Vec<Launch<Span>>),
) -> Option<Trained> {
    let (kind, samples) = (*graph.kind(), graph.batch());
    let is_half = graph.format() == Format::Bf16;
    let plan = Plan::new(graph, TARGET).unwrap();
    let precision = if is_half { BF16 } else { Precision::Fp32 };
    let update = Update::new(plan.layout(), &ADAMW, precision, TARGET).unwrap();
    let mut gpu = Gpu::new(seed)?;
    gpu.allocate(Memory::Arena, plan.arena_bytes());
    let of_losses = plan.losses();
    let rows: usize = of_losses.iter().map(|loss| loss.rows).sum();
    let factors: Vec<f32> = of_losses.iter().map(|loss| 1.0 / (micro_batches * loss.rows) as f32).collect();
    gpu.allocate(Memory::Losses, 4 * rows);
    let correct_at = gpu.allocate(Memory::Correct, 4 * rows);
    gpu.upload(Memory::Factors, &factors);
    gpu.upload(Memory::Shares, &factors);
    gpu.upload(Memory::Constants, &plan.constants());
    let inputs_at: Vec<Span> =
        inputs(&batch(&kind, samples, 0)).iter().map(|(memory, bytes)| gpu.allocate(*memory, bytes.len())).collect();
    update.memory().iter().for_each(|contents| gpu.hold(contents));
    gpu.device.write(gpu.at(Memory::Weights), &weights(plan.layout()));
    if let Some(round) = update.round(|span| gpu.place(span)).unwrap() {
        gpu.launch(&round);
    }
    let [mut first, later] = [false, true].map(|adds| {
        let means = update.losses(&of_losses, adds, |span| gpu.place(span)).unwrap();
        (plan.launches(adds, |span| gpu.place(span)).unwrap(), means)
    });
    let updates = update.launches(|span| gpu.place(span)).unwrap();
    plant(&mut first.0);
    let (mut losses, mut correct, mut steps) = (Vec::new(), 0, Steps::new(&ADAMW.rule));
    for step in 0..STEPS {
        for micro_batch in 0..micro_batches {
            for (at, (_, bytes)) in
                inputs_at.iter().zip(inputs(&batch(&kind, samples, step * micro_batches + micro_batch)))
            {
                gpu.device.write(*at, &bytes);
            }
            let (launches, means) = if micro_batch == 0 { &first } else { &later };
            launches.iter().for_each(|launch| gpu.run(&launch.work));
            means.iter().for_each(|mean| gpu.launch(mean));
            let mut right = gpu.device.download::<f32>(correct_at).into_iter();
            for of in &of_losses {
                let count = right.by_ref().take(of.rows).filter(|right| *right > 0.0).count() as u64;
                correct += count * u64::from(of.options.count);
            }
        }
        steps = steps.next();
        gpu.device.write(gpu.at(Memory::Numbers), &[update.numbers(RATE, &steps)]);
        updates.iter().for_each(|update| gpu.launch(update));
        losses.push(gpu.device.download::<f32>(gpu.at(Memory::Loss))[0].into());
    }
    Some(Trained { losses, correct, weights: gpu.device.download(gpu.at(Memory::Weights)) })
}

#[test]
fn training_on_features_is_that_of_the_cpu() {
    train(&NETWORKS);
}

#[test]
fn training_on_tokens_is_that_of_the_cpu() {
    train(&LANGUAGE);
}

fn train(networks: &[(&str, Build)]) {
    for (name, build) in networks {
        for (seed, micro_batches) in [(0, 1), (1, 2)] {
            let expected = on_cpu(build(), micro_batches);
            let losses = &expected.losses;
            assert!(losses[STEPS - 1] < 0.9 * losses[0], "{name}: {losses:?}");
            let Some(trained) = on_gpu(build(), micro_batches, seed, |_| ()) else { return };
            assert_eq!(trained.difference(&expected), None, "{name}, {micro_batches} micro-batches, seed {seed}");
        }
    }
}

#[test]
fn training_in_16_bits_has_the_losses_of_the_cpu() {
    let build = || language(gpt(true), Format::Bf16);
    let expected = on_cpu(build(), 1).losses;
    let Some(trained) = on_gpu(build(), 1, 0, |_| ()) else { return };
    for (got, expected) in trained.losses.iter().zip(&expected) {
        assert!((got - expected).abs() < 1e-2 * expected, "{:?}, expected {expected:?}", trained.losses);
    }
}

#[test]
fn a_launch_that_is_missing_or_too_many_is_found() {
    let expected = on_cpu(graph(4), 1);
    let is_sum = |launch: &Launch<Span>| matches!(&launch.work, Work::Product(product) if product.adds);
    let no_residual = |launches: &mut Vec<Launch<Span>>| {
        let sum = launches.iter().position(is_sum).unwrap();
        launches.remove(sum - 1);
    };
    let Some(trained) = on_gpu(graph(4), 1, 0, no_residual) else { return };
    assert!(trained.difference(&expected).is_some());
    let twice = |launches: &mut Vec<Launch<Span>>| {
        let sum = launches.iter().position(is_sum).unwrap();
        launches.insert(sum, launches[sum].clone());
    };
    assert!(on_gpu(graph(4), 1, 0, twice).unwrap().difference(&expected).is_some());
}
