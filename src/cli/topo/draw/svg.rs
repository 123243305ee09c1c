//! Draws the machine: bars for NUMA nodes, root complexes and switches above their devices, NVLinks
//! below.

use super::super::devices::gigabytes;
use super::{Device, Drawing, Part};
use crate::text::{length, truncate};
use switchyard_core::units::counted;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_tools::report::escaped;

/// Width, height and margin of a device, in view box units (about a pixel).
const DEVICE: (usize, usize, usize) = (104, 44, 8);
/// Height of a bar, and the space below it.
const BAR: (usize, usize) = (24, 8);
const MARGIN: usize = 12;
/// Greatest width of a letter.
const LETTER: usize = 7;

/// Follows the reader's dark mode. Devices also differ by outline, not only by colour.
const STYLE: &str = "text{font:12px system-ui,sans-serif;fill:#1b1f24}.s{font-size:10px}rect{stroke:#57606a;fill:#f6f8fa}\
.g{fill:#d9f2d9}.n{fill:#dbe9fb;stroke-dasharray:4 2}.w{stroke:#cf222e;stroke-width:3}.l{stroke:#1a7f37;fill:none}\
.c{stroke:#57606a}@media(prefers-color-scheme:dark){text{fill:#e6edf3}rect{stroke:#8b949e;fill:#161b22}.g{fill:#12361f}\
.n{fill:#14304f}.w{stroke:#ff7b72}.l{stroke:#3fb950}.c{stroke:#8b949e}}";

/// The drawing. It scales to any width; by itself it has a size at which its texts are legible.
pub(in super::super) fn svg(topology: &GPUTopology) -> String {
    let drawing = Drawing::of(topology);
    let depth = drawing.numa.iter().map(rows).max().unwrap_or(0);
    let top = MARGIN + 24 + if drawing.socket_rate.is_some() { BAR.0 + BAR.1 } else { 0 };
    let mut picture = Picture {
        body: String::new(),
        top,
        devices_at: top + depth * (BAR.0 + BAR.1),
        next: MARGIN,
        centres: vec![0; drawing.devices.len()],
    };
    for numa in &drawing.numa {
        picture.part(&drawing, numa, 0);
    }
    let right = picture.next.max(MARGIN + 240);
    let bottom = picture.nvlinks(&drawing) + MARGIN;
    if let Some(rate) = drawing.socket_rate {
        let label = format!("between NUMA nodes {} GB/s", gigabytes(rate));
        picture.bar(MARGIN, MARGIN + 24, right - MARGIN - DEVICE.2, &label);
    }
    let gpus = drawing.devices.iter().filter(|device| device.is_gpu).count();
    let nics = drawing.devices.len() - gpus;
    let about = format!(
        "{} and {} on {}, below their root complexes and PCIe switches",
        counted(gpus as u64, "GPU"),
        counted(nics as u64, "NIC"),
        counted(drawing.numa.len() as u64, "NUMA node"),
    );
    let (width, name) = (right + MARGIN, escaped(&drawing.name));
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {bottom}\" width=\"{width}\" height=\"{bottom}\" \
         role=\"img\">\n<title>{name}</title>\n<desc>{}</desc>\n<style>{STYLE}</style>\n<text x=\"{MARGIN}\" y=\"{}\">{name}</text>\n{}</svg>\n",
        escaped(&about),
        MARGIN + 12,
        picture.body
    )
}

/// Number of bars above the devices of a part.
fn rows(part: &Part) -> usize {
    1 + part.parts.iter().map(rows).max().unwrap_or(0)
}

/// Equal NICs of one switch are one box if there are at least this many, such as the functions of
/// a virtualized NIC.
const FOLDED: usize = 4;

/// The devices of a part, with equal NICs in one group.
fn groups<'a>(drawing: &Drawing, devices: &'a [usize]) -> Vec<&'a [usize]> {
    let device = |position: &usize| &drawing.devices[*position];
    let is_equal = |a: &usize, b: &usize| {
        let (a, b) = (device(a), device(b));
        !a.is_gpu && !b.is_gpu && !a.is_faulty && !b.is_faulty && a.detail == b.detail
    };
    let few = |group: &'a [usize]| if group.len() < FOLDED { group.chunks(1) } else { group.chunks(group.len()) };
    devices.chunk_by(is_equal).flat_map(few).collect()
}

/// The box of a group, with all names if there is room.
fn folded(drawing: &Drawing, group: &[usize]) -> Device {
    let all: Vec<&Device> = group.iter().map(|position| &drawing.devices[*position]).collect();
    let (label, detail) = match all.as_slice() {
        [device] => (device.label.clone(), device.detail.clone()),
        several => {
            let names: Vec<&str> = several.iter().map(|device| device.label.as_str()).collect();
            (format!("{} NICs", several.len()), names.join(", "))
        }
    };
    Device { label, detail, is_gpu: all[0].is_gpu, is_faulty: all[0].is_faulty }
}

