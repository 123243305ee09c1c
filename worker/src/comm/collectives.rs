//! Collectives on memory of the caller's, for all element types.
//!
//! Operations are in place and blocking, and run on the caller's thread. All ranks must call the
//! same operations in the same order; otherwise the group fails with an error that names the ranks.
//! Results are bit-identical on all ranks, and reproducible across runs with the same ranks on the
//! same hosts.

use super::{
    data_type::{DataType, Number, Reduction, after_sum, before_sum},
    error::{Cause, CommError},
    executor::{Division, Executor, Format, Parts, Prepared, Task},
    frame::{Header, Kind},
    group::Group,
    mesh::Mesh,
    op_context::{OpContext, OpError},
    operation::shard,
    plan::{Action, Algorithm, Collective, CostModel, Layout, Path, Program},
    state::Shared,
};
use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, atomic::AtomicBool},
};
use switchyard_worker_contract::{config::Transport, recorder::Operation};

/// A rank's connections to all others, and the plans it has used.
pub struct Collectives {
    executor: Executor,
    layout: Layout,
    model: CostModel,
    algorithm: Option<Algorithm>,
    plans: BTreeMap<(Collective, Algorithm), Prepared>,
    shared: Arc<Shared>,
    transport: Transport,
    attempt: u32,
    /// Operations started by all ranks.
    sequence: u32,
    /// Messages exchanged with each rank outside collectives: sent, received.
    messages: Vec<(u32, u32)>,
    last: Option<Algorithm>,
}

impl Collectives {
    /// Connects the ranks of a group. Collective: it returns when all ranks are connected.
    /// `algorithm`: use it for every operation that it can carry out with these ranks; otherwise a
    /// cost model chooses. It must be equal on all ranks.
    ///
    /// # Errors
    /// The ranks request different algorithms or transports, or a connection failed.
    pub fn connect(group: &mut Group, algorithm: Option<Algorithm>) -> Result<Collectives, CommError> {
        let shared = Arc::clone(group.shared());
        Collectives::try_connect(group, algorithm).map_err(|error| shared.setup_failed(error))
    }

    fn try_connect(group: &mut Group, algorithm: Option<Algorithm>) -> Result<Collectives, CommError> {
        let shared = Arc::clone(group.shared());
        let Mesh { peers, mailbox, layout, transport, policy, attempt } = Mesh::connect(group, algorithm)?;
        let local = if mailbox.is_some() { Path::MEMORY } else { Path::LOOPBACK };
        let messages = vec![(0, 0); peers.len()];
        let executor = Executor::new(peers, mailbox, group.rank(), (policy, false));
        group.agree("the end of the set-up of collectives", &[])?;
        Ok(Collectives {
            executor,
            layout,
            model: CostModel { local, remote: Path::NETWORK },
            algorithm,
            plans: BTreeMap::new(),
            shared,
            transport,
            attempt,
            sequence: 0,
            messages,
            last: None,
        })
    }

    /// Transport between the ranks.
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// The algorithm of the last operation; `None` before the first, and in a group of one.
    pub fn last_algorithm(&self) -> Option<Algorithm> {
        self.last
    }

    /// Elements that belong to a rank in a reduce-scatter or an all-gather of `len` elements.
    /// Multiples of 16, except that the last ranks can have fewer or none.
    pub fn shard(&self, len: usize, rank: u32) -> Range<usize> {
        shard(len, self.layout.ranks(), rank as usize)
    }

    /// Combines the values of all ranks, element by element. `data` must be equally long on all
    /// ranks.
    ///
    /// # Errors
    /// The group failed.
    pub fn all_reduce<T: Number>(&mut self, data: &mut [T], reduction: Reduction) -> Result<(), CommError> {
        before_sum(reduction, data, self.shared.world);
        self.run(Collective::AllReduce, data, reduction)?;
        after_sum(reduction, data, self.shared.world);
        Ok(())
    }

    /// Combines the values of all ranks and leaves this rank's shard, whose range it returns. The
    /// other elements of `data` are undefined afterwards.
    ///
    /// # Errors
    /// The group failed.
    pub fn reduce_scatter<T: Number>(
        &mut self,
        data: &mut [T],
        reduction: Reduction,
    ) -> Result<Range<usize>, CommError> {
        before_sum(reduction, data, self.shared.world);
        self.run(Collective::ReduceScatter, data, reduction)?;
        let mine = self.shard(data.len(), self.shared.rank);
        after_sum(reduction, &mut data[mine.clone()], self.shared.world);
        Ok(mine)
    }

    /// Completes `data` from every rank's shard.
    ///
    /// # Errors
    /// The group failed.
    pub fn all_gather<T: Number>(&mut self, data: &mut [T]) -> Result<(), CommError> {
        self.run(Collective::AllGather, data, Reduction::Sum)
    }

