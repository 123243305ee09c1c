//! Renders the report as one self-contained page without scripts or requests.

mod elements;
mod kernels;
mod layers;
mod sections;
mod time;

use super::markup::escaped;
use super::model::Report;
use super::svg::PATTERNS;
use elements::{Body, coded, section};

const STYLE: &str = include_str!("style.css");

/// Content security policy that allows only the page's own style.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'";

/// A section: anchor, heading, content.
type Section = (&'static str, &'static str, fn(&Report) -> Body);

/// The sections in order.
const SECTIONS: [Section; 13] = [
    ("verdict", "Verdict", |report| Ok(sections::verdict(report))),
    ("advice", "Advice", |report| Ok(sections::advice(report))),
    ("loss", "Loss", time::loss),
    ("throughput", "Throughput", time::throughput),
    ("step-time", "Step time", time::step_time),
    ("skew", "Rank skew", time::skew),
    ("all-reduce", "All-reduce", sections::all_reduce),
    ("memory", "Memory", sections::memory),
    ("layers", "Layers", layers::layers),
    ("kernels", "Kernels of the GPU", kernels::kernels),
    ("placement", "Placement", sections::placement),
    ("events", "Events", sections::events),
    ("manifest", "Manifest, versions, environment", |report| Ok(sections::setting(report))),
];

/// Sections that are shown in pairs if there is room.
const PAIRED: [&str; 6] = ["loss", "throughput", "step-time", "skew", "all-reduce", "memory"];

/// Renders the page, which is always smaller than 2 MiB because every list in it is limited.
pub fn html(report: &Report) -> String {
    let mut page = String::with_capacity(1 << 17);
    let title = format!("{} - Switchyard report", report.job);
    page.push_str("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n");
    page.push_str(&format!("<meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\">\n"));
    page.push_str("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light dark\">\n");
    page.push_str(&format!(
        "<title>{}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n{PATTERNS}",
        escaped(&title)
    ));
    page.push_str(&sections::header(report));
    let (mut bodies, mut missing) = (Vec::new(), Vec::new());
    for (anchor, name, body) in SECTIONS {
        match body(report) {
            Ok(body) => bodies.push((anchor, name, body)),
            Err(reason) => missing.push((anchor, name, reason)),
        }
    }
    page.push_str("<nav aria-label=\"Sections\"><ul>");
    for (anchor, name, _) in &bodies {
        page.push_str(&format!("<li><a href=\"#{anchor}\">{name}</a></li>"));
    }
    page.push_str("</ul></nav>\n<main>\n");
    for group in bodies.chunk_by(|(a, ..), (b, ..)| PAIRED.contains(a) && PAIRED.contains(b)) {
        for pair in group.chunks(2) {
            let sections: String = pair.iter().map(|(anchor, name, body)| section(anchor, name, body)).collect();
            page.push_str(&if pair.len() == 2 { format!("<div class=\"two\">\n{sections}</div>\n") } else { sections });
        }
    }
    if !missing.is_empty() {
        // Advice can refer to a section that the run lacks.
        let reasons =
            missing.iter().map(|(anchor, name, reason)| format!("<li id=\"{anchor}\">{name}: {}</li>", coded(reason)));
        let reasons: String = reasons.collect();
        page.push_str(&section("absent", "Not in this report", &format!("<ul class=\"plain\">{reasons}</ul>\n")));
    }
    page.push_str(&format!(
        "</main>\n<footer>Switchyard {}. Times are of the rank whose work takes longest, means after the first 10 steps of each attempt, \
         unless they say otherwise.</footer>\n</body>\n</html>\n",
        escaped(&report.version)
    ));
    page
}
