//! The NumPy array format
//! (<https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>).

use super::array::{Array, Type};
use super::error::DataError;
use std::path::Path;

/// Parses the bytes of a file.
pub(super) fn parse<'a>(path: &Path, file: &'a [u8]) -> Result<Array<'a>, DataError> {
    let wrong = |found: &str| DataError::format(path, found, "an array as numpy.save writes it");
    let [b'\x93', b'N', b'U', b'M', b'P', b'Y', major, _, rest @ ..] = file else {
        return Err(wrong("wrong first bytes"));
    };
    let (length, rest) = match (major, rest) {
        (1, [a, b, rest @ ..]) => (usize::from(u16::from_le_bytes([*a, *b])), rest),
        (2 | 3, [a, b, c, d, rest @ ..]) => (u32::from_le_bytes([*a, *b, *c, *d]) as usize, rest),
        _ => return Err(wrong(&format!("version {major} or a header that is cut off"))),
    };
    let (header, data) = rest.split_at_checked(length).ok_or_else(|| wrong("a header that is cut off"))?;
    let header = std::str::from_utf8(header).map_err(|_| wrong("a header that is not text"))?;
    let value = |key: &str| header.split_once(&format!("'{key}':")).map(|(_, value)| value.trim_start());
    match value("fortran_order") {
        Some(value) if value.starts_with("False") => {}
        Some(value) if value.starts_with("True") => {
            return Err(DataError::format(
                path,
                "columns first (fortran_order)",
                "rows first (numpy.ascontiguousarray)",
            ));
        }
        _ => return Err(wrong("no fortran_order in the header")),
    }
    let described = value("descr").and_then(|value| value.strip_prefix('\'')).and_then(|value| value.split_once('\''));
    let described = described.ok_or_else(|| wrong("no single number type in the header"))?.0;
    let kind = Type::ALL.into_iter().find(|kind| kind.numpy() == described).ok_or_else(|| {
        DataError::format(
            path,
            format!("numbers of type `{described}`"),
            format!("one of {}", Type::names(Type::numpy)),
        )
    })?;
    let shape = value("shape").and_then(|value| value.strip_prefix('(')).and_then(|value| value.split_once(')'));
    let shape: Option<Vec<usize>> = shape.and_then(|(sizes, _)| {
        let sizes = sizes.split(',').map(str::trim).filter(|size| !size.is_empty());
        sizes.map(|size| size.parse().ok()).collect()
    });
    let shape = shape.ok_or_else(|| wrong("no shape in the header"))?;
    Array::new(path, kind, shape, data)
}
