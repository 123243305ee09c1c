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
/// A kernel takes the place of one that is made for these products only if it is faster by this factor: noise must not
/// choose, or two runs would differ in their bits.
const CLEARLY: f64 = 1.25;

impl HalfKernel {
    /// All of them; those made for these products come first.
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

    /// The kernel to use: the first of [`HalfKernel::usable`].
    ///
    /// # Errors
    /// See there.
    pub fn detect(force: Option<&str>) -> Result<HalfKernel, IsaError> {
        Ok(HalfKernel::usable(force)?.first().copied().unwrap_or(HalfKernel::F32))
    }

    /// The kernels that may be used, the best first. `force` is a word of `SWITCHYARD_KERNEL` as in [`Isa::detect`], and
    /// leaves one; `None` is `auto`.
    ///
    /// # Errors
    /// The word is unknown, or the CPU lacks the instructions or computes wrongly with them.
    pub fn usable(force: Option<&str>) -> Result<Vec<HalfKernel>, IsaError> {
        let isa = Isa::detect(force)?;
        let word = force.unwrap_or("auto");
        if word == "auto" {
            return Ok(if isa == Isa::Avx512 { ranked(HalfKernel::report()) } else { vec![HalfKernel::F32] });
        }
        match HalfKernel::ALL.into_iter().find(|half| half.name() == word) {
            Some(half) if HalfKernel::report().iter().any(|probed| probed.kernel == half && probed.correct) => {
                Ok(vec![half])
            }
            Some(half) => Err(IsaError::Missing(half.name())),
            None => Ok(vec![HalfKernel::F32]),
        }
    }

    /// The best kernel that computes correctly. Measured once per process, in a few milliseconds.
    pub fn probe() -> HalfKernel {
        ranked(HalfKernel::report()).first().copied().unwrap_or(HalfKernel::F32)
    }

    /// All kernels of this CPU, as [`HalfKernel::probe`] measured them.
    pub fn report() -> &'static [Probed] {
        static REPORT: OnceLock<Vec<Probed>> = OnceLock::new();
        REPORT.get_or_init(try_all)
    }
}

/// The kernels that compute correctly, the best first.
fn ranked(report: &[Probed]) -> Vec<HalfKernel> {
    let mut left: Vec<&Probed> = HalfKernel::ALL
        .iter()
        .filter_map(|kernel| report.iter().find(|probed| probed.kernel == *kernel && probed.correct))
        .collect();
    let mut ranked = Vec::new();
    while !left.is_empty() {
        let fastest = left.iter().map(|probed| probed.gigaflops).fold(0.0, f64::max);
        let best = left.iter().position(|probed| probed.gigaflops * CLEARLY >= fastest).unwrap_or(0);
        ranked.push(left.remove(best).kernel);
    }
    ranked
}

fn try_all() -> Vec<Probed> {
    let (m, n, k) = SIZE;
    // Sums stay near the square root of k, so that an error is visible.
    let noise = |len: usize, step: usize| -> Vec<bf16> {
        (0..len).map(|i| bf16::from_f32((i * step % 251) as f32 / 125.0 - 1.0)).collect()
    };
    let (a, b) = (noise(m * k, 97), noise(n * k, 89));
    let pool = Arc::new(Pool::new(1));
    let kernels: Vec<HalfKernel> = HalfKernel::ALL.into_iter().filter(|kernel| kernel.available()).collect();
    let gemm = |half: HalfKernel| Gemm::new(Cpu { pool: Arc::clone(&pool), isa: Isa::fastest(), half });
    let mut trials: Vec<(Gemm, Vec<f32>, Duration)> =
        kernels.iter().map(|half| (gemm(*half), vec![0.0; m * n], Duration::MAX)).collect();
    // In turns, so that what else the machine does slows all of them.
    for _ in 0..ROUNDS {
        for (gemm, c, least) in &mut trials {
            let start = Instant::now();
            gemm.multiply(Matrix::new(&a, m, k), Matrix::new(&b, n, k).t(), c, Epilogue::Overwrite);
            *least = (*least).min(start.elapsed());
        }
    }
    // The products of bf16 are exact in f32: only the order of the sums differs.
    let close = |got: &[f32], want: &[f32]| got.iter().zip(want).all(|(a, b)| (a - b).abs() <= 1e-4 * (1.0 + b.abs()));
    let want = kernels.iter().zip(&trials).find(|(kernel, _)| **kernel == HalfKernel::F32).map(|(_, trial)| &trial.1);
    let probed = |(kernel, (_, got, least)): (&HalfKernel, &(Gemm, Vec<f32>, Duration))| Probed {
        kernel: *kernel,
        correct: want.is_some_and(|want| close(got, want)),
        gigaflops: 2e-9 * (m * n * k) as f64 / least.as_secs_f64().max(1e-9),
    };
    kernels.iter().zip(&trials).map(probed).collect()
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
        assert!(ways.iter().all(|&way| speed(way) <= CLEARLY * speed(chosen)), "{chosen:?} of {report:?}");
    }

    #[test]
    fn noise_does_not_choose_between_kernels_of_about_the_same_speed() {
        use HalfKernel::{Amx, Dpbf16, F32};
        let order = |speeds: &[(HalfKernel, bool, f64)]| {
            let probed = |&(kernel, correct, gigaflops): &_| Probed { kernel, correct, gigaflops };
            ranked(&speeds.iter().map(probed).collect::<Vec<_>>())
        };
        for noise in [0.9, 1.0, 1.1] {
            assert_eq!(order(&[(F32, true, 100.0), (Dpbf16, true, 100.0 * noise)]), [Dpbf16, F32], "{noise}");
            assert_eq!(order(&[(F32, true, 100.0 * noise), (Dpbf16, true, 50.0)]), [F32, Dpbf16], "{noise}");
        }
        assert_eq!(order(&[(F32, true, 100.0), (Dpbf16, true, 190.0), (Amx, true, 800.0)]), [Amx, Dpbf16, F32]);
        assert_eq!(order(&[(F32, true, 100.0), (Dpbf16, true, 190.0), (Amx, false, 800.0)]), [Dpbf16, F32]);
        assert_eq!(order(&[(F32, true, 100.0)]), [F32]);
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
