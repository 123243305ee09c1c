//! Speed of the CPU kernels and the optimizer rules: `cargo bench -p switchyard-worker --bench
//! kernels [-- [gemm|convolution|rules] [THREADS] [--json FILE]]`.
//!
//! Prints the best time of several runs; variants and instruction sets alternate. Compare only on a
//! quiet machine.

use serde_json::{Value, json};
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;
use switchyard_worker::amp::HalfWeights;
use switchyard_worker::cpu::{
    ConvolutionShape, Cpu, Epilogue, Format, Gemm, HalfKernel, Isa, Matrix, Pool, ProbeResult, Values, ValuesMut, bf16,
};
use switchyard_worker::nn::{Initial, Layout, Role};
use switchyard_worker::optimizer::Optimizer;
use switchyard_worker_contract::config;

/// Best time of `work` for each of the alternating variants.
fn least<T>(rounds: usize, variants: &mut [T], mut work: impl FnMut(&mut T)) -> Vec<f64> {
    let mut least = vec![f64::INFINITY; variants.len()];
    for _ in 0..rounds {
        for (variant, least) in variants.iter_mut().zip(&mut least) {
            let start = Instant::now();
            work(variant);
            *least = least.min(start.elapsed().as_secs_f64());
        }
    }
    least
}

/// A matrix product variant: instruction set and storage format.
struct Variant {
    gemm: Gemm,
    cpu: Cpu,
    isa: Isa,
    half: HalfKernel,
    format: Format,
}

impl Variant {
    fn all(pool: &Arc<Pool>) -> Vec<Variant> {
        let mut ways = Vec::new();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            for half in HalfKernel::ALL.into_iter().filter(|half| half.available()) {
                for format in [Format::F32, Format::Bf16] {
                    if half == HalfKernel::F32 || isa == Isa::Avx512 && format == Format::Bf16 {
                        let cpu = Cpu { pool: Arc::clone(pool), isa, half };
                        ways.push(Variant { gemm: Gemm::new(cpu.clone()), cpu, isa, half, format });
                    }
                }
            }
        }
        ways
    }

    /// Only the fastest instruction set.
    fn fastest(pool: &Arc<Pool>) -> Vec<Variant> {
        Variant::all(pool).into_iter().filter(|variant| variant.isa == Isa::fastest()).collect()
    }

    fn name(&self) -> String {
        let arithmetic = if self.half == HalfKernel::F32 { "" } else { self.half.name() };
        format!("{:8} {:4} {arithmetic:10}", self.isa.name(), if self.format == Format::F32 { "f32" } else { "bf16" })
    }

    fn json(&self) -> Value {
        json!({"kernel": self.isa.name(), "half": self.half.name(), "bytes": self.format.size()})
    }
}

/// The same values in both formats.
struct Numbers {
    wide: Vec<f32>,
    narrow: Vec<bf16>,
}

impl Numbers {
    fn new(len: usize, period: usize) -> Numbers {
        let wide: Vec<f32> = (0..len).map(|i| (i % period) as f32 * 0.125).collect();
        Numbers { narrow: wide.iter().map(|&x| bf16::from_f32(x)).collect(), wide }
    }

    fn of(&self, format: Format) -> Values<'_> {
        if format == Format::F32 { (&self.wide).into() } else { (&self.narrow).into() }
    }

    fn to(&mut self, format: Format) -> ValuesMut<'_> {
        if format == Format::F32 { (&mut self.wide).into() } else { (&mut self.narrow).into() }
    }
}

fn products(pool: &Arc<Pool>, results: &mut Vec<Value>) {
    for n in [512usize, 1024] {
        let (a, b, mut c) = (Numbers::new(n * n, 13), Numbers::new(n * n, 17), Numbers::new(n * n, 1));
        let mut ways = Variant::all(pool);
        for (name, ta, tb) in [("A B", false, false), ("A B^T", false, true), ("A^T B", true, false)] {
            let (portable, others): (Vec<Variant>, Vec<Variant>) =
                ways.into_iter().partition(|variant| variant.isa == Isa::Portable);
            ways = Vec::new();
            for (mut variants, rounds) in [(others, 25), (portable, 3)] {
                let times = least(rounds, &mut variants, |variant| {
                    let [x, y] = [(&a, ta), (&b, tb)].map(|(x, transposed)| {
                        let x = Matrix::new(x.of(variant.format), n, n);
                        if transposed { x.t() } else { x }
                    });
                    variant.gemm.multiply(x, y, c.to(variant.format), Epilogue::Overwrite);
                });
                for (variant, time) in variants.iter().zip(times) {
                    let speed = 2e-9 * (n * n * n) as f64 / time;
                    println!("gemm {} n={n:5} {name:6} {speed:7.1} GFLOP/s", variant.name());
                    let variant = variant.json();
                    results
                        .push(json!({"gemm": name, "variant": variant, "n": n, "gigaflopsPerSecond": rounded(speed)}));
                }
                ways.extend(variants);
            }
        }
    }
}

