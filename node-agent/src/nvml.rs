//! NVML sessions and error texts.

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use std::ffi::OsStr;
use std::path::Path;

/// Name under which the driver installs the library.
pub(crate) const LIBRARY: &str = "libnvidia-ml.so.1";

/// An initialised NVML.
///
/// Dropping [`Nvml`] panics if the library lacks `nvmlShutdown`; in that case the session leaves
/// the library open.
pub(crate) struct Session(Option<Nvml>);

impl Session {
    /// Initialises NVML from `library`, by default [`LIBRARY`].
    pub(crate) fn open(library: Option<&Path>) -> Result<Session, NvmlError> {
        let library = library.map_or(OsStr::new(LIBRARY), Path::as_os_str);
        Nvml::builder().lib_path(library).init().map(|nvml| Session(Some(nvml)))
    }

    pub(crate) fn nvml(&self) -> Option<&Nvml> {
        self.0.as_ref()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Some(nvml) = self.0.take() {
            match nvml.lib().nvmlShutdown {
                Ok(_) => drop(nvml),
                Err(_) => std::mem::forget(nvml),
            }
        }
    }
}

/// The innermost cause of an error, because the outer ones only name a function of the wrapper.
pub(crate) fn reason(error: &NvmlError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        text = inner.to_string();
        source = inner.source();
    }
    text
}
