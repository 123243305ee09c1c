//! The engine versus PyTorch, with fixtures from `fixtures/generate.py`: the relative difference of
//! each tensor is below 1e-4.

use crate::flat_gradients::FlatGradients;
use crate::trial::{Case, Trial};
use safetensors::SafeTensors;
use std::sync::Arc;
use switchyard_worker::cpu::ops::{self, Targets};
use switchyard_worker::cpu::{Cpu, Format, HalfKernel, Isa, Pool};
use switchyard_worker::nn::{Initial, Layout, Role};
use switchyard_worker::optimizer::{Optimizer, Schedule, gradient_norm, gradient_scale};
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

    fn tokens(&self, name: &str) -> Vec<u32> {
        self.words(name).into_iter().map(|word| u32::try_from(i32::from_le_bytes(word)).unwrap()).collect()
    }
}

/// Checks the largest difference relative to the tensor's largest value.
fn assert_close(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}");
    let size = want.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= 1e-4 * size, "{what} at {i}: {got}, PyTorch has {want} (largest {size})");
    }
}

fn cpus() -> Vec<Cpu> {
    let isas = Isa::ALL.into_iter().filter(|isa| isa.available());
    isas.map(|isa| Cpu { pool: Arc::new(Pool::new(2)), isa, half: HalfKernel::F32 }).collect()
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
        assert_close("y", &y, &f.floats("norm.y"));
        let (mut dx, mut dw, mut db) = (vec![0.0; x.len()], vec![0.0; width], vec![0.0; width]);
        let mut partials = vec![0.0; ops::partials_len(rows, 2 * width)];
        let gradients = (&mut dw[..], &mut db[..]);
        ops::layer_norm_backward(&cpu, &dy, &x, &weight, &saved, &mut dx, false, &mut partials, gradients, false);
        assert_close("dx", &dx, &f.floats("norm.dx"));
        assert_close("gradient of the weight", &dw, &f.floats("norm.d_weight"));
        assert_close("gradient of the bias", &db, &f.floats("norm.d_bias"));
    }
}

#[test]
fn gelu() {
    let f = Fixture::open("kernels");
    let (x, dy) = (f.floats("gelu.x"), f.floats("gelu.dy"));
    for cpu in cpus() {
        let mut y = vec![0.0; x.len()];
        ops::gelu(&cpu, &x, &mut y);
        assert_close("y", &y, &f.floats("gelu.y"));
        let mut dx = dy.clone();
        let mut bias = vec![0.0; 31];
        ops::gelu_backward(&cpu, &x, &mut dx, &mut [0.0; 31], &mut bias, false);
        assert_close("dx", &dx, &f.floats("gelu.dx"));
    }
}

#[test]
fn cross_entropy() {
    let f = Fixture::open("kernels");
    let x = f.floats("entropy.x");
    let classes: Vec<u32> = f.tokens("entropy.targets");
    let (rows, targets) = (classes.len(), Targets::plain(&classes));
    for cpu in cpus() {
        let mut dx = x.clone();
        let (mut saved, mut losses, mut correct) = (vec![0.0; 2 * rows], vec![0.0; rows], vec![0.0; rows]);
        ops::cross_entropy(&cpu, &dx, targets, &mut saved, &mut losses, &mut correct);
        assert_close("losses", &losses, &f.floats("entropy.losses"));
        ops::cross_entropy_backward(&cpu, &mut dx, targets, &saved, 1.0 / rows as f32);
        assert_close("dx", &dx, &f.floats("entropy.dx"));
    }
}

fn optimizer(rule: config::Rule) -> config::Optimizer {
    config::Optimizer {
        rule,
        learning_rate: 0.01,
        weight_decay: 0.1,
        gradient_clip_norm: None,
        decay_exclusions: config::DecayExclusions::Vectors,
    }
}

