//! Backward against forward: directional derivatives of the loss, parameter by parameter, and the contract of the sink.
#![allow(clippy::unwrap_used)]

mod flat_gradients;

use flat_gradients::FlatGradients;
use std::sync::Arc;
use switchyard_worker::cpu::{Isa, Pool};
use switchyard_worker::model::{Gpt, GradientSink, Layout, Model};
use switchyard_worker_contract::config;

/// Gradients in one array, and the order in which they became final.
struct Flat {
    flat: FlatGradients,
    finished: Vec<usize>,
}

impl Flat {
    fn new(layout: &Layout) -> Flat {
        Flat { flat: FlatGradients::new(layout), finished: Vec::new() }
    }
}

impl GradientSink for Flat {
    fn accumulate(&self) -> bool {
        self.flat.accumulate
    }
    fn gradient(&mut self, ordinal: usize) -> &mut [f32] {
        self.flat.gradient(ordinal)
    }
    fn gradients2(&mut self, a: usize, b: usize) -> (&mut [f32], &mut [f32]) {
        self.flat.gradients2(a, b)
    }
    fn finished(&mut self, ordinal: usize) {
        self.finished.push(ordinal);
    }
}

fn config(tied_head: bool) -> config::Gpt {
    config::Gpt { layers: 2, hidden_size: 24, heads: 3, context_length: 11, vocabulary_size: 37, tied_head }
}

const BATCH: usize = 3;

struct Setup {
    gpt: Gpt,
    weights: Vec<f32>,
    inputs: Vec<u16>,
    targets: Vec<u16>,
}

fn setup(tied: bool, threads: usize, isa: Isa) -> Setup {
    let gpt = Gpt::new(&config(tied), BATCH, Arc::new(Pool::new(threads)), isa).unwrap();
    let mut weights = vec![0.0; gpt.layout().len];
    gpt.initialise(3, &mut weights);
    // Larger weights and biases that are not 0: every path carries a gradient worth measuring.
    let mut other = vec![0.0; weights.len()];
    gpt.initialise(4, &mut other);
    for parameter in &gpt.layout().parameters {
        for (i, w) in weights[parameter.range()].iter_mut().enumerate() {
            if parameter.shape.len() > 1 {
                *w *= 8.0;
            } else {
                *w += 0.1 * ((i * 7 + parameter.offset) as f32).sin();
            }
        }
    }
    let rows = gpt.tokens_per_batch();
    let inputs = (0..rows).map(|i| (i * i * 5 % 37) as u16).collect();
    let targets = (0..rows).map(|i| ((i * 11 + 3) % 37) as u16).collect();
    Setup { gpt, weights, inputs, targets }
}

fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.available())
}

#[test]
fn directional_derivatives() {
    for tied in [false, true] {
        for isa in isas() {
            let Setup { mut gpt, mut weights, inputs, targets } = setup(tied, 1, isa);
            let layout = gpt.layout().clone();
            let mut sink = Flat::new(&layout);
            gpt.forward(&weights, &inputs, &targets);
            gpt.backward(&weights, 1.0, &mut sink);
            for parameter in &layout.parameters {
                let gradient = sink.flat.gradients[parameter.range()].to_vec();
                let norm = gradient.iter().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
                assert!(norm > 1e-4, "{}: gradient of norm {norm}", parameter.name);
                // Along the gradient, far enough for the loss (about 3.6, single precision) to change measurably.
                let step = 2e-2 / norm.max(0.05);
                let before = weights[parameter.range()].to_vec();
                let mut loss_at = |sign: f64| {
                    for ((w, &b), &g) in weights[parameter.range()].iter_mut().zip(&before).zip(&gradient) {
                        *w = (f64::from(b) + sign * step * f64::from(g) / norm) as f32;
                    }
                    gpt.evaluate(&weights, &inputs, &targets)
                };
                let (plus, minus) = (loss_at(1.0), loss_at(-1.0));
                weights[parameter.range()].copy_from_slice(&before);
                let ratio = (plus - minus) / (2.0 * step * norm);
                assert!(
                    (ratio - 1.0).abs() < 0.015,
                    "{isa:?} tied {tied} {}: ratio {ratio}, norm {norm}",
                    parameter.name
                );
            }
        }
    }
}

