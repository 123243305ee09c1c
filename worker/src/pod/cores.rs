//! Divides the CPUs of a pod among its ranks. Pure, except for detecting the CPUs.
//!
//! Shares are contiguous runs of cores in kernel numbering. A rank therefore stays within a NUMA
//! node whenever the ranks of a node divide its cores evenly. There is no further NUMA logic: the
//! controller chooses the pod's node.

use std::collections::BTreeMap;
use std::fs;
use switchyard_worker_contract::CpuList;

/// The CPUs of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CpuShare {
    /// CPUs to pin to; `None`: not pinned.
    pub cpus: Option<CpuList>,
    /// Compute threads if the configuration sets none.
    pub threads: u32,
}

/// The cores this process can use, each as a list of its hardware threads.
pub(super) fn cores() -> Vec<Vec<u32>> {
    let allowed = crate::process::allowed_cpus();
    let mut cores: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for cpu in allowed.iter() {
        let siblings = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        let siblings = fs::read_to_string(siblings).ok().and_then(|text| text.trim().parse::<CpuList>().ok());
        // Without topology information, a CPU counts as a core.
        cores.entry(siblings.and_then(|list| list.first()).unwrap_or(cpu)).or_default().push(cpu);
    }
    cores.into_values().collect()
}

/// Divides cores among ranks. `quota`: CPU limit in CPUs; 0 without one.
///
/// No rank is pinned if the limit is below the usable CPUs, or if there are fewer cores than ranks.
/// The CPUs are then shared with other pods (all of which would pin to the same first cores) or
/// among the ranks, and the kernel's scheduler does better.
pub(super) fn divide(cores: &[Vec<u32>], quota: u32, ranks: u32) -> Vec<CpuShare> {
    let cpus: usize = cores.iter().map(Vec::len).sum();
    let limited = quota > 0 && (quota as usize) < cpus;
    if limited || cores.len() < ranks as usize {
        let usable = if limited { cores.len().min(quota as usize) } else { cores.len() } as u32;
        return vec![CpuShare { cpus: None, threads: (usable / ranks).max(1) }; ranks as usize];
    }
    let share = |rank: usize| {
        let own = &cores[rank * cores.len() / ranks as usize..(rank + 1) * cores.len() / ranks as usize];
        CpuShare { cpus: Some(CpuList::new(own.iter().flatten().copied())), threads: own.len() as u32 }
    };
    (0..ranks as usize).map(share).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(cores: &[Vec<u32>], quota: u32, ranks: u32) -> Vec<(String, u32)> {
        let text = |share: CpuShare| (share.cpus.map_or("-".to_string(), |cpus| cpus.to_string()), share.threads);
        divide(cores, quota, ranks).into_iter().map(text).collect()
    }

    fn plain(count: u32) -> Vec<Vec<u32>> {
        (0..count).map(|cpu| vec![cpu]).collect()
    }

    fn expect(found: Vec<(String, u32)>, expected: &[(&str, u32)]) {
        let expected: Vec<_> = expected.iter().map(|(cpus, threads)| (cpus.to_string(), *threads)).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn every_core_is_assigned_once_in_contiguous_runs() {
        expect(texts(&plain(8), 0, 2), &[("0-3", 4), ("4-7", 4)]);
        expect(texts(&plain(5), 0, 2), &[("0-1", 2), ("2-4", 3)]);
        expect(texts(&plain(3), 3, 3), &[("0", 1), ("1", 1), ("2", 1)]);
    }

    #[test]
    fn hardware_threads_of_a_core_stay_together_and_count_once() {
        let cores = vec![vec![0, 4], vec![1, 5], vec![2, 6], vec![3, 7]];
        expect(texts(&cores, 8, 2), &[("0-1,4-5", 2), ("2-3,6-7", 2)]);
    }

    #[test]
    fn ranks_on_shared_cpus_are_not_pinned() {
        expect(texts(&plain(64), 8, 2), &[("-", 4), ("-", 4)]);
        expect(texts(&plain(64), 1, 2), &[("-", 1), ("-", 1)]);
        expect(texts(&plain(2), 0, 3), &[("-", 1), ("-", 1), ("-", 1)]);
        let hyper = vec![vec![0, 2], vec![1, 3]];
        expect(texts(&hyper, 3, 1), &[("-", 2)]);
    }

    #[test]
    fn each_cpu_of_this_machine_belongs_to_one_core() {
        let mut cpus: Vec<u32> = cores().into_iter().flatten().collect();
        cpus.sort_unstable();
        assert_eq!(CpuList::new(cpus.iter().copied()).len(), cpus.len());
        assert_eq!(CpuList::new(cpus).to_string(), crate::process::allowed_cpus().to_string());
    }
}
