//! Executes all ranks' programs on symbols instead of numbers and checks the result.
//!
//! Every chunk is moved in three units, and a connection holds one unit, so a rank that waits for
//! more buffering than that is a deadlock here. Each unit is the set of ranks whose values have
//! been added up, and the chunk of the original buffer that they come from.

use super::{Action, Collective, Program};
use std::collections::{BTreeMap, VecDeque};

const UNITS: usize = 3;

/// The values of one unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Value {
    /// One bit per rank whose value is in the sum; 0 for memory without a value.
    pub ranks: u64,
    /// Chunk that the values had at the start.
    pub block: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// Both ends of a connection disagree on the number of chunks, or on a chunk's length.
    Mismatch {
        from: usize,
        to: usize,
    },
    /// A step uses a chunk without waiting for an earlier step that it conflicts with.
    Unordered {
        rank: usize,
        step: usize,
        earlier: usize,
    },
    /// No rank can continue; the next steps of each stream.
    Deadlock(Vec<(usize, usize)>),
    /// A value is added twice, or added to another chunk's.
    Doubled {
        rank: usize,
        step: usize,
    },
    /// A step sends memory without a value.
    Empty {
        rank: usize,
        step: usize,
    },
    /// The result is marked complete too early or too late.
    Completion {
        rank: usize,
        step: usize,
    },
    Wrong {
        rank: usize,
        chunk: usize,
        got: Value,
    },
}

/// Figures of a correct plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// Longest chain of messages.
    pub steps: usize,
    /// Chunks sent or received by the busiest rank, divided by the chunks of the buffer.
    pub bytes: f64,
}

fn bit(rank: usize) -> u64 {
    1 << rank
}

/// Content of a chunk at the start.
fn initial(collective: Collective, rank: usize, chunk: usize) -> Value {
    let holds = match collective {
        Collective::AllReduce | Collective::ReduceScatter | Collective::AllToAll => true,
        Collective::AllGather => chunk == rank,
        Collective::Broadcast { root } => rank == root,
    };
    Value { ranks: if holds { bit(rank) } else { 0 }, block: chunk }
}

/// Required content of a chunk at the end; `None` if it does not matter.
fn required(collective: Collective, n: usize, rank: usize, chunk: usize) -> Option<Value> {
    let all = u64::MAX >> (64 - n);
    match collective {
        Collective::AllReduce => Some(Value { ranks: all, block: chunk }),
        Collective::ReduceScatter => (chunk == rank).then_some(Value { ranks: all, block: chunk }),
        Collective::AllGather => Some(Value { ranks: bit(chunk), block: chunk }),
        Collective::Broadcast { root } => Some(Value { ranks: bit(root), block: chunk }),
        Collective::AllToAll => Some(Value { ranks: bit(chunk), block: rank }),
    }
}

/// Every pair of steps on one chunk, of which at least one receives, must be ordered by
/// [`Program::after`], directly or through the steps between them.
fn check_order(rank: usize, program: &Program) -> Result<(), Fault> {
    for (number, step) in program.steps.iter().enumerate() {
        let before = || (0..number).rev().filter(|earlier| program.steps[*earlier].chunk == step.chunk);
        let written = before().find(|earlier| program.steps[*earlier].action != Action::Send);
        let sends = before().take_while(|earlier| Some(*earlier) != written);
        let conflicts = sends.filter(|_| step.action != Action::Send).chain(written);
        for earlier in conflicts {
            if !program.after(number).contains(&earlier) {
                return Err(Fault::Unordered { rank, step: number, earlier });
            }
        }
    }
    Ok(())
}

/// One direction of a connection.
#[derive(Default)]
struct Stream {
    sends: Vec<usize>,
    receives: Vec<usize>,
    /// Units put into the connection, and taken out of it.
    sent: usize,
    received: usize,
    /// What it holds: a value, and the length of its message chain.
    wire: VecDeque<(Value, usize)>,
}

