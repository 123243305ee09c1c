//! Our side: a single-rank training step.

#[path = "../../tests/flat_gradients/mod.rs"]
mod flat_gradients;

use super::Outcome;
use super::case::{BATCHES, Case};
use super::machine::Kernels;
use flat_gradients::FlatGradients;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;
use switchyard_worker::amp::HalfWeights;
use switchyard_worker::cpu::{Cpu, Format, Pool, Values, bf16};
use switchyard_worker::data::Batch;
use switchyard_worker::model::{Registry, initialise};
use switchyard_worker::nn::{Graph, Layout, Network, Weights};
use switchyard_worker::optimizer::Optimizer;

pub struct Ours {
    cpu: Cpu,
    network: Network,
    /// Weights, and their 16-bit copy if the network computes in 16-bit precision.
    pub weights: Vec<f32>,
    half: Option<Vec<bf16>>,
    statistics: Vec<f32>,
    sink: FlatGradients,
    optimizer: Optimizer,
    learning_rate: f64,
    state_bytes: usize,
    batches: Vec<Batch>,
}

/// CPU milliseconds of all threads of this process.
fn cpu_time() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    1e3 * time.tv_sec as f64 + 1e-6 * time.tv_nsec as f64
}

/// Memory of training, in bytes.
#[derive(Clone, Copy)]
pub struct Memory {
    /// Activations, their gradients, scratch memory, packing buffers.
    pub activations: usize,
    /// Weights with their copies, gradients, optimizer state.
    pub weights: usize,
    /// The total if everything were f32.
    pub in_f32: usize,
}

impl Memory {
    pub fn total(&self) -> usize {
        self.activations + self.weights
    }
}

impl Ours {
    pub fn new(case: &Case, format: Format, threads: usize, kernels: Kernels) -> Outcome<Ours> {
        Ours::over(Graph::new(case.samples, case.kind, format), case, threads, kernels)
    }

    pub fn recomputing(case: &Case, format: Format, threads: usize, kernels: Kernels) -> Outcome<Ours> {
        Ours::over(Graph::new(case.samples, case.kind, format).with_recomputation(), case, threads, kernels)
    }

    fn over(mut graph: Graph, case: &Case, threads: usize, kernels: Kernels) -> Outcome<Ours> {
        let format = graph.format();
        let cpu = Cpu { pool: Arc::new(Pool::new(threads)), isa: kernels.isa, half: kernels.half };
        Registry::new().model(&case.model)?.build(&mut graph)?;
        let network = Network::new(graph, cpu.clone())?;
        let layout = network.layout();
        let mut weights = vec![0.0; layout.len];
        initialise(layout, 1, &mut weights);
        let mut half = (format == Format::Bf16).then(|| vec![bf16::ZERO; layout.len]);
        if let Some(half) = &mut half {
            HalfWeights::Bf16(half).copy_from(0..layout.len, &weights, cpu.isa, &cpu.pool);
        }
        Ok(Ours {
            sink: FlatGradients::new(layout),
            optimizer: Optimizer::new(layout, &case.optimizer, cpu.isa),
            state_bytes: Optimizer::memory_bytes(layout.len, &case.optimizer.rule),
            learning_rate: case.optimizer.learning_rate,
            statistics: network.initial_statistics(),
            batches: (0..BATCHES).map(|index| case.batch(index)).collect(),
            cpu,
            network,
            weights,
            half,
        })
    }

    pub fn layout(&self) -> &Layout {
        self.network.layout()
    }

    pub fn trainable(&self) -> usize {
        self.layout().trainable()
    }

    fn step(&mut self, batch: usize) -> f64 {
        let half = self.half.as_deref().map(Values::Bf16);
        let weights = Weights { master: &self.weights, half, statistics: &self.statistics };
        let outcome = self.network.forward(weights, &self.batches[batch]);
        self.network.backward(weights, &self.batches[batch], 1.0, &mut self.sink);
        self.optimizer.begin_step(self.learning_rate, 1.0);
        let (gradients, half) = (&self.sink.gradients, self.half.as_deref_mut().map(HalfWeights::Bf16));
        self.optimizer.apply(0..gradients.len(), &mut self.weights, gradients, half, &self.cpu.pool);
        outcome.loss
    }

    /// Losses of steps that cycle through the batches.
    pub fn losses(&mut self, count: usize) -> Vec<f64> {
        (0..count).map(|i| self.step(i % BATCHES)).collect()
    }

    /// Wall-clock and CPU milliseconds of steps on the first batch.
    pub fn steps(&mut self, count: usize) -> Vec<[f64; 2]> {
        let time = |_| {
            let (start, cpu) = (Instant::now(), cpu_time());
            self.step(0);
            [1e3 * start.elapsed().as_secs_f64(), cpu_time() - cpu]
        };
        (0..count).map(time).collect()
    }

    pub fn memory(&self) -> Memory {
        let parameters = self.weights.len();
        let wide = 8 * parameters + self.state_bytes;
        Memory {
            activations: self.network.memory_bytes(),
            weights: wide + if self.half.is_some() { 2 * parameters } else { 0 },
            in_f32: self.network.memory_bytes_f32() + wide,
        }
    }

    /// Prints forward and backward milliseconds per kind of layer, of the fastest of several steps.
    pub fn print_profile(&mut self, steps: usize) {
        self.network.record(true);
        let mut least = BTreeMap::<(usize, bool), f64>::new();
        let mut whole = f64::INFINITY;
        for _ in 0..steps {
            whole = whole.min(self.steps(1)[0][0]);
            for operation in self.network.operations() {
                let time = 1e3 * (operation.end - operation.start).as_secs_f64();
                let kept = least.entry((operation.node as usize, operation.backward)).or_insert(time);
                *kept = kept.min(time);
            }
        }
        self.network.record(false);
        let mut kinds = BTreeMap::<(String, bool), (usize, f64)>::new();
        for (&(node, backward), &time) in &least {
            let (name, kind) = self.network.name(node);
            println!("    {name:40} {kind:12} {} {time:8.3} ms", if backward { "backward" } else { "forward " });
            let sum = kinds.entry((kind.to_owned(), backward)).or_default();
            *sum = (sum.0 + 1, sum.1 + time);
        }
        for ((kind, backward), (count, time)) in &kinds {
            let pass = if *backward { "backward" } else { "forward " };
            println!("  {kind:12} {pass} x {count:2} {time:8.2} ms");
        }
        let layers: f64 = least.values().sum();
        println!("  layers {layers:.2} ms, whole step {whole:.2} ms (the rest is mostly the optimizer)");
    }
}
