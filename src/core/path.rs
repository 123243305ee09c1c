//! Path classes between the PCIe devices of a machine, as `nvidia-smi topo` names them.

/// Where the paths of two PCIe devices meet, nearest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PathClass {
    /// The same device.
    Same,
    /// Within one PCIe switch, or on one board.
    Pix,
    /// Across several PCIe switches, without a host bridge.
    Pxb,
    /// Across a host bridge: the two are on different ports of one root complex.
    Phb,
    /// In different root complexes of one NUMA node.
    Node,
    /// In different NUMA nodes.
    Sys,
}

impl PathClass {
    /// Name that `nvidia-smi topo` prints.
    pub fn word(self) -> &'static str {
        match self {
            PathClass::Same => "X",
            PathClass::Pix => "PIX",
            PathClass::Pxb => "PXB",
            PathClass::Phb => "PHB",
            PathClass::Node => "NODE",
            PathClass::Sys => "SYS",
        }
    }

    /// Parses a name that `nvidia-smi topo` prints.
    pub fn from_word(word: &str) -> Option<PathClass> {
        use PathClass::{Node, Phb, Pix, Pxb, Same, Sys};
        [Same, Pix, Pxb, Phb, Node, Sys].into_iter().find(|class| class.word() == word)
    }

    /// Short description of the class.
    pub fn meaning(self) -> &'static str {
        match self {
            PathClass::Same => "itself",
            PathClass::Pix => "same PCIe switch",
            PathClass::Pxb => "several PCIe switches",
            PathClass::Phb => "host bridge",
            PathClass::Node => "same NUMA node",
            PathClass::Sys => "across NUMA nodes",
        }
    }
}

/// Returns the class of the path between two devices.
///
/// A path is what sysfs shows: the root complex (`pci0000:17`), a root port, the upstream and the
/// downstream port of every switch along the path, and the device. A switch is therefore two
/// elements. An empty path is unknown, and only the NUMA nodes decide. An unknown NUMA node matches
/// no other, so unless the paths say otherwise the result is the farthest class,
/// [`PathClass::Sys`]. On a machine with a single NUMA node, callers should pass its number.
///
/// ```
/// use switchyard_core::path::{PathClass, path_class};
/// let gpu = ["pci0000:17", "0000:17:01.0", "0000:18:00.0", "0000:19:00.0", "0000:1a:00.0"];
/// let nic = ["pci0000:17", "0000:17:01.0", "0000:18:00.0", "0000:19:01.0", "0000:1b:00.0"];
/// assert_eq!(path_class(&gpu, &nic, Some(0), Some(0)), PathClass::Pix);
/// ```
pub fn path_class<S: AsRef<str>>(a: &[S], b: &[S], numa_a: Option<u32>, numa_b: Option<u32>) -> PathClass {
    let common = a.iter().zip(b).take_while(|(x, y)| x.as_ref() == y.as_ref()).count();
    let (rest_a, rest_b) = (a.len() - common, b.len() - common);
    match common {
        0 if numa_a.is_some() && numa_a == numa_b => PathClass::Node,
        0 => PathClass::Sys,
        _ if rest_a == 0 && rest_b == 0 => PathClass::Same,
        // The paths share only the root complex.
        1 => PathClass::Phb,
        // What remains of each path is the device and at most the downstream port of the switch
        // where they meet.
        _ if rest_a <= 2 && rest_b <= 2 => PathClass::Pix,
        _ => PathClass::Pxb,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class(a: &str, b: &str, numa: (Option<u32>, Option<u32>)) -> PathClass {
        let split = |path: &str| path.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let (a, b) = (split(a), split(b));
        let forth = path_class(&a, &b, numa.0, numa.1);
        assert_eq!(forth, path_class(&b, &a, numa.1, numa.0), "the same both ways");
        forth
    }

    #[test]
    fn every_class() {
        let same_node = (Some(0), Some(0));
        let device = "pci0000:17 17:01.0 18:00.0 19:00.0 1a:00.0";
        assert_eq!(class(device, device, same_node), PathClass::Same);
        assert_eq!(class(device, "pci0000:17 17:01.0 18:00.0 19:01.0 1b:00.0", same_node), PathClass::Pix);
        // Two functions of one card.
        assert_eq!(class(device, "pci0000:17 17:01.0 18:00.0 19:00.0 1a:00.1", same_node), PathClass::Pix);
        assert_eq!(class("pci0000:17 17:01.0 18:00.0", "pci0000:17 17:01.0 18:00.1", same_node), PathClass::Pix);
        // Behind a second switch below the first.
        let cascade = "pci0000:17 17:01.0 18:00.0 19:02.0 20:00.0 21:00.0 22:00.0";
        assert_eq!(class(device, cascade, same_node), PathClass::Pxb);
        assert_eq!(class(device, "pci0000:17 17:02.0 30:00.0", same_node), PathClass::Phb);
        assert_eq!(class(device, "pci0000:3a 3a:00.0 3b:00.0", same_node), PathClass::Node);
        assert_eq!(class(device, "pci0000:80 80:00.0 81:00.0", (Some(0), Some(1))), PathClass::Sys);
    }

    #[test]
    fn unknown_is_far_unless_paths_say_otherwise() {
        let (a, b) = ("pci0000:17 17:01.0 18:00.0", "pci0000:80 80:00.0 81:00.0");
        assert_eq!(class(a, b, (None, None)), PathClass::Sys);
        assert_eq!(class(a, "pci0000:17 17:02.0 19:00.0", (None, None)), PathClass::Phb);
        assert_eq!(class("", "", (Some(0), Some(0))), PathClass::Node);
        assert_eq!(class("", a, (None, Some(0))), PathClass::Sys);
    }

    #[test]
    fn nearer_orders_first() {
        assert!(
            PathClass::Pix < PathClass::Pxb && PathClass::Phb < PathClass::Node && PathClass::Node < PathClass::Sys
        );
    }
}
