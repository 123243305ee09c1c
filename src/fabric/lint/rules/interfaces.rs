//! Lists of interfaces and RDMA devices.

use super::{Found, Scene, Severity, Text};
use crate::lint::view::Variable;
use crate::variables::nccl::{self, Form, GUIDE, List};
use crate::variables::{is_interface_list, is_virtual_interface};

/// `prefix-match`, `interface` and `interface-form`.
pub(super) fn check(scene: &Scene<'_>, variable: &Variable, found: &mut Found) {
    let Some(value) = variable.text() else { return };
    if is_interface_list(&variable.name) {
        if value.starts_with(['=', '^']) {
            let why = "this variable takes full names of interfaces: `=` and `^` are signs of NCCL's lists only";
            // `^lo` is meant as all but these, which is the opposite of their names.
            let fix = if value.contains('^') {
                format!("delete {}, or name the interface of the nodes' default route", variable.name)
            } else {
                format!("write {}={}", variable.name, value.trim_start_matches('='))
            };
            return found.add("interface-form", Severity::Error, &variable.path, Text::of(variable, why, fix));
        }
        return interface(scene, variable, &List::of_names(value), found);
    }
    match nccl::find(&variable.name).map(|key| key.form) {
        Some(Form::Interfaces) => {
            let list = List::parse(value);
            interface(scene, variable, &list, found);
            // A prefix matches an interface and its VLANs by accident only on the nodes' own network.
            let severity = if scene.group.host_network { Severity::Warning } else { Severity::Note };
            prefix(variable, &list, |_| true, severity, found);
        }
        // `mlx5` is all devices of a driver, and `mlx5_1` one of them.
        Some(Form::Adapters) => {
            let list = List::parse(value);
            prefix(variable, &list, |head| head.ends_with('_'), Severity::Warning, found);
            adapter(variable, &list, found);
        }
        _ => {}
    }
}

/// A name that ends with a number other than 0 is the prefix of ten more.
fn prefix(variable: &Variable, list: &List<'_>, ends: fn(&str) -> bool, severity: Severity, found: &mut Found) {
    let is_beginning = |name: &&str| {
        let head = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let number = &name[head.len()..];
        !number.is_empty() && !number.starts_with('0') && ends(head)
    };
    let Some(name) = list.names().find(is_beginning).filter(|_| !list.is_exact) else { return };
    let sign = if list.is_excluding { "^=" } else { "=" };
    let why = format!("without `=` names are beginnings: {name} also matches {name}0 to {name}9 where a node has them");
    let fix = format!("write {}={sign}{}", variable.name, variable.text().unwrap_or_default().trim_start_matches('^'));
    found.add("prefix-match", severity, &variable.path, Text::of(variable, why, fix).link(GUIDE));
}

/// The name of an interface where one of an RDMA device belongs.
fn adapter(variable: &Variable, list: &List<'_>, found: &mut Found) {
    let Some(name) = list.names().find(|name| is_interface(name)).filter(|_| !list.is_excluding) else { return };
    let why = format!(
        "{name} is an interface; RDMA devices are called mlx5_0 or the like, so it matches none and NCCL uses TCP"
    );
    let fix = format!("delete {}, or write the name that `ibv_devices` prints", variable.name);
    found.add("interface", Severity::Warning, &variable.path, Text::of(variable, why, fix).link(GUIDE));
}

/// Whether this is the name of a network interface: of the kernel, of systemd, or of a bond. RDMA devices can be called `ibp…` too.
fn is_interface(name: &str) -> bool {
    let rest = |prefix: &str| name.strip_prefix(prefix).filter(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    name == "lo" || ["eth", "ib", "bond", "eno", "ens", "enp", "enP"].iter().any(|prefix| rest(prefix).is_some())
}

fn interface(scene: &Scene<'_>, variable: &Variable, list: &List<'_>, found: &mut Found) {
    let is_loopback = |name: &str| name == "lo" || name.starts_with("lo:");
    if list.is_excluding {
        // horovod#700: with a list of the user's, NCCL no longer excludes the loopback interface by itself.
        if !list.is_exact && list.names().all(is_virtual_interface) {
            let why = "a list of exceptions replaces NCCL's own, and the loopback interface may be taken";
            let fix = format!("write {}=^lo,{}", variable.name, list.names().collect::<Vec<_>>().join(","));
            found.add("interface", Severity::Warning, &variable.path, Text::of(variable, why, fix).link(GUIDE));
        }
        return;
    }
    if list.names().any(is_loopback) {
        let several = scene.workload.nodes.is_some_and(|nodes| nodes > 1);
        let severity = if several { Severity::Error } else { Severity::Warning };
        let why = "the loopback interface leads to this node only: ranks of other nodes cannot connect";
        let fix = format!("delete {}, or name the interface of the nodes' default route", variable.name);
        return found.add("interface", severity, &variable.path, Text::of(variable, why, fix));
    }
    if let Some(name) = list.names().find(|name| is_virtual_interface(name)) {
        let why = format!(
            "{name} is an interface of a container engine or of the pod network's own: it leads to no other node"
        );
        let fix = format!("delete {}, or name the interface of the default route (eth0 in most pods)", variable.name);
        found.add("interface", Severity::Warning, &variable.path, Text::of(variable, why, fix));
    }
}
