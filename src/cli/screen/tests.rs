//! Screens as printed.

use super::*;
use crate::examples::machine;
use jiff::Timestamp;
use serde_json::json;
use switchyard_local::{Interval, RankLog};
use switchyard_plan::local::{Devices, LocalPlan, LocalSnapshot, plan};
use switchyard_worker_contract::config::{
    Device, EngineConfig, ParameterServers, Pipeline, RankOrder, ServerPlacement, Transport, Updates,
};
use switchyard_worker_contract::event::{Finished, GpuCalls, Item, MemoryUse, Slowest, Summary};
use switchyard_worker_contract::fold::Breakdown;

#[test]
fn tables_have_no_borders_and_no_trailing_spaces() {
    let rows = [vec!["A".to_string(), "LONG".to_string()], vec!["xyz".to_string(), "1".to_string()]];
    assert_eq!(columns(&rows), "A    LONG\nxyz  1");
}

fn interval() -> Interval {
    Interval {
        figures: Summary {
            step: 240,
            total_steps: 600,
            loss: 2.184,
            validation_loss: Some(2.31),
            accuracy: None,
            items_per_second: 20_900.0,
            item: Item::Tokens,
            loss_scale: None,
            skipped_steps: None,
            slowest: Some(Slowest { rank: 1, node_rank: 0, over_percent: 5.6, steps: 100 }),
            stuck: None,
            gpu: None,
            remaining_seconds: Some(34.6),
            communication_percent: 3.2,
            input_percent: 0.4,
        },
        at: Timestamp::UNIX_EPOCH,
        breakdown: Breakdown {
            learning_rate: 0.001,
            gradient_norm: 0.7,
            step_ms: 97.9,
            compute_ms: 91.6,
            communication_wait_ms: 3.1,
            pipeline_wait_ms: None,
            input_wait_ms: 0.4,
            other_ms: 2.8,
        },
    }
}

#[test]
fn a_line_for_logs_has_keys_and_values_and_no_escape_codes() {
    let line = plain_line(&interval(), Timestamp::UNIX_EPOCH);
    assert_eq!(
        line,
        "1970-01-01T00:00:00Z step=240/600 loss=2.1840 valLoss=2.3100 itemsPerSecond=20900 stepMs=97.9 inputWaitPct=0.4 commWaitPct=3.2 etaS=35"
    );
}

#[test]
fn the_bar_shows_where_the_time_goes() {
    let text = bar_message(&interval());
    assert!(text.contains("loss 2.184   val 2.310   20,900 tokens/s   ETA 35s"), "{text}");
    assert!(
        text.contains(
            "97.9 ms = compute 91.6 + all-reduce wait 3.1 + input wait 0.4 + other 2.8   slowest rank 1 (+6 %)"
        ),
        "{text}"
    );
}

#[test]
fn a_failure_shows_the_first_cause_and_its_log() {
    let cause = RootCause {
        rank: 1,
        server: None,
        pid: Some(42),
        cause: "killed by signal 9 (SIGKILL)".into(),
        during: "all_reduce of bucket 0".into(),
        code: None,
        log: RankLog { path: "runs/x/logs/attempt-1/rank-1.log".into(), tail: vec!["last words".into()] },
        others: vec![0],
    };
    assert_eq!(
        failure(&cause, 1),
        "error[SY0503]: rank 1 failed first; the other rank stopped because of it\n  where    rank 1, pid 42, attempt 1\n  \
         cause    killed by signal 9 (SIGKILL)\n  during   all_reduce of bucket 0\n  log      runs/x/logs/attempt-1/rank-1.log\n           | last words"
    );
}

#[test]
fn processes_that_survive_sigkill_are_shown_with_the_cause() {
    let cause = RootCause {
        rank: 1,
        server: None,
        pid: Some(42),
        cause: "no sign of life for 5.0 s".into(),
        during: String::new(),
        code: Some(5),
        log: RankLog::default(),
        others: vec![0],
    };
    let survivor = Survivor {
        rank: 1,
        name: "rank 1".into(),
        pid: 42,
        state: "thread `reader` is in uninterruptible sleep".into(),
    };
    assert_eq!(
        survivors(Some(&cause), &[survivor], 10),
        "warning: rank 1 (pid 42): no sign of life for 5.0 s\n\
         warning: SIGKILL has not ended rank 1 (pid 42): thread `reader` is in uninterruptible sleep\n\
         the run ends without it in 10 s, or on Ctrl-C"
    );
}

