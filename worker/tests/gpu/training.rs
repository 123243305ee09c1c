//! Twenty training steps with every kernel on the executor, which checks each access, compared with
//! the CPU engine.

use crate::TARGET;
use crate::flat_gradients::FlatGradients;
use crate::loaded::{Loaded, rounded};
use crate::network::{Build, IMAGES, LANGUAGE, NETWORKS, RESIDUAL, bottlenecks, graph, language};
use crate::trial::{batch_of, cpu, gpt};
use switchyard_cuda_reference::Span;
use switchyard_worker::cpu::{Format, Isa, Values};
use switchyard_worker::data::{Batch, Kind, Masking};
use switchyard_worker::lowering::{Launch, Memory, Plan, Update, Work};
use switchyard_worker::model::initialise;
use switchyard_worker::nn::{Graph, Layout, Network, Weights};
use switchyard_worker::optimizer::{Optimizer, Steps};
use switchyard_worker_contract::config::{self, Precision};

const STEPS: usize = 20;
const BF16: Precision = Precision::Amp(config::Amp {
    compute_type: config::HalfType::Bf16,
    loss_scaling: config::LossScaling::Static { scale: 1.0 },
});

/// Training setup of a network.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    /// Per step.
    micro_batches: usize,
    pub optimizer: config::Optimizer,
}

pub const ADAMW: Setup = Setup {
    micro_batches: 1,
    optimizer: config::Optimizer {
        rule: config::Rule::AdamW(config::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-8 }),
        learning_rate: 0.01,
        weight_decay: 0.1,
        gradient_clip_norm: None,
        decay_exclusions: config::DecayExclusions::Vectors,
    },
};

/// For residual networks: steps proportional to the gradient, because Adam turns gradients that are
/// pure rounding error into large steps.
const MOMENTUM: Setup = momentum(0.02);

/// Trains a GPT about as fast as Adam does, while rounding errors, including those of
/// probabilities, which CPUs do not round, stay small.
const STEEP: Setup = momentum(0.1);

/// Steps small enough that FP8 rounding errors do not grow within 20 of them.
const GENTLE: Setup = momentum(0.005);

const fn momentum(learning_rate: f64) -> Setup {
    let rule = config::Rule::Sgd(config::Momentum { momentum: 0.9, nesterov: false });
    Setup { optimizer: config::Optimizer { rule, learning_rate, ..ADAMW.optimizer }, ..ADAMW }
}

/// Index of the evaluation batch, which no training step uses.
const EVALUATION_BATCH: usize = 1000;

fn is_evaluated(step: usize) -> bool {
    step == STEPS / 2 || step == STEPS - 1
}

/// A different batch for each step.
pub fn batch(kind: &Kind, samples: usize, step: usize) -> Batch {
    let mut batch = batch_of(kind, samples);
    batch.values.iter_mut().enumerate().for_each(|(index, value)| *value += 0.1 * ((index + 3 * step) as f32).sin());
    let moved = |index: usize| ((index + 3 * step) % 16) as u8;
    batch.pixels.iter_mut().enumerate().for_each(|(index, pixel)| *pixel = pixel.wrapping_add(moved(index)));
    if let Kind::Tokens { vocabulary, .. } | Kind::Masked(Masking { vocabulary, .. }) = *kind {
        batch.tokens.iter_mut().for_each(|token| *token = (*token + 7 * step as u32) % vocabulary);
    }
    batch
}

pub fn weights(layout: &Layout) -> Vec<f32> {
    let mut weights = vec![0.0; layout.len];
    initialise(layout, 3, &mut weights);
    weights
}

struct Trained {
    /// Of each step.
    losses: Vec<f64>,
    /// Evaluation losses, after half of the steps and at the end.
    evaluated: Vec<f64>,
    /// Correct predictions over all steps and evaluations.
    correct: u64,
    /// After the last step.
    weights: Vec<f32>,
    /// Running statistics after the last step.
    statistics: Vec<f32>,
}

