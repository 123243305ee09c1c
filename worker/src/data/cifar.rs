//! CIFAR-10, binary version (<https://www.cs.toronto.edu/~kriz/cifar.html>): records of a class and
//! 32x32 pixels in planar order, red, green, blue.

use super::error::DataError;
use super::files;
use super::loaded::{Classes, Content, Loaded, Pair, label};
use super::rows::Rows;
use std::path::{Path, PathBuf};
use switchyard_worker_contract::config::ImageShape;

const CLASSES: u32 = 10;
const SIDE: usize = 32;
const PLANE: usize = SIDE * SIDE;
const RECORD: usize = 1 + 3 * PLANE;

/// Reads the five training files and, if present, `test_batch.bin`.
pub(super) fn load(root: &Path, limit: u64) -> Result<Loaded, DataError> {
    let train: Vec<PathBuf> = (1..=5).map(|number| root.join(format!("data_batch_{number}.bin"))).collect();
    let test = Some(root.join("test_batch.bin")).filter(|path| path.exists());
    let (mut files, mut bytes) = (0, 0);
    let mut read = |paths: &[PathBuf]| -> Result<Rows<u8>, DataError> {
        let mut rows = Rows { each: 3 * PLANE, data: Vec::new(), labels: Vec::new() };
        for path in paths {
            let file = files::read_file(path, limit - bytes)?;
            files += 1;
            bytes += file.len() as u64;
            append(path, &file, &mut rows)?;
        }
        Ok(rows)
    };
    let train = read(&train)?;
    let validation = test.map(|test| read(&[test])).transpose()?;
    let shape = ImageShape { height: SIDE as u32, width: SIDE as u32, channels: 3 };
    Ok(Loaded {
        content: Content::Images(shape, Pair { train, validation }),
        classes: Classes::Count(CLASSES),
        files,
        bytes,
        bad: 0,
    })
}

fn append(path: &Path, file: &[u8], rows: &mut Rows<u8>) -> Result<(), DataError> {
    let (records, rest) = file.as_chunks::<RECORD>();
    if records.is_empty() || !rest.is_empty() {
        let found = format!("{} bytes", file.len());
        return Err(DataError::format(path, found, format!("a multiple of {RECORD}, the bytes of a record")));
    }
    rows.data.reserve_exact(file.len());
    rows.labels.reserve_exact(records.len());
    for (sample, [class, planes @ ..]) in records.iter().enumerate() {
        rows.labels.push(label(path, sample, (*class).into(), CLASSES)?);
        let (red, rest) = planes.split_at(PLANE);
        let (green, blue) = rest.split_at(PLANE);
        for ((red, green), blue) in red.iter().zip(green).zip(blue) {
            rows.data.extend_from_slice(&[*red, *green, *blue]);
        }
    }
    Ok(())
}
