//! All-reduce of gradient buckets between hosts: one plan per bucket, chosen before the first
//! operation.
//!
//! The choice depends on the bucket's own length only, so that sums do not depend on what is
//! reduced together.

use super::{
    data_type::{DataType, Reduction},
    error::CommError,
    executor::{Executor, Format, Parts, Prepared, Task},
    frame::{Header, Kind},
    local::{Operation, StartedOp, desync},
    op_context::{OpContext, OpError},
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
        for (_, plan) in self.plans() {
            let (to, from) = plan.peers();
            targets.extend(to);
            sources.extend(from);
        }
        (targets.into_iter().collect(), sources.into_iter().collect())
    }

    /// A plan for each algorithm in use.
    pub fn plans(&self) -> Vec<(Algorithm, Prepared)> {
        let (n, p) = (self.layout.ranks(), self.layout.rank);
        let used: BTreeSet<Algorithm> = self.by_bucket.iter().copied().collect();
        let plan = |algorithm: Algorithm| {
            let program = algorithm.program(&self.layout, Collective::AllReduce)?;
            Some((algorithm, Prepared::new(program, Some(((p + 1) % n, (p + n - 1) % n)))))
        };
        used.into_iter().filter_map(plan).collect()
    }
}

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
    plans: Vec<(Algorithm, Prepared)>,
    by_bucket: Arc<[Algorithm]>,
    options: Options,
    me: u32,
    attempt: u32,
}

impl Remote {
    pub fn new(executor: Executor, choices: &Choices, options: Options, (me, attempt): (u32, u32)) -> Remote {
        Remote { executor, plans: choices.plans(), by_bucket: Arc::clone(&choices.by_bucket), options, me, attempt }
    }

    /// Sums `buckets`, consecutive ones of which `data` begins with the first. Returns the bytes
    /// sent.
    pub fn all_reduce(
        &mut self,
        op: Operation,
        buckets: &[(usize, usize)],
        data: &mut [f32],
        ctx: &OpContext<'_>,
    ) -> Result<u64, OpError> {
        let format = match (self.options.wire_of(op.bucket), ctx.wire_scale) {
            (Wire::F32, _) | (Wire::F16, None) => Format::Plain(DataType::F32, Reduction::Sum),
            (Wire::F16, Some(scale)) => Format::Rounded { wire: Wire::F16, scale },
            (Wire::Bf16, _) => Format::Rounded { wire: Wire::Bf16, scale: 1.0 },
        };
        let (mut rest, mut bucket, mut sent) = (buckets, op.bucket as usize, 0);
        while let Some(&(start, _)) = rest.first() {
            let algorithm = self.by_bucket[bucket];
            let count =
                rest.iter().zip(&self.by_bucket[bucket..]).take_while(|(_, other)| **other == algorithm).count();
            let (now, later) = rest.split_at(count);
            let len = now.last().map_or(0, |(last, len)| last + len - start);
            let part = Operation { bucket: bucket as u32, start, len, ..op };
            let from = start - buckets[0].0;
            sent += self.run(part, (algorithm, now), format, bytes_mut(&mut data[from..from + len]), ctx)?;
            (rest, bucket) = (later, bucket + count);
        }
        Ok(sent)
    }

    fn run(
        &mut self,
        op: Operation,
        (algorithm, buckets): (Algorithm, &[(usize, usize)]),
        format: Format,
        data: &mut [u8],
        ctx: &OpContext<'_>,
    ) -> Result<u64, OpError> {
        let plan = self.plans.iter().find(|(other, _)| *other == algorithm);
        let (_, plan) = plan.expect("invariant: every chosen algorithm has a plan");
        let header = Header {
            kind: Kind::Operation,
            attempt: self.attempt,
            tag: op.bucket,
            sequence: op.sequence,
            length: op.len as u64 * 4,
        };
        let me = self.me;
        let mismatch = |rank: u32, theirs: &Header| {
            let theirs = StartedOp { rank, bucket: theirs.tag.into(), len: theirs.length / 4 };
            let mine = StartedOp { rank: me, bucket: op.bucket.into(), len: op.len as u64 };
            desync(theirs, mine, op.sequence)
        };
        let parts = Parts { buckets, chunks: plan.chunks(), equal: false };
        self.executor.run(plan, &Task { header, mismatch: &mismatch, parts, format }, data, ctx)
    }
}
