use super::*;
use crate::report::facts::{MemoryFacts, RankFacts, Reduce};
use crate::report::kernels::example;
use crate::report::sample::Parts;
use serde_json::json;
use switchyard_worker_contract::config::{
    Device, EngineConfig, Model, Pipeline, Precision, RankOrder, Sharding, SyncPolicy, Transport, WireType,
};
use switchyard_worker_contract::event::{Inspection, MemoryUse};
use switchyard_worker_contract::gpu::{GpuReport, PcieWidth, Slowed, SlowedBy};
use switchyard_worker_contract::prediction::Arithmetic;

mod documentation;
mod exchanges;

fn engine() -> EngineConfig {
    serde_json::from_value(json!({
        "model": {"gpt": {"layers": 4, "hiddenSize": 128, "heads": 4, "contextLength": 128, "vocabularySize": 256, "tiedHead": true}},
        "labelSmoothing": 0.0,
        "data": {
            "source": {"text": {"path": "data", "include": [], "exclude": []}}, "validationFraction": 0.1,
            "images": {"size": 0, "cropPadding": 0, "flip": false, "mean": [], "deviation": []},
        },
        "reader": {"workers": 1, "doubleBuffer": true, "infinite": true, "sampleType": "uint8", "maxBadSamples": 0},
        "batchSizePerProcess": 16, "batchMerge": 1, "length": {"steps": 600}, "seed": 1,
        "optimizer": {
            "rule": {"adamW": {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8}}, "learningRate": 0.001, "weightDecay": 0.1,
            "gradientClipNorm": 1.0, "decayExclusions": "vectors",
        },
        "schedule": {"kind": "constant", "warmupSteps": 0, "finalLearningRate": 0.0}, "precision": "fp32",
        "overlap": {"enabled": true, "communicators": 1, "wireType": "fp32", "syncAllReduce": false},
        "memory": {"fraction": 0.95, "releaseEverySteps": 0}, "evaluation": {"everySteps": 100, "batches": 4},
        "fetchEverySteps": 30, "cpuThreads": 1, "devicesPerProcess": 1, "profile": null,
        "checkpoint": {"path": "c", "everySteps": 100, "periodSeconds": 0, "keep": 1, "onSuspend": true},
    }))
    .unwrap()
}

fn amp() -> Precision {
    let scaling = json!({"dynamic": {"initialScale": 65536.0, "growthFactor": 2.0, "backoffFactor": 0.5, "growthIntervalSteps": 100}});
    serde_json::from_value(json!({"amp": {"computeType": "fp16", "lossScaling": scaling}})).unwrap()
}

fn inspection() -> Inspection {
    serde_json::from_value(json!({
        "model": "GPT 4x128", "sample": "128 tokens", "item": "tokens", "parameters": 6_000_000, "gradientTensors": 52,
        "memory": {"weights": 0, "gradients": 0, "optimizer": 0, "activations": 0, "input": 0}, "kernel": "avx2", "files": 1,
        "bytes": 1, "trainItems": 1, "validationItems": 1, "dataDigest": "", "samplesPerStep": 32,
        "itemsPerStep": 4096, "stepsPerEpoch": 10, "totalSteps": 600,
    }))
    .unwrap()
}

fn parts(times: &[(Part, f64)]) -> Parts {
    let mut parts = Parts::default();
    times.iter().for_each(|(part, ms)| parts[*part] = *ms);
    parts
}

fn rank(rank: u32, step: Parts) -> RankFacts {
    let cpus = Some(format!("{}-{}", rank * 2, rank * 2 + 1).parse().unwrap());
    RankFacts { rank, node: Some("node-0".into()), cpus, threads: Some(2), step, slow_share: 0.0, over_median_ms: 0.1 }
}

