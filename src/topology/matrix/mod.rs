//! Parses the text of `nvidia-smi topo -m`: the path class or NVLinks between each pair of devices.
//!
//! [`parse`] accepts text as users paste it: tabs or spaces, wrapped or merged rows, surrounding
//! prompts, and the escapes that underline the header. It rejects contradictory or incomplete text,
//! because a matrix without its last rows still looks like a matrix. [`super::import`] interprets
//! the result as PCIe paths.

mod fault;
mod text;

pub use fault::{Faults, MatrixFault};

use fault::Position;
use std::collections::BTreeMap;
use switchyard_core::path::PathClass;
use switchyard_worker_contract::CpuList;
use text::{Affinity, Row, Table, is_list};

/// Maximum number of GPUs in a `GPUTopology`.
const MAX_GPUS: usize = 64;
/// Maximum number of NICs in a `GPUTopology`.
const MAX_NICS: usize = 256;
/// Maximum length of an RDMA device or column name in a `GPUTopology`.
const MAX_NAME_LEN: usize = 32;
/// Maximum length of a CPU list in a `GPUTopology`.
const MAX_LIST_LEN: usize = 8192;

/// A parsed matrix. Devices are numbered: GPUs first, by index, then NICs in column order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Matrix {
    /// GPUs by ascending index.
    pub gpus: Vec<Gpu>,
    /// NICs in column order.
    pub nics: Vec<Nic>,
    /// Whether the text is from `nvidia-smi topo -mp`, which leaves NVLinks out.
    pub pcie_only: bool,
    /// Cells by device and device; `None` if unknown.
    cells: Vec<Vec<Option<Cell>>>,
}

/// A GPU of a matrix.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Gpu {
    /// Number in its label.
    pub index: u32,
    /// CPUs near it; `None` if unknown or `N/A`.
    pub cpus: Option<CpuList>,
    /// NUMA nodes near it. Several on machines whose GPU memory is also a NUMA node.
    pub numa: Option<CpuList>,
    /// NUMA node of the GPU's own memory.
    pub memory_numa: Option<u32>,
}

/// A NIC of a matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nic {
    /// Its column: `NIC0` or `mlx5_0`.
    pub label: String,
    /// RDMA device, from the legend or the column; `None` if unknown.
    pub device: Option<String>,
}

