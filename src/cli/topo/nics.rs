//! Network devices: state, rails, addresses, virtual functions.

use super::{health, nic_name};
use crate::text::{Screen, Table, plain};
use switchyard_core::units::{counted, speed};
use switchyard_crds::gpu_topology::{GPUTopologyStatus, GidGroup, Nic};
use switchyard_topology::cells;

/// The devices. `rails` are the positions of those that carry training traffic, in rail order.
pub(super) fn table(screen: &mut Screen, status: &GPUTopologyStatus, rails: &[usize]) {
    if status.nics.is_empty() {
        return;
    }
    screen.line("");
    let default_route = status.host.as_ref().and_then(|host| host.default_route.as_deref());
    let labels: Vec<&Nic> = cells::nics(status).collect();
    let mut table = Table::new(&["NIC", "NAME", "SPEED", "STATE", "NUMA", "RDMA", "RAIL", "BUS ID"]);
    for (position, nic) in status.nics.iter().enumerate() {
        let label = labels.iter().position(|other| std::ptr::eq(*other, nic));
        let or_dash = |text: &Option<String>| text.as_deref().map_or("-".to_owned(), plain);
        let rdma = match (&nic.rdma_device, &nic.link_layer) {
            (Some(device), Some(layer)) => format!("{} {}", plain(device), plain(layer)),
            (Some(device), None) => plain(device),
            (None, _) => "-".to_owned(),
        };
        table.rows.push(vec![
            label.map_or("-".to_owned(), |index| format!("NIC{index}")),
            plain(&nic.name),
            nic.rate_megabits_per_second.map_or("-".to_owned(), speed),
            or_dash(&nic.state),
            nic.numa_node.map_or("-".to_owned(), |node| node.to_string()),
            rdma,
            rails.iter().position(|rail| *rail == position).map_or("-".to_owned(), |rail| rail.to_string()),
            or_dash(&nic.bus_id),
        ]);
    }
    screen.table(vec![table]);
    for nic in &status.nics {
        if let Some(Some(fault)) = nic.pcie_link.as_ref().map(|link| health::pcie(link).flatten()) {
            screen.paragraph(&plain(nic_name(nic)), &format!("warn: {fault}"));
        }
    }
    grouped_lines(screen, "GIDS", status, gids);
    grouped_lines(screen, "VFS", status, functions);
    if let Some(interface) = default_route {
        screen.line(&format!("default route over {}", plain(interface)));
    }
}

/// Groups devices with equal cells on one line.
fn grouped_lines(screen: &mut Screen, label: &str, status: &GPUTopologyStatus, say: impl Fn(&Nic) -> Option<String>) {
    let mut lines: Vec<(String, Vec<String>)> = Vec::new();
    for nic in &status.nics {
        let Some(text) = say(nic) else { continue };
        let name = plain(nic_name(nic));
        match lines.iter_mut().find(|(known, _)| *known == text) {
            Some((_, names)) => names.push(name),
            None => lines.push((text, vec![name])),
        }
    }
    for (text, names) in lines {
        screen.paragraph(label, &format!("{}: {text}", names.join(", ")));
    }
}

/// `RoCEv2 IPv4 2 from index 3`.
fn gids(nic: &Nic) -> Option<String> {
    let group = |gids: &GidGroup| {
        let family = gids.family.as_ref().map_or(String::new(), |family| format!(" {family:?}"));
        format!("{:?}{family} {} from index {}", gids.kind, gids.count, gids.first_index)
    };
    let groups: Vec<String> = nic.gids.iter().map(group).collect();
    (!groups.is_empty()).then(|| groups.join(", "))
}

fn functions(nic: &Nic) -> Option<String> {
    if let Some(physical) = &nic.virtual_function_of {
        return Some(format!("a virtual function of {}", plain(physical)));
    }
    let functions = nic.virtual_functions.as_ref().filter(|functions| functions.enabled > 0)?;
    Some(format!("{} of {}", counted(functions.enabled.into(), "virtual function"), functions.total))
}