/// Two ranks with two cores each at 100 ms per step, with nothing to gain.
pub(super) fn healthy() -> Facts {
    let step = parts(&[
        (Part::Forward, 30.0),
        (Part::Backward, 60.0),
        (Part::Optimizer, 5.0),
        (Part::Communication, 2.0),
        (Part::Input, 1.0),
        (Part::Checkpoint, 1.0),
        (Part::Other, 1.0),
    ]);
    let memory =
        MemoryUse { weights: 20, gradients: 10, optimizer: 20, activations: 100, input: 10, ..Default::default() };
    Facts {
        engine: Some(engine()),
        inspection: Some(inspection()),
        ranks: vec![rank(0, step), rank(1, step)],
        critical: 1,
        world: 2,
        step,
        quantiles: Some((99.0, 130.0)),
        work_quantiles: Some((97.0, 105.0)),
        between_median: Some(0.5),
        warm_ms: Some(120.0),
        reduce: Some(Reduce { busy_ms: 8.0, bytes: 24e6, left_bytes: None }),
        bucket_bytes: vec![6 << 20; 4],
        reduce_alone_ms: Some(6.0),
        transport: Some(Transport::Shm),
        read_ms: Some(20.0),
        memory: Some(MemoryFacts { rank: memory, ranks: 2, bound: "the memory of the machine", capacity: 1000 }),
        skipped: Some((590, 0)),
        loss_scale: Some((1.0, 1.0)),
        kernel: Some("avx2".into()),
        on_gpu: Some(false),
        cores_per_cpu: Some(1.0),
        bus_bandwidth: Some((90e9, 96e9)),
        ..Facts::default()
    }
}

fn set(facts: &mut Facts, part: Part, ms: f64) {
    facts.step[part] = ms;
    facts.ranks[1].step[part] = ms;
}

fn engine_of(facts: &mut Facts) -> &mut EngineConfig {
    facts.engine.as_mut().unwrap()
}

fn finding_of(rule: &str, facts: &Facts) -> Finding {
    (RULES.iter().find(|one| one.id == rule).unwrap().check)(facts)
}

fn gpu() -> GpuReport {
    GpuReport { bus: "0000:17:00.0".into(), seconds: 100.0, ..GpuReport::default() }
}

/// Rule, change to a healthy run that triggers it, text in the evidence or change, and gain of the
/// first change in ms.
pub(super) type Case = (&'static str, fn(&mut Facts), &'static str, Option<f64>);