    /// Replaces `data` by rank `root`'s.
    ///
    /// # Errors
    /// There is no such rank, or the group failed.
    pub fn broadcast<T: Number>(&mut self, data: &mut [T], root: u32) -> Result<(), CommError> {
        self.check_rank("root", root, false)?;
        self.run(Collective::Broadcast { root: root as usize }, data, Reduction::Sum)
    }

    /// Divides `data` into equal blocks, one per rank, and exchanges them: block `i` goes to rank
    /// `i`, and is replaced by this rank's block of rank `i`.
    ///
    /// # Errors
    /// The length is not a multiple of the number of ranks, or the group failed.
    pub fn all_to_all<T: Number>(&mut self, data: &mut [T]) -> Result<(), CommError> {
        let ranks = self.layout.ranks();
        if !data.len().is_multiple_of(ranks) {
            let got = format!("{} elements", data.len());
            return Err(CommError::Argument { name: "all-to-all", got, expected: format!("a multiple of {ranks}") });
        }
        self.run(Collective::AllToAll, data, Reduction::Sum)
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// The group failed.
    pub fn barrier(&mut self) -> Result<(), CommError> {
        self.run(Collective::AllReduce, &mut [0u8], Reduction::Max)
    }

    /// Sends `data` to a rank that receives equally many elements of this type.
    ///
    /// # Errors
    /// There is no other rank of this number, or the group failed.
    pub fn send<T: Number>(&mut self, data: &[T], to: u32) -> Result<(), CommError> {
        self.check_rank("receiver", to, true)?;
        self.messages[to as usize].0 += 1;
        let sequence = self.messages[to as usize].0;
        let mut program = Program::new(1);
        program.send(to as usize, 0);
        self.execute(&Prepared::new(program, None), Call::message::<T>(), sequence, &mut data.to_vec())
    }

    /// Receives `data` from a rank that sends equally many elements of this type.
    ///
    /// # Errors
    /// There is no other rank of this number, or the group failed.
    pub fn receive<T: Number>(&mut self, data: &mut [T], from: u32) -> Result<(), CommError> {
        self.check_rank("sender", from, true)?;
        self.messages[from as usize].1 += 1;
        let sequence = self.messages[from as usize].1;
        let mut program = Program::new(1);
        program.receive(from as usize, 0, Action::Copy);
        self.execute(&Prepared::new(program, None), Call::message::<T>(), sequence, data)
    }

    /// Sends the first half of `data` to a rank and receives the second half from it, which does
    /// the same.
    ///
    /// # Errors
    /// There is no other rank of this number, the length is odd, or the group failed.
    pub fn exchange<T: Number>(&mut self, data: &mut [T], with: u32) -> Result<(), CommError> {
        self.check_rank("partner", with, true)?;
        if !data.len().is_multiple_of(2) {
            let got = format!("{} elements", data.len());
            return Err(CommError::Argument { name: "exchange", got, expected: "two halves".to_owned() });
        }
        let (sent, received) = &mut self.messages[with as usize];
        (*sent, *received) = (sent.wrapping_add(1), received.wrapping_add(1));
        // Both have counted the same messages, in opposite directions.
        let sequence = sent.wrapping_add(*received);
        let mut program = Program::new(2);
        program.send(with as usize, 0);
        program.receive(with as usize, 1, Action::Copy);
        self.execute(&Prepared::new(program, None), Call::message::<T>(), sequence, data)
    }

    fn check_rank(&self, name: &'static str, rank: u32, other: bool) -> Result<(), CommError> {
        if rank < self.shared.world && !(other && rank == self.shared.rank) {
            return Ok(());
        }
        let but = if other { format!(", other than {}", self.shared.rank) } else { String::new() };
        let expected = format!("a rank below {}{but}", self.shared.world);
        Err(CommError::Argument { name, got: rank.to_string(), expected })
    }

    fn run<T: Number>(
        &mut self,
        collective: Collective,
        data: &mut [T],
        reduction: Reduction,
    ) -> Result<(), CommError> {
        self.shared.check()?;
        self.sequence = self.sequence.wrapping_add(1);
        if self.layout.ranks() < 2 {
            return Ok(());
        }
        let algorithm = self.choose(collective, size_of_val(data));
        self.last = Some(algorithm);
        let key = (collective, algorithm);
        let plan = match self.plans.remove(&key) {
            Some(plan) => plan,
            None => {
                let (n, p) = (self.layout.ranks(), self.layout.rank);
                let program = algorithm.program(&self.layout, collective);
                let program = program.expect("invariant: the chosen algorithm has a plan");
                Prepared::new(program, Some(((p + 1) % n, (p + n - 1) % n)))
            }
        };
        let call = Call { collective: Some(collective), data_type: T::DATA_TYPE, reduction, algorithm };
        let result = self.execute(&plan, call, self.sequence, data);
        self.plans.insert(key, plan);
        result
    }

    /// The same on all ranks, because they agree on the figures and on the length.
    fn choose(&self, collective: Collective, bytes: usize) -> Algorithm {
        let forced = self.algorithm.filter(|algorithm| algorithm.program(&self.layout, collective).is_some());
        let chosen = forced.or_else(|| self.model.choose(&self.layout, collective, bytes, |_| true));
        chosen.expect("invariant: every collective has an algorithm for any ranks")
    }

    fn execute<T: Number>(
        &mut self,
        plan: &Prepared,
        call: Call,
        sequence: u32,
        data: &mut [T],
    ) -> Result<(), CommError> {
        let shared = Arc::clone(&self.shared);
        let (me, bytes) = (shared.rank, size_of_val(data));
        let header =
            Header { kind: Kind::Operation, attempt: self.attempt, tag: call.tag(), sequence, length: bytes as u64 };
        let mismatch = |rank: u32, theirs: &Header| {
            let (theirs, mine) = (describe(theirs), describe(&header));
            Cause::failed(rank, format!("ranks are out of step: rank {rank} started {theirs}, rank {me} {mine}"))
        };
        let task = Task {
            header,
            mismatch: &mismatch,
            parts: Parts {
                buckets: &[(0, data.len())],
                chunks: plan.chunks(),
                division: match call.collective {
                    None | Some(Collective::AllToAll) => Division::Equal,
                    Some(_) => Division::CacheLines,
                },
            },
            format: Format::Plain(call.data_type, call.reduction),
        };
        let progress = shared.progress(0);
        progress.begin(sequence, bytes as u64);
        let caller_parked = AtomicBool::new(false);
        let ctx =
            OpContext { shared: &shared, progress, wire_scale: None, background: false, caller_parked: &caller_parked };
        let outcome = shared.record_wait(Operation::Reduce, sequence, || {
            self.executor.run(plan, &task, bytemuck::cast_slice_mut(data), &ctx)
        });
        match outcome {
            Ok(_) => {
                progress.end();
                return Ok(());
            }
            Err(OpError::GroupFailed) => {}
            Err(OpError::LaneLost(cause)) => shared.suspect(cause),
            Err(OpError::Known(cause)) => shared.abort(cause),
        }
        Err(shared.root_cause())
    }
}

/// What a rank started, as far as headers carry it.
#[derive(Debug, Clone, Copy)]
struct Call {
    /// `None`: a message between two ranks.
    collective: Option<Collective>,
    data_type: DataType,
    reduction: Reduction,
    algorithm: Algorithm,
}

const NAMES: [&str; 6] = ["message", "all-reduce", "reduce-scatter", "all-gather", "broadcast", "all-to-all"];

impl Call {
    fn message<T: Number>() -> Call {
        let (reduction, algorithm) = (Reduction::Sum, Algorithm::Pairwise);
        Call { collective: None, data_type: T::DATA_TYPE, reduction, algorithm }
    }

