//! Multiplies 32 x 32 tiles with the matrix unit of Intel CPUs (AMX), and emulates it for tests.
//!
//! ```text
//! A panel: 32 rows, ROW lanes apart        B panel: for each lane of k 32 columns
//! step of 16 lanes (32 values of k):  four 16 x 16 f32 accumulators += 2 A tiles x 2 B tiles
//! ```
//!
//! Written in assembly because the intrinsics are not yet stable (Rust 1.95). Instructions and
//! rounding: Intel Architecture Instruction Set Extensions Programming Reference, chapter 3.
#![allow(unsafe_code)]

use super::tile::{ROW, Sums};

/// Rows and columns of a tile of C.
pub(super) const SIDE: usize = 32;
/// Lanes processed per step.
pub(super) const STEP: usize = 16;

/// The implementation that computes tiles.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Tiles {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    Hardware,
    /// Plain code for the same panels, with the same result up to the order of the sums.
    #[cfg(test)]
    Emulated,
}

/// Proof that the thread's tiles are set up; released on drop.
pub(super) struct Configured {
    _private: (),
}

impl Tiles {
    /// The matrix unit, if this process is permitted to use it.
    pub fn hardware() -> Option<Tiles> {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if hardware::available() {
            return Some(Tiles::Hardware);
        }
        None
    }

    /// Configures this thread's tiles.
    pub fn configure(self) -> Option<Configured> {
        match self {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Tiles::Hardware => {
                hardware::configure();
                Some(Configured { _private: () })
            }
            #[cfg(test)]
            Tiles::Emulated => None,
        }
    }

    /// `sums` (32 x 32) = A panel * B panel over `steps` steps.
    ///
    /// # Safety
    /// `a` points to 31 x [`ROW`] + 16 x `steps` lanes, `b` to 16 x `steps` x 32; the thread's
    /// tiles are configured.
    pub unsafe fn run(self, steps: usize, a: *const f32, b: *const f32, sums: &mut Sums) {
        match self {
            // SAFETY: as promised by the caller; only `hardware` constructs this variant.
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Tiles::Hardware => unsafe { hardware::run(steps, a, b, sums) },
            // SAFETY: as promised by the caller.
            #[cfg(test)]
            Tiles::Emulated => unsafe { emulated(steps, a, b, sums) },
        }
    }
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
impl Drop for Configured {
    fn drop(&mut self) {
        hardware::release();
    }
}

/// Whether the CPU has the unit and the system lets this process use it.
pub(in crate::cpu) fn available() -> bool {
    Tiles::hardware().is_some()
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod hardware {
    use super::{ROW, SIDE, Sums};
    use std::arch::asm;
    use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
    use std::sync::OnceLock;

    /// The `ldtilecfg` operand: palette 1, then for each of 8 tiles the bytes per row and the
    /// number of rows.
    #[repr(C, align(64))]
    struct Configuration {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }

    static CONFIGURATION: Configuration = Configuration {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
        rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
    };

    /// Requested once: the permission covers all threads of the process.
    pub(super) fn available() -> bool {
        static ANSWER: OnceLock<bool> = OnceLock::new();
        *ANSWER.get_or_init(|| cpu_has_tiles() && permitted())
    }

    /// AMX-TILE and AMX-BF16, with the tile registers enabled by the system (OSXSAVE is needed to
    /// check).
    fn cpu_has_tiles() -> bool {
        const TILE_AND_BF16: u32 = 1 << 24 | 1 << 22;
        const OSXSAVE: u32 = 1 << 27;
        const TILE_STATE: u64 = 1 << 17 | 1 << 18;
        #[target_feature(enable = "xsave")]
        fn enabled_state() -> u64 {
            // SAFETY: OSXSAVE was checked.
            unsafe { _xgetbv(0) }
        }
        if __cpuid(0).eax < 7 || __cpuid(1).ecx & OSXSAVE == 0 {
            return false;
        }
        // SAFETY: OSXSAVE means that the CPU has the instruction and the system has enabled it.
        let state = unsafe { enabled_state() };
        __cpuid_count(7, 0).edx & TILE_AND_BF16 == TILE_AND_BF16 && state & TILE_STATE == TILE_STATE
    }

    /// Linux gives a process the 8 KiB of tile registers only on request
    /// (Documentation/arch/x86/xstate.rst).
    fn permitted() -> bool {
        const ARCH_PRCTL: usize = 158;
        const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
        const XFEATURE_XTILEDATA: usize = 18;
        let answer: isize;
        // SAFETY: a system call that does not touch our memory.
        unsafe {
            asm!(
                "syscall",
                inlateout("rax") ARCH_PRCTL => answer,
                in("rdi") ARCH_REQ_XCOMP_PERM,
                in("rsi") XFEATURE_XTILEDATA,
                lateout("rcx") _,
                lateout("r11") _,
                options(nostack),
            );
        }
        answer == 0
    }

    pub(super) fn configure() {
        // SAFETY: `Tiles::Hardware` exists only if the unit is usable; the operand is 64 bytes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const CONFIGURATION, options(nostack, readonly)) }
    }

    pub(super) fn release() {
        // SAFETY: as in `configure`. No tile is in use outside `run`.
        unsafe { asm!("tilerelease", options(nostack, nomem)) }
    }

    /// # Safety
    /// See [`super::Tiles::run`].
    pub(super) unsafe fn run(steps: usize, a: *const f32, b: *const f32, sums: &mut Sums) {
        let c = sums.0.as_mut_ptr();
        // SAFETY: tiles 0-3 hold sums, 4-5 rows of A, 6-7 columns of B. Reads stay within the
        // panels, as promised by the caller, and writes within the 32 x 32 sums.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "test {steps}, {steps}",
                "jz 3f",
                "2:",
                "tileloadd tmm4, [{a} + {a_stride}]",
                "tileloadd tmm6, [{b} + {b_stride}]",
                "tileloadd tmm7, [{b} + {b_stride} + 64]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{low} + {a_stride}]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a}, 64",
                "add {low}, 64",
                "add {b}, 2048",
                "dec {steps}",
                "jnz 2b",
                "3:",
                "tilestored [{c} + {b_stride}], tmm0",
                "tilestored [{c} + {b_stride} + 64], tmm1",
                "tilestored [{c} + {b_stride} + 2048], tmm2",
                "tilestored [{c} + {b_stride} + 2112], tmm3",
                steps = inout(reg) steps => _,
                a = inout(reg) a => _,
                low = inout(reg) a.wrapping_add(SIDE / 2 * ROW) => _,
                b = inout(reg) b => _,
                c = in(reg) c,
                a_stride = in(reg) 4 * ROW,
                b_stride = in(reg) 4 * SIDE,
                out("tmm0") _,
                out("tmm1") _,
                out("tmm2") _,
                out("tmm3") _,
                out("tmm4") _,
                out("tmm5") _,
                out("tmm6") _,
                out("tmm7") _,
                options(nostack),
            );
        }
    }
}

