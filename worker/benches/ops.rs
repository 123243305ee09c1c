//! Speed of the row-wise and elementwise kernels: `cargo bench -p switchyard-worker --bench ops [--
//! THREADS]`.
//!
//! Prints GB/s: the bytes that must be read and written, over the best time of several runs. `copy`
//! is the memory bandwidth. Compare only on a quiet machine.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};
use switchyard_worker::cpu::ops::{self, BatchNorm, Targets, Window};
use switchyard_worker::cpu::{Cpu, Element, HalfKernel, Isa, Pool, bf16, f16};

const RUNS: usize = 200;

fn measure<E>(cpu: &Cpu, name: &str, elements: usize, mut f: impl FnMut()) {
    let mut least = Duration::MAX;
    for _ in 0..RUNS {
        let start = Instant::now();
        f();
        least = least.min(start.elapsed());
    }
    let speed = (elements * size_of::<E>()) as f64 / least.as_secs_f64() / 1e9;
    let milliseconds = least.as_secs_f64() * 1e3;
    let format = std::any::type_name::<E>().rsplit(':').next().unwrap_or_default();
    println!("{:8} {format:5} {name:22} {speed:6.1} GB/s {milliseconds:8.2} ms", cpu.isa.name());
}

fn tensor<E: Element>(len: usize) -> Vec<E> {
    (0..len).map(|i| E::of((i * 37 % 251) as f32 * 0.03 - 3.7)).collect()
}

fn transformer<E: Element>(cpu: &Cpu) {
    let (rows, width) = (512, 768);
    let len = rows * width;
    let (x, mut y, mut dy) = (tensor::<E>(len), tensor::<E>(len), tensor::<E>(len));
    let (gamma, beta) = (tensor::<f32>(width), tensor::<f32>(width));
    let (mut d_gamma, mut d_beta) = (vec![0.0; width], vec![0.0; width]);
    let mut saved = vec![0.0; 2 * rows];
    let mut partials = vec![0.0; ops::partials_len(rows, 2 * width)];
    measure::<E>(cpu, "copy", 2 * len, || y.copy_from_slice(black_box(&x)));
    measure::<E>(cpu, "add", 3 * len, || ops::add(cpu, &x, &dy, &mut y));
    measure::<E>(cpu, "layer norm", 2 * len, || ops::layer_norm(cpu, &x, &gamma, &beta, &mut y, &mut saved));
    measure::<E>(cpu, "layer norm backward", 3 * len, || {
        let gradients = (&mut d_gamma[..], &mut d_beta[..]);
        ops::layer_norm_backward(cpu, &dy, &x, &gamma, &saved, &mut y, false, &mut partials, gradients, false);
    });
    measure::<E>(cpu, "gelu", 2 * len, || ops::gelu(cpu, &x, &mut y));
    measure::<E>(cpu, "gelu backward", 3 * len, || {
        ops::gelu_backward(cpu, &x, &mut dy, &mut partials, &mut d_beta, false);
    });
    let targets = vec![5; rows];
    let (mut losses, mut correct) = (vec![0.0; rows], vec![0.0; rows]);
    let targets = Targets::plain(&targets);
    measure::<E>(cpu, "cross entropy", len, || {
        ops::cross_entropy(cpu, &x, targets, &mut saved, &mut losses, &mut correct);
    });
    measure::<E>(cpu, "cross entropy backward", 2 * len, || {
        ops::cross_entropy_backward(cpu, &mut y, targets, &saved, 1.0);
    });
    black_box((&y, &dy));
}

fn images<E: Element>(cpu: &Cpu) {
    let (rows, channels) = (56 * 56, 128);
    let len = rows * channels;
    let (x, mut y, mut dy) = (tensor::<E>(len), tensor::<E>(len), tensor::<E>(len));
    let (residual, mut dx) = (tensor::<E>(len), tensor::<E>(len));
    let (gamma, beta) = (vec![1.0; channels], vec![0.1; channels]);
    let (mut saved, mut statistics) = (vec![0.0; 2 * channels], vec![0.0; 2 * channels]);
    let mut partials = vec![0.0; ops::batch_norm_partials_len(rows, channels)];
    for residual in [None, Some(&residual[..])] {
        let layer = BatchNorm { gamma: &gamma, beta: &beta, residual, relu: true };
        let (name, tensors) = if residual.is_some() { ("batch norm + residual", 4) } else { ("batch norm", 3) };
        measure::<E>(cpu, name, tensors * len, || {
            ops::batch_norm(cpu, layer, &x, &mut y, &mut saved, &mut statistics, &mut partials);
        });
    }
    let (mut d_gamma, mut d_beta) = (vec![0.0; channels], vec![0.0; channels]);
    measure::<E>(cpu, "batch norm backward", 7 * len, || {
        let gradients = (&mut d_gamma[..], &mut d_beta[..]);
        ops::batch_norm_backward(
            cpu,
            &mut dy,
            Some(&y),
            &x,
            &gamma,
            &saved,
            &mut dx,
            false,
            &mut partials,
            gradients,
            false,
        );
    });
    let shape = Window { batch: 1, height: 56, width: 56, channels, kernel: 3, stride: 2, padding: 1 };
    let mut places = vec![0u8; len / 4];
    measure::<E>(cpu, "max pool", len + len / 4, || ops::max_pool(cpu, &shape, &x, &mut y[..len / 4], &mut places));
    measure::<E>(cpu, "max pool backward", len + len / 4, || {
        ops::max_pool_backward(cpu, &shape, &y[..len / 4], &places, &mut dx);
    });
    black_box((&y, &dx));
}

fn main() {
    let threads = std::env::args().find_map(|argument| argument.parse().ok()).unwrap_or(1);
    let pool = Arc::new(Pool::new(threads));
    println!("{threads} thread(s)");
    for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
        let cpu = Cpu { pool: Arc::clone(&pool), isa, half: HalfKernel::F32 };
        transformer::<f32>(&cpu);
        transformer::<bf16>(&cpu);
        transformer::<f16>(&cpu);
        images::<f32>(&cpu);
        images::<bf16>(&cpu);
        images::<f16>(&cpu);
    }
}
