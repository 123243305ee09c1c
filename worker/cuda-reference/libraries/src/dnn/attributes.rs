//! Attributes of each descriptor kind: type, count, and whether they are required.

use std::collections::BTreeMap;
use std::sync::Arc;

/// `cudnnBackendAttributeType_t`.
pub(super) const HANDLE: i32 = 0;
const DATA_TYPE: i32 = 1;
const BOOLEAN: i32 = 2;
pub(super) const INT64: i32 = 3;
const FLOAT: i32 = 4;
const VOID_PTR: i32 = 6;
const CONVOLUTION_MODE: i32 = 7;
const HEUR_MODE: i32 = 8;
pub(super) const NUMERICAL_NOTE: i32 = 11;
const POINTWISE_MODE: i32 = 14;
pub(super) const DESCRIPTOR: i32 = 15;
const REDUCTION_OPERATOR: i32 = 18;
const INT32: i32 = 23;
pub(super) const CHAR: i32 = 24;

/// Descriptor kinds.
pub(super) const POINTWISE: i32 = 0;
pub(super) const WINDOW: i32 = 1;
pub(super) const ENGINE: i32 = 2;
pub(super) const CONFIGURATION: i32 = 3;
pub(super) const HEURISTIC: i32 = 4;
pub(super) const PLAN: i32 = 5;
pub(super) const FORWARD: i32 = 10;
pub(super) const FILTERS: i32 = 11;
pub(super) const IMAGES: i32 = 12;
pub(super) const OF_POINTWISE: i32 = 13;
pub(super) const GRAPH: i32 = 15;
pub(super) const PACK: i32 = 16;
pub(super) const TENSOR: i32 = 17;
pub(super) const PRODUCT: i32 = 18;
pub(super) const OF_PRODUCT: i32 = 19;
pub(super) const REDUCTION: i32 = 21;
pub(super) const OF_REDUCTION: i32 = 22;
pub(super) const RESHAPE: i32 = 31;
pub(super) const DEVICE: i32 = 38;

/// A settable attribute: name, type, minimum and maximum number of values, and whether it is
/// required.
pub(super) struct AttributeSpec {
    pub(super) name: i32,
    pub(super) kind: i32,
    pub(super) counts: (usize, usize),
    pub(super) is_required: bool,
}

const fn one(name: i32, kind: i32) -> AttributeSpec {
    AttributeSpec { name, kind, counts: (1, 1), is_required: true }
}

const fn several(name: i32, kind: i32, count: usize) -> AttributeSpec {
    AttributeSpec { name, kind, counts: (count, count), is_required: true }
}

const fn optional(name: i32, kind: i32, most: usize) -> AttributeSpec {
    AttributeSpec { name, kind, counts: (1, most), is_required: false }
}

/// For strings and lists.
const ANY: usize = 1 << 20;

/// Attributes of a convolution: factors, window and tensors are numbered consecutively.
macro_rules! operation {
    ($first:literal) => {
        vec![
            one($first, FLOAT),
            one($first + 1, FLOAT),
            one($first + 2, DESCRIPTOR),
            one($first + 3, DESCRIPTOR),
            one($first + 4, DESCRIPTOR),
            one($first + 5, DESCRIPTOR),
        ]
    };
}

