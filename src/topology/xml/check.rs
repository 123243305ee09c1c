//! Checks that need only the file: form, vocabulary, and pinned facts.

use super::finding::{Findings, Rule};
use super::tables::{
    ARCHITECTURES, INVENTED, MAX_CHILDREN, MAX_ELEMENTS, TAGS, VENDORS, class, is_bridge, is_bus_id, lane_speed, number,
};
use super::{Document, Element, Parsed};
use std::collections::BTreeMap;

/// What stops NCCL's reader, and the result of every check that needs no machine. A file of another
/// kind has a single finding.
pub fn check(parsed: &Parsed) -> Findings {
    let document = &parsed.document;
    if let Some((line, got, fix)) = other_kind(document) {
        let mut findings = Findings::default();
        findings.add(&Rule::SYSTEM, Some(line), got, fix);
        return findings;
    }
    let mut findings = parsed.findings.clone();
    system(document, &mut findings);
    sizes(document, &mut findings);
    let is_alone = document.all("cpu").count() == 1;
    let has_devices = document.elements.iter().any(|element| ["gpu", "nic"].contains(&element.tag.as_str()));
    let mut bus_ids: BTreeMap<&str, u32> = BTreeMap::new();
    for (position, element) in document.elements.iter().enumerate() {
        if !place(document, position, &mut findings) {
            continue;
        }
        match element.tag.as_str() {
            "cpu" => cpu(element, is_alone, has_devices, &mut findings),
            "pci" => {
                pci(document, position, &mut findings);
                let bus_id = element.get("busid").unwrap_or_default();
                if let Some(first) = bus_ids.get(bus_id) {
                    let fix = format!("keep one; the other is in line {first}");
                    findings.add(&Rule::DUPLICATE, Some(element.line), format!("busid=\"{bus_id}\" again"), fix);
                } else if !bus_id.is_empty() {
                    bus_ids.insert(bus_id, element.line);
                }
            }
            _ => {}
        }
        pins(document, element, &mut findings);
    }
    numa_nodes(document, &mut findings);
    findings
}

/// Line, kind and use of a file that is not a topology file for NCCL.
fn other_kind(document: &Document) -> Option<(u32, &'static str, &'static str)> {
    let outermost =
        |tag: &str| document.outermost().map(|at| &document.elements[at]).find(|element| element.tag == tag);
    if let Some(graphs) = outermost("graphs") {
        let fix =
            "leave it to NCCL_GRAPH_FILE: it pins rings and fits one number of GPUs; a topology file has a <system>";
        return Some((graphs.line, "a graph file, <graphs>", fix));
    }
    if let Some(topology) = outermost("topology") {
        let fix = "a topology file of NCCL has a <system>: write one with `switchyard topo xml`";
        return Some((topology.line, "a file of hwloc (lstopo), <topology>", fix));
    }
    let is_rccl = |element: &&Element| element.tag == "xgmi" || (element.tag == "gpu" && element.get("gcn").is_some());
    let rccl = document.elements.iter().find(is_rccl)?;
    let fix = "leave it to RCCL, which reads its own version, gcn= and <xgmi>; this check is for NCCL";
    Some((rccl.line, "a topology file of RCCL, for AMD GPUs", fix))
}

fn system(document: &Document, findings: &mut Findings) {
    let systems: Vec<&Element> =
        document.outermost().map(|at| &document.elements[at]).filter(|e| e.tag == "system").collect();
    let [system] = systems.as_slice() else {
        let line = systems.get(1).map(|second| second.line);
        let got = if systems.is_empty() { "no <system>".to_string() } else { format!("{} <system>", systems.len()) };
        return findings.add(&Rule::SYSTEM, line, got, "one <system version=\"1\"> around everything");
    };
    let version = system.get("version");
    if version.and_then(number) != Some(1) {
        let got = version.map_or("no version".to_string(), |version| format!("version=\"{version}\""));
        findings.add(&Rule::SYSTEM, Some(system.line), got, "version=\"1\"");
    }
    if document.all("cpu").next().is_none() {
        findings.add(&Rule::SYSTEM, Some(system.line), "no <cpu>", "a <cpu numaid=\"0\"> for every NUMA node");
    }
}

