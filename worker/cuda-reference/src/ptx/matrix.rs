//! Warp-wide matrix instructions.

use super::decode::{Line, bracket, vector};
use super::operands::Names;
use super::scan::Token;
use super::{Access, Matrices, Operation, ParseError, Product, Register, Space};
use half::{bf16, f16};

impl<'a> Line<'a, '_> {
    /// `mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {4 sums}, {4 of the left factor}, {2 of
    /// the right one}, {4 addends}`.
    pub(super) fn product(&self, modifiers: &[&str], names: &mut Names<'a>) -> Result<Operation, ParseError> {
        let ["sync", "aligned", "m16n8k16", "row", "col", types @ ..] = modifiers else { return Err(self.unknown()) };
        let widen: fn(u16) -> f32 = match types {
            ["f32", "bf16", "bf16", "f32"] => |bits| bf16::from_bits(bits).to_f32(),
            ["f32", "f16", "f16", "f32"] => |bits| f16::from_bits(bits).to_f32(),
            _ => return Err(self.unknown()),
        };
        let [to, left, right, from] = self.operands.as_slice() else { return Err(self.unknown()) };
        let to = self.destinations(to, names)?;
        let (left, right) = (self.list(left, names)?, self.list(right, names)?);
        Ok(Operation::Multiply(Product { widen, to, left, right, from: self.list(from, names)? }))
    }

    /// `ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {4 registers}, [address]`.
    pub(super) fn matrices(&self, modifiers: &[&str], names: &mut Names<'a>) -> Result<Operation, ParseError> {
        let ["sync", "aligned", "m8n8", "x4", rest @ ..] = modifiers else { return Err(self.unknown()) };
        let is_transposed = match rest {
            ["shared" | "shared::cta", "b16"] => false,
            ["trans", "shared" | "shared::cta", "b16"] => true,
            _ => return Err(self.unknown()),
        };
        let [to, memory] = self.operands.as_slice() else { return Err(self.unknown()) };
        let to = self.destinations(to, names)?;
        let (base, offset) = bracket(memory).ok_or_else(|| self.unknown())?;
        let rows = Access { space: Space::Shared, base: names.source(&[base])?, offset, bytes: 16, parts: 1 };
        Ok(Operation::LoadMatrices(Matrices { rows, is_transposed, to }))
    }

    fn destinations(&self, list: &[Token<'a>], names: &Names<'a>) -> Result<[Register; 4], ParseError> {
        let registers: Result<Vec<Register>, ParseError> = vector(list)
            .into_iter()
            .map(|part| match part {
                [token] => names.register(*token),
                _ => Err(self.unknown()),
            })
            .collect();
        registers?.try_into().map_err(|_| self.unknown())
    }

    fn list<const N: usize>(&self, list: &[Token<'a>], names: &mut Names<'a>) -> Result<[Register; N], ParseError> {
        let registers: Result<Vec<Register>, ParseError> =
            vector(list).into_iter().map(|part| names.source(part)).collect();
        registers?.try_into().map_err(|_| self.unknown())
    }
}