#[test]
fn optimizers() {
    let f = Fixture::open("optimizers");
    let mut layout = Layout::default();
    for (name, role) in [("matrix", Role::Matrix), ("vector", Role::Vector)] {
        let len = f.floats(&format!("weights.{name}")).len();
        layout.push(name.to_owned(), &[len], role, Initial::Constant(0.0));
    }
    let sgd = |momentum, nesterov| config::Rule::Sgd(config::Momentum { momentum, nesterov });
    let adam = config::Adam { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 };
    let rules = [
        ("sgd", sgd(0.0, false)),
        ("momentum", sgd(0.9, false)),
        ("nesterov", sgd(0.9, true)),
        ("adam", config::Rule::Adam(adam)),
        ("adamw", config::Rule::AdamW(adam)),
    ];
    for cpu in cpus() {
        for (name, rule) in rules {
            let (mut weights, mut gradients) = (vec![0.0; layout.len], vec![0.0; layout.len]);
            for parameter in &layout.parameters {
                weights[parameter.range()].copy_from_slice(&f.floats(&format!("weights.{}", parameter.name)));
            }
            let mut optimizer = Optimizer::new(&layout, &optimizer(rule), cpu.isa);
            for step in 0..20 {
                for parameter in &layout.parameters {
                    let all = f.floats(&format!("gradients.{}", parameter.name));
                    let own = &all[step * parameter.len..(step + 1) * parameter.len];
                    gradients[parameter.range()].copy_from_slice(own);
                }
                optimizer.begin_step(0.01 / (step + 1) as f64, 1.0);
                optimizer.apply(0..layout.len, &mut weights, &gradients, None, &cpu.pool);
            }
            for parameter in &layout.parameters {
                let what = format!("{name}.{}", parameter.name);
                assert_close(&what, &weights[parameter.range()], &f.floats(&what));
            }
        }
    }
}

#[test]
fn schedules() {
    let f = Fixture::open("schedules");
    let kinds = [
        ("constant", config::ScheduleKind::Constant),
        ("cosine", config::ScheduleKind::Cosine),
        ("linear", config::ScheduleKind::Linear),
        ("step", config::ScheduleKind::Step { every: 7, factor: 0.625 }),
    ];
    for (name, kind) in kinds {
        let schedule = config::Schedule { kind, warmup_steps: Some(5), final_learning_rate: 0.025 };
        let want = f.floats(name);
        assert_eq!(want.len(), 36);
        for (step, want) in want.into_iter().enumerate() {
            let got = Schedule::learning_rate(&schedule, 0.25, step as u64, 36);
            assert!((got - f64::from(want)).abs() < 1e-7, "{name}, step {step}: {got}, PyTorch has {want}");
        }
    }
}

fn three_steps(name: &str, tied_head: bool, cpu: Cpu) {
    let f = Fixture::open(name);
    let shape = config::Gpt { layers: 2, hidden_size: 16, heads: 2, context_length: 7, vocabulary_size: 19, tied_head };
    let adam = config::Adam { beta1: 0.9, beta2: 0.95, epsilon: 1e-4 };
    let model = config::Model::Gpt(shape);
    let case = Case { name: "gpt", kind: crate::trial::kind_of(&model), model, samples: 2 };
    let mut gpt = Trial::new(&case, cpu.clone(), Format::F32);
    let layout = gpt.network.layout().clone();
    let mut sink = FlatGradients::new(&layout);
    for parameter in &layout.parameters {
        gpt.weights[parameter.range()].copy_from_slice(&f.floats(&format!("weights.{}", parameter.name)));
    }
    (gpt.batch.tokens, gpt.batch.targets) = (f.tokens("inputs"), f.tokens("targets"));
    let (losses, norms) = (f.floats("losses"), f.floats("norms"));
    let mut optimizer = Optimizer::new(&layout, &optimizer(config::Rule::AdamW(adam)), cpu.isa);
    for step in 0..3 {
        let loss = gpt.forward().loss;
        assert_close("loss", &[loss as f32], &losses[step..=step]);
        gpt.backward(1.0, &mut sink);
        if step == 0 {
            for parameter in &layout.parameters {
                let want = f.floats(&format!("gradients.{}", parameter.name));
                assert_close(&parameter.name, &sink.gradients[parameter.range()], &want);
            }
        }
        let norm = gradient_norm(&sink.gradients);
        assert_close("norm", &[norm as f32], &norms[step..=step]);
        optimizer.begin_step(0.01, gradient_scale(norm, Some(0.5), 1.0));
        optimizer.apply(0..layout.len, &mut gpt.weights, &sink.gradients, None, &cpu.pool);
    }
    for parameter in &layout.parameters {
        let want = f.floats(&format!("trained.{}", parameter.name));
        assert_close(&format!("trained {}", parameter.name), &gpt.weights[parameter.range()], &want);
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
