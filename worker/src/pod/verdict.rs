//! How a pod ended, derived from its ranks: pure.

use std::process::ExitStatus;
use switchyard_worker_contract::event::Failure;
use switchyard_worker_contract::exit::{Exit, describe};

#[derive(Debug, Clone, Default)]
pub(super) struct Seen {
    /// Rank among all ranks.
    pub rank: u32,
    /// How it ended; `None` while it runs.
    pub ended: Option<ExitStatus>,
    /// Ended by the supervisor: not a cause.
    pub killed: bool,
    /// The failure that it reported.
    pub failure: Option<Failure>,
}

impl Seen {
    fn done(&self) -> bool {
        self.ended.is_some_and(|status| status.success())
    }

    /// It ended by itself and does not blame another rank.
    fn fell(&self) -> bool {
        let blames = self.failure.as_ref().is_some_and(|failure| failure.origin_rank != self.rank);
        self.ended.is_some() && !self.done() && !self.killed && !blames
    }
}

/// The first failure as this pod knows it, or `None` if all ranks are done. `first` is the index of the rank whose
/// failure was reported first, `stopped` the stop that was requested before any failure.
pub(super) fn verdict(ranks: &[Seen], first: Option<usize>, stopped: Option<Exit>) -> Option<Failure> {
    if ranks.iter().all(Seen::done) {
        return None;
    }
    let told = || first.into_iter().chain(0..ranks.len()).find_map(|index| ranks[index].failure.as_ref());
    if let Some(exit) = stopped {
        return Some(stop(ranks, exit));
    }
    let fallen = first.filter(|index| ranks[*index].fell()).map(|index| ranks[index].rank);
    let origin = fallen
        .or_else(|| told().map(|failure| failure.origin_rank))
        .or_else(|| ranks.iter().find(|seen| seen.fell()).map(|seen| seen.rank))
        .unwrap_or_else(|| ranks[first.unwrap_or_default()].rank);
    match ranks.iter().find(|seen| seen.rank == origin) {
        Some(seen) => Some(here(seen, told())),
        // Only a report names a rank that is not in this pod.
        None => told().cloned(),
    }
}

/// The ranks were asked to stop; a rank may have reported more about it.
fn stop(ranks: &[Seen], exit: Exit) -> Failure {
    let said = ranks.iter().filter_map(|seen| seen.failure.as_ref()).find(|said| said.exit_code == exit.code());
    let rank = ranks.first().map_or(0, |seen| seen.rank);
    let silent = || Failure {
        rank,
        origin_rank: rank,
        cause: exit.meaning().to_string(),
        during: String::new(),
        exit_code: exit.code(),
    };
    said.cloned().unwrap_or_else(silent)
}

/// The first failure was that of this rank of the pod.
fn here(seen: &Seen, told: Option<&Failure>) -> Failure {
    let (code, ended) = match seen.ended {
        Some(status) if !seen.killed => (status.code(), describe(status)),
        _ => (None, "did not answer and was ended".to_string()),
    };
    // A signal, a panic, or an end that the group did not expect: in any case the fault of this rank.
    let exit = code.and_then(Exit::from_code).filter(|exit| *exit != Exit::Done).unwrap_or(Exit::OwnFailure);
    let words = seen.failure.as_ref().or(told);
    Failure {
        rank: seen.rank,
        origin_rank: seen.rank,
        cause: words.map_or_else(|| ended.clone(), |words| format!("{} ({ended})", words.cause)),
        during: words.map(|words| words.during.clone()).unwrap_or_default(),
        exit_code: exit.code(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    fn ended(rank: u32, raw: i32) -> Seen {
        Seen { rank, ended: Some(ExitStatus::from_raw(raw)), ..Seen::default() }
    }

    fn exited(rank: u32, code: i32) -> Seen {
        ended(rank, code << 8)
    }

    fn saying(rank: u32, origin_rank: u32, code: u8) -> Seen {
        let (cause, during) = ("connection closed".to_string(), "barrier".to_string());
        let failure = Failure { rank, origin_rank, cause, during, exit_code: code };
        Seen { failure: Some(failure), ..exited(rank, i32::from(code)) }
    }

    fn found(ranks: &[Seen], first: usize) -> (u32, u32, u8, String) {
        let failure = verdict(ranks, Some(first), None).unwrap();
        (failure.rank, failure.origin_rank, failure.exit_code, failure.cause)
    }

    #[test]
    fn all_done_is_no_failure_even_when_a_stop_came_late() {
        assert_eq!(verdict(&[exited(0, 0), exited(1, 0)], None, Some(Exit::Terminated)), None);
    }

    #[test]
    fn a_killed_rank_is_the_cause_here_and_blamed_elsewhere() {
        let killed = "connection closed (killed by signal 9 (SIGKILL))".to_string();
        for first in [0, 1] {
            assert_eq!(found(&[saying(2, 3, 4), ended(3, 9)], first), (3, 3, 5, killed.clone()));
        }
        assert_eq!(found(&[saying(0, 3, 4), saying(1, 3, 4)], 1), (1, 3, 4, "connection closed".into()));
        assert_eq!(found(&[ended(3, 9)], 0), (3, 3, 5, "killed by signal 9 (SIGKILL)".into()));
    }

    #[test]
    fn a_silent_rank_that_was_ended_is_the_one_its_peers_blame() {
        let silent = Seen { killed: true, ..ended(1, 9) };
        let cause = "connection closed (did not answer and was ended)".to_string();
        assert_eq!(found(&[saying(0, 1, 4), silent.clone()], 0), (1, 1, 5, cause));
        // It was only slow to stop; the failure is elsewhere.
        assert_eq!(found(&[saying(0, 7, 4), silent], 0), (0, 7, 4, "connection closed".into()));
    }

    #[test]
    fn the_code_of_the_first_failure_counts() {
        let mut data = saying(1, 1, 3);
        data.failure.as_mut().unwrap().cause = "no such file".into();
        let killed = Seen { killed: true, ..ended(0, 9) };
        let text = format!("no such file (exit code 3: {})", Exit::Data.meaning());
        assert_eq!(found(&[killed, data], 1), (1, 1, 3, text));
        assert_eq!(found(&[exited(0, 101)], 0), (0, 0, 5, "exit code 101".into()));
        assert_eq!(found(&[saying(0, 1, 4), exited(1, 0)], 0).2, 5, "it left while others waited for it");
    }

    #[test]
    fn a_stop_is_told_with_who_was_stopped() {
        let failure = verdict(&[saying(0, 3, 143), saying(1, 3, 143)], Some(0), None).unwrap();
        assert_eq!((failure.origin_rank, failure.exit_code), (3, 143), "another pod was stopped");
        let failure = verdict(&[exited(2, 143), saying(3, 2, 143)], Some(0), Some(Exit::Terminated)).unwrap();
        assert_eq!((failure.origin_rank, failure.exit_code), (2, 143));
        let failure = verdict(&[exited(2, 143)], Some(0), Some(Exit::Terminated)).unwrap();
        assert_eq!((failure.rank, failure.cause.as_str()), (2, "stopped by SIGTERM"));
        let killed = Seen { killed: true, ..ended(2, 9) };
        assert_eq!(verdict(&[killed], Some(0), Some(Exit::Interrupted)).unwrap().exit_code, 130);
    }
}
