//! Decides which calls fail, and how. Pure: the same calls in the same order get the same faults.

use crate::Random;
use std::time::Duration;

/// Fault injected into a call.
#[derive(Debug, Clone, PartialEq)]
pub enum Fault {
    /// No fault.
    Pass,
    /// Kill the controller before the API server receives the call.
    KillBefore,
    /// Kill the controller after the call succeeded, before it receives the response.
    KillAfter,
    /// Execute the call, then break the connection before the response.
    DropReply,
    /// Do not execute the call; return this status, with `Retry-After` where the status has one.
    Answer(u16),
    /// Delay the call.
    Delay(Duration),
    /// Neither execute the call nor respond.
    Hang,
}

/// A call, as the API server receives it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// `GET`, `POST`, `PUT`, `PATCH` or `DELETE`.
    pub method: String,
    /// Path without the query.
    pub path: String,
    /// True for a watch.
    pub is_watch: bool,
    /// Number of a write, starting from 1; for a read, the number of writes before it.
    pub write: u64,
}

impl Call {
    /// Returns whether the call changes something. Leases are not counted.
    pub fn is_write(method: &str, path: &str) -> bool {
        method != "GET" && !path.contains("/leases")
    }
}

/// Rule that assigns faults to calls.
#[derive(Debug)]
pub enum Plan {
    /// No faults.
    Quiet,
    /// Inject a fault into the n-th write.
    AtWrite(u64, Fault),
    /// Drop the response of every n-th write.
    EveryNthReply(u64),
    /// Random faults from a seed.
    RandomFaults(RandomFaults),
}

/// A random share of calls fails. The seed determines the sequence.
#[derive(Debug)]
pub struct RandomFaults {
    /// Failing calls per thousand.
    pub per_mille: u64,
    random: Random,
}

impl RandomFaults {
    /// Creates the sequence for a seed.
    pub fn new(seed: u64, per_mille: u64) -> RandomFaults {
        RandomFaults { per_mille, random: Random::new(seed) }
    }
}

impl Plan {
    /// Returns the fault for this call.
    pub fn decide(&self, call: &Call) -> Fault {
        let is_write = Call::is_write(&call.method, &call.path);
        match self {
            Plan::Quiet => Fault::Pass,
            Plan::AtWrite(n, fault) if is_write && call.write == *n => fault.clone(),
            Plan::EveryNthReply(n) if is_write && call.write.is_multiple_of(*n) => Fault::DropReply,
            Plan::AtWrite(..) | Plan::EveryNthReply(_) => Fault::Pass,
            Plan::RandomFaults(faults) => {
                if call.is_watch || faults.random.next() % 1000 >= faults.per_mille {
                    return Fault::Pass;
                }
                match faults.random.next() % 6 {
                    0 => Fault::Answer(409),
                    1 => Fault::Answer(429),
                    2 => Fault::Answer(500),
                    3 => Fault::Answer(503),
                    4 if is_write => Fault::DropReply,
                    _ => Fault::Delay(Duration::from_millis(faults.random.next() % 300)),
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
    fn only_the_nth_write_gets_the_fault() {
        let plan = Plan::AtWrite(2, Fault::KillBefore);
        assert_eq!(plan.decide(&call("POST", 1)), Fault::Pass);
        assert_eq!(plan.decide(&call("GET", 2)), Fault::Pass);
        assert_eq!(plan.decide(&call("PATCH", 2)), Fault::KillBefore);
        assert!(!Call::is_write("PUT", "/apis/coordination.k8s.io/v1/namespaces/a/leases/b"));
    }

    #[test]
    fn the_same_seed_gives_the_same_faults() {
        let faults = |seed| -> Vec<Fault> {
            let plan = Plan::RandomFaults(RandomFaults::new(seed, 100));
            (0..2000).map(|n| plan.decide(&call("POST", n))).collect()
        };
        assert_eq!(faults(7), faults(7));
        assert_ne!(faults(7), faults(8));
        let injected = faults(7).into_iter().filter(|fault| *fault != Fault::Pass).count();
        assert!((120..300).contains(&injected), "{injected} of 2000");
    }
}
