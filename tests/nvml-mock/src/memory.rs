//! The memory that callers hand over.

use std::ffi::{c_char, c_uint};

/// `nvmlReturn_t`.
pub(crate) type Code = c_uint;
pub(crate) const SUCCESS: Code = 0;
pub(crate) const UNINITIALIZED: Code = 1;
pub(crate) const INVALID_ARGUMENT: Code = 2;
pub(crate) const NOT_SUPPORTED: Code = 3;
pub(crate) const NOT_FOUND: Code = 6;
pub(crate) const INSUFFICIENT_SIZE: Code = 7;
pub(crate) const DRIVER_NOT_LOADED: Code = 9;
pub(crate) const TIMEOUT: Code = 10;
pub(crate) const GPU_IS_LOST: Code = 15;
pub(crate) const VERSION_MISMATCH: Code = 25;
pub(crate) const UNKNOWN: Code = 999;

/// An answer, or the code of the error.
pub(crate) type Answer<T> = Result<T, Code>;

/// A pointer argument through which NVML returns a value. Only callers of the C interface can
/// make one.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T: Copy> Out<T> {
    /// Writes the answer, if it is one.
    pub(crate) fn put(self, answer: Answer<T>) -> Code {
        self.put_all(answer.map(|value| [value]))
    }

    /// Writes as many values as the answer has; the caller knows how many there is room for.
    pub(crate) fn put_all(self, answer: Answer<impl AsRef<[T]>>) -> Code {
        match answer {
            Err(code) => code,
            Ok(_) if self.0.is_null() => INVALID_ARGUMENT,
            Ok(values) => {
                let values = values.as_ref();
                // SAFETY: by NVML's interface a non-null pointer points to aligned memory for the
                // values, which nobody else uses during the call. `T: Copy` has no destructor.
                unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), self.0, values.len()) };
                SUCCESS
            }
        }
    }

    /// Changes a structure that the caller has filled in.
    pub(crate) fn update(self, change: impl FnOnce(&mut T) -> Code) -> Code {
        // SAFETY: as above. For these calls the interface requires an initialised structure.
        unsafe { self.0.as_mut() }.map_or(INVALID_ARGUMENT, change)
    }
}

impl Out<c_char> {
    /// Writes a text and the zero behind it, if there is room for both.
    pub(crate) fn text(self, room: c_uint, answer: Answer<String>) -> Code {
        let answer = answer.and_then(|text| {
            let text = characters(&text);
            if text.len() <= room as usize { Ok(text) } else { Err(INSUFFICIENT_SIZE) }
        });
        self.put_all(answer)
    }
}

/// A text as C has it.
pub(crate) fn characters(text: &str) -> Vec<c_char> {
    text.bytes().chain([0]).map(|byte| byte as c_char).collect()
}