impl Trained {
    /// The first difference that the summation order cannot explain.
    fn difference(&self, expected: &Trained) -> Option<String> {
        let near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-4 * b;
        let both = [(&self.losses, &expected.losses, "step"), (&self.evaluated, &expected.evaluated, "evaluation")];
        for (losses, expected, what) in both {
            if let Some(index) = losses.iter().zip(expected).position(|pair| !near(pair)) {
                return Some(format!("{what} {index}: loss {}, expected {}", losses[index], expected[index]));
            }
        }
        if self.correct != expected.correct {
            return Some(format!("{} correct predictions, expected {}", self.correct, expected.correct));
        }
        let apart = |(a, b): (&f32, &f32)| (a - b).abs() > 1e-3;
        let [got, wanted] = [self, expected].map(|trained| [&trained.weights[..], &trained.statistics].concat());
        let number = got.iter().zip(&wanted).position(apart)?;
        Some(format!("weight or statistic {number}: {}, expected {}", got[number], wanted[number]))
    }
}

/// Moves running statistics a tenth of the way towards the mean over micro-batches, as a step does.
fn update_running(statistics: &mut [f32], batches: &[Vec<f32>]) {
    for (index, running) in statistics.iter_mut().enumerate() {
        let mean = batches.iter().map(|batch| batch[index]).sum::<f32>() / batches.len() as f32;
        *running += 0.1 * (mean - *running);
    }
}

fn on_cpu(graph: Graph, Setup { micro_batches, optimizer: of }: Setup) -> Trained {
    let (cpu, kind, samples) = (cpu(1, Isa::Portable), *graph.kind(), graph.batch());
    let is_half = graph.format() == Format::Bf16;
    let mut network = Network::new(graph, cpu.clone()).unwrap();
    let layout = network.layout().clone();
    let mut optimizer = Optimizer::new(&layout, &of, cpu.isa);
    let (mut weights, mut sink) = (weights(&layout), FlatGradients::new(&layout));
    let mut half = rounded(&weights);
    let mut statistics = network.initial_statistics();
    let (mut losses, mut evaluated, mut correct) = (Vec::new(), Vec::new(), 0);
    for step in 0..STEPS {
        let (mut loss, mut batches) = (0.0, Vec::new());
        for micro_batch in 0..micro_batches {
            let batch = batch(&kind, samples, step * micro_batches + micro_batch);
            let parameters = Weights { master: &weights, half: is_half.then(|| Values::Bf16(&half)), statistics: &[] };
            let sums = network.forward(parameters, &batch);
            sink.accumulate = micro_batch > 0;
            network.backward(parameters, &batch, 1.0 / micro_batches as f32, &mut sink);
            batches.push(network.batch_statistics().to_vec());
            loss += sums.loss / micro_batches as f64;
            correct += sums.correct;
        }
        optimizer.begin_step(of.learning_rate, 1.0);
        optimizer.apply(0..layout.len, &mut weights, &sink.gradients, None, &cpu.pool);
        half = rounded(&weights);
        losses.push(loss);
        update_running(&mut statistics, &batches);
        if is_evaluated(step) {
            let half = is_half.then(|| Values::Bf16(&half));
            let parameters = Weights { master: &weights, half, statistics: &statistics };
            let sums = network.evaluate(parameters, &batch(&kind, samples, EVALUATION_BATCH));
            evaluated.push(sums.loss);
            correct += sums.correct;
        }
    }
    Trained { losses, evaluated, correct, weights, statistics }
}