/// Settable attributes of a descriptor kind.
pub(super) fn attribute_specs(kind: i32) -> Vec<AttributeSpec> {
    match kind {
        WINDOW => vec![
            one(100, DATA_TYPE),
            one(101, CONVOLUTION_MODE),
            several(102, INT64, 2),
            several(103, INT64, 2),
            several(104, INT64, 2),
            several(105, INT64, 2),
            one(106, INT64),
        ],
        HEURISTIC => vec![one(200, HEUR_MODE), one(201, DESCRIPTOR), optional(204, DESCRIPTOR, 1)],
        PLAN => vec![optional(400, HANDLE, 1), one(401, DESCRIPTOR), optional(407, DESCRIPTOR, 1)],
        FORWARD => operation!(700),
        IMAGES => operation!(706),
        FILTERS => operation!(712),
        POINTWISE => vec![one(0, POINTWISE_MODE), one(1, DATA_TYPE), optional(9, INT64, 1)],
        OF_POINTWISE => vec![
            one(750, DESCRIPTOR),
            one(751, DESCRIPTOR),
            optional(752, DESCRIPTOR, 1),
            one(753, DESCRIPTOR),
            optional(758, DESCRIPTOR, 1),
        ],
        PRODUCT => vec![one(1500, DATA_TYPE)],
        OF_PRODUCT => vec![one(1520, DESCRIPTOR), one(1521, DESCRIPTOR), one(1522, DESCRIPTOR), one(1523, DESCRIPTOR)],
        REDUCTION => vec![one(1600, REDUCTION_OPERATOR), one(1601, DATA_TYPE)],
        OF_REDUCTION => vec![one(1610, DESCRIPTOR), one(1611, DESCRIPTOR), one(1612, DESCRIPTOR)],
        RESHAPE => vec![one(2200, DESCRIPTOR), one(2201, DESCRIPTOR)],
        GRAPH => {
            vec![
                optional(800, HANDLE, 1),
                AttributeSpec { name: 801, kind: DESCRIPTOR, counts: (1, ANY), is_required: true },
            ]
        }
        TENSOR => {
            vec![
                one(900, INT64),
                one(901, DATA_TYPE),
                several(902, INT64, 4),
                several(903, INT64, 4),
                one(906, INT64),
                optional(907, BOOLEAN, 1),
                optional(908, BOOLEAN, 1),
            ]
        }
        PACK => vec![
            AttributeSpec { name: 1000, kind: INT64, counts: (1, ANY), is_required: true },
            AttributeSpec { name: 1001, kind: VOID_PTR, counts: (1, ANY), is_required: true },
            optional(1003, VOID_PTR, 1),
        ],
        DEVICE => vec![optional(2700, INT32, 1), optional(2702, CHAR, ANY)],
        _ => Vec::new(),
    }
}

/// Whether there are descriptors of this kind. The library itself sets the attributes of engines
/// and configurations.
pub(super) fn is_kind(kind: i32) -> bool {
    [ENGINE, CONFIGURATION].contains(&kind) || !attribute_specs(kind).is_empty()
}

/// Bytes of a value of this type.
pub(super) fn size(kind: i32) -> usize {
    match kind {
        HANDLE | INT64 | VOID_PTR | DESCRIPTOR => 8,
        BOOLEAN | CHAR => 1,
        _ => 4,
    }
}

/// An attribute's value: its bytes, or the finalized form of descriptors.
#[derive(Debug, Clone)]
pub(super) enum Value<P> {
    Bytes(Vec<u8>),
    Parts(Vec<Arc<P>>),
}

/// All attributes set on a descriptor. `P` is the finalized form of other descriptors.
#[derive(Debug)]
pub(super) struct Attributes<P>(pub(super) BTreeMap<i32, Value<P>>);

impl<P> Attributes<P> {
    pub(super) fn has(&self, name: i32) -> bool {
        self.0.contains_key(&name)
    }

    pub(super) fn bytes(&self, name: i32) -> &[u8] {
        match self.0.get(&name) {
            Some(Value::Bytes(bytes)) => bytes,
            _ => &[],
        }
    }

    /// 64-bit values.
    pub(super) fn longs(&self, name: i32) -> Vec<i64> {
        self.bytes(name).chunks_exact(8).map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap_or_default())).collect()
    }

    pub(super) fn long(&self, name: i32) -> i64 {
        self.longs(name).first().copied().unwrap_or_default()
    }

    /// A 32-bit value.
    pub(super) fn int(&self, name: i32) -> i32 {
        self.bytes(name).try_into().map(i32::from_le_bytes).unwrap_or_default()
    }

    pub(super) fn float(&self, name: i32) -> f32 {
        self.bytes(name).try_into().map(f32::from_le_bytes).unwrap_or_default()
    }

    pub(super) fn is_true(&self, name: i32) -> bool {
        self.bytes(name) == [1]
    }

    pub(super) fn parts(&self, name: i32) -> &[Arc<P>] {
        match self.0.get(&name) {
            Some(Value::Parts(parts)) => parts,
            _ => &[],
        }
    }

    pub(super) fn part(&self, name: i32) -> Option<&P> {
        self.parts(name).first().map(|part| &**part)
    }
}
