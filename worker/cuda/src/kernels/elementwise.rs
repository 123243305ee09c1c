//! Elementwise operations: conversion between types with a factor, sums, and fills.

use super::{Argument, Call, Element, Memory, Program, Source, sizes};
use crate::error::Error;

pub(super) static SOURCE: Source =
    Source { name: "elementwise.cu", text: include_str!("elementwise.cu"), arithmetic: "--fmad=false" };
const THREADS: u32 = 256;

/// From elements of one type to elements of the same or another type. Memory is 16-byte aligned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Elementwise {
    pub from: Element,
    pub to: Element,
}

impl Elementwise {
    pub fn program(&self) -> Program {
        let definitions = vec![format!("-DFROM={}", self.from.name()), format!("-DTO={}", self.to.name())];
        Program { source: &SOURCE, definitions }
    }

    /// Bytes of `count` elements, in both types.
    fn bytes(&self, count: u32) -> [usize; 2] {
        [self.from, self.to].map(|element| count as usize * element.bytes())
    }

    fn call<M>(&self, kernel: &'static str, max_blocks: u32, count: u32, arguments: Vec<Argument<M>>) -> Call<M> {
        let at_once = 16 / self.from.bytes().max(self.to.bytes()) as u32;
        let blocks = (count / at_once).div_ceil(THREADS).min(max_blocks).max(1);
        Call { program: self.program(), kernel, blocks, threads: THREADS, shared_bytes: 0, arguments }
    }

    /// `y` = `x` times `scale` for `count` elements, rounded to nearest even; `add`: whether to add
    /// to `y`. Runs on at most `max_blocks` blocks.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn convert<M: Memory>(
        &self,
        max_blocks: u32,
        count: u32,
        x: M,
        scale: f32,
        y: M,
        add: bool,
    ) -> Result<Call<M>, Error> {
        let [from, to] = self.bytes(count);
        sizes("convert", &[("x", x, from), ("y", y, to)])?;
        let arguments = vec![
            Argument::Reads(x),
            if add { Argument::Updates(y) } else { Argument::Writes(y) },
            Argument::Float(scale),
            Argument::Int(count),
            Argument::Int(add.into()),
        ];
        Ok(self.call("convert", max_blocks, count, arguments))
    }

    /// `y` = `a` + `b` for `count` elements; `y` can be one of them if the types are equal. Runs on
    /// at most `max_blocks` blocks.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn sum<M: Memory>(&self, max_blocks: u32, count: u32, [a, b]: [M; 2], y: M) -> Result<Call<M>, Error> {
        let [from, to] = self.bytes(count);
        sizes("sum", &[("a", a, from), ("b", b, from), ("y", y, to)])?;
        let arguments = vec![Argument::Reads(a), Argument::Reads(b), Argument::Writes(y), Argument::Int(count)];
        Ok(self.call("sum", max_blocks, count, arguments))
    }

    /// `y` = `value` for `count` elements. Runs on at most `max_blocks` blocks.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn fill<M: Memory>(&self, max_blocks: u32, count: u32, value: f32, y: M) -> Result<Call<M>, Error> {
        sizes("fill", &[("y", y, self.bytes(count)[1])])?;
        Ok(self.call(
            "fill",
            max_blocks,
            count,
            vec![Argument::Writes(y), Argument::Float(value), Argument::Int(count)],
        ))
    }
}
