//! What a parameter server holds: weights and optimizer state of its buckets. A state machine
//! without I/O.
//!
//! ```text
//! Push of all ranks  -> sum in rank order ─┬─ direct -> update ─────────────> Weights to all
//!                                          └─ Sums to all -> Apply -> update -> Weights to all
//!                                                         └> Skip
//! ```
//!
//! A push is direct if nothing depends on all buckets. With clipping and mixed precision, ranks
//! need the norm of all gradients first; rank 0 then sends `Apply` or `Skip`.
//!
//! Asynchronous servers do not wait for all ranks: see `clocks`.
//!
//! Every push carries its step. A bucket accepts one push of each rank for the step after its last
//! one, so that gradients cannot be applied twice or to other weights than those they belong to.

mod clocks;

use clocks::Clocks;

use crate::comm::{Handler, Message, MessageKind};
use crate::cpu::{AlignedBuffer, Cpu};
use crate::nn::{Bucket, Layout};
use crate::optimizer::{Optimizer, Ownership, sum_of_squares};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;
use switchyard_worker_contract::config::{self, Updates};

/// Words of an f64 in a message.
const WORDS: usize = 2;

/// Writes sums of squares into words; [`read_squares`] reads them.
fn write_squares(squares: &[f64], words: &mut Vec<u32>) {
    words.extend(squares.iter().flat_map(|value| [value.to_bits() as u32, (value.to_bits() >> 32) as u32]));
}

/// Adds the sums of squares in `Sums` or `Weights`; returns the weights that follow them.
pub(super) fn read_squares<'a>(message: &'a Message, squares: &mut [f64]) -> &'a [f32] {
    let count = usize::try_from(message.numbers[0]).unwrap_or(0).min(message.words.len() / WORDS);
    let (sums, weights) = message.words.split_at(WORDS * count);
    for (square, [low, high]) in squares.iter_mut().zip(sums.as_chunks().0) {
        *square += f64::from_bits(u64::from(*low) | u64::from(*high) << 32);
    }
    bytemuck::cast_slice(weights)
}

/// Gradients of a bucket, or the change of its weights, and what is to be done with them.
#[derive(Debug, Clone, Copy)]
pub(in crate::train) struct Push {
    pub learning_rate: f64,
    /// Factor of the gradients.
    pub scale: f32,
    /// Update as soon as the gradients of all ranks are there.
    pub direct: bool,
    /// Asynchronous: steps by which the weights in the reply can lack another rank's pushes.
    pub staleness: u32,
    /// Asynchronous: the rank requests that all ranks meet.
    pub meet: bool,
}

impl Push {
    pub fn numbers(self) -> [u64; 3] {
        let flags = u64::from(self.direct) | u64::from(self.meet) << 1 | u64::from(self.staleness) << 32;
        [self.learning_rate.to_bits(), self.scale.to_bits().into(), flags]
    }

    fn of(message: &Message) -> Push {
        let [learning_rate, scale, flags] = message.numbers;
        Push {
            learning_rate: f64::from_bits(learning_rate),
            scale: f32::from_bits(scale as u32),
            direct: flags & 1 != 0,
            staleness: (flags >> 32) as u32,
            meet: flags & 2 != 0,
        }
    }
}

struct Held {
    range: Range<usize>,
    /// Parts whose norms the ranks add, within the bucket.
    parts: Vec<Range<usize>>,
    /// Gradients of the ranks for the step after `step`, or after that of the rank's clock.
    pushes: Vec<Option<Message>>,
    /// Their sum for `step`, until it is applied or skipped.
    sum: Option<Vec<f32>>,
    step: u64,
}

/// Weights and optimizer state of a server's buckets.
pub(super) struct Shard {
    world: u32,
    buckets: BTreeMap<u32, Held>,
    /// Whole layout; only the server's buckets are ever touched.
    weights: AlignedBuffer,
    optimizer: Optimizer,
    cpu: Cpu,
    /// Asynchronous servers.
    clocks: Option<Clocks>,
    /// Last step for which the optimizer has begun.
    step: u64,
    started: bool,
}

/// Buckets of a server with the parts of each rank, and the cuts of the whole layout.
#[derive(Serialize, Deserialize)]
pub(super) struct ShardPlan {
    pub world: u32,
    pub updates: Updates,
    pub buckets: Vec<(u32, Bucket, Vec<Range<usize>>)>,
    pub cuts: Vec<usize>,
}

