//! The engine against PyTorch: fixtures written by `fixtures/generate.py`, relative difference of each tensor below 1e-4.
#![allow(clippy::unwrap_used)]

mod flat_gradients;

use flat_gradients::FlatGradients;
use safetensors::SafeTensors;
use std::sync::Arc;
use switchyard_worker::cpu::{Cpu, Isa, Pool, ops};
use switchyard_worker::model::{Gpt, Model};
use switchyard_worker::optimizer::{AdamW, gradient_norm};
use switchyard_worker_contract::config;

struct Fixture {
    bytes: Vec<u8>,
}

impl Fixture {
    fn open(name: &str) -> Fixture {
        let path = format!("{}/tests/fixtures/{name}.safetensors", env!("CARGO_MANIFEST_DIR"));
        Fixture { bytes: std::fs::read(path).unwrap() }
    }

    fn words(&self, name: &str) -> Vec<[u8; 4]> {
        let tensors = SafeTensors::deserialize(&self.bytes).unwrap();
        let tensor = tensors.tensor(name).unwrap();
        tensor.data().as_chunks::<4>().0.to_vec()
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        self.words(name).into_iter().map(f32::from_le_bytes).collect()
    }

    fn tokens(&self, name: &str) -> Vec<u16> {
        self.words(name).into_iter().map(|word| u16::try_from(i32::from_le_bytes(word)).unwrap()).collect()
    }
}

/// Largest difference relative to the largest value of the tensor.
fn same(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}");
    let size = want.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= 1e-4 * size, "{what} at {i}: {got}, PyTorch has {want} (largest {size})");
    }
}

fn cpus() -> Vec<Cpu> {
    let isas = Isa::ALL.into_iter().filter(|isa| isa.available());
    isas.map(|isa| Cpu { pool: Arc::new(Pool::new(2)), isa }).collect()
}

#[test]
fn layer_norm() {
    let f = Fixture::open("kernels");
    let [x, weight, bias, dy] = ["x", "weight", "bias", "dy"].map(|name| f.floats(&format!("norm.{name}")));
    let width = weight.len();
    let rows = x.len() / width;
    for cpu in cpus() {
        let (mut y, mut saved) = (vec![0.0; x.len()], vec![0.0; 2 * rows]);
        ops::layer_norm(&cpu, &x, &weight, &bias, &mut y, &mut saved);
        same("y", &y, &f.floats("norm.y"));
        let (mut dx, mut dw, mut db) = (vec![0.0; x.len()], vec![0.0; width], vec![0.0; width]);
        let mut partials = vec![0.0; ops::partials_len(rows, 2 * width)];
        let gradients = (&mut dw[..], &mut db[..]);
        let mut used = dy.clone();
        ops::layer_norm_backward(&cpu, &mut used, &x, &weight, &saved, &mut dx, false, &mut partials, gradients, false);
        same("dx", &dx, &f.floats("norm.dx"));
        same("gradient of the weight", &dw, &f.floats("norm.d_weight"));
        same("gradient of the bias", &db, &f.floats("norm.d_bias"));
    }
}

#[test]
fn gelu() {
    let f = Fixture::open("kernels");
    let (x, dy) = (f.floats("gelu.x"), f.floats("gelu.dy"));
    for cpu in cpus() {
        let mut y = vec![0.0; x.len()];
        ops::gelu(&cpu, &x, &mut y);
        same("y", &y, &f.floats("gelu.y"));
        let mut dx = dy.clone();
        let mut bias = vec![0.0; 31];
        ops::gelu_backward(&cpu, &x, &mut dx, &mut [0.0; 31], &mut bias, false);
        same("dx", &dx, &f.floats("gelu.dx"));
    }
}

#[test]
fn cross_entropy() {
    let f = Fixture::open("kernels");
    let (x, targets) = (f.floats("entropy.x"), f.tokens("entropy.targets"));
    for cpu in cpus() {
        let mut dx = x.clone();
        let (mut inverses, mut losses) = (vec![0.0; targets.len()], vec![0.0; targets.len()]);
        ops::cross_entropy(&cpu, &mut dx, &targets, &mut inverses, &mut losses);
        same("losses", &losses, &f.floats("entropy.losses"));
        ops::cross_entropy_backward(&cpu, &mut dx, &targets, &inverses, 1.0 / targets.len() as f32);
        same("dx", &dx, &f.floats("entropy.dx"));
    }
}

fn three_steps(name: &str, tied_head: bool, cpu: Cpu) {
    let f = Fixture::open(name);
    let shape = config::Gpt { layers: 2, hidden_size: 16, heads: 2, context_length: 7, vocabulary_size: 19, tied_head };
    let adam = config::AdamW {
        learning_rate: 0.01,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-4,
        weight_decay: 0.1,
        gradient_clip_norm: Some(0.5),
    };
    let mut gpt = Gpt::new(&shape, 2, Arc::clone(&cpu.pool), cpu.isa).unwrap();
    let layout = gpt.layout().clone();
    let mut weights = vec![0.0; layout.len];
    let mut sink = FlatGradients::new(&layout);
    for parameter in &layout.parameters {
        weights[parameter.range()].copy_from_slice(&f.floats(&format!("weights.{}", parameter.name)));
    }
    let (inputs, targets) = (f.tokens("inputs"), f.tokens("targets"));
    let (losses, norms) = (f.floats("losses"), f.floats("norms"));
    let mut optimizer = AdamW::new(&layout, adam);
    for step in 0..3 {
        let loss = gpt.forward(&weights, &inputs, &targets);
        same("loss", &[loss as f32], &losses[step..=step]);
        gpt.backward(&weights, 1.0, &mut sink);
        if step == 0 {
            for parameter in &layout.parameters {
                let want = f.floats(&format!("gradients.{}", parameter.name));
                same(&parameter.name, &sink.gradients[parameter.range()], &want);
            }
        }
        let norm = gradient_norm(&sink.gradients);
        same("norm", &[norm as f32], &norms[step..=step]);
        // As torch.nn.utils.clip_grad_norm_ has it.
        let scale = (0.5 / (norm + 1e-6)).min(1.0) as f32;
        optimizer.step(&mut weights, &sink.gradients, 0.01, scale, &cpu.pool);
    }
    for parameter in &layout.parameters {
        let want = f.floats(&format!("trained.{}", parameter.name));
        same(&format!("trained {}", parameter.name), &weights[parameter.range()], &want);
    }
}

#[test]
fn gpt_with_tied_head() {
    cpus().into_iter().for_each(|cpu| three_steps("gpt_tied", true, cpu));
}

#[test]
fn gpt_with_its_own_head() {
    cpus().into_iter().for_each(|cpu| three_steps("gpt_untied", false, cpu));
}
