//! After the first step, a training step does not allocate, and the end of a run needs no copy of
//! the model.
#![allow(clippy::unwrap_used)]

mod flat_gradients;
mod plain;
mod ranks;
mod trial;

use flat_gradients::FlatGradients;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use switchyard_worker::amp::HalfWeights;
use switchyard_worker::cpu::{Cpu, Format, HalfKernel, Isa, Pool};
use switchyard_worker::optimizer::{Optimizer, gradient_norm};
use switchyard_worker::train::Trainer;
use switchyard_worker_contract::config;
use trial::{Half, Trial};

struct CountingAllocator;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);
/// Allocated bytes, and their maximum.
static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// Held by each test, because the counters cover the whole process.
static ALONE: Mutex<()> = Mutex::new(());

// SAFETY: all calls are forwarded to the system allocator; counting does not allocate.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(live, Ordering::Relaxed);
        // SAFETY: upheld by the caller.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: upheld by the caller.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: CountingAllocator = CountingAllocator;

#[test]
fn steps_do_not_allocate() {
    let _alone = ALONE.lock().unwrap();
    let adam = config::Adam { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 };
    let rules = [
        config::Rule::Sgd(config::Momentum { momentum: 0.9, nesterov: false }),
        config::Rule::AdamW(adam),
        config::Rule::Lamb(adam),
        config::Rule::Lars(config::Lars { momentum: 0.9, trust_coefficient: 0.02 }),
    ];
    let isa = Isa::detect(None).unwrap();
    for (index, case) in trial::cases().iter().enumerate() {
        for (threads, format) in [(1, Format::F32), (2, Format::Bf16), (2, Format::F16)] {
            let pool = Arc::new(Pool::new(threads));
            let cpu = Cpu { pool: Arc::clone(&pool), isa, half: HalfKernel::detect(None).unwrap() };
            let mut trial = Trial::new(case, cpu, format);
            let mut sink = FlatGradients::new(trial.network.layout());
            let optimizer = config::Optimizer {
                rule: rules[index % rules.len()],
                learning_rate: 1e-3,
                weight_decay: 0.1,
                gradient_clip_norm: None,
                decay_exclusions: config::DecayExclusions::Vectors,
            };
            let mut optimizer = Optimizer::new(trial.network.layout(), &optimizer, isa);
            let mut step = || {
                let loss = trial.forward().loss;
                trial.backward(1.0, &mut sink);
                let norm = gradient_norm(&sink.gradients);
                optimizer.begin_step(1e-3, (1.0 / norm) as f32);
                let half = match &mut trial.half {
                    Half::None => None,
                    Half::Bf16(half) => Some(HalfWeights::Bf16(half)),
                    Half::F16(half) => Some(HalfWeights::F16(half)),
                };
                optimizer.apply(0..trial.weights.len(), &mut trial.weights, &sink.gradients, half, &pool);
                loss
            };
            let first = step();
            let mut five_steps = || {
                let before = ALLOCATIONS.load(Ordering::Relaxed);
                let last = (0..5).map(|_| step()).last().unwrap();
                (last, ALLOCATIONS.load(Ordering::Relaxed) - before)
            };
            // A compute thread allocates once, when it starts, which a busy machine may delay.
            let (last, allocations) = (0..=threads)
                .map(|_| five_steps())
                .find(|(_, allocations)| *allocations == 0)
                .unwrap_or_else(&mut five_steps);
            assert_eq!(allocations, 0, "allocations in five steps of {} with {threads} threads", case.name);
            assert!(last < first, "{} {format:?}: the loss falls: {first} to {last}", case.name);
        }
    }
}

#[test]
fn digest_and_export_need_less_memory_than_the_plan_counts() {
    let _alone = ALONE.lock().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let model = config::Model::Mlp(config::Mlp { hidden_sizes: vec![512; 12], activation: config::Activation::Relu });
    let config = config::EngineConfig { model, ..plain::resnet() };
    let blueprint = ranks::blueprint(&config, 1).unwrap();
    let (planned, weights) = (blueprint.memory().process as usize, 4 * blueprint.layout().len);
    ranks::on_ranks(1, |group| {
        let mut trainer = Trainer::join(ranks::blueprint(&config, 1).unwrap(), &group).unwrap();
        let before = LIVE.load(Ordering::Relaxed);
        PEAK.store(before, Ordering::Relaxed);
        trainer.agree_on_weights().unwrap();
        trainer.save(&folder.path().join("model.safetensors")).unwrap();
        let copies = PEAK.load(Ordering::Relaxed) - before;
        assert!(copies < planned.min(weights / 2), "{copies} bytes, of {planned} planned, weights {weights}");
        trainer.leave().unwrap();
    });
}
