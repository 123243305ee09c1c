//! Helpers shared by the kernel tests.

use std::sync::Arc;
use switchyard_worker::cpu::{Cpu, HalfKernel, Isa, Pool};

/// Every instruction set of this CPU, each with one, two and three threads.
pub fn cpus() -> Vec<Cpu> {
    let mut cpus = Vec::new();
    for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
        for threads in [1, 2, 3] {
            cpus.push(Cpu { pool: Arc::new(Pool::new(threads)), isa, half: HalfKernel::F32 });
        }
    }
    cpus
}

/// Values between -1 and 1.
pub fn noise(len: usize, salt: usize) -> Vec<f32> {
    let mut state = salt as u64 * 7_919 + 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// For comparisons that distinguish signed zeros and treat NaNs as equal.
pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}
