//! Parses directives, declarations and labels: all of PTX except instructions.

use super::decode::{Target, instruction};
use super::operands::{Names, Parameters, Symbol, shown};
use super::scan::Token;
use super::{Entry, Guard, Module, Operation, ParseError, Place, Step};
use std::collections::{BTreeMap, HashMap};

struct Reader<'a, 't> {
    tokens: &'t [Token<'a>],
    at: usize,
}

impl<'a, 't> Reader<'a, 't> {
    fn peek(&self) -> Option<Token<'a>> {
        self.tokens.get(self.at).copied()
    }

    fn next(&mut self, expected: &str) -> Result<Token<'a>, ParseError> {
        let line = self.tokens.last().map_or(1, |token| token.line);
        let token = self.peek().ok_or_else(|| ParseError::new(line, format!("the end, expected {expected}")))?;
        self.at += 1;
        Ok(token)
    }

    fn expect(&mut self, text: &str) -> Result<(), ParseError> {
        let token = self.next(text)?;
        if token.text == text { Ok(()) } else { Err(unknown(token, text)) }
    }

    fn take(&mut self, text: &str) -> bool {
        let found = self.peek().is_some_and(|token| token.text == text);
        self.at += usize::from(found);
        found
    }

    fn number(&mut self, expected: &str) -> Result<usize, ParseError> {
        let token = self.next(expected)?;
        token.text.parse().map_err(|_| unknown(token, expected))
    }

    /// The tokens up to a delimiter, which is consumed.
    fn until(&mut self, end: &str) -> Result<&'t [Token<'a>], ParseError> {
        let start = self.at;
        while self.next(end)?.text != end {}
        Ok(&self.tokens[start..self.at - 1])
    }

    /// The rest of the previous token's line.
    fn line(&mut self) -> &'t [Token<'a>] {
        let start = self.at;
        let line = self.tokens[start - 1].line;
        while self.peek().is_some_and(|token| token.line == line) {
            self.at += 1;
        }
        &self.tokens[start..self.at]
    }

    fn skip_braces(&mut self) -> Result<(), ParseError> {
        self.until("{")?;
        let mut depth = 1;
        while depth > 0 {
            match self.next("}")?.text {
                "{" => depth += 1,
                "}" => depth -= 1,
                _ => {}
            }
        }
        Ok(())
    }
}

fn unknown(token: Token<'_>, expected: &str) -> ParseError {
    ParseError::new(token.line, format!("`{}`, expected {expected}", token.text))
}

/// Shared arrays declared so far, and their total size.
#[derive(Clone, Default)]
struct SharedArrays<'a> {
    symbols: HashMap<&'a str, Symbol>,
    bytes: usize,
}

impl<'a> SharedArrays<'a> {
    /// Parses the rest of a `.shared` declaration: `.align 4 .b8 name[128];`, without a size if the
    /// launch provides it.
    fn declare(&mut self, reader: &mut Reader<'a, '_>) -> Result<(), ParseError> {
        let alignment = if reader.take(".align") { Some(reader.number("an alignment")?) } else { None };
        let size = size(reader.next("a type")?)?;
        let name = reader.next("a name")?;
        let mut symbol = Symbol::At(self.bytes.next_multiple_of(alignment.unwrap_or(size)));
        let mut count = 1;
        if reader.take("[") {
            if reader.take("]") {
                symbol = Symbol::Dynamic;
            } else {
                count = reader.number("a size")?;
                reader.expect("]")?;
            }
        }
        reader.expect(";")?;
        if let Symbol::At(offset) = symbol {
            self.bytes = offset + count * size;
        }
        self.symbols.insert(name.text, symbol);
        Ok(())
    }
}

/// Bytes of a type, for example `.b8` or `.u64`.
fn size(token: Token<'_>) -> Result<usize, ParseError> {
    let digits = token.text.trim_start_matches(|byte: char| !byte.is_ascii_digit());
    match digits {
        "8" => Ok(1),
        "16" => Ok(2),
        "32" => Ok(4),
        "64" => Ok(8),
        _ => Err(unknown(token, "a type")),
    }
}

pub(super) fn module(tokens: &[Token<'_>]) -> Result<Module, ParseError> {
    let mut reader = Reader { tokens, at: 0 };
    let mut shared = SharedArrays::default();
    let mut entries = BTreeMap::new();
    while let Some(token) = reader.peek() {
        reader.at += 1;
        match token.text {
            ".version" | ".target" | ".address_size" | ".file" => drop(reader.line()),
            ".visible" | ".extern" => {}
            ".section" => reader.skip_braces()?,
            ".shared" => shared.declare(&mut reader)?,
            // NVRTC emits every named constant, even if no kernel uses it. A kernel that does is
            // rejected later, because these names are not recorded.
            ".global" => drop(reader.until(";")?),
            ".entry" => {
                let entry = entry(&mut reader, &shared)?;
                entries.insert(entry.name.clone(), entry);
            }
            _ => {
                return Err(unknown(
                    token,
                    "a kernel; device functions, tables of constants and local memory are not executed",
                ));
            }
        }
    }
    Ok(Module { entries })
}

fn entry<'a>(reader: &mut Reader<'a, '_>, shared: &SharedArrays<'a>) -> Result<Entry, ParseError> {
    let name = reader.next("the name of a kernel")?;
    let (parameters, sizes) = parameters(reader)?;
    let mut most_threads = None;
    loop {
        let token = reader.next("the body of a kernel")?;
        match token.text {
            "{" => break,
            ".maxntid" => {
                let numbers = reader.line().iter().filter_map(|token| token.text.parse::<u32>().ok());
                most_threads = Some(numbers.product());
            }
            ".minnctapersm" | ".maxnreg" | ".reqntid" => drop(reader.line()),
            _ => return Err(unknown(token, "a directive of performance or the body of the kernel")),
        }
    }
    let mut names = Names::new(parameters, shared.symbols.clone(), shared.bytes);
    let steps = body(reader, &mut names)?;
    let (shared_bytes, has_dynamic_shared) = (names.shared_bytes, names.has_dynamic_shared);
    let (registers, constants) = names.finish();
    Ok(Entry {
        name: name.text.to_owned(),
        parameters: sizes,
        steps,
        registers,
        constants,
        shared_bytes,
        has_dynamic_shared,
        most_threads,
    })
}

