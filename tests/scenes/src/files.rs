//! The files of a machine.

use crate::failures::Failures;
use crate::machine::{Machine, Port};
use crate::scene::DriverModule;
use crate::tree::Tree;
use std::collections::BTreeSet;
use switchyard_worker_contract::CpuList;

/// Entries in a port's GID table; real ones have up to 256.
const GID_ENTRIES: u32 = 16;

/// Writes all files except those that failures change.
pub(crate) fn write(machine: &Machine, tree: &Tree) {
    cpus(machine, tree);
    host(machine, tree);
    devices(machine, tree);
    for (number, port) in machine.ports.iter().enumerate() {
        rdma(port, number, tree);
    }
}

/// Writes the files that failures change.
pub(crate) fn write_changing(machine: &Machine, failures: &Failures, tree: &Tree) {
    let number = |known: Option<u32>| known.map_or("-1".to_owned(), |node| node.to_string());
    for gpu in &machine.gpus {
        let device = device(&gpu.path);
        let known = gpu.numa.filter(|_| !failures.numa_unknown.contains(&gpu.index));
        tree.file(&format!("{device}/numa_node"), &number(known));
        let width = failures.gpu_width.get(&gpu.index).unwrap_or(&gpu.kind.pcie[1]);
        link(tree, &device, gpu.kind.idle_generation.unwrap_or(gpu.kind.pcie[0]), *width, gpu.kind.pcie);
    }
    for port in &machine.ports {
        let device = device(&port.path);
        tree.file(&format!("{device}/numa_node"), &number(port.numa));
        let width = failures.nic_width.get(&port.name).unwrap_or(&port.kind.pcie[1]);
        link(tree, &device, port.kind.pcie[0], *width, port.kind.pcie);
    }
}

fn device(path: &[String]) -> String {
    format!("sys/devices/{}", path.join("/"))
}

fn link(tree: &Tree, device: &str, generation: u32, width: u32, max: [u32; 2]) {
    let speed = |generation: u32| {
        let rate = ["2.5", "5.0", "8.0", "16.0", "32.0", "64.0"][generation.clamp(1, 6) as usize - 1];
        format!("{rate} GT/s PCIe")
    };
    tree.file(&format!("{device}/current_link_speed"), &speed(generation));
    tree.file(&format!("{device}/max_link_speed"), &speed(max[0]));
    tree.file(&format!("{device}/current_link_width"), &width.to_string());
    tree.file(&format!("{device}/max_link_width"), &max[1].to_string());
}

fn cpus(machine: &Machine, tree: &Tree) {
    let with_cpus = machine.nodes.values().filter(|(cpus, _)| !cpus.is_empty()).count();
    let per_socket = (with_cpus / machine.scene.sockets.max(1) as usize).max(1);
    let socket_of = |id: u32| {
        let before = machine.nodes.iter().filter(|(other, (cpus, _))| **other < id && !cpus.is_empty()).count();
        before / per_socket
    };
    let mut online = Vec::new();
    for (id, (cpus, gib)) in &machine.nodes {
        let distance = |other: &u32| match (other == id, socket_of(*other) == socket_of(*id)) {
            (true, _) => "10",
            (false, true) => "12",
            (false, false) => "21",
        };
        let distances: Vec<&str> = machine.nodes.keys().map(distance).collect();
        tree.node(*id, &cpus.to_string(), gib << 20, &distances.join(" "));
        let list: Vec<u32> = cpus.iter().collect();
        // In two ranges of equal length, the second has the second thread of each core.
        let half = list.len() / 2;
        let has_threads = half > 0 && list[half] != list[half - 1] + 1;
        for (position, cpu) in list.iter().enumerate() {
            let siblings = match has_threads {
                true => CpuList::new([list[position % half], list[position % half + half]]),
                false => CpuList::new([*cpu]),
            };
            tree.cpu(*cpu, socket_of(*id) as u32, &siblings, cpus);
        }
        online.extend(list);
    }
    let online = CpuList::new(online);
    tree.file("sys/devices/system/cpu/online", &online.to_string());
    tree.file("proc/thread-self/status", &format!("Cpus_allowed_list:\t{online}"));
    let [vendor, model] = &machine.scene.cpu;
    tree.file("proc/cpuinfo", &format!("processor\t: 0\nvendor_id\t: {vendor}\nmodel name\t: {model}"));
    let gib: u64 = machine.nodes.values().map(|(_, gib)| gib).sum();
    tree.file("proc/meminfo", &format!("MemTotal:       {} kB", gib << 20));
}

