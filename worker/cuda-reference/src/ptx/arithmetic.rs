//! Computes an instruction for one lane.

use super::Function;
use crate::fp8::{E4M3, E5M2};
use half::{bf16, f16};

/// A value in the low bits of a register, with zeros above.
trait Bits {
    fn of(register: u64) -> Self;
    fn bits(self) -> u64;
}

macro_rules! integers {
    ($($type:ident as $unsigned:ident),*) => {
        $(impl Bits for $type {
            #[inline(always)]
            fn of(register: u64) -> $type {
                register as $type
            }

            #[inline(always)]
            fn bits(self) -> u64 {
                u64::from(self as $unsigned)
            }
        })*
    };
}

integers!(u16 as u16, i16 as u16, u32 as u32, i32 as u32, u64 as u64, i64 as u64);

macro_rules! floats {
    ($($type:ident as $unsigned:ident),*) => {
        $(impl Bits for $type {
            #[inline(always)]
            fn of(register: u64) -> $type {
                $type::from_bits(register as $unsigned)
            }

            #[inline(always)]
            fn bits(self) -> u64 {
                u64::from(self.to_bits())
            }
        })*
    };
}

floats!(f32 as u32, f64 as u64, bf16 as u16, f16 as u16);

impl Bits for bool {
    fn of(register: u64) -> bool {
        register & 1 != 0
    }

    fn bits(self) -> u64 {
        u64::from(self)
    }
}

macro_rules! function {
    (|$a:ident: $A:ty| $value:expr) => {
        function!(|$a: $A, _b: u64, _c: u64| $value)
    };
    (|$a:ident: $A:ty, $b:ident: $B:ty| $value:expr) => {
        function!(|$a: $A, $b: $B, _c: u64| $value)
    };
    (|$a:ident: $A:ty, $b:ident: $B:ty, $c:ident: $C:ty| $value:expr) => {{
        #[inline(always)]
        fn lane(a: u64, b: u64, c: u64) -> u64 {
            let ($a, $b, $c) = (<$A>::of(a), <$B>::of(b), <$C>::of(c));
            ($value).bits()
        }
        Some(Function {
            lane,
            // A loop, which the compiler turns into vector instructions.
            warp: |a, b, c| {
                let mut all = *a;
                for (a, (b, c)) in all.iter_mut().zip(b.iter().zip(c)) {
                    *a = lane(*a, *b, *c);
                }
                all
            },
        })
    }};
}

/// Expands a block with `T` as the type of this name.
macro_rules! by_type {
    ($name:expr, [$($text:literal => $type:ident),*], $T:ident => $value:expr) => {
        match $name {
            $($text => { type $T = $type; $value })*
            _ => None,
        }
    };
}

/// The function of an opcode without `.ftz`; `None` if unknown.
pub(super) fn function(opcode: &str) -> Option<Function> {
    let (name, kind) = opcode.rsplit_once('.')?;
    match name {
        "mov" => copy(kind),
        "cvt.rn.bf16x2" | "cvt.rn.f16x2" | "cvt.rn.satfinite.e4m3x2" | "cvt.rn.satfinite.e5m2x2" => pair(opcode),
        _ if name.starts_with("cvt.") => conversion(opcode),
        "selp" => selection(kind),
        _ if name.starts_with("setp.") => comparison(&name[5..], kind),
        _ if kind.starts_with('f') => float(name, kind),
        _ => integer(name, kind).or_else(|| bits(name, kind)),
    }
}

fn copy(kind: &str) -> Option<Function> {
    match kind {
        "pred" => function!(|a: bool| a),
        "b16" | "u16" | "s16" => function!(|a: u16| a),
        "b32" | "u32" | "s32" | "f32" => function!(|a: u32| a),
        "b64" | "u64" | "s64" | "f64" => function!(|a: u64| a),
        _ => None,
    }
}

fn selection(kind: &str) -> Option<Function> {
    match kind {
        "b16" | "u16" | "s16" => function!(|a: u16, b: u16, c: bool| if c { a } else { b }),
        "b32" | "u32" | "s32" | "f32" => function!(|a: u32, b: u32, c: bool| if c { a } else { b }),
        "b64" | "u64" | "s64" | "f64" => function!(|a: u64, b: u64, c: bool| if c { a } else { b }),
        _ => None,
    }
}

