//! An engine whose outcomes a test changes: told only when the next step has begun, as a device does, or with other times.

use super::engine::{AddSpan, Array, Counters, Engine, Given, Measure, Reductions, Told};
use super::{StepReport, TrainError};
use crate::comm::{Force, GroupConfig, Token};
use crate::data::{Batch, Prefetcher};
use crate::nn::{Layout, LossSums};
use std::net::TcpListener;
use std::time::Duration;

#[path = "../../tests/plain/mod.rs"]
pub(super) mod plain;

pub(super) struct Altered {
    engine: Box<dyn Engine>,
    late: bool,
    held: Option<Result<Told, TrainError>>,
    alter: fn(&mut StepReport),
}

impl Altered {
    /// `late`: outcomes are told one step late. `alter`: what becomes of each report.
    pub fn new(engine: Box<dyn Engine>, late: bool, alter: fn(&mut StepReport)) -> Altered {
        Altered { engine, late, held: None, alter }
    }
}

impl Engine for Altered {
    fn step(&mut self, reader: &mut Prefetcher, given: &Given) -> Result<Option<Told>, TrainError> {
        let mut told = self.engine.step(reader, given).transpose();
        if let Some(Ok(told)) = &mut told {
            (self.alter)(&mut told.report);
        }
        if self.late { std::mem::replace(&mut self.held, told).transpose() } else { told.transpose() }
    }

    fn drain(&mut self) -> Result<Option<Told>, TrainError> {
        self.held.take().transpose()
    }

    fn evaluate(&mut self, batch: &Batch) -> Result<LossSums, TrainError> {
        self.engine.evaluate(batch)
    }

    fn layout(&self) -> &Layout {
        self.engine.layout()
    }

    fn statistics(&self) -> Vec<(String, usize)> {
        self.engine.statistics()
    }

    fn moments(&self) -> Vec<&'static str> {
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

/// Calls `body` on a thread for each of two ranks of a node.
pub(super) fn on_two_ranks<T: Send>(body: impl Fn(GroupConfig) -> T + Sync) -> Vec<T> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let group = |local_rank| GroupConfig {
        job: "altered".into(),
        attempt: 1,
        node_rank: 0,
        num_nodes: 1,
        procs_per_node: 2,
        local_rank,
        rendezvous: format!("127.0.0.1:{port}"),
        key: Token::new([9; 32]),
        transport: Force::Auto,
        host_id: String::new(),
        peer_timeout: Duration::from_secs(30),
        connect_timeout: Duration::from_secs(60),
    };
    std::thread::scope(|scope| {
        let body = &body;
        let ranks = [0, 1].map(|rank| scope.spawn(move || body(group(rank))));
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}
