//! Members of a group, and the data paths that follow from them. Pure functions of the roster, so
//! they are equal on all ranks.

use super::{config::Force, error::CommError, error::format_ranks, plan::Layout};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use switchyard_worker_contract::config::Transport;

/// A rank's description of itself, sent to the group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Member {
    /// Host name, for messages.
    pub host: String,
    /// Ranks with equal identity share memory.
    pub host_id: String,
    pub pid: u32,
    /// CPUs this rank can run on, one bit each.
    pub cpus: Vec<u64>,
    /// cgroup CPU quota of all processes of this node, rounded up; 0 without a limit.
    pub quota: u32,
    pub node: u32,
    /// Where a parameter server accepts the ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<SocketAddr>,
}

/// All members in rank order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Roster {
    pub members: Vec<Member>,
}

/// Data paths of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Paths {
    pub transport: Transport,
    /// Ranks that share memory with this one, itself included, in rank order; the first one leads.
    pub local: Vec<u32>,
    /// Ranks that exchange values over TCP; `None` if this rank is not one of them.
    pub ring: Option<Vec<u32>>,
    /// Every local rank can have its own CPU, so a short spin does not delay another rank.
    pub own_cpu: bool,
    /// There are also CPUs for the communication threads of every local rank.
    pub spare_cpu: bool,
}

impl Roster {
    /// Data paths of rank `me` in a group with this many lanes.
    pub fn paths(&self, me: u32, lanes: u32, force: Force) -> Result<Paths, CommError> {
        let world = self.members.len() as u32;
        let mut hosts: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
        for (rank, member) in (0u32..).zip(&self.members) {
            hosts.entry(&member.host_id).or_default().push(rank);
        }
        let mine = hosts
            .get(self.members[me as usize].host_id.as_str())
            .expect("invariant: a rank is on its own host")
            .clone();
        let (own_cpu, spare_cpu) = self.cpus_suffice(&mine, 1 + lanes);
        let mut leaders: Vec<u32> = hosts.values().map(|ranks| ranks[0]).collect();
        leaders.sort_unstable();
        let all: Vec<u32> = (0..world).collect();
        let (transport, local, ring) = if world == 1 {
            (Transport::None, vec![me], None)
        } else if force == Force::Tcp {
            (Transport::Tcp, vec![me], Some(all))
        } else if hosts.len() == 1 {
            (Transport::Shm, mine, None)
        } else if force == Force::Shm {
            let other = self.members.iter().position(|m| m.host_id != self.members[0].host_id).unwrap_or(0);
            return Err(CommError::Transport {
                got: "shm".to_owned(),
                why: format!(
                    "the ranks are on {} hosts ({} on {}, rank {other} on {})",
                    hosts.len(),
                    format_ranks(&hosts[self.members[0].host_id.as_str()]),
                    self.members[0].host,
                    self.members[other].host
                ),
            });
        } else if hosts.len() == world as usize {
            (Transport::Tcp, mine, Some(all))
        } else {
            let ring = leaders.contains(&me).then_some(leaders);
            (Transport::Hierarchical, mine, ring)
        };
        Ok(Paths { transport, local, ring, own_cpu, spare_cpu })
    }

    /// Data paths of rank `me` among these ranks, in ascending order.
    pub fn paths_among(&self, members: &[u32], me: u32, lanes: u32, force: Force) -> Result<Paths, CommError> {
        let position = members.iter().position(|rank| *rank == me).expect("invariant: a rank is among its members");
        let mut paths = self.among(members).paths(position as u32, lanes, force)?;
        let to_rank = |position: &mut u32| *position = members[*position as usize];
        paths.local.iter_mut().for_each(to_rank);
        paths.ring.iter_mut().flatten().for_each(to_rank);
        // The other ranks of the host need CPUs too.
        let host = &self.members[me as usize].host_id;
        let neighbours = (0u32..).zip(&self.members).filter(|(_, member)| member.host_id == *host);
        let neighbours: Vec<u32> = neighbours.map(|(rank, _)| rank).collect();
        (paths.own_cpu, paths.spare_cpu) = self.cpus_suffice(&neighbours, 1 + lanes);
        Ok(paths)
    }

    /// These ranks alone, numbered by position.
    pub fn among(&self, members: &[u32]) -> Roster {
        Roster { members: members.iter().map(|rank| self.members[*rank as usize].clone()).collect() }
    }

