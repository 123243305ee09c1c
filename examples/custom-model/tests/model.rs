//! Tests that every custom network needs: its gradient against finite differences of the loss in
//! every number format, a few training steps that lower the loss, and errors that name the invalid
//! parameter.
#![allow(clippy::unwrap_used)]

#[path = "../../../worker/tests/flat_gradients/mod.rs"]
mod flat_gradients;
#[path = "../../../worker/tests/plain/mod.rs"]
mod plain;
#[path = "../../../worker/tests/ranks/mod.rs"]
mod ranks;
#[path = "../../../worker/tests/trial/mod.rs"]
mod trial;

use flat_gradients::FlatGradients;
use std::collections::BTreeMap;
use switchyard_example_custom_model::registry;
use switchyard_worker::cpu::{Format, Isa};
use switchyard_worker::lowering;
use switchyard_worker::nn::Graph;
use switchyard_worker::train::{Blueprint, StepRequest, Trainer, open};
use switchyard_worker_contract::config::{Custom, EngineConfig, Model};
use trial::{Case, Trial, cpu, images};

fn model(parameters: &[(&str, &str)]) -> Model {
    let text = |&(name, value): &(&str, &str)| (name.to_owned(), value.to_owned());
    Model::Custom(Custom { name: "squeeze-excite".into(), parameters: parameters.iter().map(text).collect() })
}

fn small(threads: usize, format: Format) -> Trial {
    let model = model(&[("width", "8"), ("stages", "2"), ("reduction", "2")]);
    let case = Case { name: "squeeze-excite", model, kind: images(8, 3), samples: 6 };
    Trial::of(&registry(), &case, cpu(threads, Isa::fastest()), format, (0.45, 0.25)).excite()
}

fn gradients(trial: &mut Trial) -> Vec<f32> {
    let mut sink = FlatGradients::new(trial.network.layout());
    trial.forward();
    trial.backward(1.0, &mut sink);
    sink.gradients
}

fn norm(gradient: &[f32]) -> f64 {
    gradient.iter().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt()
}

#[test]
fn gradients_match_finite_differences() {
    let mut trial = small(1, Format::F32);
    let all = gradients(&mut trial);
    let layout = trial.network.layout().clone();
    assert!(layout.parameters.iter().any(|parameter| parameter.name == "stages.0.gate.bias"));
    for parameter in &layout.parameters {
        let gradient = &all[parameter.range()];
        let norm = norm(gradient);
        assert!(norm > 1e-5, "{}: gradient {norm}", parameter.name);
        let before = trial.weights[parameter.range()].to_vec();
        let mut loss_at = |step: f64| {
            for ((w, &b), &g) in trial.weights[parameter.range()].iter_mut().zip(&before).zip(gradient) {
                *w = (f64::from(b) + step * f64::from(g) / norm) as f32;
            }
            trial.forward().loss
        };
        // Far enough apart for single precision and close enough for a linear loss: the best of
        // several step sizes.
        let ratio = |step: f64| (loss_at(step) - loss_at(-step)) / (2.0 * step * norm);
        let errors = [0.1, 0.03, 0.01, 0.003, 0.001, 0.0003].map(ratio).map(|ratio| (ratio - 1.0).abs());
        let best = errors.into_iter().fold(f64::INFINITY, f64::min);
        trial.weights[parameter.range()].copy_from_slice(&before);
        assert!(best < 0.015, "{}: {errors:?}", parameter.name);
    }
}

#[test]
fn gpu_rejects_the_gate() {
    let mut graph = Graph::new(6, images(8, 3), Format::F32);
    registry().model(&model(&[])).unwrap().build(&mut graph).unwrap();
    let target = lowering::Target {
        blocks: 132,
        shared_bytes: 232_448,
        cudnn: lowering::CudnnKinds::all(&graph),
        epilogues: true,
        fp8: false,
        arithmetic: lowering::Arithmetic::Ieee,
    };
    let refused = lowering::Plan::new(graph, target).err().unwrap();
    let expected = "layer `stages.0.gate` (Gate) comes from a user's program and runs on CPUs only";
    assert_eq!(refused.to_string(), expected);
}

#[test]
fn results_are_bit_identical_across_threads_and_close_in_16_bits() {
    let wide = gradients(&mut small(1, Format::F32));
    assert_eq!(wide, gradients(&mut small(3, Format::F32)));
    for (format, tolerance) in [(Format::Bf16, 0.12), (Format::F16, 0.03)] {
        let narrow = gradients(&mut small(2, format));
        let difference: Vec<f32> = wide.iter().zip(&narrow).map(|(wide, narrow)| wide - narrow).collect();
        let relative = norm(&difference) / norm(&wide);
        assert!(relative < tolerance, "{format:?}: gradients differ by {relative}");
    }
}

#[test]
fn twenty_steps_lower_the_loss() {
    let config = EngineConfig { model: model(&[]), ..plain::resnet() };
    let blueprint = Blueprint::new(&config, open(&config).unwrap(), (1, 0), None, &registry()).unwrap();
    let group = ranks::group(1, 0, ranks::free_port());
    let mut trainer = Trainer::join(blueprint, &group).unwrap();
    let losses: Vec<f64> = (0..20).map(|_| trainer.step(StepRequest::default()).unwrap().0.loss).collect();
    let last = losses[15..].iter().sum::<f64>() / 5.0;
    assert!(last < 0.75 * losses[0], "{losses:?}");
    let judgement = trainer.evaluate().unwrap().unwrap();
    assert!(judgement.loss < losses[0] && judgement.accuracy.is_some(), "{judgement:?}");
}

#[test]
fn invalid_parameters_are_named() {
    let fault = |parameters: &[(&str, &str)]| registry().model(&model(parameters)).err().unwrap().to_string();
    assert_eq!(
        fault(&[("width", "many")]),
        "custom.parameters.width: got `many`, expected a whole number from 1 to 1024"
    );
    assert_eq!(fault(&[("stages", "5")]), "custom.parameters.stages: got `5`, expected a whole number from 1 to 4");
    assert_eq!(
        fault(&[("widht", "8")]),
        "custom.parameters.widht: got `8`, expected nothing: the parameters are width, stages, reduction"
    );
    let other = Model::Custom(Custom { name: "squeeze".into(), parameters: BTreeMap::new() });
    assert_eq!(
        registry().model(&other).err().unwrap().to_string(),
        "custom.name: got `squeeze`; this worker has `squeeze-excite`"
    );
}
