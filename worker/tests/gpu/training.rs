//! Twenty steps with AdamW: every kernel on the executor, which checks each access, against the engine on CPUs.

use crate::TARGET;
use crate::flat_gradients::FlatGradients;
use crate::loaded::{Loaded, rounded};
use crate::network::{Build, IMAGES, LANGUAGE, NETWORKS, graph, language};
use crate::trial::{batch_of, cpu, gpt};
use switchyard_cuda_reference::Span;
use switchyard_worker::cpu::{Format, Isa, Values};
use switchyard_worker::data::{Batch, Kind, Masking};
use switchyard_worker::gpu::{Launch, Memory, Plan, Update, Work};
use switchyard_worker::model::initialise;
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

/// The batch of evaluations, which no step has.
const UNSEEN: usize = 1000;

fn is_evaluated(step: usize) -> bool {
    step == STEPS / 2 || step == STEPS - 1
}

/// Another batch in each step.
fn batch(kind: &Kind, samples: usize, step: usize) -> Batch {
    let mut batch = batch_of(kind, samples);
    batch.values.iter_mut().enumerate().for_each(|(index, value)| *value += 0.1 * ((index + 3 * step) as f32).sin());
    let moved = |index: usize| ((index + 3 * step) % 16) as u8;
    batch.pixels.iter_mut().enumerate().for_each(|(index, pixel)| *pixel = pixel.wrapping_add(moved(index)));
    if let Kind::Tokens { vocabulary, .. } | Kind::Masked(Masking { vocabulary, .. }) = *kind {
        batch.tokens.iter_mut().for_each(|token| *token = (*token + 7 * step as u32) % vocabulary);
    }
    batch
}

fn weights(layout: &Layout) -> Vec<f32> {
    let mut weights = vec![0.0; layout.len];
    initialise(layout, 3, &mut weights);
    weights
}

struct Trained {
    /// Of each step.
    losses: Vec<f64>,
    /// In evaluation, after half of the steps and at the end.
    evaluated: Vec<f64>,
    /// Right predictions of all steps, and of the evaluations.
    correct: u64,
    /// After the last step.
    weights: Vec<f32>,
}

impl Trained {
    /// The first difference beyond what the order of sums explains.
    fn difference(&self, expected: &Trained) -> Option<String> {
        let near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-4 * b;
        let both = [(&self.losses, &expected.losses, "step"), (&self.evaluated, &expected.evaluated, "evaluation")];
        for (losses, expected, what) in both {
            if let Some(index) = losses.iter().zip(expected).position(|pair| !near(pair)) {
                return Some(format!("{what} {index}: loss {}, expected {}", losses[index], expected[index]));
            }
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
    let (mut losses, mut evaluated, mut correct) = (Vec::new(), Vec::new(), 0);
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
        if is_evaluated(step) {
            let given = Weights { master: &weights, half: is_half.then(|| Values::Bf16(&half)), statistics: &[] };
            let sums = network.evaluate(given, &batch(&kind, samples, UNSEEN));
            evaluated.push(sums.loss);
            correct += sums.correct;
        }
    }
    Trained { losses, evaluated, correct, weights }
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
    let layout = plan.layout().clone();
    let precision = if is_half { BF16 } else { Precision::Fp32 };
    let update = Update::new(&layout, &ADAMW, precision, TARGET).unwrap();
    let mut loaded = Loaded::new(&plan, &batch(&kind, samples, 0), &weights(&layout), is_half, micro_batches, seed)?;
    let is_loaded = |memory: Memory| matches!(memory, Memory::Weights | Memory::Gradients | Memory::Half);
    let others = update.memory().into_iter().filter(|contents| !is_loaded(contents.memory));
    others.for_each(|contents| loaded.gpu.hold(&contents));
    let [mut first, later] = [false, true].map(|adds| {
        let means = update.losses(&plan.losses(), adds, |span| loaded.gpu.place(span)).unwrap();
        (plan.launches(adds, |span| loaded.gpu.place(span)).unwrap(), means)
    });
    plant(&mut first.0);
    let updates = update.launches(|span| loaded.gpu.place(span)).unwrap();
    let evaluation = plan.evaluation(|span| loaded.gpu.place(span)).unwrap();
    let (mut losses, mut evaluated, mut correct) = (Vec::new(), Vec::new(), 0);
    let mut steps = Steps::new(&ADAMW.rule);
    for step in 0..STEPS {
        for micro_batch in 0..micro_batches {
            let (launches, means) = if micro_batch == 0 { &first } else { &later };
            let (_, right) = loaded.run(&batch(&kind, samples, step * micro_batches + micro_batch), launches);
            means.iter().for_each(|mean| loaded.gpu.launch(mean));
            correct += right;
        }
        steps = steps.next();
        loaded.gpu.device.write(loaded.gpu.at(Memory::Numbers), &[update.numbers(RATE, &steps)]);
        updates.iter().for_each(|update| loaded.gpu.launch(update));
        losses.push(loaded.gpu.device.download::<f32>(loaded.gpu.at(Memory::Loss))[0].into());
        if is_evaluated(step) {
            let (nats, right) = loaded.run(&batch(&kind, samples, UNSEEN), &evaluation);
            evaluated.push(nats);
            correct += right;
        }
    }
    Some(Trained { losses, evaluated, correct, weights: loaded.gpu.device.download(loaded.gpu.at(Memory::Weights)) })
}

#[test]
fn training_on_features_is_that_of_the_cpu() {
    train(&NETWORKS);
}

#[test]
fn training_on_images_is_that_of_the_cpu() {
    train(&IMAGES);
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
fn images_that_the_reader_has_normalised_are_numbers() {
    let graph = || IMAGES[0].1();
    let (kind, samples) = (*graph().kind(), graph().batch());
    let mut batch = batch_of(&kind, samples);
    batch.values = std::mem::take(&mut batch.pixels).iter().map(|&pixel| f32::from(pixel) / 100.0 - 1.0).collect();
    let mut network = Network::new(graph(), cpu(1, Isa::Portable)).unwrap();
    let weights = weights(network.layout());
    let expected = network.evaluate(Weights { master: &weights, half: None, statistics: &[] }, &batch);
    let plan = Plan::new(graph(), TARGET).unwrap().with_normalised_images();
    let Some(mut loaded) = Loaded::new(&plan, &batch, &weights, false, 1, 0) else { return };
    let evaluation = plan.evaluation(|span| loaded.gpu.place(span)).unwrap();
    let (loss, correct) = loaded.run(&batch, &evaluation);
    assert!((loss - expected.loss).abs() < 1e-5, "{loss}, expected {}", expected.loss);
    assert_eq!(correct, expected.correct);
}

#[test]
fn training_in_16_bits_has_the_losses_of_the_cpu() {
    let build = || language(gpt(true), Format::Bf16);
    let expected = on_cpu(build(), 1);
    let Some(trained) = on_gpu(build(), 1, 0, |_| ()) else { return };
    let all = |trained: &Trained| [&trained.losses[..], &trained.evaluated].concat();
    for (got, wanted) in all(&trained).iter().zip(all(&expected)) {
        assert!((got - wanted).abs() < 1e-2 * wanted, "{:?}, expected {:?}", all(&trained), all(&expected));
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
