//! Names in a kernel: registers, constants, shared arrays, parameters.

use super::scan::Token;
use super::{Constant, ParseError, Register, Special};
use std::collections::HashMap;

/// A `.shared` variable.
#[derive(Debug, Clone, Copy)]
pub(super) enum Symbol {
    At(usize),
    /// Dynamic shared memory, placed after the other arrays.
    Dynamic,
}

/// Kernel parameters by name: index and size.
pub(super) type Parameters<'a> = HashMap<&'a str, (usize, usize)>;

/// Registers of one brace scope. Inline assembly opens its own scopes.
#[derive(Default)]
struct Scope<'a> {
    /// `%r<36>`: the first of 36 registers.
    ranges: HashMap<&'a str, (Register, u32)>,
    names: HashMap<&'a str, Register>,
}

pub(super) struct Names<'a> {
    scopes: Vec<Scope<'a>>,
    registers: Register,
    constants: HashMap<Constant, Register>,
    pub(super) parameters: Parameters<'a>,
    pub(super) shared: HashMap<&'a str, Symbol>,
    pub(super) shared_bytes: usize,
    pub(super) has_dynamic_shared: bool,
}

/// Aligned for every type.
const DYNAMIC_ALIGNMENT: usize = 16;

impl<'a> Names<'a> {
    pub(super) fn new(parameters: Parameters<'a>, shared: HashMap<&'a str, Symbol>, shared_bytes: usize) -> Names<'a> {
        let scopes = vec![Scope::default()];
        let constants = HashMap::new();
        Names { scopes, registers: 0, constants, parameters, shared, shared_bytes, has_dynamic_shared: false }
    }

    pub(super) fn open(&mut self) {
        self.scopes.push(Scope::default());
    }

    /// Closes a scope; returns false if it was the kernel's body.
    pub(super) fn close(&mut self) -> bool {
        self.scopes.pop();
        !self.scopes.is_empty()
    }

    pub(super) fn declare(&mut self, name: &'a str, count: Option<u32>) {
        let first = self.registers;
        self.registers += count.unwrap_or(1);
        let Some(scope) = self.scopes.last_mut() else { return };
        match count {
            Some(count) => drop(scope.ranges.insert(name, (first, count))),
            None => drop(scope.names.insert(name, first)),
        }
    }

    /// Looks up a declared register.
    pub(super) fn register(&self, token: Token<'_>) -> Result<Register, ParseError> {
        self.declared(token.text)
            .ok_or_else(|| ParseError::new(token.line, format!("`{}`, expected a declared register", token.text)))
    }

    fn declared(&self, name: &str) -> Option<Register> {
        let digits = name.len() - name.trim_end_matches(|byte: char| byte.is_ascii_digit()).len();
        let (prefix, number) = name.split_at(name.len() - digits);
        let number: Option<u32> = number.parse().ok();
        self.scopes.iter().rev().find_map(|scope| {
            let in_range = || {
                let (first, count) = *scope.ranges.get(prefix)?;
                number.filter(|number| *number < count).map(|number| first + number)
            };
            scope.names.get(name).copied().or_else(in_range)
        })
    }

    pub(super) fn constant(&mut self, constant: Constant) -> Register {
        let next = self.registers;
        let register = *self.constants.entry(constant).or_insert(next);
        self.registers = self.registers.max(register + 1);
        register
    }

    /// A register or constant: an immediate, a special register, or the address of a shared array.
    pub(super) fn source(&mut self, tokens: &[Token<'a>]) -> Result<Register, ParseError> {
        let (first, negative) = match tokens {
            [sign, number] if sign.text == "-" => (*number, true),
            [token] => (*token, false),
            _ => {
                let line = tokens.first().map_or(0, |token| token.line);
                return Err(ParseError::new(line, format!("`{}`, expected one operand", shown(tokens))));
            }
        };
        if let Some(register) = self.declared(first.text).filter(|_| !negative) {
            return Ok(register);
        }
        let bits = match number(first.text) {
            Some(bits) if negative => bits.wrapping_neg(),
            Some(bits) => bits,
            None => match special(first.text) {
                Some(special) => return Ok(self.constant(Constant::Special(special))),
                None => self.address(first)?,
            },
        };
        Ok(self.constant(Constant::Bits(bits)))
    }

    /// Offset of a shared array.
    fn address(&mut self, token: Token<'_>) -> Result<u64, ParseError> {
        match self.shared.get(token.text) {
            Some(Symbol::At(offset)) => Ok(*offset as u64),
            Some(Symbol::Dynamic) => {
                self.shared_bytes = self.shared_bytes.next_multiple_of(DYNAMIC_ALIGNMENT);
                self.has_dynamic_shared = true;
                Ok(self.shared_bytes as u64)
            }
            None => Err(ParseError::new(
                token.line,
                format!("`{}`, expected a register, a number or a shared array", token.text),
            )),
        }
    }

    /// A fresh register that the text does not name.
    pub(super) fn temporary(&mut self) -> Register {
        self.registers += 1;
        self.registers - 1
    }

    pub(super) fn finish(self) -> (usize, Vec<(Register, Constant)>) {
        let mut constants: Vec<_> =
            self.constants.into_iter().map(|(constant, register)| (register, constant)).collect();
        constants.sort_by_key(|(register, _)| *register);
        (self.registers as usize, constants)
    }
}

/// Parses an immediate to its bits: an integer, or a float in `0f` or `0d` notation.
pub(super) fn number(text: &str) -> Option<u64> {
    let hexadecimal = |digits: &str| u64::from_str_radix(digits, 16).ok();
    let unsigned = text.strip_suffix('U').unwrap_or(text);
    match text.get(..2) {
        Some("0f" | "0F") if text.len() == 10 => hexadecimal(&text[2..]),
        Some("0d" | "0D") if text.len() == 18 => hexadecimal(&text[2..]),
        Some("0x" | "0X") => hexadecimal(&unsigned[2..]),
        _ => unsigned.parse().ok(),
    }
}

fn special(name: &str) -> Option<Special> {
    match name {
        "%tid.x" => Some(Special::Thread),
        "%ntid.x" => Some(Special::Threads),
        "%ctaid.x" => Some(Special::Block),
        "%nctaid.x" => Some(Special::Blocks),
        "%laneid" => Some(Special::Lane),
        "%warpid" => Some(Special::Warp),
        _ => None,
    }
}

pub(super) fn shown(tokens: &[Token<'_>]) -> String {
    tokens.iter().map(|token| token.text).collect::<Vec<_>>().join(" ")
}
