//! Who holds up the others, from the heartbeats of all ranks. Pure.

use super::error::{Cause, ranks_text};
use crate::recorder::{Standing, Vitals};
use switchyard_worker_contract::config::OnHang;
use switchyard_worker_contract::event::Stuck;
use switchyard_worker_contract::recorder::Entry;

/// What is known of a rank; they are in the order of the ranks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Heard<'a> {
    pub node: u32,
    /// What its last heartbeat said.
    pub vitals: Option<&'a Vitals>,
}

/// The ranks that stand still for longer than a job with this policy allows.
fn late<'a>(all: &[Heard<'a>], policy: OnHang) -> Vec<(u32, u32, &'a Vitals, Standing)> {
    let of = |(rank, heard): (u32, &Heard<'a>)| {
        let vitals = heard.vitals?;
        let still = vitals.still.filter(|still| still.is_late() && still.on_hang == policy)?;
        Some((rank, heard.node, vitals, still))
    };
    (0..).zip(all).filter_map(of).collect()
}

/// Of the ranks that stand still while the job goes on waiting, the one that does so for longest. A rank that waits for others
/// is one of them only if all ranks wait: then it is the one that has done least.
pub(super) fn stuck(all: &[Heard<'_>]) -> Option<Stuck> {
    let late = late(all, OnHang::Report);
    let own = late.iter().filter(|(_, _, vitals, _)| !vitals.waits);
    let ranks = own.clone().count() as u32;
    let behind = || late.iter().min_by_key(|(_, _, vitals, _)| vitals.count).filter(|_| late.len() == all.len());
    let longest = own.min_by_key(|(_, _, _, still)| still.since);
    let (rank, node_rank, _, Standing { entry, since, .. }) = *longest.or_else(behind)?;
    let Entry { operation, step, index, .. } = entry;
    Some(Stuck { rank, node_rank, operation, step, index, since, ranks: ranks.max(1) })
}

/// If all ranks wait for each other for too long, the one that has done least is behind.
pub(super) fn all_wait(all: &[Heard<'_>]) -> Option<Cause> {
    let late = late(all, OnHang::Restart);
    if late.len() < all.len() || late.iter().any(|(_, _, vitals, _)| !vitals.waits) {
        return None;
    }
    let (rank, _, Vitals { doing, pid, .. }, _) = late.iter().min_by_key(|(_, _, vitals, _)| vitals.count)?;
    let text = format!("all ranks wait for each other; this one is behind, in {doing} (process {pid})");
    Some(Cause::hung(*rank, text))
}

/// What the other ranks do when this one has failed: those that stand still as well, and those that wait.
pub(super) fn others(all: &[Heard<'_>], origin: u32) -> String {
    let mut groups: Vec<(bool, &str, Vec<u32>)> = Vec::new();
    for (rank, heard) in (0..).zip(all) {
        let Some(vitals) = heard.vitals.filter(|_| rank != origin) else { continue };
        let stands = !vitals.waits;
        if stands && !vitals.still.is_some_and(|still| still.is_long()) {
            continue;
        }
        match groups.iter_mut().find(|(stood, doing, _)| *stood == stands && *doing == vitals.doing) {
            Some((_, _, ranks)) => ranks.push(rank),
            None => groups.push((stands, &vitals.doing, vec![rank])),
        }
    }
    groups.sort_by_key(|(stands, _, _)| !stands);
    let text = |(stands, doing, ranks): &(bool, &str, Vec<u32>)| {
        let as_well = match (stands, ranks.len()) {
            (false, _) => "",
            (true, 1) => " stands still as well",
            (true, _) => " stand still as well",
        };
        format!("{}{as_well}: {doing}", ranks_text(ranks))
    };
    groups.iter().take(4).map(text).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use switchyard_worker_contract::recorder::Operation;

    /// A rank in an operation of step 5 for this share of what is allowed.
    fn vitals(operation: Operation, share: f32, count: u64, on_hang: OnHang) -> Vitals {
        let entry = Entry { operation, step: 5, index: 0, since_us: 0 };
        let still = Some(Standing { entry, since: 1_000 - (100.0 * share) as u64, share, on_hang });
        Vitals { pid: 7, doing: entry.to_string(), waits: operation.waits(), still, count, gpu: None }
    }

    fn heard(all: &[Vitals]) -> Vec<Heard<'_>> {
        (0..).zip(all).map(|(rank, vitals)| Heard { node: rank / 2, vitals: Some(vitals) }).collect()
    }

    #[test]
    fn who_stands_still_for_longest_is_named_and_not_those_who_wait() {
        let of = |operation, share| vitals(operation, share, 9, OnHang::Report);
        let all = [of(Operation::Reduce, 1.5), of(Operation::Forward, 0.9), of(Operation::Reduce, 1.5)];
        assert_eq!(stuck(&heard(&all)), None, "nobody is late but those who wait");
        let all = [of(Operation::Reduce, 1.5), of(Operation::Input, 1.1), of(Operation::Forward, 1.4)];
        let found = stuck(&heard(&all)).unwrap();
        let expected =
            Stuck { rank: 2, node_rank: 1, operation: Operation::Forward, step: 5, index: 0, since: 860, ranks: 2 };
        assert_eq!((found, found.doing().as_str()), (expected, "step 5: forward pass of micro-batch 0"));
        let restarts = all.map(|vitals| Vitals {
            still: vitals.still.map(|still| Standing { on_hang: OnHang::Restart, ..still }),
            ..vitals
        });
        assert_eq!(stuck(&heard(&restarts)), None, "the watchdogs of these ranks end the group");
    }

    #[test]
    fn when_all_ranks_stand_still_all_are_named() {
        let all = [Operation::Input, Operation::Forward, Operation::Forward];
        let of = |share, on_hang| all.map(|operation| vitals(operation, share, 9, on_hang));
        assert_eq!(stuck(&heard(&of(1.01, OnHang::Report))).unwrap().ranks, 3);
        let restart = of(0.9, OnHang::Restart);
        let expected = "ranks 1, 2 stand still as well: step 5: forward pass of micro-batch 0";
        assert_eq!(others(&heard(&restart), 0), expected);
        let expected = "rank 0 stands still as well: step 5: waiting for the reader, micro-batch 0; \
                        rank 2 stands still as well: step 5: forward pass of micro-batch 0";
        assert_eq!(others(&heard(&restart), 1), expected);
        assert_eq!(others(&heard(&of(0.1, OnHang::Restart)), 1), "", "they have only begun");
    }

    #[test]
    fn when_all_wait_for_each_other_the_one_that_has_done_least_is_behind() {
        for policy in [OnHang::Report, OnHang::Restart] {
            let mut all = [3, 2, 4].map(|count| vitals(Operation::Agree, 1.1, count, policy));
            let (stuck_rank, cause) = (stuck(&heard(&all)).map(|stuck| stuck.rank), all_wait(&heard(&all)));
            match policy {
                OnHang::Report => assert_eq!((stuck_rank, cause), (Some(1), None)),
                OnHang::Restart => assert_eq!((stuck_rank, cause.map(|cause| cause.origin_rank)), (None, Some(1))),
            }
            all[2] = vitals(Operation::Forward, 0.2, 4, policy);
            assert_eq!((stuck(&heard(&all)), all_wait(&heard(&all))), (None, None), "one computes");
        }
    }
}