fn sizes(document: &Document, findings: &mut Findings) {
    let count = document.elements.len();
    if count > MAX_ELEMENTS {
        let fix = format!("at most {MAX_ELEMENTS}: describe one machine, with <cpu> and <pci> only");
        findings.add(&Rule::LIMIT, None, format!("{count} tags"), fix);
    }
    for element in document.elements.iter().filter(|element| element.children.len() > MAX_CHILDREN) {
        let got = format!("{} tags in one <{}>", element.children.len(), element.tag);
        findings.add(&Rule::LIMIT, Some(element.line), got, format!("at most {MAX_CHILDREN}"));
    }
}

/// Returns whether NCCL reads a tag, which requires a known tag in a valid position. Reports
/// unknown tags and attributes.
fn place(document: &Document, position: usize, findings: &mut Findings) -> bool {
    let element = &document.elements[position];
    let parent = element.parent.map(|parent| document.elements[parent].tag.as_str());
    if parent.is_some_and(|parent| TAGS.iter().all(|tag| tag.name != parent)) {
        // NCCL skips everything inside an unknown tag, and that tag is already reported.
        return false;
    }
    let Some(tag) = TAGS.iter().find(|tag| tag.name == element.tag) else {
        let known: Vec<&str> = TAGS.iter().map(|tag| tag.name).collect();
        let fix = format!("take it out; NCCL knows {}", known.join(", "));
        findings.add(&Rule::UNKNOWN_TAG, Some(element.line), format!("<{}>", element.tag), fix);
        return false;
    };
    let fits = match parent {
        None => tag.inside.is_empty(),
        Some(parent) => tag.inside.contains(&parent),
    };
    if !fits {
        let inside = |tags: &[&str]| tags.iter().map(|tag| format!("<{tag}>")).collect::<Vec<_>>().join(" or ");
        let got = match parent {
            Some(parent) => format!("<{}> in <{parent}>", tag.name),
            None => format!("<{}> by itself", tag.name),
        };
        let fix = if tag.inside.is_empty() {
            "put it around everything".to_string()
        } else {
            format!("put it in {}", inside(tag.inside))
        };
        findings.add(&Rule::UNKNOWN_TAG, Some(element.line), got, fix);
        return false;
    }
    for (name, _) in element.attributes.iter().filter(|(name, _)| !tag.attributes.contains(&name.as_str())) {
        let fix = match tag.attributes {
            [] => "take it out".to_string(),
            known => format!("take it out; NCCL reads {}", known.join(", ")),
        };
        findings.add(&Rule::UNKNOWN_ATTRIBUTE, Some(element.line), format!("{name}= of <{}>", tag.name), fix);
    }
    true
}

