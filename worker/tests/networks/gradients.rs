//! Backward versus forward: directional derivatives of the loss, parameter by parameter, for every
//! model and format; and the gradient sink's contract.

use crate::flat_gradients::FlatGradients;
use crate::trial::{Case, Trial, cases, cpu};
use std::collections::BTreeMap;
use switchyard_worker::cpu::{Cpu, Format, Isa};
use switchyard_worker::data::Kind;
use switchyard_worker::model::{Model, Registry};
use switchyard_worker::nn::layers::{self, Activation, CrossEntropy, Linear, Target};
use switchyard_worker::nn::{
    Backward, Flow, Forward, GradientSink, Graph, INPUTS, Layer, Layout, ModelError, Needs, Network,
};
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

fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.available())
}

fn norm(gradient: &[f32]) -> f64 {
    gradient.iter().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt()
}

fn check_directions(case: &Case, isa: Isa) {
    check_trial(case, isa, Trial::new(case, cpu(1, isa), Format::F32).excite());
}

fn check_trial(case: &Case, isa: Isa, mut trial: Trial) {
    let layout = trial.network.layout().clone();
    let mut sink = Flat::new(&layout);
    trial.forward();
    trial.backward(1.0, &mut sink);
    let whole = norm(&sink.flat.gradients);
    for parameter in &layout.parameters {
        let gradient = sink.flat.gradients[parameter.range()].to_vec();
        let norm = norm(&gradient);
        // The bias before a batch norm and the key bias in attention have no effect.
        if norm < 1e-4 * whole {
            continue;
        }
        let before = trial.weights[parameter.range()].to_vec();
        // Along the gradient: far enough for the f32 loss to change measurably, close enough for it
        // to be linear. The best of several steps.
        let best = [0.4, 0.1, 0.03, 0.01, 0.004, 0.001]
            .map(|reach| {
                let step = reach * f64::from(before.iter().fold(0.05f32, |max, w| max.max(w.abs())));
                let mut loss_at = |sign: f64| {
                    for ((w, &b), &g) in trial.weights[parameter.range()].iter_mut().zip(&before).zip(&gradient) {
                        *w = (f64::from(b) + sign * step * f64::from(g) / norm) as f32;
                    }
                    // The batch statistics are part of the differentiated function.
                    trial.forward().loss
                };
                let (plus, minus) = (loss_at(1.0), loss_at(-1.0));
                trial.weights[parameter.range()].copy_from_slice(&before);
                (plus - minus) / (2.0 * step * norm)
            })
            .into_iter()
            .min_by(|a, b| (a - 1.0).abs().total_cmp(&(b - 1.0).abs()))
            .unwrap();
        // ReLU has no derivative at 0, and some units change sides along the way.
        let tolerance = if case.name == "resnet-18" { 0.03 } else { 0.015 };
        assert!((best - 1.0).abs() < tolerance, "{} {isa:?} {}: ratio {best}, norm {norm}", case.name, parameter.name);
    }
}

#[test]
fn directional_derivatives() {
    // With fifty ReLU layers no step is short enough; `network_parity` checks their gradients
    // against PyTorch.
    for case in cases().into_iter().filter(|case| case.name != "resnet-50") {
        for isa in isas() {
            check_directions(&case, isa);
        }
    }
}

/// Elementwise product of two tensors.
struct Multiply {
    len: usize,
    flow: [Flow; INPUTS],
}

impl Layer for Multiply {
    fn kind(&self) -> &'static str {
        "Multiply"
    }

    fn needs(&self, _: &Cpu) -> Needs {
        Needs { inputs: [true, true, false], flow: self.flow, ..Needs::default() }
    }

    fn forward(&mut self, cx: &mut Forward<'_>) {
        let (a, b) = (cx.inputs[0].of::<f32>(), cx.inputs[1].of::<f32>());
        let y = cx.output.of::<f32>();
        (0..self.len).for_each(|i| y[i] = a[i] * b[i]);
    }

    fn backward(&mut self, cx: &mut Backward<'_>) {
        let dy = cx.d_output.shared();
        for (of, other) in [(0, 1), (1, 0)] {
            let (dy, other) = (dy.of::<f32>(), cx.inputs[other].of::<f32>());
            let (mut d, add) = cx.d_inputs[of].target().unwrap();
            for (d, (dy, x)) in d.of::<f32>().iter_mut().zip(dy.iter().zip(other)) {
                *d = dy * x + if add { *d } else { 0.0 };
            }
        }
    }
}

/// An MLP whose hidden layer is squared by a [`Multiply`], with a skip connection around it.
struct Squares([Flow; INPUTS]);

impl Model for Squares {
    fn words(&self) -> String {
        "squares".into()
    }

