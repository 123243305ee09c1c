//! Recomputed blocks: the same bits in less memory.

use crate::flat_gradients::FlatGradients;
use crate::trial::{Case, Trial, cases, cpu, kind_of};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use switchyard_worker::cpu::{Cpu, Element, Format, Isa, with_format};
use switchyard_worker::data::Kind;
use switchyard_worker::nn::layers::{CrossEntropy, Linear, Target};
use switchyard_worker::nn::{Backward, Flow, Forward, Graph, INPUTS, InputGradient, Layer, Needs, Network, Weights};
use switchyard_worker_contract::config::{self, Model};

fn with_blocks() -> impl Iterator<Item = Case> {
    cases().into_iter().filter(|case| !case.name.starts_with("mlp"))
}

/// Bits of losses, batch statistics and gradients of two micro-batches.
fn bits(mut trial: Trial) -> Vec<u64> {
    let mut sink = FlatGradients::new(trial.network.layout());
    let mut bits = Vec::new();
    for accumulate in [false, true] {
        sink.accumulate = accumulate;
        bits.push(trial.forward().loss.to_bits());
        trial.backward(1.0, &mut sink);
        bits.extend(trial.network.batch_statistics().iter().map(|value| u64::from(value.to_bits())));
    }
    bits.extend(sink.gradients.iter().map(|value| u64::from(value.to_bits())));
    bits
}

#[test]
fn gradients_have_the_same_bits() {
    for case in with_blocks() {
        for format in [Format::F32, Format::Bf16, Format::F16] {
            let [kept, recomputed] =
                [Trial::new, Trial::recomputing].map(|trial| trial(&case, cpu(2, Isa::Portable), format));
            let (less, more) = (recomputed.network.memory_bytes(), kept.network.memory_bytes());
            assert!(less < more, "{} {format:?}: {less}, not less than {more} bytes", case.name);
            assert_eq!(recomputed.network.memory_bytes_kept(), Some(more), "{} {format:?}", case.name);
            assert_eq!(kept.network.memory_bytes_kept(), None);
            assert!(bits(kept.excite()) == bits(recomputed.excite()), "{} {format:?}", case.name);
        }
    }
}

/// Backward needs nothing of the last product of a GPT's block; a norm saves deviations.
#[test]
fn only_what_backward_needs_is_recomputed() {
    for (name, skipped) in [("gpt", Some("mlp.c_proj")), ("bert", None), ("resnet-18", None)] {
        let case = with_blocks().find(|case| case.name == name).unwrap();
        let mut trial = Trial::recomputing(&case, cpu(1, Isa::Portable), Format::F32);
        let mut sink = FlatGradients::new(trial.network.layout());
        trial.network.record(true);
        trial.forward();
        trial.backward(1.0, &mut sink);
        let network = &trial.network;
        for node in 0..network.layers() {
            let layer = network.name(node).0;
            let is_inside = ["transformer.h.", "bert.encoder.", "layer"].iter().any(|block| layer.starts_with(block));
            let passes = network.operations().iter().filter(|run| run.node as usize == node && !run.backward).count();
            let is_skipped = skipped.is_some_and(|skipped| layer.ends_with(skipped));
            let expected = if is_inside && !is_skipped { 2 } else { 1 };
            assert_eq!(passes, expected, "{layer}");
        }
    }
}