/// # Safety
/// See [`Tiles::run`].
#[cfg(test)]
unsafe fn emulated(steps: usize, a: *const f32, b: *const f32, sums: &mut Sums) {
    let pair = |lane: f32| {
        let bits = lane.to_bits();
        [f32::from_bits(bits << 16), f32::from_bits(bits & 0xffff_0000)]
    };
    sums.0.fill(0.0);
    for lane in 0..steps * STEP {
        for i in 0..SIDE {
            // SAFETY: as promised by the caller.
            let x = pair(unsafe { *a.add(i * ROW + lane) });
            for j in 0..SIDE {
                // SAFETY: as promised by the caller.
                let y = pair(unsafe { *b.add(lane * SIDE + j) });
                sums.0[i * SIDE + j] += x[0] * y[0] + x[1] * y[1];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tile::LANES;
    use super::*;
    use crate::cpu::bf16;

    #[test]
    fn the_matrix_unit_matches_its_emulation() {
        if !available() {
            eprintln!("skipped: this CPU has no AMX, or the system does not allow it");
            return;
        }
        let lanes = |count: usize, salt: usize| -> Vec<f32> {
            let number = |i: usize| bf16::from_f32(((i * 37 + salt) % 101) as f32 / 50.0 - 1.0).to_bits();
            let lane = |i| f32::from_bits(u32::from(number(2 * i + 1)) << 16 | u32::from(number(2 * i)));
            (0..count).map(lane).collect()
        };
        let (a, b) = (lanes(SIDE * ROW, 1), lanes(SIDE * LANES, 2));
        for steps in 0..=LANES / STEP {
            let (mut got, mut want) = (Sums([f32::NAN; _]), Sums([0.0; _]));
            // SAFETY: the panels have the largest possible size.
            unsafe {
                emulated(steps, a.as_ptr(), b.as_ptr(), &mut want);
                let _configured = Tiles::Hardware.configure();
                Tiles::Hardware.run(steps, a.as_ptr(), b.as_ptr(), &mut got);
            }
            for (i, (got, want)) in got.0.iter().zip(&want.0).enumerate() {
                assert!((got - want).abs() < 1e-4 * (1.0 + want.abs()), "{steps} steps, at {i}: {got}, not {want}");
            }
        }
    }
}