/// Two ranks of a ResNet with mixed precision, in one process.
fn planned() -> LocalPlan {
    let document = json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "digits"},
        "spec": {
            "trainer": {"numProcPerNode": 2},
            "checkpoint": {"path": "ckpt", "everySteps": 500},
            "engine": {
                "executionMode": "SingleProcess",
                "model": {"type": "ResNet", "resnet": {"depth": 18}},
                "data": {"format": "IDX", "path": "mnist"},
                "batchMerge": 2,
                "precision": {"mode": "AMP", "computeType": "FP16"},
                "steps": 600,
            },
        },
    });
    let job = switchyard_crds::validate::train_job(&document).unwrap_or_else(|faults| panic!("{faults:?}"));
    let nodes = [machine()];
    plan(&LocalSnapshot {
        job: &job,
        nodes: &nodes,
        attempt: 1,
        rendezvous: "127.0.0.1:1",
        run_dir: "runs/x",
        devices: Devices::default(),
        hosts: None,
    })
    .unwrap()
}

fn inspection() -> Inspection {
    Inspection {
        model: "ResNet-18 for 28x28x1 in 10 classes".into(),
        sample: "28x28x1 pixels".into(),
        item: Item::Images,
        parameters: 11_172_810,
        gradient_tensors: 62,
        memory: MemoryUse { weights: 61 << 20, ..MemoryUse::default() },
        server_memory_bytes: None,
        fp32_memory_bytes: Some(105 << 20),
        gpu_memory: None,
        kept_activation_bytes: None,
        gpu_fp32_memory_bytes: None,
        kernel: "avx2".into(),
        files: 4,
        skipped: Vec::new(),
        bytes: 54_880_000,
        train_items: 60_000,
        validation_items: 10_000,
        data_digest: String::new(),
        unigram_nats: None,
        bigram_nats: None,
        samples_per_step: 32,
        items_per_step: 32,
        steps_per_epoch: 1875,
        total_steps: 600,
    }
}

fn ready(rank: u32, resumed_step: Option<u64>) -> Ready {
    Ready {
        rank,
        pid: 7,
        host: String::new(),
        cpus: "0-3".into(),
        threads: 2,
        kernel: "avx2".into(),
        address: "127.0.0.1:1".into(),
        transport: Transport::Shm,
        links: Vec::new(),
        bucket_bytes: Vec::new(),
        algorithms: Vec::new(),
        all_reduce_ms: 1.0,
        resumed_step,
        gpu: None,
    }
}

#[test]
fn the_path_counts_the_algorithms_between_hosts() {
    let algorithms = ["ring", "ring", "tree"].map(str::to_owned).to_vec();
    let between = Ready { transport: Transport::Hierarchical, algorithms, ..ready(0, None) };
    assert_eq!(path(&between), "shm+tcp (2 x ring, 1 x tree)");
    assert_eq!(path(&ready(0, None)), "shm");
}

#[test]
fn the_header_shows_the_model_and_the_16_bit_savings() {
    let text = header(&planned(), &inspection(), "runs/x", &machine());
    for line in [
        "  model    ResNet-18 for 28x28x1 in 10 classes, 11.17 M parameters, AMP FP16, loss x 65536 at first",
        "  memory   61 MiB per rank, 58 % of FP32's 105 MiB",
        "  data     4 files, 52.3 MiB; 1,875 steps/epoch; 10,000 images for validation",
        "  place    2 ranks in 1 process, each with 2 cores of its own inside one NUMA node,",
        "  steps    600 of 32 x 28x28x1 pixels, merged from 2 micro-batches per rank",
        "  saved    in ckpt: every 600 s, every 500 steps, when stopped; 2 kept",
    ] {
        assert!(text.lines().any(|found| found == line), "`{line}` is missing:\n{text}");
    }
    let mut with_servers = planned();
    with_servers.engine.parameter_server =
        Some(ParameterServers { servers: 2, placement: ServerPlacement::Ranks, updates: Updates::Synchronous });
    let text_with_servers = header(&with_servers, &inspection(), "runs/x", &machine());
    assert!(text_with_servers.contains("  servers  2 synchronous parameter servers; with ranks 0, 1\n"));
    with_servers.engine.parameter_server.iter_mut().for_each(|it| it.placement = ServerPlacement::Dedicated);
    let inspected = Inspection { server_memory_bytes: Some(24 << 20), ..inspection() };
    let text_with_servers = header(&with_servers, &inspected, "runs/x", &machine());
    let line = "  servers  2 synchronous parameter servers; each in a process of its own, at most 24 MiB\n";
    assert!(text_with_servers.contains(line), "{text_with_servers}");
    let mut with_stages = planned();
    with_stages.engine.pipeline = Some(Pipeline { stages: 2, order: RankOrder::ByPipeline });
    let text_with_stages = header(&with_stages, &inspection(), "runs/x", &machine());
    let line = "  stages   2 stages in 1 pipeline, the first on ranks 0, 1; a stage waits for others in 33 % of a step or more";
    assert!(text_with_stages.lines().any(|found| found == line), "{text_with_stages}");
    let on_gpu = Inspection { fp32_memory_bytes: None, gpu_memory: Some(inspection().memory), ..inspection() };
    let text_on_gpu = header(&planned(), &on_gpu, "runs/x", &machine());
    assert!(text_on_gpu.contains("  memory   61 MiB per rank, and 61 MiB of its GPU\n"), "{text_on_gpu}");
    assert!(!text.contains("entropy"), "a yardstick that is not known is not shown:\n{text}");
    let known = Inspection { unigram_nats: Some(3.4), bigram_nats: Some(2.5), ..inspection() };
    let text = header(&planned(), &known, "runs/x", &machine());
    assert!(text.ends_with("  entropy  unigram 3.400, bigram 2.500 nats per token of the validation text"), "{text}");
}

