//! Compares training steps with PyTorch's on the same cores, in alternating rounds: `cargo bench -p
//! switchyard-worker --bench engine -- [CASE...] [--threads N] [--json FILE] [--python PATH]`.
//!
//! Both sides start from the same weights and use the same batches; the losses of their first steps
//! are compared. Each round then runs steps of our engine, of stock PyTorch, and of tuned PyTorch
//! (fused optimizer, channels_last). The PyTorch peers are processes that stay alive through all
//! rounds and sleep in between. A side's time is the median over rounds of the fastest step in
//! each. On a busy machine, compare the CPU time of a single thread, which excludes waiting.

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

pub type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Steps whose losses are compared.
const COMPARED: usize = 20;

#[derive(Parser)]
struct Options {
    /// Cases to run [default: all].
    #[arg(value_parser = clap::builder::PossibleValuesParser::new(Case::NAMES))]
    cases: Vec<String>,
    /// Compute threads [default: 1, then 2].
    #[arg(long)]
    threads: Vec<usize>,
    /// Only FP32 or BF16.
    #[arg(long, value_parser = ["f32", "bf16"])]
    precision: Vec<String>,
    /// Number of alternating rounds.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Steps of each side per round.
    #[arg(long, default_value_t = 5)]
    steps: usize,
    /// Where to write the results.
    #[arg(long)]
    json: Option<PathBuf>,
    /// A Python with torch, numpy and safetensors; without it only our side runs.
    #[arg(long, env = "SWITCHYARD_TORCH_PYTHON")]
    python: Option<PathBuf>,
    /// Limit both sides to AVX2, as on machines without AVX-512.
    #[arg(long)]
    avx2: bool,
    /// Print our side's time per kind of layer.
    #[arg(long)]
    profile: bool,
    /// Compare our steps with and without recomputed blocks.
    #[arg(long)]
    recompute: bool,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

fn selected<T: Clone + PartialEq>(requested: &[T], all: &[T]) -> Vec<T> {
    if requested.is_empty() { all.to_vec() } else { all.iter().filter(|x| requested.contains(x)).cloned().collect() }
}

fn run(options: &Options) -> Outcome<()> {
    let kernels = Kernels::of(options.avx2)?;
    let machine = machine::Machine::probe(kernels);
    println!("{machine}");
    let folder = tempfile::tempdir()?;
    let mut rows = Vec::new();
    let names = Case::NAMES.map(str::to_owned);
    let threads = if options.threads.is_empty() { vec![1, 2] } else { options.threads.clone() };
    for name in selected(&options.cases, &names) {
        let case = Case::named(&name);
        for precision in selected(&options.precision, &["f32".to_owned(), "bf16".to_owned()]) {
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
    if options.recompute {
        compare_recomputation(&mut ours, Ours::recomputing(case, format, threads, kernels)?, options);
    }
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

fn compare_recomputation(kept: &mut Ours, mut again: Ours, options: &Options) {
    let mut sides = ["kept", "recomputed"].map(Side::new);
    for _ in 0..options.rounds {
        sides[0].add(&kept.steps(options.steps));
        sides[1].add(&again.steps(options.steps));
    }
    let [[before, after], [less, more]] =
        [sides.each_ref().map(Side::time), [again.memory(), kept.memory()].map(|memory| memory.activations as f64)];
    let noise = sides.each_ref().map(|side| 100.0 * side.spread());
    println!(
        "recomputed blocks: step {:.2} x ({after:.1} of {before:.1} ms, spread {:.0} and {:.0} %), activations {:.2} x \
         ({:.1} of {:.1} MiB)",
        after / before,
        noise[1],
        noise[0],
        less / more,
        less / 1048576.0,
        more / 1048576.0,
    );
}

fn main() {
    if let Err(error) = run(&Options::parse()) {
        eprintln!("engine benchmark: {error}");
        std::process::exit(1);
    }
}
