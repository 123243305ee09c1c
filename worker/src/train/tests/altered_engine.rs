//! An engine wrapper for tests that delays outcomes until the next step has begun, as a device
//! does, or alters their reports.

use crate::comm::{Force, GroupConfig, Token};
use crate::data::{Batch, Prefetcher};
use crate::nn::{Layout, LossSums};
use crate::train::engine::{AddSpan, Array, Counters, Engine, Measure, Moment, Reductions, StepInput, StepOutcome};
use crate::train::{StepReport, TrainError};
use std::net::TcpListener;
use std::time::Duration;

#[path = "../../../tests/plain/mod.rs"]
pub(super) mod plain;

pub(super) struct AlteredEngine {
    engine: Box<dyn Engine>,
    delayed: bool,
    held: Option<Result<StepOutcome, TrainError>>,
    alter: fn(&mut StepReport),
}

impl AlteredEngine {
    /// `delayed`: outcomes are returned one step late. `alter`: applied to each report.
    pub fn new(engine: Box<dyn Engine>, delayed: bool, alter: fn(&mut StepReport)) -> AlteredEngine {
        AlteredEngine { engine, delayed, held: None, alter }
    }
}

impl Engine for AlteredEngine {
    fn step(&mut self, reader: &mut Prefetcher, input: &StepInput) -> Result<Option<StepOutcome>, TrainError> {
        let mut outcome = self.engine.step(reader, input).transpose();
        if let Some(Ok(outcome)) = &mut outcome {
            (self.alter)(&mut outcome.report);
        }
        if self.delayed { std::mem::replace(&mut self.held, outcome).transpose() } else { outcome.transpose() }
    }

    fn drain(&mut self) -> Result<Option<StepOutcome>, TrainError> {
        self.held.take().transpose()
    }

    fn await_weights(&mut self) -> Result<(), TrainError> {
        self.engine.await_weights()
    }

    fn complete_weights(&mut self) -> Result<(), TrainError> {
        self.engine.complete_weights()
    }

    fn evaluate(&mut self, batch: &Batch) -> Result<Option<LossSums>, TrainError> {
        self.engine.evaluate(batch)
    }

    fn layout(&self) -> &Layout {
        self.engine.layout()
    }

    fn statistics(&self) -> Vec<(String, usize)> {
        self.engine.statistics()
    }

    fn moments(&self) -> Vec<Moment> {
        self.engine.moments()
    }

    fn read(&self, array: Array, from: usize, into: &mut [f32]) -> Result<(), TrainError> {
        assert!(self.held.is_none(), "a step is under way");
        self.engine.read(array, from, into)
    }

    fn write(&mut self, array: Array, from: usize, numbers: &[f32]) -> Result<(), TrainError> {
        self.engine.write(array, from, numbers)
    }

    fn counters(&self) -> Counters {
        assert!(self.held.is_none(), "a step is under way");
        self.engine.counters()
    }

    fn resume(&mut self, counters: &Counters) -> Result<Option<String>, TrainError> {
        self.engine.resume(counters)
    }

    fn kernel(&self) -> String {
        self.engine.kernel()
    }

    fn reductions(&self) -> Reductions {
        self.engine.reductions()
    }

    fn reduce(&mut self, what: Measure) -> Result<(), TrainError> {
        self.engine.reduce(what)
    }

    fn record(&mut self, on: bool) {
        self.engine.record(on);
    }

    fn trace(&mut self, add: &mut AddSpan<'_>) {
        self.engine.trace(add);
    }
}

/// Runs `body` on one thread per rank, for two ranks of a node.
pub(in crate::train) fn on_two_ranks<T: Send>(body: impl Fn(GroupConfig) -> T + Sync) -> Vec<T> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let group = |local_rank| GroupConfig {
        job: "altered".into(),
        attempt: 1,
        node_rank: 0,
        num_nodes: 1,
        procs_per_node: 2,
        local_rank,
        servers: 0,
        server: None,
        rendezvous: format!("127.0.0.1:{port}"),
        key: Token::new([9; 32]),
        transport: Force::Auto,
        host_id: String::new(),
        peer_timeout: Duration::from_secs(600),
        connect_timeout: Duration::from_secs(600),
    };
    std::thread::scope(|scope| {
        let body = &body;
        let ranks = [0, 1].map(|rank| scope.spawn(move || body(group(rank))));
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}
