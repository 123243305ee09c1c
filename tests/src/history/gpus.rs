//! Safety properties of GPU assignments.

use super::oracle::Violation;
use super::replay::{BEFORE_OF_NODES, Decision, decisions, promised};
use super::{Fact, History, NodeFact, PodFact, World};
use crate::placement::bandwidth;
use std::collections::{BTreeMap, BTreeSet};
use switchyard_core::devices::Devices;
use switchyard_core::placement::gpus::{Level, MinLink, UNLIMITED};
use switchyard_crds::PlacedNode;
use switchyard_crds::conditions::PLACED;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_plan::cluster::ownership;
use switchyard_plan::cluster::view::Phase;
use switchyard_plan::resources::bytes_per_second;
use switchyard_topology::report;

/// Live pods with a placement, and the placement.
fn planned_nodes<'a>(world: &World<'a>) -> impl Iterator<Item = (&'a PodFact, &'a PlacedNode)> {
    let alive = world.pods.values().copied().filter(|pod| !pod.view.is_over());
    alive.filter_map(|pod| Some((pod, promised(world, pod)?)))
}

/// No GPU is planned for two pods, or for one pod while another holds it, from the write of a
/// placement until the pods have ended.
///
/// A pod whose gang was rolled back can still get its claim before it is deleted, so its claim
/// counts only while the pod runs. The scheduler resolves claims that other users make after the
/// plan.
pub fn double_gpus(history: &History) -> Vec<Violation> {
    let mut found = Vec::new();
    history.walk(|before, world, change| {
        let (Some(Fact::Job(before)), Fact::Job(job)) = (before, &change.fact) else { return };
        if before.is(PLACED) || !job.is(PLACED) {
            return;
        }
        let mut holders: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (pod, placed) in planned_nodes(world) {
            for gpu in &placed.gpus {
                holders.entry(gpu).or_default().insert(&pod.view.name);
            }
        }
        for (name, claim) in world.claims.values() {
            let name = name.rsplit('/').next().unwrap_or_default();
            let pod = world.pods.values().find(|pod| pod.view.name == name && pod.job == claim.job);
            let is_stale = pod.is_none_or(|pod| pod.view.phase != Phase::Running || pod.view.deleting)
                || claim.job == change.uid
                    && ownership::position(name).is_some_and(|(attempt, _)| attempt < job.attempt());
            if !is_stale || claim.job.is_empty() {
                for gpu in world.gpus_of(claim) {
                    holders.entry(gpu).or_default().insert(name);
                }
            }
        }
        let own = job.status.placement.iter().flat_map(|placement| &placement.nodes).flat_map(|node| &node.gpus);
        for gpu in own {
            // No holder if the pod has ended and the controller had not seen it yet.
            let pods = holders.get(gpu.as_str()).cloned().unwrap_or_default();
            if pods.len() > 1 {
                found.push(Violation::at(change, format!("{gpu} is assigned to several pods: {pods:?}")));
            }
        }
    });
    found
}

/// Seconds that the controller may take to roll back an expired gang, on a loaded machine.
const SLACK_SECONDS: i64 = 15;

/// No gang stays partially bound for longer than its `scheduleTimeoutSeconds`. Time comes from the
/// condition timestamps in the history.
pub fn partly_bound_gangs(history: &History) -> Vec<Violation> {
    let mut found = Vec::new();
    let mut now = None;
    let mut reported = BTreeSet::new();
    history.walk(|_, world, change| {
        if let Fact::Job(job) = &change.fact {
            now = now.max(job.status.conditions.iter().map(|condition| condition.last_transition_time.0).max());
        }
        let Some(now) = now else { return };
        for (uid, (name, job)) in world.jobs.iter().filter(|(_, (_, job))| job.is(PLACED)) {
            let since = job.status.conditions.iter().find(|condition| condition.type_ == PLACED);
            let Some((since, whole)) = since.zip(job.whole.as_ref()) else { continue };
            let max = i64::from(whole.spec.gang_policy.schedule_timeout_seconds) + SLACK_SECONDS;
            let age = now.duration_since(since.last_transition_time.0).as_secs();
            let current = || world.pods_of(uid).filter(|pod| pod.view.attempt == job.attempt() && !pod.view.deleting);
            let bound = current().filter(|pod| pod.view.node.is_some()).count();
            let is_over = job.is("Complete") || job.is("Failed") || job.deleting || whole.spec.suspend;
            if age > max && bound > 0 && bound < current().count() && !is_over && reported.insert((*uid, job.attempt()))
            {
                let text = format!("{bound} of {} pods bound {age} s after the placement", job.nodes);
                found.push(Violation { revision: change.revision, name: (*name).into(), text });
            }
        }
    });
    found
}

