//! Whole networks versus PyTorch, with fixtures from `fixtures/generate_networks.py`.

use crate::flat_gradients::FlatGradients;
use crate::trial::{Case, Trial, cpu, images, resnet};
use safetensors::{Dtype, SafeTensors};
use switchyard_worker::cpu::{Format, Isa};
use switchyard_worker::data::Kind;
use switchyard_worker::nn::ParameterSlot;
use switchyard_worker_contract::config::{self, Activation, Model, ResNetDepth, Stem};

struct Fixture(Vec<u8>);

impl Fixture {
    fn open(name: &str) -> Fixture {
        let path = format!("{}/tests/fixtures/{name}.safetensors", env!("CARGO_MANIFEST_DIR"));
        Fixture(std::fs::read(path).unwrap())
    }

    fn numbers(&self, name: &str) -> Option<Vec<f64>> {
        let tensors = SafeTensors::deserialize(&self.0).unwrap();
        let tensor = tensors.tensor(name).ok()?;
        let words = || tensor.data().as_chunks::<4>().0.iter();
        Some(match tensor.dtype() {
            Dtype::F32 => words().map(|word| f64::from(f32::from_le_bytes(*word))).collect(),
            Dtype::I32 => words().map(|word| f64::from(i32::from_le_bytes(*word))).collect(),
            _ => tensor.data().iter().map(|&byte| f64::from(byte)).collect(),
        })
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        self.numbers(name).unwrap().into_iter().map(|number| number as f32).collect()
    }

    /// PyTorch's tensor in the engine's axis order: `[out, in, y, x]` becomes `[out, y, x, in]`.
    fn parameter(&self, what: &str, parameter: &ParameterSlot) -> Vec<f32> {
        let flat = self.floats(&format!("{what}.{}", parameter.name));
        if parameter.shape.len() != 4 {
            return flat;
        }
        let [outputs, height, width, channels] = parameter.shape[..] else { panic!("a convolution") };
        let mut own = Vec::with_capacity(flat.len());
        for output in 0..outputs {
            for pixel in 0..height * width {
                own.extend((0..channels).map(|c| flat[(output * channels + c) * height * width + pixel]));
            }
        }
        own
    }
}

fn assert_close(what: &str, got: &[f32], want: &[f32], tolerance: f32) {
    assert_eq!(got.len(), want.len(), "{what}");
    let size = want.iter().fold(1e-6f32, |max, x| max.max(x.abs()));
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= tolerance * size, "{what} at {i}: {got}, PyTorch has {want} (largest {size})");
    }
}

fn check(file: &str, model: Model, kind: Kind, samples: usize, tolerance: f32) {
    let fixture = Fixture::open(file);
    for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
        let case = Case { name: "parity", model: model.clone(), kind, samples };
        let mut trial = Trial::new_with(&case, cpu(2, isa), Format::F32, (0.0, 1.0));
        let layout = trial.network.layout().clone();
        for parameter in &layout.parameters {
            trial.weights[parameter.range()].copy_from_slice(&fixture.parameter("weights", parameter));
        }
        let words = |name: &str| fixture.numbers(&format!("batch.{name}")).unwrap_or_default();
        let whole = |name: &str| words(name).into_iter().map(|number| number as u32).collect::<Vec<u32>>();
        let batch = &mut trial.batch;
        (batch.tokens, batch.positions, batch.targets) = (whole("tokens"), whole("positions"), whole("targets"));
        batch.segments = whole("segments").into_iter().map(|number| number as u8).collect();
        batch.pixels = whole("pixels").into_iter().map(|number| number as u8).collect();
        batch.values = words("values").into_iter().map(|number| number as f32).collect();
        let (mut sink, rate) = (FlatGradients::new(&layout), fixture.floats("rate")[0]);
        for (step, want) in fixture.floats("losses").into_iter().enumerate() {
            let loss = trial.forward().loss as f32;
            assert_close(&format!("{file} {isa:?}: loss of step {step}"), &[loss], &[want], tolerance);
            trial.backward(1.0, &mut sink);
            if step == 0 {
                for parameter in &layout.parameters {
                    let want = fixture.parameter("gradients", parameter);
                    let what = format!("{file} {isa:?}: {}", parameter.name);
                    assert_close(&what, &sink.gradients[parameter.range()], &want, tolerance);
                }
                let mut at = 0;
                for (name, len) in trial.network.statistics() {
                    // Momentum 0.1, from initial values 0 and 1.
                    let initial = if name.ends_with("var") { 0.9 } else { 0.0 };
                    let got: Vec<f32> =
                        trial.network.batch_statistics()[at..at + len].iter().map(|x| initial + 0.1 * x).collect();
                    assert_close(name, &got, &fixture.floats(&format!("running.{name}")), 1e-4);
                    at += len;
                }
            }
            trial.weights.iter_mut().zip(&sink.gradients).for_each(|(w, g)| *w -= rate * g);
        }
    }
}

#[test]
fn bert() {
    let model = Model::Bert(config::Bert {
        layers: 2,
        hidden_size: 24,
        heads: 3,
        context_length: 12,
        vocabulary_size: 37,
        masked_fraction: 0.25,
        next_sentence: false,
    });
    let kind = crate::trial::kind_of(&model);
    check("network_bert", model, kind, 3, 1e-4);
}

#[test]
fn resnet_18() {
    check("network_resnet18", resnet(ResNetDepth::D18, Stem::Small, 4), images(9, 3), 4, 2e-4);
}

#[test]
fn resnet_50() {
    // Fifty norms over a few values each amplify rounding.
    check("network_resnet50", resnet(ResNetDepth::D50, Stem::ImageNet, 2), images(36, 1), 4, 5e-3);
}

#[test]
fn mlp() {
    check("network_mlp", crate::trial::mlp(Activation::Relu), Kind::Features { width: 7, classes: 4 }, 6, 1e-4);
}