fn integer(name: &str, kind: &str) -> Option<Function> {
    match (name, kind) {
        ("mul.wide", "u16") => return function!(|a: u16, b: u16| u32::from(a) * u32::from(b)),
        ("mul.wide", "s16") => return function!(|a: i16, b: i16| i32::from(a) * i32::from(b)),
        ("mul.wide", "u32") => return function!(|a: u32, b: u32| u64::from(a) * u64::from(b)),
        ("mul.wide", "s32") => return function!(|a: i32, b: i32| i64::from(a) * i64::from(b)),
        ("mad.wide", "u32") => {
            return function!(|a: u32, b: u32, c: u64| (u64::from(a) * u64::from(b)).wrapping_add(c));
        }
        ("mad.wide", "s32") => {
            return function!(|a: i32, b: i32, c: i64| (i64::from(a) * i64::from(b)).wrapping_add(c));
        }
        ("mul.hi", "u32") => return function!(|a: u32, b: u32| ((u64::from(a) * u64::from(b)) >> 32) as u32),
        ("mul.hi", "s32") => return function!(|a: i32, b: i32| ((i64::from(a) * i64::from(b)) >> 32) as i32),
        ("mul.hi", "u64") => return function!(|a: u64, b: u64| ((u128::from(a) * u128::from(b)) >> 64) as u64),
        ("neg", "s32") => return function!(|a: i32| a.wrapping_neg()),
        ("neg", "s64") => return function!(|a: i64| a.wrapping_neg()),
        ("abs", "s32") => return function!(|a: i32| a.wrapping_abs()),
        ("abs", "s64") => return function!(|a: i64| a.wrapping_abs()),
        ("shr", "s32") => return function!(|a: i32, b: u32| a >> b.min(31)),
        ("shr", "s64") => return function!(|a: i64, b: u32| a >> b.min(63)),
        ("bfe", "u32") => return function!(|a: u32, b: u32, c: u32| extract(a, b, c)),
        _ => {}
    }
    by_type!(kind, ["u16" => u16, "s16" => i16, "u32" => u32, "s32" => i32, "u64" => u64, "s64" => i64], T => match name {
        "add" => function!(|a: T, b: T| a.wrapping_add(b)),
        "sub" => function!(|a: T, b: T| a.wrapping_sub(b)),
        "mul.lo" => function!(|a: T, b: T| a.wrapping_mul(b)),
        "mad.lo" => function!(|a: T, b: T, c: T| a.wrapping_mul(b).wrapping_add(c)),
        // Division by zero is unspecified on a device.
        "div" => function!(|a: T, b: T| if b == 0 { T::MAX } else { a.wrapping_div(b) }),
        "rem" => function!(|a: T, b: T| if b == 0 { a } else { a.wrapping_rem(b) }),
        "min" => function!(|a: T, b: T| a.min(b)),
        "max" => function!(|a: T, b: T| a.max(b)),
        _ => None,
    })
}

/// Extracts `c` bits starting at bit `b`.
fn extract(a: u32, b: u32, c: u32) -> u32 {
    let (at, bits) = (b & 0xff, c & 0xff);
    let shifted = a.checked_shr(at).unwrap_or(0);
    if bits >= 32 { shifted } else { shifted & ((1 << bits) - 1) }
}

/// Computes `bfi.b32`.
pub(super) fn insertion() -> Option<Function> {
    function!(|a: u64, b: u64, place: u64| insert(a, b, place))
}

/// Inserts the low bits of `a` into `b`. `place` holds the first bit position and, from bit 8 on,
/// the number of bits.
pub(super) fn insert(a: u64, b: u64, place: u64) -> u64 {
    let (at, bits) = ((place & 0xff).min(32), (place >> 8).min(32));
    let mask = (((1 << bits) - 1) << at) & u64::from(u32::MAX);
    (b & !mask) | ((a << at) & mask)
}

fn bits(name: &str, kind: &str) -> Option<Function> {
    if kind == "pred" {
        return match name {
            "and" => function!(|a: bool, b: bool| a & b),
            "or" => function!(|a: bool, b: bool| a | b),
            "xor" => function!(|a: bool, b: bool| a ^ b),
            "not" => function!(|a: bool| !a),
            _ => None,
        };
    }
    match (name, kind) {
        ("popc", "b32") => return function!(|a: u32| a.count_ones()),
        ("clz", "b32") => return function!(|a: u32| a.leading_zeros()),
        ("brev", "b32") => return function!(|a: u32| a.reverse_bits()),
        ("prmt", "b32") => return function!(|a: u32, b: u32, c: u32| permute(a, b, c)),
        ("shf.l.wrap", "b32") => return function!(|a: u32, b: u32, c: u32| funnel(a, b, 32 - (c & 31))),
        ("shf.r.wrap", "b32") => return function!(|a: u32, b: u32, c: u32| funnel(a, b, c & 31)),
        _ => {}
    }
    // Signedness does not matter: `shr.u32` is `shr.b32`.
    by_type!(kind, ["b16" => u16, "u16" => u16, "b32" => u32, "u32" => u32, "b64" => u64, "u64" => u64], T => match name {
        "and" => function!(|a: T, b: T| a & b),
        "or" => function!(|a: T, b: T| a | b),
        "xor" => function!(|a: T, b: T| a ^ b),
        "not" => function!(|a: T| !a),
        "shl" => function!(|a: T, b: u32| a.checked_shl(b).unwrap_or(0)),
        "shr" => function!(|a: T, b: u32| a.checked_shr(b).unwrap_or(0)),
        _ => None,
    })
}

