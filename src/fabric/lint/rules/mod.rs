//! The lint rules. Each checks a container in the context of its pod and job.

mod access;
mod contradictions;
mod debugging;
mod interfaces;
mod keys;
mod launcher;
mod lines;

use super::path::Path;
use super::view::{Container, Group, Variable, Workload};
use super::{Finding, Options, Severity};
use crate::variables::nccl::PREFIX;
use crate::variables::{is_of_google_profile, is_visible_devices};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    /// Stable identifier.
    pub id: &'static str,
    /// Highest severity that it reports.
    pub severity: Severity,
    /// What it finds, in one sentence.
    pub finds: &'static str,
}

const fn rule(id: &'static str, severity: Severity, finds: &'static str) -> Rule {
    Rule { id, severity, finds }
}

use Severity::{Error, Note, Warning};

/// All rules, in the order of docs/tools.md.
pub const RULES: [Rule; 21] = [
    rule(
        "debug-setting",
        Warning,
        "a setting for finding faults that costs speed, hides a fault or fills the log when it stays",
    ),
    rule(
        "debug-section",
        Note,
        "another variable of the section \"Debugging\" of NCCL's user guide, which should not stay in scripts",
    ),
    rule(
        "prefix-match",
        Warning,
        "a name of a device or interface that also matches longer ones: `mlx5_1` matches `mlx5_10`",
    ),
    rule(
        "interface",
        Error,
        "the loopback interface, or one of a bridge or of the pod network's own, where ranks of other nodes must connect",
    ),
    rule("interface-form", Error, "`=` or `^` of NCCL in a variable that takes full names of interfaces"),
    rule("visible-devices", Error, "GPUs chosen by hand, which the device plugin has chosen already"),
    rule("process-count", Error, "processes per node that disagree with the GPUs of the pod, or with each other"),
    rule(
        "launcher-owned",
        Error,
        "a variable of each process, or of the rendezvous, that the launcher or the operator sets",
    ),
    rule("unknown-key", Warning, "a name that begins with NCCL_ and that no release of NCCL reads"),
    rule("renamed-key", Warning, "a variable that was renamed, removed, or that the user guide advises against"),
    rule("not-in-version", Warning, "a variable that the NCCL of the image (`--nccl`) does not read"),
    rule("gid-index", Warning, "a fixed GID index, which NCCL finds by itself since 2.21"),
    rule("contradiction", Error, "two settings, one of which makes the other void or impossible"),
    rule("value", Error, "a value that NCCL cannot read: it takes its default without an error"),
    rule("not-text", Error, "a value that is no text in YAML: the API server refuses it"),
    rule("too-long", Error, "a value of more than 1023 characters, where NCCL cuts lines of nccl.conf"),
    rule("duplicate-name", Error, "a variable that is set twice in one list: the last one counts"),
    rule("duplicate-key", Warning, "a key that a mapping has twice: most YAML readers use the last one"),
    rule("vendor-profile", Note, "a vendor's profile that sets NCCL's variables together and checks them"),
    rule(
        "host-access",
        Warning,
        "the network, files, processes or privileges of the node, which admission policies keep from tenants",
    ),
    rule("conf-line", Error, "a line of nccl.conf that is not NAME=value: NCCL trims nothing and knows no quotes"),
];

/// Input of a rule.
struct Context<'a> {
    workload: &'a Workload,
    group: &'a Group,
    container: &'a Container,
    options: Options,
}

/// Collects findings.
#[derive(Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn add(&mut self, rule: &'static str, severity: Severity, field: &Path, text: Message) {
        let Message { got, why, fix, link } = text;
        self.0.push(Finding { rule, severity, field: field.clone(), got, why, fix, link });
    }
}

/// The text of a finding.
struct Message {
    got: String,
    why: String,
    fix: String,
    link: Option<&'static str>,
}

impl Message {
    fn new(got: impl Into<String>, why: impl Into<String>, fix: impl Into<String>) -> Message {
        Message { got: got.into(), why: why.into(), fix: fix.into(), link: None }
    }

    /// A message about a variable.
    fn of(variable: &Variable, why: impl Into<String>, fix: impl Into<String>) -> Message {
        Message::new(variable.words(), why, fix)
    }

    fn link(self, link: &'static str) -> Message {
        Message { link: Some(link), ..self }
    }
}

/// `vendor-profile`.
fn vendor_profile(variable: &Variable, found: &mut Findings) {
    let why = "GPUDirect-TCPXO's profile sets NCCL's variables together, and its checker ends jobs in which one of them differs";
    let fix = "leave NCCL's variables as the profile sets them, and update them with it";
    found.add("vendor-profile", Severity::Note, &variable.path, Message::of(variable, why, fix));
}

/// Runs all rules on a workload.
pub(super) fn findings(workload: &Workload, options: Options) -> Vec<Finding> {
    let mut found = Findings::default();
    for group in &workload.groups {
        access::check(workload, group, &mut found);
        for container in &group.containers {
            let context = Context { workload, group, container, options };
            let profile = container.variables.iter().find(|variable| is_of_google_profile(&variable.name));
            if let Some(variable) = profile {
                vendor_profile(variable, &mut found);
            }
            for variable in &container.variables {
                lines::check(variable, &mut found);
                let is_owned =
                    profile.is_some() && (variable.name.starts_with(PREFIX) || is_visible_devices(&variable.name));
                if lines::is_usable(variable) && !is_owned {
                    debugging::check(variable, &mut found);
                    keys::check(&context, variable, &mut found);
                    interfaces::check(&context, variable, &mut found);
                    launcher::variable(&context, variable, &mut found);
                }
            }
            lines::duplicates(container, &mut found);
            launcher::processes(&context, &mut found);
            contradictions::check(&context, &mut found);
        }
    }
    found.0
}
