//! Selects the vector instruction set of the kernels, once at startup.

use super::HalfKernel;

/// A vector instruction set with its own kernels.
///
/// Kernels check [`Isa::available`] before entering code compiled for a set and fall back to
/// [`Isa::Portable`], so constructing an unsupported value is harmless.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Isa {
    /// AVX-512 F, BW, DQ, VL (and with them AVX2 and FMA).
    Avx512,
    /// AVX2 with FMA.
    Avx2,
    /// The compiler's baseline (SSE2 on x86-64).
    Portable,
}

/// Why a kernel cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IsaError {
    /// The name is unknown.
    #[error("unknown CPU kernel `{0}`, expected auto, amx, avx512bf16, avx512, avx2 or portable")]
    Unknown(String),
    /// The CPU lacks the instructions.
    #[error("CPU kernel `{0}` was requested, but this CPU does not support it")]
    Missing(&'static str),
}

impl Isa {
    /// All instruction sets, fastest first.
    pub const ALL: [Isa; 3] = [Isa::Avx512, Isa::Avx2, Isa::Portable];

    /// The instruction set to use. `force` is `auto`, `amx`, `avx512bf16`, `avx512`, `avx2` or
    /// `portable`; `None` is `auto`, the fastest that the CPU supports. `amx` and `avx512bf16` also
    /// select the bf16 kernel ([`HalfKernel::detect`]).
    ///
    /// # Errors
    /// The name is unknown or the CPU lacks the instructions.
    pub fn detect(force: Option<&str>) -> Result<Isa, IsaError> {
        let word = force.unwrap_or("auto");
        if word == "auto" {
            return Ok(Isa::fastest());
        }
        for half in [HalfKernel::Amx, HalfKernel::Dpbf16] {
            if half.name() == word {
                return if half.available() { Ok(Isa::Avx512) } else { Err(IsaError::Missing(half.name())) };
            }
        }
        let isa = Isa::ALL.into_iter().find(|isa| isa.name() == word);
        let isa = isa.ok_or_else(|| IsaError::Unknown(word.to_owned()))?;
        if isa.available() { Ok(isa) } else { Err(IsaError::Missing(isa.name())) }
    }

    /// The fastest instruction set of this CPU.
    pub fn fastest() -> Isa {
        Isa::ALL.into_iter().find(|isa| isa.available()).unwrap_or(Isa::Portable)
    }

    /// Its name in `SWITCHYARD_KERNEL` and in the `ready` event.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Portable => "portable",
        }
    }

    /// Whether the CPU and the operating system support the kernels. Cheap: the standard library
    /// caches the result.
    #[cfg(target_arch = "x86_64")]
    pub fn available(self) -> bool {
        match self {
            Isa::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && Isa::Avx2.available()
            }
            Isa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            Isa::Portable => true,
        }
    }

    /// Whether the CPU supports the kernels.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn available(self) -> bool {
        self == Isa::Portable
    }
}

/// Defines `fn NAME(isa, arguments)`: the `#[inline(always)]` function BODY, compiled once per
/// [`Isa`]. Both can be generic over types that the arguments name:
/// `fn NAME<E: Element> = BODY(x: &[E])`. Everything BODY calls must be inlined as well: a closure
/// called in two places can become a separate function, which is compiled for the baseline and many
/// times slower.
macro_rules! per_isa {
    (
        $(#[$meta:meta])*
        $visibility:vis fn $name:ident $(<$($generic:ident: $bound:path),+>)? = $body:ident($($arg:ident: $type:ty),* $(,)?)
    ) => {
        $(#[$meta])*
        #[allow(unsafe_code, clippy::too_many_arguments)]
        $visibility fn $name$(<$($generic: $bound),+>)?(isa: $crate::cpu::Isa, $($arg: $type),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                fn avx512$(<$($generic: $bound),+>)?($($arg: $type),*) { $body($($arg),*) }
                #[target_feature(enable = "avx2,fma")]
                fn avx2$(<$($generic: $bound),+>)?($($arg: $type),*) { $body($($arg),*) }
                match isa {
                    // SAFETY: the CPU has the features the function is compiled for.
                    $crate::cpu::Isa::Avx512 if isa.available() => return unsafe { avx512($($arg),*) },
                    // SAFETY: the CPU has the features the function is compiled for.
                    $crate::cpu::Isa::Avx2 if isa.available() => return unsafe { avx2($($arg),*) },
                    _ => {}
                }
            }
            let _ = isa;
            $body($($arg),*)
        }
    };
}
pub(crate) use per_isa;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_instruction_set_can_be_forced() {
        assert_eq!(Isa::detect(Some("portable")), Ok(Isa::Portable));
        assert!(Isa::detect(Some("auto")).unwrap().available());
        assert_eq!(Isa::detect(None), Isa::detect(Some("auto")));
        assert_eq!(Isa::detect(Some("sse9")), Err(IsaError::Unknown("sse9".to_owned())));
        for isa in Isa::ALL {
            let forced = Isa::detect(Some(isa.name()));
            assert_eq!(forced, if isa.available() { Ok(isa) } else { Err(IsaError::Missing(isa.name())) });
        }
    }
}
