//! Real nodes around a real control plane: containerd, the kubelet and kube-proxy, in separate
//! namespaces for each node.
//!
//! ```text
//! Instance (number) ─> Network (switch) ─┐
//! ControlPlane and CoreDNS on 10.X.0.1 ──┴> Node 1..4: namespaces ─> containerd
//!                                             ─> kubelet, kube-proxy ─> pods
//! ```
//!
//! A node is a set of namespaces with an init process. Everything that a node mounts, connects or
//! starts is inside them, so the kernel removes it when the init process ends, and init ends with
//! this process for any reason. Only cgroups and files remain. They are removed on drop, or when
//! another cluster starts.

mod cgroups;
mod images;
mod instance;
mod namespace;
mod network;
mod node;
mod pod_leftovers;
mod rights;
mod settings;

pub use images::{Image, TOOLS};
pub use instance::{clean_all, leftovers_of};
pub use rights::missing;

use crate::control_plane::Reach;
use crate::ports::free_port;
use crate::{ControlPlane, Daemon, Ended, Options, TIMEOUT, programs_of, until};
use anyhow::{Context, Result, bail, ensure};
use instance::Instance;
use network::{Network, Plan};
use node::Node;
use serde_json::json;
use std::fs;
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Maximum number of nodes; each uses about 150 MB of memory.
pub const MAX_NODES: u8 = 4;
/// Options of a cluster.
#[derive(Debug, Clone)]
pub struct NodesOptions {
    /// Number of nodes, from 1 to [`MAX_NODES`]: `node-1`, `node-2`, and so on.
    pub nodes: u8,
    /// Options of the control plane; its folder and addresses are set by [`Nodes::start`].
    pub plane: Options,
}

impl NodesOptions {
    /// Options for this many nodes, with a controller manager and a scheduler.
    pub fn new(nodes: u8) -> NodesOptions {
        NodesOptions { nodes, plane: Options { controller_manager: true, scheduler: true, ..Options::default() } }
    }
}

/// A cluster of real nodes. Dropping it removes everything.
#[derive(Debug)]
pub struct Nodes {
    // Fields are dropped in this order.
    nodes: Vec<Node>,
    dns: Option<Daemon>,
    /// The control plane.
    pub plane: ControlPlane,
    network: Network,
    programs: Programs,
    instance: Instance,
}

/// Folders of programs built from source.
#[derive(Debug, Clone)]
struct Programs {
    containerd: PathBuf,
    coredns: PathBuf,
    kubernetes: PathBuf,
}

impl Programs {
    fn find() -> Result<Programs> {
        let folders = programs_of(&["containerd", "coredns", "kubernetes-node"])?;
        let [containerd, coredns, kubernetes] = folders.try_into().ok().context("invariant: a folder for each name")?;
        for path in [&containerd, &kubernetes] {
            let is_hidden = path.starts_with("/var") || path.starts_with("/run");
            ensure!(
                !is_hidden,
                "nodes cannot see {}, because their /var and /run are private: set XDG_CACHE_HOME",
                path.display()
            );
        }
        Ok(Programs { containerd, coredns, kubernetes })
    }
}

impl Nodes {
    /// Starts a cluster and waits until all nodes are ready. Calls `report` after each step with
    /// its name and duration.
    ///
    /// # Errors
    /// The machine lacks a requirement (see [`missing`]), or a program does not become ready; then
    /// the error contains the end of its log.
    pub fn start(options: &NodesOptions, report: impl Fn(&str, Duration)) -> Result<Nodes> {
        ensure!((1..=MAX_NODES).contains(&options.nodes), "{} nodes; expected 1 to {MAX_NODES}", options.nodes);
        let mut begin = Instant::now();
        let mut finished = |what: &str| {
            report(what, begin.elapsed());
            begin = Instant::now();
        };
        let programs = Programs::find()?;
        finished("programs found");
        let instance = Instance::take()?;
        let network = Network::start(&instance)?;
        finished("network");
        let plan = Plan::of(&instance);
        let names = (1..=options.nodes).map(node::name).collect();
        let folder = Some(instance.folder().join("plane"));
        let plane =
            Options { folder, reach: Some(Reach { address: plan.host(), nodes: names }), ..options.plane.clone() };
        let tools = images::tools(&instance.folder())?;
        let start = |index| {
            let node = Node::start(&instance, &network, &programs, index, options.nodes)?;
            node.import(&programs, &tools)?;
            anyhow::Ok(node)
        };
        let (plane, nodes) = std::thread::scope(|scope| {
            let start = &start;
            let nodes: Vec<_> = (1..=options.nodes).map(|index| scope.spawn(move || start(index))).collect();
            (ControlPlane::start(&plane), nodes.into_iter().map(joined).collect::<Result<Vec<Node>>>())
        });
        let mut cluster = Nodes { nodes: nodes?, dns: None, plane: plane?, network, programs, instance };
        finished("control plane, namespaces and containerd");
        cluster.start_dns()?;
        for node in &mut cluster.nodes {
            node.join(&cluster.plane, plan, &cluster.programs)?;
        }
        finished("DNS, kubelets and kube-proxies started");
        cluster.wait_ready()?;
        finished("nodes ready");
        Ok(cluster)
    }