/// 32 bits of `b:a`, starting at bit `at`.
fn funnel(a: u32, b: u32, at: u32) -> u32 {
    (((u64::from(b) << 32) | u64::from(a)) >> at) as u32
}

/// Selects four bytes of `b:a`, each by four bits of `c`, of which the highest replicates the sign.
fn permute(a: u32, b: u32, c: u32) -> u32 {
    let bytes = ((u64::from(b) << 32) | u64::from(a)).to_le_bytes();
    u32::from_le_bytes(std::array::from_fn(|at| {
        let choice = c >> (4 * at);
        let byte = bytes[(choice & 7) as usize];
        if choice & 8 == 0 { byte } else { ((byte as i8) >> 7) as u8 }
    }))
}

fn float(name: &str, kind: &str) -> Option<Function> {
    // Approximate instructions are computed exactly, in `f64`, so that the result is rounded once.
    let approximate = match (name, kind) {
        ("ex2.approx", "f32") => function!(|a: f32| f64::from(a).exp2() as f32),
        ("lg2.approx", "f32") => function!(|a: f32| f64::from(a).log2() as f32),
        ("rsqrt.approx", "f32") => function!(|a: f32| (1.0 / f64::from(a).sqrt()) as f32),
        ("tanh.approx", "f32") => function!(|a: f32| f64::from(a).tanh() as f32),
        ("sqrt.approx" | "rcp.approx" | "div.approx" | "div.full", "f32") => {
            return float(&format!("{}.rn", name.split('.').next()?), kind);
        }
        _ => None,
    };
    approximate.or_else(|| {
        by_type!(kind, ["f32" => f32, "f64" => f64], T => match name {
            "add" | "add.rn" => function!(|a: T, b: T| a + b),
            "sub" | "sub.rn" => function!(|a: T, b: T| a - b),
            "mul" | "mul.rn" => function!(|a: T, b: T| a * b),
            "fma.rn" => function!(|a: T, b: T, c: T| a.mul_add(b, c)),
            "div.rn" => function!(|a: T, b: T| a / b),
            "rcp.rn" => function!(|a: T| T::from(1u8) / a),
            "sqrt.rn" => function!(|a: T| a.sqrt()),
            "neg" => function!(|a: T| -a),
            "abs" => function!(|a: T| a.abs()),
            // If one operand is NaN, the other is the result, in PTX as in Rust.
            "min" => function!(|a: T, b: T| a.min(b)),
            "max" => function!(|a: T, b: T| a.max(b)),
            _ => None,
        })
    })
}

fn comparison(name: &str, kind: &str) -> Option<Function> {
    let ordered = match name {
        // Unsigned comparison.
        "lo" => "lt",
        "ls" => "le",
        "hi" => "gt",
        "hs" => "ge",
        _ => name,
    };
    let integers = by_type!(
        kind,
        ["u16" => u16, "b16" => u16, "s16" => i16, "u32" => u32, "b32" => u32, "s32" => i32, "u64" => u64, "b64" => u64, "s64" => i64],
        T => match ordered {
            "eq" => function!(|a: T, b: T| a == b),
            "ne" => function!(|a: T, b: T| a != b),
            "lt" => function!(|a: T, b: T| a < b),
            "le" => function!(|a: T, b: T| a <= b),
            "gt" => function!(|a: T, b: T| a > b),
            "ge" => function!(|a: T, b: T| a >= b),
            _ => None,
        }
    );
    integers.or_else(|| {
        by_type!(kind, ["f32" => f32, "f64" => f64], T => match name {
            "eq" => function!(|a: T, b: T| a == b),
            // Ordered, unlike `!=`: false if there is a NaN.
            "ne" => function!(|a: T, b: T| matches!(a.partial_cmp(&b), Some(Less | Greater))),
            "lt" => function!(|a: T, b: T| a < b),
            "le" => function!(|a: T, b: T| a <= b),
            "gt" => function!(|a: T, b: T| a > b),
            "ge" => function!(|a: T, b: T| a >= b),
            // True if there is a NaN.
            "equ" => function!(|a: T, b: T| !matches!(a.partial_cmp(&b), Some(Less | Greater))),
            "neu" => function!(|a: T, b: T| a != b),
            "ltu" => function!(|a: T, b: T| !matches!(a.partial_cmp(&b), Some(Greater | Equal))),
            "leu" => function!(|a: T, b: T| a.partial_cmp(&b) != Some(Greater)),
            "gtu" => function!(|a: T, b: T| !matches!(a.partial_cmp(&b), Some(Less | Equal))),
            "geu" => function!(|a: T, b: T| a.partial_cmp(&b) != Some(Less)),
            "num" => function!(|a: T, b: T| !a.is_nan() && !b.is_nan()),
            "nan" => function!(|a: T, b: T| a.is_nan() || b.is_nan()),
            _ => None,
        })
    })
}

