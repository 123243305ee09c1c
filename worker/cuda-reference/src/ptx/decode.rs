//! Decodes one PTX instruction into operations on numbered registers.

use super::arithmetic::{atomic, function, insertion};
use super::operands::{Names, number, shown};
use super::scan::Token;
use super::{Access, Constant, Flush, Operation, ParseError, Register, Shuffle, Space, Vote};

/// An operation, or the label of a branch.
pub(super) enum Target<'a> {
    Operation(Operation),
    Label(Token<'a>),
}

/// Modifiers that affect neither the result nor the checks.
const HINTS: [&str; 16] = [
    "uni",
    "aligned",
    "nc",
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "volatile",
    "relaxed",
    "gpu",
    "cta",
    "L1::evict_last",
    "L1::no_allocate",
];

/// Decodes one instruction.
pub(super) fn instruction<'a>(
    opcode: Token<'a>,
    operands: &[Token<'a>],
    names: &mut Names<'a>,
) -> Result<Vec<Target<'a>>, ParseError> {
    let line = Line { opcode, operands: split(operands) };
    let mut words = opcode.text.split('.');
    let first = words.next().unwrap_or_default();
    let modifiers: Vec<&str> = words.collect();
    let operation = match first {
        "bra" if modifiers.iter().all(|word| HINTS.contains(word)) => {
            let [[label]] = line.operands.as_slice() else { return Err(line.unknown()) };
            return Ok(vec![Target::Label(*label)]);
        }
        "ret" | "exit" => Operation::Exit,
        "ld" | "st" => return line.access(first == "st", &modifiers, names),
        "atom" | "red" => line.atomic(first == "atom", &modifiers, names)?,
        "bar" | "barrier" => line.barrier(&modifiers, names)?,
        "shfl" => line.shuffle(&modifiers, names)?,
        "vote" => line.vote(&modifiers, names)?,
        // Memory is sequentially consistent here; what a fence orders between blocks is reported as
        // a race.
        "membar" | "fence" => Operation::Nothing,
        "cvta" => line.address(&modifiers, names)?,
        "mov" if line.operands.iter().any(|operand| operand[0].text == "{") => line.pack(&modifiers, names)?,
        "bfi" if modifiers == ["b32"] => line.insert(names)?,
        "setp" => return line.comparison(&modifiers, names),
        _ => line.compute(opcode.text, names)?,
    };
    Ok(vec![Target::Operation(operation)])
}

