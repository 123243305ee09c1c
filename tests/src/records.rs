//! Synthetic run directories: a healthy run, and runs with one problem each. A seed
//! determines them.

use crate::Random;
use serde_json::{Value, json};
use std::fmt::Write;
use std::fs;
use std::path::Path;
use switchyard_worker_contract::record::{self, StepRecord};

/// Problem of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Anomaly {
    /// A healthy run.
    None,
    /// The reader has too few threads.
    Input,
    /// The all-reduce runs over a slow network, in a single bucket.
    Communication,
    /// The last rank is slow.
    Straggler,
    /// FP16 gradients overflow too often.
    Overflow,
    /// The driver reports an error on the last rank's GPU.
    Gpu,
}

impl Anomaly {
    /// All problems.
    pub const ALL: [Anomaly; 6] =
        [Anomaly::None, Anomaly::Input, Anomaly::Communication, Anomaly::Straggler, Anomaly::Overflow, Anomaly::Gpu];
}

/// Parameters of a synthetic run.
#[derive(Debug, Clone)]
pub struct SyntheticRun {
    /// Number of ranks; eight per node.
    pub ranks: u32,
    /// Number of steps.
    pub steps: u64,
    /// Problem of the run.
    pub anomaly: Anomaly,
    /// Steps after which the run fails; a new attempt resumes 50 steps earlier.
    pub failures: Vec<u64>,
    /// Seed for everything else.
    pub seed: u64,
}

/// Ranks per node.
const PER_NODE: u32 = 8;
/// Steps between checkpoints.
const CHECKPOINT: u64 = 100;
/// 2026-11-20T14:00:00Z in microseconds.
const START_US: i64 = 1_795_183_200_000_000;

impl SyntheticRun {
    /// A run without failures.
    pub fn new(ranks: u32, steps: u64, anomaly: Anomaly) -> SyntheticRun {
        SyntheticRun { ranks, steps, anomaly, failures: Vec::new(), seed: 7 }
    }

    /// Writes the run directory.
    ///
    /// # Panics
    /// A file cannot be written.
    pub fn write(&self, folder: &Path) {
        let put = |name: &str, text: &str| {
            let path = folder.join(name);
            fs::create_dir_all(path.parent().expect("invariant: it is in the run directory")).expect("a folder");
            fs::write(&path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        };
        // JSON is valid YAML.
        put("plan.yaml", &self.plan().to_string());
        put("engine.json", &self.engine().to_string());
        put("inspection.json", &self.inspection().to_string());
        put("machine.json", &machine().to_string());
        put("status.yaml", &self.status().to_string());
        let (events, steps) = self.train();
        put("events.jsonl", &events);
        for (rank, lines) in steps.iter().enumerate() {
            put(&format!("{}/{}", record::DIR, record::steps_file(rank as u32)), lines);
        }
    }

    fn transport(&self) -> &'static str {
        match self.ranks {
            1 => "none",
            _ if self.anomaly == Anomaly::Communication => "tcp",
            2..=PER_NODE => "shm",
            _ => "hierarchical",
        }
    }

    fn buckets(&self) -> Vec<u64> {
        if self.anomaly == Anomaly::Communication { vec![24 << 20] } else { vec![2 << 20; 12] }
    }

    fn engine(&self) -> Value {
        let scaling = json!({"dynamic": {"initialScale": 65536.0, "growthFactor": 2.0, "backoffFactor": 0.5, "growthIntervalSteps": 20}});
        let precision = if self.anomaly == Anomaly::Overflow {
            json!({"amp": {"computeType": "fp16", "lossScaling": scaling}})
        } else {
            json!("fp32")
        };
        json!({
            "model": {"gpt": {"layers": 4, "hiddenSize": 128, "heads": 4, "contextLength": 128, "vocabularySize": 256, "tiedHead": true}},
            "labelSmoothing": 0.0,
            "data": {
                "source": {"text": {"path": "data", "include": ["**"], "exclude": []}},
                "validationFraction": 0.1,
                "images": {"size": 0, "cropPadding": 0, "flip": false, "mean": [0.5], "deviation": [0.5]},
            },
            "reader": {"workers": 1, "doubleBuffer": true, "infinite": true, "sampleType": "uint8", "maxBadSamples": 0},
            "batchSizePerProcess": 16,
            "batchMerge": 1,
            "length": {"steps": self.steps},
            "seed": 1,
            "optimizer": {
                "rule": {"adamW": {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8}},
                "learningRate": 0.001, "weightDecay": 0.1, "gradientClipNorm": 1.0, "decayExclusions": "vectors",
            },
            "schedule": {"kind": "cosine", "warmupSteps": 100, "finalLearningRate": 0.0001},
            "precision": precision,
            "overlap": {"enabled": self.anomaly != Anomaly::Communication, "communicators": 1, "wireType": "fp32", "syncAllReduce": false},
            "memory": {"fraction": 0.95, "releaseEverySteps": 0},
            "evaluation": {"everySteps": 200, "batches": 4},
            "fetchEverySteps": 30,
            "cpuThreads": 1,
            "devicesPerProcess": 1,
            "profile": null,
            "checkpoint": {"path": "checkpoints", "everySteps": CHECKPOINT, "periodSeconds": 0, "keep": 2, "onSuspend": true},
        })
    }