/// Every placement has the bandwidth that its status predicts, checked by brute force against the
/// reports and labels that the controller may have seen. Also returns how many placements could be
/// checked: a ring over many GPUs without switches has too many orders.
pub fn mispredicted(history: &History, levels: &[(&str, Level)]) -> (usize, Vec<Violation>) {
    let (mut judged, mut found) = (0, Vec::new());
    let mut known = BandwidthCache::default();
    decisions(history, BEFORE_OF_NODES, |decision| {
        let Decision { change, after, worlds, .. } = decision;
        let Some(placed) = &after.status.placement else { return };
        // An unparsable rate counts as wrong.
        let megabytes = |rate| bytes_per_second(rate).map_or(0, |rate| (rate / 1e6) as i64);
        let reported = placed.predicted_bus_bandwidth.as_ref().map(megabytes);
        let mut values: Vec<Option<u32>> = Vec::new();
        let mut last = Vec::new();
        for world in worlds {
            // Skip unchanged facts, because most changes concern pods and claims.
            let facts = facts_of(world, &placed.nodes);
            if std::mem::replace(&mut last, facts.clone()) == facts {
                continue;
            }
            let value = known.gang_bandwidth(world, &placed.nodes, levels);
            if values.last() != Some(&value) {
                values.push(value);
            }
        }
        // Unlimited bandwidth is not reported.
        let values: Vec<Option<i64>> =
            values.into_iter().flatten().map(|value| (value != UNLIMITED).then_some(i64::from(value))).collect();
        judged += usize::from(!values.is_empty());
        if !values.is_empty() && !values.contains(&reported) {
            found.push(Violation::at(
                change,
                format!("got {reported:?} MB/s; expected one of {values:?}: {}", placed.reason),
            ));
        }
    });
    (judged, found)
}

/// Identifies a world's facts about these nodes, by address.
fn facts_of(world: &World<'_>, places: &[PlacedNode]) -> Vec<(Option<*const NodeFact>, Option<*const GPUTopology>)> {
    let facts = |placed: &PlacedNode| {
        let name = placed.node_name.as_str();
        (world.nodes.get(name).map(|fact| &raw const **fact), world.reports.get(name).map(|report| &raw const **report))
    };
    places.iter().map(facts).collect()
}

/// Maximum GPUs in a ring without switches: 60 orders.
const MAX_ORDERED: usize = 6;

/// Machine type, indices of its GPUs, and the gang's topology level: share and NVLink.
type SetKey = (Devices, Vec<usize>, Option<(u32, bool)>);

/// Cache of computed bandwidths.
#[derive(Default)]
struct BandwidthCache(BTreeMap<SetKey, u32>);

impl BandwidthCache {
    /// Returns a gang's bandwidth, or `None` if it cannot be checked.
    fn gang_bandwidth(&mut self, world: &World<'_>, places: &[PlacedNode], levels: &[(&str, Level)]) -> Option<u32> {
        let labels: Vec<_> = places
            .iter()
            .map(|placed| Some(&world.nodes.get(placed.node_name.as_str())?.facts.labels))
            .collect::<Option<_>>()?;
        let is_one =
            |key: &str| labels[0].get(key).is_some_and(|first| labels.iter().all(|all| all.get(key) == Some(first)));
        let cluster = levels.last()?.1;
        let level = levels.iter().find(|(key, _)| is_one(key)).map_or(cluster, |(_, level)| *level);
        let level = (places.len() > 1).then_some(level);
        let mut min = u32::MAX;
        for placed in places {
            let status = world.reports.get(placed.node_name.as_str())?.status.as_ref()?;
            let devices = report::devices(status).ok()?.devices;
            let position = |uuid: &String| status.gpus.iter().position(|gpu| gpu.uuid == *uuid);
            let mut set = placed.gpus.iter().map(position).collect::<Option<Vec<usize>>>()?;
            set.sort_unstable();
            if set.is_empty() || set.len() > MAX_ORDERED && set.iter().any(|gpu| devices.gpus[*gpu].switch_links == 0) {
                return None;
            }
            let key = (devices, set, level.map(|level| (level.share, level.nvlink)));
            let value = match self.0.get(&key) {
                Some(value) => *value,
                None => {
                    let value = bandwidth(&key.0, &key.1, level, MinLink::System)?;
                    self.0.insert(key, value);
                    value
                }
            };
            min = min.min(value);
        }
        Some(min)
    }
}