/// Splits operands at commas outside braces and brackets.
fn split<'a, 't>(tokens: &'t [Token<'a>]) -> Vec<&'t [Token<'a>]> {
    let (mut parts, mut start, mut depth) = (Vec::new(), 0, 0);
    for (at, token) in tokens.iter().enumerate() {
        match token.text {
            "{" | "[" => depth += 1,
            "}" | "]" => depth -= 1,
            "," if depth == 0 => {
                parts.push(&tokens[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    if start < tokens.len() {
        parts.push(&tokens[start..]);
    }
    parts.retain(|part| !part.is_empty());
    parts
}

pub(super) struct Line<'a, 't> {
    opcode: Token<'a>,
    pub(super) operands: Vec<&'t [Token<'a>]>,
}

impl<'a> Line<'a, '_> {
    pub(super) fn unknown(&self) -> ParseError {
        let operands: Vec<String> = self.operands.iter().map(|operand| shown(operand)).collect();
        let text = format!("{} {}", self.opcode.text, operands.join(", "));
        ParseError::new(self.opcode.line, format!("`{}`, which is an unsupported instruction", text.trim()))
    }

    fn destination(&self, names: &Names<'a>) -> Result<Register, ParseError> {
        match self.operands.first() {
            Some([token]) => names.register(*token),
            _ => Err(self.unknown()),
        }
    }

    /// Sources from the second operand on; missing ones are zero.
    fn sources<const N: usize>(&self, names: &mut Names<'a>) -> Result<[Register; N], ParseError> {
        let given = &self.operands[1.min(self.operands.len())..];
        if given.len() > N {
            return Err(self.unknown());
        }
        let mut sources = [names.constant(Constant::Bits(0)); N];
        for (source, operand) in sources.iter_mut().zip(given) {
            *source = names.source(operand)?;
        }
        Ok(sources)
    }

    fn compute(&self, opcode: &str, names: &mut Names<'a>) -> Result<Operation, ParseError> {
        let plain = opcode.replace(".ftz", "");
        let function = function(&plain).ok_or_else(|| self.unknown())?;
        let (to, from) = (self.destination(names)?, self.sources(names)?);
        let gives_float = !plain.starts_with("setp") && (!plain.starts_with("cvt") || plain.ends_with("f32.f32"));
        let flush = match (plain.len() < opcode.len(), plain.ends_with(".f32")) {
            (false, _) => Flush::Nothing,
            (true, true) if gives_float => Flush::All,
            (true, true) => Flush::Operands,
            (true, false) => return Err(self.unknown()),
        };
        Ok(Operation::Compute { function, to, from, flush })
    }

    /// `setp.lt.s32 p, a, b`, or combined with a predicate: `setp.lt.and.s32 p, a, b, q`.
    fn comparison(&self, modifiers: &[&str], names: &mut Names<'a>) -> Result<Vec<Target<'a>>, ParseError> {
        let Some(join) = modifiers.iter().find(|word| matches!(**word, "and" | "or" | "xor")) else {
            return Ok(vec![Target::Operation(self.compute(self.opcode.text, names)?)]);
        };
        let [.., other] = self.operands.as_slice() else { return Err(self.unknown()) };
        let (negated, other) = match other {
            [sign, rest @ ..] if sign.text == "!" => (true, rest),
            _ => (false, *other),
        };
        let other = names.source(other)?;
        let compared = Line { opcode: self.opcode, operands: self.operands[..self.operands.len() - 1].to_vec() };
        let compare = compared.compute(&self.opcode.text.replace(&format!(".{join}"), ""), names)?;
        let Operation::Compute { function: first, to, from, flush } = compare else { return Err(self.unknown()) };
        let value = names.temporary();
        let mut steps = vec![Operation::Compute { function: first, to: value, from, flush }];
        let mut second = other;
        let join = |name: &str| function(&format!("{name}.pred")).ok_or_else(|| self.unknown());
        if negated {
            second = names.temporary();
            steps.push(Operation::Compute {
                function: join("not")?,
                to: second,
                from: [other; 3],
                flush: Flush::Nothing,
            });
        }
        steps.push(Operation::Compute {
            function: join(join_name(modifiers))?,
            to,
            from: [value, second, second],
            flush: Flush::Nothing,
        });
        Ok(steps.into_iter().map(Target::Operation).collect())
    }

    /// `mov.b64 {lo, hi}, whole` and its inverse.
    fn pack(&self, modifiers: &[&str], names: &mut Names<'a>) -> Result<Operation, ParseError> {
        let width = match modifiers {
            ["b32"] => 32,
            ["b64"] => 64,
            _ => return Err(self.unknown()),
        };
        let [to, from] = self.operands.as_slice() else { return Err(self.unknown()) };
        let is_split = to[0].text == "{";
        let list = vector(if is_split { to } else { from });
        let parts = list.len();
        if !matches!(parts, 2 | 4) {
            return Err(self.unknown());
        }
        let bits = width / parts as u32;
        let mut registers = [0; 4];
        for (register, token) in registers.iter_mut().zip(list) {
            // `_` discards this part.
            *register = match token {
                [token] if token.text == "_" && is_split => names.temporary(),
                [token] if is_split => names.register(*token)?,
                source => names.source(source)?,
            };
        }
        Ok(if is_split {
            Operation::Split { to: registers, parts, bits, from: names.source(from)? }
        } else {
            Operation::Join { to: self.destination(names)?, parts, bits, from: registers }
        })
    }

    /// `bfi.b32 to, from, into, at, bits`, where the last two are immediates.
    fn insert(&self, names: &mut Names<'a>) -> Result<Operation, ParseError> {
        let [_, from, into, [at], [bits]] = self.operands.as_slice() else { return Err(self.unknown()) };
        let (at, bits) = number(at.text).zip(number(bits.text)).ok_or_else(|| self.unknown())?;
        let place = names.constant(Constant::Bits(at | bits << 8));
        let from = [names.source(from)?, names.source(into)?, place];
        let function = insertion().ok_or_else(|| self.unknown())?;
        Ok(Operation::Compute { function, to: self.destination(names)?, from, flush: Flush::Nothing })
    }

    /// `cvta.to.global.u64` and `cvta.shared.u64`: global addresses are generic ones, shared ones
    /// have a base.
    fn address(&self, modifiers: &[&str], names: &mut Names<'a>) -> Result<Operation, ParseError> {
        let function = match modifiers {
            ["to", "global", "u64"] | ["global", "u64"] => function("mov.u64"),
            ["to", "shared", "u64"] => function("sub.u64"),
            ["shared", "u64"] => function("add.u64"),
            _ => None,
        };
        let function = function.ok_or_else(|| self.unknown())?;
        let [from] = self.sources(names)?;
        let base = names.constant(Constant::Bits(super::SHARED));
        Ok(Operation::Compute {
            function,
            to: self.destination(names)?,
            from: [from, base, base],
            flush: Flush::Nothing,
        })
    }

    /// Space, vector length, bytes per element; ignores hints.
    fn shape(&self, modifiers: &[&str]) -> Result<(Option<Space>, bool, usize, usize), ParseError> {
        let (mut space, mut is_parameter, mut parts, mut bytes) = (None, false, 1, 0);
        for word in modifiers.iter().filter(|word| !HINTS.contains(*word)) {
            match *word {
                "global" => space = Some(Space::Global),
                "shared" | "shared::cta" => space = Some(Space::Shared),
                "param" => is_parameter = true,
                "v2" => parts = 2,
                "v4" => parts = 4,
                "b8" | "u8" => bytes = 1,
                "b16" | "u16" => bytes = 2,
                "b32" | "u32" | "s32" | "f32" => bytes = 4,
                "b64" | "u64" | "s64" | "f64" => bytes = 8,
                _ => return Err(self.unknown()),
            }
        }
        if bytes == 0 { Err(self.unknown()) } else { Ok((space, is_parameter, parts, bytes)) }
    }

    fn access(&self, is_store: bool, modifiers: &[&str], names: &mut Names<'a>) -> Result<Vec<Target<'a>>, ParseError> {
        let (space, is_parameter, parts, bytes) = self.shape(modifiers)?;
        let [first, second] = self.operands.as_slice() else { return Err(self.unknown()) };
        // See `CELL` in `memory`.
        if is_store && bytes == 1 {
            return Err(self.unknown());
        }
        let (memory, value) = if is_store { (first, second) } else { (second, first) };
        let list = if value[0].text == "{" { vector(value) } else { vec![*value] };
        if list.len() != parts {
            return Err(self.unknown());
        }
        let mut registers = [0; 4];
        for (register, token) in registers.iter_mut().zip(list) {
            *register = match token {
                source if is_store => names.source(source)?,
                [token] if token.text == "_" => names.temporary(),
                [token] => names.register(*token)?,
                _ => return Err(self.unknown()),
            };
        }
        let (base, offset) = bracket(memory).ok_or_else(|| self.unknown())?;
        if is_parameter {
            return self.parameter(is_store, (base, offset), &registers[..parts], bytes, names);
        }
        let access =
            Access { space: space.unwrap_or(Space::Global), base: names.source(&[base])?, offset, bytes, parts };
        Ok(vec![Target::Operation(if is_store {
            Operation::Store { access, from: registers }
        } else {
            Operation::Load { access, to: registers }
        })])
    }

    /// Parameters are constants of a launch.
    fn parameter(
        &self,
        is_store: bool,
        (base, offset): (Token<'a>, i64),
        to: &[Register],
        bytes: usize,
        names: &mut Names<'a>,
    ) -> Result<Vec<Target<'a>>, ParseError> {
        let &(index, size) = names.parameters.get(base.text).ok_or_else(|| self.unknown())?;
        let start = usize::try_from(offset).map_err(|_| self.unknown())?;
        if is_store || start + to.len() * bytes > size {
            return Err(self.unknown());
        }
        let function = function("mov.u64").ok_or_else(|| self.unknown())?;
        let copy = |(part, to): (usize, &Register)| {
            let constant = Constant::Parameter { index, offset: start + part * bytes, bytes };
            let from = [names.constant(constant); 3];
            Target::Operation(Operation::Compute { function, to: *to, from, flush: Flush::Nothing })
        };
        Ok(to.iter().enumerate().map(copy).collect())
    }

    fn atomic(&self, has_result: bool, modifiers: &[&str], names: &mut Names<'a>) -> Result<Operation, ParseError> {
        const OPERATIONS: [&str; 8] = ["add", "min", "max", "and", "or", "xor", "exch", "cas"];
        let of = |word: &&&str| OPERATIONS.contains(*word);
        let name = modifiers.iter().find(of).ok_or_else(|| self.unknown())?;
        let rest: Vec<&str> = modifiers.iter().filter(|word| *word != name).copied().collect();
        let (space, _, parts, bytes) = self.shape(&rest)?;
        let kind = rest.last().copied().unwrap_or_default();
        let function = atomic(name, kind).filter(|_| parts == 1).ok_or_else(|| self.unknown())?;
        let (to, rest) = match self.operands.as_slice() {
            [[to], rest @ ..] if has_result => (if to.text == "_" { None } else { Some(names.register(*to)?) }, rest),
            rest if !has_result => (None, rest),
            _ => return Err(self.unknown()),
        };
        let [memory, values @ ..] = rest else { return Err(self.unknown()) };
        if values.len() != if *name == "cas" { 2 } else { 1 } {
            return Err(self.unknown());
        }
        let (base, offset) = bracket(memory).ok_or_else(|| self.unknown())?;
        let mut from = [names.constant(Constant::Bits(0)); 2];
        for (register, value) in from.iter_mut().zip(values) {
            *register = names.source(value)?;
        }
        let access =
            Access { space: space.unwrap_or(Space::Global), base: names.source(&[base])?, offset, bytes, parts };
        Ok(Operation::Atomic { access, function, to, from })
    }

    /// `bar.sync 0` of the whole block, and `bar.warp.sync`.
    fn barrier(&self, modifiers: &[&str], names: &mut Names<'a>) -> Result<Operation, ParseError> {
        let [operand] = self.operands.as_slice() else { return Err(self.unknown()) };
        let is_whole = matches!(operand, [token] if number(token.text) == Some(0));
        match modifiers.iter().filter(|word| !HINTS.contains(*word)).copied().collect::<Vec<_>>().as_slice() {
            ["sync"] if is_whole => Ok(Operation::BlockBarrier),
            ["warp", "sync"] => Ok(Operation::WarpBarrier { mask: names.source(operand)? }),
            _ => Err(self.unknown()),
        }
    }

    /// `shfl.sync.bfly.b32 to|valid, from, lane, clamp, mask`.
    fn shuffle(&self, modifiers: &[&str], names: &mut Names<'a>) -> Result<Operation, ParseError> {
        let mode = match modifiers {
            ["sync", "up", "b32"] => Shuffle::Up,
            ["sync", "down", "b32"] => Shuffle::Down,
            ["sync", "bfly", "b32"] => Shuffle::Exchange,
            ["sync", "idx", "b32"] => Shuffle::Index,
            _ => return Err(self.unknown()),
        };
        let (to, valid) = match self.operands.first() {
            Some([to]) => (names.register(*to)?, None),
            Some([to, bar, valid]) if bar.text == "|" => (names.register(*to)?, Some(names.register(*valid)?)),
            _ => return Err(self.unknown()),
        };
        let [from, lane, clamp, mask] = self.sources(names)?;
        Ok(Operation::Shuffle { mode, to, valid, from, lane, clamp, mask })
    }

    /// `vote.sync.ballot.b32 to, predicate, mask`.
    fn vote(&self, modifiers: &[&str], names: &mut Names<'a>) -> Result<Operation, ParseError> {
        let mode = match modifiers {
            ["sync", "all", "pred"] => Vote::All,
            ["sync", "any", "pred"] => Vote::Any,
            ["sync", "uni", "pred"] => Vote::Uniform,
            ["sync", "ballot", "b32"] => Vote::Ballot,
            _ => return Err(self.unknown()),
        };
        let [_, predicate, mask] = self.operands.as_slice() else { return Err(self.unknown()) };
        let (negated, predicate) = match predicate {
            [sign, rest @ ..] if sign.text == "!" => (true, rest),
            _ => (false, *predicate),
        };
        let (predicate, mask) = (names.source(predicate)?, names.source(mask)?);
        Ok(Operation::Vote { mode, to: self.destination(names)?, predicate, negated, mask })
    }
}

fn join_name<'m>(modifiers: &[&'m str]) -> &'m str {
    modifiers.iter().find(|word| matches!(**word, "and" | "or" | "xor")).copied().unwrap_or_default()
}

/// The elements of `{a, b}`.
fn vector<'a, 't>(tokens: &'t [Token<'a>]) -> Vec<&'t [Token<'a>]> {
    match tokens {
        [open, inner @ .., close] if (open.text, close.text) == ("{", "}") => split(inner),
        _ => Vec::new(),
    }
}

/// `[base]`, `[base+16]`, `[base+-16]`.
fn bracket<'a>(tokens: &[Token<'a>]) -> Option<(Token<'a>, i64)> {
    let [open, base, offset @ .., close] = tokens else { return None };
    let value = |token: &Token<'_>| number(token.text).map(|bits| bits as i64);
    let offset = match offset {
        [] => 0,
        [plus, number] if plus.text == "+" => value(number)?,
        [plus, minus, number] if (plus.text, minus.text) == ("+", "-") => -value(number)?,
        _ => return None,
    };
    ((open.text, close.text) == ("[", "]")).then_some((*base, offset))
}