/// The convolutions of ResNet-18 on 16 images of 32 x 32, next to matrix products of the same size
/// as their forward passes.
fn convolutions(pool: &Arc<Pool>, results: &mut Vec<Value>) {
    let layers = [
        (32, 3, 64, 3, 1),
        (32, 64, 64, 3, 1),
        (32, 64, 128, 3, 2),
        (32, 64, 128, 1, 2),
        (16, 128, 128, 3, 1),
        (8, 256, 256, 3, 1),
        (8, 256, 512, 3, 2),
        (4, 512, 512, 3, 1),
    ];
    let mut ways = Variant::fastest(pool);
    for (side, channels, outputs, kernel, stride) in layers {
        let shape = ConvolutionShape {
            batch: 16,
            height: side,
            width: side,
            channels,
            outputs,
            kernel,
            stride,
            padding: kernel / 2,
        };
        let (m, k) = (shape.output_len() / outputs, kernel * kernel * channels);
        let (mut x, w) = (Numbers::new(shape.input_len(), 13), Numbers::new(shape.weights_len(), 17));
        let (mut y, mut dw) = (Numbers::new(shape.output_len(), 11), vec![0.0; shape.weights_len()]);
        let windows = Numbers::new(m * k, 13);
        let needed =
            ways.iter().map(|variant| shape.scratch_len(&variant.cpu).max(shape.backward_scratch_len(&variant.cpu)));
        let mut scratch = vec![0.0; needed.max().unwrap_or(0)];
        for what in ["product", "forward", "dx", "dw"] {
            let times = least(12, &mut ways, |variant| {
                let Variant { gemm, format, .. } = variant;
                match what {
                    "product" => {
                        let (a, b) = (Matrix::new(windows.of(*format), m, k), Matrix::new(w.of(*format), outputs, k));
                        gemm.multiply(a, b.t(), y.to(*format), Epilogue::Overwrite);
                    }
                    "forward" => gemm.convolution(&shape, x.of(*format), w.of(*format), y.to(*format), &mut scratch),
                    "dx" => {
                        let (dy, w) = (y.of(*format), w.of(*format));
                        gemm.convolution_input_gradient(&shape, dy, w, x.to(*format), false, &mut scratch);
                    }
                    _ => {
                        let (dy, x) = (y.of(*format), x.of(*format));
                        gemm.convolution_weight_gradient(&shape, dy, x, &mut dw, false, &mut scratch);
                    }
                }
            });
            for (variant, time) in ways.iter().zip(times) {
                let speed = 2e-9 * (m * k * outputs) as f64 / time;
                let layer = format!("{side}x{side} {channels}->{outputs} {kernel}x{kernel}/{stride}");
                println!("{} {layer:22} {what:7} {speed:7.1} GFLOP/s", variant.name());
                let variant = variant.json();
                results.push(json!({
                    "convolution": layer, "pass": what, "variant": variant, "gigaflopsPerSecond": rounded(speed),
                }));
            }
        }
    }
}

fn optimizer(rule: config::Rule) -> config::Optimizer {
    config::Optimizer {
        rule,
        learning_rate: 1e-3,
        weight_decay: 0.1,
        gradient_clip_norm: None,
        decay_exclusions: config::DecayExclusions::Vectors,
    }
}