/// `(.param .u64 .ptr .align 1 name, .param .align 8 .b8 name[24])`.
fn parameters<'a>(reader: &mut Reader<'a, '_>) -> Result<(Parameters<'a>, Vec<usize>), ParseError> {
    let (mut parameters, mut sizes) = (Parameters::new(), Vec::new());
    if !reader.take("(") {
        return Ok((parameters, sizes));
    }
    while !reader.take(")") {
        reader.take(",");
        reader.expect(".param")?;
        let mut bytes = None;
        let name = loop {
            let token = reader.next("a parameter")?;
            match token.text {
                ".align" => drop(reader.number("an alignment")?),
                ".ptr" | ".global" => {}
                text if text.starts_with('.') => bytes = Some(size(token)?),
                _ => break token,
            }
        };
        let mut bytes = bytes.ok_or_else(|| unknown(name, "the type of a parameter"))?;
        if reader.take("[") {
            bytes *= reader.number("a size")?;
            reader.expect("]")?;
        }
        parameters.insert(name.text, (sizes.len(), bytes));
        sizes.push(bytes);
    }
    Ok((parameters, sizes))
}

fn body<'a>(reader: &mut Reader<'a, '_>, names: &mut Names<'a>) -> Result<Vec<Step>, ParseError> {
    let mut steps: Vec<Step> = Vec::new();
    let mut labels: HashMap<&str, u32> = HashMap::new();
    let mut branches: Vec<(usize, Token<'_>)> = Vec::new();
    let mut place = Place::default();
    loop {
        let token = reader.next("the end of the kernel")?;
        match token.text {
            "{" => names.open(),
            "}" => {
                if !names.close() {
                    break;
                }
            }
            ";" => {}
            ".loc" => {
                let line = reader.line();
                let number = |token: Option<&Token<'_>>| token.and_then(|token| token.text.parse().ok()).unwrap_or(0);
                place.line = number(line.get(1));
                let inlined = line.iter().position(|token| token.text == "inlined_at");
                place.inlined_at = inlined.map_or(0, |at| number(line.get(at + 2)));
            }
            ".pragma" => drop(reader.until(";")?),
            ".reg" => registers(reader, names)?,
            ".shared" => {
                let symbols = std::mem::take(&mut names.shared);
                let mut shared = SharedArrays { symbols, bytes: names.shared_bytes };
                shared.declare(reader)?;
                (names.shared, names.shared_bytes) = (shared.symbols, shared.bytes);
            }
            text if text.starts_with('.') => return Err(unknown(token, "a directive that is known")),
            _ if reader.take(":") => drop(labels.insert(token.text, steps.len() as u32)),
            _ => {
                let guard = if token.text == "@" { Some(guard(reader, names)?) } else { None };
                let opcode = if guard.is_some() { reader.next("an instruction")? } else { token };
                place.ptx = opcode.line;
                let operands = reader.until(";")?;
                for target in instruction(opcode, operands, names)? {
                    let operation = match target {
                        Target::Operation(operation) => operation,
                        Target::Label(label) => {
                            branches.push((steps.len(), label));
                            Operation::Branch { target: 0 }
                        }
                    };
                    steps.push(Step { guard, operation, place });
                }
            }
        }
    }
    for (at, label) in branches {
        let target = *labels.get(label.text).ok_or_else(|| unknown(label, "a label"))?;
        steps[at].operation = Operation::Branch { target };
    }
    // A label may end the kernel, and every kernel ends with an exit.
    steps.push(Step { guard: None, operation: Operation::Exit, place });
    Ok(steps)
}

/// `%p1` or `!%p1`.
fn guard<'a>(reader: &mut Reader<'a, '_>, names: &Names<'a>) -> Result<Guard, ParseError> {
    let negated = reader.take("!");
    Ok(Guard { predicate: names.register(reader.next("a predicate")?)?, negated })
}

/// `.b32 %r<36>;` or `.b16 low, high;`.
fn registers<'a>(reader: &mut Reader<'a, '_>, names: &mut Names<'a>) -> Result<(), ParseError> {
    for declared in reader.until(";")?.get(1..).unwrap_or_default().split(|token| token.text == ",") {
        match declared {
            [name] => names.declare(name.text, None),
            [name, open, count, close] if (open.text, close.text) == ("<", ">") => {
                let count = count.text.parse().map_err(|_| unknown(*count, "a number of registers"))?;
                names.declare(name.text, Some(count));
            }
            _ => {
                let line = declared.first().map_or(0, |token| token.line);
                return Err(ParseError::new(line, format!("`{}`, expected registers", shown(declared))));
            }
        }
    }
    Ok(())
}
