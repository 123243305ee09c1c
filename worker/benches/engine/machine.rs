//! Describes the machine, and checks whether it is quiet enough for timing.

use serde_json::{Value, json};
use std::fmt;
use std::hint::black_box;
use std::time::Instant;
use switchyard_worker::cpu::{HalfKernel, Isa, IsaError, Pool};

/// Samples of the spin loop.
const SPINS: usize = 200;
/// Above this spread, other work is using the cores.
const QUIET: f64 = 0.05;

/// Kernels that our side uses.
#[derive(Debug, Clone, Copy)]
pub struct Kernels {
    pub isa: Isa,
    pub half: HalfKernel,
}

impl Kernels {
    /// The fastest kernels; with `avx2`, the fastest without AVX-512.
    pub fn of(avx2: bool) -> Result<Kernels, IsaError> {
        match avx2 {
            true => Ok(Kernels { isa: Isa::detect(Some(Isa::Avx2.name()))?, half: HalfKernel::F32 }),
            false => Ok(Kernels { isa: Isa::fastest(), half: HalfKernel::probe() }),
        }
    }
}

pub struct Machine {
    kernels: Kernels,
    cpu: String,
    cores: usize,
    load: Option<f64>,
    /// Mean over best time of a fixed loop on all cores, minus 1.
    spread: f64,
}

impl Machine {
    pub fn probe(kernels: Kernels) -> Machine {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let field = |name: &str| {
            let line = info.lines().find(|line| line.split(':').next().is_some_and(|key| key.trim() == name));
            line.and_then(|line| line.split(':').nth(1)).map_or("unknown", str::trim).to_owned()
        };
        let cpu = format!("{} (family {}, model {})", field("model name"), field("cpu family"), field("model"));
        let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Machine {
            kernels,
            cpu,
            cores,
            load: load.split(' ').next().and_then(|word| word.parse().ok()),
            spread: spread(cores),
        }
    }

    /// Whether the CPU has faster kernels.
    pub fn is_limited(&self) -> bool {
        self.kernels.isa != Isa::fastest()
    }

    fn quiet(&self) -> bool {
        self.spread < QUIET
    }

    pub fn noise(&self) -> String {
        let load = self.load.map_or("unknown".to_owned(), |load| format!("{load:.2}"));
        let spread = 100.0 * self.spread;
        let verdict = if self.quiet() { "" } else { ": NOT QUIET, other work takes the cores; ratios are rough" };
        format!(
            "load {load}; a fixed loop on all {} cores takes {spread:.1} % longer than at best{verdict}",
            self.cores
        )
    }

    pub fn json(&self) -> Value {
        json!({
            "cpu": self.cpu, "cores": self.cores, "load": self.load, "spreadOfSpinLoop": self.spread,
            "quiet": self.quiet(), "kernel": self.kernels.isa.name(), "half": self.kernels.half.name(),
            "probe": HalfKernel::report().iter().map(|probed| json!({
                "half": probed.kernel.name(), "gigaflopsPerSecond": probed.gigaflops, "correct": probed.correct,
            })).collect::<Vec<_>>(),
        })
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}; kernel {}; bf16 by {}", self.cpu, self.kernels.isa.name(), self.kernels.half.name())?;
        for probed in HalfKernel::report() {
            writeln!(f, "probe: bf16 by {:10} {:6.1} GFLOP/s", probed.kernel.name(), probed.gigaflops)?;
        }
        f.write_str(&self.noise())
    }
}

/// Runs one CPU-bound task of about a millisecond per core; returns its mean over its best time,
/// minus 1.
fn spread(cores: usize) -> f64 {
    let pool = Pool::new(cores);
    let times: Vec<f64> = (0..SPINS)
        .map(|_| {
            let start = Instant::now();
            pool.run(cores, &|task, _| {
                let mut x = task as u64;
                for _ in 0..1_000_000 {
                    x = black_box(x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
                }
            });
            start.elapsed().as_secs_f64()
        })
        .collect();
    let least = times.iter().fold(f64::INFINITY, |a, &b| a.min(b));
    times.iter().sum::<f64>() / times.len() as f64 / least - 1.0
}