    /// All ranks and their hosts, as rank `me` sees them.
    pub fn layout(&self, me: u32) -> Layout {
        let mut numbers: BTreeMap<&str, usize> = BTreeMap::new();
        let hosts = self.members.iter().map(|member| {
            let next = numbers.len();
            *numbers.entry(&member.host_id).or_insert(next)
        });
        Layout { rank: me as usize, hosts: hosts.collect() }
    }

    /// Whether there are enough CPUs for one busy thread per rank, and for `threads` per rank, on
    /// this host.
    fn cpus_suffice(&self, local: &[u32], threads: u32) -> (bool, bool) {
        let mut union: Vec<u64> = Vec::new();
        for rank in local {
            let cpus = &self.members[*rank as usize].cpus;
            union.resize(union.len().max(cpus.len()), 0);
            for (word, add) in union.iter_mut().zip(cpus) {
                *word |= add;
            }
        }
        let cpus: u32 = union.iter().map(|word| word.count_ones()).sum();
        let enough = |threads_per_rank: u32| {
            let quotas = local.iter().all(|rank| {
                let member = &self.members[*rank as usize];
                let node = local.iter().filter(|r| self.members[**r as usize].node == member.node).count() as u32;
                member.quota == 0 || member.quota >= threads_per_rank * node
            });
            quotas
                && cpus >= threads_per_rank * local.len() as u32
                && local.iter().all(|rank| {
                    let own: u32 = self.members[*rank as usize].cpus.iter().map(|w| w.count_ones()).sum();
                    own >= threads_per_rank
                })
        };
        (enough(1), enough(threads))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn roster(hosts: &[&str], cpus: &[u64]) -> Roster {
        let members = hosts.iter().zip(cpus.iter().cycle()).map(|(host, cpus)| Member {
            host: format!("name-{host}"),
            host_id: (*host).to_owned(),
            pid: 1,
            cpus: vec![*cpus],
            quota: 0,
            node: 0,
            data: None,
        });
        Roster { members: members.collect() }
    }

    #[test]
    fn the_transport_follows_the_hosts() {
        for (hosts, transport) in [
            (&["a"][..], Transport::None),
            (&["a", "a"], Transport::Shm),
            (&["a", "b"], Transport::Tcp),
            (&["a", "a", "b"], Transport::Hierarchical),
        ] {
            let paths = roster(hosts, &[3]).paths(0, 1, Force::Auto).unwrap();
            assert_eq!(paths.transport, transport, "{hosts:?}");
        }
    }

    #[test]
    fn only_leaders_are_in_the_ring_between_hosts() {
        let roster = roster(&["b", "a", "b", "a"], &[3]);
        let leader = roster.paths(1, 1, Force::Auto).unwrap();
        assert_eq!((leader.local, leader.ring), (vec![1, 3], Some(vec![0, 1])));
        assert_eq!(roster.paths(3, 1, Force::Auto).unwrap().ring, None);
        let forced = roster.paths(3, 1, Force::Tcp).unwrap();
        assert_eq!((forced.transport, forced.ring), (Transport::Tcp, Some(vec![0, 1, 2, 3])));
    }

    #[test]
    fn shared_memory_across_hosts_is_refused_with_host_names() {
        let text = roster(&["a", "b"], &[3]).paths(0, 1, Force::Shm).unwrap_err().to_string();
        assert!(text.contains("2 hosts") && text.contains("name-b"), "{text}");
    }

    #[test]
    fn spinning_needs_a_cpu_per_rank() {
        let own = |hosts: &[&str], cpus: &[u64]| {
            let paths = roster(hosts, cpus).paths(0, 1, Force::Auto).unwrap();
            (paths.own_cpu, paths.spare_cpu)
        };
        assert_eq!(own(&["a", "a"], &[0b11]), (true, false));
        assert_eq!(own(&["a", "a"], &[0b01, 0b10]), (true, false), "pinned, one each");
        assert_eq!(own(&["a", "a"], &[0b01]), (false, false), "both on one");
        assert_eq!(own(&["a", "a", "a"], &[0b11]), (false, false));
        assert_eq!(own(&["a", "a"], &[0b1111]), (true, true));
        let two_lanes = roster(&["a", "a"], &[0b1111]).paths(0, 2, Force::Auto).unwrap();
        assert_eq!((two_lanes.own_cpu, two_lanes.spare_cpu), (true, false));
        let mut limited = roster(&["a", "a"], &[0b1111]);
        limited.members.iter_mut().for_each(|m| m.quota = 1);
        assert!(!limited.paths(0, 1, Force::Auto).unwrap().own_cpu);
    }
}
