//! The host: identity, kernel, modules, limits, default route.

use crate::Roots;
use crate::rdma;
use crate::read::{self, Notes};
use std::path::Path;
use switchyard_crds::gpu_topology::{CharDevice, DmaBuf, DriverModule, Host, HostIdentity, ModuleState};

/// Magic number of tmpfs, see statfs(2): `/dev/shm` on another file system says nothing about
/// shared memory.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// A soft limit from `/proc/self/limits`, by its name in that file (`Max locked memory`):
/// `Unlimited` or a number.
///
/// # Errors
/// The file has no such line.
pub fn parse_limit(limits: &str, name: &str) -> Result<String, String> {
    let rest = limits.lines().find_map(|line| line.strip_prefix(name));
    match rest.and_then(|rest| rest.split_whitespace().next()) {
        Some("unlimited") => Ok("Unlimited".to_owned()),
        Some(number) if number.parse::<u64>().is_ok() => Ok(number.to_owned()),
        _ => Err(format!("no line `{name} LIMIT`")),
    }
}

/// The N of a GPU's `/dev/nvidiaN`, from `/proc/driver/nvidia/gpus/BDF/information`.
pub fn parse_minor(text: &str) -> Option<u32> {
    read::number(text.lines().find_map(|line| line.strip_prefix("Device Minor:"))?)
}

/// Interface of the default route with the lowest metric, from `/proc/net/route`.
pub fn parse_default_route(text: &str) -> Option<String> {
    const UP: u32 = 1;
    let routes = text.lines().skip(1).filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let hex = |index: usize| u32::from_str_radix(fields.get(index)?, 16).ok();
        let is_default = hex(1)? == 0 && hex(7)? == 0 && hex(3)? & UP != 0;
        is_default.then_some((fields.get(6)?.parse::<u32>().ok()?, (*fields.first()?).to_owned()))
    });
    routes.min_by_key(|(metric, _)| *metric).map(|(_, interface)| interface)
}

/// Interface of the default route with the lowest metric, from `/proc/net/ipv6_route`.
pub fn parse_default_route_v6(text: &str) -> Option<String> {
    const UP: u32 = 1;
    const REJECT: u32 = 0x200;
    let routes = text.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let hex = |index: usize| u32::from_str_radix(fields.get(index)?, 16).ok();
        let destination = fields.first()?;
        let flags = hex(8)?;
        let interface = (*fields.get(9)?).to_owned();
        let is_default = destination.bytes().all(|byte| byte == b'0') && hex(1)? == 0;
        (is_default && flags & UP != 0 && flags & REJECT == 0 && interface != "lo").then_some((hex(5)?, interface))
    });
    routes.min_by_key(|(metric, _)| *metric).map(|(_, interface)| interface)
}

/// Kind of the NVIDIA module from `/proc/driver/nvidia/version`.
pub fn parse_driver_module(text: &str) -> Option<DriverModule> {
    let line = text.lines().find(|line| line.starts_with("NVRM version:"))?;
    // The open-source module identifies itself since driver 515.
    Some(if line.contains("Open Kernel Module") { DriverModule::Open } else { DriverModule::Proprietary })
}

/// Whether DMA-BUF between GPU and NIC can be expected, from its two requirements.
pub fn dma_buf(module: DriverModule, kernel: &str) -> Option<DmaBuf> {
    let mut numbers = kernel.split(|letter: char| !letter.is_ascii_digit()).map(str::parse::<u32>);
    let version = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    Some(if module == DriverModule::Open && version >= (5, 12) { DmaBuf::Likely } else { DmaBuf::Unlikely })
}

/// The interface of the default route; `None` without one, as in a separate network namespace.
pub(crate) fn read_default_route(roots: &Roots) -> Option<String> {
    let file = |name: &str| read::text(&roots.procfs.join("net").join(name)).ok();
    file("route")
        .and_then(|text| parse_default_route(&text))
        .or_else(|| parse_default_route_v6(&file("ipv6_route")?))
        .map(|interface| read::clip(&interface, 32))
}

pub(crate) fn read_identity(roots: &Roots, notes: &mut Notes) -> Option<HostIdentity> {
    let kernel = roots.procfs.join("sys/kernel");
    let identity = HostIdentity {
        boot_id: notes.text(&kernel.join("random/boot_id")).map(|text| read::clip(&text, 64)),
        hostname: notes.text(&kernel.join("hostname")).map(|text| read::clip(&text, 253)),
    };
    (identity != HostIdentity::default()).then_some(identity)
}

pub(crate) fn read_host(roots: &Roots, default_route: Option<String>, notes: &mut Notes) -> Host {
    let kernel = notes.text(&roots.procfs.join("sys/kernel/osrelease")).map(|text| read::clip(&text, 128));
    let version = read::text(&roots.procfs.join("driver/nvidia/version")).ok();
    let driver_module = version.and_then(|text| parse_driver_module(&text));
    let limits = notes.text(&roots.procfs.join("self/limits"));
    let mut limit = |name: &str| {
        parse_limit(limits.as_deref()?, name).map_err(|error| notes.add(format!("self/limits: {error}"))).ok()
    };
    Host {
        dma_buf: driver_module.zip(kernel.as_deref()).and_then(|(module, kernel)| dma_buf(module, kernel)),
        peermem: driver_module.and_then(|_| peermem(roots)),
        driver_module,
        kernel,
        rdma_cm: roots.sysfs.join("class/infiniband").exists().then(|| rdma::char_device(roots, "infiniband/rdma_cm")),
        imex_channels: imex_channels(roots),
        locked_memory_limit: limit("Max locked memory"),
        open_files_limit: limit("Max open files"),
        stack_limit: limit("Max stack size"),
        device_files: driver_module.map(|_| device_files(roots)).unwrap_or_default(),
        shared_memory_bytes: shared_memory(&roots.dev.join("shm")).map_err(|error| notes.add(error)).ok(),
        default_route,
        ..Host::default()
    }
}

