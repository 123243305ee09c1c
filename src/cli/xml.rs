//! `switchyard topo xml`: generates, checks and compares NCCL topology files.

use crate::args::{Cli, XmlArgs};
use crate::failure::Failure;
use crate::output::{emit, with_kind};
use crate::text::plain;
use crate::{input, machine};
use serde_json::{Value, json};
use std::path::Path;
use switchyard_core::units::counted;
use switchyard_crds::gpu_topology::{GPUTopology, GPUTopologyStatus};
use switchyard_topology::xml::{
    Change, Content, Finding, NcclGraph, Parsed, Severity, check, check_against, diff, generate, parse,
};
use switchyard_worker_contract::exit::Exit;

/// The exit code when there are errors in the input, as in linters.
const FOUND: Exit = Exit::Unexpected;
/// Advice before loading a file.
const WHEN: &str = "a topology file is right only in a virtual machine, or with devices passed through, where the kernel shows a flat \
                    tree and you know the true one; on bare metal NCCL reads the same from the kernel, so do without";

/// A file with its findings.
struct Checked {
    name: String,
    findings: Vec<Finding>,
}

/// Generates, checks or compares.
pub(super) fn xml(cli: &Cli, args: &XmlArgs) -> Result<Exit, Failure> {
    match (&args.check, args.diff.as_slice()) {
        (Some(file), _) => check_file(cli, file, args.topology.as_deref()),
        (None, [first, second]) => compare(cli, first, second),
        _ => make(cli, args),
    }
}

fn status_of(topology: GPUTopology) -> GPUTopologyStatus {
    topology.status.unwrap_or_default()
}

fn make(cli: &Cli, args: &XmlArgs) -> Result<Exit, Failure> {
    let topology = machine::find(args.target.as_deref(), &args.source)?;
    let name = plain(topology.metadata.name.as_deref().unwrap_or("-"));
    let status = status_of(topology);
    let content = if args.devices { Content::Devices } else { Content::Tree };
    let text = generate(&status, content).map_err(|error| Failure::usage(format!("GPUTopology {name}: {error}")))?;
    let parsed = parse(&text);
    let notes = notes(&NcclGraph::read(&parsed.document, None), content);
    // A file meant for people is not for NCCL, so it is not checked.
    let found = if content == Content::Tree { findings(&parsed, None) } else { Vec::new() };
    let checked = Checked { findings: found, name };
    let made = json!({"file": text, "notes": notes, "findings": checked.rows()});
    emit(cli.output, "NCCLTopology", &with_kind("NCCLTopology", made), || text);
    if !cli.quiet {
        checked.findings.iter().for_each(|finding| anstream::eprintln!("{}", lines(&checked.name, finding)));
        notes.iter().for_each(|note| anstream::eprintln!("note: {note}"));
    }
    Ok(checked.exit())
}

/// Advice before loading a generated file.
fn notes(machine: &NcclGraph, content: Content) -> Vec<String> {
    let tree = if machine.is_flat() {
        "no device is behind a switch here: if this is a virtual machine, put the devices that share a switch into a <pci> of your own \
         (busid=\"ffff:ff:01.0\" class=\"0x060400\"), else NCCL makes the same tree itself"
    } else {
        "NCCL makes this tree itself, from the same kernel: load the file only where it does not see these switches"
    };
    let people =
        "NCCL would take over NVLinks, ports and speeds of this file when they are not true any more: do not load it";
    let mut notes = vec![WHEN.to_string(), tree.to_string()];
    notes.extend((content == Content::Devices).then(|| people.to_string()));
    notes
}

fn read(path: &Path) -> Result<(String, Parsed), Failure> {
    let name = input::name(path);
    let text = input::read_object(path, "topology file of NCCL")?;
    let parsed = parse(&text);
    if parsed.document.elements.is_empty() {
        let expected = "expected <system version=\"1\">";
        return Err(Failure::usage(format!("{name} is no topology file of NCCL: got no tag; {expected}")));
    }
    Ok((name, parsed))
}

fn findings(parsed: &Parsed, status: Option<&GPUTopologyStatus>) -> Vec<Finding> {
    let mut all = check(parsed);
    if let Some(status) = status {
        all.extend(check_against(&parsed.document, status));
    }
    all.into_sorted()
}

fn check_file(cli: &Cli, file: &Path, topology: Option<&Path>) -> Result<Exit, Failure> {
    let (name, parsed) = read(file)?;
    let status = topology.map(machine::read_file).transpose()?.map(status_of);
    let checked = Checked { name, findings: findings(&parsed, status.as_ref()) };
    let report = with_kind("TopologyFileReport", checked.report());
    emit(cli.output, "TopologyFileReport", &report, || checked.screen());
    Ok(checked.exit())
}

