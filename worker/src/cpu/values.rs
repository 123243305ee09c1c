//! Tensors whose format is known only at run time.

use super::element::{Element, Format, bf16, f16};

/// Elements of one of the formats.
#[derive(Debug, Clone, Copy)]
pub enum Values<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
    /// IEEE half precision.
    F16(&'a [f16]),
}

/// Elements of one of the formats, for writing.
#[derive(Debug)]
pub enum ValuesMut<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [bf16]),
    /// IEEE half precision.
    F16(&'a mut [f16]),
}

/// Evaluates an expression with `$type` as the element type of `$format` ([`Format`]).
#[macro_export]
macro_rules! with_format {
    ($format:expr, $type:ident => $body:expr) => {
        match $format {
            $crate::cpu::Format::F32 => {
                type $type = f32;
                $body
            }
            $crate::cpu::Format::Bf16 => {
                type $type = $crate::cpu::bf16;
                $body
            }
            $crate::cpu::Format::F16 => {
                type $type = $crate::cpu::f16;
                $body
            }
        }
    };
}
pub use with_format;

impl<'a> Values<'a> {
    /// The elements as a slice of the given type.
    ///
    /// # Panics
    /// If the format differs.
    pub fn of<E: Element>(self) -> &'a [E] {
        assert_eq!(self.format(), E::FORMAT, "format of a tensor");
        match self {
            Values::F32(x) => bytemuck::cast_slice(x),
            Values::Bf16(x) => bytemuck::cast_slice(x),
            Values::F16(x) => bytemuck::cast_slice(x),
        }
    }

    /// A range of the elements.
    pub fn part(self, range: std::ops::Range<usize>) -> Values<'a> {
        match self {
            Values::F32(x) => Values::F32(&x[range]),
            Values::Bf16(x) => Values::Bf16(&x[range]),
            Values::F16(x) => Values::F16(&x[range]),
        }
    }

    pub fn len(&self) -> usize {
        match self {
            Values::F32(x) => x.len(),
            Values::Bf16(x) => x.len(),
            Values::F16(x) => x.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn format(&self) -> Format {
        match self {
            Values::F32(_) => Format::F32,
            Values::Bf16(_) => Format::Bf16,
            Values::F16(_) => Format::F16,
        }
    }

    /// Read only.
    pub(crate) fn pointer(&self) -> Pointer {
        let start = match self {
            Values::F32(x) => x.as_ptr().cast::<u8>(),
            Values::Bf16(x) => x.as_ptr().cast::<u8>(),
            Values::F16(x) => x.as_ptr().cast::<u8>(),
        };
        Pointer { start: start.cast_mut(), format: self.format() }
    }
}

impl ValuesMut<'_> {
    /// The elements as a slice of the given type.
    ///
    /// # Panics
    /// If the format differs.
    pub fn of<E: Element>(&mut self) -> &mut [E] {
        assert_eq!(self.format(), E::FORMAT, "format of a tensor");
        match self {
            ValuesMut::F32(x) => bytemuck::cast_slice_mut(x),
            ValuesMut::Bf16(x) => bytemuck::cast_slice_mut(x),
            ValuesMut::F16(x) => bytemuck::cast_slice_mut(x),
        }
    }

    /// Reborrows with a shorter lifetime.
    pub fn reborrow(&mut self) -> ValuesMut<'_> {
        match self {
            ValuesMut::F32(x) => ValuesMut::F32(x),
            ValuesMut::Bf16(x) => ValuesMut::Bf16(x),
            ValuesMut::F16(x) => ValuesMut::F16(x),
        }
    }

    /// Read only.
    pub fn shared(&self) -> Values<'_> {
        match self {
            ValuesMut::F32(x) => Values::F32(x),
            ValuesMut::Bf16(x) => Values::Bf16(x),
            ValuesMut::F16(x) => Values::F16(x),
        }
    }

    pub fn len(&self) -> usize {
        match self {
            ValuesMut::F32(x) => x.len(),
            ValuesMut::Bf16(x) => x.len(),
            ValuesMut::F16(x) => x.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn format(&self) -> Format {
        match self {
            ValuesMut::F32(_) => Format::F32,
            ValuesMut::Bf16(_) => Format::Bf16,
            ValuesMut::F16(_) => Format::F16,
        }
    }

    pub(crate) fn pointer(&mut self) -> Pointer {
        let format = self.format();
        let start = match self {
            ValuesMut::F32(x) => x.as_mut_ptr().cast::<u8>(),
            ValuesMut::Bf16(x) => x.as_mut_ptr().cast::<u8>(),
            ValuesMut::F16(x) => x.as_mut_ptr().cast::<u8>(),
        };
        Pointer { start, format }
    }
}

macro_rules! from_slices {
    ($($variant:ident: $type:ty),*) => {$(
        impl<'a> From<&'a [$type]> for Values<'a> {
            fn from(x: &'a [$type]) -> Values<'a> {
                Values::$variant(x)
            }
        }
        impl<'a> From<&'a mut [$type]> for Values<'a> {
            fn from(x: &'a mut [$type]) -> Values<'a> {
                Values::$variant(x)
            }
        }
        impl<'a> From<&'a Vec<$type>> for Values<'a> {
            fn from(x: &'a Vec<$type>) -> Values<'a> {
                Values::$variant(x)
            }
        }
        impl<'a> From<&'a mut [$type]> for ValuesMut<'a> {
            fn from(x: &'a mut [$type]) -> ValuesMut<'a> {
                ValuesMut::$variant(x)
            }
        }
        impl<'a> From<&'a mut Vec<$type>> for ValuesMut<'a> {
            fn from(x: &'a mut Vec<$type>) -> ValuesMut<'a> {
                ValuesMut::$variant(x)
            }
        }
    )*};
}
from_slices!(F32: f32, Bf16: bf16, F16: f16);

/// Start and format of elements, for kernels whose callers check bounds once and that then use
/// strides.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pointer {
    start: *mut u8,
    pub format: Format,
}

impl Pointer {
    /// A pointer created from a `*const` must only be read.
    pub fn new<T: Element>(start: *const T) -> Pointer {
        Pointer { start: start.cast_mut().cast(), format: T::FORMAT }
    }

    /// The pointer advanced by `index` elements.
    pub fn at(self, index: usize) -> Pointer {
        Pointer { start: self.start.wrapping_add(index * self.format.size()), ..self }
    }

    /// The address, typed by the format.
    pub fn cast<T: Element>(self) -> *mut T {
        debug_assert_eq!(T::FORMAT, self.format);
        self.start.cast()
    }
}

// SAFETY: an address; every use of it has its own justification.
#[allow(unsafe_code)]
unsafe impl Sync for Pointer {}
