//! Reads the engine configuration.

use super::TrainError;
use crate::data::most_threads;
use crate::process::{threads, variable};
use switchyard_worker_contract::config::{Device, EngineConfig};
use switchyard_worker_contract::env;

/// Parses a configuration from `source`, and resolves the settings left to each rank.
///
/// # Errors
/// The text is not a valid configuration; the error names the source and the reason.
pub fn parse(text: &str, source: &str) -> Result<EngineConfig, TrainError> {
    let mut config: EngineConfig = serde_json::from_str(text)
        .map_err(|error| TrainError::Usage(format!("engine configuration from {source}: {error}")))?;
    config.cpu_threads = threads(config.cpu_threads).map_err(TrainError::Usage)?;
    Ok(config)
}

/// Reads the file named by `SWITCHYARD_CONFIG`.
///
/// # Errors
/// The variable is not set, or the file cannot be read or parsed.
pub fn from_env() -> Result<EngineConfig, TrainError> {
    let path =
        variable(env::CONFIG).ok_or_else(|| TrainError::Usage(format!("{}: not set; expected a path", env::CONFIG)))?;
    let text = std::fs::read_to_string(&path)
        .map_err(|error| TrainError::Usage(format!("{}: {path}: {error}", env::CONFIG)))?;
    parse(&text, &path)
}

/// Most threads that the reader adds by itself.
pub(super) fn most_reader_threads(config: &EngineConfig) -> u32 {
    most_threads(config.cpu_threads, config.device == Device::Cuda)
}
