//! Ranks of a training run as threads of a test.
#![allow(dead_code, reason = "each test binary uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a test helper may end the test")]

use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::sync::atomic::AtomicI32;
use std::time::Duration;
use switchyard_worker::comm::{Force, GroupConfig, Token};
use switchyard_worker::model::Registry;
use switchyard_worker::train::{Blueprint, Reporter, RunOptions, StepRequest, TrainError, Trainer, open, run, serve};
use switchyard_worker_contract::config::{Checkpoint, EngineConfig};
use switchyard_worker_contract::event::Event;

/// A rank's observations of a training run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct History {
    /// Loss and weights digest after every step.
    pub steps: Vec<(f64, String)>,
    /// Validation loss after every fourth step.
    pub evaluations: Vec<Option<f64>>,
}

/// Bound of every wait, which only a hang reaches.
const TIMEOUT: Duration = Duration::from_secs(600);

pub fn group(world: u32, rank: u32, port: u16) -> GroupConfig {
    GroupConfig {
        job: "training-test".into(),
        attempt: 1,
        node_rank: 0,
        num_nodes: 1,
        procs_per_node: world,
        local_rank: rank,
        servers: 0,
        server: None,
        rendezvous: format!("127.0.0.1:{port}"),
        key: Token::new([9; 32]),
        transport: Force::Auto,
        host_id: String::new(),
        peer_timeout: TIMEOUT,
        connect_timeout: TIMEOUT,
    }
}

pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

pub fn blueprint(config: &EngineConfig, world: u32) -> Result<Blueprint, TrainError> {
    Blueprint::new(config, open(config)?, (world, 0), None, &Registry::new())
}

/// Calls `body` on a thread for each rank, with its group configuration.
pub fn on_ranks<T: Send>(world: u32, body: impl Fn(GroupConfig) -> T + Sync) -> Vec<T> {
    on_members(world, None, body)
}

/// Like [`on_ranks`], with the dedicated parameter servers of a configuration.
fn on_members<T: Send>(world: u32, served: Option<&EngineConfig>, body: impl Fn(GroupConfig) -> T + Sync) -> Vec<T> {
    let port = free_port();
    std::thread::scope(|scope| {
        let body = &body;
        for server in 0..served.map_or(0, EngineConfig::dedicated_servers) {
            let group = GroupConfig { server: Some(server), ..group(world, 0, port) };
            // The ranks report a failure.
            scope.spawn(move || served.map(|config| serve(config, &group, (None, None), |_| ())));
        }
        let ranks: Vec<_> = (0..world).map(|rank| scope.spawn(move || body(group(world, rank, port)))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Bytes that this thread has read.
pub fn bytes_read() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/io").unwrap();
    text.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}

/// Trains until `steps` are done and then either leaves in order, or drops everything silently,
/// like a kill. Returns the step from which it resumed, and the observations, which are equal on
/// all ranks.
pub fn train(config: &EngineConfig, world: u32, steps: u64, leave: bool) -> Result<(Option<u64>, History), TrainError> {
    train_over(Force::Auto, config, world, steps, leave)
}

/// Like [`train`], with a transport.
pub fn train_over(
    transport: Force,
    config: &EngineConfig,
    world: u32,
    steps: u64,
    leave: bool,
) -> Result<(Option<u64>, History), TrainError> {
    let outcomes = on_members(world, Some(config), |group| {
        let group = GroupConfig { transport, ..group };
        let mut trainer = Trainer::join(blueprint(config, world)?, &group)?;
        let resumed = trainer.resumed_step();
        let mut history = History::default();
        while trainer.steps_done() < steps {
            let (report, _) = trainer.step(StepRequest::default())?;
            history.steps.push((report.loss, trainer.weights_digest()?));
            if report.step % 4 == 0 {
                history.evaluations.push(trainer.evaluate()?.map(|judgement| judgement.loss));
            }
        }
        // A rank that drops its membership ends the group, even for a rank that is behind.
        trainer.agree_on_weights()?;
        if leave {
            trainer.leave()?;
        }
        Ok((resumed, history))
    });
    // A rank that fails on its own drops its membership silently, and the others only see that it
    // is gone.
    let (mut ranks, mut errors) = (Vec::new(), Vec::new());
    for rank in outcomes {
        match rank {
            Ok(seen) => ranks.push(seen),
            Err(error) => errors.push(error),
        }
    }
    errors.sort_by_key(|error| matches!(error, TrainError::Comm(_)));
    if let Some(error) = errors.into_iter().next() {
        return Err(error);
    }
    for (rank, seen) in ranks.iter().enumerate().skip(1) {
        assert_eq!(seen, &ranks[0], "rank {rank} differs from rank 0");
    }
    Ok(ranks.swap_remove(0))
}

/// Adds checkpoints in this directory to the configuration.
pub fn saving(config: &EngineConfig, directory: &Path, every_steps: u64) -> EngineConfig {
    let path = directory.display().to_string();
    let checkpoint = Checkpoint { path, every_steps, period_seconds: 0, keep: 2, on_suspend: true };
    EngineConfig { checkpoint: Some(checkpoint), ..config.clone() }
}

/// Whole runs, as in the program; returns outcome and events of each rank. `hook` sees each event
/// as it is printed, and can send the rank a signal.
pub fn runs(
    config: &EngineConfig,
    world: u32,
    run_dir: &Path,
    hook: impl Fn(u32, &Event, &AtomicI32) + Sync,
) -> Vec<(Result<(), TrainError>, Vec<Event>)> {
    on_members(world, Some(config), |group| {
        let (stop, rank) = (AtomicI32::new(0), group.rank());
        let mut log = Log { events: Vec::new(), hook: |event: &Event| hook(rank, event, &stop) };
        let outside = RunOptions { run_dir, fault: None, stop: &stop, on_alarm: None };
        let outcome = blueprint(config, world)
            .and_then(|blueprint| run(blueprint, &group, &outside, &mut Reporter::new(&mut log), |_| {}));
        (outcome, log.events)
    })
}

/// Parses a reporter's output, one complete event at a time.
struct Log<F> {
    events: Vec<Event>,
    hook: F,
}

impl<F: FnMut(&Event)> Write for Log<F> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let event: Event = serde_json::from_slice(bytes).unwrap();
        (self.hook)(&event);
        self.events.push(event);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