#[test]
fn every_rank_of_a_process_has_its_line() {
    let plan = planned();
    let ranks = [ready(0, Some(500)), ready(1, Some(500))];
    let table = rank_table(&plan, &ranks);
    assert_eq!(table.lines().count(), 3, "{table}");
    assert!(table.contains("  cpu ("), "{table}");
    let on_gpus = LocalPlan { engine: EngineConfig { device: Device::Cuda, ..plan.engine.clone() }, ..plan.clone() };
    assert!(rank_table(&on_gpus, &ranks).contains("  gpu ("));
    assert_eq!(resumed(&plan, &ranks).as_deref(), Some("  resumed  from step 500, ckpt"));
    assert_eq!(resumed(&plan, &[ready(0, None)]), None);
}

/// With mixed precision and classes.
fn scaled() -> Interval {
    let mut interval = interval();
    interval.figures.accuracy = Some(0.9733);
    interval.figures.item = Item::Images;
    interval.figures.items_per_second = 3.456;
    interval.figures.loss_scale = Some(32_768.0);
    interval.figures.skipped_steps = Some(1);
    interval
}

#[test]
fn accuracy_and_skipped_steps_are_shown_where_they_are_known() {
    let line = plain_line(&scaled(), Timestamp::UNIX_EPOCH);
    assert!(line.contains(" valAccuracy=0.9733 ") && line.ends_with(" lossScale=32768 skippedSteps=1"), "{line}");
    let text = bar_message(&scaled());
    assert!(text.contains("val 2.310 (97.3 % right)   3.46 images/s   ETA 35s"), "{text}");
    assert!(text.ends_with("   1 step skipped, loss scale 32768"), "{text}");
}

#[test]
fn the_summary_matches_the_model() {
    const SLOWEST: &str = "slowest     rank 1 on node 0, 5.6 % over the median of the other ranks in 100 steps";
    let report = Finished {
        rank: 0,
        step: 600,
        first_loss: Some(2.3),
        last_loss: Some(0.1),
        validation_loss: Some(0.12),
        accuracy: Some(0.971),
        weights_digest: "d".into(),
        step_ms_p50: 9.0,
        step_ms_p99: 12.0,
        gpu_calls: Some(GpuCalls { works: 501, launches: 9, waits: 12 }),
        model_file: None,
    };
    let text = summary(&report, &inspection(), 60.0, 320.0, Some(&scaled().figures), "runs/x");
    for words in [
        "2.300 -> 0.100 nats (training)",
        "0.120, 97.1 % classified right",
        "320 images/s",
        "1 step skipped",
        "501 kernels, products and copies of a step in 9 calls of the driver; 12 waits",
        SLOWEST,
    ] {
        assert!(text.contains(words), "`{words}` is missing:\n{text}");
    }
    let known = Inspection { unigram_nats: Some(3.4), bigram_nats: Some(0.1), item: Item::Tokens, ..inspection() };
    let text = summary(&Finished { accuracy: None, ..report }, &known, 60.0, 2e4, None, "runs/x");
    assert!(text.contains("0.120, NOT below the bigram entropy 0.100 (unigram 3.400)"), "{text}");
    assert!(text.contains("20,000 tokens/s") && !text.contains("skipped"), "{text}");
}

#[test]
fn data_and_checkpoints_have_errors_of_their_own() {
    let failed = |code| {
        let cause = RootCause {
            rank: 1,
            server: None,
            pid: Some(42),
            cause: "why".into(),
            during: String::new(),
            code: Some(code),
            log: RankLog::default(),
            others: Vec::new(),
        };
        failure(&cause, 1).lines().next().unwrap_or_default().to_string()
    };
    assert_eq!(failed(3), "error[SY0301]: rank 1 cannot continue with the training data");
    assert_eq!(failed(6), "error[SY0601]: rank 1 refused the checkpoint");
    assert_eq!(failed(5), "error[SY0503]: rank 1 failed first");
}
