//! Network devices: interfaces with hardware behind them, the one of the default route, and RDMA ports.

use crate::Roots;
use crate::pci::{self, Place};
use crate::read::{self, Notes};
use std::io;
use std::path::Path;
use switchyard_crds::gpu_topology::{Nic, NicKind};

/// One port of an RDMA device.
#[derive(Debug, Clone, PartialEq, Eq)]
struct RdmaPort {
    device: String,
    port: u32,
    place: Place,
    link_layer: Option<String>,
    state: Option<String>,
    rate: Option<u64>,
}

/// Parses an RDMA port's rate (`400 Gb/sec (4X NDR)`, `2.5 Gb/sec (1X SDR)`): megabits per second.
pub fn parse_rdma_rate(text: &str) -> Option<u64> {
    let (number, rest) = text.trim().split_once(' ')?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if !rest.starts_with("Gb/sec") || fraction.len() > 3 {
        return None;
    }
    let thousandths: u64 = if fraction.is_empty() { 0 } else { format!("{fraction:0<3}").parse().ok()? };
    let rate = whole.parse::<u64>().ok()?.checked_mul(1000)?.checked_add(thousandths)?;
    (rate > 0).then_some(rate)
}

/// Parses an RDMA port's state (`4: ACTIVE`): `Active`.
pub fn parse_rdma_state(text: &str) -> Option<String> {
    Some(capitalized(text.split_once(':')?.1))
}

/// Parses an interface's speed: megabits per second. -1 is the kernel's word for unknown; 0 and 4294967295 are those of
/// some drivers.
pub fn parse_speed(text: &str) -> Option<u64> {
    read::number::<u64>(text).filter(|speed| *speed > 0 && *speed < u64::from(u32::MAX))
}

/// `ACTIVE` and `up` become `Active` and `Up`.
fn capitalized(text: &str) -> String {
    let mut letters = text.trim().chars();
    letters.next().map_or(String::new(), |first| {
        first.to_uppercase().chain(letters.flat_map(char::to_lowercase)).take(32).collect()
    })
}

/// Devices in ascending order of their name. `None`: the kernel's list cannot be read.
pub(crate) fn read_nics(roots: &Roots, default_route: Option<&str>, notes: &mut Notes) -> Option<Vec<Nic>> {
    let directory = roots.sysfs.join("class/net");
    let interfaces = match read::entries(&directory) {
        Ok(interfaces) => interfaces,
        Err(error) => {
            notes.add(format!("{}: {error}", directory.display()));
            return None;
        }
    };
    let mut ports = read_rdma_ports(roots, notes);
    let mut nics = Vec::new();
    for (name, path) in interfaces {
        // The link is there for a device with hardware (or a hypervisor's idea of it) and for nothing else.
        let kind = if path.join("device").exists() { NicKind::Physical } else { NicKind::Virtual };
        if kind == NicKind::Virtual && default_route != Some(name.as_str()) {
            continue;
        }
        nics.push(read_interface(&name, &path, kind, &mut ports, notes));
    }
    // What is left has no interface: InfiniBand without IP over InfiniBand.
    nics.extend(ports.into_iter().map(|port| {
        let suffix = if port.port == 1 { String::new() } else { format!("/{}", port.port) };
        let mut nic = Nic { name: read::clip(&format!("{}{suffix}", port.device), 32), ..Nic::default() };
        adopt(&mut nic, port);
        nic
    }));
    nics.sort_by(|a, b| a.name.cmp(&b.name));
    Some(nics)
}

