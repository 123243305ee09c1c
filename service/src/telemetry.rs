//! The log: one line per decision, on standard error.

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// Log format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
}

/// Silences the client, which logs every unsuccessful response, including expected ones such as a
/// name that is taken. Callers report the consequences once. To see all responses, name
/// `kube_client` in `--log-level`.
const QUIET: &str = "kube_client::client::builder=off";

fn filter(level: &str) -> Result<EnvFilter, String> {
    let refuse = |error: &dyn std::fmt::Display| {
        format!(
            "--log-level: got `{level}`; expected a level such as info, or a filter such as info,switchyard=debug: {error}"
        )
    };
    // The library parses an unknown level as a module name and then logs nothing else, and it
    // parses an empty level as `error`.
    let plain = level.split(',').filter(|part| !part.contains('['));
    for word in plain.map(|part| part.rsplit('=').next().unwrap_or_default().trim()) {
        if word.is_empty() || word.parse::<LevelFilter>().is_err() {
            return Err(refuse(&format!("`{word}` is not one of off, error, warn, info, debug, trace")));
        }
    }
    let filter = EnvFilter::builder().parse(level).map_err(|error| refuse(&error))?;
    if level.contains("kube_client") {
        return Ok(filter);
    }
    Ok(filter.add_directive(QUIET.parse().map_err(|error| refuse(&error))?))
}

/// Starts logging, with times in UTC.
///
/// # Errors
/// The level is not a valid filter of `tracing`.
pub fn start(format: Format, level: &str) -> Result<(), String> {
    let log = tracing_subscriber::fmt().with_env_filter(filter(level)?).with_writer(std::io::stderr).with_target(false);
    // A second start in one process (tests) keeps the first one.
    let _ = match format {
        Format::Text => log.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).try_init(),
        Format::Json => log.json().flatten_event(true).try_init(),
    };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::filter;

    #[test]
    fn a_bad_level_is_told_with_its_flag() {
        for level in ["loud", "", "info,switchyard=", "a=b=c", "[span"] {
            let Err(message) = filter(level) else { panic!("{level} was taken") };
            assert!(message.starts_with(&format!("--log-level: got `{level}`; expected")), "{message}");
        }
    }

    #[test]
    fn the_client_is_quiet_unless_it_is_named() {
        for (level, quiet) in [("debug", true), ("info,switchyard=trace", true), ("info,kube_client=debug", false)] {
            let filter = filter(level).map(|filter| filter.to_string()).unwrap();
            assert_eq!(filter.contains("builder=off"), quiet, "{filter}");
        }
    }
}