struct Picture {
    body: String,
    /// Top edge of the first bars.
    top: usize,
    /// Top edge of the devices.
    devices_at: usize,
    /// Left edge of the next device.
    next: usize,
    /// Centre of each device.
    centres: Vec<usize>,
}

impl Picture {
    fn part(&mut self, drawing: &Drawing, part: &Part, row: usize) {
        let left = self.next;
        let below = self.top + row * (BAR.0 + BAR.1);
        let mut lines = Vec::new();
        for inner in &part.parts {
            self.part(drawing, inner, row + 1);
        }
        for group in groups(drawing, &part.devices) {
            let centre = self.next + DEVICE.0 / 2;
            lines.push(centre);
            group.iter().for_each(|device| self.centres[*device] = centre);
            self.device(&folded(drawing, group));
        }
        for x in lines {
            let (from, to) = (below + BAR.0, self.devices_at);
            self.body.push_str(&format!("<path class=\"c\" d=\"M{x} {from}V{to}\"/>\n"));
        }
        self.bar(left, below, self.next - left - DEVICE.2.min(self.next - left), &part.label);
    }

    fn bar(&mut self, x: usize, y: usize, width: usize, label: &str) {
        let height = BAR.0;
        // Above a single device there is room for the address of a switch, but not for the word.
        let short = if length(label) > width / LETTER { label.strip_prefix("switch ").unwrap_or(label) } else { label };
        let shown = escaped(&truncate(short, width / LETTER));
        let (text_x, text_y) = (x + 6, y + 16);
        self.body.push_str(&format!(
            "<g><title>{}</title><rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" rx=\"4\"/>\
             <text x=\"{text_x}\" y=\"{text_y}\">{shown}</text></g>\n",
            escaped(label)
        ));
    }

    fn device(&mut self, device: &Device) {
        let (x, y, (width, height, gap)) = (self.next, self.devices_at, DEVICE);
        let class = if device.is_gpu { "g" } else { "n" };
        let (fault, word) = if device.is_faulty { (" w", " warn") } else { ("", "") };
        let fits = |text: &str| escaped(&truncate(text, width / LETTER));
        let (text_x, first, second) = (x + 6, y + 18, y + 34);
        self.body.push_str(&format!(
            "<g><title>{}</title><rect class=\"{class}{fault}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" rx=\"4\"/>\
             <text x=\"{text_x}\" y=\"{first}\">{}</text><text class=\"s\" x=\"{text_x}\" y=\"{second}\">{}</text></g>\n",
            escaped(&format!("{} {}{word}", device.label, device.detail)),
            fits(&format!("{}{word}", device.label)),
            fits(&device.detail),
        ));
        self.next += width + gap;
    }

    /// One bar for switches, or an arc per pair. Returns the bottom edge.
    fn nvlinks(&mut self, drawing: &Drawing) -> usize {
        let under = self.devices_at + DEVICE.1;
        let mut bottom = under;
        let switched: Vec<_> = drawing.nvlinks.iter().filter(|link| link.b.is_none()).collect();
        let ends = switched.iter().map(|link| self.centres[link.a]);
        if let (Some(left), Some(right)) = (ends.clone().min(), ends.max()) {
            let y = under + 28;
            for link in &switched {
                let x = self.centres[link.a];
                self.body.push_str(&format!(
                    "<g><title>{}</title><path class=\"l\" stroke-width=\"3\" d=\"M{x} {under}V{y}\"/>\
                     <text class=\"s\" x=\"{}\" y=\"{}\">{}x {}</text></g>\n",
                    escaped(&format!("{}: {}", drawing.devices[link.a].label, link.meaning())),
                    x + 5,
                    under + 18,
                    link.count,
                    gigabytes(link.rate),
                ));
            }
            self.bar(left - DEVICE.0 / 2, y, right - left + DEVICE.0, "NVSwitch (links and GB/s of each GPU)");
            bottom = y + BAR.0;
        }
        for link in &drawing.nvlinks {
            let Some(b) = link.b else { continue };
            let (from, to) = (self.centres[link.a].min(self.centres[b]), self.centres[link.a].max(self.centres[b]));
            let middle = (from + to) / 2;
            // The arc reaches halfway to its control point.
            let deep = 40 + (to - from) / 4;
            let lowest = bottom.max(under + deep / 2 + 16);
            self.body.push_str(&format!(
                "<g><title>{}</title><path class=\"l\" stroke-width=\"{}\" d=\"M{from} {under}Q{middle} {} {to} {under}\"/>\
                 <text class=\"s\" x=\"{middle}\" y=\"{}\">{}x</text></g>\n",
                escaped(&format!("{}-{}: {}", drawing.devices[link.a].label, drawing.devices[b].label, link.meaning())),
                link.count.min(6),
                under + deep,
                under + deep / 2 + 10,
                link.count,
            ));
            bottom = lowest;
        }
        bottom
    }
}
