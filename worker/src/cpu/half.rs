//! How products of bf16 with bf16 are computed: chosen by measurement, because on some CPUs the instructions made for
//! it are slower than f32 arithmetic.

use super::gemm::{Epilogue, Gemm, Matrix, amx};
use super::isa::IsaError;
use super::{Cpu, Isa, Pool, bf16};
use serde::{Deserialize, Serialize};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// A way to multiply bf16 by bf16. All of them sum in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HalfKernel {
    /// The matrix unit of Intel CPUs since 2023.
    Amx,
    /// The AVX-512 instruction `vdpbf16ps`.
    Dpbf16,
    /// f32 arithmetic; packing converts.
    F32,
}

/// What [`HalfKernel::probe`] found about one kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Probed {
    pub kernel: HalfKernel,
    /// Whether it computes the same as f32 arithmetic. A kernel that does not is not used.
    pub correct: bool,
    /// Speed on one thread in 10^9 floating-point operations per second.
    pub gigaflops: f64,
}

/// Shape of the product that is timed: 8.4 million multiplications, a few tenths of a millisecond.
const SIZE: (usize, usize, usize) = (128, 128, 512);
/// Products timed per kernel.
const ROUNDS: usize = 5;

impl HalfKernel {
    pub const ALL: [HalfKernel; 3] = [HalfKernel::Amx, HalfKernel::Dpbf16, HalfKernel::F32];

    /// The word of `SWITCHYARD_KERNEL` that selects it; the name of any [`Isa`] selects f32 arithmetic.
    pub fn name(self) -> &'static str {
        match self {
            HalfKernel::Amx => "amx",
            HalfKernel::Dpbf16 => "avx512bf16",
            HalfKernel::F32 => "f32",
        }
    }

    /// Whether this CPU has the instructions and the system allows them. Cheap: the result is cached.
    pub fn available(self) -> bool {
        match self {
            HalfKernel::Amx => Isa::Avx512.available() && amx::available(),
            #[cfg(target_arch = "x86_64")]
            HalfKernel::Dpbf16 => Isa::Avx512.available() && is_x86_feature_detected!("avx512bf16"),
            #[cfg(not(target_arch = "x86_64"))]
            HalfKernel::Dpbf16 => false,
            HalfKernel::F32 => true,
        }
    }

    /// The kernel to use. `force` is a word of `SWITCHYARD_KERNEL` as in [`Isa::detect`]; `None` is `auto`.
    ///
    /// # Errors
    /// The word is unknown, or the CPU lacks the instructions or computes wrongly with them.
    pub fn detect(force: Option<&str>) -> Result<HalfKernel, IsaError> {
        let isa = Isa::detect(force)?;
        let word = force.unwrap_or("auto");
        if word == "auto" {
            return Ok(if isa == Isa::Avx512 { HalfKernel::probe() } else { HalfKernel::F32 });
        }
        match HalfKernel::ALL.into_iter().find(|half| half.name() == word) {
            Some(half) if HalfKernel::report().iter().any(|probed| probed.kernel == half && probed.correct) => Ok(half),
            Some(half) => Err(IsaError::Missing(half.name())),
            None => Ok(HalfKernel::F32),
        }
    }

    /// The fastest kernel that computes correctly. Measured once per process, in a few milliseconds.
    pub fn probe() -> HalfKernel {
        let correct = HalfKernel::report().iter().filter(|probed| probed.correct);
        let fastest = correct.max_by(|a, b| a.gigaflops.total_cmp(&b.gigaflops));
        fastest.map_or(HalfKernel::F32, |probed| probed.kernel)
    }

    /// All kernels of this CPU, as [`HalfKernel::probe`] measured them.
    pub fn report() -> &'static [Probed] {
        static REPORT: OnceLock<Vec<Probed>> = OnceLock::new();
        REPORT.get_or_init(try_all)
    }
}

fn try_all() -> Vec<Probed> {
    let (m, n, k) = SIZE;
    // Sums stay near the square root of k, so that an error is visible.
    let noise = |len: usize, step: usize| -> Vec<bf16> {
        (0..len).map(|i| bf16::from_f32((i * step % 251) as f32 / 125.0 - 1.0)).collect()
    };
    let (a, b) = (noise(m * k, 97), noise(n * k, 89));
    let pool = Arc::new(Pool::new(1));
    let run = |half: HalfKernel| {
        let mut gemm = Gemm::new(Cpu { pool: Arc::clone(&pool), isa: Isa::fastest(), half });
        let mut c = vec![0.0; m * n];
        let mut least = Duration::MAX;
        for _ in 0..ROUNDS {
            let start = Instant::now();
            gemm.multiply(Matrix::new(&a, m, k), Matrix::new(&b, n, k).t(), &mut c, Epilogue::Overwrite);
            least = least.min(start.elapsed());
        }
        (c, 2e-9 * (m * n * k) as f64 / least.as_secs_f64().max(1e-9))
    };
    let (want, speed) = run(HalfKernel::F32);
    // The products of bf16 are exact in f32: only the order of the sums differs.
    let close = |got: &[f32]| got.iter().zip(&want).all(|(a, b)| (a - b).abs() <= 1e-4 * (1.0 + b.abs()));
    let mut report = vec![Probed { kernel: HalfKernel::F32, correct: true, gigaflops: speed }];
    for kernel in [HalfKernel::Dpbf16, HalfKernel::Amx].into_iter().filter(|kernel| kernel.available()) {
        let (got, gigaflops) = run(kernel);
        report.push(Probed { kernel, correct: close(&got), gigaflops });
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_that_the_cpu_has_is_tried() {
        let report = HalfKernel::report();
        let ways: Vec<HalfKernel> = HalfKernel::ALL.into_iter().filter(|way| way.available()).collect();
        assert!(
            ways.iter().all(|&way| report.iter().any(|probed| probed.kernel == way && probed.correct)),
            "{report:?}"
        );
        assert!(report.iter().all(|probed| probed.gigaflops > 0.0), "{report:?}");
        let chosen = HalfKernel::probe();
        let speed = |way| report.iter().find(|probed| probed.kernel == way).unwrap().gigaflops;
        assert!(ways.iter().all(|&way| speed(way) <= speed(chosen)), "{chosen:?} of {report:?}");
    }

    #[test]
    fn forced_words() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            assert_eq!(HalfKernel::detect(Some(isa.name())), Ok(HalfKernel::F32));
        }
        for half in [HalfKernel::Amx, HalfKernel::Dpbf16] {
            let missing = Err(IsaError::Missing(half.name()));
            assert_eq!(HalfKernel::detect(Some(half.name())), if half.available() { Ok(half) } else { missing });
        }
        assert_eq!(HalfKernel::detect(None), HalfKernel::detect(Some("auto")));
        assert_eq!(HalfKernel::detect(Some("f32")), Err(IsaError::Unknown("f32".to_owned())));
    }
}
