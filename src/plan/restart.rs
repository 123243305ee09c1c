//! What follows when an attempt has ended: a pure decision from what was observed.

use switchyard_worker_contract::exit::Exit;

/// How an attempt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// All steps are done on every rank.
    Done,
    /// The user asked to stop.
    Stopped(Exit),
    /// A rank failed; the code of the one that failed first, `None` when a signal ended it.
    Failed(Option<i32>),
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Start the whole group again.
    Restart,
    /// No further attempt.
    End(End),
}

/// How a job ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The job is complete.
    Complete,
    /// The job stops as asked.
    Stop(Exit),
    /// Given up, with this exit code.
    GiveUp(Exit, Cause),
}

/// Why a job is given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// The allowed number of restarts is used up.
    BudgetUsed,
    /// The same thing would happen again: wrong data, wrong command line or manifest.
    Permanent,
}

/// Decides after `restarts` restarts out of `max_restarts`.
pub fn decide(ending: Ending, restarts: u32, max_restarts: u32) -> Decision {
    let code = match ending {
        Ending::Done => return Decision::End(End::Complete),
        Ending::Stopped(exit) => return Decision::End(End::Stop(exit)),
        Ending::Failed(code) => code,
    };
    match code.and_then(Exit::from_code) {
        Some(
            permanent @ (Exit::Usage
            | Exit::Data
            | Exit::CheckpointRefused
            | Exit::PreflightRefused
            | Exit::NotPlaceable),
        ) => Decision::End(End::GiveUp(permanent, Cause::Permanent)),
        _ if restarts < max_restarts => Decision::Restart,
        _ => Decision::End(End::GiveUp(Exit::OwnFailure, Cause::BudgetUsed)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table() {
        for (ending, restarts, most, decision) in [
            (Ending::Done, 0, 0, Decision::End(End::Complete)),
            (Ending::Stopped(Exit::Interrupted), 0, 3, Decision::End(End::Stop(Exit::Interrupted))),
            (Ending::Failed(None), 0, 1, Decision::Restart),
            (Ending::Failed(Some(5)), 0, 1, Decision::Restart),
            (Ending::Failed(Some(4)), 0, 1, Decision::Restart),
            (Ending::Failed(Some(101)), 2, 3, Decision::Restart),
            (Ending::Failed(None), 1, 1, Decision::End(End::GiveUp(Exit::OwnFailure, Cause::BudgetUsed))),
            (Ending::Failed(Some(3)), 0, 9, Decision::End(End::GiveUp(Exit::Data, Cause::Permanent))),
            (Ending::Failed(Some(2)), 0, 9, Decision::End(End::GiveUp(Exit::Usage, Cause::Permanent))),
        ] {
            assert_eq!(decide(ending, restarts, most), decision, "{ending:?} after {restarts} of {most}");
        }
    }
}
