//! Writes sysfs, procfs and dev trees into a temporary folder.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use switchyard_worker_contract::CpuList;

/// A folder with `sys`, `proc` and `dev`. Paths passed to its methods begin with one of them.
///
/// Every method panics if a file cannot be written, because a test cannot continue without its
/// machine.
#[derive(Debug)]
pub struct Tree {
    folder: tempfile::TempDir,
}

impl Tree {
    /// Creates empty trees.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        let tree = Self { folder: tempfile::tempdir().expect("a temporary directory") };
        for root in ["sys", "proc", "dev"] {
            fs::create_dir(tree.path(root)).expect("a new directory");
        }
        tree
    }

    /// Resolves a path in the folder.
    pub fn path(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    /// Writes a file of one or more lines, replacing an existing one.
    pub fn file(&self, path: &str, text: &str) {
        let path = self.path(path);
        let text = format!("{text}\n");
        // Most folders exist already: a machine has thousands of files.
        if fs::write(&path, &text).is_err() {
            fs::create_dir_all(path.parent().expect("a file has a directory")).expect("a directory");
            fs::write(&path, text).expect("a file");
        }
    }

    /// Creates a symlink from `path` to `target`, both below the folder. It is relative, like the
    /// kernel's, so a tree can be mounted anywhere.
    pub fn link(&self, path: &str, target: &str) {
        let up = "../".repeat(path.matches('/').count());
        let path = self.path(path);
        fs::create_dir_all(path.parent().expect("a link has a directory")).expect("a directory");
        symlink(format!("{up}{target}"), path).expect("a link");
    }

    /// Writes one CPU, whose core has L1d, L1i and L2 and whose socket has an L3. The second thread
    /// of a core is a link to the first, because everything written here belongs to the core; the
    /// same applies to the L3 of the socket's first CPU.
    pub fn cpu(&self, cpu: u32, socket: u32, siblings: &CpuList, socket_cpus: &CpuList) {
        let folder = |cpu: u32| format!("sys/devices/system/cpu/cpu{cpu}");
        let base = folder(cpu);
        if let Some(first) = siblings.first().filter(|first| *first != cpu) {
            return self.link(&base, &folder(first));
        }
        self.file(&format!("{base}/topology/physical_package_id"), &socket.to_string());
        self.file(&format!("{base}/topology/core_cpus_list"), &siblings.to_string());
        for (index, level, kind, size, shared) in [
            (0, 1, "Data", "48K", siblings),
            (1, 1, "Instruction", "32K", siblings),
            (2, 2, "Unified", "2M", siblings),
            (3, 3, "Unified", "105M", socket_cpus),
        ] {
            let cache = format!("{base}/cache/index{index}");
            if let Some(first) = shared.first().filter(|first| *first != cpu) {
                self.link(&cache, &format!("{}/cache/index{index}", folder(first)));
                continue;
            }
            self.file(&format!("{cache}/level"), &level.to_string());
            self.file(&format!("{cache}/type"), kind);
            self.file(&format!("{cache}/size"), size);
            self.file(&format!("{cache}/shared_cpu_list"), &shared.to_string());
        }
    }

    /// Writes a NUMA node with CPUs, memory in KiB, and distances.
    pub fn node(&self, id: u32, cpus: &str, kib: u64, distances: &str) {
        let base = format!("sys/devices/system/node/node{id}");
        self.file(&format!("{base}/cpulist"), cpus);
        self.file(&format!("{base}/meminfo"), &format!("Node {id} MemTotal:       {kib} kB\nNode {id} MemFree: 1 kB"));
        self.file(&format!("{base}/distance"), distances);
    }

    /// Writes a PCI function at `path` (`pci0000:17/0000:17:01.0/0000:18:00.0`) with its link in
    /// `bus/pci/devices`.
    pub fn pci(&self, path: &str, vendor: &str, class: &str, numa: &str) -> String {
        let device = format!("sys/devices/{path}");
        self.file(&format!("{device}/vendor"), vendor);
        self.file(&format!("{device}/class"), class);
        self.file(&format!("{device}/numa_node"), numa);
        let name = Path::new(path).file_name().and_then(|name| name.to_str()).expect("a name");
        self.link(&format!("sys/bus/pci/devices/{name}"), &device);
        device
    }

    /// Writes a network interface with the path of its device.
    pub fn interface(&self, name: &str, device: Option<&str>, operstate: &str, speed: Option<&str>) {
        let base = format!("sys/class/net/{name}");
        self.file(&format!("{base}/operstate"), operstate);
        if let Some(speed) = speed {
            self.file(&format!("{base}/speed"), speed);
        }
        if let Some(device) = device {
            self.link(&format!("{base}/device"), device);
        }
    }

    /// Writes a port of an RDMA device at a PCI function.
    pub fn rdma(&self, name: &str, device: &str, port: u32, layer: &str, state: &str, rate: &str) {
        let base = format!("sys/class/infiniband/{name}");
        if !self.path(&format!("{base}/device")).exists() {
            self.link(&format!("{base}/device"), device);
        }
        for (file, text) in [("link_layer", layer), ("state", state), ("rate", rate)] {
            self.file(&format!("{base}/ports/{port}/{file}"), text);
        }
    }
}