impl Checked {
    fn count(&self, severity: Severity) -> u64 {
        self.findings.iter().filter(|finding| finding.rule.severity == severity).count() as u64
    }

    fn exit(&self) -> Exit {
        if self.count(Severity::Error) > 0 { FOUND } else { Exit::Done }
    }

    fn screen(&self) -> String {
        let mut out: Vec<String> = self.findings.iter().map(|finding| lines(&self.name, finding)).collect();
        let counts = [Severity::Error, Severity::Warning].map(|severity| (self.count(severity), severity.word()));
        let found: Vec<String> =
            counts.iter().filter(|(count, _)| *count > 0).map(|(count, word)| counted(*count, word)).collect();
        let found = if found.is_empty() { "nothing found".to_string() } else { found.join(", ") };
        out.push(format!("{found} in {}", self.name));
        out.push(format!("note: {WHEN}"));
        out.join("\n")
    }

    fn rows(&self) -> Vec<Value> {
        let row = |finding: &Finding| {
            json!({
                "rule": finding.rule.name, "severity": finding.rule.severity.word(), "lines": finding.lines,
                "got": finding.got, "why": finding.rule.why, "fix": finding.fix,
            })
        };
        self.findings.iter().map(row).collect()
    }

    fn report(&self) -> Value {
        json!({
            "file": self.name, "errors": self.count(Severity::Error), "warnings": self.count(Severity::Warning),
            "note": WHEN, "findings": self.rows(),
        })
    }
}

/// A finding on a screen: `topo.xml:4,9: warning[gdr-pin]: gdr="1" of <gpu>`, followed by the
/// reason and the fix.
fn lines(name: &str, finding: &Finding) -> String {
    const MAX: usize = 8;
    let mut lines: Vec<String> = finding.lines.iter().take(MAX).map(u32::to_string).collect();
    lines.extend((finding.lines.len() > MAX).then(|| format!("and {} more", finding.lines.len() - MAX)));
    let place = if lines.is_empty() { name.to_string() } else { format!("{name}:{}", lines.join(",")) };
    let rule = finding.rule;
    let head = format!("{place}: {}[{}]: {}", rule.severity.word(), rule.name, plain(&finding.got));
    format!("{head}\n  why  {}\n  fix  {}", rule.why, plain(&finding.fix))
}

/// The machine in a topology file, or in a report from NCCL's perspective.
fn machine_of(path: &Path) -> Result<NcclGraph, Failure> {
    let is_report = path.extension().is_some_and(|ending| ["yaml", "yml", "json"].iter().any(|known| ending == *known));
    if !is_report {
        return read(path).map(|(_, parsed)| NcclGraph::read(&parsed.document, None));
    }
    let status = status_of(machine::read_file(path)?);
    let text =
        generate(&status, Content::Devices).map_err(|error| Failure::usage(format!("{}: {error}", path.display())))?;
    Ok(NcclGraph::read(&parse(&text).document, None))
}

fn compare(cli: &Cli, first: &Path, second: &Path) -> Result<Exit, Failure> {
    let machines = [machine_of(first)?, machine_of(second)?];
    let changes = diff(&machines[0], &machines[1])
        .map_err(|error| Failure::usage(format!("{} or {}: {error}", first.display(), second.display())))?;
    let row = |change: &Change| json!({"subject": change.subject(), "change": change.what()});
    let body = json!({"first": first, "second": second, "changes": changes.iter().map(row).collect::<Vec<_>>()});
    emit(cli.output, "TopologyDiff", &with_kind("TopologyDiff", body), || differences(&changes));
    Ok(Exit::Done)
}

/// Changes on a screen; the same change to several pairs is shown once.
fn differences(changes: &[Change]) -> String {
    let mut groups: Vec<(String, Vec<String>)> = Vec::new();
    for change in changes {
        let (what, subject) = (change.what(), plain(&change.subject()));
        match groups.iter_mut().find(|(known, _)| *known == what) {
            Some((_, subjects)) => subjects.push(subject),
            None => groups.push((what, vec![subject])),
        }
    }
    if groups.is_empty() {
        return "nothing that matters to NCCL differs".to_string();
    }
    let group = |(what, subjects): (String, Vec<String>)| format!("{}\n  {}", plain(&what), subjects.join("\n  "));
    groups.into_iter().map(group).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests;
