//! Input of the advice rules: figures of the run, computed from its record or given by a test.

use super::kernels::KernelFacts;
use super::record::Record;
use super::sample::{Part, Parts};
use super::skew::Skew;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde::{Deserialize, Serialize};
use switchyard_core::quantity::parse_quantity;
use switchyard_worker_contract::CpuList;
use switchyard_worker_contract::config::{Device, EngineConfig, Transport};
use switchyard_worker_contract::event::{GpuReport, Inspection, MemoryUse, Ready};
use switchyard_worker_contract::layers::LayerTimes;
use switchyard_worker_contract::nccl;

/// Seconds of monitoring after which NVML's samples of a GPU, one a second, have a meaningful mean.
const SAMPLED: f64 = 10.0;

/// Figures of a run; unknown figures are absent. Times are means per optimizer step after the
/// warm-up, ms.
#[derive(Debug, Clone, Default)]
pub struct Facts {
    /// The configuration of every rank.
    pub engine: Option<EngineConfig>,
    /// The worker's inspection before the start.
    pub inspection: Option<Inspection>,
    /// The ranks with known steps, in rank order.
    pub ranks: Vec<RankFacts>,
    /// Position in `ranks` of the critical rank: the one with the most work, which determines the
    /// step time.
    pub critical: usize,
    /// Ranks of the job.
    pub world: u32,
    /// Parts of the critical rank's step.
    pub step: Parts,
    /// Median and 99th percentile of a step's wall time.
    pub quantiles: Option<(f64, f64)>,
    /// The same without checkpoints and without time between steps.
    pub work_quantiles: Option<(f64, f64)>,
    /// Median time between two steps.
    pub between_median: Option<f64>,
    /// Mean of the first steps of each attempt.
    pub warm_ms: Option<f64>,
    /// All-reduce of the critical rank.
    pub reduce: Option<Reduce>,
    /// Bytes per all-reduce, in the order in which backward starts them.
    pub bucket_bytes: Vec<u64>,
    /// Time of one all-reduce of all gradients with nothing else running, measured before the first
    /// step.
    pub reduce_alone_ms: Option<f64>,
    /// The transport of gradients.
    pub transport: Option<Transport>,
    /// NCCL channels of the ranks, by path.
    pub channels: Option<String>,
    /// Algorithms between hosts and how many all-reduces use each.
    pub algorithms: Option<String>,
    /// The reader's work for one step, summed over its threads.
    pub read_ms: Option<f64>,
    /// Threads of a rank's reader.
    pub reader_threads: Option<u32>,
    /// Step time of the same job with synthetic data.
    pub synthetic_step_ms: Option<f64>,
    /// Memory of the ranks on one node.
    pub memory: Option<MemoryFacts>,
    /// Steps after the warm-up, and how many of them were skipped because gradients overflowed.
    pub skipped: Option<(u64, u64)>,
    /// The largest loss scale, and the last one.
    pub loss_scale: Option<(f64, f64)>,
    /// The first step with a NaN loss.
    pub lost_at: Option<u64>,
    /// Name of the kernels in use.
    pub kernel: Option<String>,
    /// Whether the ranks compute on a GPU.
    pub on_gpu: Option<bool>,
    /// A rank's layers, preferably the critical one's.
    pub layers: Option<(u32, LayerTimes)>,
    /// GPU kernels of a rank, preferably the critical one.
    pub kernels: Option<KernelFacts>,
    /// The job's CPU limit on each node.
    pub cpu_limit: Option<f64>,
    /// Cores per logical CPU of the machine: 0.5 with two threads per core.
    pub cores_per_cpu: Option<f64>,
    /// Predicted bus bandwidth of the placement and of the best placement, bytes per second.
    pub bus_bandwidth: Option<(f64, f64)>,
    /// GPU reports of the ranks that were monitored.
    pub gpus: Vec<GpuReport>,
}

#[derive(Debug, Clone, Default)]
pub struct RankFacts {
    /// Global rank.
    pub rank: u32,
    /// Name of its node or host.
    pub node: Option<String>,
    /// CPUs it can run on.
    pub cpus: Option<CpuList>,
    pub threads: Option<u32>,
    /// Parts of its step.
    pub step: Parts,
    /// Share of the windows in which its compute time exceeds the median of the ranks by more than
    /// 5 %.
    pub slow_share: f64,
    /// Mean excess of its compute time over the median of the ranks, ms.
    pub over_median_ms: f64,
}

