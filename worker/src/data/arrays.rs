//! Named arrays: a safetensors file, or a directory of `.npy` files.

use super::array::{Array, Type};
use super::error::DataError;
use super::loaded::{Classes, Content, Loaded, Pair, any_label, image_shape};
use super::rows::Rows;
use super::{files, npy};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use switchyard_worker_contract::config::ImageShape;

/// Arrays of a file format by name, each with its file.
type Arrays<'a> = BTreeMap<String, (PathBuf, Array<'a>)>;

/// Name prefix of validation arrays.
const VALIDATION: &str = "validation_";
const NAMES: [&str; 3] = ["images", "features", "labels"];

/// Reads a safetensors file, or the `.npy` files of a directory.
pub(super) fn load(root: &Path, limit: u64) -> Result<Loaded, DataError> {
    let directory = files::kind(root)?.is_dir();
    let mut paths = vec![root.to_owned()];
    if directory {
        let names = ["", VALIDATION].into_iter().flat_map(|prefix| NAMES.map(|name| format!("{prefix}{name}.npy")));
        paths = names.map(|name| root.join(name)).filter(|path| path.exists()).collect();
    }
    let mut contents = Vec::new();
    let mut bytes = 0;
    for path in paths {
        let file = files::read_file(&path, limit - bytes)?;
        bytes += file.len() as u64;
        contents.push((path, file));
    }
    let mut arrays = Arrays::new();
    for (path, file) in &contents {
        if directory {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            arrays.insert(name, (path.clone(), npy::parse(path, file)?));
        } else {
            arrays = safetensors(path, file)?;
        }
    }
    let train = part(root, &arrays, "")?;
    let has_validation = arrays.keys().any(|name| name.starts_with(VALIDATION));
    let validation = if has_validation { Some(part(root, &arrays, VALIDATION)?) } else { None };
    let content = match (train, validation) {
        (Part::Images(shape, train), None) => Content::Images(shape, Pair { train, validation: None }),
        (Part::Images(shape, train), Some(Part::Images(own, validation))) if own == shape => {
            Content::Images(shape, Pair { train, validation: Some(validation) })
        }
        (Part::Features(train), None) => Content::Features(Pair { train, validation: None }),
        (Part::Features(train), Some(Part::Features(validation))) if train.each == validation.each => {
            Content::Features(Pair { train, validation: Some(validation) })
        }
        _ => {
            return Err(DataError::format(root, "validation samples of another size", "those of the training samples"));
        }
    };
    Ok(Loaded { content, classes: Classes::FromLabels, files: contents.len() as u64, bytes, bad: 0 })
}

fn safetensors<'a>(path: &Path, file: &'a [u8]) -> Result<Arrays<'a>, DataError> {
    let tensors = SafeTensors::deserialize(file).map_err(|error| {
        DataError::format(
            path,
            format!("something other than safetensors ({error})"),
            "a file as safetensors writes it",
        )
    })?;
    let mut arrays = Arrays::new();
    for (name, tensor) in tensors.tensors() {
        if !NAMES.contains(&name.strip_prefix(VALIDATION).unwrap_or(&name)) {
            continue;
        }
        let kind = Type::of(tensor.dtype()).ok_or_else(|| {
            let expected = format!("one of {}", Type::names(Type::numpy));
            DataError::format(path, format!("tensor `{name}` of type {:?}", tensor.dtype()), expected)
        })?;
        let array = Array::new(path, kind, tensor.shape().to_vec(), tensor.data())?;
        arrays.insert(name, (path.to_owned(), array));
    }
    Ok(arrays)
}

/// The samples of one split.
enum Part {
    Images(ImageShape, Rows<u8>),
    Features(Rows<f32>),
}

fn part(root: &Path, arrays: &Arrays<'_>, prefix: &str) -> Result<Part, DataError> {
    let get = |name: &str| arrays.get(&format!("{prefix}{name}"));
    let missing =
        |what: String| DataError::format(root, format!("no array {what}"), "`labels`, and `images` or `features`");
    let (labels_path, labels) = get("labels").ok_or_else(|| missing(format!("`{prefix}labels`")))?;
    let (path, samples) = get("images")
        .or_else(|| get("features"))
        .ok_or_else(|| missing(format!("`{prefix}images` or `{prefix}features`")))?;
    let (&[count], false) = (labels.shape.as_slice(), labels.kind == Type::F32) else {
        let found = format!("`{prefix}labels` of shape {:?} and type {:?}", labels.shape, labels.kind);
        return Err(DataError::format(labels_path, found, "one whole number for each sample"));
    };
    let numbers = labels.integers().enumerate();
    let labels: Result<Vec<u32>, DataError> =
        numbers.map(|(sample, number)| any_label(labels_path, sample, number)).collect();
    let labels = labels?;
    let wrong = |expected: &str| {
        let found = format!("samples of shape {:?} and type {:?} for {count} labels", samples.shape, samples.kind);
        DataError::format(path, found, expected)
    };
    if count == 0 || samples.data.is_empty() || samples.shape.first() != Some(&count) {
        return Err(wrong("as many samples as labels, at least one"));
    }
    let each = samples.data.len() / samples.kind.bytes() / count;
    let is_images = get("images").is_some();
    match (is_images, samples.kind, &samples.shape[1..]) {
        (true, Type::U8, &[height, width]) => {
            let shape = image_shape(height, width, 1).ok_or_else(|| wrong("sides of at most 16384 pixels"))?;
            Ok(Part::Images(shape, Rows { each, data: samples.data.to_vec(), labels }))
        }
        (true, Type::U8, &[height, width, channels @ (1 | 3)]) => {
            let shape = image_shape(height, width, channels).ok_or_else(|| wrong("sides of at most 16384 pixels"))?;
            Ok(Part::Images(shape, Rows { each, data: samples.data.to_vec(), labels }))
        }
        (true, ..) => Err(wrong("bytes of shape [samples, height, width] or [samples, height, width, 1 or 3]")),
        (false, Type::F32, &[_]) => {
            let values = samples.data.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
            let data: Vec<f32> = values.collect();
            match data.iter().position(|value| !value.is_finite()) {
                None => Ok(Part::Features(Rows { each, data, labels })),
                Some(at) => {
                    let found = format!("{} in sample {}", data[at], at / each);
                    Err(DataError::format(path, found, "finite numbers"))
                }
            }
        }
        (false, ..) => Err(wrong("32-bit floats of shape [samples, numbers]")),
    }
}
