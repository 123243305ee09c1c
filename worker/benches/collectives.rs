//! Time and bandwidth of every collective between processes of this host, in the columns of
//! nccl-tests.
//!
//! `cargo bench -p switchyard-worker --bench collectives -- [--ranks N] [--hosts H] [--transport
//! auto|shm|tcp] [--op NAME] [--type NAME] [--redop NAME] [--algorithm NAME] [--min BYTES] [--max
//! BYTES]`
//!
//! `--hosts H` places the ranks on H pretended hosts, which talk over TCP. Without `--op` all
//! operations are measured. `time` is the mean of the slowest rank; `algbw` is size / time; `busbw`
//! is the rate per link that a hardware limit caps, whatever the number of ranks. `#wrong` counts
//! wrong elements on all ranks. Sizes of an all-gather and a reduce-scatter are those of the whole
//! buffer.

use half::{bf16, f16};
use std::{
    io::Write,
    process::{Command, ExitCode},
    time::{Duration, Instant},
};
use switchyard_worker::comm::{Algorithm, Collectives, CommError, Force, Group, GroupConfig, Number, Reduction, Token};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const OPERATIONS: [&str; 6] = ["all-reduce", "reduce-scatter", "all-gather", "broadcast", "all-to-all", "send-receive"];
const TYPES: [&str; 6] = ["f32", "f16", "bf16", "i32", "i64", "u8"];
const WARM_UPS: usize = 3;
/// Time for a size, and bounds on its number of calls.
const TIME: Duration = Duration::from_millis(200);
const MOST_CALLS: usize = 2000;
const FEWEST_CALLS: usize = 5;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let outcome = Settings::parse(&args).and_then(|settings| match std::env::var("BENCH_RANK") {
        Ok(rank) => run_rank(&settings, rank.parse()?),
        Err(_) => launch(&settings, &args),
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("collectives: {error}");
            ExitCode::FAILURE
        }
    }
}

struct Settings {
    ranks: u32,
    hosts: u32,
    transport: Force,
    operations: Vec<String>,
    data_type: String,
    reduction: Reduction,
    algorithm: Option<Algorithm>,
    min: usize,
    max: usize,
}

impl Settings {
    fn parse(args: &[String]) -> Outcome<Settings> {
        let mut settings = Settings {
            ranks: 2,
            hosts: 1,
            transport: Force::Auto,
            operations: OPERATIONS.map(str::to_owned).to_vec(),
            data_type: "f32".to_owned(),
            reduction: Reduction::Sum,
            algorithm: None,
            min: 8,
            max: 64 << 20,
        };
        let mut rest = args.iter();
        while let Some(arg) = rest.next() {
            let value = rest.next().ok_or_else(|| format!("{arg} needs a value"))?;
            let expected = |list: &[&str]| format!("{arg}: got {value:?}, expected one of {}", list.join(", "));
            match arg.as_str() {
                "--ranks" => settings.ranks = value.parse()?,
                "--hosts" => settings.hosts = value.parse()?,
                "--min" => settings.min = value.parse()?,
                "--max" => settings.max = value.parse()?,
                "--algorithm" => settings.algorithm = Some(value.parse()?),
                "--op" if OPERATIONS.contains(&value.as_str()) => settings.operations = vec![value.clone()],
                "--op" => return Err(expected(&OPERATIONS).into()),
                "--type" if TYPES.contains(&value.as_str()) => settings.data_type.clone_from(value),
                "--type" => return Err(expected(&TYPES).into()),
                "--redop" => {
                    let found = Reduction::ALL.into_iter().find(|reduction| reduction.name() == value);
                    settings.reduction = found.ok_or_else(|| expected(&Reduction::ALL.map(Reduction::name)))?;
                }
                "--transport" => {
                    let all = [Force::Auto, Force::Shm, Force::Tcp];
                    let found = all.into_iter().find(|force| force.word() == value);
                    settings.transport = found.ok_or_else(|| expected(&all.map(Force::word)))?;
                }
                other => return Err(format!("got {other:?}, expected an option of this bench").into()),
            }
        }
        if settings.hosts == 0 || settings.ranks < settings.hosts || settings.min == 0 {
            return Err("--ranks, --hosts, --min: expected at least 1, and a rank per host".into());
        }
        Ok(settings)
    }
}

