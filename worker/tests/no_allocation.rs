//! After the first step, a training step allocates nothing.
#![allow(clippy::unwrap_used)]

mod flat_gradients;

use flat_gradients::FlatGradients;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use switchyard_worker::cpu::{Isa, Pool};
use switchyard_worker::model::{Gpt, Model};
use switchyard_worker::optimizer::{AdamW, gradient_norm};
use switchyard_worker_contract::config;

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all calls go to the system's allocator; counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn steps_allocate_nothing() {
    let config =
        config::Gpt { layers: 2, hidden_size: 96, heads: 3, context_length: 80, vocabulary_size: 256, tied_head: true };
    let adam = config::AdamW {
        learning_rate: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        gradient_clip_norm: None,
    };
    for threads in [1, 2] {
        let pool = Arc::new(Pool::new(threads));
        let mut gpt = Gpt::new(&config, 2, Arc::clone(&pool), Isa::detect(None).unwrap()).unwrap();
        let mut weights = vec![0.0; gpt.layout().len];
        gpt.initialise(1, &mut weights);
        let mut sink = FlatGradients::new(gpt.layout());
        let mut optimizer = AdamW::new(gpt.layout(), adam);
        let tokens: Vec<u16> = (0..161).map(|i| (i * i % 256) as u16).collect();
        let mut step = || {
            let loss = gpt.forward(&weights, &tokens[..160], &tokens[1..]);
            gpt.backward(&weights, 1.0, &mut sink);
            let norm = gradient_norm(&sink.gradients);
            optimizer.step(&mut weights, &sink.gradients, 1e-3, (1.0 / norm) as f32, &pool);
            loss
        };
        let first = step();
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        let mut last = first;
        for _ in 0..5 {
            last = step();
        }
        let after = ALLOCATIONS.load(Ordering::Relaxed);
        assert_eq!(after - before, 0, "allocations in five steps with {threads} threads");
        assert!(last < first, "the loss falls: {first} to {last}");
    }
}
