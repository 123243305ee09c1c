//! NVIDIA's disassembler, fetched by `cargo xtask data cuda`: disassembles many CUBINs in one run.
//!
//! It takes a fifth of a second to start and accepts a single file. The code of all kernels is
//! therefore concatenated into one raw file, and the ELF structure is read here: kernel offsets,
//! and the functions that the compiler placed after them.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::PathBuf;
use std::process::Command;
use switchyard_cuda_reference::fetched;

/// Bytes per instruction on every architecture since Volta.
const INSTRUCTION: usize = 16;

/// A kernel's code section in a CUBIN.
#[derive(Debug, Clone)]
pub struct Section {
    kernel: String,
    code: Vec<u8>,
    /// Names by byte offset in the code.
    functions: BTreeMap<usize, String>,
}

/// A disassembled kernel.
#[derive(Debug)]
pub struct Kernel {
    pub name: String,
    pub instructions: Vec<Instruction>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instruction {
    /// With its modifiers, for example `LDG.E.128`.
    pub code: String,
    /// For a call, the name of the callee, or the operands if they have no address. On an A100,
    /// ptxas also leaves loops through calls to addresses in the same kernel; these are jumps.
    pub callee: Option<String>,
}

impl Instruction {
    /// The name without modifiers.
    pub fn base(&self) -> &str {
        self.code.split('.').next().unwrap_or_default()
    }

    /// Whether it moves 16 bytes per thread.
    pub fn is_wide(&self) -> bool {
        self.code.split('.').any(|part| part == "128")
    }
}

/// The kernels of a CUBIN.
pub fn sections(cubin: &[u8]) -> Vec<Section> {
    let number =
        |at: usize, bytes: usize| cubin[at..at + bytes].iter().rev().fold(0, |sum, byte| sum << 8 | usize::from(*byte));
    let text = |at: usize| {
        let bytes = cubin[at..].split(|byte| *byte == 0).next().unwrap();
        String::from_utf8(bytes.to_vec()).unwrap()
    };
    // Of section `index`: type, name offset in the string table, bytes, and linked section.
    let header = |index: usize| {
        let at = number(0x28, 8) + index * number(0x3A, 2);
        let start = number(at + 0x18, 8);
        (number(at + 4, 4), number(at, 4), start..start + number(at + 0x20, 8), number(at + 0x28, 4))
    };
    let (_, _, names, _) = header(number(0x3E, 2));
    let name = |index: usize| text(names.start + header(index).1);
    let mut functions: HashMap<usize, BTreeMap<usize, String>> = HashMap::new();
    for index in 0..number(0x3C, 2) {
        // SHT_SYMTAB
        let (2, _, symbols, names) = header(index) else { continue };
        for symbol in symbols.step_by(24) {
            // STT_FUNC
            if number(symbol + 4, 1) & 0xF == 2 {
                let of_section = functions.entry(number(symbol + 6, 2)).or_default();
                of_section.insert(number(symbol + 8, 8), text(header(names).2.start + number(symbol, 4)));
            }
        }
    }
    let kernel = |index: usize| {
        let kernel = name(index).strip_prefix(".text.")?.to_owned();
        let code: Range<usize> = header(index).2;
        Some(Section { kernel, code: cubin[code].to_vec(), functions: functions.remove(&index).unwrap_or_default() })
    };
    (0..number(0x3C, 2)).filter_map(kernel).collect()
}

impl Section {
    /// The callee of a call with these operands; this code begins at `start`.
    fn callee<'a>(&'a self, operands: &'a str, start: usize) -> &'a str {
        let address = operands.rsplit(' ').next().and_then(|address| address.strip_prefix("0x"));
        let address = address.and_then(|address| usize::from_str_radix(address, 16).ok()?.checked_sub(start));
        let function = address.and_then(|address| self.functions.range(..=address).next_back());
        function.map_or(operands, |(_, name)| name)
    }
}

/// The program from the pinned wheel.
pub struct Disassembler(PathBuf);

impl Disassembler {
    pub fn new() -> Disassembler {
        Disassembler(fetched("nvdisasm").join("nvdisasm"))
    }

    /// The instructions of kernels for an architecture, in the order of `sections`. Checks that
    /// every 16 bytes became one instruction.
    pub fn kernels<'a>(&self, architecture: &str, sections: impl Iterator<Item = &'a Section>) -> Vec<Kernel> {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("code");
        let sections: Vec<&Section> = sections.collect();
        std::fs::write(&file, sections.iter().flat_map(|section| section.code.iter().copied()).collect::<Vec<u8>>())
            .unwrap();
        let mut command = Command::new(&self.0);
        let architecture = architecture.replace("sm_", "SM");
        let output = command.args(["--no-dataflow", "--binary", &architecture]).arg(&file).output().unwrap();
        assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        let mut lines = text.lines().filter_map(instruction).enumerate();
        let mut start = 0;
        let kernels = sections.into_iter().map(|section| {
            let count = section.code.len() / INSTRUCTION;
            let take = |(number, (address, code, operands)): (usize, (usize, &str, &str))| {
                assert_eq!(address, number * INSTRUCTION, "{}: `{code} {operands}`", section.kernel);
                let callee = code.starts_with("CALL").then(|| section.callee(operands, start));
                let callee = callee.filter(|name| *name != section.kernel).map(str::to_owned);
                Instruction { code: code.to_owned(), callee }
            };
            let instructions: Vec<Instruction> = lines.by_ref().take(count).map(take).collect();
            assert_eq!(instructions.len(), count, "{}: instructions", section.kernel);
            start += section.code.len();
            Kernel { name: section.kernel.clone(), instructions }
        });
        let kernels = kernels.collect();
        assert_eq!(lines.next(), None, "more instructions than there is code");
        kernels
    }
}

/// Parses address, name and operands of a line like `/*0080*/ @P0 LDG.E R2, desc[UR4][R2.64] ;`;
/// `None` for other lines.
fn instruction(line: &str) -> Option<(usize, &str, &str)> {
    let (address, rest) = line.trim().strip_prefix("/*")?.split_once("*/")?;
    let address = usize::from_str_radix(address, 16).ok()?;
    let mut rest = rest.trim().trim_end_matches(';').trim();
    if rest.starts_with('@') {
        rest = rest.split_once(' ')?.1.trim();
    }
    let (code, operands) = rest.split_once(' ').unwrap_or((rest, ""));
    Some((address, code, operands.trim()))
}
