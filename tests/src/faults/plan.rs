//! What happens to which call. Pure: the same calls in the same order meet the same faults.

use crate::Random;
use std::time::Duration;

/// What happens to a call.
#[derive(Debug, Clone, PartialEq)]
pub enum Fault {
    /// Nothing.
    Pass,
    /// The controller is killed before the API server hears of it.
    KillBefore,
    /// The controller is killed after it was done, before it hears of it.
    KillAfter,
    /// It is done, and the connection breaks before the answer.
    DropReply,
    /// It is not done; this status is answered, with a time to wait where the status has one.
    Answer(u16),
    /// It is done late.
    Delay(Duration),
    /// It is never answered, and not done.
    Hang,
}

/// A call, as the API server sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// `GET`, `POST`, `PUT`, `PATCH` or `DELETE`.
    pub method: String,
    /// Path without query.
    pub path: String,
    /// A watch.
    pub is_watch: bool,
    /// Position among the writes, from 1; of a read, the number of writes before it.
    pub write: u64,
}

impl Call {
    /// Changes something. Leases are not part of the work.
    pub fn is_write(method: &str, path: &str) -> bool {
        method != "GET" && !path.contains("/leases")
    }
}

/// How calls are treated.
#[derive(Debug)]
pub enum Plan {
    /// All pass.
    Quiet,
    /// The n-th write meets a fault.
    AtWrite(u64, Fault),
    /// Every n-th write loses its answer.
    EveryReplyOf(u64),
    /// Weather, from a seed.
    Weather(Weather),
}

/// A share of calls fails, in a sequence that the seed decides.
#[derive(Debug)]
pub struct Weather {
    /// Calls in a thousand that fail.
    pub per_mille: u64,
    random: Random,
}

impl Weather {
    /// From a seed.
    pub fn new(seed: u64, per_mille: u64) -> Weather {
        Weather { per_mille, random: Random::new(seed) }
    }
}

impl Plan {
    /// What happens to this call.
    pub fn decide(&self, call: &Call) -> Fault {
        let is_write = Call::is_write(&call.method, &call.path);
        match self {
            Plan::Quiet => Fault::Pass,
            Plan::AtWrite(n, fault) if is_write && call.write == *n => fault.clone(),
            Plan::EveryReplyOf(n) if is_write && call.write.is_multiple_of(*n) => Fault::DropReply,
            Plan::AtWrite(..) | Plan::EveryReplyOf(_) => Fault::Pass,
            Plan::Weather(weather) => {
                if call.is_watch || weather.random.next() % 1000 >= weather.per_mille {
                    return Fault::Pass;
                }
                match weather.random.next() % 6 {
                    0 => Fault::Answer(409),
                    1 => Fault::Answer(429),
                    2 => Fault::Answer(500),
                    3 => Fault::Answer(503),
                    4 if is_write => Fault::DropReply,
                    _ => Fault::Delay(Duration::from_millis(weather.random.next() % 300)),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(method: &str, write: u64) -> Call {
        Call { method: method.into(), path: "/api/v1/namespaces/a/pods".into(), is_watch: false, write }
    }

    #[test]
    fn the_nth_write_and_no_other_meets_the_fault() {
        let plan = Plan::AtWrite(2, Fault::KillBefore);
        assert_eq!(plan.decide(&call("POST", 1)), Fault::Pass);
        assert_eq!(plan.decide(&call("GET", 2)), Fault::Pass);
        assert_eq!(plan.decide(&call("PATCH", 2)), Fault::KillBefore);
        assert!(!Call::is_write("PUT", "/apis/coordination.k8s.io/v1/namespaces/a/leases/b"));
    }

    #[test]
    fn the_same_seed_is_the_same_weather() {
        let faults = |seed| -> Vec<Fault> {
            let plan = Plan::Weather(Weather::new(seed, 100));
            (0..2000).map(|n| plan.decide(&call("POST", n))).collect()
        };
        assert_eq!(faults(7), faults(7));
        assert_ne!(faults(7), faults(8));
        let bad = faults(7).into_iter().filter(|fault| *fault != Fault::Pass).count();
        assert!((120..300).contains(&bad), "{bad} of 2000");
    }
}
