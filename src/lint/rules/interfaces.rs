//! Lists of interfaces and RDMA devices.

use super::{Found, Scene, Severity, Text};
use crate::lint::view::Variable;
use crate::variables::is_interface_list;
use crate::variables::nccl::{self, Form, GUIDE};

/// Beginnings of interfaces that lead to no other node: of container engines and pod networks (Calico, Flannel, Cilium, kube-proxy, OVN).
const VIRTUAL: [&str; 15] = [
    "docker",
    "virbr",
    "veth",
    "cali",
    "flannel",
    "cni",
    "cbr",
    "br-",
    "kube-",
    "nodelocaldns",
    "tunl",
    "cilium",
    "lxc",
    "dummy",
    "ovn",
];

/// A list as NCCL reads it.
struct List<'a> {
    is_excluding: bool,
    is_exact: bool,
    names: Vec<&'a str>,
}

fn parse(value: &str) -> List<'_> {
    let rest = value.strip_prefix('^');
    let is_excluding = rest.is_some();
    let rest = rest.unwrap_or(value);
    let exact = rest.strip_prefix('=');
    let names = exact.unwrap_or(rest).split(',').map(|name| name.split(':').next().unwrap_or(name).trim());
    List { is_excluding, is_exact: exact.is_some(), names: names.filter(|name| !name.is_empty()).collect() }
}

/// `prefix-match`, `interface` and `interface-form`.
pub(super) fn check(scene: &Scene<'_>, variable: &Variable, found: &mut Found) {
    let Some(value) = variable.text() else { return };
    if is_interface_list(&variable.name) {
        if value.starts_with(['=', '^']) {
            let why = "this variable takes full names of interfaces: `=` and `^` are signs of NCCL's lists only";
            let fix = format!("write {}={}", variable.name, value.trim_start_matches(['=', '^']));
            return found.add("interface-form", Severity::Error, &variable.path, Text::of(variable, why, fix));
        }
        let list = List { is_excluding: false, is_exact: true, names: value.split(',').map(str::trim).collect() };
        return interface(scene, variable, &list, found);
    }
    match nccl::find(&variable.name).map(|key| key.form) {
        Some(Form::Interfaces) => {
            let list = parse(value);
            interface(scene, variable, &list, found);
            // An interface and its VLANs are found by accident on the nodes' own network only.
            let severity = if scene.group.host_network { Severity::Warning } else { Severity::Note };
            prefix(variable, &list, |_| true, severity, found);
        }
        // `mlx5` is all devices of a driver, and `mlx5_1` one of them.
        Some(Form::Adapters) => {
            prefix(variable, &parse(value), |head| head.ends_with('_'), Severity::Warning, found);
        }
        _ => {}
    }
}

/// Names that end with a number other than 0 are the beginning of ten more.
fn prefix(variable: &Variable, list: &List<'_>, ends: fn(&str) -> bool, severity: Severity, found: &mut Found) {
    let is_beginning = |name: &&&str| {
        let head = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let number = &name[head.len()..];
        !number.is_empty() && !number.starts_with('0') && ends(head)
    };
    let Some(name) = list.names.iter().find(is_beginning).filter(|_| !list.is_exact) else { return };
    let sign = if list.is_excluding { "^=" } else { "=" };
    let why = format!("without `=` names are beginnings: {name} also matches {name}0 to {name}9 where a node has them");
    let fix = format!("write {}={sign}{}", variable.name, variable.text().unwrap_or_default().trim_start_matches('^'));
    found.add("prefix-match", severity, &variable.path, Text::of(variable, why, fix).link(GUIDE));
}

fn interface(scene: &Scene<'_>, variable: &Variable, list: &List<'_>, found: &mut Found) {
    let is_loopback = |name: &str| name == "lo" || name.starts_with("lo:");
    if list.is_excluding {
        // horovod#700: with a list of one's own, NCCL's own exception of the loopback interface is off.
        if !list.is_exact && list.names.iter().all(|name| VIRTUAL.iter().any(|start| name.starts_with(start))) {
            let why = "a list of exceptions replaces NCCL's own, and the loopback interface may be taken";
            let fix = format!("write {}=^lo,{}", variable.name, list.names.join(","));
            found.add("interface", Severity::Warning, &variable.path, Text::of(variable, why, fix).link(GUIDE));
        }
        return;
    }
    if list.names.iter().any(|name| is_loopback(name)) {
        let several = scene.workload.nodes.is_some_and(|nodes| nodes > 1);
        let severity = if several { Severity::Error } else { Severity::Warning };
        let why = "the loopback interface leads to this node only: ranks of other nodes cannot connect";
        let fix = format!("delete {}, or name the interface of the nodes' default route", variable.name);
        return found.add("interface", severity, &variable.path, Text::of(variable, why, fix));
    }
    if let Some(name) = list.names.iter().find(|name| VIRTUAL.iter().any(|start| name.starts_with(start))) {
        let why = format!(
            "{name} is an interface of a container engine or of the pod network's own: it leads to no other node"
        );
        let fix = format!("delete {}, or name the interface of the default route (eth0 in most pods)", variable.name);
        found.add("interface", Severity::Warning, &variable.path, Text::of(variable, why, fix));
    }
}
