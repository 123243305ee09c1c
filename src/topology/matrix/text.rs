//! Splits pasted text into header, rows and legend: words and line numbers, without interpretation.

use super::fault::{MatrixFault, Position};
use super::{Cell, gpu_index};
use switchyard_worker_contract::CpuList;

/// Titles in the output of `rocm-smi --showtopo` and `amd-smi topology`.
const AMD_TITLES: [&str; 2] = ["ROCm System Management Interface", "LINK TYPE TABLE"];

/// The parts of a text that form the matrix.
pub(super) struct Table<'a> {
    /// Line of the header, from 1.
    pub header_line: usize,
    /// Device labels.
    pub columns: Vec<&'a str>,
    /// Columns after the device columns.
    pub affinities: Vec<Affinity>,
    /// Whether the command was `nvidia-smi topo -mp`, which shows PCIe where there is NVLink.
    pub pcie_only: bool,
    /// Rows in text order.
    pub rows: Vec<Row<'a>>,
    /// NIC names from the legend.
    pub legend: Vec<Name<'a>>,
}

/// A row: the cells, then the values of the affinity columns.
pub(super) struct Row<'a> {
    /// Label of its device.
    pub label: &'a str,
    /// Line on which it begins, from 1.
    pub line: usize,
    /// Everything after the label.
    pub words: Vec<&'a str>,
    /// Terminal column at which each word begins.
    pub columns: Vec<usize>,
}

impl<'a> Row<'a> {
    /// Adds a word of this line, or the cells in it.
    fn push(&mut self, word: &'a str, line: &str) {
        let cells = cells(word);
        let words = if cells.is_empty() { vec![word] } else { cells };
        for word in words {
            self.words.push(word);
            self.columns.push(column(line, word));
        }
    }

    /// Divides a word in two.
    fn split(&mut self, index: usize, at: usize) {
        let (first, second) = self.words[index].split_at(at);
        self.words[index] = first;
        self.words.insert(index + 1, second);
        self.columns.insert(index + 1, self.columns[index] + at);
    }
}

/// A line `NIC0: mlx5_0` of the legend.
pub(super) struct Name<'a> {
    pub line: usize,
    pub label: &'a str,
    pub device: &'a str,
}

/// A column that does not belong to a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Affinity {
    /// `CPU Affinity`.
    Cpus,
    /// `NUMA Affinity`.
    Numa,
    /// `GPU NUMA ID`.
    GpuMemory,
}

impl Affinity {
    const ALL: [Affinity; 3] = [Affinity::Cpus, Affinity::Numa, Affinity::GpuMemory];

    pub(super) fn title(self) -> &'static str {
        match self {
            Affinity::Cpus => "CPU Affinity",
            Affinity::Numa => "NUMA Affinity",
            Affinity::GpuMemory => "GPU NUMA ID",
        }
    }

    pub(super) fn example(self) -> &'static str {
        match self {
            Affinity::Cpus => "a list of CPUs, such as 0-31,64-95, or N/A",
            Affinity::Numa => "a NUMA node or a list of them, such as 0,3-9, or N/A",
            Affinity::GpuMemory => "the number of a NUMA node, or N/A",
        }
    }
}

/// Strips the escapes that underline the header, even if a paste lost their first character.
pub(super) fn without_escapes(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        match c {
            '\u{1b}' if rest.peek() == Some(&'[') => {
                rest.next();
                // Parameters, then the letter that ends the escape.
                while rest.next_if(|c| c.is_ascii_digit() || *c == ';').is_some() {}
                rest.next_if(char::is_ascii_alphabetic);
            }
            '\u{1b}' | '\u{feff}' | '\u{fffd}' | '\u{241b}' => {}
            c => plain.push(c),
        }
    }
    plain.replace("[4m", "").replace("[0m", "")
}

/// Returns whether a word is a list of numbers or `N/A`, and therefore not a cell.
pub(super) fn is_list(word: &str) -> bool {
    word == "N/A" || word.starts_with(|c: char| c.is_ascii_digit())
}

/// The cells of a word: several if a tool printed them without a space, as in `NODENODE`. Empty if
/// it contains anything else.
fn cells(word: &str) -> Vec<&str> {
    const LONGEST: usize = "NV999".len();
    let (mut cells, mut rest) = (Vec::new(), word);
    while !rest.is_empty() {
        let ends = (1..=rest.len().min(LONGEST)).rev();
        let Some(cell) = ends.filter_map(|end| rest.get(..end)).find(|cell| Cell::parse(cell).is_some()) else {
            return Vec::new();
        };
        cells.push(cell);
        rest = &rest[cell.len()..];
    }
    cells
}