pub(super) const CASES: [Case; 31] = [
    ("loss-not-a-number", |f| f.lost_at = Some(1200), "step 1,200", None),
    (
        "gpu-errors",
        |f| f.gpus = vec![GpuReport { xids: vec![79], ..gpu() }],
        "XID 79 (GPU has fallen off the bus)",
        None,
    ),
    (
        "gpu-clocks",
        |f| f.gpus = vec![GpuReport { slowed: vec![Slowed { by: SlowedBy::PowerBrake, seconds: 50.0 }], ..gpu() }],
        "by the power supply of the machine for 50 % of the time",
        None,
    ),
    (
        "gpu-link",
        |f| f.gpus = vec![GpuReport { pcie: Some(PcieWidth { lanes: 8, most: 16 }), ..gpu() }],
        "8 of 16 lanes",
        None,
    ),
    ("too-many-threads", |f| f.ranks[1].threads = Some(9), "`trainer.cpuThreads: 5 -> 2`", None),
    ("too-few-threads", |f| f.ranks[1].threads = Some(1), "`trainer.cpuThreads: 1 -> 2`", Some(23.75)),
    // The reader needs 150 ms for a step that takes 100 ms without the wait: two threads hide it.
    (
        "input-bound",
        |f| {
            set(f, Part::Input, 51.0);
            f.read_ms = Some(150.0);
        },
        "`reader.workers: 1 -> 2`",
        Some(51.0),
    ),
    // For 400 ms three threads are too slow and four would leave 1 ms, so five.
    (
        "input-bound",
        |f| {
            set(f, Part::Input, 31.0);
            f.read_ms = Some(400.0);
        },
        "`reader.workers: 1 -> 5`",
        Some(31.0),
    ),
    (
        "input-bound",
        |f| {
            set(f, Part::Input, 21.0);
            f.synthetic_step_ms = Some(101.0);
        },
        "With synthetic data a step takes 101 ms",
        Some(19.0),
    ),
    (
        "input-bound",
        |f| {
            set(f, Part::Input, 21.0);
            engine_of(f).reader.double_buffer = false;
        },
        "`reader.doubleBuffer: Enabled`",
        Some(21.0),
    ),
    ("checkpoint-stall", |f| set(f, Part::Checkpoint, 8.0), "`checkpoint.everySteps: 100 -> 200`", Some(4.0)),
    (
        "frequent-fetches",
        |f| {
            set(f, Part::Other, 9.0);
            f.between_median = Some(9.0);
            engine_of(f).fetch_every_steps = 1;
        },
        "`fetchEverySteps: 1 -> 30`",
        Some(8.7),
    ),
    ("frequent-evaluation", |f| set(f, Part::Other, 10.5), "`evaluation.everySteps: 100 -> 200`", Some(5.0)),
    (
        "gaps-between-steps",
        |f| {
            set(f, Part::Other, 9.0);
            f.between_median = Some(9.0);
        },
        "without a fetch or an evaluation",
        None,
    ),
    // 50 of 98 ms are kernels, 5 are waits.
    (
        "gpu-idle",
        |f| {
            f.kernels = Some(example(false));
            engine_of(f).device = Device::Cuda;
            engine_of(f).gpu.graphs = false;
        },
        "`cudaGraphs: Enabled`",
        Some(22.5),
    ),
    (
        "shapes",
        |f| {
            f.on_gpu = Some(true);
            let Model::Gpt(gpt) = &mut engine_of(f).model else { panic!() };
            gpt.hidden_size = 132;
        },
        "`model.gpt.hiddenSize: 132 -> 160`",
        None,
    ),
    ("amp-off", |f| f.kernel = Some("amx-bf16".into()), "`precision.mode: AMP`", Some(22.5)),
    ("amp-off", |f| f.on_gpu = Some(true), "FP32 on a GPU", Some(22.5)),
    (
        "exact-products",
        |f| {
            let mut kernels = example(false);
            kernels.times.kernels[0].cost.arithmetic = Arithmetic::F32;
            kernels.times.kernels[1].cost.arithmetic = Arithmetic::F32;
            f.kernels = Some(kernels);
            engine_of(f).device = Device::Cuda;
        },
        "`precision.matmul: TF32`",
        Some(12.5),
    ),
    (
        "overflow-skips",
        |f| {
            engine_of(f).precision = amp();
            f.skipped = Some((500, 25));
        },
        "`precision.lossScaling.growthIntervalSteps: 100 -> 400`",
        Some(5.0),
    ),
    (
        "loss-scale-collapse",
        |f| {
            engine_of(f).precision = amp();
            f.loss_scale = Some((65536.0, 1.0));
        },
        "from 65536 to 1",
        None,
    ),
    ("memory-near-limit", |f| f.memory.as_mut().unwrap().capacity = 330, "use 97 % of the memory", None),
    (
        "batch-could-be-larger",
        |f| set(f, Part::Optimizer, 15.0),
        "`batchSizePerProcess: 16 -> 32` with `steps: 600 -> 300`; loss may change",
        Some(8.0),
    ),
    (
        "one-big-all-reduce",
        |f| {
            set(f, Part::Communication, 12.0);
            f.bucket_bytes = vec![24 << 20];
            engine_of(f).overlap.enabled = false;
        },
        "`overlap.mode: Enabled` with `overlap.syncAllReduce: Disabled`",
        Some(5.25),
    ),
    (
        "many-small-all-reduces",
        |f| {
            set(f, Part::Communication, 12.0);
            f.bucket_bytes = vec![1 << 18; 100];
            engine_of(f).overlap.bucket_size_mib = Some(1);
        },
        "`overlap.bucketSizeMiB: 1` removed",
        Some(94.0 * 0.026),
    ),
    (
        "communication-bound",
        |f| set(f, Part::Communication, 20.0),
        "`batchMerge: 1 -> 2` with `steps: 600 -> 300`; loss may change",
        Some(10.0),
    ),
    (
        "communication-bound",
        |f| {
            set(f, Part::Communication, 36.0);
            f.transport = Some(Transport::Tcp);
            f.reduce_alone_ms = Some(38.0);
            f.reduce = Some(Reduce { busy_ms: 40.0, bytes: 24e6, left_bytes: None });
        },
        "`overlap.wireType: FP16`",
        Some(19.0),
    ),
    (
        "communication-bound",
        |f| {
            set(f, Part::Communication, 20.0);
            f.transport = Some(Transport::Hierarchical);
        },
        "`overlap.communicators: 1 -> 2`",
        Some(10.0),
    ),
    (
        "placement",
        |f| {
            set(f, Part::Communication, 20.0);
            f.bus_bandwidth = Some((48e9, 96e9));
        },
        "48 GB/s, the best ones would 96",
        Some(10.0),
    ),
    (
        "idle-stages",
        |f| {
            set(f, Part::Pipeline, 40.0);
            engine_of(f).pipeline = Some(Pipeline { stages: 2, order: RankOrder::ByPipeline });
            engine_of(f).batch_merge = 4;
        },
        "`batchMerge: 4 -> 8` with `batchSizePerProcess: 16 -> 8`",
        Some(95.0 / 4.0 / 2.0),
    ),
    (
        "straggler",
        |f| {
            f.ranks[1].slow_share = 0.92;
            f.ranks[1].over_median_ms = 7.4;
        },
        "Rank 1 (node-0, CPUs 2-3) computes 7.4 ms longer",
        Some(7.3),
    ),
];