    fn build(&self, graph: &mut Graph) -> Result<(), ModelError> {
        let input = layers::features(graph, "input")?;
        let hidden = Linear::new(6).add(graph, "hidden", input)?;
        let shape = graph.shape(hidden).to_vec();
        let multiply = Multiply { len: graph.len(hidden), flow: self.0 };
        let squares = graph.add("squares", multiply, &[hidden, hidden], &[], &[], &shape)?;
        let around = Linear::new(6).residual(squares).add(graph, "around", hidden)?;
        let output = Linear::new(4).add(graph, "output", around)?;
        CrossEntropy { target: Target::Classes, count: true }.add(graph, "loss", output)
    }
}

/// The model `squares` with the flows named in its parameters.
fn squares(parameters: &BTreeMap<String, String>) -> Result<Box<dyn Model>, ModelError> {
    let flow = |name: &str| if parameters[name] == "write" { Flow::Write } else { Flow::Accumulate };
    Ok(Box::new(Squares([flow("first"), flow("second"), Flow::Write])))
}

#[test]
fn a_tensor_used_as_both_inputs_gets_the_sum_of_both_gradients() {
    let registry = Registry::new().with("squares", squares);
    let words = ["write", "accumulate"];
    for (first, second) in words.into_iter().flat_map(|first| words.map(|second| (first, second))) {
        let flows = [("first", first), ("second", second)].map(|(name, flow)| (name.to_owned(), flow.to_owned()));
        let model = config::Model::Custom(config::Custom { name: "squares".into(), parameters: flows.into() });
        let case = Case { name: "squares", model, kind: Kind::Features { width: 7, classes: 4 }, samples: 6 };
        for isa in isas() {
            let trial = Trial::of(&registry, &case, cpu(1, isa), Format::F32, (0.0, 1.0)).excite();
            check_trial(&case, isa, trial);
        }
    }
}

/// An MLP that normalises its input, whose gradient is not needed.
struct Normalised {
    of_rows: bool,
}

impl Model for Normalised {
    fn words(&self) -> String {
        "normalised".into()
    }

    fn build(&self, graph: &mut Graph) -> Result<(), ModelError> {
        let input = layers::features(graph, "input")?;
        let norm = match self.of_rows {
            true => layers::LayerNorm.add(graph, "norm", input)?,
            false => layers::BatchNorm::default().add(graph, "norm", input)?,
        };
        let output = Linear::new(4).add(graph, "output", norm)?;
        CrossEntropy { target: Target::Classes, count: true }.add(graph, "loss", output)
    }
}

#[test]
fn a_norm_on_the_input_learns() {
    let normalised = |parameters: &BTreeMap<String, String>| -> Result<Box<dyn Model>, ModelError> {
        Ok(Box::new(Normalised { of_rows: parameters["of"] == "rows" }))
    };
    let registry = Registry::new().with("normalised", normalised);
    for of in ["rows", "channels"] {
        let parameters = [("of".to_owned(), of.to_owned())].into();
        let model = config::Model::Custom(config::Custom { name: "normalised".into(), parameters });
        let case = Case { name: "normalised", model, kind: Kind::Features { width: 7, classes: 4 }, samples: 6 };
        let trial = || Trial::of(&registry, &case, cpu(1, Isa::Portable), Format::F32, (0.0, 1.0)).excite();
        let mut sums = trial();
        let mut sink = Flat::new(sums.network.layout());
        sink.flat.gradients.fill(f32::NAN);
        sums.forward();
        sums.backward(1.0, &mut sink);
        for parameter in &sums.network.layout().parameters {
            let gradient = &sink.flat.gradients[parameter.range()];
            assert!(gradient.iter().all(|g| g.is_finite()), "{of}: {} {gradient:?}", parameter.name);
        }
        check_trial(&case, Isa::Portable, trial());
    }
}

/// The gradient of the logits overwrites them, and the backward pass of some functions reads their
/// output.
#[test]
fn an_activation_whose_output_the_loss_overwrites_is_refused() {
    for (activation, is_refused) in [(Activation::Relu, true), (Activation::Tanh, true), (Activation::Gelu, false)] {
        let mut graph = Graph::new(6, Kind::Features { width: 7, classes: 4 }, Format::F32);
        let input = layers::features(&mut graph, "input").unwrap();
        let output = Linear::new(4).activation(activation).add(&mut graph, "output", input).unwrap();
        CrossEntropy { target: Target::Classes, count: true }.add(&mut graph, "loss", output).unwrap();
        let error = Network::new(graph, cpu(1, Isa::Portable)).err();
        assert_eq!(error, is_refused.then(|| ModelError::Overwritten { layer: "output".into() }), "{activation:?}");
    }
}

