//! Builds a PCIe tree for devices with known path classes.
//!
//! The classes up to [`PathClass::Phb`] say where two devices meet: in one switch (PIX), in
//! switches below one root port (PXB), in one root complex (PHB). Devices are merged level by
//! level, and each level becomes one step of a path in the form of [`switchyard_core::path`].
//! Farther classes (NODE, SYS) follow from NUMA nodes and need no path.

use switchyard_core::path::PathClass;

/// The levels that a path expresses, nearest first.
const LEVELS: [PathClass; 3] = [PathClass::Pix, PathClass::Pxb, PathClass::Phb];
/// Buses of one PCI domain.
const BUSES: usize = 256;
/// Device numbers of one bus. Further devices become functions.
const SLOTS: usize = 32;

/// More devices below one root complex than its buses can hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a root complex with device {device} needs {buses} PCI buses; expected at most {BUSES}")]
pub struct TooManyBuses {
    pub device: usize,
    /// Number of buses needed to keep the devices apart.
    pub buses: usize,
}

/// Builds a path for each device, such that [`switchyard_core::path::path_class`] returns the known
/// classes up to PHB.
///
/// If no tree matches all known classes, devices are kept apart: a pair can come out farther than
/// known, never nearer. Addresses are made up; the same classes give the same addresses.
///
/// # Errors
/// A root complex would need more buses than PCI has.
pub fn paths(
    devices: usize,
    class: impl Fn(usize, usize) -> Option<PathClass>,
) -> Result<Vec<Vec<String>>, TooManyBuses> {
    let [leaves, ports, roots] = clusters(devices, class);
    let mut paths = vec![Vec::new(); devices];
    let mut buses = Buses::default();
    for complex in groups(0..devices, &roots) {
        let ports: Vec<Vec<Vec<usize>>> =
            groups(complex.iter().copied(), &ports).into_iter().map(|below_port| groups(below_port, &leaves)).collect();
        let needed = 1 + ports.iter().map(|leaves| buses_below_port(leaves)).sum::<usize>();
        if needed > BUSES {
            return Err(TooManyBuses { device: complex[0], buses: needed });
        }
        buses.reserve(needed);
        let root = buses.allocate();
        for (slot, leaves) in ports.iter().enumerate() {
            let mut path = vec![format!("pci{root}"), root.address(slot)];
            let mut bus = buses.allocate();
            // Several leaf switches share a switch above them.
            let inner = (leaves.len() > 1).then(|| {
                path.push(bus.address(0));
                buses.allocate()
            });
            for (number, leaf) in leaves.iter().enumerate() {
                let mut path = path.clone();
                if let Some(inner) = inner {
                    path.push(inner.address(number));
                    bus = buses.allocate();
                }
                attach(leaf, path, bus, leaves.len() > 1, &mut buses, &mut paths);
            }
        }
    }
    Ok(paths)
}

/// Attaches devices below one leaf switch. A single device below its root port needs no switch.
fn attach(
    leaf: &[usize],
    mut path: Vec<String>,
    bus: Bus,
    cascaded: bool,
    buses: &mut Buses,
    paths: &mut [Vec<String>],
) {
    if let ([device], false) = (leaf, cascaded) {
        path.push(bus.address(0));
        paths[*device] = path;
        return;
    }
    path.push(bus.address(0));
    let downstream = buses.allocate();
    for (number, device) in leaf.iter().enumerate() {
        let ends = [downstream.address(number), buses.allocate().address(0)];
        paths[*device] = path.iter().cloned().chain(ends).collect();
    }
}

/// Number of buses behind a root port: one below it, and one below each upstream and downstream
/// port.
fn buses_below_port(leaves: &[Vec<usize>]) -> usize {
    match leaves {
        [leaf] if leaf.len() == 1 => 1,
        [leaf] => 2 + leaf.len(),
        leaves => 2 + leaves.iter().map(|leaf| 2 + leaf.len()).sum::<usize>(),
    }
}

/// Members of each cluster, in order of first members.
fn groups(members: impl IntoIterator<Item = usize>, cluster: &[usize]) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for member in members {
        match groups.iter_mut().find(|group| cluster[group[0]] == cluster[member]) {
            Some(group) => group.push(member),
            None => groups.push(vec![member]),
        }
    }
    groups
}