fn is_cell(word: &str) -> bool {
    !cells(word).is_empty()
}

/// `GPU0` or `NIC0`.
fn is_numbered(word: &str) -> bool {
    let nic = word.strip_prefix("NIC").is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|c| c.is_ascii_digit()));
    nic || gpu_index(word).is_some()
}

/// The labels of a word: several if a tool printed them without a space, as in `NIC7NIC8`.
fn labels(word: &str) -> Vec<&str> {
    let starts = |at: &usize| word.get(*at..).is_some_and(|rest| rest.starts_with("GPU") || rest.starts_with("NIC"));
    let starts: Vec<usize> = (0..word.len()).filter(starts).collect();
    let ends = starts.iter().skip(1).copied().chain([word.len()]);
    let labels: Vec<&str> = starts.iter().zip(ends).map(|(start, end)| &word[*start..end]).collect();
    if starts.first() == Some(&0) && labels.iter().all(|label| is_numbered(label)) { labels } else { vec![word] }
}

fn is_header(words: &[&str]) -> bool {
    let Some((first, rest)) = words.split_first() else { return false };
    let begins_cells = rest.first().is_some_and(|word| is_cell(word) || is_list(word));
    let is_label = |word: &&str| word.ends_with(|c: char| c.is_ascii_digit());
    let is_alone = rest.is_empty() && gpu_index(first).is_none();
    labels(first).into_iter().all(is_numbered)
        && !is_alone
        && !begins_cells
        && (rest.contains(&"Affinity") || rest.iter().all(is_label))
}

/// Finds header, rows and legend; `None` if there is no matrix of path classes.
pub(super) fn read<'a>(text: &'a str, faults: &mut Vec<MatrixFault>) -> Option<Table<'a>> {
    if AMD_TITLES.iter().any(|title| text.contains(title)) {
        let got = "the output of rocm-smi or amd-smi, which is about AMD GPUs";
        faults.push(Position::default().fault(got, "the output of `nvidia-smi topo -m`"));
        return None;
    }
    let words = |line: &'a str| line.split_whitespace().collect::<Vec<_>>();
    let mut lines = text.lines().zip(1..).map(|(line, number)| (number, line, words(line)));
    let Some((header_line, _, mut header)) = lines.by_ref().find(|(.., words)| is_header(words)) else {
        let expected = "the output of `nvidia-smi topo -m`, header included: GPU0 GPU1 NIC0 CPU Affinity NUMA Affinity";
        faults.push(Position::default().fault("no header", expected));
        return None;
    };
    let pcie_only = text.lines().take(header_line).any(|line| line.contains("topo -mp"));
    let mut rows: Vec<Row<'a>> = Vec::new();
    let mut legend = Vec::new();
    let (mut columns, mut affinities) = columns(&header);
    // Whether the next line can continue the last row.
    let mut open = false;
    while let Some((line, text, words)) = lines.next() {
        let Some(first) = words.first() else { continue };
        if let [label, device] = words.as_slice()
            && let Some(label) = label.strip_suffix(':')
            && (columns.contains(&label) || is_numbered(label))
            && gpu_index(label).is_none()
        {
            legend.push(Name { line, label, device });
            open = false;
        } else if is_header(&words) && !rows.is_empty() {
            // `nvidia-smi topo -p2p` prints a matrix of another kind.
            let is_p2p = lines.find(|(.., words)| !words.is_empty()).is_some_and(|(.., words)| has_p2p(&words));
            if !is_p2p {
                faults.push(Position::line(line).fault("a second header", "one matrix"));
            }
            break;
        } else if !legend.is_empty() {
            // The NIC legend is the last part of the output; what follows it is another text.
            continue;
        } else if begins_row(&words, &columns) {
            for word in words {
                match rows.last_mut() {
                    Some(row) if row.line == line && !columns.contains(&word) => row.push(word, text),
                    _ => rows.push(Row { label: word, line, words: Vec::new(), columns: Vec::new() }),
                }
            }
            open = true;
        } else if rows.is_empty() {
            header.extend(words);
            (columns, affinities) = self::columns(&header);
        } else if let Some(row) = rows.last_mut().filter(|_| open && words.get(1) != Some(&"=")) {
            let is_gpu = gpu_index(row.label).is_some();
            let expected = columns.len() + if is_gpu { affinities.len() } else { 0 };
            open = row.words.len() < expected && (is_cell(first) || is_list(first));
            if open {
                words.into_iter().for_each(|word| row.push(word, text));
            }
        } else {
            open = false;
        }
    }
    if rows.iter().any(|row| has_p2p(&row.words)) {
        let got = "the matrix of `nvidia-smi topo -p2p`, which says whether GPUs can reach each other";
        faults.push(Position::line(header_line).fault(got, "that of `nvidia-smi topo -m`"));
        return None;
    }
    separate_values(&mut rows, columns.len(), &affinities, faults);
    Some(Table { header_line, columns, affinities, pcie_only, rows, legend })
}