impl Shard {
    /// Zeros, until [`MessageKind::Start`].
    pub fn new(plan: ShardPlan, layout: &Layout, optimizer: &config::Optimizer, cpu: Cpu) -> Shard {
        let ShardPlan { world, updates, buckets, cuts } = plan;
        let mut own: Vec<Range<usize>> = buckets.iter().map(|(_, bucket, _)| bucket.range.clone()).collect();
        own.sort_by_key(|range| range.start);
        let has_state = !matches!(updates, Updates::Geo { .. });
        own.retain(|_| has_state);
        let optimizer = Optimizer::sharded(layout, optimizer, cpu.isa, &Ownership { cuts, own });
        let held = |(number, bucket, parts): (u32, Bucket, Vec<Range<usize>>)| {
            let pushes = (0..world).map(|_| None).collect();
            (number, Held { range: bucket.range, parts, pushes, sum: None, step: 0 })
        };
        Shard {
            world,
            buckets: buckets.into_iter().map(held).collect(),
            weights: AlignedBuffer::zeroed(layout.len),
            optimizer,
            cpu,
            clocks: (updates != Updates::Synchronous).then(|| Clocks::new(world, has_state)),
            step: 0,
            started: false,
        }
    }

    /// The bucket and the range of the layout in `Put` and `Get`.
    fn place(&self, message: &Message, len: u64) -> Result<Range<usize>, String> {
        let held = self.buckets.get(&message.bucket).ok_or_else(|| self.unknown(message))?;
        let start = message.numbers[1] as usize;
        let end = start.saturating_add(usize::try_from(len).unwrap_or(usize::MAX));
        if held.range.start > start || held.range.end < end {
            return Err(format!("{:?} of {start}..{end} in bucket {}", message.kind, message.bucket));
        }
        Ok(start..end)
    }

    fn unknown(&self, message: &Message) -> String {
        let own: Vec<u32> = self.buckets.keys().copied().collect();
        format!("{:?} for bucket {}; this server has {own:?}", message.kind, message.bucket)
    }

    /// The number of an array; `None` for the weights, which follow the optimizer's.
    fn array(&self, message: &Message) -> Result<Option<usize>, String> {
        let (array, arrays) = (message.numbers[0] as usize, self.optimizer.state().count());
        match array {
            _ if array < arrays => Ok(Some(array)),
            _ if array == arrays => Ok(None),
            _ => Err(format!("{:?} of array {array}; there are {arrays} and the weights", message.kind)),
        }
    }

    fn put(&mut self, message: &Message) -> Result<(), String> {
        let range = self.place(message, message.words.len() as u64)?;
        match self.array(message)? {
            Some(array) => self.optimizer.write(array, range.start, message.values()),
            None => self.weights[range].copy_from_slice(message.values()),
        }
        Ok(())
    }

    fn get(&self, message: &Message) -> Result<Message, String> {
        let range = self.place(message, message.numbers[2])?;
        let mut values = vec![0.0; range.len()];
        match self.array(message)? {
            Some(array) => self.optimizer.read(array, range.start, &mut values),
            None => values.copy_from_slice(&self.weights[range]),
        }
        Ok(Message::new(MessageKind::Values, message.bucket, message.step, message.numbers).with(&values))
    }

    /// Steps are counted from here on. `numbers`: optimizer steps so far.
    fn start(&mut self, message: &Message) -> Message {
        self.optimizer.restore(message.numbers[0]);
        (self.step, self.started) = (0, true);
        self.buckets.values_mut().for_each(|held| held.step = 0);
        self.clocks = self.clocks.take().map(Clocks::restarted);
        Message::new(MessageKind::Started, 0, 0, [0; 3])
    }

