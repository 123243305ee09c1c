//! Recursive doubling: every rank exchanges everything it has with partners at distance 1, 2, 4 and
//! so on. The fewest steps, so best for short messages.
//!
//! With `2^k + r` ranks, each of the first `r` even ranks hands its values to its right neighbour
//! and gets the result back at the end. An all-gather needs a power of two.

use super::{Algorithm, Collective, Cost, Definition, Layout, Program, power_of_two};

pub(super) const RECURSIVE_DOUBLING: Definition =
    Definition { algorithm: Algorithm::RecursiveDoubling, program, cost, reduces_everywhere: true };

/// A rank's place after the fold to a power of two.
pub(super) enum Folded {
    /// Hands its values to this rank, and gets the result back.
    Out(usize),
    /// Takes part as this number, after it has received another rank's values (if any).
    In(usize, Option<usize>),
}

/// Folds `n` ranks to a power of two: the first even ranks drop out.
pub(super) fn fold(p: usize, n: usize) -> Folded {
    let (_, left_over) = power_of_two(n);
    match (p < 2 * left_over, p.is_multiple_of(2)) {
        (true, true) => Folded::Out(p + 1),
        (true, false) => Folded::In(p / 2, Some(p - 1)),
        (false, _) => Folded::In(p - left_over, None),
    }
}

/// The rank that takes part as `number` after the fold.
pub(super) fn unfold(number: usize, n: usize) -> usize {
    let (_, left_over) = power_of_two(n);
    if number < left_over { 2 * number + 1 } else { number + left_over }
}

fn program(layout: &Layout, collective: Collective) -> Option<Program> {
    let (n, p) = (layout.ranks(), layout.rank);
    let (power, left_over) = power_of_two(n);
    match collective {
        Collective::AllReduce => {
            let mut program = Program::new(1);
            match fold(p, n) {
                Folded::Out(to) => {
                    program.send(to, 0);
                    program.copy(to, 0);
                }
                Folded::In(number, from) => {
                    if let Some(from) = from {
                        program.reduce(from, 0, false);
                    }
                    for bit in (0..power.ilog2()).map(|bit| 1 << bit) {
                        let partner = unfold(number ^ bit, n);
                        program.send(partner, 0);
                        program.reduce(partner, 0, 2 * bit == power);
                    }
                    if let Some(from) = from {
                        program.send(from, 0);
                    }
                }
            }
            Some(program)
        }
        Collective::AllGather if left_over == 0 => {
            let mut program = Program::new(n);
            for bit in (0..power.ilog2()).map(|bit| 1 << bit) {
                let (mine, theirs) = (p & !(bit - 1), (p ^ bit) & !(bit - 1));
                (mine..mine + bit).for_each(|chunk| program.send(p ^ bit, chunk));
                (theirs..theirs + bit).for_each(|chunk| program.copy(p ^ bit, chunk));
            }
            Some(program)
        }
        _ => None,
    }
}

fn cost(layout: &Layout, collective: Collective) -> Cost {
    let n = layout.ranks();
    let (power, left_over) = power_of_two(n);
    let steps = f64::from(power.ilog2());
    let folds = if left_over > 0 { 2.0 } else { 0.0 };
    match collective {
        Collective::AllGather => Cost::flat(steps, (n as f64 - 1.0) / n as f64, 0.0),
        _ => Cost::flat(steps + folds, steps + folds / 2.0, steps + folds / 2.0),
    }
}