fn cpu(element: &Element, is_alone: bool, has_devices: bool, findings: &mut Findings) {
    let line = Some(element.line);
    match element.get("numaid") {
        Some(id) if number(id).is_some() => {}
        got => {
            let got = got.map_or("a <cpu> without numaid".to_string(), |got| format!("numaid=\"{got}\""));
            findings.add(&Rule::CPU, line, got, "the number of the NUMA node: numaid=\"0\"");
        }
    }
    let words: Vec<&str> = ARCHITECTURES.iter().map(|(word, _)| *word).collect();
    let is_known = |known: &[&str], got: &str| known.iter().any(|word| got.starts_with(word));
    let arch = element.get("arch");
    match arch {
        // The devices of the only CPU are always used.
        None if is_alone => {}
        None => {
            let fix = format!("arch= one of {}", words.join(", "));
            findings.add(&Rule::UNUSED_CPU, line, "a <cpu> without arch", fix);
        }
        Some(got) if !is_known(&words, got) => {
            let meant =
                ARCHITECTURES.iter().find(|(_, uname)| *uname == got).map(|(word, _)| format!("arch=\"{word}\""));
            let fix = meant.unwrap_or_else(|| format!("one of {}", words.join(", ")));
            findings.add(&Rule::CPU_WORD, line, format!("arch=\"{got}\""), fix);
        }
        Some(_) => {}
    }
    // Without an architecture, only x86 needs more attributes, and x86 is the usual case.
    if arch.is_none_or(|arch| arch.starts_with("x86_64")) {
        match element.get("vendor") {
            None if is_alone => {}
            None => {
                let fix = "vendor=\"GenuineIntel\" or \"AuthenticAMD\"";
                findings.add(&Rule::UNUSED_CPU, line, "a <cpu> without vendor", fix);
            }
            Some(got) if !is_known(&VENDORS, got) => {
                findings.add(
                    &Rule::CPU_WORD,
                    line,
                    format!("vendor=\"{got}\""),
                    "as the CPU says it: GenuineIntel, AuthenticAMD",
                );
            }
            Some(_) => {}
        }
    }
    let has_model = ["familyid", "modelid"].iter().any(|name| element.get(name).is_some());
    if has_devices && !has_model && element.get("vendor") == Some("GenuineIntel") {
        // If the file contains the devices, NCCL does not walk up to their CPU, and so does not
        // query it.
        let fix = "both as in /proc/cpuinfo, or take the devices out of the file: NCCL asks the CPU then";
        findings.add(&Rule::CPU, line, "a <cpu> of Intel without familyid and modelid", fix);
    }
    for (one, other) in [("familyid", "modelid"), ("modelid", "familyid")] {
        match element.get(one) {
            Some(got) if number(got).is_none() => {
                findings.add(&Rule::CPU, line, format!("{one}=\"{got}\""), "a whole number")
            }
            Some(_) if element.get(other).is_none() => {
                findings.add(
                    &Rule::CPU,
                    line,
                    format!("{one} without {other}"),
                    "both or neither: NCCL asks the CPU for both",
                );
            }
            _ => {}
        }
    }
    let is_mask = |text: &str| {
        let groups = || text.split(',');
        groups().all(|group| (1..=8).contains(&group.len()) && group.bytes().all(|byte| byte.is_ascii_hexdigit()))
    };
    if let Some(got) = element.get("affinity").filter(|got| !is_mask(got)) {
        let fix = "groups of 8 hexadecimal digits as in /sys/devices/system/node/nodeN/cpumap";
        findings.add(&Rule::AFFINITY, line, format!("affinity=\"{}\"", got.chars().take(40).collect::<String>()), fix);
    }
}

fn pci(document: &Document, position: usize, findings: &mut Findings) {
    let element = &document.elements[position];
    let line = Some(element.line);
    let bus_id = element.get("busid");
    match bus_id {
        None => findings.add(&Rule::BUS_ID, line, "a <pci> without busid", "busid=\"0000:1a:00.0\""),
        Some(got) if !is_bus_id(got) => {
            findings.add(
                &Rule::BUS_ID,
                line,
                format!("busid=\"{got}\""),
                kernel_form(got).map_or_else(
                    || "the form 0000:1a:00.0, lower case".to_string(),
                    |meant| format!("busid=\"{meant}\""),
                ),
            );
        }
        Some(_) => {}
    }
    let is_invented = bus_id.is_some_and(|bus_id| bus_id.starts_with(INVENTED));
    let has_devices = document.children(position, "pci").next().is_some();
    match element.get("class") {
        None if is_invented => {
            let got = format!("the invented bridge {} without class", bus_id.unwrap_or_default());
            findings.add(&Rule::CLASS, line, got, format!("class=\"{}\"", class::BRIDGE));
        }
        Some(got) if has_devices && !is_bridge(got) => {
            let got = format!("class=\"{got}\" of a <pci> with others in it");
            findings.add(&Rule::CLASS, line, got, format!("class=\"{}\", a bridge", class::BRIDGE));
        }
        _ => {}
    }
    // NCCL reads missing attributes of real devices from the kernel.
    let speed = element.get("link_speed").or(is_invented.then_some(""));
    if let Some(got) = speed.filter(|speed| lane_speed(speed).is_none()) {
        findings.add(
            &Rule::LINK_SPEED,
            line,
            format!("link_speed=\"{got}\""),
            "as the kernel writes it: 32.0 GT/s PCIe",
        );
    }
    let width = element.get("link_width").or(is_invented.then_some(""));
    if let Some(got) =
        width.filter(|width| !number(width).is_some_and(|lanes| [1, 2, 4, 8, 12, 16, 32].contains(&lanes)))
    {
        findings.add(&Rule::LINK_WIDTH, line, format!("link_width=\"{got}\""), "the number of lanes: 16");
    }
}