    fn push(&mut self, rank: u32, message: Message) -> Result<Vec<(u32, Message)>, String> {
        let (number, step, push) = (message.bucket, message.step, Push::of(&message));
        let (world, started) = (self.world, self.started);
        let Some(held) = self.buckets.get_mut(&number) else { return Err(self.unknown(&message)) };
        if !started {
            return Err(format!("gradients of step {step} before the weights"));
        }
        let due = self.clocks.as_ref().map_or(held.step, |clocks| clocks.of(rank)) + 1;
        if step != due || held.pushes[rank as usize].is_some() {
            let again = if held.pushes[rank as usize].is_some() { "a second time" } else { "out of order" };
            return Err(format!("gradients of step {step} for bucket {number} {again}: step {due} is due"));
        }
        if message.words.len() != held.range.len() {
            let (got, expected) = (message.words.len(), held.range.len());
            return Err(format!("{got} gradients for bucket {number}, which has {expected}"));
        }
        held.pushes[rank as usize] = Some(message);
        if let Some(mut clocks) = self.clocks.take() {
            let replies = clocks.advance(self, rank, push);
            self.clocks = Some(clocks);
            return Ok(replies);
        }
        if held.pushes.iter().any(Option::is_none) {
            return Ok(Vec::new());
        }
        if held.sum.is_some() {
            return Err(format!("step {step} of bucket {number} before step {} was applied", held.step));
        }
        let mut pushes = held.pushes.iter_mut().filter_map(Option::take);
        let mut sum = pushes.next().map(|first| first.values().to_vec()).unwrap_or_default();
        for push in pushes {
            sum.iter_mut().zip(push.values()).for_each(|(sum, own)| *sum += own);
        }
        held.step = step;
        let squares: Vec<f64> = held.parts.iter().map(|part| sum_of_squares(&sum[part.clone()])).collect();
        let is_finite = squares.iter().all(|square| square.is_finite());
        held.sum = Some(sum);
        let mut words = Vec::new();
        write_squares(&squares, &mut words);
        let kind = if push.direct { MessageKind::Weights } else { MessageKind::Sums };
        if push.direct {
            if self.step < step {
                self.step = step;
                self.optimizer.begin_step(push.learning_rate, push.scale);
            }
            let weights = self.update(number, is_finite);
            words.extend_from_slice(bytemuck::cast_slice(weights));
        }
        let reply = Message::new(kind, number, step, [squares.len() as u64, 0, 0]);
        let reply = Message { words: words.into(), ..reply };
        Ok((0..world).map(|rank| (rank, reply.clone())).collect())
    }

    /// Updates a bucket with its sum, or drops the sum; returns the weights.
    fn update(&mut self, bucket: u32, apply: bool) -> &[f32] {
        let Some(held) = self.buckets.get_mut(&bucket) else { return &[] };
        let sum = held.sum.take().filter(|_| apply);
        if let Some(sum) = sum {
            self.optimizer.apply(held.range.clone(), &mut self.weights, &sum, None, &self.cpu.pool);
        }
        &self.weights[held.range.clone()]
    }

    fn decide(&mut self, rank: u32, message: &Message) -> Result<Vec<(u32, Message)>, String> {
        let ready = self.buckets.values().all(|held| held.sum.is_some() && held.step == message.step);
        if rank != 0 || !ready || self.step >= message.step {
            return Err(format!(
                "{:?} of step {} before the gradients are there, or again",
                message.kind, message.step
            ));
        }
        self.step = message.step;
        let numbers: Vec<u32> = self.buckets.keys().copied().collect();
        if message.kind == MessageKind::Skip {
            for bucket in numbers {
                self.update(bucket, false);
            }
            return Ok(Vec::new());
        }
        let push = Push::of(message);
        self.optimizer.begin_step(push.learning_rate, push.scale);
        let mut replies = Vec::new();
        for bucket in numbers {
            let reply = Message::new(MessageKind::Weights, bucket, message.step, [0; 3]);
            let reply = reply.with(self.update(bucket, true));
            replies.extend((0..self.world).map(|rank| (rank, reply.clone())));
        }
        Ok(replies)
    }
}

impl Handler for Shard {
    fn most_words(&self) -> u64 {
        (self.weights.len() + 2 * WORDS * self.world as usize) as u64
    }

    fn handle(&mut self, rank: u32, message: Message) -> Result<Vec<(u32, Message)>, String> {
        match message.kind {
            MessageKind::Put => self.put(&message).map(|()| Vec::new()),
            MessageKind::Get => Ok(vec![(rank, self.get(&message)?)]),
            MessageKind::Start => Ok(vec![(rank, self.start(&message))]),
            MessageKind::Push => self.push(rank, message),
            MessageKind::Apply | MessageKind::Skip => self.decide(rank, &message),
            MessageKind::Plan => Err("Plan, which is for dedicated servers".to_owned()),
            MessageKind::Values | MessageKind::Started | MessageKind::Sums | MessageKind::Weights => {
                Err(format!("{:?}, which only a server sends", message.kind))
            }
        }
    }
}
