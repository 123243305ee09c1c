//! After the first step, a training step does not allocate.
#![allow(clippy::unwrap_used)]

mod flat_gradients;
mod trial;

use flat_gradients::FlatGradients;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use switchyard_worker::amp::HalfWeights;
use switchyard_worker::cpu::{Cpu, Format, HalfKernel, Isa, Pool};
use switchyard_worker::optimizer::{Optimizer, gradient_norm};
use switchyard_worker_contract::config;
use trial::{Half, Trial};

struct CountingAllocator;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all calls are forwarded to the system allocator; counting does not allocate.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: upheld by the caller.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: upheld by the caller.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: CountingAllocator = CountingAllocator;

#[test]
fn steps_do_not_allocate() {
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
            // A compute thread allocates when it starts, which may be delayed on a busy machine.
            std::thread::sleep(std::time::Duration::from_millis(100));
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            let mut last = first;
            for _ in 0..5 {
                last = step();
            }
            let after = ALLOCATIONS.load(Ordering::Relaxed);
            assert_eq!(after - before, 0, "allocations in five steps of {} with {threads} threads", case.name);
            assert!(last < first, "{} {format:?}: the loss falls: {first} to {last}", case.name);
        }
    }
}
