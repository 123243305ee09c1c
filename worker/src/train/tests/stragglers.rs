//! A complete run reports a rank that is slower than the others. The test sets the time of each
//! rank, so the machine does not matter.

use super::altered_engine::{AlteredEngine, on_two_ranks, plain};
use crate::model::Registry;
use crate::recorder::{Identity, Recorder};
use crate::train::run::{Reporter, RunOptions, train};
use crate::train::watchdog::Watch;
use crate::train::{Blueprint, StepReport, open};
use std::path::PathBuf;
use std::sync::atomic::AtomicI32;
use std::time::Duration;
use switchyard_worker_contract::config::{EngineConfig, Length};
use switchyard_worker_contract::event::{Event, Slowest};

/// Sets 16 ms times `factor` for reading and computing; the other times are waits for other ranks,
/// or not part of a step.
fn set_times(report: &mut StepReport, factor: u32) {
    let ms = |ms: u64| Duration::from_millis(ms);
    *report = StepReport {
        total: ms(500),
        input_wait: ms(2) * factor,
        forward: ms(4) * factor,
        backward: ms(9) * factor + ms(40),
        backward_wait: ms(40),
        communication_wait: ms(100) / factor,
        optimizer: ms(1) * factor,
        checkpoint: ms(7),
        reduce: ms(60),
        read: ms(80),
        ..*report
    };
}

#[test]
fn a_rank_that_needs_twice_the_time_is_a_straggler() {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/comm");
    let config = EngineConfig {
        batch_size_per_process: 1,
        length: Length::Steps(104),
        fetch_every_steps: 26,
        ..plain::gpt(&source, &["mod.rs"])
    };
    let folder = tempfile::tempdir().unwrap();
    let outputs = on_two_ranks(|group| {
        let stop = AtomicI32::new(0);
        let options = RunOptions { run_dir: folder.path(), fault: None, stop: &stop, on_alarm: None };
        let blueprint = Blueprint::new(&config, open(&config).unwrap(), (2, 0), None, &Registry::new()).unwrap();
        let watch = Watch::new(Recorder::private(Identity { rank: group.rank(), world: 2, attempt: 1 }));
        let alter: fn(&mut StepReport) =
            if group.rank() == 0 { |report| set_times(report, 1) } else { |report| set_times(report, 2) };
        let mut out = Vec::new();
        let wrap = |engine| Box::new(AlteredEngine::new(engine, false, alter)) as _;
        train(blueprint, &group, &watch, &options, &mut Reporter::new(&mut out), |_| {}, wrap).unwrap();
        String::from_utf8(out).unwrap()
    });
    let slowest = |rank: usize| -> Vec<Option<Slowest>> {
        let events = outputs[rank].lines().map(|line| serde_json::from_str(line).unwrap());
        events
            .filter_map(|event| if let Event::Progress(progress) = event { Some(progress.slowest) } else { None })
            .collect()
    };
    assert_eq!(slowest(1), [None; 4], "only rank 0 reports it");
    let seen: Vec<Slowest> = slowest(0).into_iter().map(Option::unwrap).collect();
    assert!(seen.iter().all(|slowest| (slowest.rank, slowest.node_rank) == (1, 0)), "{seen:?}");
    assert!(seen.iter().all(|slowest| (slowest.over_percent - 100.0).abs() < 1e-3), "{seen:?}");
    let stragglers: Vec<(u64, bool)> = seen.iter().map(|slowest| (slowest.steps, slowest.is_straggler())).collect();
    assert_eq!(stragglers, [(25, false), (51, false), (77, false), (100, true)]);
}
