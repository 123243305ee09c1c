//! A numeric array in a file.

use super::error::DataError;
use safetensors::Dtype;
use std::path::Path;

/// Supported element types.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Type {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    F32,
}

impl Type {
    pub(super) const ALL: [Type; 9] =
        [Type::U8, Type::I8, Type::U16, Type::I16, Type::U32, Type::I32, Type::U64, Type::I64, Type::F32];

    /// The NumPy name.
    pub(super) fn numpy(self) -> &'static str {
        match self {
            Type::U8 => "|u1",
            Type::I8 => "|i1",
            Type::U16 => "<u2",
            Type::I16 => "<i2",
            Type::U32 => "<u4",
            Type::I32 => "<i4",
            Type::U64 => "<u8",
            Type::I64 => "<i8",
            Type::F32 => "<f4",
        }
    }

    pub(super) fn of(dtype: Dtype) -> Option<Type> {
        Some(match dtype {
            Dtype::U8 => Type::U8,
            Dtype::I8 => Type::I8,
            Dtype::U16 => Type::U16,
            Dtype::I16 => Type::I16,
            Dtype::U32 => Type::U32,
            Dtype::I32 => Type::I32,
            Dtype::U64 => Type::U64,
            Dtype::I64 => Type::I64,
            Dtype::F32 => Type::F32,
            _ => return None,
        })
    }

    /// All names, for messages.
    pub(super) fn names(name: impl Fn(Type) -> &'static str) -> String {
        Type::ALL.map(name).join(", ")
    }

    pub(super) fn bytes(self) -> usize {
        match self {
            Type::U8 | Type::I8 => 1,
            Type::U16 | Type::I16 => 2,
            Type::U32 | Type::I32 | Type::F32 => 4,
            Type::U64 | Type::I64 => 8,
        }
    }
}

/// An array in a file.
#[derive(Debug)]
pub(super) struct Array<'a> {
    pub kind: Type,
    pub shape: Vec<usize>,
    pub data: &'a [u8],
}

impl<'a> Array<'a> {
    pub(super) fn new(path: &Path, kind: Type, shape: Vec<usize>, data: &'a [u8]) -> Result<Self, DataError> {
        let bytes = shape.iter().try_fold(kind.bytes(), |bytes, size| bytes.checked_mul(*size));
        match bytes == Some(data.len()) {
            true => Ok(Array { kind, shape, data }),
            false => {
                let expected = format!("{} bytes for each of {shape:?} numbers", kind.bytes());
                Err(DataError::format(path, format!("an array of {} bytes", data.len()), expected))
            }
        }
    }

    /// The elements of an integer array.
    pub(super) fn integers(&self) -> Box<dyn Iterator<Item = i128> + 'a> {
        macro_rules! numbers {
            ($type:ty) => {
                Box::new(self.data.as_chunks().0.iter().map(|bytes| <$type>::from_le_bytes(*bytes).into()))
            };
        }
        match self.kind {
            Type::U8 => numbers!(u8),
            Type::I8 => numbers!(i8),
            Type::U16 => numbers!(u16),
            Type::I16 => numbers!(i16),
            Type::U32 => numbers!(u32),
            Type::I32 => numbers!(i32),
            Type::U64 => numbers!(u64),
            Type::I64 => numbers!(i64),
            Type::F32 => Box::new(std::iter::empty()),
        }
    }
}