/// Checks the programs of all ranks.
pub fn verify(programs: &[Program], collective: Collective) -> Result<Measured, Fault> {
    let n = programs.len();
    let mut streams: BTreeMap<(usize, usize), Stream> = BTreeMap::new();
    for (rank, program) in programs.iter().enumerate() {
        check_order(rank, program)?;
        for (number, step) in program.steps.iter().enumerate() {
            if step.action == Action::Send {
                streams.entry((rank, step.peer)).or_default().sends.push(number);
            } else {
                streams.entry((step.peer, rank)).or_default().receives.push(number);
            }
        }
    }
    for (&(from, to), stream) in &streams {
        let chunk = |rank: usize, step: &usize| programs[rank].steps[*step].chunk;
        // Chunks of different numbers have different lengths, except in an all-to-all.
        let equal = collective == Collective::AllToAll
            || stream.sends.iter().map(|s| chunk(from, s)).eq(stream.receives.iter().map(|s| chunk(to, s)));
        if !equal || stream.sends.len() != stream.receives.len() {
            return Err(Fault::Mismatch { from, to });
        }
    }
    // Values and chain lengths by rank, chunk and unit.
    let start = |rank: usize, program: &Program| -> Vec<[(Value, usize); UNITS]> {
        (0..program.chunks).map(|chunk| [(initial(collective, rank, chunk), 0); UNITS]).collect()
    };
    let mut memory: Vec<_> = programs.iter().enumerate().map(|(rank, program)| start(rank, program)).collect();
    let mut done: Vec<Vec<usize>> = programs.iter().map(|program| vec![0; program.steps.len()]).collect();
    let mut longest = 0;
    loop {
        let (mut moved, mut waiting) = (false, Vec::new());
        for (&(from, to), stream) in &mut streams {
            if stream.sent < stream.sends.len() * UNITS {
                let (step, unit) = (stream.sends[stream.sent / UNITS], stream.sent % UNITS);
                let ready = programs[from].after(step).iter().all(|before| done[from][*before] > unit);
                if ready && stream.wire.is_empty() {
                    let (value, chain) = memory[from][programs[from].steps[step].chunk][unit];
                    if value.ranks == 0 {
                        return Err(Fault::Empty { rank: from, step });
                    }
                    stream.wire.push_back((value, chain + 1));
                    (stream.sent, done[from][step], moved) = (stream.sent + 1, unit + 1, true);
                } else {
                    waiting.push((from, step));
                }
            }
            if stream.received < stream.receives.len() * UNITS {
                let (step, unit) = (stream.receives[stream.received / UNITS], stream.received % UNITS);
                let ready = programs[to].after(step).iter().all(|before| done[to][*before] > unit);
                let Some((value, chain)) = stream.wire.pop_front_if(|_| ready) else {
                    waiting.push((to, step));
                    continue;
                };
                let action = programs[to].steps[step].action;
                let (mine, own_chain) = &mut memory[to][programs[to].steps[step].chunk][unit];
                if action == Action::Copy {
                    *mine = value;
                } else {
                    if mine.ranks & value.ranks != 0 || mine.block != value.block || mine.ranks == 0 {
                        return Err(Fault::Doubled { rank: to, step });
                    }
                    mine.ranks |= value.ranks;
                    if (mine.ranks == u64::MAX >> (64 - n)) != (action == Action::ReduceLast) {
                        return Err(Fault::Completion { rank: to, step });
                    }
                }
                *own_chain = chain.max(*own_chain);
                longest = longest.max(*own_chain);
                (stream.received, done[to][step], moved) = (stream.received + 1, unit + 1, true);
            }
        }
        if waiting.is_empty() && !moved {
            break;
        }
        if !moved {
            return Err(Fault::Deadlock(waiting));
        }
    }
    for (rank, chunks) in memory.iter().enumerate() {
        for (chunk, units) in chunks.iter().enumerate() {
            if let Some(required) = required(collective, n, rank, chunk)
                && let Some((got, _)) = units.iter().find(|(value, _)| *value != required)
            {
                return Err(Fault::Wrong { rank, chunk, got: *got });
            }
        }
    }
    let busiest = programs.iter().map(|program| {
        let sent = program.steps.iter().filter(|step| step.action == Action::Send).count();
        sent.max(program.steps.len() - sent) as f64 / program.chunks as f64
    });
    Ok(Measured { steps: longest, bytes: busiest.fold(0.0, f64::max) })
}
