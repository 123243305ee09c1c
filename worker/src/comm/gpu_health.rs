//! Selects the job's worst GPU problem from the heartbeats of all ranks. Pure.

use super::hang::RankReport;
use switchyard_worker_contract::event::GpuTrouble;

/// The worst GPU problem of all ranks; the lowest rank wins ties.
pub(super) fn gpu_trouble(all: &[RankReport<'_>]) -> Option<GpuTrouble> {
    let report = |(rank, report): (u32, &RankReport<'_>)| {
        let (bus, trouble) = report.vitals?.gpu?;
        Some(GpuTrouble { rank, node_rank: report.node, bus, trouble })
    };
    (0..).zip(all).filter_map(report).min_by_key(|one| (one.trouble.urgency(), one.rank))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recorder::Vitals;
    use switchyard_worker_contract::gpu::{GpuFault, PciAddress, SlowedBy};

    #[test]
    fn the_worst_gpu_of_all_ranks_is_selected() {
        let bus = PciAddress::parse("0000:17:00.0");
        let with = |trouble| Vitals { gpu: Some((bus, trouble)), ..Vitals::default() };
        let (slow, narrow) =
            (with(GpuFault::Slowed { by: SlowedBy::Temperature }), with(GpuFault::NarrowLink { lanes: 4, most: 16 }));
        let [memory, first, second] =
            [GpuFault::MemoryErrors, GpuFault::Xid { xid: 94 }, GpuFault::Xid { xid: 31 }].map(with);
        let selected = |all: &[Option<&Vitals>]| {
            let reports: Vec<RankReport<'_>> =
                (0..).zip(all).map(|(rank, vitals)| RankReport { node: rank / 2, vitals: *vitals }).collect();
            gpu_trouble(&reports).map(|found| (found.rank, found.node_rank))
        };
        assert_eq!(selected(&[None, Some(&Vitals::default())]), None);
        assert_eq!(selected(&[None, Some(&narrow), Some(&slow), Some(&slow)]), Some((2, 1)));
        assert_eq!(selected(&[Some(&slow), Some(&memory), None, Some(&narrow)]), Some((1, 0)));
        assert_eq!(
            selected(&[Some(&memory), None, Some(&first), Some(&second)]),
            Some((2, 1)),
            "ties go to the first rank"
        );
    }
}
