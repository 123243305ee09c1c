//! Network devices: physical interfaces, the interface of the default route, and RDMA ports.

use crate::Roots;
use crate::pci::{self, PciPosition};
use crate::rdma::{self, RdmaPort};
use crate::read::{self, Notes};
use std::path::Path;
use switchyard_crds::gpu_topology::{Nic, NicKind, VirtualFunctions};

/// Most network devices in a description.
const MAX_NICS: usize = 256;

/// Parses an interface's speed: megabits per second. The kernel reports an unknown speed as -1,
/// some drivers as 0 or 4294967295.
pub fn parse_speed(text: &str) -> Option<u64> {
    read::number::<u64>(text).filter(|speed| *speed > 0 && *speed < u64::from(u32::MAX))
}

/// Devices sorted by name. `None` if the kernel's list cannot be read.
pub(crate) fn read_nics(roots: &Roots, default_route: Option<&str>, notes: &mut Notes) -> Option<Vec<Nic>> {
    let directory = roots.sysfs.join("class/net");
    let interfaces = match read::entries(&directory) {
        Ok(interfaces) => interfaces,
        Err(error) => {
            notes.add(format!("{}: {error}", directory.display()));
            return None;
        }
    };
    let mut ports = rdma::read_ports(roots, notes);
    let mut nics = Vec::new();
    for (name, path) in interfaces {
        // Only devices with hardware, real or emulated by a hypervisor, have this link.
        let kind = if path.join("device").exists() { NicKind::Physical } else { NicKind::Virtual };
        if kind == NicKind::Virtual && default_route != Some(name.as_str()) {
            continue;
        }
        nics.push(read_interface(&name, &path, kind, &mut ports, notes));
    }
    // The remaining ports have no interface: InfiniBand without IP over InfiniBand.
    nics.extend(ports.into_iter().map(|port| {
        let suffix = if port.port == 1 { String::new() } else { format!("/{}", port.port) };
        let mut nic = Nic { name: read::clip(&format!("{}{suffix}", port.device), 32), ..Nic::default() };
        adopt(&mut nic, port);
        nic
    }));
    for nic in &mut nics {
        read_functions(roots, nic);
    }
    limit(&mut nics, notes);
    nics.sort_by(|a, b| a.name.cmp(&b.name));
    Some(nics)
}

/// Sets a device's PCI function, its parent and its virtual functions.
fn read_functions(roots: &Roots, nic: &mut Nic) {
    let Some(device) = nic.bus_id.as_ref().map(|id| roots.sysfs.join("bus/pci/devices").join(id)) else { return };
    let parent = std::fs::read_link(device.join("physfn")).ok();
    nic.virtual_function_of = parent.and_then(|link| pci::bus_id(link.file_name()?.to_str()?));
    let count = |file: &str| read::number_in::<u32>(&device.join(file));
    nic.virtual_functions = count("sriov_totalvfs")
        .filter(|total| *total > 0)
        .and_then(|total| Some(VirtualFunctions { enabled: count("sriov_numvfs")?, total }));
}

fn read_interface(name: &str, path: &Path, kind: NicKind, ports: &mut Vec<RdmaPort>, notes: &mut Notes) -> Nic {
    let state = read::text(&path.join("operstate")).ok().map(|text| read::capitalized(&text));
    let position = match kind {
        NicKind::Physical => pci::position(&path.join("device")).unwrap_or_else(|error| {
            notes.add(format!("{name}: PCI position unknown: {error}"));
            PciPosition::default()
        }),
        NicKind::Virtual => PciPosition::default(),
    };
    let mut nic = Nic {
        name: read::clip(name, 32),
        kind,
        bus_id: position.bus_id,
        // An interface that is down returns EINVAL or its last speed.
        rate_megabits_per_second: (state.as_deref() != Some("Down"))
            .then(|| parse_speed(&read::text(&path.join("speed")).ok()?))
            .flatten(),
        state,
        numa_node: position.numa_node,
        pcie_path: position.path,
        pcie_link: position.link,
        mtu_bytes: read::number_in(&path.join("mtu")),
        ..Nic::default()
    };
    // `dev_port` counts the interfaces of one PCI function from 0, RDMA ports are counted from 1.
    let number = read::number_in::<u32>(&path.join("dev_port")).unwrap_or(0) + 1;
    let same = |port: &RdmaPort| nic.bus_id.is_some() && port.position.bus_id == nic.bus_id && port.port == number;
    if let Some(index) = ports.iter().position(same) {
        adopt(&mut nic, ports.swap_remove(index));
    }
    nic
}

/// Replaces the interface's values by the RDMA port's, because training uses the RDMA side.
fn adopt(nic: &mut Nic, port: RdmaPort) {
    nic.kind = NicKind::Physical;
    nic.rdma_device = Some(read::clip(&port.device, 64));
    nic.port = Some(port.port);
    nic.link_layer = port.link_layer;
    if nic.bus_id.is_none() {
        nic.bus_id = port.position.bus_id;
        nic.numa_node = port.position.numa_node;
        nic.pcie_path = port.position.path;
        nic.pcie_link = port.position.link;
    }
    nic.gids = port.gids;
    nic.node_guid = port.node_guid;
    nic.firmware = port.firmware;
    nic.char_device = port.char_device;
    if port.state.is_some() {
        nic.rate_megabits_per_second = port.rate.filter(|_| port.state.as_deref() == Some("Active"));
        nic.state = port.state;
    }
}

/// Keeps physical functions first if there are more devices than a description can hold.
fn limit(nics: &mut Vec<Nic>, notes: &mut Notes) {
    if nics.len() > MAX_NICS {
        notes.add(format!("{} network devices: only {MAX_NICS} are described", nics.len()));
        nics.sort_by_key(|nic| nic.virtual_function_of.is_some());
        nics.truncate(MAX_NICS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_and_speeds() {
        assert_eq!(read::capitalized("lowerlayerdown"), "Lowerlayerdown");
        assert_eq!(parse_speed("25000\n"), Some(25_000));
        assert_eq!(parse_speed("-1"), None);
        assert_eq!(parse_speed("0"), None);
        assert_eq!(parse_speed("4294967295"), None);
    }

    #[test]
    fn virtual_functions_are_dropped_first() {
        let nic = |index: usize| Nic {
            name: format!("eth{index}"),
            virtual_function_of: (index < 200).then(|| "0000:1a:00.0".to_owned()),
            ..Nic::default()
        };
        let mut nics: Vec<Nic> = (0..300).map(nic).collect();
        let mut notes = Notes::default();
        limit(&mut nics, &mut notes);
        assert_eq!(nics.len(), MAX_NICS);
        assert_eq!(nics.iter().filter(|nic| nic.virtual_function_of.is_none()).count(), 100);
        assert!(notes.message().unwrap().starts_with("300 network devices"));
    }
}
