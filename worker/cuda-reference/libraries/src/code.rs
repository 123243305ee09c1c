//! Driver error codes.

/// `CUresult`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Code(pub(crate) i32);

pub(crate) const INVALID_VALUE: Code = Code(1);
pub(crate) const OUT_OF_MEMORY: Code = Code(2);
pub(crate) const NOT_INITIALIZED: Code = Code(3);
pub(crate) const DEVICE_UNAVAILABLE: Code = Code(46);
pub(crate) const NO_DEVICE: Code = Code(100);
pub(crate) const INVALID_DEVICE: Code = Code(101);
pub(crate) const INVALID_IMAGE: Code = Code(200);
pub(crate) const INVALID_CONTEXT: Code = Code(201);
pub(crate) const ECC_UNCORRECTABLE: Code = Code(214);
pub(crate) const INVALID_HANDLE: Code = Code(400);
pub(crate) const NOT_FOUND: Code = Code(500);
pub(crate) const NOT_READY: Code = Code(600);
pub(crate) const LAUNCH_FAILED: Code = Code(719);
pub(crate) const NOT_SUPPORTED: Code = Code(801);
pub(crate) const CAPTURE_UNSUPPORTED: Code = Code(900);
pub(crate) const CAPTURE_INVALIDATED: Code = Code(901);

pub(crate) type CallResult<T> = Result<T, Code>;

impl Code {
    /// The text of `cuGetErrorString`.
    pub(crate) fn text(self) -> Option<&'static std::ffi::CStr> {
        Some(match self {
            Code(0) => c"no error",
            INVALID_VALUE => c"invalid argument",
            OUT_OF_MEMORY => c"out of memory",
            NOT_INITIALIZED => c"initialization error",
            DEVICE_UNAVAILABLE => c"CUDA-capable device(s) is/are busy or unavailable",
            NO_DEVICE => c"no CUDA-capable device is detected",
            INVALID_DEVICE => c"invalid device ordinal",
            INVALID_IMAGE => c"device kernel image is invalid",
            INVALID_CONTEXT => c"invalid device context",
            ECC_UNCORRECTABLE => c"uncorrectable ECC error encountered",
            INVALID_HANDLE => c"invalid resource handle",
            NOT_FOUND => c"named symbol not found",
            NOT_READY => c"device not ready",
            LAUNCH_FAILED => c"unspecified launch failure",
            NOT_SUPPORTED => c"operation not supported",
            CAPTURE_UNSUPPORTED => c"operation not permitted when stream is capturing",
            CAPTURE_INVALIDATED => c"operation failed due to a previous error during capture",
            _ => return None,
        })
    }
}
