//! The engine configuration as this process reads it.

use super::TrainError;
use crate::process::{threads, variable};
use switchyard_worker_contract::config::EngineConfig;
use switchyard_worker_contract::env;

/// Parses a configuration that came from `source`, and settles what it leaves to each rank.
///
/// # Errors
/// The text is not a valid configuration; the error names the source and the reason.
pub fn parse(text: &str, source: &str) -> Result<EngineConfig, TrainError> {
    let mut config: EngineConfig = serde_json::from_str(text)
        .map_err(|error| TrainError::Usage(format!("engine configuration from {source}: {error}")))?;
    config.cpu_threads = threads(config.cpu_threads).map_err(TrainError::Usage)?;
    Ok(config)
}

/// Reads the file that `SWITCHYARD_CONFIG` names.
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
