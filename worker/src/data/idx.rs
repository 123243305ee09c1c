//! IDX, the MNIST format (<http://yann.lecun.com/exdb/mnist/>): big-endian sizes, then bytes.

use super::error::DataError;
use super::files;
use super::loaded::{Classes, Content, Loaded, Pair, any_label, image_shape};
use super::rows::Rows;
use std::path::{Path, PathBuf};
use switchyard_worker_contract::config::ImageShape;

/// Magic number: two zeros, `8` for bytes, the number of dimensions.
const IMAGES: u32 = 0x0803;
const LABELS: u32 = 0x0801;

/// Reads the images and labels of `train`, and of `t10k` if present.
pub(super) fn load(root: &Path, limit: u64) -> Result<Loaded, DataError> {
    let mut bytes = 0;
    let mut part = |name: &str| -> Result<(ImageShape, Rows<u8>), DataError> {
        let (images, labels) = (find(root, name, "images", 3), find(root, name, "labels", 1));
        let file = read(&images, limit - bytes)?;
        bytes += file.len() as u64;
        let ([count, height, width], data) = parse(&images, &file, IMAGES)?;
        let shape = image_shape(height, width, 1)
            .ok_or_else(|| DataError::format(&images, format!("{width}x{height} pixels"), "sides of at most 16384"))?;
        let mut rows = Rows { each: height * width, data: data.to_vec(), labels: Vec::with_capacity(count) };
        let file = read(&labels, limit - bytes)?;
        bytes += file.len() as u64;
        let ([got], data) = parse(&labels, &file, LABELS)?;
        if got != count {
            return Err(DataError::format(&labels, format!("{got} labels"), format!("{count}, one for each image")));
        }
        for (sample, class) in data.iter().enumerate() {
            rows.labels.push(any_label(&labels, sample, (*class).into())?);
        }
        Ok((shape, rows))
    };
    let (shape, train) = part("train")?;
    let images = find(root, "t10k", "images", 3);
    let validation = match images.exists() {
        false => None,
        true => match part("t10k")? {
            (own, rows) if own == shape => Some(rows),
            (own, _) => {
                let size = |shape: ImageShape| format!("images of {}x{} pixels", shape.height, shape.width);
                return Err(DataError::format(&images, size(own), format!("{}, as for training", size(shape))));
            }
        },
    };
    let files = if validation.is_some() { 4 } else { 2 };
    Ok(Loaded {
        content: Content::Images(shape, Pair { train, validation }),
        classes: Classes::FromLabels,
        files,
        bytes,
        bad: 0,
    })
}

/// The file with the usual name; some copies have a dot in place of a dash.
fn find(root: &Path, part: &str, what: &str, sizes: u32) -> PathBuf {
    let usual = root.join(format!("{part}-{what}-idx{sizes}-ubyte"));
    let other = root.join(format!("{part}-{what}.idx{sizes}-ubyte"));
    if !usual.exists() && other.exists() { other } else { usual }
}

fn read(path: &Path, limit: u64) -> Result<Vec<u8>, DataError> {
    let mut packed = path.as_os_str().to_owned();
    packed.push(".gz");
    if !path.exists() && Path::new(&packed).exists() {
        return Err(DataError::format(Path::new(&packed), "a compressed file", "it unpacked (gunzip)"));
    }
    files::read_file(path, limit)
}

/// The dimensions, and the data after them.
fn parse<'a, const SIZES: usize>(
    path: &Path,
    file: &'a [u8],
    magic: u32,
) -> Result<([usize; SIZES], &'a [u8]), DataError> {
    let word = |index: usize| file.as_chunks::<4>().0.get(index).map(|word| u32::from_be_bytes(*word));
    let header = || format!("the header of an IDX file of bytes with {SIZES} sizes");
    match word(0) {
        Some(got) if got == magic => {}
        Some(got) => {
            return Err(DataError::format(
                path,
                format!("first bytes {got:#010x}"),
                format!("{magic:#010x}, {}", header()),
            ));
        }
        None => return Err(DataError::format(path, format!("{} bytes", file.len()), header())),
    }
    let mut sizes = [0; SIZES];
    for (index, size) in sizes.iter_mut().enumerate() {
        let found = || format!("{} bytes", file.len());
        *size = word(1 + index).ok_or_else(|| DataError::format(path, found(), header()))? as usize;
    }
    let data = &file[4 * (1 + SIZES)..];
    match sizes.iter().try_fold(1_usize, |product, size| product.checked_mul(*size)) {
        Some(expected) if expected == data.len() && expected > 0 => Ok((sizes, data)),
        _ => {
            let found = format!("{} bytes after the header", data.len());
            Err(DataError::format(path, found, format!("the product of the sizes {sizes:?}, above 0")))
        }
    }
}
