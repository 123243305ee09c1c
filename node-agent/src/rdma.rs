//! RDMA devices: ports, addresses, character devices.

use crate::Roots;
use crate::pci::{self, PciPosition};
use crate::read::{self, Notes};
use std::collections::BTreeMap;
use std::io;
use std::net::Ipv6Addr;
use std::path::Path;
use switchyard_crds::gpu_topology::{CharDevice, FileState, GidFamily, GidGroup, GidType};

/// One port of an RDMA device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RdmaPort {
    pub device: String,
    /// Counted from 1.
    pub port: u32,
    pub position: PciPosition,
    pub link_layer: Option<String>,
    pub state: Option<String>,
    /// Megabits per second.
    pub rate: Option<u64>,
    pub gids: Vec<GidGroup>,
    pub node_guid: Option<String>,
    pub firmware: Option<String>,
    pub char_device: Option<CharDevice>,
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

/// Parses an RDMA port's state: `Active` from `4: ACTIVE`.
pub fn parse_rdma_state(text: &str) -> Option<String> {
    Some(read::capitalized(text.split_once(':')?.1))
}

/// Type and family of a GID from its two files. `None` for an empty table entry.
pub fn parse_gid(gid: &str, kind: &str, link_layer: Option<&str>) -> Option<(GidType, Option<GidFamily>)> {
    let address: Ipv6Addr = gid.trim().parse().ok()?;
    if address.is_unspecified() {
        return None;
    }
    let family = Some(if address.to_ipv4_mapped().is_some() { GidFamily::IPv4 } else { GidFamily::IPv6 });
    match kind.trim() {
        // Both types share this text; the link layer tells them apart.
        "IB/RoCE v1" if link_layer == Some("InfiniBand") => Some((GidType::IB, None)),
        "IB/RoCE v1" => Some((GidType::RoCEv1, family)),
        "RoCE v2" => Some((GidType::RoCEv2, family)),
        _ => None,
    }
}

/// Ports in ascending order of device and number.
pub(crate) fn read_ports(roots: &Roots, notes: &mut Notes) -> Vec<RdmaPort> {
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
    let verbs = verbs_devices(roots);
    let mut ports = Vec::new();
    for (device, path) in devices {
        let position = pci::position(&path.join("device")).unwrap_or_else(|error| {
            notes.add(format!("{device}: PCI position unknown: {error}"));
            PciPosition::default()
        });
        let numbers = read::entries(&path.join("ports")).unwrap_or_else(|error| {
            notes.add(format!("{device}: ports unknown: {error}"));
            Vec::new()
        });
        let file = |name: &str, most| read::text(&path.join(name)).ok().map(|text| read::clip(&text, most));
        let of_device = RdmaPort {
            position,
            node_guid: file("node_guid", 32),
            firmware: file("fw_ver", 64),
            char_device: verbs.get(&device).map(|name| char_device(roots, &format!("infiniband/{name}"))),
            device,
            ..RdmaPort::default()
        };
        for (number, port) in numbers {
            let Some(number) = read::number(&number) else { continue };
            let file = |name: &str| read::text(&port.join(name)).ok();
            let link_layer = file("link_layer").map(|text| read::clip(&text, 32));
            ports.push(RdmaPort {
                port: number,
                gids: read_gids(&port, link_layer.as_deref()),
                link_layer,
                state: file("state").and_then(|text| parse_rdma_state(&text)),
                rate: file("rate").and_then(|text| parse_rdma_rate(&text)),
                ..of_device.clone()
            });
        }
    }
    ports
}

/// Groups the GIDs of a port. Entries that are empty or belong to another network namespace cannot
/// be read and do not count.
fn read_gids(port: &Path, link_layer: Option<&str>) -> Vec<GidGroup> {
    let mut places: Vec<u32> = read::entries(&port.join("gids"))
        .unwrap_or_default()
        .iter()
        .filter_map(|(name, _)| read::number(name))
        .collect();
    places.sort_unstable();
    let mut groups: BTreeMap<(GidType, Option<GidFamily>), (u32, u32)> = BTreeMap::new();
    for place in places {
        let gid = read::text(&port.join(format!("gids/{place}"))).ok();
        // Most table entries are empty; skip reading their type.
        let gid = gid.filter(|gid| gid.bytes().any(|digit| digit != b'0' && digit != b':'));
        let kind = gid.as_ref().and_then(|_| read::text(&port.join(format!("gid_attrs/types/{place}"))).ok());
        if let Some(key) = gid.zip(kind).and_then(|(gid, kind)| parse_gid(&gid, &kind, link_layer)) {
            groups.entry(key).or_insert((0, place)).0 += 1;
        }
    }
    groups
        .into_iter()
        .map(|((kind, family), (count, first_index))| GidGroup { kind, family, count, first_index })
        .collect()
}

/// Character device by RDMA device name.
fn verbs_devices(roots: &Roots) -> BTreeMap<String, String> {
    let all = read::entries(&roots.sysfs.join("class/infiniband_verbs")).unwrap_or_default();
    let of = |(name, path): (String, std::path::PathBuf)| Some((read::text(&path.join("ibdev")).ok()?, name));
    all.into_iter().filter(|(name, _)| name.starts_with("uverbs")).filter_map(of).collect()
}

/// A character device in `/dev`.
pub(crate) fn char_device(roots: &Roots, path: &str) -> CharDevice {
    let state = if roots.dev.join(path).exists() { FileState::Present } else { FileState::Missing };
    CharDevice { path: read::clip(path, 64), state }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_and_states() {
        assert_eq!(parse_rdma_rate("400 Gb/sec (4X NDR)\n"), Some(400_000));
        assert_eq!(parse_rdma_rate("2.5 Gb/sec (1X SDR)"), Some(2_500));
        assert_eq!(parse_rdma_rate("0 Gb/sec"), None);
        assert_eq!(parse_rdma_rate("fast"), None);
        assert_eq!(parse_rdma_rate("99999999999999999999 Gb/sec"), None);
        assert_eq!(parse_rdma_state("4: ACTIVE\n").as_deref(), Some("Active"));
        assert_eq!(parse_rdma_state("ACTIVE"), None);
    }

    #[test]
    fn addresses() {
        let of = |gid: &str, kind: &str, layer| parse_gid(gid, kind, Some(layer));
        let mapped = "0000:0000:0000:0000:0000:ffff:0a00:0001";
        let local = "fe80:0000:0000:0000:a288:c2ff:fe03:0001";
        assert_eq!(of(mapped, "RoCE v2", "Ethernet"), Some((GidType::RoCEv2, Some(GidFamily::IPv4))));
        assert_eq!(of(local, "IB/RoCE v1", "Ethernet"), Some((GidType::RoCEv1, Some(GidFamily::IPv6))));
        assert_eq!(of(local, "IB/RoCE v1", "InfiniBand"), Some((GidType::IB, None)));
        assert_eq!(of("0000:0000:0000:0000:0000:0000:0000:0000", "RoCE v2", "Ethernet"), None);
        assert_eq!(of(local, "RoCE v3", "Ethernet"), None);
        assert_eq!(of("rubbish", "RoCE v2", "Ethernet"), None);
    }
}
