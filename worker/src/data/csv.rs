//! Comma-separated numeric rows; the last column is the class.

use super::bad::{BadSample, BadSamples, Side};
use super::error::DataError;
use super::files;
use super::loaded::{Content, Loaded, Pair, check_shape};
use super::rows::{MAX_CLASSES, Rows};
use std::path::Path;
use switchyard_worker_contract::config::Csv;

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
    let mut parser = Parser {
        width: csv.image.map(|image| image.height as usize * image.width as usize * image.channels as usize),
        largest: csv.image.map(|_| csv.largest),
        numbers: Vec::new(),
    };
    let bad = BadSamples::new(max_bad, 0);
    let (mut data, mut labels) = (Vec::new(), Vec::new());
    for (index, line) in file.split(|byte| *byte == b'\n').enumerate() {
        let line = line.trim_ascii();
        if line.is_empty() || index == 0 && is_header(line) {
            continue;
        }
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
    let Some(width) = parser.width.filter(|_| !labels.is_empty()) else {
        return Err(DataError::format(&path, "no sample", "lines of numbers separated by commas, the class last"));
    };
    let content = match csv.image {
        Some(shape) => {
            let byte = |value: &f32| (f64::from(*value) * 255.0 / csv.largest).round() as u8;
            let train = Rows { each: width, data: data.iter().map(byte).collect(), labels };
            Content::Images(shape, Pair { train, validation: None })
        }
        None => {
            data.shrink_to_fit();
            Content::Features(Pair { train: Rows { each: width, data, labels }, validation: None })
        }
    };
    Ok(Loaded { content, classes: None, files: 1, bytes: file.len() as u64, bad: bad.count() })
}

/// Whether none of the fields is numeric.
fn is_header(line: &[u8]) -> bool {
    line.split(|byte| *byte == b',').all(|field| number(field).is_none())
}

fn number(field: &[u8]) -> Option<f64> {
    std::str::from_utf8(field.trim_ascii()).ok()?.parse().ok()
}

struct Parser {
    /// Values per sample; without a configured shape, the first line determines it.
    width: Option<usize>,
    /// Largest value, for images.
    largest: Option<f64>,
    /// Values of the last line.
    numbers: Vec<f32>,
}

impl Parser {
    /// Reads a line into `numbers`; returns the class, or the error text.
    fn sample(&mut self, line: &[u8]) -> Result<u32, String> {
        self.numbers.clear();
        let mut class = None;
        for (column, field) in line.split(|byte| *byte == b',').enumerate() {
            let value = number(field).filter(|value| value.is_finite());
            let value = value.ok_or_else(|| {
                format!(
                    "column {} is `{}`: expected a number",
                    column + 1,
                    String::from_utf8_lossy(&field[..field.len().min(20)])
                )
            })?;
            // The last value is the class, and only the end of the line shows which one that is.
            if let Some(before) = class.replace(value) {
                if self.largest.is_some_and(|largest| !(0.0..=largest).contains(&before)) {
                    let largest = self.largest.unwrap_or_default();
                    return Err(format!("column {column} is {before}: expected 0 to {largest}"));
                }
                self.numbers.push(before as f32);
            }
        }
        let (width, got) = (self.width.unwrap_or(self.numbers.len()), self.numbers.len());
        if got != width || got == 0 {
            return Err(format!("{got} numbers before the class: expected {}", width.max(1)));
        }
        let class = class.unwrap_or(f64::NAN);
        if class.fract() != 0.0 || !(0.0..f64::from(MAX_CLASSES)).contains(&class) {
            return Err(format!("the class is {class}: expected a whole number from 0 to {}", MAX_CLASSES - 1));
        }
        self.width = Some(width);
        Ok(class as u32)
    }
}