#[test]
fn remedies_that_send_less_come_last_and_only_on_a_network() {
    let mut facts = healthy();
    set(&mut facts, Part::Communication, 36.0);
    (facts.reduce_alone_ms, facts.reduce) = (Some(38.0), Some(Reduce { busy_ms: 40.0, bytes: 24e6, left_bytes: None }));
    let sgd = json!({"sgd": {"momentum": 0.9, "nesterov": false}});
    engine_of(&mut facts).optimizer.rule = serde_json::from_value(sgd).unwrap();
    assert!(!format!("{:?}", finding_of("communication-bound", &facts)).contains("sync.type"));
    facts.transport = Some(Transport::Tcp);
    let Finding::Advice(Advice { changes, .. }) = finding_of("communication-bound", &facts) else { panic!() };
    let [.., local, top_k, network] = changes.as_slice() else { panic!("{changes:?}") };
    assert_eq!(local.what, "`sync.type: Local` with `sync.everySteps: 1 -> 16`; loss may change");
    let of_top_k = 36.0 - 38.0 * 0.01 * 2.0 - 5.0;
    assert_eq!((local.gain_ms, top_k.gain_ms), (Some(36.0 - 38.0 / 16.0), Some(of_top_k)));
    assert_eq!((&network.patch, network.gain_ms), (&None, Some(36.0 * 0.9)));
}

/// Regression test: fewer than 1 % were never mentioned.
#[test]
fn one_skipped_step_is_too_many_for_a_static_scale() {
    let mut facts = healthy();
    facts.skipped = Some((500, 1));
    engine_of(&mut facts).precision = amp();
    assert!(matches!(finding_of("overflow-skips", &facts), Finding::Fine(_)), "a search for the scale");
    let fixed = json!({"amp": {"computeType": "fp16", "lossScaling": {"static": {"scale": 1024.0}}}});
    engine_of(&mut facts).precision = serde_json::from_value(fixed).unwrap();
    assert!(matches!(finding_of("overflow-skips", &facts), Finding::Advice(_)));
}

#[test]
fn each_rule_finds_its_case_and_nothing_in_a_healthy_run() {
    for (rule, change, words, gain) in CASES {
        let spoken = finding_of(rule, &healthy());
        assert!(!matches!(spoken, Finding::Advice(_) | Finding::Note(..)), "{rule} about a healthy run: {spoken:?}");
        let mut facts = healthy();
        change(&mut facts);
        let Finding::Advice(advice) = finding_of(rule, &facts) else {
            panic!("{rule}: {:?}", finding_of(rule, &facts))
        };
        let all: Vec<&str> = advice.changes.iter().map(|change| change.what.as_str()).collect();
        let text = format!("{} {}", advice.evidence, all.join("; "));
        assert!(text.contains(words), "{rule}: `{words}` is not in: {text}");
        let found = advice.changes[0].gain_ms;
        assert_eq!(found.is_some(), gain.is_some(), "{rule}: {text}");
        let difference = found.unwrap_or_default() - gain.unwrap_or_default();
        assert!(difference.abs() < 0.01, "{rule}: {found:?}, expected {gain:?}");
    }
    let notes = ["warm-up", "noise", "slow-kernel"];
    for rule in &RULES {
        assert!(CASES.iter().any(|case| case.0 == rule.id) || notes.contains(&rule.id), "no case for {}", rule.id);
    }
}

