//! Pod resources on a node: mounts, cgroups, processes, network links, addresses and folders. All
//! of them must be released with the pod.

use super::node::{self, Node};
use super::{Nodes, cgroups};
use anyhow::{Context, Result};
use std::fs;
use std::path::Path;

/// Path fragments of pod mounts: volumes, and containerd's mounts for containers, sandboxes and
/// their networks.
const MOUNTS: [&str; 4] = ["/kubelet/pods/", "/io.containerd.runtime.v2.task/", "/cri/sandboxes/", "/netns/"];

impl Nodes {
    /// Lists all pod resources on the nodes. The list is empty some seconds after the last pod
    /// bound to a node is gone.
    ///
    /// # Errors
    /// A node cannot be inspected.
    pub fn pod_leftovers(&self) -> Result<Vec<String>> {
        let mut found = Vec::new();
        for node in &self.nodes {
            let leftovers = node_leftovers(node, &node::group(&self.instance, &node.name))?;
            found.extend(leftovers.into_iter().map(|what| format!("{}: {what}", node.name)));
        }
        Ok(found)
    }

    /// Counts containerd-shim processes on the nodes: one per pod, plus leaked ones. containerd 2.1
    /// leaks some when pods come and go quickly (containerd#12344).
    pub fn shims(&self) -> usize {
        let groups: Vec<String> =
            self.nodes.iter().map(|node| format!("/{}/", node::group(&self.instance, &node.name))).collect();
        let is_one = |process: &Process| {
            process.command.contains("containerd-shim") && groups.iter().any(|group| process.groups.contains(group))
        };
        all_processes().iter().filter(|process| is_one(process)).count()
    }
}

fn node_leftovers(node: &Node, group: &str) -> Result<Vec<String>> {
    let table = format!("/proc/{}/mountinfo", node.namespace.pid());
    let table = fs::read_to_string(&table).context(table)?;
    // proc(5): the mount point is the fifth field.
    let points = table.lines().filter_map(|line| line.split(' ').nth(4));
    let mut found: Vec<String> = points
        .filter(|point| MOUNTS.iter().any(|part| point.contains(part)))
        .map(|point| format!("mount {point}"))
        .collect();
    for folder in cgroups::folders(group)? {
        groups(&folder, &mut found);
    }
    processes(group, &mut found);
    let links = node.namespace.shell("ip -o link show type veth")?;
    let names = links.lines().filter_map(|line| line.split(": ").nth(1));
    found.extend(names.filter(|name| !name.starts_with("eth0")).map(|name| format!("cable {name}")));
    let is_address = |name: &String| name.starts_with(|first: char| first.is_ascii_digit());
    let addresses = entries(&node.path("/run/cni/addresses/pods"));
    found.extend(addresses.into_iter().filter(is_address).map(|name| format!("address {name}")));
    found.extend(entries(&node.path("/var/lib/kubelet/pods")).into_iter().map(|name| format!("folder {name}")));
    Ok(found)
}

/// Finds pod cgroups below a group; the kubelet names them after the pod's UID.
fn groups(folder: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        if entry.file_name().to_string_lossy().starts_with("pod") {
            found.push(format!("cgroup {}", entry.path().display()));
        } else {
            groups(&entry.path(), found);
        }
    }
}

/// Finds processes of containers.
fn processes(group: &str, found: &mut Vec<String>) {
    let pods = format!("/{group}/kubepods");
    let remaining = all_processes().into_iter().filter(|process| process.groups.contains(&pods));
    found.extend(remaining.map(|process| format!("process {} {}", process.id, process.command)));
}

/// A live process; zombies have no command line.
struct Process {
    id: String,
    groups: String,
    command: String,
}

fn all_processes() -> Vec<Process> {
    let read = |id: String| {
        let text = |name: &str| {
            String::from_utf8_lossy(&fs::read(format!("/proc/{id}/{name}")).unwrap_or_default()).into_owned()
        };
        let (groups, command) = (text("cgroup"), text("cmdline").replace('\0', " "));
        Process { id, groups, command }
    };
    entries(Path::new("/proc")).into_iter().map(read).filter(|process| !process.command.is_empty()).collect()
}

/// Names of a folder's entries; empty if the folder does not exist.
fn entries(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}
