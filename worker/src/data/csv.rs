//! Comma-separated numbers: one sample per line, one column with the class as a number or a name.

mod label;

use super::bad::{BadSample, BadSamples, Side};
use super::error::DataError;
use super::files;
use super::loaded::{Classes, Content, Loaded, Pair, check_shape};
use super::rows::Rows;
use label::{LABEL, LabelColumn, Labels, is_usual};
use std::borrow::Cow;
use std::path::Path;
use switchyard_worker_contract::config::{Column, Csv, Header, ImageShape};

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
            // All numbers but, perhaps, the class.
            let is_sample = |line: &&[u8]| fields(line).filter(|field| number(field).is_none()).count() <= 1;
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
    let classes = Labels::of(lines.clone().filter_map(|(_, line)| fields(line).nth(label.index)));
    let mut parser = Parser { columns, label: label.index, classes, largest, numbers: Vec::with_capacity(columns) };
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
    let class_names = parser.classes.into_names(&mut labels);
    label.check(&labels, &class_names)?;
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
    let classes = if class_names.is_empty() { Classes::FromLabels } else { Classes::Named(class_names) };
    Ok(Loaded { content, classes, files: 1, bytes: file.len() as u64, bad: bad.count() })
}

fn pixels(image: &ImageShape) -> usize {
    image.height as usize * image.width as usize * image.channels as usize
}

/// The fields of a line, without the quotes that some programs put around names. A comma in quotes
/// is part of the field.
fn fields(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(line);
    std::iter::from_fn(move || {
        let line = rest?.trim_ascii_start();
        let has_quotes = line.starts_with(b"\"");
        let mut is_quoted = false;
        let end = line.iter().position(|byte| {
            is_quoted ^= has_quotes && *byte == b'"';
            *byte == b',' && !is_quoted
        });
        rest = end.map(|end| &line[end + 1..]);
        let field = line[..end.unwrap_or(line.len())].trim_ascii_end();
        Some(field.strip_prefix(b"\"").and_then(|field| field.strip_suffix(b"\"")).unwrap_or(field))
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

struct Parser {
    /// Values per line.
    columns: usize,
    /// The column with the class, from 0.
    label: usize,
    classes: Labels,
    /// Largest value, for images.
    largest: Option<f64>,
    /// Values of the last line, without the class.
    numbers: Vec<f32>,
}

impl Parser {
    /// Reads a line into `numbers`; returns the class, or the error text.
    fn sample(&mut self, line: &[u8]) -> Result<u32, String> {
        self.numbers.clear();
        let (mut label, mut got): (&[u8], usize) = (&[], 0);
        for (index, field) in fields(line).enumerate() {
            got = index + 1;
            if index == self.label {
                label = field;
                continue;
            }
            let wrong = |expected: &str| format!("column {got} is `{}`: expected {expected}", shown(field));
            let hint = || format!("a number, or {LABEL}: {got} if this column is the class");
            let value = number(field).ok_or_else(|| wrong(&hint()))?;
            if !value.is_finite() {
                return Err(wrong("a number"));
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
        // Last, so that no class has only bad samples.
        self.classes.class(label).map_err(|expected| {
            let label = if label.is_empty() { "nothing".into() } else { shown(label) };
            format!("the class in column {} is {label}: expected {expected}", self.label + 1)
        })
    }
}

/// The start of a field, for messages.
fn shown(field: &[u8]) -> Cow<'_, str> {
    String::from_utf8_lossy(&field[..field.len().min(20)])
}