fn read_interface(name: &str, path: &Path, kind: NicKind, ports: &mut Vec<RdmaPort>, notes: &mut Notes) -> Nic {
    let state = read::text(&path.join("operstate")).ok().map(|text| capitalized(&text));
    let place = match kind {
        NicKind::Physical => pci::place(&path.join("device")).unwrap_or_else(|error| {
            notes.add(format!("{name}: place unknown: {error}"));
            Place::default()
        }),
        NicKind::Virtual => Place::default(),
    };
    let mut nic = Nic {
        name: read::clip(name, 32),
        kind,
        bus_id: place.bus_id,
        // An interface that is down answers EINVAL or its last speed.
        rate_megabits_per_second: (state.as_deref() != Some("Down"))
            .then(|| parse_speed(&read::text(&path.join("speed")).ok()?))
            .flatten(),
        state,
        numa_node: place.numa_node,
        pcie_path: place.path,
        ..Nic::default()
    };
    // `dev_port` counts the interfaces of one PCI function from 0, RDMA ports count from 1.
    let number = read::number_in::<u32>(&path.join("dev_port")).unwrap_or(0) + 1;
    let same = |port: &RdmaPort| nic.bus_id.is_some() && port.place.bus_id == nic.bus_id && port.port == number;
    if let Some(index) = ports.iter().position(same) {
        adopt(&mut nic, ports.swap_remove(index));
    }
    nic
}

/// The RDMA side of a device is the one that training uses: its figures replace the interface's.
fn adopt(nic: &mut Nic, port: RdmaPort) {
    nic.kind = NicKind::Physical;
    nic.rdma_device = Some(read::clip(&port.device, 64));
    nic.port = Some(port.port);
    nic.link_layer = port.link_layer;
    if nic.bus_id.is_none() {
        nic.bus_id = port.place.bus_id;
        nic.numa_node = port.place.numa_node;
        nic.pcie_path = port.place.path;
    }
    if port.state.is_some() {
        nic.rate_megabits_per_second = port.rate.filter(|_| port.state.as_deref() == Some("Active"));
        nic.state = port.state;
    }
}

fn read_rdma_ports(roots: &Roots, notes: &mut Notes) -> Vec<RdmaPort> {
    let directory = roots.sysfs.join("class/infiniband");
    let devices = match read::entries(&directory) {
        Ok(devices) => devices,
        // No RDMA driver is loaded.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Vec::new(),
        Err(error) => {
            notes.add(format!("{}: {error}", directory.display()));
            return Vec::new();
        }
    };
    let mut ports = Vec::new();
    for (device, path) in devices {
        let place = pci::place(&path.join("device")).unwrap_or_else(|error| {
            notes.add(format!("{device}: place unknown: {error}"));
            Place::default()
        });
        let numbers = read::entries(&path.join("ports")).unwrap_or_else(|error| {
            notes.add(format!("{device}: ports unknown: {error}"));
            Vec::new()
        });
        for (number, port) in numbers {
            let Some(number) = read::number(&number) else { continue };
            let file = |name: &str| read::text(&port.join(name)).ok();
            ports.push(RdmaPort {
                device: device.clone(),
                port: number,
                place: place.clone(),
                link_layer: file("link_layer").map(|text| read::clip(&text, 32)),
                state: file("state").and_then(|text| parse_rdma_state(&text)),
                rate: file("rate").and_then(|text| parse_rdma_rate(&text)),
            });
        }
    }
    ports
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates() {
        assert_eq!(parse_rdma_rate("400 Gb/sec (4X NDR)\n"), Some(400_000));
        assert_eq!(parse_rdma_rate("2.5 Gb/sec (1X SDR)"), Some(2_500));
        assert_eq!(parse_rdma_rate("0 Gb/sec"), None);
        assert_eq!(parse_rdma_rate("fast"), None);
        assert_eq!(parse_rdma_rate("99999999999999999999 Gb/sec"), None);
    }

    #[test]
    fn states_and_speeds() {
        assert_eq!(parse_rdma_state("4: ACTIVE\n").as_deref(), Some("Active"));
        assert_eq!(parse_rdma_state("ACTIVE"), None);
        assert_eq!(capitalized("lowerlayerdown"), "Lowerlayerdown");
        assert_eq!(parse_speed("25000\n"), Some(25_000));
        assert_eq!(parse_speed("-1"), None);
        assert_eq!(parse_speed("0"), None);
        assert_eq!(parse_speed("4294967295"), None);
    }
}
