//! A network whose memory is on the executor.

use crate::executed::Gpu;
use switchyard_cuda::kernels::embedding::order;
use switchyard_cuda_reference::Span;
use switchyard_worker::cpu::bf16;
use switchyard_worker::data::Batch;
use switchyard_worker::lowering::{Launch, Memory, Plan, Table};
use switchyard_worker::nn::layers::{Loss, Target};

/// Device inputs of a batch.
fn inputs(batch: &Batch) -> Vec<(Memory, Vec<u8>)> {
    let bytes = |numbers: &[u32]| bytemuck::cast_slice(numbers).to_vec();
    let order = |numbers: &[u32]| {
        let mut rows = vec![0; numbers.len()];
        order(numbers.iter().copied(), numbers.iter().max().map_or(0, |most| most + 1), &mut Vec::new(), &mut rows);
        rows
    };
    let segments: Vec<u32> = batch.segments.iter().map(|&segment| segment.into()).collect();
    let mut pixels = batch.pixels.clone();
    pixels.resize(pixels.len().next_multiple_of(4), 0xee);
    let all = [
        (Memory::Pixels, pixels),
        (Memory::Values, bytemuck::cast_slice(&batch.values).to_vec()),
        (Memory::Entries(Table::Tokens), bytes(&batch.tokens)),
        (Memory::Order(Table::Tokens), bytes(&order(&batch.tokens))),
        (Memory::Entries(Table::Segments), bytes(&segments)),
        (Memory::Order(Table::Segments), bytes(&order(&segments))),
        (Memory::Positions, bytes(&batch.positions)),
        (Memory::Targets(Target::Classes), bytes(&batch.targets)),
        (Memory::Targets(Target::NextSentence), bytes(&batch.next_sentence)),
    ];
    all.into_iter().filter(|(_, bytes)| !bytes.is_empty()).collect()
}

pub fn rounded(weights: &[f32]) -> Vec<bf16> {
    weights.iter().map(|&weight| bf16::from_f32(weight)).collect()
}

pub struct Loaded {
    pub gpu: Gpu,
    losses: Vec<Loss>,
    /// Losses in nats, and correct predictions.
    rows: [Span; 2],
    inputs: Vec<Span>,
}

impl Loaded {
    /// For steps of `micro_batches` micro-batches of this shape.
    pub fn new(plan: &Plan, batch: &Batch, weights: &[f32], is_half: bool, micro_batches: usize, seed: u64) -> Loaded {
        let mut gpu = Gpu::new(seed);
        gpu.allocate(Memory::Arena, plan.arena_bytes());
        let losses = plan.losses();
        let rows: usize = losses.iter().map(|loss| loss.rows).sum();
        let factors: Vec<f32> = losses.iter().map(|loss| 1.0 / (micro_batches * loss.rows) as f32).collect();
        gpu.upload(Memory::Factors, &factors);
        gpu.upload(Memory::Shares, &factors);
        gpu.upload(Memory::Constants, &plan.constants());
        let statistics = plan.initial_statistics();
        gpu.upload(Memory::Statistics, &statistics);
        gpu.allocate(Memory::BatchStatistics, size_of_val(statistics.as_slice()));
        gpu.upload(Memory::Weights, weights);
        if is_half {
            gpu.upload(Memory::Half, &rounded(weights));
        }
        // The gaps between parameters must be zero, because norms sum over them.
        gpu.upload(Memory::Gradients, &vec![0.0f32; weights.len()]);
        Loaded {
            rows: [Memory::Losses, Memory::Correct].map(|memory| gpu.allocate(memory, 4 * rows)),
            losses,
            inputs: inputs(batch).iter().map(|(memory, bytes)| gpu.allocate(*memory, bytes.len())).collect(),
            gpu,
        }
    }

    /// Runs launches on a batch; returns loss and number of correct predictions.
    pub fn run(&mut self, batch: &Batch, launches: &[Launch<Span>]) -> (f64, u64) {
        self.inputs.iter().zip(inputs(batch)).for_each(|(at, (_, bytes))| self.gpu.device.write(*at, &bytes));
        launches.iter().for_each(|launch| self.gpu.run(&launch.work));
        let [nats, right] = self.rows.map(|rows| self.gpu.device.download::<f32>(rows));
        let (mut nats, mut right) = (nats.into_iter().map(f64::from), right.into_iter());
        let (mut loss, mut correct) = (0.0, 0);
        for of in &self.losses {
            loss += nats.by_ref().take(of.rows).sum::<f64>() / of.rows as f64;
            let count = right.by_ref().take(of.rows).filter(|right| *right > 0.0).count() as u64;
            correct += count * u64::from(of.options.count);
        }
        (loss, correct)
    }
}
