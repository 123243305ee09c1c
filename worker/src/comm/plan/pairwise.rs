//! Every rank sends to every other rank directly. The only algorithm for all-to-all; otherwise one
//! step, for short messages.

use super::{Algorithm, Collective, Cost, Definition, Layout, Program};

pub(super) const PAIRWISE: Definition =
    Definition { algorithm: Algorithm::Pairwise, program, cost, reduces_everywhere: false };

fn program(layout: &Layout, collective: Collective) -> Option<Program> {
    let (n, p) = (layout.ranks(), layout.rank);
    let mut program = Program::new(n);
    // Each rank starts with another receiver.
    let to = (1..n).map(|t| (p + t) % n);
    let from = (1..n).map(|t| (p + n - t) % n);
    match collective {
        Collective::AllToAll => {
            to.for_each(|peer| program.send(peer, peer));
            from.for_each(|peer| program.copy(peer, peer));
        }
        Collective::ReduceScatter => {
            to.for_each(|peer| program.send(peer, peer));
            from.for_each(|peer| program.reduce(peer, p, peer == (p + 1) % n));
        }
        Collective::AllGather => {
            to.for_each(|peer| program.send(peer, p));
            from.for_each(|peer| program.copy(peer, peer));
        }
        _ => return None,
    }
    Some(program)
}

fn cost(layout: &Layout, collective: Collective) -> Cost {
    let others = layout.ranks() as f64 - 1.0;
    let part = others / layout.ranks() as f64;
    let reduced = if collective == Collective::ReduceScatter { part } else { 0.0 };
    // The receivers' messages collide at the switch and at the sockets: each costs its own latency.
    Cost::flat(1.0 + others / 4.0, part, reduced)
}
