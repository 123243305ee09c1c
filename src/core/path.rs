//! How far apart two PCIe devices of a machine are, in the words of `nvidia-smi topo`.

/// Where two PCIe devices meet, nearest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PathClass {
    /// The same device.
    Same,
    /// Inside one PCIe switch, or on one board.
    Pix,
    /// Over several PCIe switches, without a host bridge.
    Pxb,
    /// At a host bridge: the two are on different ports of one root complex.
    Phb,
    /// At different root complexes of one NUMA node.
    Node,
    /// In different NUMA nodes.
    Sys,
}

impl PathClass {
    /// The word that `nvidia-smi topo` prints.
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

    /// The class of a word that `nvidia-smi topo` prints.
    pub fn from_word(word: &str) -> Option<PathClass> {
        use PathClass::{Node, Phb, Pix, Pxb, Same, Sys};
        [Same, Pix, Pxb, Phb, Node, Sys].into_iter().find(|class| class.word() == word)
    }

    /// What the word means.
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

/// The class of the path between two devices.
///
/// A path is what sysfs shows: the root complex (`pci0000:17`), a root port, for every switch on the way its upstream and its downstream port,
/// and the device. A switch is thus two elements. An empty path is an unknown one: then the NUMA nodes alone decide. An unknown NUMA node equals
/// no other: unless the paths say otherwise, the result is the farthest class, [`PathClass::Sys`]. On a machine with a single NUMA node the
/// caller should pass its number.
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
        // Only the root complex is shared.
        1 => PathClass::Phb,
        // What is left of each path is the device and at most the downstream port of the switch where they meet.
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
    fn unknown_is_far_unless_the_paths_say_otherwise() {
        let (a, b) = ("pci0000:17 17:01.0 18:00.0", "pci0000:80 80:00.0 81:00.0");
        assert_eq!(class(a, b, (None, None)), PathClass::Sys);
        assert_eq!(class(a, "pci0000:17 17:02.0 19:00.0", (None, None)), PathClass::Phb);
        assert_eq!(class("", "", (Some(0), Some(0))), PathClass::Node);
        assert_eq!(class("", a, (None, Some(0))), PathClass::Sys);
    }

    #[test]
    fn nearer_is_less() {
        assert!(
            PathClass::Pix < PathClass::Pxb && PathClass::Phb < PathClass::Node && PathClass::Node < PathClass::Sys
        );
    }
}
