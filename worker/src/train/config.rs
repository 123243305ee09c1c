//! The engine configuration as this process reads it.

use super::TrainError;
use crate::process::{threads, variable};
use switchyard_worker_contract::config::EngineConfig;
use switchyard_worker_contract::env;

/// Reads a configuration from text that came from `source`, and settles what it leaves open to each rank.
///
/// # Errors
/// Where the text is no configuration, and why.
pub fn parse(text: &str, source: &str) -> Result<EngineConfig, TrainError> {
    let mut config: EngineConfig = serde_json::from_str(text)
        .map_err(|error| TrainError::Usage(format!("engine configuration from {source}: {error}")))?;
    config.cpu_threads = threads(config.cpu_threads).map_err(TrainError::Usage)?;
    Ok(config)
}

/// Reads the file that `SWITCHYARD_CONFIG` names.
///
/// # Errors
/// The variable or the file, and what is wrong with it.
pub fn from_env() -> Result<EngineConfig, TrainError> {
    let path =
        variable(env::CONFIG).ok_or_else(|| TrainError::Usage(format!("{}: not set; expected a path", env::CONFIG)))?;
    let text = std::fs::read_to_string(&path)
        .map_err(|error| TrainError::Usage(format!("{}: {path}: {error}", env::CONFIG)))?;
    parse(&text, &path)
}
