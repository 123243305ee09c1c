//! What the controller logs: one line per decision, on standard error.

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;

/// Form of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
}

/// Starts logging.
///
/// # Errors
/// The level is no filter of `tracing`.
pub fn start(format: Format, level: &str) -> Result<(), String> {
    let filter = EnvFilter::builder()
        .parse(level)
        .map_err(|error| format!("--log-level: got `{level}`; expected a level such as info, or a filter: {error}"))?;
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    // A second start in one process (tests) keeps the first.
    let _ = match format {
        Format::Text => log.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).try_init(),
        Format::Json => log.json().flatten_event(true).try_init(),
    };
    Ok(())
}