    /// Starts CoreDNS on this machine, behind the Service whose address is in every pod's
    /// `/etc/resolv.conf`.
    fn start_dns(&mut self) -> Result<()> {
        let (plan, port) = (Plan::of(&self.instance), free_port()?);
        let file = self.instance.folder().join("Corefile");
        fs::write(&file, settings::coredns(plan, port, &self.plane.kubeconfig("admin")))?;
        let arguments = ["-conf".to_string(), file.display().to_string()];
        let log = self.instance.folder().join("coredns.log");
        let daemon = Daemon::start(&self.programs.coredns.join("coredns"), &arguments, &[], &log)?;
        self.dns.insert(daemon).until("ready", TIMEOUT, || Ok(TcpStream::connect((plan.host(), port)).is_ok()))?;
        let ports = |target: u16| {
            ["UDP", "TCP"]
                .map(|protocol| json!({"name": protocol.to_lowercase(), "protocol": protocol, "port": target}))
        };
        let meta = json!({"name": "kube-dns", "namespace": "kube-system", "labels": {"kubernetes.io/service-name": "kube-dns"}});
        let objects = json!({"apiVersion": "v1", "kind": "List", "items": [
            {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {"clusterIP": settings::DNS, "ports": ports(53)}},
            {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": meta, "addressType": "IPv4",
                "endpoints": [{"addresses": [plan.host()], "conditions": {"ready": true}}], "ports": ports(port)},
        ]});
        let applied = self.plane.kubectl_with(&["apply", "-f", "-"], &objects.to_string());
        ensure!(applied.code == Some(0), "{}", applied.stderr);
        Ok(())
    }

    fn wait_ready(&mut self) -> Result<()> {
        let path = r#"jsonpath={range .items[*].status.conditions[?(@.type=="Ready")]}{.status} {end}"#;
        let ready = until("ready", TIMEOUT, || {
            for node in &mut self.nodes {
                node.ensure_running()?;
            }
            let seen = self.plane.kubectl(&["get", "nodes", "-o", path]).stdout;
            Ok(seen.split_whitespace().filter(|status| *status == "True").count() == self.nodes.len())
        });
        ready.map(drop).with_context(|| {
            let description = self.plane.kubectl(&["describe", "nodes"]).stdout;
            let logs: String = self.nodes.iter().map(Node::tail).collect();
            format!("{description}\n{logs}")
        })
    }

    /// Node names.
    pub fn names(&self) -> Vec<String> {
        self.nodes.iter().map(|node| node.name.clone()).collect()
    }

    /// Cluster number, for [`leftovers_of`].
    pub fn number(&self) -> u8 {
        self.instance.number()
    }

    /// Imports an image from a Docker or OCI archive on all nodes.
    ///
    /// # Errors
    /// containerd rejects the archive.
    pub fn import(&self, archive: &Path) -> Result<()> {
        std::thread::scope(|scope| {
            let imports: Vec<_> =
                self.nodes.iter().map(|node| scope.spawn(|| node.import(&self.programs, archive))).collect();
            imports.into_iter().try_for_each(joined)
        })
    }

    /// Adds a second name to an image that all nodes have.
    ///
    /// # Errors
    /// A node does not have the image.
    pub fn tag(&self, image: &str, name: &str) -> Result<()> {
        self.nodes.iter().try_for_each(|node| node.tag(&self.programs, image, name))
    }

    fn node(&self, name: &str) -> Result<&Node> {
        let names = || format!("no node `{name}`; expected one of {}", self.names().join(", "));
        self.nodes.iter().find(|node| node.name == name).with_context(names)
    }

    fn node_mut(&mut self, name: &str) -> Result<(&mut Node, &Programs)> {
        self.node(name)?;
        let found = self.nodes.iter_mut().find(|node| node.name == name);
        Ok((found.context("invariant: the node was found")?, &self.programs))
    }

