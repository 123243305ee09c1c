//! PCI addresses, the path from the root complex to a device, and NVIDIA devices on the bus.

use crate::read;
use std::io;
use std::path::Path;
use switchyard_crds::gpu_topology::PcieLink;

/// Converts a PCI address from any format in use to the format of sysfs (`0000:1b:00.0`). NVML's
/// has a domain of eight upper-case digits, and domains can need more than four digits (VMD).
/// `None` for anything else.
pub fn bus_id(text: &str) -> Option<String> {
    let text = text.trim();
    let (head, function) = text.rsplit_once('.')?;
    let (head, device) = head.rsplit_once(':')?;
    let (domain, bus) = head.rsplit_once(':').unwrap_or(("0", head));
    let hex = |text: &str, digits: usize| {
        (!text.is_empty() && text.len() <= digits && text.bytes().all(|byte| byte.is_ascii_hexdigit()))
            .then(|| u32::from_str_radix(text, 16).ok())
            .flatten()
    };
    let (domain, bus, device, function) = (hex(domain, 8)?, hex(bus, 2)?, hex(device, 2)?, hex(function, 1)?);
    Some(format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}"))
}

/// The path to a PCI device, from the canonical path of its directory or of a directory below it:
/// `pci0000:17`, the bridges, the device. `None` if there is no PCI device on the path.
pub fn path_of(canonical: &str) -> Option<Vec<String>> {
    let mut names = canonical.split('/').skip_while(|name| !is_root_complex(name));
    let mut path = vec![names.next()?.to_owned()];
    path.extend(names.take_while(|name| bus_id(name).as_deref() == Some(name)).map(str::to_owned));
    (path.len() > 1).then_some(path)
}

fn is_root_complex(name: &str) -> bool {
    name.strip_prefix("pci")
        .and_then(|rest| rest.split_once(':'))
        .is_some_and(|(domain, bus)| u32::from_str_radix(domain, 16).is_ok() && u8::from_str_radix(bus, 16).is_ok())
}

/// Position of a device on the PCI bus.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PciPosition {
    pub bus_id: Option<String>,
    /// The path from the root complex; the device is last.
    pub path: Vec<String>,
    /// `None` if the kernel does not know it.
    pub numa_node: Option<u32>,
    /// The link to the next bridge; `None` if the kernel does not know it.
    pub link: Option<PcieLink>,
}

/// The position of the PCI device that `link` points to, directly or through a child: a virtio
/// device is below its PCI function.
pub(crate) fn position(link: &Path) -> io::Result<PciPosition> {
    let canonical = link.canonicalize()?;
    let Some(path) = canonical.to_str().and_then(path_of) else {
        return Ok(PciPosition { numa_node: read::number_in(&canonical.join("numa_node")), ..PciPosition::default() });
    };
    let device = path.last().cloned();
    let directory = canonical.ancestors().find(|ancestor| {
        ancestor.file_name().is_some_and(|name| device.as_deref().is_some_and(|device| name == device))
    });
    Ok(PciPosition {
        numa_node: directory.and_then(|directory| read::number_in(&directory.join("numa_node"))),
        link: directory.and_then(read_link),
        bus_id: device,
        path,
    })
}

/// The link above a device. Its maximum is the lower of both ends: an x16 card in an x8 slot has 8
/// lanes.
fn read_link(directory: &Path) -> Option<PcieLink> {
    let generation = |directory: &Path, file: &str| generation(&read::text(&directory.join(file)).ok()?);
    // The kernel writes 0 or 255 for an unknown link.
    let width =
        |directory: &Path, file| read::number_in(&directory.join(file)).filter(|lanes| (1..=32).contains(lanes));
    let port = directory.parent();
    let lower = |own: Option<u32>, other: Option<u32>| own.map(|own| other.map_or(own, |other| own.min(other)));
    let link = PcieLink {
        generation: generation(directory, "current_link_speed"),
        max_generation: lower(
            generation(directory, "max_link_speed"),
            port.and_then(|port| generation(port, "max_link_speed")),
        ),
        width: width(directory, "current_link_width"),
        max_width: lower(width(directory, "max_link_width"), port.and_then(|port| width(port, "max_link_width"))),
    };
    (link != PcieLink::default()).then_some(link)
}

