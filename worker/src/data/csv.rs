//! Comma-separated numbers: one sample per line, one column with the class.

use super::bad::{BadSample, BadSamples, Side};
use super::error::DataError;
use super::files;
use super::loaded::{Content, Loaded, Pair, check_shape};
use super::rows::{MAX_CLASSES, Rows};
use std::path::Path;
use switchyard_worker_contract::config::{Column, Csv, Header, ImageShape};

const LABEL: &str = "spec.engine.data.labelColumn";
/// Usual names of the column with the class.
const USUAL: [&str; 4] = ["label", "class", "target", "y"];
/// Classes of a column that neither the job nor the header declares as the class: more look like
/// pixels or measurements.
const MAX_UNDECLARED: u32 = 100;
/// Fewer columns that are numbered from 0 can be a sample.
const MIN_NUMBERED: usize = 5;

/// Reads the file. A malformed line is skipped and counted, up to `max_bad`; empty lines are
/// ignored.
pub(super) fn load(csv: &Csv, max_bad: u64, limit: u64) -> Result<Loaded, DataError> {
    let path = files::absolute(Path::new(&csv.path));
    if let Some(shape) = &csv.image {
        check_shape(shape, 0)?;
    }
    if csv.image.is_some() && !(csv.largest.is_finite() && csv.largest > 0.0) {
        return Err(DataError::value("spec.engine.data.largestValue", csv.largest, "a number above 0"));
    }
    if files::kind(&path)?.is_dir() {
        return Err(DataError::format(&path, "a directory", "a file"));
    }
    let file = files::read_file(&path, limit)?;
    files::check_uncompressed(&path, &file)?;
    if file.starts_with(&[0xff, 0xfe]) || file.starts_with(&[0xfe, 0xff]) {
        return Err(DataError::format(&path, "text in UTF-16", "UTF-8"));
    }
    let text = file.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&file);
    let numbered = text.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii).enumerate();
    let mut lines = numbered.filter(|(_, line)| !line.is_empty()).peekable();
    let names = lines.peek().and_then(|(_, line)| header(csv, line));
    if names.is_some() {
        lines.next();
    }
    let none = || DataError::format(&path, "no sample", "lines of numbers separated by commas, one of them the class");
    let columns = match (&names, &csv.image) {
        (_, Some(image)) => pixels(image) + 1,
        (Some(names), None) => names.len(),
        (None, None) => {
            let is_sample = |line: &&[u8]| fields(line).all(|field| number(field).is_some());
            let mut all = lines.clone().map(|(_, line)| line);
            let line = all.clone().find(is_sample).or_else(|| all.next()).ok_or_else(none)?;
            fields(line).count()
        }
    };
    if columns < 2 {
        return Err(DataError::format(&path, "1 column", "at least 2 columns: the class and a feature"));
    }
    let label = LabelColumn::choose(csv, names.as_deref(), columns)?;
    let largest = csv.image.map(|_| csv.largest);
    let mut parser = Parser { columns, label: label.index, largest, numbers: Vec::with_capacity(columns) };
    let bad = BadSamples::new(max_bad, 0);
    let (mut data, mut labels) = (Vec::new(), Vec::new());
    for (index, line) in lines {
        match parser.sample(line) {
            Ok(class) => {
                data.extend_from_slice(&parser.numbers);
                labels.push(class);
            }
            Err(what) => {
                let what = format!("line {} of {}: {what}", index + 1, path.display());
                bad.record(Side::Training, BadSample { sample: index as u64, what })?;
            }
        }
    }
    if labels.is_empty() {
        return Err(none());
    }
    label.check(&labels)?;
    let each = columns - 1;
    let content = match csv.image {
        Some(shape) => {
            let byte = |value: &f32| (f64::from(*value) * 255.0 / csv.largest).round() as u8;
            Content::Images(
                shape,
                Pair { train: Rows { each, data: data.iter().map(byte).collect(), labels }, validation: None },
            )
        }
        None => {
            data.shrink_to_fit();
            Content::Features(Pair { train: Rows { each, data, labels }, validation: None })
        }
    };
    Ok(Loaded { content, classes: None, files: 1, bytes: file.len() as u64, bad: bad.count() })
}

fn pixels(image: &ImageShape) -> usize {
    image.height as usize * image.width as usize * image.channels as usize
}

/// The fields of a line, without the quotes that some programs put around names.
fn fields(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    line.split(|byte| *byte == b',').map(|field| {
        let field = field.trim_ascii();
        field.strip_prefix(b"\"").and_then(|field| field.strip_suffix(b"\"")).unwrap_or(field)
    })
}

fn number(field: &[u8]) -> Option<f64> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