/// `mutate` can inject a mistake into the launches of each step's first micro-batch.
fn on_gpu(
    graph: Graph,
    Setup { micro_batches, optimizer }: Setup,
    seed: u64,
    mutate: impl FnOnce(&mut Vec<Launch<Span>>),
) -> Trained {
    let (kind, samples) = (*graph.kind(), graph.batch());
    let is_half = graph.format() == Format::Bf16;
    let plan = Plan::new(graph, TARGET).unwrap();
    let layout = plan.layout().clone();
    let precision = if is_half { BF16 } else { Precision::Fp32 };
    let update = Update::new(&layout, &optimizer, precision, TARGET).unwrap();
    let mut loaded = Loaded::new(&plan, &batch(&kind, samples, 0), &weights(&layout), is_half, micro_batches, seed);
    let is_loaded = |memory: Memory| matches!(memory, Memory::Weights | Memory::Gradients | Memory::Half);
    let others = update.memory().into_iter().filter(|contents| !is_loaded(contents.memory));
    others.for_each(|contents| loaded.gpu.hold(&contents));
    let [mut first, later] = [false, true].map(|adds| {
        let means = update.losses(&plan.losses(), adds, |span| loaded.gpu.place(span)).unwrap();
        (plan.launches(adds, |span| loaded.gpu.place(span)).unwrap(), means)
    });
    mutate(&mut first.0);
    let updates = update.launches(|span| loaded.gpu.place(span)).unwrap();
    let evaluation = plan.evaluation(|span| loaded.gpu.place(span)).unwrap();
    let (mut losses, mut evaluated, mut correct) = (Vec::new(), Vec::new(), 0);
    let mut steps = Steps::new(&optimizer.rule);
    let mut statistics = plan.initial_statistics();
    for step in 0..STEPS {
        let mut batches = Vec::new();
        for micro_batch in 0..micro_batches {
            let (launches, means) = if micro_batch == 0 { &first } else { &later };
            let (_, right) = loaded.run(&batch(&kind, samples, step * micro_batches + micro_batch), launches);
            means.iter().for_each(|mean| loaded.gpu.launch(mean));
            batches.push(loaded.gpu.device.download(loaded.gpu.at(Memory::BatchStatistics)));
            correct += right;
        }
        steps = steps.next();
        loaded
            .gpu
            .device
            .write(loaded.gpu.at(Memory::Candidates), &[update.numbers(optimizer.learning_rate, &steps); 2]);
        updates.iter().for_each(|update| loaded.gpu.launch(update));
        losses.push(loaded.gpu.device.download::<f32>(loaded.gpu.at(Memory::Loss))[0].into());
        update_running(&mut statistics, &batches);
        loaded.gpu.device.write(loaded.gpu.at(Memory::Statistics), &statistics);
        if is_evaluated(step) {
            let (nats, right) = loaded.run(&batch(&kind, samples, EVALUATION_BATCH), &evaluation);
            evaluated.push(nats);
            correct += right;
        }
    }
    let weights = loaded.gpu.device.download(loaded.gpu.at(Memory::Weights));
    Trained { losses, evaluated, correct, weights, statistics }
}

#[test]
fn training_on_features_matches_the_cpu() {
    train(&NETWORKS, ADAMW);
}

#[test]
fn training_on_images_matches_the_cpu() {
    train(&IMAGES, ADAMW);
}

#[test]
fn training_on_tokens_matches_the_cpu() {
    train(&LANGUAGE, ADAMW);
}

/// Two micro-batches have all launches of a single one, and those that add to its gradients.
fn train(networks: &[(&str, Build)], setup: Setup) {
    let setup = Setup { micro_batches: 2, ..setup };
    for (seed, (name, build)) in (0..).zip(networks) {
        let expected = on_cpu(build(), setup);
        let losses = &expected.losses;
        assert!(losses[STEPS - 1] < 0.9 * losses[0], "{name}: {losses:?}");
        let trained = on_gpu(build(), setup, seed, |_| ());
        assert_eq!(trained.difference(&expected), None, "{name}, {setup:?}, seed {seed}");
    }
}

#[test]
fn training_residual_networks_matches_the_cpu() {
    train(&RESIDUAL, MOMENTUM);
}