/// The device files that CUDA opens: the driver's control files, unified memory, and one per GPU
/// that the driver knows. The files for MIG and IMEX are read with their own facts.
fn device_files(roots: &Roots) -> Vec<CharDevice> {
    let gpus = read::entries(&roots.procfs.join("driver/nvidia/gpus")).unwrap_or_default();
    let mut minors: Vec<u32> =
        gpus.iter().filter_map(|(_, path)| parse_minor(&read::text(&path.join("information")).ok()?)).collect();
    minors.sort_unstable();
    minors.truncate(64);
    let names = ["nvidiactl", "nvidia-uvm"].into_iter().map(str::to_owned);
    names
        .chain(minors.iter().map(|minor| format!("nvidia{minor}")))
        .map(|name| rdma::char_device(roots, &name))
        .collect()
}

/// State of the driver's module, or of the legacy module that NIC vendors shipped.
fn peermem(roots: &Roots) -> Option<ModuleState> {
    let modules = roots.sysfs.join("module");
    let loaded = ["nvidia_peermem", "nv_peer_mem"].iter().any(|name| modules.join(name).exists());
    modules.is_dir().then_some(if loaded { ModuleState::Loaded } else { ModuleState::NotLoaded })
}

fn imex_channels(roots: &Roots) -> Vec<u32> {
    let files = read::entries(&roots.dev.join("nvidia-caps-imex-channels")).unwrap_or_default();
    let mut channels: Vec<u32> =
        files.iter().filter_map(|(name, _)| read::number(name.strip_prefix("channel")?)).collect();
    channels.sort_unstable();
    channels.truncate(2048);
    channels
}

/// Size in bytes of the tmpfs mounted at `path`.
///
/// # Errors
/// `path` is not a tmpfs mount.
pub fn shared_memory(path: &Path) -> Result<u64, String> {
    let size = rustix::fs::statfs(path).map_err(|error| error.to_string()).and_then(|stat| {
        let is_tmpfs = u64::try_from(stat.f_type).is_ok_and(|magic| magic == TMPFS_MAGIC);
        let size = u64::try_from(stat.f_bsize).ok().and_then(|block| block.checked_mul(stat.f_blocks));
        size.filter(|_| is_tmpfs).ok_or_else(|| "not a tmpfs".to_owned())
    });
    size.map_err(|error| format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units\n\
                      Max stack size            unlimited            unlimited            bytes\n\
                      Max open files            1024                 524288               files\n\
                      Max locked memory         8388608              unlimited            bytes\n";
        let of = |name: &str| parse_limit(limits, name);
        assert_eq!(of("Max locked memory").as_deref(), Ok("8388608"));
        assert_eq!(of("Max open files").as_deref(), Ok("1024"));
        assert_eq!(of("Max stack size").as_deref(), Ok("Unlimited"));
        assert!(of("Max nothing").is_err() && parse_limit("", "Max stack size").is_err());
    }

    #[test]
    fn numbers_of_device_files() {
        let text = "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 16\nDevice Minor: \t 3\nGPU Excluded:\t No\n";
        assert_eq!(parse_minor(text), Some(3));
        assert_eq!(parse_minor("Device Minor: many"), None);
        assert_eq!(parse_minor(""), None);
    }

    #[test]
    fn modules() {
        let open =
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\nGCC version: 12\n";
        let other = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08\n";
        assert_eq!(parse_driver_module(open), Some(DriverModule::Open));
        assert_eq!(parse_driver_module(other), Some(DriverModule::Proprietary));
        assert_eq!(parse_driver_module(""), None);
        assert_eq!(dma_buf(DriverModule::Open, "6.8.0-31-generic"), Some(DmaBuf::Likely));
        assert_eq!(dma_buf(DriverModule::Open, "5.4.0"), Some(DmaBuf::Unlikely));
        assert_eq!(dma_buf(DriverModule::Proprietary, "6.8.0"), Some(DmaBuf::Unlikely));
        assert_eq!(dma_buf(DriverModule::Open, "six"), None);
    }

    #[test]
    fn default_route_with_the_lowest_metric() {
        let header = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n";
        let routes = "eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n\
                      wlan0\t00000000\t010200C0\t0003\t0\t0\t600\t00000000\t0\t0\t0\n\
                      eth1\t00000000\t010200C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n\
                      down0\t00000000\t010200C0\t0002\t0\t0\t1\t00000000\t0\t0\t0\n";
        assert_eq!(parse_default_route(&format!("{header}{routes}")).as_deref(), Some("eth1"));
        assert_eq!(parse_default_route(header), None);
        assert_eq!(parse_default_route(""), None);
    }

    #[test]
    fn default_route_of_ipv6() {
        let zero = "0".repeat(32);
        let text = format!(
            "{zero} 00 {zero} 00 fe800000000000000000000000000001 00000400 00000001 00000000 00450003 eth0\n\
             {zero} 00 {zero} 00 {zero} ffffffff 00000001 00000000 00200200       lo\n"
        );
        assert_eq!(parse_default_route_v6(&text).as_deref(), Some("eth0"));
        assert_eq!(parse_default_route_v6("x"), None);
    }
}
