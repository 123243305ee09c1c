//! What the ranks exchange, and in which steps.

use super::EngineConfig;
use serde::{Deserialize, Serialize};
use std::fmt;

/// What the ranks exchange, and in which steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum SyncPolicy {
    /// Gradients, in every step.
    #[default]
    EveryStep,
    /// Weights, every few steps; in between each rank trains on its own data.
    Local(LocalSteps),
}

/// Settings of [`SyncPolicy::Local`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LocalSteps {
    /// Optimizer steps between two averages, at least 1.
    pub every_steps: u64,
    /// How the average changes the weights.
    pub outer_optimizer: OuterOptimizer,
}

/// How the average of the ranks changes the weights.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum OuterOptimizer {
    /// The weights become the average.
    Average,
    /// The mean change is the gradient of a Nesterov step (DiLoCo, Douillard et al. 2023).
    Nesterov(Nesterov),
}

/// Settings of [`OuterOptimizer::Nesterov`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Nesterov {
    /// Above 0.
    pub learning_rate: f64,
    /// At least 0 and below 1.
    pub momentum: f64,
}

/// State that is divided among the ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Sharding {
    /// Nothing.
    #[default]
    None,
    /// The optimizer's state (ZeRO-1: Rajbhandari et al. 2020, arXiv:1910.02054).
    Optimizer,
    /// Gradients too (ZeRO-2). Without merged batches.
    Gradients,
}

impl Sharding {
    pub(super) fn is_default(&self) -> bool {
        *self == Sharding::default()
    }
}

/// How gradients are summed between hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Algorithm {
    /// Around a ring.
    Ring,
    /// Exchanges of everything, at doubling distances.
    RecursiveDoubling,
    /// Recursive halving, then doubling.
    HalvingDoubling,
    /// Two binary trees.
    Tree,
}

impl SyncPolicy {
    pub(super) fn is_default(&self) -> bool {
        *self == SyncPolicy::default()
    }

    /// Settings of local steps, if the policy has them.
    pub fn local(&self) -> Option<LocalSteps> {
        match *self {
            SyncPolicy::EveryStep => None,
            SyncPolicy::Local(local) => Some(local),
        }
    }

    /// Whether all ranks hold the same weights after this step of `total`, counted from 1.
    pub fn synchronises(&self, step: u64, total: u64) -> bool {
        self.local().is_none_or(|local| step == total || step.is_multiple_of(local.every_steps.max(1)))
    }

    /// Whether something due every `every` steps (0: never) is due after this step: at the first
    /// synchronising step from the multiple on.
    pub fn is_due(&self, every: u64, step: u64, total: u64) -> bool {
        let interval = self.local().map_or(1, |local| local.every_steps.max(1));
        let previous = step.saturating_sub(1) / interval * interval;
        every > 0 && self.synchronises(step, total) && step / every > previous / every
    }
}

/// Servers that hold and update the weights (Li et al. 2014, "Scaling Distributed Machine Learning
/// with the Parameter Server").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ParameterServers {
    /// At least 1.
    pub servers: u32,
    /// Where they run.
    #[serde(default, skip_serializing_if = "ServerPlacement::is_default")]
    pub placement: ServerPlacement,
    /// How they update the weights.
    #[serde(default)]
    pub updates: Updates,
}

/// Where parameter servers run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ServerPlacement {
    /// In the processes of the ranks.
    #[default]
    Ranks,
    /// Each in a process of its own.
    Dedicated,
}

impl ServerPlacement {
    fn is_default(&self) -> bool {
        *self == ServerPlacement::default()
    }
}

impl fmt::Display for ParameterServers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.updates {
            Updates::Synchronous => "synchronous",
            Updates::Asynchronous { .. } => "asynchronous",
            Updates::Geo { .. } => "geo",
        };
        let plural = if self.servers == 1 { "" } else { "s" };
        write!(f, "{} {kind} parameter server{plural}", self.servers)?;
        match self.updates {
            Updates::Synchronous => Ok(()),
            Updates::Asynchronous { max_staleness } => write!(f, ", staleness at most {max_staleness}"),
            Updates::Geo { every_steps, max_staleness } => {
                write!(f, ", every {every_steps} steps, staleness at most {max_staleness}")
            }
        }
    }
}

/// How parameter servers update the weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Updates {
    /// With the sum of the gradients of all ranks.
    #[default]
    Synchronous,
    /// With the gradients of each rank, as they arrive.
    #[serde(rename_all = "camelCase")]
    Asynchronous {
        /// Steps that a rank can be ahead of the slowest one.
        max_staleness: u32,
    },
    /// With the change of each rank's weights in several steps, as it arrives.
    #[serde(rename_all = "camelCase")]
    Geo {
        /// Steps between two exchanges of a rank, at least 1.
        every_steps: u64,
        /// Exchanges that a rank can be ahead of the slowest one.
        max_staleness: u32,
    },
}

impl Updates {
    /// Pushes that a rank can be ahead of the slowest one.
    pub fn max_staleness(self) -> u32 {
        match self {
            Updates::Synchronous => 0,
            Updates::Asynchronous { max_staleness } | Updates::Geo { max_staleness, .. } => max_staleness,
        }
    }

    /// Geo updates as local steps.
    pub fn geo(self) -> Option<LocalSteps> {
        match self {
            Updates::Geo { every_steps, .. } => {
                Some(LocalSteps { every_steps, outer_optimizer: OuterOptimizer::Average })
            }
            Updates::Synchronous | Updates::Asynchronous { .. } => None,
        }
    }
}