/// For each level, the cluster of each device, identified by its first member.
///
/// Two clusters merge if a pair across them is known to be that near and no pair is known to be
/// farther. For the classes of a tree, the second condition always holds.
fn clusters(devices: usize, class: impl Fn(usize, usize) -> Option<PathClass>) -> [Vec<usize>; 3] {
    let known = |a: usize, b: usize| if a == b { None } else { class(a.min(b), a.max(b)) };
    // The farthest known pair between two clusters. Only the entries of first members are kept up
    // to date.
    let mut farthest: Vec<Vec<Option<PathClass>>> =
        (0..devices).map(|a| (0..devices).map(|b| known(a, b)).collect()).collect();
    let pairs = (0..devices).flat_map(|a| (a + 1..devices).map(move |b| (a, b)));
    let mut near: Vec<(PathClass, usize, usize)> =
        pairs.filter_map(|(a, b)| Some((known(a, b).filter(|class| *class <= PathClass::Phb)?, a, b))).collect();
    near.sort_unstable();
    let mut cluster: Vec<usize> = (0..devices).collect();
    LEVELS.map(|level| {
        for (_, a, b) in near.iter().take_while(|(class, _, _)| *class <= level) {
            let (first, second) = (cluster[*a].min(cluster[*b]), cluster[*a].max(cluster[*b]));
            if first == second || farthest[first][second] > Some(level) {
                continue;
            }
            let merged: Vec<Option<PathClass>> =
                farthest[first].iter().zip(&farthest[second]).map(|(a, b)| *a.max(b)).collect();
            farthest.iter_mut().zip(&merged).for_each(|(row, farther)| row[first] = *farther);
            farthest[first] = merged;
            cluster.iter_mut().filter(|name| **name == second).for_each(|name| *name = first);
        }
        cluster.clone()
    })
}

/// A bus number with its domain.
#[derive(Debug, Clone, Copy)]
struct Bus {
    domain: usize,
    number: usize,
}

impl Bus {
    /// Address of the `index`-th device on this bus.
    fn address(self, index: usize) -> String {
        format!("{self}:{:02x}.{}", index % SLOTS, index / SLOTS)
    }
}

impl std::fmt::Display for Bus {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{:04x}:{:02x}", self.domain, self.number)
    }
}

/// Allocates buses in ascending order.
#[derive(Debug, Default)]
struct Buses {
    next: usize,
}

impl Buses {
    /// Keeps all buses of a root complex in one domain.
    fn reserve(&mut self, count: usize) {
        if self.next % BUSES + count > BUSES {
            self.next = self.next.next_multiple_of(BUSES);
        }
    }

    fn allocate(&mut self) -> Bus {
        let bus = Bus { domain: self.next / BUSES, number: self.next % BUSES };
        self.next += 1;
        bus
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(devices: usize, class: impl Fn(usize, usize) -> Option<PathClass>) -> Vec<String> {
        paths(devices, class).unwrap().iter().map(|path| path.join(" ")).collect()
    }

    #[test]
    fn each_level_has_its_own_form() {
        use PathClass::{Phb, Pix, Pxb, Sys};
        // 0 and 1 in one switch, 2 in another below the same port, 3 at another port, 4 elsewhere.
        let level = [[Pix, Pix, Pxb, Phb, Sys], [Pix, Pix, Pxb, Phb, Sys], [Pxb, Pxb, Pix, Phb, Sys]];
        let class = |a: usize, b: usize| Some(level.get(a.min(b)).map_or(Sys, |row| row[a.max(b)]));
        assert_eq!(
            shown(5, class),
            [
                "pci0000:00 0000:00:00.0 0000:01:00.0 0000:02:00.0 0000:03:00.0 0000:04:00.0 0000:05:00.0",
                "pci0000:00 0000:00:00.0 0000:01:00.0 0000:02:00.0 0000:03:00.0 0000:04:01.0 0000:06:00.0",
                "pci0000:00 0000:00:00.0 0000:01:00.0 0000:02:01.0 0000:07:00.0 0000:08:00.0 0000:09:00.0",
                "pci0000:00 0000:00:01.0 0000:0a:00.0",
                "pci0000:0b 0000:0b:00.0 0000:0c:00.0",
            ]
        );
        let switch = shown(2, |_, _| Some(Pix));
        assert_eq!(switch[1], "pci0000:00 0000:00:00.0 0000:01:00.0 0000:02:01.0 0000:04:00.0");
    }

    #[test]
    fn devices_far_apart_fill_domains_one_root_complex_at_a_time() {
        let paths = shown(200, |_, _| None);
        assert_eq!(paths[127], "pci0000:fe 0000:fe:00.0 0000:ff:00.0");
        assert_eq!(paths[128], "pci0001:00 0001:00:00.0 0001:01:00.0");
    }

    #[test]
    fn a_root_complex_is_limited_to_256_buses() {
        assert!(paths(255, |_, _| Some(PathClass::Phb)).is_ok());
        let error = paths(256, |_, _| Some(PathClass::Phb)).unwrap_err();
        assert_eq!(error, TooManyBuses { device: 0, buses: 257 });
    }
}
