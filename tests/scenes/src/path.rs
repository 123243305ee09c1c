//! Short form of PCI paths.

/// Expands to the path that sysfs shows: root complex, bridges, device.
///
/// `15/01.0/16:00.0/17:02.0/1b:00.0` is short for `pci0000:15`, `0000:15:01.0`, `0000:16:00.0`, …
/// The domain is the root's (`0008:00/…`), and so is the bus of an element without one. `None` if
/// it is not a valid path.
pub(crate) fn expand(short: &str) -> Option<Vec<String>> {
    let mut parts = short.split('/');
    let root = parts.next()?;
    let (domain, bus) = root.split_once(':').unwrap_or(("0000", root));
    let is_hex = |text: &str, digits: std::ops::RangeInclusive<usize>| {
        digits.contains(&text.len())
            && text.bytes().all(|digit| digit.is_ascii_hexdigit() && !digit.is_ascii_uppercase())
    };
    if !is_hex(domain, 4..=8) || !is_hex(bus, 2..=2) {
        return None;
    }
    let mut path = vec![format!("pci{domain}:{bus}")];
    for part in parts {
        let (own, slot) = part.split_once(':').unwrap_or((bus, part));
        let (device, function) = slot.split_once('.')?;
        if !is_hex(own, 2..=2) || !is_hex(device, 2..=2) || !is_hex(function, 1..=1) {
            return None;
        }
        path.push(format!("{domain}:{own}:{slot}"));
    }
    (path.len() > 1).then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_paths() {
        let path = expand("15/01.0/16:00.0/1b:00.0").unwrap();
        assert_eq!(path, ["pci0000:15", "0000:15:01.0", "0000:16:00.0", "0000:1b:00.0"]);
        assert_eq!(expand("10000:e0/06.0").unwrap(), ["pci10000:e0", "10000:e0:06.0"]);
        for wrong in ["", "15", "15/01", "15/1b:00", "1G/01.0", "15/1B:00.0", "15//01.0"] {
            assert_eq!(expand(wrong), None, "{wrong}");
        }
    }
}
