use std::path::PathBuf;

/// Why a library cannot be used, or which of its calls failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("{library} is not on this machine")]
    NotFound {
        library: &'static str,
        /// Every name and file that was tried, in order.
        tried: Vec<PathBuf>,
    },
    /// A file of that name exists, and the loader refuses it.
    #[error("{library}: {text}")]
    NotLoaded { library: &'static str, text: String },
    #[error("{} lacks {symbol}", file.display())]
    NoSymbol { file: PathBuf, symbol: &'static str },
    #[error("the driver's library is here, and cuInit says that there is no device")]
    NoDevice,
    /// A library returned something other than success.
    #[error("{library}: {call} returned {code}: {text}")]
    Call {
        library: &'static str,
        call: String,
        code: i32,
        /// The library's own words for the code.
        text: String,
    },
    /// The call was not made because of its arguments, or it succeeded without a usable result.
    #[error("{call}: {text}")]
    Refused { call: &'static str, text: String },
}

impl Error {
    pub(crate) fn refused(call: &'static str, text: impl Into<String>) -> Error {
        Error::Refused { call, text: text.into() }
    }
}