/// Converts a bus id in the form of NVML or lspci to the kernel's form.
fn kernel_form(text: &str) -> Option<String> {
    let lower = text.trim().to_ascii_lowercase();
    let candidates =
        [lower.clone(), format!("0000:{lower}"), lower.strip_prefix("0000").unwrap_or_default().to_string()];
    candidates.into_iter().find(|candidate| is_bus_id(candidate))
}

/// Device facts in the file, which NCCL either trusts or overwrites.
fn pins(document: &Document, element: &Element, findings: &mut Findings) {
    const PINNED: [(&str, &[&str]); 2] =
        [("net", &["speed", "port", "latency", "guid", "maxconn", "rail", "plane", "coll"]), ("gpu", &["dev", "sm"])];
    const OVERWRITTEN: [(&str, &[&str]); 3] =
        [("cpu", &["host_hash"]), ("gpu", &["rank", "mlopart"]), ("net", &["dev"])];
    let (line, tag) = (Some(element.line), element.tag.as_str());
    let of = |table: &[(&str, &'static [&'static str])]| {
        let known = table.iter().find(|(name, _)| *name == tag).map_or(&[][..], |(_, names)| names);
        known.iter().filter(|name| element.get(name).is_some()).copied().collect::<Vec<_>>()
    };
    if ["gpu", "nic", "net"].contains(&tag) {
        findings.add(
            &Rule::DEVICE_TAG,
            line,
            format!("<{tag}>"),
            "take it out with everything in it: NCCL finds its devices itself",
        );
    }
    if let Some(gdr) = element.get("gdr").filter(|_| tag == "gpu" || tag == "net") {
        findings.add(&Rule::GDR_PIN, line, format!("gdr=\"{gdr}\" of <{tag}>"), "take it out");
    }
    if let Some(keep) = element.get("keep") {
        findings.add(&Rule::KEEP_PIN, line, format!("keep=\"{keep}\" of <{tag}>"), "take it out");
    }
    let pinned = of(&PINNED);
    if !pinned.is_empty() {
        findings.add(&Rule::PIN, line, format!("{} of <{tag}>", pinned.join(", ")), "take it out");
    }
    if ["nvlink", "c2c"].contains(&tag) {
        let own = element.parent.and_then(|gpu| document.elements[gpu].parent).map(|pci| &document.elements[pci]);
        let is_loop =
            element.get("target").is_some_and(|target| own.is_some_and(|pci| pci.get("busid") == Some(target)));
        let got = if is_loop { format!("<{tag}> from a GPU to itself") } else { format!("<{tag}>") };
        findings.add(&Rule::PIN, line, got, "take it out: NCCL counts the links that are up");
    }
    let overwritten = of(&OVERWRITTEN);
    if !overwritten.is_empty() {
        findings.add(&Rule::OVERWRITTEN, line, format!("{} of <{tag}>", overwritten.join(", ")), "take it out");
    }
}

/// Reports NUMA nodes of several machines, and NUMA nodes that occur twice.
fn numa_nodes(document: &Document, findings: &mut Findings) {
    let mut hosts: Vec<&str> = document.all("cpu").filter_map(|cpu| cpu.get("host_hash")).collect();
    hosts.sort_unstable();
    hosts.dedup();
    if hosts.len() > 1 {
        let got = format!("<cpu> of {} machines (host_hash)", hosts.len());
        return findings.add(&Rule::SEVERAL_NODES, None, got, "keep the <cpu> of one machine, without host_hash");
    }
    let mut known: BTreeMap<&str, u32> = BTreeMap::new();
    for cpu in document.all("cpu") {
        let Some(id) = cpu.get("numaid") else { continue };
        if let Some(first) = known.get(id) {
            let fix = format!("put all <pci> of a NUMA node in one <cpu>; the first is in line {first}");
            findings.add(&Rule::SEVERAL_NODES, Some(cpu.line), format!("numaid=\"{id}\" again"), fix);
        } else {
            known.insert(id, cpu.line);
        }
    }
}