fn host(machine: &Machine, tree: &Tree) {
    let scene = &machine.scene;
    tree.file("proc/sys/kernel/osrelease", &scene.kernel);
    tree.file("proc/sys/kernel/arch", &scene.architecture);
    tree.file("proc/sys/kernel/hostname", "scene");
    tree.file("proc/sys/kernel/random/boot_id", "3f2a0a8e-0000-4000-8000-000000000000");
    tree.file("proc/self/cgroup", "0::/");
    tree.file(
        "proc/self/limits",
        "Max stack size            8388608              unlimited            bytes\n\
         Max open files            1048576              1048576              files\n\
         Max locked memory         unlimited            unlimited            bytes",
    );
    tree.file(
        "proc/net/route",
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n\
         eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0",
    );
    if let Some(driver) = &scene.driver {
        let kind = match scene.driver_module {
            DriverModule::Open => "NVIDIA UNIX Open Kernel Module for",
            DriverModule::Proprietary => "NVIDIA UNIX",
        };
        let line = format!("NVRM version: {kind} {}  {driver}  Release Build", scene.architecture);
        tree.file("proc/driver/nvidia/version", &line);
        tree.file("dev/nvidiactl", "");
        tree.file("dev/nvidia-uvm", "");
        for (minor, gpu) in machine.gpus.iter().enumerate() {
            let bus_id = gpu.path.last().expect("a GPU has a place");
            tree.file(&format!("proc/driver/nvidia/gpus/{bus_id}/information"), &format!("Device Minor: \t {minor}"));
            tree.file(&format!("dev/nvidia{minor}"), "");
        }
    }
    tree.file("sys/module/kernel/parameters/panic", "0");
    for module in &scene.modules {
        tree.file(&format!("sys/module/{module}/refcnt"), "0");
    }
    for channel in 0..scene.imex_channels {
        tree.file(&format!("dev/nvidia-caps-imex-channels/channel{channel}"), "");
    }
    // The one device that every machine has: the interface of the default route.
    let lan = tree.pci("pci0000:00/0000:00:1e.0", "0x8086", "0x020000", "0");
    tree.interface("eth0", Some(&lan), "up", Some("25000"));
}

fn devices(machine: &Machine, tree: &Tree) {
    let gpus = machine.gpus.iter().map(|gpu| (&gpu.path, "0x10de", "0x030200"));
    let switches = machine.nvswitches.iter().map(|path| (path, "0x10de", "0x068000"));
    let ports = machine.ports.iter().map(|port| {
        let class = if port.kind.layer == "InfiniBand" { "0x020700" } else { "0x020000" };
        (&port.path, "0x15b3", class)
    });
    let mut bridges = BTreeSet::new();
    for (path, vendor, class) in gpus.chain(switches).chain(ports) {
        bridges.extend((2..path.len()).map(|length| path[..length].join("/")));
        tree.pci(&path.join("/"), vendor, class, "-1");
    }
    for bridge in bridges {
        tree.pci(&bridge, "0x1000", "0x060400", "-1");
    }
}

fn rdma(port: &Port, number: usize, tree: &Tree) {
    let (device, name) = (device(&port.path), &port.name);
    let rate = format!("{} Gb/sec (4X)", port.kind.gbps);
    tree.rdma(name, &device, 1, &port.kind.layer, "4: ACTIVE", &rate);
    let base = format!("sys/class/infiniband/{name}");
    tree.file(&format!("{base}/node_guid"), &format!("a088:c203:00ab:{number:04x}"));
    tree.file(&format!("{base}/fw_ver"), "28.39.1002");
    for counter in ["counters/link_downed", "counters/symbol_error", "hw_counters/packet_seq_err"] {
        tree.file(&format!("{base}/ports/1/{counter}"), "0");
    }
    tree.file(&format!("sys/class/infiniband_verbs/uverbs{number}/ibdev"), name);
    tree.file(&format!("dev/infiniband/uverbs{number}"), "");
    tree.file("dev/infiniband/rdma_cm", "");
    gids(port, number, tree);
    if port.kind.layer == "Ethernet" {
        let interface = format!("net_{name}");
        let speed = (port.kind.gbps * 1000).to_string();
        tree.interface(&interface, Some(&device), "up", Some(&speed));
        tree.file(&format!("sys/class/net/{interface}/mtu"), "9000");
    }
    match &port.function_of {
        Some(physical) => tree.link(&format!("{device}/physfn"), &format!("sys/bus/pci/devices/{physical}")),
        None => {
            tree.file(&format!("{device}/sriov_totalvfs"), "16");
            tree.file(&format!("{device}/sriov_numvfs"), &port.kind.functions.to_string());
        }
    }
}

/// Fills a port's GID table as the kernel does: for Ethernet, every address in both types,
/// link-local first.
fn gids(port: &Port, number: usize, tree: &Tree) {
    let base = format!("sys/class/infiniband/{}/ports/1", port.name);
    let local = format!("fe80:0000:0000:0000:a288:c2ff:fe03:{number:04x}");
    let mut table = Vec::new();
    if port.kind.layer == "InfiniBand" {
        table.push((local, "IB/RoCE v1"));
    } else {
        let addresses = (0..port.kind.addresses)
            .map(|address| format!("0000:0000:0000:0000:0000:ffff:0a{:02x}:{:04x}", address + 1, number + 1));
        for gid in std::iter::once(local).chain(addresses) {
            table.extend([(gid.clone(), "IB/RoCE v1"), (gid, "RoCE v2")]);
        }
    }
    for place in 0..GID_ENTRIES {
        let (gid, kind) = match table.get(place as usize) {
            Some((gid, kind)) => (gid.as_str(), Some(*kind)),
            // The kernel returns EINVAL for the type of an empty entry; here the file is missing.
            None => ("0000:0000:0000:0000:0000:0000:0000:0000", None),
        };
        tree.file(&format!("{base}/gids/{place}"), gid);
        if let Some(kind) = kind {
            tree.file(&format!("{base}/gid_attrs/types/{place}"), kind);
        }
    }
}