/// Time per parameter of a step of each rule, and of a plain copy of as many floats.
fn rules(len: usize, pool: &Pool, isa: Isa, results: &mut Vec<Value>) {
    let rounds = (1 << 28) / len;
    let mut layout = Layout::default();
    for i in 0..16 {
        layout.push(format!("p{i}"), &[len / 16], Role::Matrix, Initial::Constant(0.0));
    }
    let gradients: Vec<f32> = (0..len).map(|i| (i % 251) as f32 * 0.01 - 1.25).collect();
    let (mut weights, mut half) = (vec![0.5; len], vec![bf16::ZERO; len]);
    let sgd = |momentum| config::Rule::Sgd(config::Momentum { momentum, nesterov: false });
    let adam = config::Adam { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 };
    // Minimum bytes per parameter that a step must move.
    let rules = [
        ("sgd", sgd(0.0), 12),
        ("momentum", sgd(0.9), 20),
        ("adam", config::Rule::Adam(adam), 28),
        ("adamw", config::Rule::AdamW(adam), 28),
        ("lamb", config::Rule::Lamb(adam), 24 + 16),
        ("lars", config::Rule::Lars(config::Lars { momentum: 0.9, trust_coefficient: 0.001 }), 8 + 20),
    ];
    for (name, rule, bytes) in rules {
        let mut optimizer = Optimizer::new(&layout, &optimizer(rule), isa);
        let mut least = [f64::INFINITY; 2];
        for round in 0..2 * rounds {
            let amp = round % 2;
            let half = (amp == 1).then(|| HalfWeights::Bf16(&mut half));
            let start = Instant::now();
            optimizer.begin_step(1e-3, 1.0);
            optimizer.apply(0..len, &mut weights, &gradients, half, pool);
            least[amp] = least[amp].min(start.elapsed().as_secs_f64() * 1e9 / len as f64);
        }
        let speed = f64::from(bytes) / least[0];
        println!(
            "rule {name:9} {:8} {len:8} parameters: {:6.3} ns each ({speed:4.1} GB/s), {:6.3} with bf16 weights",
            isa.name(),
            least[0],
            least[1]
        );
        results.push(json!({
            "rule": name, "parameters": len, "kernel": isa.name(), "nanosecondsPerParameter": rounded(least[0]),
            "withBf16Weights": rounded(least[1]),
        }));
    }
    let mut least = f64::INFINITY;
    for _ in 0..rounds {
        let start = Instant::now();
        weights.copy_from_slice(&gradients);
        black_box(&mut weights);
        least = least.min(start.elapsed().as_secs_f64() * 1e9);
    }
    println!("one thread copies {len} floats at {:4.1} GB/s", (8 * len) as f64 / least);
}

fn probed(probed: &ProbeResult) -> Value {
    let (name, speed) = (probed.kernel.name(), rounded(probed.gigaflops));
    println!("probe: bf16 by {name:10} {speed:7.1} GFLOP/s{}", if probed.correct { "" } else { ", computes wrongly" });
    json!({"half": name, "gigaflopsPerSecond": speed, "correct": probed.correct})
}

fn rounded(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

fn main() {
    let mut results = Vec::new();
    let threads = std::env::args().find_map(|argument| argument.parse().ok()).unwrap_or(1);
    let pool = Arc::new(Pool::new(threads));
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("?");
    println!("CPU {}, {threads} thread(s)", model.trim_start_matches([' ', '\t', ':']));
    let only = |part: &str| std::env::args().any(|argument| argument == part);
    let probe: Vec<Value> = HalfKernel::report().iter().map(probed).collect();
    println!("products of bf16 are computed by {}", HalfKernel::probe().name());
    let all = !["gemm", "convolution", "rules"].into_iter().any(only);
    if all || only("rules") {
        // Within a core's caches, and larger than most caches.
        for len in [1 << 17, 1 << 24] {
            rules(len, &pool, Isa::fastest(), &mut results);
        }
    }
    if all || only("gemm") {
        products(&pool, &mut results);
    }
    if all || only("convolution") {
        convolutions(&pool, &mut results);
    }
    let arguments: Vec<String> = std::env::args().collect();
    if let Some(file) = arguments.iter().position(|word| word == "--json").and_then(|at| arguments.get(at + 1)) {
        let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let document = json!({
            "command": "cargo xtask bench kernels", "cpu": model.trim_start_matches([' ', '\t', ':']), "threads": threads,
            "load": load.split(' ').next().unwrap_or_default(), "probe": probe, "results": results,
        });
        let text = serde_json::to_string_pretty(&document).expect("invariant: a JSON value serialises");
        if let Err(error) = std::fs::write(file, text + "\n") {
            eprintln!("cannot write {file}: {error}");
            std::process::exit(1);
        }
        println!("written: {file}");
    }
}
