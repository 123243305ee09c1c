//! Around a ring: bandwidth-optimal, with a latency that grows with the number of ranks.
//!
//! In step `t` of the all-reduce, rank `p` sends chunk `p - t - 1` to the right and receives chunk
//! `p - t - 2` from the left (modulo `n`), reducing in the first `n - 1` steps and replacing
//! afterwards. The two halves are the reduce-scatter and the all-gather, so sums have the same
//! order with and without sharding. A broadcast passes the whole buffer along the ring as one
//! stream.

use super::{Algorithm, Collective, Cost, Definition, Layout, Program};

pub(super) const RING: Definition = Definition { algorithm: Algorithm::Ring, program, cost, reduces_everywhere: false };

fn program(layout: &Layout, collective: Collective) -> Option<Program> {
    let (n, p) = (layout.ranks(), layout.rank);
    let (left, right) = ((p + n - 1) % n, (p + 1) % n);
    // Rank p ends the reduction with chunk p.
    let around = |program: &mut Program, steps: std::ops::Range<usize>| {
        for t in steps {
            program.send(right, (p + 2 * n - t - 1) % n);
            let arriving = (p + 3 * n - t - 2) % n;
            if t < n - 1 { program.reduce(left, arriving, t == n - 2) } else { program.copy(left, arriving) }
        }
    };
    let mut program = Program::new(n);
    match collective {
        Collective::AllReduce => around(&mut program, 0..2 * (n - 1)),
        Collective::ReduceScatter => around(&mut program, 0..n - 1),
        Collective::AllGather => around(&mut program, n - 1..2 * (n - 1)),
        Collective::Broadcast { root } => {
            program = Program::new(1);
            if p != root {
                program.copy(left, 0);
            }
            if right != root {
                program.send(right, 0);
            }
        }
        Collective::AllToAll => return None,
    }
    Some(program)
}

/// Steps and traffic of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
/// Operations in MPICH" (2005).
fn cost(layout: &Layout, collective: Collective) -> Cost {
    let hops = layout.ranks() as f64 - 1.0;
    let part = hops / layout.ranks() as f64;
    match collective {
        Collective::AllReduce => Cost::flat(2.0 * hops, 2.0 * part, part),
        Collective::ReduceScatter => Cost::flat(hops, part, part),
        Collective::Broadcast { .. } => Cost::flat(hops, 1.0, 0.0),
        Collective::AllGather | Collective::AllToAll => Cost::flat(hops, part, 0.0),
    }
}