    /// From bit 0: collective, type, reduction, algorithm (4 bits each), root (16 bits).
    fn tag(self) -> u32 {
        let (number, root) = match self.collective {
            None => (0, 0),
            Some(Collective::AllReduce) => (1, 0),
            Some(Collective::ReduceScatter) => (2, 0),
            Some(Collective::AllGather) => (3, 0),
            Some(Collective::Broadcast { root }) => (4, root as u32),
            Some(Collective::AllToAll) => (5, 0),
        };
        number
            | (self.data_type as u32) << 4
            | (self.reduction as u32) << 8
            | (self.algorithm as u32) << 12
            | root << 16
    }
}

/// An operation as one rank started it.
fn describe(header: &Header) -> String {
    let field = |shift: u32| (header.tag >> shift & 15) as usize;
    let (Some(name), Some(data_type), Some(reduction), Some(algorithm)) =
        (NAMES.get(field(0)), DataType::ALL.get(field(4)), Reduction::ALL.get(field(8)), Algorithm::ALL.get(field(12)))
    else {
        return format!("operation {} of an unknown kind", header.sequence);
    };
    let mut text = format!(
        "{name} {} of {} {} values",
        header.sequence,
        header.length / data_type.size() as u64,
        data_type.name()
    );
    match field(0) {
        1 | 2 => text += &format!(" ({}, {algorithm})", reduction.name()),
        4 => text += &format!(" from rank {} ({algorithm})", header.tag >> 16),
        _ => {}
    }
    text
}