fn launch(settings: &Settings, args: &[String]) -> Outcome<()> {
    let mut key = tempfile::NamedTempFile::new()?;
    let mut token = [0; 32];
    getrandom::fill(&mut token)?;
    key.write_all(&token)?;
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let program = std::env::current_exe()?;
    let start = |rank: u32| {
        Command::new(&program)
            .args(args)
            .env("BENCH_RANK", rank.to_string())
            .env("BENCH_PORT", port.to_string())
            .env("BENCH_KEY", key.path())
            .spawn()
    };
    let children = (0..settings.ranks).map(start).collect::<Result<Vec<_>, _>>()?;
    let mut failed = false;
    for mut child in children {
        failed |= !child.wait()?.success();
    }
    if failed { Err("a rank failed".into()) } else { Ok(()) }
}

fn run_rank(settings: &Settings, rank: u32) -> Outcome<()> {
    let config = GroupConfig {
        job: "bench".to_owned(),
        attempt: 1,
        node_rank: rank,
        num_nodes: settings.ranks,
        procs_per_node: 1,
        local_rank: 0,
        servers: 0,
        server: None,
        rendezvous: format!("127.0.0.1:{}", std::env::var("BENCH_PORT")?),
        key: Token::from_file(std::env::var("BENCH_KEY")?.as_ref())?,
        transport: settings.transport,
        host_id: if settings.hosts > 1 { format!("host-{}", rank % settings.hosts) } else { String::new() },
        peer_timeout: Duration::from_secs(10),
        connect_timeout: Duration::from_secs(20),
    };
    let mut group = Group::join(&config)?;
    let mut comm = Collectives::connect(&mut group, settings.algorithm)?;
    if rank == 0 {
        let Settings { ranks, hosts, .. } = settings;
        println!("# {ranks} ranks on {hosts} hosts, in place");
        println!(
            "# {:>10} {:>10} {:>5} {:>6} {:>12} {:>10} {:>10} {:>7}  {:<15} {:<12} algorithm",
            "size(B)",
            "count",
            "type",
            "redop",
            "time(us)",
            "algbw GB/s",
            "busbw GB/s",
            "#wrong",
            "operation",
            "transport"
        );
    }
    for operation in &settings.operations {
        let mut bytes = settings.min;
        let mut buses = Vec::new();
        while bytes <= settings.max {
            let mut bench = Bench { comm: &mut comm, rank, settings, operation };
            let bus = match settings.data_type.as_str() {
                "f16" => bench.size(bytes, |x| f16::from_f32(x as f32))?,
                "bf16" => bench.size(bytes, |x| bf16::from_f32(x as f32))?,
                "i32" => bench.size(bytes, i32::from)?,
                "i64" => bench.size(bytes, i64::from)?,
                "u8" => bench.size(bytes, |x| x)?,
                _ => bench.size(bytes, f32::from)?,
            };
            buses.push(bus);
            bytes *= 8;
        }
        if rank == 0 && !buses.is_empty() {
            println!("# Avg bus bandwidth of {operation}: {:.2} GB/s", buses.iter().sum::<f64>() / buses.len() as f64);
        }
    }
    group.leave()?;
    Ok(())
}

struct Bench<'a> {
    comm: &'a mut Collectives,
    rank: u32,
    settings: &'a Settings,
    operation: &'a str,
}

/// A small integer, so that results are exact in every type.
fn number(rank: u32, i: usize) -> u8 {
    ((i as u32).wrapping_mul(7).wrapping_add(rank * 3) % 5) as u8
}

