//! Renders the report as one self-contained page without scripts or requests.

mod elements;
mod kernels;
mod sections;
mod time;

use super::markup::escaped;
use super::model::Report;
use super::svg::PATTERNS;
use elements::{Page, section};

const STYLE: &str = include_str!("style.css");

/// Content security policy that allows only the page's own style.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'";

/// The sections in order: anchor and heading.
const SECTIONS: [(&str, &str); 12] = [
    ("verdict", "Verdict"),
    ("advice", "Advice"),
    ("loss", "Loss"),
    ("throughput", "Throughput"),
    ("step-time", "Step time"),
    ("skew", "Rank skew"),
    ("all-reduce", "All-reduce"),
    ("memory", "Memory"),
    ("kernels", "Kernels of the GPU"),
    ("placement", "Placement"),
    ("events", "Events"),
    ("manifest", "Manifest, versions, environment"),
];

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
    page.push_str("<nav aria-label=\"Sections\"><ul>");
    for (anchor, name) in SECTIONS {
        page.push_str(&format!("<li><a href=\"#{anchor}\">{name}</a></li>"));
    }
    page.push_str("</ul></nav>\n<main>\n");
    let bodies: [Page; 12] = [
        sections::verdict(report),
        sections::advice(report),
        time::loss(report),
        time::throughput(report),
        time::step_time(report),
        time::skew(report),
        sections::all_reduce(report),
        sections::memory(report),
        kernels::kernels(report),
        sections::placement(report),
        sections::events(report),
        sections::setting(report),
    ];
    for (index, ((anchor, name), body)) in SECTIONS.iter().zip(bodies).enumerate() {
        // The sections from loss to memory are shown in pairs if there is room.
        let paired = (2..8).contains(&index);
        if paired && index % 2 == 0 {
            page.push_str("<div class=\"two\">\n");
        }
        page.push_str(&section(anchor, name, &body));
        if paired && index % 2 == 1 {
            page.push_str("</div>\n");
        }
    }
    page.push_str(&format!(
        "</main>\n<footer>Switchyard {}. Times are of the rank whose work takes longest, means after the first 10 steps of each attempt, \
         unless they say otherwise.</footer>\n</body>\n</html>\n",
        escaped(&report.version)
    ));
    page
}
