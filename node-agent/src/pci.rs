//! PCI addresses, the way from the root complex to a device, and NVIDIA devices on the bus.

use crate::read;
use std::io;
use std::path::Path;

/// A PCI address as sysfs writes it (`0000:1b:00.0`), from any of the forms in use: NVML has a domain of eight
/// upper-case digits. Domains may need more than four digits (VMD). `None` for anything else.
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

/// The way to a PCI device from the canonical path of its directory, or of a directory below it:
/// `pci0000:17`, the bridges, the device. `None` when there is no PCI device on the path.
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

/// Where a device sits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Place {
    /// PCI address.
    pub bus_id: Option<String>,
    /// The way from the root complex, the device last.
    pub path: Vec<String>,
    /// NUMA node; `None` when the kernel does not know.
    pub numa_node: Option<u32>,
}

/// The place of the PCI device that `link` points to or lies below (a virtio device lies below its PCI function).
pub(crate) fn place(link: &Path) -> io::Result<Place> {
    let canonical = link.canonicalize()?;
    let Some(path) = canonical.to_str().and_then(path_of) else {
        return Ok(Place { numa_node: read::number_in(&canonical.join("numa_node")), ..Place::default() });
    };
    let device = path.last().cloned();
    let directory = canonical.ancestors().find(|ancestor| {
        ancestor.file_name().is_some_and(|name| device.as_deref().is_some_and(|device| name == device))
    });
    Ok(Place {
        numa_node: directory.and_then(|directory| read::number_in(&directory.join("numa_node"))),
        bus_id: device,
        path,
    })
}

/// How many NVIDIA display controllers are on the PCI bus, whether or not a driver is loaded. A kernel without PCI has
/// none.
pub fn nvidia_gpus(sysfs: &Path) -> io::Result<usize> {
    let devices = match read::entries(&sysfs.join("bus/pci/devices")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && sysfs.join("bus").is_dir() => return Ok(0),
        other => other?,
    };
    let is = |path: &Path, file: &str, start: &str| {
        read::text(&path.join(file)).is_ok_and(|text| text.to_ascii_lowercase().starts_with(start))
    };
    Ok(devices.iter().filter(|(_, path)| is(path, "vendor", "0x10de") && is(path, "class", "0x03")).count())
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
    fn paths_end_at_the_last_pci_function() {
        let path = path_of("/sys/devices/pci0000:00/0000:00:03.0/virtio0").expect("a PCI device");
        assert_eq!(path, ["pci0000:00", "0000:00:03.0"]);
        let path = path_of("/sys/devices/pci10000:e0/10000:e0:01.0/10000:e1:00.0").expect("a PCI device");
        assert_eq!(path.len(), 3);
        assert_eq!(path_of("/sys/devices/virtual/net/lo"), None);
        assert_eq!(path_of("/sys/devices/pci0000:00"), None);
    }
}
