//! Sums of gradient buckets between hosts: one algorithm per bucket, chosen before the first
//! operation.
//!
//! The choice depends on the bucket's own length only, so that sums do not depend on what is
//! reduced together. A scatter runs the first half of the all-reduce, so that sharded sums have the
//! same bits; where an algorithm has no first half, it runs all of it.

use super::{
    data_type::{DataType, Reduction},
    error::CommError,
    executor::{Division, Executor, Format, Parts, Prepared, Task},
    frame::{Header, Kind},
    op_context::{OpContext, OpError},
    operation::{OpKind, Operation, Shards, StartedOp, desync},
    options::Options,
    plan::{Algorithm, Collective, CostModel, Layout},
    shm::bytes_mut,
    wire::Wire,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

/// The algorithm of each bucket, and the ranks that the plans connect.
#[derive(Debug, Clone)]
pub(super) struct Choices {
    layout: Layout,
    by_bucket: Arc<[Algorithm]>,
}

impl Choices {
    /// Chooses for each bucket, on all ranks alike.
    ///
    /// # Errors
    /// The requested algorithm cannot reduce between these ranks in this format.
    pub fn new(layout: Layout, model: CostModel, (lens, options): (&[usize], &Options)) -> Result<Choices, CommError> {
        let mut known: BTreeMap<(usize, bool), Algorithm> = BTreeMap::new();
        let by_bucket = (0..).zip(lens).map(|(bucket, &len)| {
            let wire = options.wire_of(bucket);
            let rounds = wire != Wire::F32;
            let suits = |algorithm: Algorithm| !rounds || algorithm.suits_rounding();
            if let Some(requested) = options.algorithm {
                let possible = suits(requested) && requested.program(&layout, Collective::AllReduce).is_some();
                return if possible { Ok(requested) } else { Err(impossible(requested, &layout, wire, suits)) };
            }
            if let Some(algorithm) = known.get(&(len, rounds)) {
                return Ok(*algorithm);
            }
            let chosen = model.choose(&layout, Collective::AllReduce, len * wire.size(), suits);
            let chosen = chosen.expect("invariant: a ring reduces between any ranks");
            known.insert((len, rounds), chosen);
            Ok(chosen)
        });
        let by_bucket = by_bucket.collect::<Result<Vec<_>, _>>()?.into();
        Ok(Choices { layout, by_bucket })
    }

    /// The algorithm of each bucket.
    pub fn by_bucket(&self) -> &Arc<[Algorithm]> {
        &self.by_bucket
    }

    /// Members that this rank sends to, and members that it receives from, as a neighbour or in a
    /// plan.
    pub fn peers(&self, (left, right): (usize, usize)) -> (Vec<usize>, Vec<usize>) {
        let (mut targets, mut sources) = (BTreeSet::from([right]), BTreeSet::from([left]));
        for (_, plan) in self.prepare().1 {
            let (to, from) = plan.peers();
            targets.extend(to);
            sources.extend(from);
        }
        (targets.into_iter().collect(), sources.into_iter().collect())
    }

    /// What carries out a kind of operation on a bucket.
    fn step(&self, kind: OpKind, bucket: usize) -> (Collective, Algorithm) {
        let algorithm = self.by_bucket[bucket];
        let has = |algorithm: Algorithm, collective| algorithm.program(&self.layout, collective).is_some();
        match kind {
            OpKind::Scatter if has(algorithm, Collective::ReduceScatter) => (Collective::ReduceScatter, algorithm),
            OpKind::Reduce | OpKind::Scatter => (Collective::AllReduce, algorithm),
            // Both are connected with the partners of recursive doubling anyway.
            OpKind::Gather | OpKind::PackedGather
                if matches!(algorithm, Algorithm::RecursiveDoubling | Algorithm::HalvingDoubling)
                    && has(Algorithm::RecursiveDoubling, Collective::AllGather) =>
            {
                (Collective::AllGather, Algorithm::RecursiveDoubling)
            }
            OpKind::Gather | OpKind::PackedGather => (Collective::AllGather, Algorithm::Ring),
        }
    }

    /// The steps of each kind of operation on each bucket, and a plan for each that is in use.
    fn prepare(&self) -> (Steps, Plans) {
        let (n, p) = (self.layout.ranks(), self.layout.rank);
        let steps =
            OpKind::ALL.map(|kind| (0..self.by_bucket.len()).map(|bucket| self.step(kind, bucket)).collect::<Vec<_>>());
        let used: BTreeSet<(Collective, Algorithm)> = steps.iter().flatten().copied().collect();
        let plan = |(collective, algorithm): (Collective, Algorithm)| {
            let program = algorithm.program(&self.layout, collective)?;
            Some(((collective, algorithm), Prepared::new(program, Some(((p + 1) % n, (p + n - 1) % n)))))
        };
        (steps, used.into_iter().filter_map(plan).collect())
    }
}

/// By kind, then by bucket.
type Steps = [Vec<(Collective, Algorithm)>; OpKind::ALL.len()];
type Plans = Vec<((Collective, Algorithm), Prepared)>;

fn impossible(requested: Algorithm, layout: &Layout, wire: Wire, suits: impl Fn(Algorithm) -> bool) -> CommError {
    let possible = Algorithm::ALL
        .into_iter()
        .filter(|algorithm| suits(*algorithm) && algorithm.program(layout, Collective::AllReduce).is_some());
    let names: Vec<&str> = possible.map(Algorithm::name).collect();
    let expected = format!(
        "one that all-reduces {} values between {} ranks on {} hosts: {}",
        wire.word(),
        layout.ranks(),
        layout.by_host().len(),
        names.join(", ")
    );
    CommError::Argument { name: "algorithm of communication", got: requested.name().to_owned(), expected }
}

/// One lane's connections to the leaders of other hosts.
pub(super) struct Remote {
    executor: Executor,
    steps: Steps,
    plans: Plans,
    shards: Arc<Shards>,
    options: Options,
    me: u32,
    attempt: u32,
}

impl Remote {
    pub fn new(
        executor: Executor,
        (choices, shards): (&Choices, &Arc<Shards>),
        options: Options,
        (me, attempt): (u32, u32),
    ) -> Remote {
        let (steps, plans) = choices.prepare();
        Remote { executor, steps, plans, shards: Arc::clone(shards), options, me, attempt }
    }

    /// Runs an operation on consecutive buckets; `data` begins with the first.
    /// Returns the bytes sent.
    pub fn run(
        &mut self,
        op: Operation,
        buckets: &[(usize, usize)],
        data: &mut [f32],
        ctx: &OpContext<'_>,
    ) -> Result<u64, OpError> {
        let wire = if op.kind.is_gather() { Wire::F32 } else { self.options.wire_of(op.bucket) };
        let format = match (wire, ctx.wire_scale) {
            (Wire::F32, _) | (Wire::F16, None) => Format::Plain(DataType::F32, Reduction::Sum),
            (Wire::F16, Some(scale)) => Format::Rounded { wire: Wire::F16, scale },
            (Wire::Bf16, _) => Format::Rounded { wire: Wire::Bf16, scale: 1.0 },
        };
        let (mut rest, mut bucket, mut sent) = (buckets, op.bucket as usize, 0);
        while let Some(&(start, _)) = rest.first() {
            let steps = &self.steps[op.kind as usize][bucket..];
            let step = steps[0];
            let count = rest.iter().zip(steps).take_while(|(_, other)| **other == step).count();
            let (now, later) = rest.split_at(count);
            let len = now.last().map_or(0, |(last, len)| last + len - start);
            let part = Operation { bucket: bucket as u32, start, len, ..op };
            let from = start - buckets[0].0;
            sent += self.execute(part, (step, now), format, bytes_mut(&mut data[from..from + len]), ctx)?;
            (rest, bucket) = (later, bucket + count);
        }
        Ok(sent)
    }

    fn execute(
        &mut self,
        op: Operation,
        (step, buckets): ((Collective, Algorithm), &[(usize, usize)]),
        format: Format,
        data: &mut [u8],
        ctx: &OpContext<'_>,
    ) -> Result<u64, OpError> {
        let plan = self.plans.iter().find(|(other, _)| *other == step);
        let (_, plan) = plan.expect("invariant: every step has a plan");
        let header = Header {
            kind: Kind::Operation,
            attempt: self.attempt,
            tag: op.tag(),
            sequence: op.sequence,
            length: op.len as u64 * 4,
        };
        let me = self.me;
        let mismatch = |rank: u32, theirs: &Header| {
            let theirs = StartedOp { rank, tag: theirs.tag, len: theirs.length / 4 };
            desync(&theirs, &op.started_by(me), op.sequence)
        };
        let division = match op.kind {
            OpKind::PackedGather => Division::Packed(&self.shards.packed()[op.bucket as usize..]),
            OpKind::Reduce | OpKind::Scatter | OpKind::Gather => Division::CacheLines,
        };
        let parts = Parts { buckets, chunks: plan.chunks(), division };
        self.executor.run(plan, &Task { header, mismatch: &mismatch, parts, format }, data, ctx)
    }
}