    /// Returns the path on this machine of a node's path below `/var` or `/run`. It shows files and
    /// sockets, but not the node's mounts.
    ///
    /// # Errors
    /// The node does not exist.
    pub fn path(&self, node: &str, path: &str) -> Result<PathBuf> {
        Ok(self.node(node)?.path(path))
    }

    /// Returns a node's address.
    ///
    /// # Errors
    /// The node does not exist.
    pub fn address(&self, node: &str) -> Result<Ipv4Addr> {
        Ok(Plan::of(&self.instance).node(self.node(node)?.index))
    }

    /// Runs a program in a node's namespaces.
    ///
    /// # Errors
    /// The node does not exist.
    pub fn run(&self, node: &str, program: &str, arguments: &[&str]) -> Result<Ended> {
        Ok(self.node(node)?.namespace.run(program, arguments))
    }

    /// Limits the rate between two nodes and their pods, in both directions, in bit/s. `None`
    /// removes the limit.
    ///
    /// # Errors
    /// A node does not exist, or the kernel has no HTB qdisc.
    pub fn set_speed(&self, one: &str, other: &str, bits_per_second: Option<u64>) -> Result<()> {
        let (one, other) = (self.node(one)?, self.node(other)?);
        ensure!(one.index != other.index, "a link from {} to itself", one.name);
        self.network.limit(&one.namespace, other.index, bits_per_second)?;
        self.network.limit(&other.namespace, one.index, bits_per_second)
    }

    /// Arranges all nodes into racks. Each node sends and receives at `inside`, and each rack
    /// shares a link of `between` to the other racks, both in bit/s per direction. Replaces the
    /// limits of [`Nodes::set_speed`].
    ///
    /// # Errors
    /// A node is in no rack or in two, a rate is zero, or the kernel refuses.
    pub fn set_racks(&self, racks: &[Vec<String>], inside: u64, between: u64) -> Result<()> {
        let mut named: Vec<String> = racks.concat();
        named.sort_unstable();
        ensure!(
            named == self.names(),
            "racks of {}; expected each of {} once",
            named.join(", "),
            self.names().join(", ")
        );
        ensure!(
            inside > 0 && between > 0,
            "racks at {inside} and {between} bit/s; expected more than 0, or use `set_link`"
        );
        let rack_nodes = |names: &Vec<String>| -> Result<Vec<_>> {
            let node_port = |name: &String| self.node(name).map(|node| (node.index, &node.namespace));
            names.iter().map(node_port).collect()
        };
        let racks: Vec<Vec<_>> = racks.iter().map(rack_nodes).collect::<Result<_>>()?;
        self.network.set_racks(&racks, inside, between)
    }

    /// Bytes that have left a rack over its link.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn bytes_between_racks(&self) -> Result<u64> {
        self.network.bytes_between_racks()
    }

    /// Connects a node to the switch, or disconnects it.
    ///
    /// # Errors
    /// The node does not exist.
    pub fn set_link(&self, node: &str, up: bool) -> Result<()> {
        self.network.set_link(self.node(node)?.index, up)
    }

    /// Kills a node's kubelet. Its pods keep running.
    ///
    /// # Errors
    /// The node does not exist.
    pub fn kill_kubelet(&mut self, node: &str) -> Result<()> {
        self.node_mut(node)?.0.kill_kubelet();
        Ok(())
    }

    /// Starts or restarts a node's kubelet.
    ///
    /// # Errors
    /// The node does not exist, or the kubelet cannot be started.
    pub fn start_kubelet(&mut self, node: &str) -> Result<()> {
        let plan = Plan::of(&self.instance);
        let (node, programs) = self.node_mut(node)?;
        node.start_kubelet(plan, programs)
    }

    /// Kills and restarts a node's containerd. Its containers keep running.
    ///
    /// # Errors
    /// The node does not exist, or containerd does not respond.
    pub fn restart_containerd(&mut self, node: &str) -> Result<()> {
        let (node, programs) = self.node_mut(node)?;
        node.kill_containerd();
        node.start_containerd(programs)
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        if std::thread::panicking()
            && let Ok(folder) = tempfile::Builder::new().prefix("switchyard-nodes-").tempdir()
        {
            let folder = folder.keep();
            for node in &self.nodes {
                for log in node.logs() {
                    let name = log.file_name().unwrap_or_default().to_string_lossy().into_owned();
                    let _ = fs::copy(&log, folder.join(format!("{}-{name}", node.name)));
                }
            }
            eprintln!("node logs: {}", folder.display());
        }
    }
}

fn joined<T>(thread: std::thread::ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    thread.join().unwrap_or_else(|_| bail!("a thread panicked"))
}
