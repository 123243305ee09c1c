//! After the first steps, a GPU training step does not allocate host memory.
#![allow(clippy::unwrap_used)]

mod plain;
mod ranks;

use ranks::{blueprint, free_port, group};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;
use std::path::Path;
use std::process::Command;
use switchyard_worker::train::{StepRequest, Trainer};
use switchyard_worker_contract::config::*;
use switchyard_worker_contract::env;

struct CountingAllocator;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: all calls are forwarded to the system allocator; counting does not allocate.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
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

/// Set in the child process, which uses the emulated libraries.
const CHILD: &str = "CHILD_TRAINS";
const NAME: &str = "a_step_on_a_gpu_allocates_nothing_once_its_graphs_are_captured";
const STEPS: u64 = 12;

/// Number of allocations by `work` on this thread.
fn counted(work: impl FnOnce()) -> usize {
    let before = ALLOCATIONS.get();
    work();
    ALLOCATIONS.get() - before
}

/// Number of allocations in the last steps of a training run.
fn allocations(graphs: bool, merge: u32) -> usize {
    let plain = plain::gpt(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/comm"), &["**/*.rs"]);
    let config = EngineConfig {
        device: Device::Cuda,
        model: Model::Gpt(Gpt {
            layers: 1,
            hidden_size: 16,
            heads: 2,
            context_length: 8,
            vocabulary_size: 256,
            tied_head: true,
        }),
        batch_size_per_process: 2,
        batch_merge: merge,
        length: Length::Steps(2 * STEPS),
        evaluation: Evaluation { every_steps: 0, batches: Some(1) },
        cpu_threads: 1,
        gpu: Gpu { graphs, ..Gpu::default() },
        ..plain
    };
    let mut trainer = Trainer::join(blueprint(&config, 1).unwrap(), &group(1, 0, free_port())).unwrap();
    let step = |trainer: &mut Trainer| assert!(trainer.step(StepRequest::default()).is_ok());
    (0..STEPS / 2).for_each(|_| step(&mut trainer));
    let allocations = counted(|| (0..STEPS / 2).for_each(|_| step(&mut trainer)));
    trainer.leave().unwrap();
    allocations
}

#[test]
fn a_step_on_a_gpu_allocates_nothing_once_its_graphs_are_captured() {
    if std::env::var_os(CHILD).is_some() {
        assert_eq!(counted(|| drop(black_box(Box::new(1)))), 1, "allocations are counted");
        for (graphs, merge) in [(true, 1), (true, 2), (false, 2)] {
            assert_eq!(allocations(graphs, merge), 0, "graphs: {graphs}, micro-batches: {merge}");
        }
        return;
    }
    let libraries = switchyard_cuda_libraries::environment();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([NAME, "--exact", "--nocapture"]).env(CHILD, "").envs(libraries).env(env::GPU_CACHE, "none");
    let output = command.env_remove("CUDA_VISIBLE_DEVICES").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&[output.stdout, output.stderr].concat()));
}