    fn inspection(&self) -> Value {
        json!({
            "model": "GPT 4x128", "sample": "128 tokens", "item": "tokens", "parameters": 6_291_456, "gradientTensors": 52,
            "memory": {"weights": 24 << 20, "gradients": 24 << 20, "optimizer": 48 << 20, "activations": 180 << 20, "input": 6 << 20},
            "fp32MemoryBytes": (self.anomaly == Anomaly::Overflow).then_some(420 << 20),
            "kernel": "avx2", "files": 1284, "bytes": 10_066_330, "trainItems": 9_059_697, "validationItems": 1_006_633,
            "dataDigest": "0011223344556677", "unigramNats": 3.31, "bigramNats": 2.45, "samplesPerStep": 16 * self.ranks,
            "itemsPerStep": 2048 * self.ranks, "stepsPerEpoch": 4915, "totalSteps": self.steps,
        })
    }

    fn plan(&self) -> Value {
        let process = |rank: u32| {
            json!({
                "rank": rank, "argv": ["switchyard-worker"], "cpus": (rank % PER_NODE).to_string(), "numaNodes": [rank % PER_NODE / 4], "threads": 1,
                "devices": ["cpu"],
                "env": [
                    {"name": "SWITCHYARD_RENDEZVOUS", "value": "127.0.0.1:29400", "reason": "where rank 0 listens"},
                    {"name": "API_TOKEN", "value": "hidden-by-the-report", "reason": "trainer.env"},
                ],
            })
        };
        let ranks: Vec<u32> = (0..self.ranks).collect();
        let nodes: Vec<Value> = ranks
            .chunks(PER_NODE as usize)
            .enumerate()
            .map(|(node, ranks)| {
                let processes: Vec<Value> = ranks.iter().map(|rank| process(*rank)).collect();
                json!({"name": format!("made-up-1-{node}"), "nodeName": format!("node-{node}"), "firstRank": ranks[0], "processes": processes})
            })
            .collect();
        json!({
            "job": "made-up", "attempt": self.failures.len() + 1,
            "reason": "one core per rank, four ranks on each NUMA node, out of the largest free nodes", "nodes": nodes,
            "engine": self.engine(), "maxRestarts": 10,
        })
    }

    fn status(&self) -> Value {
        json!({
            "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "made-up"},
            "spec": {
                "trainer": {"numNodes": self.ranks.div_ceil(PER_NODE), "env": [{"name": "API_TOKEN", "value": "hidden-by-the-report"}]},
                "engine": {"steps": self.steps},
            },
            "status": {"conditions": [{"type": "Complete", "status": "True", "reason": "Complete", "message": format!("{} steps done", self.steps)}]},
        })
    }