/// All-reduce of one step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Reduce {
    /// Time during which one was running, ms.
    pub busy_ms: f64,
    /// Bytes of gradients.
    pub bytes: f64,
    /// Bytes not reduced yet when backward ended; absent if not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_bytes: Option<f64>,
}

/// Memory of the ranks on one node.
#[derive(Debug, Clone)]
pub struct MemoryFacts {
    pub rank: MemoryUse,
    /// Ranks on the node.
    pub ranks: u32,
    /// Name of the limit.
    pub bound: &'static str,
    /// The limit, bytes.
    pub capacity: u64,
}

impl MemoryFacts {
    /// Used share of the limit.
    pub fn share(&self) -> f64 {
        self.rank.total() as f64 * f64::from(self.ranks) / self.capacity.max(1) as f64
    }
}

impl Facts {
    /// Percentage of the run in which the GPUs ran no kernel, as sampled by NVML: the mean of the
    /// GPUs that were sampled often enough. `None` if there is none.
    pub fn gpu_idle_percent(&self) -> Option<f64> {
        let sampled = self.gpus.iter().filter(|gpu| gpu.seconds >= SAMPLED);
        let idle: Vec<f64> = sampled.filter_map(|gpu| Some((100.0 - gpu.busy_percent()?).max(0.0))).collect();
        (!idle.is_empty()).then(|| idle.iter().sum::<f64>() / idle.len() as f64)
    }

    /// Computes the facts of a record; `None` if it has no step.
    pub(super) fn of(record: &Record, skew: &Skew) -> Option<Facts> {
        let folds = record.ranks();
        let typical = folds.iter().filter_map(|(rank, fold)| Some((*rank, fold.typical().mean()?)));
        let ranks: Vec<RankFacts> = typical.map(|(rank, step)| RankFacts::of(rank, step, record, skew)).collect();
        let own = |rank: &RankFacts| rank.step.total() - rank.step.exposed() - rank.step[Part::Pipeline];
        let critical = (0..ranks.len()).max_by(|a, b| own(&ranks[*a]).total_cmp(&own(&ranks[*b])))?;
        let sums = folds.get(&ranks[critical].rank)?.typical();
        let lead = folds.values().find(|fold| fold.curves.is_some());
        let curves = lead.and_then(|fold| fold.curves.as_ref());
        let per = |sum: f64, steps: u64| (steps > 0).then(|| sum / steps as f64);
        let pair = |first: Option<f64>, second: Option<f64>| first.zip(second);
        let reported = record.has_steps();
        let quantiles = lead.and_then(|fold| pair(fold.times.quantile(0.5), fold.times.quantile(0.99)));
        let finished = record.events.finished.as_ref().map(|finished| (finished.step_ms_p50, finished.step_ms_p99));
        let ready = || record.events.ready.values();
        let devices = record.documents.plan.iter().flat_map(|plan| &plan.nodes).flat_map(|node| &node.processes);
        let mut devices = devices.flat_map(|process| &process.devices).peekable();
        let cpus = record.documents.machine.as_ref().map(|machine| &machine.cpus);
        Some(Facts {
            engine: record.documents.engine.clone(),
            inspection: record.documents.inspection.clone(),
            critical,
            world: record.world(),
            step: ranks[critical].step,
            // Medians of interval means would hide single slow steps.
            quantiles: if reported { quantiles } else { finished },
            work_quantiles: lead
                .filter(|_| reported)
                .and_then(|fold| pair(fold.work.quantile(0.5), fold.work.quantile(0.99))),
            between_median: lead.filter(|_| reported).and_then(|fold| fold.between.quantile(0.5)),
            warm_ms: lead
                .filter(|fold| fold.steady.steps > 0)
                .and_then(|fold| fold.warm.mean())
                .map(|mean| mean.total()),
            reduce: per(sums.reduce_ms, sums.reduced_steps)
                .zip(per(sums.reduce_bytes, sums.reduced_steps))
                .map(|(busy_ms, bytes)| Reduce { busy_ms, bytes, left_bytes: per(sums.left_bytes, sums.left_steps) }),
            bucket_bytes: ready()
                .map(|ready| ready.bucket_bytes.clone())
                .find(|bytes| !bytes.is_empty())
                .unwrap_or_default(),
            reduce_alone_ms: ready().map(|ready| ready.all_reduce_ms).filter(|ms| *ms > 0.0).reduce(f64::max),
            transport: ready().map(|ready| ready.transport).next(),
            channels: nccl::summary(ready().flat_map(|ready| &ready.links)),
            algorithms: ready().find_map(Ready::algorithm_counts),
            read_ms: per(sums.read_ms, sums.read_steps),
            synthetic_step_ms: record.synthetic_step_ms,
            memory: memory(record),
            skipped: curves.filter(|_| reported).map(|curves| (curves.judged_steps, curves.skipped_steps)),
            loss_scale: curves.and_then(|curves| pair(curves.largest_loss_scale, curves.last_loss_scale)),
            lost_at: curves.and_then(|curves| curves.lost_at),
            kernel: ready().map(|ready| ready.kernel.clone()).next(),
            on_gpu: match &record.documents.engine {
                Some(engine) if engine.device == Device::Cuda => Some(true),
                _ => devices.peek().is_some().then(|| devices.any(|device| device != "cpu")),
            },
            layers: record.layers(ranks[critical].rank),
            kernels: record.kernels(ranks[critical].rank),
            cpu_limit: record.documents.cpu_limit,
            cores_per_cpu: cpus.and_then(|cpus| {
                Some(f64::from(cpus.cores?) / f64::from(cpus.threads.filter(|threads| *threads > 0)?))
            }),
            bus_bandwidth: record.documents.job.as_ref().and_then(|job| job.placement.as_ref()).and_then(|placement| {
                let rate = |rate: &Option<Quantity>| {
                    rate.as_ref().and_then(|rate| parse_quantity(&rate.0)).filter(|rate| *rate > 0.0)
                };
                pair(rate(&placement.predicted_bus_bandwidth), rate(&placement.best_possible))
            }),
            gpus: record.events.gpus.values().cloned().collect(),
            reader_threads: record.events.reader_threads,
            ranks,
        })
    }

