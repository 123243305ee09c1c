//! Finds the rank that failed first and the cause, as a pure function of the observations of all
//! ranks.

use std::process::ExitStatus;
use switchyard_worker_contract::event::{Failure, member_name};
use switchyard_worker_contract::exit::{Exit, describe};

/// The first failure of an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RootCause {
    /// The rank that failed first. Parameter servers are counted after the ranks.
    pub rank: u32,
    /// The parameter server that failed first, if it is not a rank.
    pub server: Option<u32>,
    /// Its process; `None` if it is on another machine.
    pub pid: Option<u32>,
    /// What happened.
    pub cause: String,
    /// The operation that the rank or its peers were in; empty if unknown.
    pub during: String,
    /// Exit code of that rank; `None` when a signal ended it, or on another machine.
    pub code: Option<i32>,
    pub log: RankLog,
    /// Ranks that stopped because of it.
    pub others: Vec<u32>,
}

impl RootCause {
    /// `rank 1`, or `parameter server 0`.
    pub fn name(&self) -> String {
        member_name(self.rank, self.server.map_or(u32::MAX, |server| self.rank - server))
    }

    /// Where its rank ran.
    pub fn place(&self) -> String {
        self.pid.map_or_else(|| "on another machine".to_owned(), |pid| format!("pid {pid}"))
    }
}

/// The tail of a rank's log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RankLog {
    pub path: String,
    pub tail: Vec<String>,
}

/// Observations of one rank.
#[derive(Debug, Clone, Default)]
pub(super) struct Observations {
    pub pid: u32,
    /// Its exit status; `None` while it runs.
    pub ended: Option<ExitStatus>,
    /// We killed it after the grace period, so it is not a cause.
    pub killed: bool,
    /// The failure that it reported.
    pub failure: Option<Failure>,
    pub log: RankLog,
}

