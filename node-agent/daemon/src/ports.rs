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
    pub fn update(&mut self, counters: Vec<PortCounters>, now: Timestamp) {
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
    pub fn add_to(&self, facts: &mut GPUTopologyStatus) {
        let time = |at: Timestamp| Time(Timestamp::from_second(at.as_second()).unwrap_or(at));
        for nic in &mut facts.nics {
            let (Some(device), Some(port)) = (&nic.rdma_device, nic.port) else { continue };
            nic.port_watch = self.known.get(&(device.clone(), port)).map(|port| PortWatch {
                since: Some(time(port.since)),
                last_link_down: port.link_down.map(time),
                last_error: port.error.map(time),
                errors: port.errors.iter().map(|name| (*name).to_owned()).collect(),
            });
        }
    }
}

/// Keeps what a previous or concurrent agent on this node observed: the later time wins.
pub(crate) fn keep(status: &mut GPUTopologyStatus, before: &GPUTopologyStatus) {
    for nic in &mut status.nics {
        let Some(watch) = &mut nic.port_watch else { continue };
        let same = before.nics.iter().find(|other| other.name == nic.name);
        let Some(other) = same.and_then(|other| other.port_watch.as_ref()) else { continue };
        watch.last_link_down = later(&watch.last_link_down, &other.last_link_down);
        watch.last_error = later(&watch.last_error, &other.last_error);
        let errors: BTreeSet<&String> = watch.errors.iter().chain(&other.errors).collect();
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

    fn watched(ports: &Ports) -> PortWatch {
        let nic = Nic { rdma_device: Some("mlx5_0".into()), port: Some(1), ..Nic::default() };
        let mut facts = GPUTopologyStatus { nics: vec![nic, Nic::default()], ..GPUTopologyStatus::default() };
        ports.add_to(&mut facts);
        assert_eq!(facts.nics[1].port_watch, None, "no RDMA port");
        facts.nics[0].port_watch.clone().expect("a port that is watched")
    }

    #[test]
    fn a_quiet_port_never_changes_the_report() {
        let mut ports = Ports::default();
        ports.update(count(3, 12), at(0));
        let first = watched(&ports);
        assert_eq!(first, PortWatch { since: Some(Time(at(0))), ..PortWatch::default() });
        (1..100).for_each(|minute| ports.update(count(3, 12), at(minute)));
        assert_eq!(watched(&ports), first);
    }

    #[test]
    fn a_link_that_went_down_is_reported_after_it_is_up_again() {
        let mut ports = Ports::default();
        ports.update(count(3, 12), at(0));
        ports.update(count(4, 12), at(5));
        ports.update(count(4, 12), at(6));
        assert_eq!(watched(&ports).last_link_down, Some(Time(at(5))));
        // The driver was reloaded: its counters start from 0.
        ports.update(count(0, 0), at(9));
        assert_eq!((watched(&ports).last_link_down, watched(&ports).last_error), (Some(Time(at(5))), None));
        ports.update(count(1, 0), at(10));
        assert_eq!(watched(&ports).last_link_down, Some(Time(at(10))));
    }

    #[test]
    fn constantly_growing_errors_are_rarely_renewed() {
        let mut ports = Ports::default();
        let mut times = BTreeSet::new();
        for minute in 0..61 {
            ports.update(count(0, minute as u64), at(minute));
            times.extend(watched(&ports).last_error.map(|at| at.0));
        }
        assert_eq!(times.into_iter().collect::<Vec<_>>(), [at(1), at(31)]);
        assert_eq!(watched(&ports).errors, ["symbol_error"]);
    }

    #[test]
    fn observations_of_the_previous_agent_are_kept() {
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
