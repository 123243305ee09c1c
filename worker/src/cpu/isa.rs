//! Which vector instructions the kernels use, decided once at start.

use super::HalfKernel;

/// A family of vector instructions with its own kernels.
///
/// Kernels check [`Isa::available`] before they enter code compiled for it and fall back to [`Isa::Portable`], so a
/// value made by hand is harmless.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Isa {
    /// AVX-512 F, BW, DQ, VL (and with them AVX2 and FMA).
    Avx512,
    /// AVX2 with FMA.
    Avx2,
    /// What the compiler's baseline offers (SSE2 on x86-64).
    Portable,
}

/// Why a kernel cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IsaError {
    /// The word is unknown.
    #[error("unknown CPU kernel `{0}`, expected auto, amx, avx512bf16, avx512, avx2 or portable")]
    Unknown(String),
    /// The CPU lacks the instructions.
    #[error("CPU kernel `{0}` was asked for, but this CPU does not have its instructions")]
    Missing(&'static str),
}

impl Isa {
    /// All instruction sets, fastest first.
    pub const ALL: [Isa; 3] = [Isa::Avx512, Isa::Avx2, Isa::Portable];

    /// The instruction set to use. `force` is `auto`, `amx`, `avx512bf16`, `avx512`, `avx2` or `portable`; `None` is
    /// `auto`: the fastest that the CPU has. `amx` and `avx512bf16` also say how bf16 is multiplied
    /// ([`HalfKernel::detect`]).
    ///
    /// # Errors
    /// The word is unknown or the CPU lacks the instructions.
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

    /// Whether this CPU (and operating system) can run the kernels. Cheap: the standard library caches the result.
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

    /// Whether this CPU can run the kernels.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn available(self) -> bool {
        self == Isa::Portable
    }
}

/// Defines `fn NAME(isa, arguments)`: the `#[inline(always)]` function BODY compiled once per [`Isa`]. Both may be
/// generic over types that the arguments name: `fn NAME<E: Element> = BODY(x: &[E])`. What BODY calls must be inlined,
/// too: a closure called in two places may become a separate function, compiled for the baseline and many times slower.
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
    fn forced_words() {
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