/// Separates the values after the cells that a tool printed without a space, as in `0N/A`. If one
/// row has that, the columns touch, and in a row that lacks a value it is at the end of the CPU
/// list. Otherwise a missing value is a blank cell.
fn separate_values(rows: &mut [Row<'_>], width: usize, affinities: &[Affinity], faults: &mut Vec<MatrixFault>) {
    let is_short = |row: &&mut Row<'_>| gpu_index(row.label).is_some() && row.words.len() == width + 2;
    if affinities != Affinity::ALL {
        return;
    }
    let mut columns_touch = false;
    for row in rows.iter_mut().filter(is_short) {
        if let Some(list) = row.words[width + 1].strip_suffix("N/A").filter(|list| is_list(list)) {
            row.split(width + 1, list.len());
            columns_touch = true;
        }
    }
    for row in rows.iter_mut().filter(is_short).filter(|_| columns_touch) {
        let word = row.words[width];
        let is_split = |at: &usize| match (word.get(..*at), word.get(*at..)) {
            (Some(cpus), Some(numa)) => cpus.parse::<CpuList>().is_ok() && numa.parse::<u32>().is_ok(),
            _ => false,
        };
        match (1..word.len()).filter(is_split).collect::<Vec<_>>().as_slice() {
            [at] => row.split(width, *at),
            _ => {
                let place = Position::line(row.line).row(row.label).column(Affinity::Cpus.title());
                faults.push(place.fault(word, "a space between the CPUs and the NUMA node"));
            }
        }
    }
}

/// Whether a row has a cell of `nvidia-smi topo -p2p`: OK, or why GPUs cannot reach each other.
fn has_p2p(words: &[&str]) -> bool {
    words.iter().any(|word| ["OK", "CNS", "GNS", "TNS", "NS", "DR"].contains(word))
}

/// Terminal column at which a word of a line begins.
fn column(line: &str, word: &str) -> usize {
    let before = &line[..(word.as_ptr() as usize).saturating_sub(line.as_ptr() as usize).min(line.len())];
    before.chars().fold(0, |column, c| if c == '\t' { (column / 8 + 1) * 8 } else { column + 1 })
}

/// A row begins with a column label. If its column is missing, it is still a row if cells follow.
fn begins_row(words: &[&str], columns: &[&str]) -> bool {
    let Some((first, cells)) = words.split_first() else { return false };
    let follows = |count: usize| cells.len() >= count && cells.iter().take(count).all(|word| is_cell(word));
    columns.contains(first) || (is_numbered(first) && follows(1)) || (!is_cell(first) && follows(2))
}

/// Splits the header into device labels and the titles after them, which have several words each.
fn columns<'a>(header: &[&'a str]) -> (Vec<&'a str>, Vec<Affinity>) {
    let (mut devices, mut affinities) = (Vec::new(), Vec::new());
    let mut rest = header;
    while let Some((first, others)) = rest.split_first() {
        // Tools that align the columns themselves print NIC11CPU Affinity where the label is long.
        if let Some(label) = first.strip_suffix("CPU").filter(|label| is_numbered(label))
            && others.first() == Some(&"Affinity")
        {
            devices.push(label);
            affinities.push(Affinity::Cpus);
            rest = &others[1..];
            continue;
        }
        let begins = |title: &Affinity| title.title().split(' ').zip(rest).all(|(word, got)| word == *got);
        match Affinity::ALL.into_iter().find(begins) {
            Some(title) => {
                affinities.push(title);
                rest = rest.get(title.title().split(' ').count()..).unwrap_or_default();
            }
            None => {
                devices.extend(labels(first));
                rest = others;
            }
        }
    }
    (devices, affinities)
}
