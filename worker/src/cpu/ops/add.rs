//! Elementwise sums: residual connections, and the gradients that meet there.

use super::ELEMENTS;
use super::pieces::{in_pieces, rows};
use super::sums::add_rows;
use crate::cpu::isa::per_isa;
use crate::cpu::{Cpu, Element};

#[inline(always)]
fn add_body<E: Element>(a: &[E], b: &[E], y: &mut [E]) {
    for ((y, &a), &b) in y.iter_mut().zip(a).zip(b) {
        *y = E::of(a.get() + b.get());
    }
}

per_isa! { fn add_piece<E: Element> = add_body(a: &[E], b: &[E], y: &mut [E]) }

/// `y` = `a` + `b`, elementwise. The gradient of `y` is also the gradient of `a` and of `b`.
pub fn add<E: Element>(cpu: &Cpu, a: &[E], b: &[E], y: &mut [E]) {
    let len = y.len();
    assert_eq!((a.len(), b.len()), (len, len), "length of a and b");
    in_pieces(cpu, len, ELEMENTS, rows(y, 1), |range, y| add_piece(cpu.isa, &a[range.clone()], &b[range], y));
}

/// `y` += `x`, elementwise.
pub fn add_to<E: Element>(cpu: &Cpu, x: &[E], y: &mut [E]) {
    let len = y.len();
    assert_eq!(x.len(), len, "length of x");
    in_pieces(cpu, len, ELEMENTS, rows(y, 1), |range, y| add_rows(cpu.isa, &x[range], y));
}
