//! Watches RDMA ports for links that recently went down and for growing error counters. Pure. The
//! report has the time of a change instead of the counter, so that a quiet port changes nothing.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use std::collections::{BTreeMap, BTreeSet};
use switchyard_crds::gpu_topology::{GPUTopologyStatus, PortWatch};
use switchyard_node_agent::counters::PortCounters;

/// While errors keep growing, their time is updated at this interval.
const RENEWAL: SignedDuration = SignedDuration::from_mins(30);

/// All ports seen so far.
#[derive(Debug, Default)]
pub(crate) struct Ports {
    known: BTreeMap<(String, u32), Port>,
}

#[derive(Debug)]
struct Port {
    last: PortCounters,
    since: Timestamp,
    link_down: Option<Timestamp>,
    error: Option<Timestamp>,
    errors: BTreeSet<&'static str>,
}

impl Ports {
    /// Compares counters with the previous ones. A new port, or one whose counters were reset by a
    /// driver reload, counts as unchanged.
    pub fn see(&mut self, counters: Vec<PortCounters>, now: Timestamp) {
        for counters in counters {
            let key = (counters.device.clone(), counters.port);
            let Some(port) = self.known.get_mut(&key) else {
                let port = Port { last: counters, since: now, link_down: None, error: None, errors: BTreeSet::new() };
                self.known.insert(key, port);
                continue;
            };
            if counters.link_downed > port.last.link_downed && port.last.link_downed.is_some() {
                port.link_down = Some(now);
            }
            let grown = |(name, count): &(&&'static str, &u64)| {
                port.last.errors.get(**name).is_some_and(|before| *count > before)
            };
            let grown: Vec<&'static str> = counters.errors.iter().filter(grown).map(|(name, _)| *name).collect();
            let is_due = port.error.is_none_or(|at| now.duration_since(at) >= RENEWAL);
            let is_news = grown.iter().any(|name| !port.errors.contains(name));
            if !grown.is_empty() && (is_due || is_news) {
                port.error = Some(now);
                port.errors.extend(grown);
            }
            port.last = counters;
        }
    }

    /// Adds the observations to a description.
    pub fn tell(&self, facts: &mut GPUTopologyStatus) {
        let time = |at: Timestamp| Time(Timestamp::from_second(at.as_second()).unwrap_or(at));
        for nic in &mut facts.nics {
            let (Some(device), Some(port)) = (&nic.rdma_device, nic.port) else { continue };
            nic.port_watch = self.known.get(&(device.clone(), port)).map(|seen| PortWatch {
                since: Some(time(seen.since)),
                last_link_down: seen.link_down.map(time),
                last_error: seen.error.map(time),
                errors: seen.errors.iter().map(|name| (*name).to_owned()).collect(),
            });
        }
    }
}

/// Keeps what a previous or concurrent agent on this node observed: the later time wins.
pub(crate) fn keep(status: &mut GPUTopologyStatus, before: &GPUTopologyStatus) {
    for nic in &mut status.nics {
        let Some(watch) = &mut nic.port_watch else { continue };
        let same = before.nics.iter().find(|other| other.name == nic.name);
        let Some(seen) = same.and_then(|other| other.port_watch.as_ref()) else { continue };
        watch.last_link_down = later(&watch.last_link_down, &seen.last_link_down);
        watch.last_error = later(&watch.last_error, &seen.last_error);
        let errors: BTreeSet<&String> = watch.errors.iter().chain(&seen.errors).collect();
        watch.errors = errors.into_iter().cloned().collect();
    }
}

fn later(one: &Option<Time>, other: &Option<Time>) -> Option<Time> {
    one.iter().chain(other).max_by_key(|time| time.0).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use switchyard_crds::gpu_topology::Nic;

    fn at(minute: i64) -> Timestamp {
        Timestamp::from_second(1_790_000_000 + 60 * minute).unwrap()
    }

    fn count(link_downed: u64, symbol_error: u64) -> Vec<PortCounters> {
        let errors = [("symbol_error", symbol_error), ("packet_seq_err", 7)].into();
        vec![PortCounters { device: "mlx5_0".into(), port: 1, link_downed: Some(link_downed), errors }]
    }

    fn told(ports: &Ports) -> PortWatch {
        let nic = Nic { rdma_device: Some("mlx5_0".into()), port: Some(1), ..Nic::default() };
        let mut facts = GPUTopologyStatus { nics: vec![nic, Nic::default()], ..GPUTopologyStatus::default() };
        ports.tell(&mut facts);
        assert_eq!(facts.nics[1].port_watch, None, "no RDMA port");
        facts.nics[0].port_watch.clone().expect("a port that is watched")
    }

    #[test]
    fn a_quiet_port_says_the_same_for_ever() {
        let mut ports = Ports::default();
        ports.see(count(3, 12), at(0));
        let first = told(&ports);
        assert_eq!(first, PortWatch { since: Some(Time(at(0))), ..PortWatch::default() });
        (1..100).for_each(|minute| ports.see(count(3, 12), at(minute)));
        assert_eq!(told(&ports), first);
    }

    #[test]
    fn a_link_that_went_down_is_told_after_it_is_up_again() {
        let mut ports = Ports::default();
        ports.see(count(3, 12), at(0));
        ports.see(count(4, 12), at(5));
        ports.see(count(4, 12), at(6));
        assert_eq!(told(&ports).last_link_down, Some(Time(at(5))));
        // The driver was reloaded: its counters start from 0.
        ports.see(count(0, 0), at(9));
        assert_eq!((told(&ports).last_link_down, told(&ports).last_error), (Some(Time(at(5))), None));
        ports.see(count(1, 0), at(10));
        assert_eq!(told(&ports).last_link_down, Some(Time(at(10))));
    }

    #[test]
    fn errors_that_grow_all_the_time_are_renewed_seldom() {
        let mut ports = Ports::default();
        let mut times = BTreeSet::new();
        for minute in 0..61 {
            ports.see(count(0, minute as u64), at(minute));
            times.extend(told(&ports).last_error.map(|at| at.0));
        }
        assert_eq!(times.into_iter().collect::<Vec<_>>(), [at(1), at(31)]);
        assert_eq!(told(&ports).errors, ["symbol_error"]);
    }

    #[test]
    fn what_the_agent_before_saw_stays() {
        let port = |last_link_down: Option<i64>, errors: &[&str]| {
            let watch = PortWatch {
                since: Some(Time(at(50))),
                last_link_down: last_link_down.map(|minute| Time(at(minute))),
                last_error: None,
                errors: errors.iter().map(|name| (*name).to_owned()).collect(),
            };
            let nic = Nic { name: "ib0".into(), port_watch: Some(watch), ..Nic::default() };
            GPUTopologyStatus { nics: vec![nic], ..GPUTopologyStatus::default() }
        };
        for (own, before, expected) in [(None, Some(3), Some(3)), (Some(9), Some(3), Some(9)), (None, None, None)] {
            let mut status = port(own, &["packet_seq_err"]);
            keep(&mut status, &port(before, &["symbol_error"]));
            let watch = status.nics[0].port_watch.clone().unwrap();
            assert_eq!(watch.last_link_down, expected.map(|minute| Time(at(minute))));
            assert_eq!(watch.errors, ["packet_seq_err", "symbol_error"]);
        }
        let mut status = port(Some(1), &[]);
        keep(&mut status, &GPUTopologyStatus::default());
        assert_eq!(status, port(Some(1), &[]), "a port that is new");
    }
}