impl Nic {
    /// The usual name: the RDMA device if known, otherwise the column.
    pub fn name(&self) -> &str {
        self.device.as_deref().unwrap_or(&self.label)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cell {
    /// PCIe path class; `X` is [`PathClass::Same`].
    Pcie(PathClass),
    /// Number of NVLinks. They hide the PCIe path.
    NvLink(u32),
}

impl Cell {
    fn parse(word: &str) -> Option<Cell> {
        match word.strip_prefix("NV") {
            Some(count) if count.len() <= 3 && count.bytes().all(|c| c.is_ascii_digit()) => {
                count.parse().ok().map(Cell::NvLink)
            }
            Some(_) => None,
            // Name of SYS in drivers of 2016.
            None if word == "SOC" => Some(Cell::Pcie(PathClass::Sys)),
            None => PathClass::from_word(word).map(Cell::Pcie),
        }
    }

    /// Name that `nvidia-smi topo` prints.
    pub fn word(self) -> String {
        match self {
            Cell::Pcie(class) => class.word().to_owned(),
            Cell::NvLink(count) => format!("NV{count}"),
        }
    }
}

impl Matrix {
    /// Number of GPUs and NICs.
    pub fn devices(&self) -> usize {
        self.gpus.len() + self.nics.len()
    }

    /// The cell of two devices.
    pub fn cell(&self, a: usize, b: usize) -> Option<Cell> {
        *self.cells.get(a)?.get(b)?
    }

    /// PCIe path class between two devices, if known.
    pub fn class(&self, a: usize, b: usize) -> Option<PathClass> {
        match self.cell(a, b) {
            Some(Cell::Pcie(class)) => Some(class),
            Some(Cell::NvLink(_)) | None => None,
        }
    }

    /// NVLinks between two devices.
    pub fn nvlinks(&self, a: usize, b: usize) -> Option<u32> {
        match self.cell(a, b) {
            Some(Cell::NvLink(count)) => Some(count),
            Some(Cell::Pcie(_)) | None => None,
        }
    }

    /// Column label of a device.
    pub fn label(&self, device: usize) -> String {
        match self.gpus.get(device) {
            Some(gpu) => format!("GPU{}", gpu.index),
            None => self.nics.get(device - self.gpus.len()).map(|nic| nic.label.clone()).unwrap_or_default(),
        }
    }
}

/// Parses the text of `nvidia-smi topo -m`.
///
/// # Errors
/// All faults in the text, at once.
///
/// ```
/// let text = "      GPU0 NIC0 CPU Affinity NUMA Affinity
///             GPU0  X   PIX  0-31         0
///             NIC0 PIX   X";
/// let matrix = switchyard_topology::matrix::parse(text).unwrap();
/// assert_eq!(matrix.class(0, 1), Some(switchyard_core::path::PathClass::Pix));
/// ```
pub fn parse(text: &str) -> Result<Matrix, Faults> {
    let text = text::without_escapes(text);
    let mut faults = Vec::new();
    let Some(table) = text::read(&text, &mut faults) else { return Err(Faults(faults)) };
    let rows = rows_by_column(&table, &mut faults);
    let cells = cells(&table, &rows, &mut faults);
    let matrix = assemble(&table, &rows, &cells, &mut faults);
    if faults.is_empty() { Ok(matrix) } else { Err(Faults(faults)) }
}

/// The number in a GPU's label.
fn gpu_index(label: &str) -> Option<u32> {
    let index = label.strip_prefix("GPU")?.parse::<u32>().ok()?;
    // Rejects other spellings of the number, such as GPU01.
    (label == format!("GPU{index}")).then_some(index)
}

/// The row of each column. Reports missing, duplicate and excess rows and columns.
fn rows_by_column<'a, 't>(table: &'t Table<'a>, faults: &mut Vec<MatrixFault>) -> Vec<Option<&'t Row<'a>>> {
    let header = table.header_line;
    let gpus = table.columns.iter().filter(|label| gpu_index(label).is_some()).count();
    let nics = table.columns.len() - gpus;
    let at_header = || Position::line(header);
    if gpus == 0 {
        faults.push(at_header().fault(format!("{nics} columns of NICs and none of a GPU"), "a column GPU0"));
    }
    if gpus > MAX_GPUS {
        faults.push(at_header().fault(format!("{gpus} GPUs"), format!("at most {MAX_GPUS}")));
    }
    if nics > MAX_NICS {
        faults.push(at_header().fault(format!("{nics} NICs"), format!("at most {MAX_NICS}")));
    }
    let mut by_label: BTreeMap<&str, &Row<'_>> = BTreeMap::new();
    for row in &table.rows {
        let place = || Position::line(row.line).row(row.label);
        if let Some(first) = by_label.get(row.label) {
            faults.push(place().fault("a second row", format!("one; the first is in line {}", first.line)));
        } else if table.columns.contains(&row.label) {
            by_label.insert(row.label, row);
        } else {
            faults.push(place().fault("a row without a column", format!("a column in the header (line {header})")));
        }
    }
    let nic_rows = by_label.keys().filter(|label| gpu_index(label).is_none()).count();
    for (position, label) in table.columns.iter().enumerate() {
        if table.columns[..position].contains(label) {
            faults.push(at_header().column(label).fault("a second column", "one"));
        } else if !by_label.contains_key(label) && (gpu_index(label).is_some() || nic_rows > 0) {
            let got = format!("no row, but a column in the header (line {header})");
            faults.push(Position::default().row(label).fault(got, "one row for each; is the text cut off?"));
        }
        if label.chars().count() > MAX_NAME_LEN {
            let got = format!("a name of {} characters", label.chars().count());
            faults.push(at_header().column(label).fault(got, format!("at most {MAX_NAME_LEN}")));
        }
    }
    table.columns.iter().map(|label| by_label.get(label).copied()).collect()
}

/// The cells by column and column. Checks each one, and that the matrix is symmetric.
fn cells(table: &Table<'_>, rows: &[Option<&Row<'_>>], faults: &mut Vec<MatrixFault>) -> Vec<Vec<Option<Cell>>> {
    let mut cells: Vec<Vec<Option<Cell>>> = rows
        .iter()
        .enumerate()
        .map(|(at, row)| match row {
            Some(row) => cells_of_row(table, row, at, faults),
            None => vec![None; rows.len()],
        })
        .collect();
    for a in 0..rows.len() {
        for b in 0..a {
            let (Some(row), Some(mirror)) = (rows[a], rows[b]) else { continue };
            if let (Some(cell), Some(expected)) = (cells[a][b], cells[b][a])
                && cell != expected
            {
                let expected = format!(
                    "{} as in row {}, column {} (line {})",
                    expected.word(),
                    mirror.label,
                    row.label,
                    mirror.line
                );
                faults.push(Position::line(row.line).row(row.label).column(mirror.label).fault(cell.word(), expected));
            }
        }
    }
    // The rows of NICs can be missing. The rows of the GPUs then contain everything known.
    for (a, _) in rows.iter().enumerate().filter(|(_, row)| row.is_none()) {
        let itself = Some(Cell::Pcie(PathClass::Same));
        cells[a] = cells.iter().enumerate().map(|(b, row)| if a == b { itself } else { row[a] }).collect();
    }
    cells
}

fn cells_of_row(table: &Table<'_>, row: &Row<'_>, at: usize, faults: &mut Vec<MatrixFault>) -> Vec<Option<Cell>> {
    let width = table.columns.len();
    let mut cells = vec![None; width];
    for (position, column) in table.columns.iter().enumerate() {
        let place = || Position::line(row.line).row(row.label).column(column);
        let word = match row.words.get(position) {
            Some(word) if !is_list(word) => *word,
            // The CPU list follows the last cell.
            _ => {
                faults.push(
                    place().fault(format!("the end of the row after {position} cells"), format!("{width} cells")),
                );
                return cells;
            }
        };
        let both_gpus = gpu_index(row.label).is_some() && gpu_index(column).is_some();
        match Cell::parse(word) {
            Some(Cell::Pcie(PathClass::Same)) if position != at => {
                faults.push(place().fault("X", "a class: X is for a device and itself"));
            }
            Some(cell) if position == at && cell != Cell::Pcie(PathClass::Same) => {
                faults.push(place().fault(word, "X"))
            }
            Some(Cell::NvLink(0)) => faults.push(place().fault(word, "NV1 or more, or a class of PCIe")),
            Some(Cell::NvLink(_)) if !both_gpus => {
                faults.push(place().fault(word, "PIX, PXB, PHB, NODE or SYS: NVLinks join GPUs only"));
            }
            Some(cell) => cells[position] = Some(cell),
            None => faults.push(place().fault(word, "X, NV and a number, PIX, PXB, PHB, NODE or SYS")),
        }
    }
    let most = width + table.affinities.len();
    if let Some(word) = row.words.get(most) {
        let got = format!("{word} after {most} words");
        faults.push(Position::line(row.line).row(row.label).fault(got, format!("{most} words, one for each column")));
    }
    cells
}

/// Sorts the columns into device order and parses the text next to the cells.
fn assemble(
    table: &Table<'_>,
    rows: &[Option<&Row<'_>>],
    cells: &[Vec<Option<Cell>>],
    faults: &mut Vec<MatrixFault>,
) -> Matrix {
    let mut gpus: Vec<(u32, usize)> = Vec::new();
    let mut nics: Vec<usize> = Vec::new();
    for (position, label) in table.columns.iter().enumerate() {
        match gpu_index(label) {
            Some(index) => gpus.push((index, position)),
            None => nics.push(position),
        }
    }
    gpus.sort_unstable();
    let order: Vec<usize> = gpus.iter().map(|(_, position)| *position).chain(nics.iter().copied()).collect();
    Matrix {
        gpus: gpus.iter().map(|(index, position)| gpu(*index, table, rows[*position], faults)).collect(),
        nics: names(table, &nics, faults),
        pcie_only: table.pcie_only,
        cells: order.iter().map(|a| order.iter().map(|b| cells[*a][*b]).collect()).collect(),
    }
}

fn gpu(index: u32, table: &Table<'_>, row: Option<&Row<'_>>, faults: &mut Vec<MatrixFault>) -> Gpu {
    let mut gpu = Gpu { index, ..Gpu::default() };
    let Some(row) = row else { return gpu };
    for (affinity, word) in values(table, row) {
        if *word == "N/A" {
            continue;
        }
        let list = if word.len() > MAX_LIST_LEN { None } else { word.parse::<CpuList>().ok() };
        let Some(list) = list.filter(|list| *affinity != Affinity::GpuMemory || list.len() == 1) else {
            let place = Position::line(row.line).row(row.label).column(affinity.title());
            faults.push(place.fault(*word, affinity.example()));
            continue;
        };
        match affinity {
            Affinity::Cpus => gpu.cpus = Some(list),
            Affinity::Numa => gpu.numa = Some(list),
            Affinity::GpuMemory => gpu.memory_numa = list.first(),
        }
    }
    gpu
}

/// The values next to the cells. Where one is blank, the terminal column tells which: a container
/// without CPUs near a GPU has no CPU list.
fn values<'t>(table: &'t Table<'_>, row: &'t Row<'_>) -> Vec<(&'t Affinity, &'t &'t str)> {
    let width = table.columns.len();
    let words = row.words.iter().skip(width);
    let count = table.affinities.len();
    let full = |row: &&Row<'_>| gpu_index(row.label).is_some() && row.words.len() == width + count;
    let Some(full) = table.rows.iter().find(full).filter(|_| words.len() < count) else {
        return table.affinities.iter().zip(words).collect();
    };
    let columns = row.columns.iter().skip(width);
    let nearest = |column: usize| {
        let distance = |index: &usize| full.columns[width + index].abs_diff(column);
        (0..count).min_by_key(distance).unwrap_or_default()
    };
    words.zip(columns).map(|(word, column)| (&table.affinities[nearest(*column)], word)).collect()
}

/// The NICs with their names from the legend.
fn names(table: &Table<'_>, positions: &[usize], faults: &mut Vec<MatrixFault>) -> Vec<Nic> {
    let mut devices: BTreeMap<&str, &str> = BTreeMap::new();
    for entry in &table.legend {
        let place = || Position::line(entry.line).row(entry.label);
        if !table.columns.contains(&entry.label) {
            faults.push(
                place().fault("a name in the legend without a column", "a column in the header; is the text cut off?"),
            );
        } else if entry.device.chars().count() > MAX_NAME_LEN {
            faults.push(place().fault(entry.device, format!("a name of at most {MAX_NAME_LEN} characters")));
        } else if devices.insert(entry.label, entry.device).is_some() {
            faults.push(place().fault("a second name in the legend", "one"));
        } else if devices.values().filter(|device| **device == entry.device).count() > 1 {
            faults.push(place().fault(entry.device, "a name that no other NIC has"));
        }
    }
    let is_numbered =
        |label: &str| label.strip_prefix("NIC").is_some_and(|rest| rest.bytes().all(|c| c.is_ascii_digit()));
    let nic = |label: &str| Nic {
        label: label.to_owned(),
        device: match devices.get(label) {
            Some(device) => Some((*device).to_owned()),
            None if is_numbered(label) => None,
            None => Some(label.to_owned()),
        },
    };
    positions.iter().map(|position| nic(table.columns[*position])).collect()
}

#[cfg(test)]
mod tests;
