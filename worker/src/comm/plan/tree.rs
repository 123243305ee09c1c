//! Two binary trees: up to the roots, then down again. The latency grows with the logarithm of the
//! number of ranks, and long messages are pipelined, because chunks are forwarded byte by byte.
//!
//! An all-reduce sends one half through each tree. The second tree numbers the ranks backwards, so
//! that a rank with children in one tree has none (or few) in the other, as in Sanders, Speck and
//! Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009). A
//! broadcast uses one tree, whose root is the sender.

use super::{Algorithm, Collective, Cost, Definition, Layout, Program};

pub(super) const TREE: Definition = Definition { algorithm: Algorithm::Tree, program, cost, reduces_everywhere: false };

/// Parent and children of a node of a complete binary tree.
fn neighbours(node: usize, n: usize) -> (Option<usize>, impl DoubleEndedIterator<Item = usize> + Clone) {
    let parent = node.checked_sub(1).map(|below| below / 2);
    (parent, (2 * node + 1..=2 * node + 2).filter(move |child| *child < n))
}

fn program(layout: &Layout, collective: Collective) -> Option<Program> {
    let (n, p) = (layout.ranks(), layout.rank);
    match collective {
        Collective::AllReduce => {
            let mut program = Program::new(2);
            let number = |tree: usize, rank: usize| if tree == 0 { rank } else { n - 1 - rank };
            for tree in 0..2 {
                let (parent, children) = neighbours(number(tree, p), n);
                let last = children.clone().next_back();
                for child in children {
                    program.reduce(number(tree, child), tree, parent.is_none() && last == Some(child));
                }
                if let Some(parent) = parent {
                    program.send(number(tree, parent), tree);
                }
            }
            for tree in 0..2 {
                let (parent, children) = neighbours(number(tree, p), n);
                if let Some(parent) = parent {
                    program.copy(number(tree, parent), tree);
                }
                children.for_each(|child| program.send(number(tree, child), tree));
            }
            Some(program)
        }
        Collective::Broadcast { root } => {
            let mut program = Program::new(1);
            let rank = |node: usize| (node + root) % n;
            let (parent, children) = neighbours((p + n - root) % n, n);
            if let Some(parent) = parent {
                program.copy(rank(parent), 0);
            }
            children.for_each(|child| program.send(rank(child), 0));
            Some(program)
        }
        _ => None,
    }
}

fn cost(layout: &Layout, collective: Collective) -> Cost {
    let n = layout.ranks();
    let depth = f64::from(n.ilog2());
    match collective {
        // The busiest node of a tree sends half of the values once up and twice down, and in the
        // other tree once up. Up to four ranks, no node has both a parent and two children.
        Collective::AllReduce => {
            let bytes = if n > 4 { 2.0 } else { 0.5 * (n as f64).min(3.0) };
            Cost::flat(2.0 * depth, bytes, if n > 2 { 1.0 } else { 0.5 })
        }
        _ => Cost::flat(depth, if n > 2 { 2.0 } else { 1.0 }, 0.0),
    }
}
