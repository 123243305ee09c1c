//! Names and values of NCCL's variables.

use super::{Context, Findings, Message, Severity};
use crate::lint::view::{Setting, Variable};
use crate::variables::nccl::{self, Form, GUIDE, Key, Version};
use crate::variables::{reader_of, renamed};
use switchyard_crds::validate::nearest;

/// Since this release, NCCL finds the GID of each port by itself.
const GID_DETECTION: Version = Version { major: 2, minor: 21, patch: 0 };

/// Runs all rules about one NCCL variable.
pub(super) fn check(context: &Context<'_>, variable: &Variable, found: &mut Findings) {
    if let Some(renamed) = renamed(&variable.name) {
        let why = format!("{} reads {}; the old name is read with a warning at best", renamed.since, renamed.to);
        let fix = format!("rename it to {}", renamed.to);
        return found.add("renamed-key", Severity::Warning, &variable.path, Message::of(variable, why, fix));
    }
    // Names are case-sensitive, and `nccl_debug` can only mean the one in capitals.
    if !variable.name.to_ascii_uppercase().starts_with(nccl::PREFIX) {
        return;
    }
    let Some(key) = nccl::find(&variable.name) else {
        if reader_of(&variable.name).is_none() {
            unknown(variable, found);
        }
        return;
    };
    version(context, variable, key, found);
    value(variable, key, found);
    gid_index(context, variable, found);
}

fn unknown(variable: &Variable, found: &mut Findings) {
    let bare = variable.name[nccl::PREFIX.len()..].to_owned();
    let known = nccl::keys().filter(|key| key.gone.is_none()).map(|key| &key.name[nccl::PREFIX.len()..]);
    let why = "no release of NCCL reads this name, and NCCL does not warn about unknown names";
    let fix = match nearest(&bare, known) {
        Some(name) => format!("did you mean {}{name}? Else delete it", nccl::PREFIX),
        None => format!("delete {}, or ask whose plugin reads it", variable.name),
    };
    found.add("unknown-key", Severity::Warning, &variable.path, Message::of(variable, why, fix).link(GUIDE));
}

fn version(context: &Context<'_>, variable: &Variable, key: &Key, found: &mut Findings) {
    let instead = |name: Option<&str>| match name {
        Some(name) => format!("set {name} instead, or nothing"),
        None => format!("delete {}", key.name),
    };
    let image = context.options.nccl;
    if let Some(image) = image
        && (image < key.since && key.since > nccl::OLDEST || key.gone.is_some_and(|gone| image >= gone))
    {
        let range = match key.gone {
            Some(gone) if image >= gone => format!("removed in {gone}"),
            _ => format!("new in {}", key.since),
        };
        let why = format!("NCCL {image} does not read it ({range}), and does not warn");
        let text = Message::of(variable, why, instead(key.instead)).link(GUIDE);
        return found.add("not-in-version", Severity::Warning, &variable.path, text);
    }
    let (why, instead) = match (key.gone, key.deprecated) {
        (Some(gone), _) if image.is_none() => {
            (format!("NCCL has not read it since {gone}, and does not warn"), instead(key.instead))
        }
        (None, Some(since)) if image.is_none_or(|image| image >= since) => {
            (format!("deprecated since NCCL {since}: a later release may not read it"), instead(key.instead))
        }
        _ => return,
    };
    found.add("renamed-key", Severity::Warning, &variable.path, Message::of(variable, why, instead).link(GUIDE));
}

fn value(variable: &Variable, key: &Key, found: &mut Findings) {
    let Setting::Text(value) = &variable.setting else { return };
    let Err(expected) = key.form.check(value) else { return };
    let is_list = matches!(key.form, Form::Interfaces | Form::Adapters);
    let why = if is_list {
        "NCCL takes the list as it is: a name with a space before it matches nothing"
    } else {
        "NCCL takes the number that it begins with, or else its default, with a warning at best"
    };
    let fix = if is_list && !value.trim().is_empty() {
        let value: String = value.chars().filter(|letter| !letter.is_whitespace()).collect();
        format!("write {}={value}", key.name)
    } else {
        format!("expected {expected}; else delete it")
    };
    found.add("value", Severity::Error, &variable.path, Message::of(variable, why, fix).link(GUIDE));
}

fn gid_index(context: &Context<'_>, variable: &Variable, found: &mut Findings) {
    let is_old = context.options.nccl.is_some_and(|image| image < GID_DETECTION);
    let is_set = variable.text().and_then(nccl::number).is_some_and(|index| index >= 0);
    if variable.name != "NCCL_IB_GID_INDEX" || !is_set || is_old {
        return;
    }
    let why = "the index of the right GID differs from node to node and pod to pod; NCCL since 2.21 finds it for each port, unless this is set";
    let fix = "delete NCCL_IB_GID_INDEX; where a port has several addresses, set NCCL_IB_ADDR_RANGE";
    let link = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html";
    found.add("gid-index", Severity::Warning, &variable.path, Message::of(variable, why, fix).link(link));
}
