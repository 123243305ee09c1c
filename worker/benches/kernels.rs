//! Speed of the kernels and of whole training steps:
//! `cargo bench -p switchyard-worker --bench kernels [-- [gemm|step] [THREADS] [--json FILE]]`.
//!
//! Prints the least time of several runs; rivals and instruction sets run in turn. Compare only on a quiet machine.

#[path = "../tests/flat_gradients/mod.rs"]
mod flat_gradients;

use flat_gradients::FlatGradients;
use serde_json::{Value, json};
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};
use switchyard_worker::cpu::{Cpu, Epilogue, Gemm, Isa, Matrix, Pool};
use switchyard_worker::model::{Gpt, Model};
use switchyard_worker::optimizer::{AdamW, gradient_norm};
use switchyard_worker_contract::config;

fn products(pool: &Arc<Pool>, results: &mut Vec<Value>) {
    for n in [512usize, 1024] {
        let a: Vec<f32> = (0..n * n).map(|i| (i % 13) as f32 * 0.1).collect();
        let b: Vec<f32> = (0..n * n).map(|i| (i % 17) as f32 * 0.1).collect();
        let mut c = vec![0.0; n * n];
        let isas = Isa::ALL.into_iter().filter(|isa| isa.available());
        for isa in isas {
            let mut gemm = Gemm::new(Cpu { pool: Arc::clone(pool), isa });
            for (name, ta, tb) in [("A B", false, false), ("A B^T", false, true), ("A^T B", true, false)] {
                let (x, y) = (Matrix::new(&a, n, n), Matrix::new(&b, n, n));
                let (x, y) = (if ta { x.t() } else { x }, if tb { y.t() } else { y });
                let mut least = Duration::MAX;
                for _ in 0..if isa == Isa::Portable { 3 } else { 25 } {
                    let start = Instant::now();
                    gemm.multiply(x, y, &mut c, Epilogue::Overwrite);
                    least = least.min(start.elapsed());
                }
                black_box(&c);
                let speed = 2.0 * (n * n * n) as f64 / least.as_secs_f64() / 1e9;
                println!("gemm {:8} n={n:5} {name:6} {speed:7.1} GFLOP/s", isa.name());
                results.push(json!({"gemm": name, "kernel": isa.name(), "n": n, "gigaflopsPerSecond": rounded(speed)}));
            }
        }
    }
}

fn step(name: &str, shape: &config::Gpt, batch: usize, pool: &Arc<Pool>, isa: Isa, results: &mut Vec<Value>) {
    let adam = config::AdamW {
        learning_rate: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        gradient_clip_norm: Some(1.0),
    };
    let mut gpt = Gpt::new(shape, batch, Arc::clone(pool), isa).expect("the shape is possible");
    let mut weights = vec![0.0; gpt.layout().len];
    gpt.initialise(1, &mut weights);
    let mut sink = FlatGradients::new(gpt.layout());
    let mut optimizer = AdamW::new(gpt.layout(), adam);
    let rows = gpt.tokens_per_batch();
    let tokens: Vec<u16> = (0..=rows as u64).map(|i| (i * i * 31 % u64::from(shape.vocabulary_size)) as u16).collect();
    let mut least = [f64::INFINITY; 4];
    for _ in 0..12 {
        let marks = [(); 4].map(|()| Instant::now());
        let mut marks = marks;
        marks[0] = Instant::now();
        gpt.forward(&weights, &tokens[..rows], &tokens[1..]);
        marks[1] = Instant::now();
        gpt.backward(&weights, 1.0, &mut sink);
        marks[2] = Instant::now();
        let scale = (1.0 / gradient_norm(&sink.gradients)).min(1.0);
        optimizer.step(&mut weights, &sink.gradients, 1e-3, scale as f32, pool);
        marks[3] = Instant::now();
        for i in 0..3 {
            least[i] = least[i].min((marks[i + 1] - marks[i]).as_secs_f64() * 1e3);
        }
        least[3] = least[3].min((marks[3] - marks[0]).as_secs_f64() * 1e3);
    }
    let [forward, backward, optimizer_ms, whole] = least;
    println!(
        "{name:10} {:8} {:5.2} M parameters: forward {forward:6.1}, backward {backward:6.1}, optimizer {optimizer_ms:5.1}, step {whole:6.1} ms",
        isa.name(),
        gpt.layout().trainable() as f64 / 1e6,
    );
    results.push(json!({
        "step": name, "kernel": isa.name(), "forwardMs": rounded(forward), "backwardMs": rounded(backward),
        "optimizerMs": rounded(optimizer_ms), "stepMs": rounded(whole),
    }));
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
    if !only("step") {
        products(&pool, &mut results);
    }
    let example = config::Gpt {
        layers: 4,
        hidden_size: 128,
        heads: 4,
        context_length: 128,
        vocabulary_size: 256,
        tied_head: true,
    };
    let reference = config::Gpt { hidden_size: 256, vocabulary_size: 1024, tied_head: false, ..example.clone() };
    for isa in [Isa::Avx512, Isa::Avx2].into_iter().filter(|isa| isa.available() && !only("gemm")) {
        step("example", &example, 8, &pool, isa, &mut results);
        step("reference", &reference, 8, &pool, isa, &mut results);
    }
    let arguments: Vec<String> = std::env::args().collect();
    if let Some(file) = arguments.iter().position(|word| word == "--json").and_then(|at| arguments.get(at + 1)) {
        let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let document = json!({
            "command": "cargo xtask bench kernels", "cpu": model.trim_start_matches([' ', '\t', ':']), "threads": threads,
            "load": load.split(' ').next().unwrap_or_default(), "results": results,
        });
        let text = serde_json::to_string_pretty(&document).expect("invariant: a JSON value serialises");
        if let Err(error) = std::fs::write(file, text + "\n") {
            eprintln!("cannot write {file}: {error}");
            std::process::exit(1);
        }
        println!("written: {file}");
    }
}
