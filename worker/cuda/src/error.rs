use std::path::PathBuf;

/// Why a library is unusable, or which of its calls failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("{library} is not on this machine")]
    NotFound {
        library: &'static str,
        /// Every name and file tried, in order.
        tried: Vec<PathBuf>,
    },
    /// A file of that name exists, but the loader rejects it.
    #[error("{library}: {text}")]
    NotLoaded { library: &'static str, text: String },
    #[error("{} lacks {symbol}", file.display())]
    NoSymbol { file: PathBuf, symbol: &'static str },
    #[error("the driver's library is here, and cuInit says that there is no device")]
    NoDevice,
    /// A library call returned an error code.
    #[error("{library}: {call} returned {code}: {text}")]
    Call {
        library: &'static str,
        call: String,
        code: i32,
        /// The library's message for the code.
        text: String,
    },
    /// The call was not made because of invalid arguments, or succeeded without a usable result.
    #[error("{call}: {text}")]
    Refused { call: &'static str, text: String },
}

impl Error {
    pub(crate) fn refused(call: &'static str, text: impl Into<String>) -> Error {
        Error::Refused { call, text: text.into() }
    }
}