impl Bench<'_> {
    /// Measures one size and prints its row; returns the bus bandwidth in GB/s.
    fn size<T: Number + PartialEq>(&mut self, bytes: usize, of: impl Fn(u8) -> T) -> Outcome<f64> {
        let ranks = self.settings.ranks as usize;
        let mut count = (bytes / size_of::<T>()).max(1);
        if self.operation == "all-to-all" {
            count = count.next_multiple_of(ranks);
        }
        let bytes = count * size_of::<T>();
        let mut data: Vec<T> = (0..count).map(|i| of(number(self.rank, i))).collect();
        self.call(&mut data)?;
        let algorithm = self.comm.last_algorithm().filter(|_| self.operation != "send-receive");
        let algorithm = algorithm.map_or("-", Algorithm::name);
        let wrong = self.wrong(&data, &of);
        // The sums of later calls grow; their time does not depend on the values.
        for _ in 0..WARM_UPS {
            data.fill(of(1));
            self.call(&mut data)?;
        }
        let one = self.slowest(|bench| bench.call(&mut data))?;
        let calls = ((TIME.as_secs_f64() / one.max(1e-9)) as usize).clamp(FEWEST_CALLS, MOST_CALLS);
        data.fill(of(1));
        let time = self.slowest(|bench| (0..calls).try_for_each(|_| bench.call(&mut data)))? / calls as f64;
        let mut totals = [wrong as i64];
        self.comm.all_reduce(&mut totals, Reduction::Sum)?;
        let share = (ranks as f64 - 1.0) / ranks as f64;
        let factor = match self.operation {
            "all-reduce" => 2.0 * share,
            "reduce-scatter" | "all-gather" | "all-to-all" => share,
            _ => 1.0,
        };
        let rate = bytes as f64 / time / 1e9;
        let reduces = matches!(self.operation, "all-reduce" | "reduce-scatter");
        if self.rank == 0 {
            println!(
                "  {bytes:>10} {count:>10} {:>5} {:>6} {:>12.2} {rate:>10.3} {:>10.3} {:>7}  {:<15} {:<12} {algorithm}",
                T::DATA_TYPE.name(),
                if reduces { self.settings.reduction.name() } else { "none" },
                time * 1e6,
                rate * factor,
                totals[0],
                self.operation,
                self.comm.transport().word(),
            );
        }
        Ok(rate * factor)
    }

    fn call<T: Number>(&mut self, data: &mut [T]) -> Result<(), CommError> {
        let (ranks, reduction) = (self.settings.ranks, self.settings.reduction);
        match self.operation {
            "all-reduce" => self.comm.all_reduce(data, reduction),
            "reduce-scatter" => self.comm.reduce_scatter(data, reduction).map(drop),
            "all-gather" => self.comm.all_gather(data),
            "broadcast" => self.comm.broadcast(data, 0),
            "all-to-all" => self.comm.all_to_all(data),
            // From rank 0 to the last one.
            _ if ranks == 1 => Ok(()),
            _ if self.rank == 0 => self.comm.send(data, ranks - 1),
            _ if self.rank == ranks - 1 => self.comm.receive(data, 0),
            _ => Ok(()),
        }
    }

    /// Seconds of the slowest rank, after a barrier.
    fn slowest(&mut self, body: impl FnOnce(&mut Self) -> Result<(), CommError>) -> Result<f64, CommError> {
        self.comm.barrier()?;
        let start = Instant::now();
        body(self)?;
        let mut time = [start.elapsed().as_secs_f64() as f32];
        self.comm.all_reduce(&mut time, Reduction::Max)?;
        Ok(time[0].into())
    }

    /// Elements that differ from the expected result of the first call.
    fn wrong<T: Number + PartialEq>(&self, data: &[T], of: &impl Fn(u8) -> T) -> usize {
        let (ranks, rank) = (self.settings.ranks, self.rank);
        let numbers = |i: usize| (0..ranks).map(move |rank| number(rank, i));
        let expected = |i: usize| match (self.operation, self.settings.reduction) {
            ("all-reduce" | "reduce-scatter", Reduction::Sum) => Some(of(numbers(i).sum())),
            ("all-reduce" | "reduce-scatter", Reduction::Min) => numbers(i).min().map(of),
            ("all-reduce" | "reduce-scatter", Reduction::Max) => numbers(i).max().map(of),
            // Not exact in every type; the sum checks the same path.
            ("all-reduce" | "reduce-scatter", Reduction::Average) => None,
            ("all-gather", _) => (0..ranks)
                .find(|owner| self.comm.shard(data.len(), *owner).contains(&i))
                .map(|owner| of(number(owner, i))),
            ("all-to-all", _) => {
                let block = data.len() / ranks as usize;
                let (from, offset) = ((i / block) as u32, i % block);
                Some(of(number(from, rank as usize * block + offset)))
            }
            ("broadcast", _) => Some(of(number(0, i))),
            _ => (rank == ranks - 1).then(|| of(number(0, i))),
        };
        let checked =
            if self.operation == "reduce-scatter" { self.comm.shard(data.len(), rank) } else { 0..data.len() };
        checked.filter(|i| expected(*i).is_some_and(|expected| data[*i] != expected)).count()
    }
}
