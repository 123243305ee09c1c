//! Finds hung ranks and deadlocks from the heartbeats of all ranks. Pure.

use super::error::{Cause, format_ranks};
use crate::recorder::{Stall, Vitals};
use switchyard_worker_contract::config::OnHang;
use switchyard_worker_contract::event::Stuck;
use switchyard_worker_contract::recorder::Entry;

/// Latest state of a rank. Slices of reports are in rank order.
#[derive(Debug, Clone, Copy)]
pub(super) struct RankReport<'a> {
    pub node: u32,
    /// Content of its last heartbeat.
    pub vitals: Option<&'a Vitals>,
}

/// Ranks that have stalled for longer than allowed, under this policy.
fn overdue<'a>(all: &[RankReport<'a>], policy: OnHang) -> Vec<(u32, u32, &'a Vitals, Stall)> {
    let stalled = |(rank, report): (u32, &RankReport<'a>)| {
        let vitals = report.vitals?;
        let stall = vitals.stall.filter(|stall| stall.is_overdue() && stall.on_hang == policy)?;
        Some((rank, report.node, vitals, stall))
    };
    (0..).zip(all).filter_map(stalled).collect()
}

/// The rank that has hung longest while the policy is to keep waiting. A rank that waits for others
/// counts only if all ranks wait: then it is the one with the least progress.
pub(super) fn stuck(all: &[RankReport<'_>]) -> Option<Stuck> {
    let overdue = overdue(all, OnHang::Report);
    let not_waiting = overdue.iter().filter(|(_, _, vitals, _)| !vitals.waits);
    let ranks = not_waiting.clone().count() as u32;
    let behind = || overdue.iter().min_by_key(|(_, _, vitals, _)| vitals.count).filter(|_| overdue.len() == all.len());
    let longest = not_waiting.min_by_key(|(_, _, _, stall)| stall.since);
    let (rank, node_rank, _, Stall { entry, since, .. }) = *longest.or_else(behind)?;
    let Entry { operation, step, index, .. } = entry;
    Some(Stuck { rank, node_rank, operation, step, index, since, ranks: ranks.max(1) })
}

/// If all ranks have waited for each other for too long, blames the one with the least progress.
pub(super) fn deadlock(all: &[RankReport<'_>]) -> Option<Cause> {
    let overdue = overdue(all, OnHang::Restart);
    if overdue.len() < all.len() || overdue.iter().any(|(_, _, vitals, _)| !vitals.waits) {
        return None;
    }
    let (rank, _, Vitals { doing, pid, .. }, _) = overdue.iter().min_by_key(|(_, _, vitals, _)| vitals.count)?;
    let text = format!("all ranks wait for each other; this one is behind, in {doing} (process {pid})");
    Some(Cause::hung(*rank, text))
}

/// Describes what the other ranks are doing: those that have stalled as well, and those that wait.
pub(super) fn describe_others(all: &[RankReport<'_>], origin: u32) -> String {
    let mut groups: Vec<(bool, &str, Vec<u32>)> = Vec::new();
    for (rank, report) in (0..).zip(all) {
        let Some(vitals) = report.vitals.filter(|_| rank != origin) else { continue };
        let stalled = !vitals.waits;
        if stalled && !vitals.stall.is_some_and(|stall| stall.is_long()) {
            continue;
        }
        match groups.iter_mut().find(|(group_stalled, doing, _)| *group_stalled == stalled && *doing == vitals.doing) {
            Some((_, _, ranks)) => ranks.push(rank),
            None => groups.push((stalled, &vitals.doing, vec![rank])),
        }
    }
    groups.sort_by_key(|(stalled, _, _)| !stalled);
    let text = |(stalled, doing, ranks): &(bool, &str, Vec<u32>)| {
        let as_well = match (stalled, ranks.len()) {
            (false, _) => "",
            (true, 1) => " stands still as well",
            (true, _) => " stand still as well",
        };
        format!("{}{as_well}: {doing}", format_ranks(ranks))
    };
    groups.iter().take(4).map(text).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use switchyard_worker_contract::recorder::Operation;

    /// A rank in an operation of step 5 that has used up this share of its time limit.
    fn vitals(operation: Operation, share: f32, count: u64, on_hang: OnHang) -> Vitals {
        let entry = Entry { operation, step: 5, index: 0, since_us: 0 };
        let stall = Some(Stall { entry, since: 1_000 - (100.0 * share) as u64, share, on_hang });
        Vitals { pid: 7, doing: entry.to_string(), waits: operation.waits(), stall, count, gpu: None }
    }

    fn reports(all: &[Vitals]) -> Vec<RankReport<'_>> {
        (0..).zip(all).map(|(rank, vitals)| RankReport { node: rank / 2, vitals: Some(vitals) }).collect()
    }

    #[test]
    fn the_longest_hung_rank_is_named_and_waiting_ranks_are_not() {
        let of = |operation, share| vitals(operation, share, 9, OnHang::Report);
        let all = [of(Operation::Reduce, 1.5), of(Operation::Forward, 0.9), of(Operation::Reduce, 1.5)];
        assert_eq!(stuck(&reports(&all)), None, "only waiting ranks are overdue");
        let all = [of(Operation::Reduce, 1.5), of(Operation::Input, 1.1), of(Operation::Forward, 1.4)];
        let found = stuck(&reports(&all)).unwrap();
        let expected =
            Stuck { rank: 2, node_rank: 1, operation: Operation::Forward, step: 5, index: 0, since: 860, ranks: 2 };
        assert_eq!((found, found.doing().as_str()), (expected, "step 5: forward pass of micro-batch 0"));
        let restarts = all.map(|vitals| Vitals {
            stall: vitals.stall.map(|stall| Stall { on_hang: OnHang::Restart, ..stall }),
            ..vitals
        });
        assert_eq!(stuck(&reports(&restarts)), None, "the watchdogs of these ranks end the group");
    }

    #[test]
    fn when_all_ranks_have_stalled_all_are_named() {
        let all = [Operation::Input, Operation::Forward, Operation::Forward];
        let of = |share, on_hang| all.map(|operation| vitals(operation, share, 9, on_hang));
        assert_eq!(stuck(&reports(&of(1.01, OnHang::Report))).unwrap().ranks, 3);
        let restart = of(0.9, OnHang::Restart);
        let expected = "ranks 1, 2 stand still as well: step 5: forward pass of micro-batch 0";
        assert_eq!(describe_others(&reports(&restart), 0), expected);
        let expected = "rank 0 stands still as well: step 5: waiting for the reader, micro-batch 0; \
                        rank 2 stands still as well: step 5: forward pass of micro-batch 0";
        assert_eq!(describe_others(&reports(&restart), 1), expected);
        assert_eq!(describe_others(&reports(&of(0.1, OnHang::Restart)), 1), "", "they have only begun");
    }

    #[test]
    fn in_a_deadlock_the_rank_with_the_least_progress_is_behind() {
        for policy in [OnHang::Report, OnHang::Restart] {
            let mut all = [3, 2, 4].map(|count| vitals(Operation::Agree, 1.1, count, policy));
            let (stuck_rank, cause) = (stuck(&reports(&all)).map(|stuck| stuck.rank), deadlock(&reports(&all)));
            match policy {
                OnHang::Report => assert_eq!((stuck_rank, cause), (Some(1), None)),
                OnHang::Restart => assert_eq!((stuck_rank, cause.map(|cause| cause.origin_rank)), (None, Some(1))),
            }
            all[2] = vitals(Operation::Forward, 0.2, 4, policy);
            assert_eq!((stuck(&reports(&all)), deadlock(&reports(&all))), (None, None), "one computes");
        }
    }
}
