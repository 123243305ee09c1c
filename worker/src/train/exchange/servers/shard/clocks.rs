//! Asynchronous updates: each push of a rank is applied as soon as it is complete.
//!
//! ```text
//! Push of all this server's buckets by one rank -> update -> clock of the rank + 1
//! the slowest clock is near enough              -> Weights to the rank
//! ```
//!
//! A rank that has pushed c times gets weights once every other rank has pushed c - s times, where
//! s is the staleness that its push allows: stale synchronous parallel (Ho et al. 2013, "More
//! Effective Distributed ML via a Stale Synchronous Parallel Parameter Server"). With 0 all ranks
//! wait for each other and get the same weights: they meet.
//!
//! If a rank requests a meeting, the server announces a step that no rank has begun. Every reply
//! carries it, so all ranks know it before they begin that step.

use super::{Push, Shard};
use crate::comm::{Message, MessageKind};
use crate::optimizer::sum_of_squares;

/// Progress of the ranks.
pub(super) struct Clocks {
    /// The server has the optimizer's state; otherwise ranks push changes of weights.
    has_state: bool,
    /// Complete pushes by rank.
    pushed: Vec<u64>,
    /// Pushes of which the rank has the reply.
    replied: Vec<u64>,
    /// Staleness allowed by the push whose reply is due.
    waiting: Vec<Option<u32>>,
    /// The push after which all ranks meet; 0: none is announced.
    meeting: u64,
}

impl Clocks {
    pub fn new(world: u32, has_state: bool) -> Clocks {
        let zeros = vec![0; world as usize];
        Clocks { has_state, pushed: zeros.clone(), replied: zeros, waiting: vec![None; world as usize], meeting: 0 }
    }

    /// Before the first push.
    pub fn restarted(self) -> Clocks {
        Clocks::new(self.pushed.len() as u32, self.has_state)
    }

    /// Complete pushes of a rank.
    pub fn of(&self, rank: u32) -> u64 {
        self.pushed[rank as usize]
    }

    /// Applies a rank's push if it is complete; returns the weights that are due.
    pub fn advance(&mut self, shard: &mut Shard, rank: u32, push: Push) -> Vec<(u32, Message)> {
        let index = rank as usize;
        if shard.buckets.values().any(|held| held.pushes[index].is_none()) {
            return Vec::new();
        }
        if self.has_state {
            shard.optimizer.begin_step(push.learning_rate, push.scale);
        }
        for held in shard.buckets.values_mut() {
            let Some(message) = held.pushes[index].take() else { continue };
            let values = message.values();
            // The rank notices too, and ends the run.
            if !sum_of_squares(values).is_finite() {
                continue;
            }
            let range = held.range.clone();
            if self.has_state {
                shard.optimizer.apply(range, &mut shard.weights, values, None, &shard.cpu.pool);
            } else {
                shard.weights[range].iter_mut().zip(values).for_each(|(weight, change)| *weight -= change);
            }
        }
        self.pushed[index] += 1;
        self.waiting[index] = Some(push.staleness);
        if push.meet && self.meeting == 0 {
            // The fastest rank may have begun the step after its last reply.
            self.meeting = self.replied.iter().max().unwrap_or(&0) + 2;
        }
        self.release(shard)
    }

    /// Weights for all ranks whose push allows it.
    fn release(&mut self, shard: &Shard) -> Vec<(u32, Message)> {
        let slowest = self.pushed.iter().copied().min().unwrap_or(0);
        if slowest >= self.meeting {
            self.meeting = 0;
        }
        let mut weights: Vec<Message> = Vec::new();
        let mut replies = Vec::new();
        for (rank, waiting) in (0..).zip(&mut self.waiting) {
            let pushed = self.pushed[rank as usize];
            if waiting.is_none_or(|staleness| pushed - slowest > u64::from(staleness)) {
                continue;
            }
            *waiting = None;
            self.replied[rank as usize] = pushed;
            if weights.is_empty() {
                weights.extend(shard.buckets.iter().map(|(bucket, held)| {
                    let message = Message::new(MessageKind::Weights, *bucket, 0, [0, slowest, self.meeting]);
                    message.with(&shard.weights[held.range.clone()])
                }));
            }
            let of_rank = weights.iter().map(|message| (rank, Message { step: pushed, ..message.clone() }));
            replies.extend(of_rank);
        }
        replies
    }
}
