//! Tables with a header and rows, optionally gzipped, read row by row.

use csv::StringRecord;
use flate2::read::GzDecoder;
use std::io::{BufRead, BufReader, Read};

/// Row limit: the parsed rows are kept in memory, 100 bytes each.
pub const MAX_ROWS: usize = 5_000_000;

/// An error in a table.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    #[error("line {line}: {field}: got `{got}`; expected {expected}")]
    Field { line: u64, field: &'static str, got: String, expected: String },
    #[error("the header has no column `{0}`; expected {1}")]
    Column(&'static str, String),
    #[error("line {line}: {source}")]
    Form { line: u64, source: csv::Error },
    /// The message ends with the line and column.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error("no rows: expected some behind the header")]
    Empty,
    #[error("more than {MAX_ROWS} rows")]
    TooMany,
    #[error(transparent)]
    Read(#[from] std::io::Error),
}

/// Decompresses the file if necessary.
pub(crate) fn unpacked<'a>(from: impl Read + 'a) -> std::io::Result<Box<dyn BufRead + 'a>> {
    let mut from = BufReader::new(from);
    let is_packed = from.fill_buf()?.starts_with(&[0x1f, 0x8b]);
    Ok(if is_packed { Box::new(BufReader::new(GzDecoder::new(from))) } else { Box::new(from) })
}

/// A table after its header.
pub(crate) struct Table<R> {
    csv: csv::Reader<R>,
    header: StringRecord,
}

impl<R: Read> Table<R> {
    /// Cells are separated by commas, or by `|` as in `sacct --parsable2`, which never quotes.
    pub fn open(from: R, delimiter: u8) -> Result<Table<R>, TableError> {
        let mut builder = csv::ReaderBuilder::new();
        builder.trim(csv::Trim::All).delimiter(delimiter).quoting(delimiter == b',');
        let mut csv = builder.from_reader(from);
        let header = csv.headers().map_err(|source| TableError::Form { line: 1, source })?.clone();
        Ok(Table { csv, header })
    }

    pub fn has(&self, column: &str) -> bool {
        self.header.iter().any(|name| name == column)
    }

    /// Passes each row to `row` with its line (the header is line 1) and the header, which must
    /// have these columns.
    pub fn rows(
        mut self,
        columns: &[&'static str],
        mut take: impl FnMut(u64, &StringRecord, &StringRecord) -> Result<(), TableError>,
    ) -> Result<(), TableError> {
        if let Some(missing) = columns.iter().find(|column| !self.has(column)) {
            return Err(TableError::Column(missing, columns.join(", ")));
        }
        let mut record = StringRecord::new();
        let mut rows = 0;
        loop {
            let line = self.csv.position().line();
            if !self.csv.read_record(&mut record).map_err(|source| TableError::Form { line, source })? {
                break;
            }
            if rows == MAX_ROWS {
                return Err(TableError::TooMany);
            }
            rows += 1;
            take(line, &record, &self.header)?;
        }
        if rows == 0 { Err(TableError::Empty) } else { Ok(()) }
    }
}
