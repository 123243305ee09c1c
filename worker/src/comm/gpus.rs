//! Whose GPU a person should look at, from the heartbeats of all ranks. Pure.

use super::standstill::Heard;
use switchyard_worker_contract::event::GpuTrouble;

/// The worst of all ranks; of equal ones that of the lowest rank.
pub(super) fn gpu_trouble(all: &[Heard<'_>]) -> Option<GpuTrouble> {
    let of = |(rank, heard): (u32, &Heard<'_>)| {
        let (bus, trouble) = heard.vitals?.gpu?;
        Some(GpuTrouble { rank, node_rank: heard.node, bus, trouble })
    };
    (0..).zip(all).filter_map(of).min_by_key(|one| (one.trouble.urgency(), one.rank))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recorder::Vitals;
    use switchyard_worker_contract::gpu::{GpuFault, PciAddress, SlowedBy};

    #[test]
    fn the_worst_of_all_ranks_is_named() {
        let bus = PciAddress::parse("0000:17:00.0");
        let with = |trouble| Vitals { gpu: Some((bus, trouble)), ..Vitals::default() };
        let (slow, narrow) =
            (with(GpuFault::Slowed { by: SlowedBy::Temperature }), with(GpuFault::NarrowLink { lanes: 4, most: 16 }));
        let [memory, first, second] =
            [GpuFault::MemoryErrors, GpuFault::Xid { xid: 94 }, GpuFault::Xid { xid: 31 }].map(with);
        let named = |all: &[Option<&Vitals>]| {
            let heard: Vec<Heard<'_>> =
                (0..).zip(all).map(|(rank, vitals)| Heard { node: rank / 2, vitals: *vitals }).collect();
            gpu_trouble(&heard).map(|found| (found.rank, found.node_rank))
        };
        assert_eq!(named(&[None, Some(&Vitals::default())]), None);
        assert_eq!(named(&[None, Some(&narrow), Some(&slow), Some(&slow)]), Some((2, 1)));
        assert_eq!(named(&[Some(&slow), Some(&memory), None, Some(&narrow)]), Some((1, 0)));
        assert_eq!(named(&[Some(&memory), None, Some(&first), Some(&second)]), Some((2, 1)), "of equal ones the first");
    }
}
