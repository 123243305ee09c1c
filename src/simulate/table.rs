//! Tables: CSV with a header, packed by gzip or not, read row by row.

use csv::StringRecord;
use flate2::read::GzDecoder;
use std::io::{BufRead, BufReader, Read};

/// Most rows that are read: what is made of them is kept in memory, 100 bytes each.
pub const MOST_ROWS: usize = 5_000_000;

/// What is wrong with a table.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    #[error("line {line}: {field}: got `{got}`; expected {expected}")]
    Field { line: u64, field: &'static str, got: String, expected: String },
    #[error("the header has no column `{0}`; expected {1}")]
    Column(&'static str, String),
    #[error("line {line}: {source}")]
    Form { line: u64, source: csv::Error },
    #[error("no rows: expected some behind the header")]
    Empty,
    #[error("more than {MOST_ROWS} rows")]
    TooMany,
    #[error(transparent)]
    Read(#[from] std::io::Error),
}

/// Gives each row with its line, the header being 1, and the header.
pub(crate) fn read(
    from: impl Read,
    columns: &[&'static str],
    mut take: impl FnMut(u64, &StringRecord, &StringRecord) -> Result<(), TableError>,
) -> Result<(), TableError> {
    let mut from = BufReader::new(from);
    let is_packed = from.fill_buf()?.starts_with(&[0x1f, 0x8b]);
    let plain: Box<dyn Read + '_> = if is_packed { Box::new(GzDecoder::new(from)) } else { Box::new(from) };
    let mut csv = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(plain);
    let header = csv.headers().map_err(|source| TableError::Form { line: 1, source })?.clone();
    if let Some(missing) = columns.iter().find(|column| !header.iter().any(|name| name == **column)) {
        return Err(TableError::Column(missing, columns.join(", ")));
    }
    let mut record = StringRecord::new();
    let mut rows = 0;
    loop {
        let line = csv.position().line();
        if !csv.read_record(&mut record).map_err(|source| TableError::Form { line, source })? {
            break;
        }
        if rows == MOST_ROWS {
            return Err(TableError::TooMany);
        }
        rows += 1;
        take(line, &record, &header)?;
    }
    if rows == 0 { Err(TableError::Empty) } else { Ok(()) }
}
