//! Training steps compared with PyTorch's, on the same cores, in alternating rounds:
//! `cargo bench -p switchyard-worker --bench engine -- [CASE...] [--threads N] [--json FILE] [--python PATH]`.
//!
//! Both sides start from the same weights and see the same batches; the losses of their first steps are compared. Then
//! each round runs some steps of ours, of PyTorch as it comes, and of PyTorch tuned (fused optimizer, channels_last).
//! The peers are processes that live through all rounds and sleep between their turns. A side's time is the median over
//! the rounds of the least time of a step in each. On a machine with other work compare the CPU time of one thread,
//! which does not include waiting.

#[path = "engine/case.rs"]
mod case;
#[path = "engine/machine.rs"]
mod machine;
#[path = "engine/ours.rs"]
mod ours;
#[path = "engine/peer.rs"]
mod peer;
#[path = "engine/report.rs"]
mod report;

use case::Case;
use clap::Parser;
use machine::Kernels;
use ours::Ours;
use peer::Peer;
use report::{Row, Side};
use std::path::PathBuf;
use switchyard_worker::cpu::Format;

/// Any error.
pub type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Steps whose losses are compared.
const COMPARED: usize = 20;

#[derive(Parser)]
struct Options {
    /// Cases to run; all if none is named.
    #[arg(value_parser = clap::builder::PossibleValuesParser::new(Case::NAMES))]
    cases: Vec<String>,
    /// Compute threads; 1 and 2, one after the other, if not given.
    #[arg(long)]
    threads: Vec<usize>,
    /// FP32 or BF16 only.
    #[arg(long, value_parser = ["f32", "bf16"])]
    precision: Vec<String>,
    /// Rounds of the alternation.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Steps of each side in a round.
    #[arg(long, default_value_t = 5)]
    steps: usize,
    /// Where to write the result.
    #[arg(long)]
    json: Option<PathBuf>,
    /// A Python with torch, numpy and safetensors; without one our side runs alone.
    #[arg(long, env = "SWITCHYARD_TORCH_PYTHON")]
    python: Option<PathBuf>,
    /// Use AVX2 at most, on both sides: what machines without AVX-512 do.
    #[arg(long)]
    avx2: bool,
    /// Print where the time of our side goes, by kind of layer.
    #[arg(long)]
    profile: bool,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

fn chosen<T: Clone + PartialEq>(given: &[T], all: &[T]) -> Vec<T> {
    if given.is_empty() { all.to_vec() } else { all.iter().filter(|x| given.contains(x)).cloned().collect() }
}

fn run(options: &Options) -> Outcome<()> {
    let kernels = Kernels::of(options.avx2)?;
    let machine = machine::Machine::probe(kernels);
    println!("{machine}");
    let folder = tempfile::tempdir()?;
    let mut rows = Vec::new();
    let names = Case::NAMES.map(str::to_owned);
    let threads = if options.threads.is_empty() { vec![1, 2] } else { options.threads.clone() };
    for name in chosen(&options.cases, &names) {
        let case = Case::named(&name);
        for precision in chosen(&options.precision, &["f32".to_owned(), "bf16".to_owned()]) {
            let format = if precision == "f32" { Format::F32 } else { Format::Bf16 };
            for &threads in &threads {
                let row = measure(&case, format, threads, options, kernels, folder.path())?;
                println!("{row}");
                rows.push(row);
            }
        }
    }
    let after = machine::Machine::probe(kernels);
    println!("{}", after.noise());
    if let Some(file) = &options.json {
        report::write(file, &rows, &machine, &after, options.rounds, options.steps)?;
        println!("written: {}", file.display());
    }
    Ok(())
}

fn measure(
    case: &Case,
    format: Format,
    threads: usize,
    options: &Options,
    kernels: Kernels,
    folder: &std::path::Path,
) -> Outcome<Row> {
    let mut ours = Ours::new(case, format, threads, kernels)?;
    let mut peers = Vec::new();
    if let Some(python) = &options.python {
        let files = peer::write_inputs(folder, case, &ours)?;
        for tuned in [false, true] {
            peers.push(Peer::start(python, case, &files, format, threads, tuned, options.avx2)?);
        }
    }
    let losses = ours.losses(COMPARED);
    let theirs = peers.iter_mut().map(|peer| peer.losses(COMPARED)).collect::<Outcome<Vec<_>>>()?;
    let apart = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    let mut sides = vec![Side::new("ours")];
    sides.extend(peers.iter().map(|peer| Side::new(peer.name())));
    for _ in 0..options.rounds {
        sides[0].add(&ours.steps(options.steps));
        for (peer, side) in peers.iter_mut().zip(&mut sides[1..]) {
            side.add(&peer.steps(options.steps)?);
        }
    }
    if options.profile {
        ours.print_profile(options.steps);
    }
    Ok(Row {
        case: case.name,
        format,
        threads,
        parameters: ours.trainable(),
        sides,
        first_loss: losses[0],
        loss_difference: theirs.iter().map(|theirs| apart(&losses, theirs)).max_by(f64::total_cmp),
        torch_difference: if let [plain, tuned] = &theirs[..] { Some(apart(plain, tuned)) } else { None },
        memory: ours.memory(),
        torch: peers.first().map(|peer| peer.version.clone()),
    })
}

fn main() {
    if let Err(error) = run(&Options::parse()) {
        eprintln!("engine benchmark: {error}");
        std::process::exit(1);
    }
}