#[test]
fn images_normalised_by_the_reader_are_used_as_they_are() {
    let graph = || IMAGES[0].1();
    let (kind, samples) = (*graph().kind(), graph().batch());
    let mut batch = batch_of(&kind, samples);
    batch.values = std::mem::take(&mut batch.pixels).iter().map(|&pixel| f32::from(pixel) / 100.0 - 1.0).collect();
    let mut network = Network::new(graph(), cpu(1, Isa::Portable)).unwrap();
    let weights = weights(network.layout());
    let expected = network.evaluate(Weights { master: &weights, half: None, statistics: &[] }, &batch);
    let plan = Plan::new(graph(), TARGET).unwrap().with_normalised_images();
    let mut loaded = Loaded::new(&plan, &batch, &weights, false, 1, 0);
    let evaluation = plan.evaluation(|span| loaded.gpu.place(span)).unwrap();
    let (loss, correct) = loaded.run(&batch, &evaluation);
    assert!((loss - expected.loss).abs() < 1e-5, "{loss}, expected {}", expected.loss);
    assert_eq!(correct, expected.correct);
}

#[test]
fn losses_in_16_bits_match_the_cpu() {
    let networks: [(Build, Setup, f64); 2] =
        [(|| language(gpt(true), Format::Bf16), STEEP, 5e-3), (|| bottlenecks(Format::Bf16), GENTLE, 1e-2)];
    for (build, setup, most) in networks {
        let expected = on_cpu(build(), setup);
        let trained = on_gpu(build(), setup, 0, |_| ());
        let all = |trained: &Trained| [&trained.losses[..], &trained.evaluated].concat();
        for (got, wanted) in all(&trained).iter().zip(all(&expected)) {
            assert!((got - wanted).abs() < most * wanted, "{:?}, expected {:?}", all(&trained), all(&expected));
        }
    }
}

#[test]
fn every_part_of_the_comparison_detects_a_difference() {
    let trained = || on_cpu(graph(4), ADAMW);
    let mut expected = trained();
    expected.statistics = vec![1.0];
    let changed = |change: &dyn Fn(&mut Trained)| {
        let mut other = Trained { statistics: vec![1.0], ..trained() };
        change(&mut other);
        other.difference(&expected)
    };
    assert_eq!(changed(&|_| ()), None);
    assert!(changed(&|other| other.losses[7] *= 1.001).unwrap().starts_with("step 7: loss"));
    assert!(changed(&|other| other.evaluated[1] *= 1.001).unwrap().starts_with("evaluation 1: loss"));
    assert!(changed(&|other| other.correct += 1).unwrap().contains("correct predictions"));
    assert!(changed(&|other| other.weights[0] += 0.01).unwrap().starts_with("weight or statistic 0"));
    assert!(changed(&|other| other.statistics[0] += 0.01).unwrap().starts_with("weight or statistic"));
}

#[test]
fn missing_and_extra_launches_are_detected() {
    let expected = on_cpu(graph(4), ADAMW);
    let no_residual = |launches: &mut Vec<Launch<Span>>| {
        let residual = launches.iter_mut().find_map(|launch| match &mut launch.work {
            Work::Product(product) => Some(product).filter(|product| product.addend.is_some()),
            _ => None,
        });
        residual.unwrap().addend = None;
    };
    let trained = on_gpu(graph(4), ADAMW, 0, no_residual);
    assert!(trained.difference(&expected).is_some());
    let adds = |launch: &Launch<Span>| {
        let writes = launch.work.writes();
        launch.work.name() == "layer_norm_backward" && launch.work.reads().iter().any(|span| writes.contains(span))
    };
    let twice = |launches: &mut Vec<Launch<Span>>| {
        let sum = launches.iter().position(adds).unwrap();
        launches.insert(sum, launches[sum].clone());
    };
    assert!(on_gpu(graph(4), ADAMW, 0, twice).difference(&expected).is_some());
}