/// The column names, if the first line is a header.
fn header(csv: &Csv, line: &[u8]) -> Option<Vec<String>> {
    let names: Vec<String> = fields(line).map(|field| String::from_utf8_lossy(field).into_owned()).collect();
    let is_header = match csv.header {
        Header::Present => true,
        Header::Absent => false,
        Header::Auto => {
            let is_label = |name: &String| match &csv.label {
                Some(Column::Name(label)) => name == label,
                _ => is_usual(name),
            };
            // pandas numbers columns without names.
            let is_numbered = || names.iter().enumerate().all(|(index, name)| *name == index.to_string());
            fields(line).all(|field| number(field).is_none())
                || names.iter().any(is_label)
                || names.len() >= MIN_NUMBERED && is_numbered()
        }
    };
    is_header.then_some(names)
}

fn is_usual(name: &str) -> bool {
    USUAL.iter().any(|usual| name.eq_ignore_ascii_case(usual))
}

/// The column with the class.
struct LabelColumn {
    /// From 0.
    index: usize,
    /// For messages, for example ``column 1 (`label`)``.
    words: String,
    /// Whether the job or its name declares it as the class.
    is_declared: bool,
}

impl LabelColumn {
    fn choose(csv: &Csv, names: Option<&[String]>, columns: usize) -> Result<LabelColumn, DataError> {
        let usual = |index: usize| names.and_then(|names| names.get(index)).is_some_and(|name| is_usual(name));
        let (index, is_declared) = match (&csv.label, names) {
            (Some(Column::Position(position)), _) => {
                let from = position.unsigned_abs() as usize;
                let index = if *position > 0 { from.checked_sub(1) } else { columns.checked_sub(from) };
                let index = index.filter(|index| *index < columns).ok_or_else(|| {
                    let expected = format!("a column from 1 to {columns}, or from -1 to -{columns} from the last");
                    DataError::value(LABEL, position, expected)
                })?;
                (index, true)
            }
            (Some(Column::Name(name)), Some(names)) => {
                let index = names.iter().position(|other| other == name);
                let list = || names.iter().take(8).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
                (index.ok_or_else(|| DataError::value(LABEL, format!("`{name}`"), format!("one of {}", list())))?, true)
            }
            (Some(Column::Name(name)), None) => {
                let expected = "a position, such as 1 for the first column: the file has no header";
                return Err(DataError::value(LABEL, format!("`{name}`"), expected));
            }
            (None, _) if usual(columns - 1) => (columns - 1, true),
            (None, _) if usual(0) => (0, true),
            (None, _) => (columns - 1, false),
        };
        let mut words = format!("column {}", index + 1);
        if let Some(name) = names.and_then(|names| names.get(index)) {
            words.push_str(&format!(" (`{name}`)"));
        }
        Ok(LabelColumn { index, words, is_declared })
    }

    /// Checks that the column can be the class.
    fn check(&self, labels: &[u32]) -> Result<(), DataError> {
        let (words, count) = (&self.words, labels.len());
        let expected = "the column with the class, by name or position: 1 is the first, -1 the last";
        let most = labels.iter().max().copied().unwrap_or_default();
        if count > 1 && labels.iter().all(|label| *label == labels[0]) {
            let got = format!("{words}, which is {most} in all {count} samples, so there is nothing to learn");
            return Err(DataError::value(LABEL, got, expected));
        }
        if !self.is_declared && most >= MAX_UNDECLARED {
            let got = format!("nothing, and the last, {words}, has numbers up to {most}, like pixels or measurements");
            return Err(DataError::value(LABEL, got, expected));
        }
        Ok(())
    }
}

struct Parser {
    /// Values per line.
    columns: usize,
    /// The column with the class, from 0.
    label: usize,
    /// Largest value, for images.
    largest: Option<f64>,
    /// Values of the last line, without the class.
    numbers: Vec<f32>,
}

impl Parser {
    /// Reads a line into `numbers`; returns the class, or the error text.
    fn sample(&mut self, line: &[u8]) -> Result<u32, String> {
        self.numbers.clear();
        let (mut class, mut got) = (f64::NAN, 0);
        for (index, field) in fields(line).enumerate() {
            got = index + 1;
            let wrong = |expected: &str| {
                let field = String::from_utf8_lossy(&field[..field.len().min(20)]);
                format!("column {got} is `{field}`: expected {expected}")
            };
            let value = number(field).filter(|value| value.is_finite()).ok_or_else(|| wrong("a number"))?;
            if index == self.label {
                class = value;
                continue;
            }
            if let Some(largest) = self.largest.filter(|largest| !(0.0..=*largest).contains(&value)) {
                return Err(wrong(&format!("0 to {largest}")));
            }
            let value = value as f32;
            if !value.is_finite() {
                return Err(wrong("at most 3.4e38"));
            }
            self.numbers.push(value);
        }
        if got != self.columns {
            return Err(format!("{got} columns: expected {}", self.columns));
        }
        if class.fract() != 0.0 || !(0.0..f64::from(MAX_CLASSES)).contains(&class) {
            return Err(format!(
                "the class in column {} is {class}: expected a whole number from 0 to {}, or another {LABEL}",
                self.label + 1,
                MAX_CLASSES - 1
            ));
        }
        Ok(class as u32)
    }
}
