//! Lists of interfaces and RDMA devices.

use super::{Context, Findings, Message, Severity};
use crate::lint::view::Variable;
use crate::variables::nccl::{self, Form, GUIDE, List};
use crate::variables::{is_interface_list, is_virtual_interface};

/// `prefix-match`, `interface` and `interface-form`.
pub(super) fn check(context: &Context<'_>, variable: &Variable, found: &mut Findings) {
    let Some(value) = variable.text() else { return };
    if is_interface_list(&variable.name) {
        if value.starts_with(['=', '^']) {
            let why = "this variable takes full names of interfaces: `=` and `^` are signs of NCCL's lists only";
            // Users who write `^lo` mean every interface but lo, so the name alone would be wrong.
            let fix = if value.contains('^') {
                format!("delete {}, or name the interface of the nodes' default route", variable.name)
            } else {
                format!("write {}={}", variable.name, value.trim_start_matches('='))
            };
            return found.add("interface-form", Severity::Error, &variable.path, Message::of(variable, why, fix));
        }
        return interface(context, variable, &List::of_names(value), found);
    }
    match nccl::find(&variable.name).map(|key| key.form) {
        Some(Form::Interfaces) => {
            let list = List::parse(value);
            interface(context, variable, &list, found);
            // Only on the nodes' own network does a prefix match an interface and its VLANs by
            // accident.
            let severity = if context.group.host_network { Severity::Warning } else { Severity::Note };
            prefix(variable, &list, |_| true, severity, found);
        }
        // `mlx5` means all devices of a driver, but `mlx5_1` means a single one.
        Some(Form::Adapters) => {
            let list = List::parse(value);
            prefix(variable, &list, |head| head.ends_with('_'), Severity::Warning, found);
            adapter(variable, &list, found);
        }
        _ => {}
    }
}

/// A name that ends in a number other than 0 is the prefix of ten more.
fn prefix(variable: &Variable, list: &List<'_>, ends: fn(&str) -> bool, severity: Severity, found: &mut Findings) {
    let is_beginning = |name: &&str| {
        let head = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let number = &name[head.len()..];
        !number.is_empty() && !number.starts_with('0') && ends(head)
    };
    let Some(name) = list.names().find(is_beginning).filter(|_| !list.is_exact) else { return };
    let sign = if list.is_excluding { "^=" } else { "=" };
    let why = format!("without `=` names are beginnings: {name} also matches {name}0 to {name}9 where a node has them");
    let fix = format!("write {}={sign}{}", variable.name, variable.text().unwrap_or_default().trim_start_matches('^'));
    found.add("prefix-match", severity, &variable.path, Message::of(variable, why, fix).link(GUIDE));
}

/// Finds the name of an interface in a list of RDMA devices.
fn adapter(variable: &Variable, list: &List<'_>, found: &mut Findings) {
    let Some(name) = list.names().find(|name| is_interface(name)).filter(|_| !list.is_excluding) else { return };
    let why = format!(
        "{name} is an interface; RDMA devices are called mlx5_0 or the like, so it matches none and NCCL uses TCP"
    );
    let fix = format!("delete {}, or write the name that `ibv_devices` prints", variable.name);
    found.add("interface", Severity::Warning, &variable.path, Message::of(variable, why, fix).link(GUIDE));
}

/// Whether this is the kernel's or systemd's name of a network interface, or a bond. RDMA devices
/// can have names such as `ibp12s0` as well.
fn is_interface(name: &str) -> bool {
    let has_number =
        |prefix: &&str| name.strip_prefix(*prefix).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    name == "lo" || ["eth", "ib", "bond", "eno", "ens", "enp", "enP"].iter().any(has_number)
}

fn interface(context: &Context<'_>, variable: &Variable, list: &List<'_>, found: &mut Findings) {
    let is_loopback = |name: &str| name == "lo" || name.starts_with("lo:");
    if list.is_excluding {
        // horovod#700: with a user's list, NCCL no longer excludes the loopback interface by
        // itself.
        if !list.is_exact && list.names().all(is_virtual_interface) {
            let why = "a list of exceptions replaces NCCL's own, and the loopback interface may be taken";
            let fix = format!("write {}=^lo,{}", variable.name, list.names().collect::<Vec<_>>().join(","));
            found.add("interface", Severity::Warning, &variable.path, Message::of(variable, why, fix).link(GUIDE));
        }
        return;
    }
    if list.names().any(is_loopback) {
        let several = context.workload.nodes.is_some_and(|nodes| nodes > 1);
        let severity = if several { Severity::Error } else { Severity::Warning };
        let why = "the loopback interface leads to this node only: ranks of other nodes cannot connect";
        let fix = format!("delete {}, or name the interface of the nodes' default route", variable.name);
        return found.add("interface", severity, &variable.path, Message::of(variable, why, fix));
    }
    if let Some(name) = list.names().find(|name| is_virtual_interface(name)) {
        let why = format!(
            "{name} is an interface of a container engine or of the pod network's own: it leads to no other node"
        );
        let fix = format!("delete {}, or name the interface of the default route (eth0 in most pods)", variable.name);
        found.add("interface", Severity::Warning, &variable.path, Message::of(variable, why, fix));
    }
}
