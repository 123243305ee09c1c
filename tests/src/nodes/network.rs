//! Network of a cluster: a switch in its own namespace, connected to this machine and to every
//! node.
//!
//! ```text
//! this machine  10.X.0.1 ──┐
//! node-1        10.X.0.11 ─┤ switch      pods on node-1: 10.X.1.0/24, routed via 10.X.0.11
//! node-2        10.X.0.12 ─┘
//! ```
//!
//! This machine gets one interface, and its packet filter rules are not changed. A link is removed
//! with the namespace at either end, and routes are removed with the link.
//!
//! With racks, each rack has its own switch, and the first switch is the spine between them:
//!
//! ```text
//! this machine ── switch ──┬─ down-1 ═ up-1 ─ rack-1 ──┬─ node-1
//!                          │                           └─ node-2
//!                          └─ down-2 ═ up-2 ─ rack-2 ──── node-3
//! ```

use super::instance::Instance;
use super::namespace::{Namespace, shell};
use anyhow::{Result, ensure};
use std::net::Ipv4Addr;

/// The switch and the address plan.
#[derive(Debug)]
pub(super) struct Network {
    switch: Namespace,
    plan: Plan,
}

/// Queue size of a rate-limited port: some milliseconds of data. The default of a thousand segments
/// would hold seconds.
const QUEUE: &str = "1mb";

/// Address plan. Nodes are numbered from 1.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    /// Address whose first two bytes are the prefix.
    base: Ipv4Addr,
}

impl Plan {
    pub(super) fn of(instance: &Instance) -> Plan {
        Plan { base: instance.address(0, 0) }
    }

    fn address(self, third: u8, fourth: u8) -> Ipv4Addr {
        let [first, second, ..] = self.base.octets();
        Ipv4Addr::new(first, second, third, fourth)
    }

    /// Address of this machine.
    pub(super) fn host(self) -> Ipv4Addr {
        self.address(0, 1)
    }

    /// Address of a node.
    pub(super) fn node(self, index: u8) -> Ipv4Addr {
        self.address(0, 10 + index)
    }

    /// Address range of a node's pods.
    pub(super) fn pods(self, index: u8) -> String {
        format!("{}/24", self.address(index, 0))
    }

    /// Address range of the cluster.
    pub(super) fn all(self) -> String {
        format!("{}/16", self.base)
    }
}