#[test]
fn gradients_in_16_bits_are_close() {
    // Fifty layers of two channels amplify any rounding into chaos.
    for case in cases().into_iter().filter(|case| case.name != "resnet-50") {
        let mut wide = Trial::new(&case, cpu(1, Isa::detect(None).unwrap()), Format::F32).excite();
        let layout = wide.network.layout().clone();
        let mut want = Flat::new(&layout);
        let loss = wide.forward().loss;
        wide.backward(1.0, &mut want);
        for (format, tolerance) in [(Format::Bf16, 0.12), (Format::F16, 0.03)] {
            let mut narrow = Trial::new(&case, cpu(1, Isa::detect(None).unwrap()), format).excite();
            let mut got = Flat::new(&layout);
            let close = narrow.forward().loss;
            narrow.backward(1.0, &mut got);
            assert!(
                (close - loss).abs() < tolerance * loss,
                "{} {format:?}: loss {close}, in 32 bits {loss}",
                case.name
            );
            let difference: Vec<f32> =
                got.flat.gradients.iter().zip(&want.flat.gradients).map(|(got, want)| got - want).collect();
            let relative = norm(&difference) / norm(&want.flat.gradients);
            // In batches this small, a norm divides by the deviation of only a few values.
            let tolerance = if case.name == "resnet-18" { 4.0 * tolerance } else { tolerance };
            assert!(relative < tolerance, "{} {format:?}: gradients differ by {relative}", case.name);
        }
    }
}

#[test]
fn gradients_are_finished_once_in_layout_order() {
    for case in cases() {
        let mut trial = Trial::new(&case, cpu(2, Isa::detect(None).unwrap()), Format::F32);
        let mut sink = Flat::new(trial.network.layout());
        for _ in 0..2 {
            sink.finished.clear();
            trial.forward();
            trial.backward(1.0, &mut sink);
            assert_eq!(
                sink.finished,
                (0..trial.network.layout().parameters.len()).collect::<Vec<_>>(),
                "{}",
                case.name
            );
        }
    }
    let names = |case: usize| {
        let trial = Trial::new(&cases()[case], cpu(1, Isa::Portable), Format::F32);
        let names: Vec<String> = trial.network.layout().parameters.iter().map(|p| p.name.clone()).collect();
        names
    };
    assert_eq!(names(0).last().unwrap(), "transformer.wte.weight");
    assert_ne!(names(0)[0], "lm_head.weight");
    assert_eq!(names(1)[0], "lm_head.weight");
}

#[test]
fn gradients_accumulate_and_scale() {
    for case in cases() {
        let mut trial = Trial::new(&case, cpu(1, Isa::detect(None).unwrap()), Format::F32).excite();
        let layout = trial.network.layout().clone();
        let mut whole = Flat::new(&layout);
        whole.flat.gradients.fill(f32::NAN);
        trial.forward();
        trial.backward(1.0, &mut whole);
        let mut halves = Flat::new(&layout);
        for accumulate in [false, true] {
            halves.flat.accumulate = accumulate;
            trial.forward();
            trial.backward(0.5, &mut halves);
        }
        for parameter in &layout.parameters {
            let pairs = whole.flat.gradients[parameter.range()].iter().zip(&halves.flat.gradients[parameter.range()]);
            for (a, b) in pairs {
                assert!((a - b).abs() <= 2e-6 * (1.0 + a.abs()), "{} {}: {a} and {b}", case.name, parameter.name);
            }
        }
    }
}

#[test]
fn threads_do_not_change_the_bits() {
    for case in cases() {
        for isa in isas() {
            for format in [Format::F32, Format::Bf16] {
                let mut results = Vec::new();
                for threads in [1, 2, 3] {
                    let mut trial = Trial::new(&case, cpu(threads, isa), format).excite();
                    let mut sink = Flat::new(trial.network.layout());
                    let loss = trial.forward().loss;
                    trial.backward(1.0, &mut sink);
                    let bits: Vec<u32> = sink.flat.gradients.iter().map(|g| g.to_bits()).collect();
                    results.push((loss.to_bits(), bits));
                }
                assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "{} {isa:?} {format:?}", case.name);
            }
        }
    }
}

/// Same as above, but large enough for products to be split over threads.
#[test]
fn threads_do_not_change_the_bits_of_larger_models() {
    use switchyard_worker_contract::config::{Gpt, Model, ResNetDepth, Stem};
    let shape =
        Gpt { layers: 1, hidden_size: 128, heads: 2, context_length: 96, vocabulary_size: 256, tied_head: false };
    let model = Model::Gpt(shape);
    let gpt = Case { name: "larger gpt", kind: crate::trial::kind_of(&model), model, samples: 2 };
    let model = crate::trial::resnet(ResNetDepth::D18, Stem::Small, 16);
    let resnet = Case { name: "larger resnet", model, kind: crate::trial::images(16, 3), samples: 4 };
    for (case, guess) in [(gpt, 256f64.ln()), (resnet, 5f64.ln())] {
        let mut results = Vec::new();
        for threads in [1, 3] {
            let mut trial = Trial::new(&case, cpu(threads, Isa::detect(None).unwrap()), Format::F32);
            let mut sink = Flat::new(trial.network.layout());
            let loss = trial.forward().loss;
            trial.backward(1.0, &mut sink);
            assert!((loss - guess).abs() < 1.0, "{}: loss of random weights {loss}", case.name);
            let bits: Vec<u32> = sink.flat.gradients.iter().map(|g| g.to_bits()).collect();
            results.push((loss.to_bits(), bits));
        }
        assert!(results[0] == results[1], "{}", case.name);
    }
}
