//! Faults on request: what a device does that is not the program's doing.

/// The variable; several faults are separated by commas.
pub const VARIABLE: &str = "SWITCHYARD_REFERENCE_FAULT";

/// What shall happen, by the numbers of calls from 1 on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Faults {
    /// This allocation finds no memory.
    pub(crate) out_of_memory: Option<u64>,
    /// This launch fails when it runs, and all calls after it.
    pub(crate) launch: Option<u64>,
    /// The device is lost when this launch runs.
    pub(crate) lost: Option<u64>,
    /// This launch never ends.
    pub(crate) hang: Option<u64>,
    /// From this product on, the first number of each result is too large by one.
    pub(crate) wrong: Option<u64>,
    /// Of the copies of so many bytes from pinned memory to the device only the first arrives: later launches see the numbers of the first,
    /// as if these were arguments of a graph.
    pub(crate) stale: Option<u64>,
    /// What the driver has registered for the end of the process never ends.
    pub(crate) exit: bool,
    /// Another process has the device for itself.
    pub(crate) busy: bool,
}

impl Faults {
    pub(crate) fn parse(text: &str) -> Result<Faults, String> {
        let mut faults = Faults::default();
        for one in text.split(',').filter(|one| !one.is_empty()) {
            let (name, number) = one.split_once(':').map_or((one, None), |(name, number)| (name, number.parse().ok()));
            match (name, number) {
                ("out-of-memory", Some(_)) => faults.out_of_memory = number,
                ("launch", Some(_)) => faults.launch = number,
                ("lost", Some(_)) => faults.lost = number,
                ("hang", Some(_)) => faults.hang = number,
                ("wrong", Some(_)) => faults.wrong = number,
                ("stale", Some(_)) => faults.stale = number,
                ("exit", None) => faults.exit = true,
                ("busy", None) => faults.busy = true,
                _ => {
                    return Err(format!(
                        "{VARIABLE}: `{one}`, expected out-of-memory:N, launch:N, lost:N, hang:N, wrong:N, stale:N, exit or busy"
                    ));
                }
            }
        }
        Ok(faults)
    }
}

#[cfg(test)]
mod tests {
    use super::Faults;

    #[test]
    fn faults_are_read_and_others_refused() {
        let faults = Faults::parse("launch:3,wrong:4,busy").unwrap();
        assert_eq!(faults, Faults { launch: Some(3), wrong: Some(4), busy: true, ..Faults::default() });
        assert_eq!(Faults::parse(""), Ok(Faults::default()));
        assert!(Faults::parse("launch").unwrap_err().contains("`launch`, expected"));
        assert!(Faults::parse("fire:1").is_err());
    }
}
