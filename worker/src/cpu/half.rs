//! Kernel selection for bf16 GEMM. The choice is measured, because on some CPUs the dedicated
//! instructions are slower than f32 arithmetic.

use super::gemm::{Epilogue, Gemm, Matrix, amx};
use super::isa::IsaError;
use super::{Cpu, Isa, Pool, bf16};
use serde::{Deserialize, Serialize};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// A bf16 GEMM kernel. All of them accumulate in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HalfKernel {
    /// AMX, the matrix unit of Intel CPUs since 2023.
    Amx,
    /// The AVX-512 instruction `vdpbf16ps`.
    Dpbf16,
    /// f32 arithmetic; operands are converted during packing.
    F32,
}

/// The [`HalfKernel::probe`] result for one kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProbeResult {
    pub kernel: HalfKernel,
    /// Whether the result matches f32 arithmetic. Incorrect kernels are not used.
    pub correct: bool,
    /// Single-thread speed in GFLOP/s.
    pub gigaflops: f64,
}

/// GEMM shape to time: 8.4 million multiplications, a few tenths of a millisecond.
const SIZE: (usize, usize, usize) = (128, 128, 512);
/// Timed runs per kernel.
const ROUNDS: usize = 5;
/// Minimum speedup over a dedicated kernel. Without this margin, noise could decide, and two runs
/// would differ in their bits.
const MIN_SPEEDUP: f64 = 1.25;

impl HalfKernel {
    /// All kernels; the dedicated ones come first.
    pub const ALL: [HalfKernel; 3] = [HalfKernel::Amx, HalfKernel::Dpbf16, HalfKernel::F32];

    /// Its name in `SWITCHYARD_KERNEL`. Any [`Isa`] name selects f32 arithmetic.
    pub fn name(self) -> &'static str {
        match self {
            HalfKernel::Amx => "amx",
            HalfKernel::Dpbf16 => "avx512bf16",
            HalfKernel::F32 => "f32",
        }
    }

    /// Whether the CPU has the instructions and the system allows them. Cheap: the result is
    /// cached.
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
    /// See [`HalfKernel::usable`].
    pub fn detect(force: Option<&str>) -> Result<HalfKernel, IsaError> {
        Ok(HalfKernel::usable(force)?.first().copied().unwrap_or(HalfKernel::F32))
    }

    /// The usable kernels, best first. `force` is a `SWITCHYARD_KERNEL` value as in [`Isa::detect`]
    /// and selects one kernel; `None` is `auto`.
    ///
    /// # Errors
    /// The name is unknown, or the CPU lacks the instructions or returns wrong results with them.
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

    /// The best kernel that returns correct results. Measured once per process, in a few
    /// milliseconds.
    pub fn probe() -> HalfKernel {
        ranked(HalfKernel::report()).first().copied().unwrap_or(HalfKernel::F32)
    }

    /// The probe results of all kernels that this CPU supports.
    pub fn report() -> &'static [ProbeResult] {
        static REPORT: OnceLock<Vec<ProbeResult>> = OnceLock::new();
        REPORT.get_or_init(probe_all)
    }
}

/// The correct kernels, best first.
fn ranked(report: &[ProbeResult]) -> Vec<HalfKernel> {
    let mut left: Vec<&ProbeResult> = HalfKernel::ALL
        .iter()
        .filter_map(|kernel| report.iter().find(|probed| probed.kernel == *kernel && probed.correct))
        .collect();
    let mut ranked = Vec::new();
    while !left.is_empty() {
        let fastest = left.iter().map(|probed| probed.gigaflops).fold(0.0, f64::max);
        let best = left.iter().position(|probed| probed.gigaflops * MIN_SPEEDUP >= fastest).unwrap_or(0);
        ranked.push(left.remove(best).kernel);
    }
    ranked
}

fn probe_all() -> Vec<ProbeResult> {
    let (m, n, k) = SIZE;
    // Sums stay near sqrt(k), so an error is visible.
    let noise = |len: usize, step: usize| -> Vec<bf16> {
        (0..len).map(|i| bf16::from_f32((i * step % 251) as f32 / 125.0 - 1.0)).collect()
    };
    let (a, b) = (noise(m * k, 97), noise(n * k, 89));
    let pool = Arc::new(Pool::new(1));
    let kernels: Vec<HalfKernel> = HalfKernel::ALL.into_iter().filter(|kernel| kernel.available()).collect();
    let gemm = |half: HalfKernel| Gemm::new(Cpu { pool: Arc::clone(&pool), isa: Isa::fastest(), half });
    let mut trials: Vec<(Gemm, Vec<f32>, Duration)> =
        kernels.iter().map(|half| (gemm(*half), vec![0.0; m * n], Duration::MAX)).collect();
    // Interleave the kernels, so background load slows all of them equally.
    for _ in 0..ROUNDS {
        for (gemm, c, least) in &mut trials {
            let start = Instant::now();
            gemm.multiply(Matrix::new(&a, m, k), Matrix::new(&b, n, k).t(), c, Epilogue::Overwrite);
            *least = (*least).min(start.elapsed());
        }
    }
    // bf16 products are exact in f32: only the order of the sums differs.
    let close = |got: &[f32], want: &[f32]| got.iter().zip(want).all(|(a, b)| (a - b).abs() <= 1e-4 * (1.0 + b.abs()));
    let want = kernels.iter().zip(&trials).find(|(kernel, _)| **kernel == HalfKernel::F32).map(|(_, trial)| &trial.1);
    let probed = |(kernel, (_, got, least)): (&HalfKernel, &(Gemm, Vec<f32>, Duration))| ProbeResult {
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
    fn probes_every_available_kernel() {
        let report = HalfKernel::report();
        let available: Vec<HalfKernel> = HalfKernel::ALL.into_iter().filter(|way| way.available()).collect();
        assert!(
            available.iter().all(|&way| report.iter().any(|probed| probed.kernel == way && probed.correct)),
            "{report:?}"
        );
        assert!(report.iter().all(|probed| probed.gigaflops > 0.0), "{report:?}");
        let chosen = HalfKernel::probe();
        let speed = |way| report.iter().find(|probed| probed.kernel == way).unwrap().gigaflops;
        assert!(available.iter().all(|&way| speed(way) <= MIN_SPEEDUP * speed(chosen)), "{chosen:?} of {report:?}");
    }

    #[test]
    fn noise_does_not_decide_between_similar_kernels() {
        use HalfKernel::{Amx, Dpbf16, F32};
        let order = |speeds: &[(HalfKernel, bool, f64)]| {
            let probed = |&(kernel, correct, gigaflops): &_| ProbeResult { kernel, correct, gigaflops };
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
    fn the_kernel_can_be_forced() {
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