#[test]
fn eight_blocks_need_a_quarter_of_the_memory() {
    let (layers, hidden_size, heads, context_length, vocabulary_size) = (8, 64, 4, 64, 64);
    let gpt = config::Gpt { layers, hidden_size, heads, context_length, vocabulary_size, tied_head: true };
    let bert = config::Bert {
        layers,
        hidden_size,
        heads,
        context_length,
        vocabulary_size,
        masked_fraction: 0.15,
        next_sentence: true,
    };
    for (name, model) in [("gpt", Model::Gpt(gpt)), ("bert", Model::Bert(bert))] {
        for format in [Format::F32, Format::Bf16] {
            let case = Case { name, kind: kind_of(&model), model: model.clone(), samples: 128 };
            let network = Trial::recomputing(&case, cpu(1, Isa::Portable), format).network;
            let (bytes, kept) = (network.memory_bytes(), network.memory_bytes_kept().unwrap());
            assert!(4 * bytes <= kept, "{name} {format:?}: {bytes} of {kept} bytes");
            if (name, format) == ("gpt", Format::F32) {
                let tenths_percent = (1000 * bytes + kept / 2) / kept;
                assert_eq!(tenths_percent, 218, "the figure of docs/engine.md: {bytes} of {kept} bytes");
            }
        }
    }
}

/// Multiplies by random numbers that differ in every micro-batch.
struct Noise {
    state: u64,
    forwards: Arc<AtomicU32>,
}

impl Noise {
    fn factors(&self) -> impl Iterator<Item = f32> {
        let mut state = self.state;
        std::iter::repeat_with(move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32
        })
    }
}

impl Layer for Noise {
    fn kind(&self) -> &'static str {
        "Noise"
    }

    fn needs(&self, _: &Cpu) -> Needs {
        Needs { flow: [Flow::InPlace; INPUTS], ..Needs::default() }
    }

    fn forward(&mut self, cx: &mut Forward<'_>) {
        self.forwards.fetch_add(1, Ordering::Relaxed);
        with_format!(cx.output.format(), E => {
            for ((y, x), factor) in cx.output.of::<E>().iter_mut().zip(cx.inputs[0].of::<E>()).zip(self.factors()) {
                *y = E::of(x.get() * factor);
            }
        });
    }

    fn backward(&mut self, cx: &mut Backward<'_>) {
        assert!(matches!(cx.d_inputs[0], InputGradient::InPlace));
        with_format!(cx.d_output.format(), E => {
            for (d, factor) in cx.d_output.of::<E>().iter_mut().zip(self.factors()) {
                *d = E::of(d.get() * factor);
            }
        });
        self.state += 1;
    }
}

#[test]
fn random_numbers_are_the_same_in_both_passes() {
    let run = |recomputes: bool| {
        let forwards = Arc::new(AtomicU32::new(0));
        let mut graph = Graph::new(6, Kind::Features { width: 7, classes: 4 }, Format::F32);
        if recomputes {
            graph = graph.with_recomputation();
        }
        let x = switchyard_worker::nn::layers::features(&mut graph, "input").unwrap();
        let x = Linear::new(8).add(&mut graph, "first", x).unwrap();
        let x = graph.block(|graph| {
            let noise = Noise { state: 1, forwards: Arc::clone(&forwards) };
            let x = graph.add("noise", noise, &[x], &[], &[], &[6, 8]).unwrap();
            Linear::new(8).add(graph, "second", x).unwrap()
        });
        let logits = Linear::new(4).add(&mut graph, "third", x).unwrap();
        CrossEntropy { target: Target::Classes, count: false }.add(&mut graph, "loss", logits).unwrap();
        let mut network = Network::new(graph, cpu(1, Isa::Portable)).unwrap();
        let mut master = vec![0.0; network.layout().len];
        switchyard_worker::model::initialise(network.layout(), 3, &mut master);
        let weights = Weights { master: &master, half: None, statistics: &[] };
        let batch = crate::trial::batch_of(&Kind::Features { width: 7, classes: 4 }, 6);
        let mut sink = FlatGradients::new(network.layout());
        for _ in 0..3 {
            network.forward(weights, &batch);
            network.backward(weights, &batch, 1.0, &mut sink);
            sink.accumulate = true;
        }
        (sink.gradients, forwards.load(Ordering::Relaxed))
    };
    let ((kept, once), (recomputed, twice)) = (run(false), run(true));
    assert_eq!((kept, once, twice), (recomputed, 3, 6));
}