#[test]
fn gradients_are_finished_once_in_layout_order() {
    for tied in [false, true] {
        let Setup { mut gpt, weights, inputs, targets } = setup(tied, 2, Isa::detect(None).unwrap());
        let mut sink = Flat::new(gpt.layout());
        for _ in 0..2 {
            sink.finished.clear();
            gpt.forward(&weights, &inputs, &targets);
            gpt.backward(&weights, 1.0, &mut sink);
            assert_eq!(sink.finished, (0..gpt.layout().parameters.len()).collect::<Vec<_>>());
        }
        assert_eq!(gpt.layout().parameters.last().unwrap().name, "transformer.wte.weight");
        assert_eq!(gpt.layout().parameters[0].name == "lm_head.weight", !tied);
    }
}

#[test]
fn accumulating_adds_and_scale_multiplies() {
    for tied in [false, true] {
        let Setup { mut gpt, weights, inputs, targets } = setup(tied, 1, Isa::detect(None).unwrap());
        let mut whole = Flat::new(gpt.layout());
        whole.flat.gradients.fill(f32::NAN);
        gpt.forward(&weights, &inputs, &targets);
        gpt.backward(&weights, 1.0, &mut whole);
        let mut halves = Flat::new(gpt.layout());
        for accumulate in [false, true] {
            halves.flat.accumulate = accumulate;
            gpt.forward(&weights, &inputs, &targets);
            gpt.backward(&weights, 0.5, &mut halves);
        }
        for parameter in &gpt.layout().parameters {
            for (a, b) in whole.flat.gradients[parameter.range()].iter().zip(&halves.flat.gradients[parameter.range()])
            {
                assert!((a - b).abs() <= 1e-6 * (1.0 + a.abs()), "{}: {a} and {b}", parameter.name);
            }
        }
    }
}

#[test]
fn threads_do_not_change_the_bits() {
    for isa in isas() {
        let mut results = Vec::new();
        for threads in [1, 2, 3] {
            let Setup { mut gpt, weights, inputs, targets } = setup(true, threads, isa);
            let mut sink = Flat::new(gpt.layout());
            let loss = gpt.forward(&weights, &inputs, &targets);
            gpt.backward(&weights, 1.0, &mut sink);
            results.push((loss.to_bits(), sink.flat.gradients.iter().map(|g| g.to_bits()).collect::<Vec<_>>()));
        }
        assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "{isa:?}");
    }
}

/// As above, but large enough that products are split over threads.
#[test]
fn threads_do_not_change_the_bits_of_a_larger_model() {
    let config = config::Gpt {
        layers: 1,
        hidden_size: 128,
        heads: 2,
        context_length: 96,
        vocabulary_size: 256,
        tied_head: false,
    };
    let mut results = Vec::new();
    for threads in [1, 3] {
        let mut gpt = Gpt::new(&config, 2, Arc::new(Pool::new(threads)), Isa::detect(None).unwrap()).unwrap();
        let mut weights = vec![0.0; gpt.layout().len];
        gpt.initialise(1, &mut weights);
        let tokens: Vec<u16> = (0..193).map(|i| (i * i % 256) as u16).collect();
        let mut sink = Flat::new(gpt.layout());
        let loss = gpt.forward(&weights, &tokens[..192], &tokens[1..]);
        gpt.backward(&weights, 1.0, &mut sink);
        assert!((loss - 256f64.ln()).abs() < 0.2, "loss of random weights: {loss}");
        results.push((loss.to_bits(), sink.flat.gradients.iter().map(|g| g.to_bits()).collect::<Vec<_>>()));
    }
    assert!(results[0] == results[1]);
}

#[test]
fn impossible_shapes_are_refused() {
    let pool = Arc::new(Pool::new(1));
    let refuse = |config: &config::Gpt, batch| {
        Gpt::new(config, batch, Arc::clone(&pool), Isa::Portable).err().unwrap().to_string()
    };
    let good = config(true);
    assert_eq!(refuse(&good, 0), "batch size is 0, expected at least 1");
    assert_eq!(refuse(&config::Gpt { heads: 5, ..good.clone() }, 1), "hidden size 24 is not a multiple of 5 heads");
    assert_eq!(
        refuse(&config::Gpt { vocabulary_size: 65_537, ..good.clone() }, 1),
        "vocabulary of 65537 tokens, expected at most 65536"
    );
    let huge = config::Gpt { hidden_size: u32::MAX - 3, heads: 3, context_length: u32::MAX, ..good };
    assert!(refuse(&huge, usize::MAX / 4).contains("address space"));
}
