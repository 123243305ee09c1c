//! Reduce within each host, around one ring per rail between hosts, then copy within each host. A
//! host link carries each byte once per direction, whatever the number of ranks on the host.
//!
//! A rail is a rank per host with its own ring and its own share of the buffer: one per NIC and
//! CPU, so as many as the smallest host has ranks.

use super::{Algorithm, Collective, Cost, Definition, Layout, Program};

pub(super) const HIERARCHICAL: Definition =
    Definition { algorithm: Algorithm::Hierarchical, program, cost, reduces_everywhere: false };

fn program(layout: &Layout, collective: Collective) -> Option<Program> {
    let hosts = layout.by_host();
    let (m, rails) = (hosts.len(), hosts.iter().map(Vec::len).min()?);
    if collective != Collective::AllReduce || m < 2 || m == layout.ranks() {
        return None;
    }
    let host = layout.hosts[layout.rank];
    let local = &hosts[host];
    let me = local.iter().position(|rank| *rank == layout.rank)?;
    let chunks = |rail: usize| rail * m..(rail + 1) * m;
    let others = || (0..local.len()).filter(|other| *other != me);
    let mut program = Program::new(rails * m);
    for rail in (0..rails).filter(|rail| *rail != me) {
        chunks(rail).for_each(|chunk| program.send(local[rail], chunk));
    }
    if me < rails {
        for other in others() {
            chunks(me).for_each(|chunk| program.reduce(local[other], chunk, false));
        }
        let (left, right) = (hosts[(host + m - 1) % m][me], hosts[(host + 1) % m][me]);
        for t in 0..2 * (m - 1) {
            program.send(right, me * m + (host + 2 * m - t) % m);
            let arriving = me * m + (host + 2 * m - t - 1) % m;
            if t < m - 1 { program.reduce(left, arriving, t == m - 2) } else { program.copy(left, arriving) }
        }
        for other in others() {
            chunks(me).for_each(|chunk| program.send(local[other], chunk));
        }
    }
    for rail in (0..rails).filter(|rail| *rail != me) {
        chunks(rail).for_each(|chunk| program.copy(local[rail], chunk));
    }
    Some(program)
}

fn cost(layout: &Layout, _: Collective) -> Cost {
    let hosts = layout.by_host();
    let m = hosts.len() as f64;
    let ranks = hosts.iter().map(Vec::len).max().unwrap_or(1) as f64;
    let rails = hosts.iter().map(Vec::len).min().unwrap_or(1) as f64;
    let between = 2.0 * (m - 1.0) / m;
    // A rail's rank receives and sends its share once per other local rank; the others send and
    // receive the whole buffer.
    let within = 2.0 * ((ranks - 1.0) / rails).max(1.0);
    Cost {
        local_steps: 2.0,
        local_bytes: within,
        steps: 2.0 * (m - 1.0),
        bytes: between,
        reduced: within / 2.0 + between / 2.0 / rails,
    }
}
