//! Recursive halving, then recursive doubling (Rabenseifner): the traffic of a ring in
//! `2 log2(n)` steps, but over all distances.
//!
//! Numbers of ranks that are not a power of two are folded as in recursive doubling, which costs
//! two more transfers of the whole buffer. A reduce-scatter needs a power of two.

use super::{
    Algorithm, Collective, Cost, Definition, Layout, Program, power_of_two,
    recursive_doubling::{Folded, fold, unfold},
};

pub(super) const HALVING_DOUBLING: Definition =
    Definition { algorithm: Algorithm::HalvingDoubling, program, cost, reduces_everywhere: false };

fn program(layout: &Layout, collective: Collective) -> Option<Program> {
    let (n, p) = (layout.ranks(), layout.rank);
    let (power, left_over) = power_of_two(n);
    let mut program = Program::new(power);
    match collective {
        Collective::AllReduce => match fold(p, n) {
            Folded::Out(to) => {
                (0..power).for_each(|chunk| program.send(to, chunk));
                (0..power).for_each(|chunk| program.copy(to, chunk));
            }
            Folded::In(number, from) => {
                if let Some(from) = from {
                    (0..power).for_each(|chunk| program.reduce(from, chunk, power == 1));
                }
                halve(&mut program, number, n);
                for bit in (0..power.ilog2()).map(|bit| 1 << bit) {
                    let partner = unfold(number ^ bit, n);
                    let (mine, theirs) = (number & !(bit - 1), (number ^ bit) & !(bit - 1));
                    (mine..mine + bit).for_each(|chunk| program.send(partner, chunk));
                    (theirs..theirs + bit).for_each(|chunk| program.copy(partner, chunk));
                }
                if let Some(from) = from {
                    (0..power).for_each(|chunk| program.send(from, chunk));
                }
            }
        },
        Collective::ReduceScatter if left_over == 0 => halve(&mut program, p, n),
        _ => return None,
    }
    Some(program)
}

/// Leaves chunk `number` reduced: in each step, a rank keeps the half that contains it.
fn halve(program: &mut Program, number: usize, n: usize) {
    let (power, _) = power_of_two(n);
    for bit in (0..power.ilog2()).rev().map(|bit| 1 << bit) {
        let partner = unfold(number ^ bit, n);
        let (kept, given) = (number & !(bit - 1), (number ^ bit) & !(bit - 1));
        (given..given + bit).for_each(|chunk| program.send(partner, chunk));
        (kept..kept + bit).for_each(|chunk| program.reduce(partner, chunk, bit == 1));
    }
}

fn cost(layout: &Layout, collective: Collective) -> Cost {
    let (power, left_over) = power_of_two(layout.ranks());
    let steps = f64::from(power.ilog2());
    let part = (power as f64 - 1.0) / power as f64;
    let fold = if left_over > 0 { 1.0 } else { 0.0 };
    match collective {
        Collective::ReduceScatter => Cost::flat(steps, part, part),
        _ => Cost::flat(2.0 * (steps + fold), 2.0 * part + fold, part + fold),
    }
}
