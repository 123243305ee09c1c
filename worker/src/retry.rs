//! Repeats reads after errors of a file system.

use std::time::Duration;

/// Pauses before a read is repeated. A restart is the moment at which storage is most often
/// unavailable: a node was lost, or an NFS server fails over. Both take seconds.
const PAUSES: [Duration; 4] =
    [Duration::from_millis(200), Duration::from_millis(500), Duration::from_secs(1), Duration::from_secs(2)];

/// Repeats a read while `transient` describes its error. `None` means that another read would end
/// the same way.
///
/// # Errors
/// The last error.
pub(crate) fn retry<T, E>(
    transient: impl Fn(&E) -> Option<String>,
    mut read: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    for pause in PAUSES {
        let result = read();
        let Some(error) = result.as_ref().err().and_then(&transient) else { return result };
        eprintln!("warning: {error}; reading again in {} ms", pause.as_millis());
        std::thread::sleep(pause);
    }
    read()
}