#[test]
fn notes_appear_only_in_their_cases() {
    let note = |change: fn(&mut Facts), rule: &str| {
        let mut facts = healthy();
        change(&mut facts);
        matches!(finding_of(rule, &facts), Finding::Note(..))
    };
    assert!(note(|f| f.warm_ms = Some(250.0), "warm-up") && !note(|_| {}, "warm-up"));
    assert!(note(|f| f.work_quantiles = Some((97.0, 200.0)), "noise") && !note(|_| {}, "noise"));
    let far = |f: &mut Facts| f.kernels = Some(example(true));
    assert!(note(far, "slow-kernel") && !note(|f| f.kernels = Some(example(false)), "slow-kernel"));
    assert!(note(far, "gpu-idle"), "with graphs nothing is left to set");
    let sampled = |f: &mut Facts| f.gpus = vec![GpuReport { busy_seconds: Some(60.0), ..gpu() }];
    assert!(note(sampled, "gpu-idle") && !note(|f| f.gpus = vec![gpu()], "gpu-idle"));
    assert!(!note(|f| f.gpus = vec![GpuReport { busy_seconds: Some(91.0), ..gpu() }], "gpu-idle"));
    let odd = |f: &mut Facts| {
        let Model::Gpt(gpt) = &mut engine_of(f).model else { panic!() };
        gpt.hidden_size = 132;
    };
    assert!(note(odd, "shapes"), "on a CPU odd shapes are a note only");
    let synthetic = |f: &mut Facts| {
        set(f, Part::Input, 21.0);
        f.synthetic_step_ms = Some(119.0);
    };
    assert!(note(synthetic, "input-bound"), "as slow with synthetic data: input is not the limit");
}

#[test]
fn unknown_facts_are_reported_and_never_cause_advice() {
    let nothing = Facts { step: healthy().step, world: 2, ranks: healthy().ranks, ..Facts::default() };
    let ranked = rank::rank(&nothing);
    assert!(ranked.items.is_empty() && ranked.folded.is_empty(), "{:?}", ranked.items);
    assert!(ranked.unknown.len() > 8, "{:?}", ranked.unknown);
    let single = Facts { world: 1, ranks: vec![healthy().ranks[0].clone()], critical: 0, ..healthy() };
    for rule in ["straggler", "communication-bound", "one-big-all-reduce", "placement"] {
        assert_eq!(finding_of(rule, &single), Finding::NotApplicable, "{rule}");
    }
}

/// The gains must not exceed the step, in total and per part.
fn check_sums(facts: &Facts) {
    let ranked = rank::rank(facts);
    let all: Vec<&Item> = ranked.items.iter().chain(&ranked.folded).collect();
    let sum: f64 = all.iter().filter_map(|item| item.gain_ms).sum();
    assert!(sum <= facts.step_ms() * (1.0 + 1e-9), "{sum} of {}", facts.step_ms());
    let waits_for_ranks = |item: &&&Item| item.advice.parts.contains(&Part::Communication);
    let exposed: f64 = all.iter().filter(waits_for_ranks).filter_map(|item| item.gain_ms).sum();
    assert!(exposed <= facts.step.exposed() + 1e-9, "{exposed}");
    let gains: Vec<f64> = ranked.items.iter().filter_map(|item| item.gain_ms).collect();
    assert!(gains.windows(2).all(|pair| pair[0] >= pair[1]) && gains.iter().all(|gain| facts.percent(*gain) >= 1.0));
    assert!(ranked.folded.iter().all(|item| facts.percent(item.gain_ms.unwrap()) < 1.0));
}

#[test]
fn no_millisecond_is_promised_twice() {
    for (_, first, ..) in CASES {
        for (_, second, ..) in CASES {
            let mut facts = healthy();
            first(&mut facts);
            second(&mut facts);
            check_sums(&facts);
        }
    }
    // All target the exposed time: one piece of advice remains, with the others joined to it.
    let mut facts = healthy();
    set(&mut facts, Part::Communication, 12.0);
    facts.bus_bandwidth = Some((9.6e9, 96e9));
    facts.bucket_bytes = vec![24 << 20];
    engine_of(&mut facts).overlap.enabled = false;
    let ranked = rank::rank(&facts);
    assert_eq!(ranked.items[0].rule, "placement");
    assert!(!ranked.items[0].also.is_empty(), "{:?}", ranked.items);
}

#[test]
fn doubt_about_the_result_comes_first_and_small_gains_are_folded() {
    let mut facts = healthy();
    facts.lost_at = Some(3);
    facts.ranks[1].threads = Some(1);
    let ranked = rank::rank(&facts);
    let rules: Vec<&str> = ranked.items.iter().map(|item| item.rule).collect();
    assert_eq!(rules, ["loss-not-a-number", "too-few-threads"]);
    // 28 exchanges fewer save 0.7 of 102 ms.
    let mut facts = healthy();
    set(&mut facts, Part::Communication, 4.0);
    facts.bucket_bytes = vec![1 << 18; 30];
    engine_of(&mut facts).overlap.bucket_size_mib = Some(1);
    let ranked = rank::rank(&facts);
    assert_eq!((ranked.items.len(), ranked.folded.len()), (0, 1), "{:?}", ranked.items);
}