use std::cmp::Ordering::{Equal, Greater, Less};

fn pair(opcode: &str) -> Option<Function> {
    match opcode {
        "cvt.rn.bf16x2.f32" => {
            function!(|a: f32, b: f32| (bf16::from_f32(a).bits() << 16 | bf16::from_f32(b).bits()) as u32)
        }
        "cvt.rn.f16x2.f32" => {
            function!(|a: f32, b: f32| (f16::from_f32(a).bits() << 16 | f16::from_f32(b).bits()) as u32)
        }
        "cvt.rn.satfinite.e4m3x2.f32" => {
            function!(|a: f32, b: f32| u16::from_le_bytes([E4M3.encoded(b), E4M3.encoded(a)]))
        }
        "cvt.rn.satfinite.e5m2x2.f32" => {
            function!(|a: f32, b: f32| u16::from_le_bytes([E5M2.encoded(b), E5M2.encoded(a)]))
        }
        _ => None,
    }
}

fn conversion(opcode: &str) -> Option<Function> {
    match opcode {
        "cvt.rn.bf16.f32" => return function!(|a: f32| bf16::from_f32(a)),
        "cvt.f32.bf16" => return function!(|a: bf16| a.to_f32()),
        "cvt.rn.f16.f32" => return function!(|a: f32| f16::from_f32(a)),
        "cvt.f32.f16" => return function!(|a: f16| a.to_f32()),
        "cvt.f64.f32" => return function!(|a: f32| f64::from(a)),
        "cvt.rn.f32.f64" => return function!(|a: f64| a as f32),
        "cvt.rni.f32.f32" => return function!(|a: f32| a.round_ties_even()),
        "cvt.rzi.f32.f32" => return function!(|a: f32| a.trunc()),
        "cvt.rmi.f32.f32" => return function!(|a: f32| a.floor()),
        "cvt.rzi.s32.f32" => return function!(|a: f32| a as i32),
        "cvt.rzi.u32.f32" => return function!(|a: f32| a as u32),
        "cvt.rni.s32.f32" => return function!(|a: f32| a.round_ties_even() as i32),
        _ => {}
    }
    let (to, from) = opcode.strip_prefix("cvt.rn.").unwrap_or(opcode.strip_prefix("cvt.")?).split_once('.')?;
    let is_rounded = opcode.starts_with("cvt.rn.");
    by_type!(from, ["u16" => u16, "s16" => i16, "u32" => u32, "s32" => i32, "u64" => u64, "s64" => i64], T => match to {
        "u16" | "s16" if !is_rounded => function!(|a: T| a as u16),
        "u32" | "s32" if !is_rounded => function!(|a: T| a as u32),
        "u64" | "s64" if !is_rounded => function!(|a: T| a as u64),
        "f32" if is_rounded => function!(|a: T| a as f32),
        "f64" if is_rounded => function!(|a: T| a as f64),
        _ => None,
    })
}

/// The value that an atomic operation stores, from the old value and the operands.
pub(super) fn atomic(operation: &str, kind: &str) -> Option<Function> {
    match operation {
        "exch" => function!(|_old: u64, b: u64| b),
        "cas" => function!(|old: u64, compare: u64, value: u64| if old == compare { value } else { old }),
        "and" | "or" | "xor" => bits(operation, kind),
        "add" if kind.starts_with('f') => float("add", kind),
        "add" | "min" | "max" => integer(operation, kind),
        _ => None,
    }
}