impl Network {
    /// Creates the switch and its link to this machine.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(super) fn start(instance: &Instance) -> Result<Network> {
        let folder = instance.folder();
        // Do not filter frames between nodes, as in a real rack.
        let script = "ip link set lo up\nip link add switch type bridge\nip link set switch up\n\
                      filter=/proc/sys/net/bridge/bridge-nf-call-iptables\n[ ! -e $filter ] || echo 0 > $filter\n";
        let switch = Namespace::start(&["--net"], Vec::new(), script, &folder, "switch")?;
        let network = Network { switch, plan: Plan::of(instance) };
        let (name, pid) = (instance.interface(), network.switch.pid());
        shell(
            &format!(
                "ip link add {name} type veth peer name host netns /proc/{pid}/ns/net\nip addr add {}/24 dev {name}\nip link set {name} up",
                network.plan.host()
            ),
            &folder,
        )?;
        network.switch.shell("ip link set host master switch up")?;
        Ok(network)
    }

    /// Creates the link to a node, with routes on the node to the pods of all `nodes`, and on this
    /// machine to the node's pods.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(super) fn attach(&self, instance: &Instance, node: &Namespace, index: u8, nodes: u8) -> Result<()> {
        let plan = self.plan;
        self.switch.shell(&format!(
            "ip link add node-{index} type veth peer name eth0 netns /proc/{}/ns/net\nip link set node-{index} master switch up",
            node.pid()
        ))?;
        let mut script = format!(
            "ip addr add {}/24 dev eth0\nip link set eth0 up\nip route add default via {}\necho 1 > /proc/sys/net/ipv4/ip_forward\n",
            plan.node(index),
            plan.host()
        );
        for other in (1..=nodes).filter(|other| *other != index) {
            script.push_str(&format!("ip route add {} via {}\n", plan.pods(other), plan.node(other)));
        }
        node.shell(&script)?;
        shell(&format!("ip route add {} via {}", plan.pods(index), plan.node(index)), &instance.folder())?;
        Ok(())
    }

    /// Connects a node to the switch, or disconnects it.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(super) fn set_link(&self, index: u8, up: bool) -> Result<()> {
        self.switch.shell(&format!("ip link set node-{index} {}", if up { "up" } else { "down" }))?;
        Ok(())
    }

    /// Limits the rate of packets from `node` to node `to` and its pods. `None` removes the limit.
    ///
    /// # Errors
    /// The kernel has no HTB qdisc, or the rate is zero.
    pub(super) fn limit(&self, node: &Namespace, to: u8, bits_per_second: Option<u64>) -> Result<()> {
        ensure!(bits_per_second != Some(0), "a link of 0 bit/s; expected more than 0, or use `set_link`");
        let mut script = format!(
            "tc qdisc show dev eth0 root | grep -q htb || tc qdisc add dev eth0 root handle 1: htb\n\
             tc filter del dev eth0 parent 1: prio {to} 2>/dev/null || true\ntc class del dev eth0 classid 1:{to} 2>/dev/null || true\n"
        );
        if let Some(rate) = bits_per_second {
            script.push_str(&class("eth0", u16::from(to), rate));
            for destination in [format!("{}/32", self.plan.node(to)), self.plan.pods(to)] {
                script.push_str(&format!(
                    "tc filter add dev eth0 parent 1: protocol ip prio {to} u32 match ip dst {destination} flowid 1:{to}\n"
                ));
            }
        }
        node.shell(&script)?;
        Ok(())
    }

    /// Arranges nodes into racks, each behind its own switch with a shared link to the spine.
    /// `inside` is the rate of a node's link and `between` the rate of a rack's link, in bit/s per
    /// direction. The limit on a rack's link excludes traffic to this machine, such as API calls,
    /// because real clusters have another network for it.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(super) fn set_racks(&self, racks: &[Vec<(u8, &Namespace)>], inside: u64, between: u64) -> Result<()> {
        let host = self.plan.host();
        for (rack, nodes) in (1..).zip(racks) {
            let mut script = format!(
                "ip link show rack-{rack} >/dev/null 2>&1 || {{\n\
                 ip link add rack-{rack} type bridge\nip link set rack-{rack} up\n\
                 ip link add up-{rack} type veth peer name down-{rack}\n\
                 ip link set up-{rack} master rack-{rack} up\nip link set down-{rack} master switch up\n}}\n"
            );
            for (port, address) in [(format!("up-{rack}"), "dst"), (format!("down-{rack}"), "src")] {
                script.push_str(&format!(
                    "{}tc qdisc add dev {port} root handle 1: htb default 1\n{}\
                     tc filter add dev {port} parent 1: protocol ip prio 1 u32 match ip {address} {host}/32 flowid 1:0\n",
                    unlimited(&port),
                    class(&port, 1, between)
                ));
            }
            for (index, node) in nodes {
                let port = format!("node-{index}");
                script.push_str(&format!("ip link set {port} master rack-{rack}\n{}", limited(&port, inside)));
                node.shell(&limited("eth0", inside))?;
            }
            self.switch.shell(&script)?;
        }
        // Flush the forwarding tables, because the switches still send to the nodes' old ports.
        let flush = |name: String| format!("ip link set {name} type bridge fdb_flush\n");
        let names = (1..=racks.len()).map(|rack| format!("rack-{rack}"));
        let script: String = names.chain(["switch".to_string()]).map(flush).collect();
        self.switch.shell(&script)?;
        Ok(())
    }

    /// Bytes that all racks have sent over their links.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(super) fn bytes_between_racks(&self) -> Result<u64> {
        // The counters are fields 2 (received) and 10 (sent) of a port's line.
        let sent = "awk '$1 ~ /^up-/ {sum += $10} END {print sum + 0}' /proc/net/dev";
        Ok(self.switch.shell(sent)?.trim().parse()?)
    }
}

/// Returns commands that add a class to qdisc `1:` of a port.
fn class(port: &str, number: u16, bits_per_second: u64) -> String {
    format!(
        "tc class add dev {port} parent 1: classid 1:{number} htb rate {bits_per_second}bit burst 256kb cburst 256kb quantum 60000\n\
         tc qdisc add dev {port} parent 1:{number} bfifo limit {QUEUE}\n"
    )
}

/// Returns commands that remove a port's root qdisc, because it cannot be replaced by one of
/// another kind with the same handle.
fn unlimited(port: &str) -> String {
    format!("tc qdisc del dev {port} root 2>/dev/null || true\n")
}

/// Returns commands that limit a port's outgoing rate.
fn limited(port: &str, bits_per_second: u64) -> String {
    format!(
        "{}tc qdisc add dev {port} root handle 1: tbf rate {bits_per_second}bit burst 256kb limit {QUEUE}\n",
        unlimited(port)
    )
}