impl EngineConfig {
    /// Number of parameter servers in processes of their own.
    pub fn dedicated_servers(&self) -> u32 {
        self.parameter_server.map_or(0, ParameterServers::dedicated)
    }

    /// Whether parameter servers update the weights without waiting for all ranks.
    pub fn is_asynchronous(&self) -> bool {
        self.parameter_server.is_some_and(|servers| servers.updates != Updates::Synchronous)
    }

    /// The steps at which ranks exchange gradients or weights.
    pub fn exchange_policy(&self) -> SyncPolicy {
        let geo = self.parameter_server.and_then(|servers| servers.updates.geo());
        geo.map_or(self.sync, SyncPolicy::Local)
    }

    /// Whether ranks exchange gradients or weights after this step of `total`, counted from 1.
    pub fn exchanges(&self, step: u64, total: u64) -> bool {
        let policy = self.exchange_policy();
        policy.synchronises(step, total)
    }

    /// Whether all ranks hold the same weights after this step of `total`, counted from 1, because
    /// of the configuration: asynchronous ranks meet where something is due.
    pub fn synchronises(&self, step: u64, total: u64) -> bool {
        let policy = self.exchange_policy();
        let is_due = |every| policy.is_due(every, step, total);
        let saves = self.checkpoint.as_ref().is_some_and(|checkpoint| is_due(checkpoint.every_steps));
        let meets = step == total || saves || is_due(self.evaluation.every_steps);
        policy.synchronises(step, total) && (meets || !self.is_asynchronous())
    }
}

impl ParameterServers {
    /// Number of servers in processes of their own.
    pub fn dedicated(self) -> u32 {
        match self.placement {
            ServerPlacement::Ranks => 0,
            ServerPlacement::Dedicated => self.servers,
        }
    }

    /// Whether servers have the optimizer's state; otherwise each rank has its own.
    pub fn has_state(&self) -> bool {
        self.updates.geo().is_none()
    }

    /// The rank in whose process a server runs, or which passes weights and state to a dedicated
    /// one: servers are spread evenly over the ranks.
    pub fn host(&self, server: u32, world: u32) -> u32 {
        let world = world.max(1);
        if self.servers > world {
            return server % world;
        }
        let rank = u64::from(server) * u64::from(world) / u64::from(self.servers.max(1));
        u32::try_from(rank).unwrap_or(0).min(world - 1)
    }
}

/// Which gradients are sent.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Compression {
    /// The largest ones; each rank adds the others to its next gradients (error feedback).
    TopK(TopK),
}

/// Settings of [`Compression::TopK`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TopK {
    /// Fraction of the gradients that a rank sends, above 0 to 1.
    pub ratio: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn local(every_steps: u64) -> SyncPolicy {
        SyncPolicy::Local(LocalSteps { every_steps, outer_optimizer: OuterOptimizer::Average })
    }

    fn steps(total: u64, is: impl Fn(u64) -> bool) -> Vec<u64> {
        (1..=total).filter(|step| is(*step)).collect()
    }

    #[test]
    fn servers_are_one_phrase() {
        let placement = ServerPlacement::Ranks;
        let text = |servers, updates| ParameterServers { servers, placement, updates }.to_string();
        assert_eq!(text(1, Updates::Synchronous), "1 synchronous parameter server");
        let asynchronous = Updates::Asynchronous { max_staleness: 4 };
        assert_eq!(text(2, asynchronous), "2 asynchronous parameter servers, staleness at most 4");
        let geo = Updates::Geo { every_steps: 16, max_staleness: 1 };
        assert_eq!(text(2, geo), "2 geo parameter servers, every 16 steps, staleness at most 1");
    }

    #[test]
    fn servers_are_spread_over_the_ranks() {
        let (placement, updates) = (ServerPlacement::Ranks, Updates::default());
        let hosts = |servers, world| -> Vec<u32> {
            (0..servers).map(|server| ParameterServers { servers, placement, updates }.host(server, world)).collect()
        };
        assert_eq!(hosts(2, 8), [0, 4]);
        assert_eq!(hosts(3, 4), [0, 1, 2]);
        assert_eq!(hosts(4, 4), [0, 1, 2, 3]);
        assert_eq!(hosts(3, 2), [0, 1, 0]);
        assert_eq!(hosts(2, 1), [0, 0]);
    }

    #[test]
    fn local_steps_end_at_multiples_and_with_the_run() {
        assert_eq!(steps(11, |step| local(4).synchronises(step, 11)), [4, 8, 11]);
        assert_eq!(steps(3, |step| local(1).synchronises(step, 3)), [1, 2, 3]);
        assert_eq!(steps(3, |step| SyncPolicy::EveryStep.synchronises(step, 3)), [1, 2, 3]);
    }

    #[test]
    fn what_is_due_waits_for_the_next_average() {
        let due = |policy: SyncPolicy, every| steps(14, |step| policy.is_due(every, step, 14));
        assert_eq!(due(SyncPolicy::EveryStep, 5), [5, 10]);
        assert_eq!(due(local(4), 5), [8, 12]);
        assert_eq!(due(local(4), 4), [4, 8, 12]);
        assert_eq!(due(local(4), 7), [8, 14]);
        assert_eq!(due(local(4), 3), [4, 8, 12], "once per average");
        assert_eq!(due(local(4), 13), [14], "the last average");
        assert!(due(local(4), 0).is_empty() && due(SyncPolicy::EveryStep, 0).is_empty());
    }
}