    /// Simulates the steps of all attempts. Returns the events and each rank's records.
    fn train(&self) -> (String, Vec<String>) {
        let random = Random::new(self.seed);
        let noise = || (random.below(2001) as f32 - 1000.0) / 1000.0;
        let mut events = String::new();
        let mut steps = vec![String::new(); self.ranks as usize];
        let (mut now, mut step, mut scale) = (START_US, 1, 65536.0_f32);
        let event = |events: &mut String, now: i64, attempt: u32, rank: u32, event: Value| {
            let time = jiff::Timestamp::from_microsecond(now).expect("invariant: a time of this century");
            let _ = writeln!(events, "{}", json!({"time": time, "attempt": attempt, "rank": rank, "event": event}));
        };
        for attempt in 1..=self.failures.len() as u32 + 1 {
            let last = self.failures.get(attempt as usize - 1).copied().unwrap_or(self.steps);
            let alone = match self.anomaly {
                _ if self.ranks == 1 => 0.0,
                Anomaly::Communication => 38.0,
                _ => 6.0,
            };
            for rank in 0..self.ranks {
                event(
                    &mut events,
                    now,
                    attempt,
                    rank,
                    json!({
                        "event": "ready", "rank": rank, "pid": 41_000 + rank, "host": format!("node-{}", rank / PER_NODE), "cpus": (rank % PER_NODE).to_string(),
                        "threads": 1, "kernel": "avx2", "address": "127.0.0.1:29400", "transport": self.transport(), "allReduceMs": alone,
                        "bucketBytes": if rank == 0 && self.ranks > 1 { self.buckets() } else { Vec::new() },
                    }),
                );
            }
            for (index, step) in (step..=last).enumerate() {
                // Caches and threads warm up.
                let slow = if index < 5 { 1.6 } else { 1.0 } * if random.below(60) == 0 { 1.3 } else { 1.0 };
                let mut records: Vec<StepRecord> =
                    (0..self.ranks).map(|rank| self.compute(rank, slow, &noise)).collect();
                let compute_ms = |record: &StepRecord| {
                    record.input_ms + record.forward_ms + record.backward_ms + record.optimizer_ms
                };
                let slowest = records.iter().map(compute_ms).fold(0.0, f32::max);
                let exposed = match self.anomaly {
                    _ if self.ranks == 1 => 0.0,
                    Anomaly::Communication => 36.0 + 2.0 * noise(),
                    _ => 1.2 + 0.3 * noise(),
                };
                let overflowed = self.anomaly == Anomaly::Overflow && step % 21 == 0;
                scale = if overflowed {
                    (scale / 2.0).max(16.0)
                } else if step % 20 == 0 {
                    (scale * 2.0).min(65536.0)
                } else {
                    scale
                };
                let checkpoint = if step % CHECKPOINT == 0 { 9.0 } else { 0.0 };
                let other = if step % 200 == 0 { 60.0 } else { 0.6 };
                let total = slowest + exposed + checkpoint + other;
                now += (total * 1000.0) as i64;
                for (rank, record) in records.iter_mut().enumerate() {
                    let wait = slowest - compute_ms(record) + exposed;
                    *record = StepRecord {
                        attempt,
                        step,
                        end_us: now,
                        total_ms: total,
                        communication_ms: wait,
                        checkpoint_ms: checkpoint,
                        other_ms: other,
                        reduce_ms: if self.ranks == 1 { 0.0 } else { wait + alone as f32 * 0.8 },
                        reduce_bytes: if self.ranks == 1 { 0 } else { 24 << 20 },
                        left_bytes: if self.ranks == 1 {
                            0
                        } else {
                            self.buckets().last().copied().unwrap_or_default()
                        },
                        loss: 1.8 + 3.7 / (1.0 + step as f32 / 80.0) + 0.12 * noise(),
                        gradient_norm: (!overflowed).then_some(0.8 + 0.2 * noise()),
                        loss_scale: if self.anomaly == Anomaly::Overflow { scale } else { 1.0 },
                        learning_rate: 0.001,
                        ..*record
                    };
                    let line = serde_json::to_string(record).expect("invariant: a record is JSON");
                    let _ = writeln!(steps[rank], "{line}");
                }
                if step % 200 == 0 {
                    let loss = 1.9 + 3.6 / (1.0 + step as f64 / 80.0);
                    event(&mut events, now, attempt, 0, json!({"event": "evaluation", "step": step, "loss": loss}));
                }
            }
            let failed = last < self.steps;
            for rank in 0..self.ranks {
                if self.anomaly == Anomaly::Gpu {
                    let xids: &[u32] = if rank + 1 == self.ranks { &[63] } else { &[] };
                    let report = json!({"event": "gpu", "rank": rank, "bus": format!("0000:{:02x}:00.0", rank % 8), "seconds": 60.0,
                        "slowed": [{"by": "power", "seconds": 24.0}], "xids": xids, "correctedErrors": 0, "uncorrectedErrors": 0,
                        "highestCelsius": 71, "pcie": {"lanes": 16, "most": 16}});
                    event(&mut events, now, attempt, rank, report);
                }
                let body = if failed {
                    json!({"event": "failed", "rank": rank, "originRank": 0, "cause": "killed by signal 9 (SIGKILL)", "during": "all_reduce of bucket 0", "exitCode": 4})
                } else {
                    json!({
                        "event": "finished", "rank": rank, "step": last, "firstLoss": 5.5, "lastLoss": 2.0, "validationLoss": 2.1, "weightsDigest": "aa",
                        "stepMsP50": 95.0, "stepMsP99": 120.0,
                    })
                };
                event(&mut events, now, attempt, rank, body);
            }
            now += 3_000_000;
            step = (last + 1).saturating_sub(50).max(1);
        }
        (events, steps)
    }

    /// Returns a rank's local times in a step.
    fn compute(&self, rank: u32, slow: f32, noise: &dyn Fn() -> f32) -> StepRecord {
        let slow = slow * if self.anomaly == Anomaly::Straggler && rank + 1 == self.ranks { 1.15 } else { 1.0 };
        let sample = |mean: f32| mean * slow * (1.0 + 0.02 * noise());
        let (input_ms, read_ms) =
            if self.anomaly == Anomaly::Input { (sample(26.0), sample(118.0)) } else { (0.3, sample(22.0)) };
        StepRecord {
            input_ms,
            forward_ms: sample(28.0),
            backward_ms: sample(56.0),
            optimizer_ms: sample(6.0),
            read_ms,
            ..StepRecord::default()
        }
    }
}

fn machine() -> Value {
    json!({"status": {"memoryBytes": 16_u64 << 30, "cpus": {"model": "Made-up CPU", "cores": 8, "threads": 8}}})
}