/// The first failure: a rank that ended by itself and blames no other rank, otherwise the rank that
/// its peers blame. If several ended by themselves, the rank that the group agreed on, because the
/// order of arrival depends on pipes and on how long each process takes to exit. `ranks` are those
/// of this machine, from `first_rank` on; `first_failed` is the one whose failure arrived first, as
/// a position among them.
pub(super) fn root_cause(first_rank: u32, ranks: &[&Observations], first_failed: Option<usize>) -> RootCause {
    let position = |rank: u32| rank.checked_sub(first_rank).map(|at| at as usize).filter(|at| *at < ranks.len());
    let blames_another =
        |rank: &Observations| rank.ended.and_then(|status| status.code()) == Some(i32::from(Exit::PeerFailure.code()));
    let own = |index: &usize| {
        let rank = ranks[*index];
        !rank.killed && !blames_another(rank) && rank.ended.is_some_and(|status| !status.success())
    };
    let blamed = ranks.iter().find_map(|rank| rank.failure.as_ref());
    let of_another = ranks.iter().filter(|rank| blames_another(rank)).find_map(|rank| rank.failure.as_ref());
    let others =
        |origin: u32| (0..ranks.len() as u32).map(|at| first_rank + at).filter(|other| *other != origin).collect();
    if let Some(failure) = of_another.filter(|failure| position(failure.origin_rank).is_none())
        && !(0..ranks.len()).any(|at| own(&at))
    {
        return RootCause {
            rank: failure.origin_rank,
            server: None,
            pid: None,
            cause: failure.cause.clone(),
            during: failure.during.clone(),
            code: None,
            log: RankLog::default(),
            others: others(failure.origin_rank),
        };
    }
    let agreed = of_another.and_then(|failure| position(failure.origin_rank));
    let origin = agreed
        .filter(own)
        .or_else(|| first_failed.filter(own))
        .or_else(|| blamed.and_then(|failure| position(failure.origin_rank)))
        .or_else(|| (0..ranks.len()).find(own))
        .or(first_failed)
        .unwrap_or(0);
    let rank = ranks[origin];
    let (code, ended) = match rank.ended {
        Some(status) if !rank.killed => (status.code(), describe(status)),
        None if rank.killed => {
            let text = "did not answer, and SIGKILL did not end it".to_string();
            (Some(i32::from(Exit::OwnFailure.code())), text)
        }
        _ => (Some(i32::from(Exit::OwnFailure.code())), "did not answer and was ended".to_string()),
    };
    let cause = match (&rank.failure, blamed) {
        // A rank's own report is better evidence than its exit code, which is better than its
        // peers' reports.
        (Some(own), _) => format!("{} ({ended})", own.cause),
        (None, Some(seen)) if rank.killed || rank.ended.is_none() => format!("{} ({ended})", seen.cause),
        (None, _) => ended,
    };
    RootCause {
        rank: first_rank + origin as u32,
        server: None,
        pid: Some(rank.pid),
        cause,
        during: rank.failure.as_ref().or(blamed).map(|failure| failure.during.clone()).unwrap_or_default(),
        code,
        log: rank.log.clone(),
        others: others(first_rank + origin as u32),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    fn exited(code: i32) -> Observations {
        Observations { pid: 1, ended: Some(ExitStatus::from_raw(code << 8)), ..Observations::default() }
    }

    fn signalled(signal: i32) -> Observations {
        Observations { pid: 1, ended: Some(ExitStatus::from_raw(signal)), ..Observations::default() }
    }

    fn blaming(origin: u32, rank: u32) -> Observations {
        let failure = Failure {
            rank,
            origin_rank: origin,
            cause: "connection closed".into(),
            during: "all_reduce of bucket 3".into(),
            exit_code: 4,
        };
        Observations { failure: Some(failure), ..exited(4) }
    }

    #[test]
    fn the_killed_rank_is_the_cause_even_if_a_peer_reported_first() {
        let cause = root_cause(0, &[&blaming(1, 0), &signalled(9), &blaming(1, 2)], Some(0));
        assert_eq!((cause.rank, cause.cause.as_str(), cause.code), (1, "killed by signal 9 (SIGKILL)", None));
        assert_eq!((cause.during.as_str(), cause.others), ("all_reduce of bucket 3", vec![0, 2]));
    }

    #[test]
    fn a_silent_rank_that_we_killed_is_the_cause_that_its_peers_report() {
        let silent = Observations { killed: true, ..signalled(9) };
        let cause = root_cause(0, &[&blaming(1, 0), &silent], Some(0));
        assert_eq!((cause.rank, cause.cause.as_str()), (1, "connection closed (did not answer and was ended)"));
        assert_eq!(cause.code, Some(5));
    }

    #[test]
    fn a_rank_that_survives_its_kill_is_not_reported_as_ended() {
        let survivor = Observations { killed: true, ..Observations::default() };
        let cause = root_cause(0, &[&blaming(1, 0), &survivor], Some(0));
        assert_eq!(cause.cause, "connection closed (did not answer, and SIGKILL did not end it)");
    }

    #[test]
    fn a_ranks_own_report_takes_precedence_over_its_exit_code() {
        let mut failed = exited(3);
        failed.failure = blaming(0, 0).failure;
        failed.failure.as_mut().unwrap().cause = "the data has changed".into();
        let cause = root_cause(0, &[&failed, &blaming(0, 1)], Some(1));
        assert!(cause.cause.starts_with("the data has changed (exit code 3: "), "{}", cause.cause);
        assert_eq!(cause.code, Some(3));
    }

    #[test]
    fn the_first_reported_of_two_failures_is_the_cause() {
        assert_eq!(root_cause(0, &[&exited(5), &signalled(11)], Some(1)).rank, 1);
        assert_eq!(root_cause(0, &[&exited(5), &signalled(11)], Some(0)).rank, 0);
    }

    #[test]
    fn the_failure_that_the_group_agreed_on_is_the_cause() {
        for heard in 0..3 {
            let cause = root_cause(0, &[&exited(5), &signalled(11), &blaming(1, 2)], Some(heard));
            assert_eq!(
                (cause.rank, cause.cause.as_str()),
                (1, "killed by signal 11 (SIGSEGV)"),
                "heard of {heard} first"
            );
        }
        // A rank that is blamed but keeps running is not the cause if another one has failed.
        assert_eq!(root_cause(0, &[&Observations::default(), &signalled(11), &blaming(0, 2)], Some(1)).rank, 1);
    }

    #[test]
    fn a_failure_on_another_machine_is_the_cause_unless_a_rank_here_failed_too() {
        let cause = root_cause(2, &[&blaming(0, 2), &blaming(0, 3)], Some(0));
        assert_eq!((cause.rank, cause.pid, cause.code), (0, None, None));
        assert_eq!((cause.cause.as_str(), cause.others), ("connection closed", vec![2, 3]));
        let cause = root_cause(2, &[&blaming(0, 2), &signalled(11)], Some(0));
        assert_eq!((cause.rank, cause.pid, cause.others), (3, Some(1), vec![2]));
        let cause = root_cause(2, &[&blaming(3, 2), &signalled(9)], Some(0));
        assert_eq!((cause.rank, cause.cause.as_str()), (3, "killed by signal 9 (SIGKILL)"));
    }
}