    /// Wall time of a step, ms.
    pub fn step_ms(&self) -> f64 {
        self.step.total()
    }

    /// Ranks that reduce the same gradients: all, or one stage.
    pub fn reducing_ranks(&self) -> u32 {
        self.engine.as_ref().map_or(self.world, |engine| engine.replicas(self.world))
    }

    /// Share of the step, percent.
    pub fn percent(&self, milliseconds: f64) -> f64 {
        if self.step_ms() > 0.0 { 100.0 * milliseconds / self.step_ms() } else { 0.0 }
    }

    /// Minimum time of one all-reduce of all gradients, ms: the one measured alone, otherwise the
    /// time during which one was running.
    pub fn reachable_reduce_ms(&self) -> Option<f64> {
        let busy = self.reduce.map(|reduce| reduce.busy_ms);
        match (self.reduce_alone_ms, busy) {
            (Some(alone), Some(busy)) => Some(alone.min(busy)),
            (alone, busy) => alone.or(busy),
        }
    }
}

impl RankFacts {
    fn of(rank: u32, step: Parts, record: &Record, skew: &Skew) -> RankFacts {
        let ready = record.events.ready.get(&rank);
        let planned = record.planned(rank);
        let cpus = ready.map(|ready| ready.cpus.as_str()).or_else(|| planned?.1.cpus.as_deref());
        let node = planned.map(|(node, _)| node.node_name.clone()).filter(|name| !name.is_empty());
        let (slow_share, over_median_ms) = skew.of(rank).unwrap_or_default();
        RankFacts {
            rank,
            node: node.or_else(|| ready.map(|ready| ready.host.clone())),
            cpus: cpus.and_then(|cpus| cpus.parse().ok()).filter(|cpus: &CpuList| !cpus.is_empty()),
            threads: ready.map(|ready| ready.threads).or_else(|| planned?.1.threads),
            step,
            slow_share,
            over_median_ms,
        }
    }
}

fn memory(record: &Record) -> Option<MemoryFacts> {
    let rank = record.documents.inspection.as_ref()?.memory;
    let plan = record.documents.plan.as_ref()?;
    let ranks = plan.nodes.iter().map(|node| node.processes.len() as u32).max().filter(|ranks| *ranks > 0)?;
    let of_machine = record.documents.machine.as_ref().and_then(|machine| machine.memory_bytes);
    let limits =
        [("resourcesPerNode.limits.memory", plan.memory_limit_bytes), ("the memory of the machine", of_machine)];
    let known = limits.into_iter().filter_map(|(bound, bytes)| Some((bound, bytes.filter(|bytes| *bytes > 0)?)));
    let (bound, capacity) = known.min_by_key(|(_, bytes)| *bytes)?;
    Some(MemoryFacts { rank, ranks, bound, capacity })
}
