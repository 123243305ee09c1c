//! Decayed GPU usage per namespace, relative to its weight. At equal priority, jobs of the
//! namespace with the lowest usage go first.
//!
//! `share = Σ GPUs · ∫ 2^(-age / half-life) dt ÷ weight` over the jobs of the namespace, in GPU
//! hours: usage counts half after one half-life, and a quarter after two. It covers TrainJobs that
//! are running, that ended and still exist, or that ended since this controller became the leader.

use jiff::{SignedDuration, Timestamp};
use std::collections::BTreeMap;
use switchyard_crds::TrainJob;
use switchyard_plan::job::total_gpus;

/// The weights of namespaces, and how fast past usage decays.
#[derive(Debug, Clone, PartialEq)]
pub struct Weights {
    /// By namespace; 1 if absent.
    pub by_namespace: BTreeMap<String, u32>,
    /// A week, as in Slurm (`PriorityDecayHalfLife`): long enough that a team which used the
    /// cluster all weekend waits on Monday, and short enough that last month does not matter.
    pub half_life: SignedDuration,
}

impl Weights {
    /// Uses a half-life of one week.
    pub fn new(by_namespace: BTreeMap<String, u32>) -> Weights {
        Weights { by_namespace, half_life: SignedDuration::from_hours(7 * 24) }
    }
}

/// GPU usage of the namespaces.
#[derive(Debug)]
pub struct Fairness {
    weights: Weights,
    /// Usage of ended jobs: decayed GPU hours, and the time at which they were computed.
    ended: BTreeMap<String, (f64, Timestamp)>,
    /// Last computed shares in whole GPU hours, because smaller differences should not reorder the
    /// queue.
    shares: BTreeMap<String, u64>,
}

impl Fairness {
    /// No usage recorded.
    pub fn new(weights: Weights) -> Fairness {
        Fairness { weights, ended: BTreeMap::new(), shares: BTreeMap::new() }
    }

    /// Share of a namespace as last computed: GPU hours ÷ weight.
    pub(crate) fn share(&self, namespace: &str) -> u64 {
        self.shares.get(namespace).copied().unwrap_or(0)
    }

    /// Adds the usage of a job that has ended.
    pub(crate) fn learn(&mut self, job: &TrainJob) {
        let Some(status) = &job.status else { return };
        let (Some(from), Some(to)) = (&status.placed_time, &status.completion_time) else { return };
        let (before, at) = self.ended.get(namespace(job)).copied().unwrap_or((0.0, to.0));
        // The watch may report jobs in any order.
        let now = at.max(to.0);
        let hours = before * self.decay(at, now) + self.hours(job, from.0, to.0, now);
        self.ended.insert(namespace(job).into(), (hours, now));
    }

    /// The factor by which usage decays between two times.
    fn decay(&self, from: Timestamp, to: Timestamp) -> f64 {
        (-to.duration_since(from).div_duration_f64(self.weights.half_life)).exp2()
    }

    /// Decayed GPU hours at `now` of a job that ran from `from` to `to`.
    fn hours(&self, job: &TrainJob, from: Timestamp, to: Timestamp, now: Timestamp) -> f64 {
        let half_life = self.weights.half_life.as_secs_f64() / 3600.0;
        let hours = half_life / std::f64::consts::LN_2 * (self.decay(to, now) - self.decay(from.min(to), now));
        hours * total_gpus(job) as f64
    }

    /// Recomputes all shares as of `now`.
    pub(crate) fn recompute<'a>(&mut self, running: impl Iterator<Item = &'a TrainJob>, now: Timestamp) {
        let ended = self.ended.iter().map(|(namespace, (hours, at))| (namespace.clone(), hours * self.decay(*at, now)));
        let mut usage: BTreeMap<String, f64> = ended.collect();
        for job in running {
            let Some(from) = job.status.as_ref().and_then(|status| status.placed_time.as_ref()) else { continue };
            *usage.entry(namespace(job).into()).or_default() += self.hours(job, from.0, now, now);
        }
        let weight = |namespace: &str| f64::from(self.weights.by_namespace.get(namespace).copied().unwrap_or(1).max(1));
        let shares = usage.into_iter().map(|(namespace, hours)| {
            let share = (hours / weight(&namespace)).max(0.0) as u64;
            (namespace, share)
        });
        self.shares = shares.collect();
    }
}

fn namespace(job: &TrainJob) -> &str {
    job.metadata.namespace.as_deref().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    fn at(hours: i64) -> Timestamp {
        Timestamp::UNIX_EPOCH + SignedDuration::from_hours(hours)
    }

    /// A job with 16 GPUs.
    fn job(namespace: &str, from: i64, to: Option<i64>) -> TrainJob {
        let limits = json!({"nvidia.com/gpu": 8});
        let trainer =
            json!({"framework": "Plain", "image": "i", "numNodes": 2, "resourcesPerNode": {"limits": limits}});
        serde_json::from_value(json!({
            "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "j", "namespace": namespace},
            "spec": {"trainer": trainer}, "status": {"placedTime": at(from), "completionTime": to.map(at)},
        }))
        .unwrap()
    }

    fn fairness(weights: &[(&str, u32)]) -> Fairness {
        let by_namespace = weights.iter().map(|(namespace, weight)| (namespace.to_string(), *weight)).collect();
        Fairness::new(Weights { by_namespace, half_life: SignedDuration::from_hours(100) })
    }

    #[test]
    fn usage_halves_after_a_half_life_and_is_divided_by_the_weight() {
        let mut fairness = fairness(&[("b", 4)]);
        fairness.learn(&job("a", 0, Some(1)));
        fairness.learn(&job("b", 0, Some(1)));
        fairness.recompute(std::iter::empty(), at(1));
        assert_eq!((fairness.share("a"), fairness.share("b"), fairness.share("c")), (15, 3, 0));
        fairness.recompute(std::iter::empty(), at(101));
        assert_eq!((fairness.share("a"), fairness.share("b")), (7, 1));
    }

    /// 1 GPU of the launcher and 8 of each worker.
    #[test]
    fn the_gpus_of_every_role_count() {
        let role = |name: &str, replicas: u32, gpus: u32| json!({"name": name, "replicas": replicas, "resourcesPerNode": {"limits": {"nvidia.com/gpu": gpus}}});
        let mut with_roles = job("a", 0, Some(1));
        with_roles.spec.trainer.resources_per_node = None;
        with_roles.spec.roles = serde_json::from_value(json!([role("launcher", 1, 1), role("worker", 2, 8)])).unwrap();
        let mut fairness = fairness(&[]);
        fairness.learn(&with_roles);
        fairness.recompute(std::iter::empty(), at(1));
        assert_eq!(fairness.share("a"), 16, "17 GPU hours, decayed for half an hour");
    }

    #[test]
    fn running_jobs_count_until_now_in_any_order_of_events() {
        let mut one = fairness(&[]);
        one.learn(&job("a", 0, Some(10)));
        one.learn(&job("a", 20, Some(30)));
        let mut other = fairness(&[]);
        other.learn(&job("a", 20, Some(30)));
        other.learn(&job("a", 0, Some(10)));
        let running = job("a", 30, None);
        for fairness in [&mut one, &mut other] {
            fairness.recompute([&running].into_iter(), at(40));
        }
        assert_eq!(one.share("a"), other.share("a"));
        // 160 GPU hours each, whose mean ages are 5, 15 and 35 hours.
        assert!((400..=445).contains(&one.share("a")), "{}", one.share("a"));
    }
}
