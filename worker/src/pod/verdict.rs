//! Determines how a pod ended from the status of its ranks. Pure.

use std::process::ExitStatus;
use switchyard_worker_contract::event::Failure;
use switchyard_worker_contract::exit::{Exit, describe};

#[derive(Debug, Clone, Default)]
pub(super) struct RankStatus {
    /// Rank among all ranks of the job.
    pub rank: u32,
    /// Exit status; `None` while it runs.
    pub ended: Option<ExitStatus>,
    /// Killed by the supervisor, so it is not a cause.
    pub killed: bool,
    /// The failure it reported.
    pub failure: Option<Failure>,
}

impl RankStatus {
    fn succeeded(&self) -> bool {
        self.ended.is_some_and(|status| status.success())
    }

    /// Whether it ended with an error by itself and does not blame another rank.
    fn failed_by_itself(&self) -> bool {
        let blames = self.failure.as_ref().is_some_and(|failure| failure.origin_rank != self.rank);
        self.ended.is_some() && !self.succeeded() && !self.killed && !blames
    }
}

/// The first failure from this pod's view, or `None` if all ranks succeeded. `first`: index of the
/// rank whose failure was reported first. `stopped`: the stop requested before any failure.
pub(super) fn verdict(ranks: &[RankStatus], first: Option<usize>, stopped: Option<Exit>) -> Option<Failure> {
    if ranks.iter().all(RankStatus::succeeded) {
        return None;
    }
    let reported = || first.into_iter().chain(0..ranks.len()).find_map(|index| ranks[index].failure.as_ref());
    if let Some(exit) = stopped {
        return Some(stop(ranks, exit));
    }
    let failed = first.filter(|index| ranks[*index].failed_by_itself()).map(|index| ranks[index].rank);
    let origin = failed
        .or_else(|| reported().map(|failure| failure.origin_rank))
        .or_else(|| ranks.iter().find(|status| status.failed_by_itself()).map(|status| status.rank))
        .unwrap_or_else(|| ranks[first.unwrap_or_default()].rank);
    match ranks.iter().find(|status| status.rank == origin) {
        Some(status) => Some(own_failure(status, reported())),
        // Only a reported failure can name a rank outside this pod.
        None => reported().cloned(),
    }
}

/// The failure after a stop request; a rank may have reported details.
fn stop(ranks: &[RankStatus], exit: Exit) -> Failure {
    let reported =
        ranks.iter().filter_map(|status| status.failure.as_ref()).find(|failure| failure.exit_code == exit.code());
    let rank = ranks.first().map_or(0, |status| status.rank);
    let default = || Failure {
        rank,
        origin_rank: rank,
        cause: exit.meaning().to_string(),
        during: String::new(),
        exit_code: exit.code(),
    };
    reported.cloned().unwrap_or_else(default)
}

/// The failure of a rank of this pod that failed first.
fn own_failure(rank: &RankStatus, reported: Option<&Failure>) -> Failure {
    let (code, ended) = match rank.ended {
        Some(status) if !rank.killed => (status.code(), describe(status)),
        _ => (None, "did not answer and was ended".to_string()),
    };
    // A signal, a panic, or an exit that the group did not expect is this rank's own failure.
    let exit = code.and_then(Exit::from_code).filter(|exit| *exit != Exit::Done).unwrap_or(Exit::OwnFailure);
    let failure = rank.failure.as_ref().or(reported);
    Failure {
        rank: rank.rank,
        origin_rank: rank.rank,
        cause: failure.map_or_else(|| ended.clone(), |failure| format!("{} ({ended})", failure.cause)),
        during: failure.map(|failure| failure.during.clone()).unwrap_or_default(),
        exit_code: exit.code(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    fn ended(rank: u32, raw: i32) -> RankStatus {
        RankStatus { rank, ended: Some(ExitStatus::from_raw(raw)), ..RankStatus::default() }
    }

    fn exited(rank: u32, code: i32) -> RankStatus {
        ended(rank, code << 8)
    }

    fn reporting(rank: u32, origin_rank: u32, code: u8) -> RankStatus {
        let (cause, during) = ("connection closed".to_string(), "barrier".to_string());
        let failure = Failure { rank, origin_rank, cause, during, exit_code: code };
        RankStatus { failure: Some(failure), ..exited(rank, i32::from(code)) }
    }

    fn found(ranks: &[RankStatus], first: usize) -> (u32, u32, u8, String) {
        let failure = verdict(ranks, Some(first), None).unwrap();
        (failure.rank, failure.origin_rank, failure.exit_code, failure.cause)
    }

    #[test]
    fn success_of_all_ranks_is_no_failure_even_after_a_late_stop() {
        assert_eq!(verdict(&[exited(0, 0), exited(1, 0)], None, Some(Exit::Terminated)), None);
    }

    #[test]
    fn a_killed_rank_is_the_cause_here_and_blamed_elsewhere() {
        let killed = "connection closed (killed by signal 9 (SIGKILL))".to_string();
        for first in [0, 1] {
            assert_eq!(found(&[reporting(2, 3, 4), ended(3, 9)], first), (3, 3, 5, killed.clone()));
        }
        assert_eq!(found(&[reporting(0, 3, 4), reporting(1, 3, 4)], 1), (1, 3, 4, "connection closed".into()));
        assert_eq!(found(&[ended(3, 9)], 0), (3, 3, 5, "killed by signal 9 (SIGKILL)".into()));
    }

    #[test]
    fn a_killed_unresponsive_rank_is_the_cause_if_its_peers_blame_it() {
        let silent = RankStatus { killed: true, ..ended(1, 9) };
        let cause = "connection closed (did not answer and was ended)".to_string();
        assert_eq!(found(&[reporting(0, 1, 4), silent.clone()], 0), (1, 1, 5, cause));
        // It was only slow to stop; the failure is elsewhere.
        assert_eq!(found(&[reporting(0, 7, 4), silent], 0), (0, 7, 4, "connection closed".into()));
    }

    #[test]
    fn the_exit_code_is_that_of_the_first_failure() {
        let mut data = reporting(1, 1, 3);
        data.failure.as_mut().unwrap().cause = "no such file".into();
        let killed = RankStatus { killed: true, ..ended(0, 9) };
        let text = format!("no such file (exit code 3: {})", Exit::Data.meaning());
        assert_eq!(found(&[killed, data], 1), (1, 1, 3, text));
        assert_eq!(found(&[exited(0, 101)], 0), (0, 0, 5, "exit code 101".into()));
        assert_eq!(found(&[reporting(0, 1, 4), exited(1, 0)], 0).2, 5, "it left while others waited for it");
    }

    #[test]
    fn a_stop_names_the_stopped_rank() {
        let failure = verdict(&[reporting(0, 3, 143), reporting(1, 3, 143)], Some(0), None).unwrap();
        assert_eq!((failure.origin_rank, failure.exit_code), (3, 143), "another pod was stopped");
        let failure = verdict(&[exited(2, 143), reporting(3, 2, 143)], Some(0), Some(Exit::Terminated)).unwrap();
        assert_eq!((failure.origin_rank, failure.exit_code), (2, 143));
        let failure = verdict(&[exited(2, 143)], Some(0), Some(Exit::Terminated)).unwrap();
        assert_eq!((failure.rank, failure.cause.as_str()), (2, "stopped by SIGTERM"));
        let killed = RankStatus { killed: true, ..ended(2, 9) };
        assert_eq!(verdict(&[killed], Some(0), Some(Exit::Interrupted)).unwrap().exit_code, 130);
    }
}