/// PCIe generation from a lane rate in the format of sysfs (`32.0 GT/s PCIe`).
pub fn generation(speed: &str) -> Option<u32> {
    let rates = ["2.5", "5.0", "8.0", "16.0", "32.0", "64.0"];
    let rate = speed.trim().split_once(" GT/s")?.0;
    rates.iter().position(|known| known.trim_end_matches(".0") == rate.trim_end_matches(".0")).map(|at| at as u32 + 1)
}

/// A PCI function, read from its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Function {
    bus_id: String,
    vendor: String,
    class: String,
}

/// All functions on the PCI bus, whether or not a driver is loaded. Empty for a kernel without PCI.
pub(crate) fn functions(sysfs: &Path) -> io::Result<Vec<Function>> {
    let devices = match read::entries(&sysfs.join("bus/pci/devices")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && sysfs.join("bus").is_dir() => return Ok(Vec::new()),
        other => other?,
    };
    let file = |path: &Path, name: &str| read::text(&path.join(name)).unwrap_or_default().to_ascii_lowercase();
    let function = |(bus_id, path): (String, std::path::PathBuf)| {
        let vendor = file(&path, "vendor");
        // Only NVIDIA's class matters, so the files of other vendors need not be opened.
        let class = if vendor.starts_with(NVIDIA) { file(&path, "class") } else { String::new() };
        Function { bus_id, vendor, class }
    };
    Ok(devices.into_iter().map(function).collect())
}

/// PCI vendor of GPUs and NVSwitches.
const NVIDIA: &str = "0x10de";

fn of_class(functions: &[Function], class: &str) -> Vec<String> {
    let wanted = |function: &&Function| function.vendor.starts_with(NVIDIA) && function.class.starts_with(class);
    functions.iter().filter(wanted).map(|function| function.bus_id.clone()).collect()
}

/// Number of NVIDIA display controllers on the PCI bus, whether or not a driver is loaded. 0 for a
/// kernel without PCI.
///
/// # Errors
/// The bus cannot be listed.
pub fn count_nvidia_gpus(sysfs: &Path) -> io::Result<usize> {
    functions(sysfs).map(|functions| nvidia_gpus(&functions).len())
}

/// PCI addresses of NVIDIA display controllers.
pub(crate) fn nvidia_gpus(functions: &[Function]) -> Vec<String> {
    of_class(functions, "0x03")
}

/// Number of NVSwitches: bridges of class "other".
pub(crate) fn nvswitches(functions: &[Function]) -> usize {
    of_class(functions, "0x0680").len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_in_every_form() {
        for (text, expected) in [
            ("00000000:1B:00.0", Some("0000:1b:00.0")),
            ("0000:1b:00.0", Some("0000:1b:00.0")),
            ("1b:00.1", Some("0000:1b:00.1")),
            ("00010000:E1:00.0", Some("10000:e1:00.0")),
            ("virtio0", None),
            ("0000:1b:00", None),
            ("0000:1bb:00.0", None),
            ("", None),
        ] {
            assert_eq!(bus_id(text).as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn generations() {
        let of = |text| generation(text);
        assert_eq!([of("2.5 GT/s PCIe"), of("8 GT/s"), of("8.0 GT/s PCIe")], [Some(1), Some(3), Some(3)]);
        assert_eq!([of("32.0 GT/s PCIe"), of("64.0 GT/s PCIe")], [Some(5), Some(6)]);
        assert_eq!([of("Unknown"), of(""), of("7 GT/s")], [None, None, None]);
    }

    #[test]
    fn paths_end_at_the_last_pci_function() {
        let path = path_of("/sys/devices/pci0000:00/0000:00:03.0/virtio0").expect("a PCI device");
        assert_eq!(path, ["pci0000:00", "0000:00:03.0"]);
        let path = path_of("/sys/devices/pci10000:e0/10000:e0:01.0/10000:e1:00.0").expect("a PCI device");
        assert_eq!(path.len(), 3);
        assert_eq!(path_of("/sys/devices/virtual/net/lo"), None);
        assert_eq!(path_of("/sys/devices/pci0000:00"), None);
    }
}
