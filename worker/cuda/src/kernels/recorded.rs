//! Recorded launches: test launches that ran on the executor, saved to a file for replay on a
//! device.

use super::signature::{Format, Parameter, source};
use super::{Argument, Call, Memory, Program};
use crate::error::Error;
use serde::{Deserialize, Serialize};
use std::convert::Infallible;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// File with one [`Case`] per line as JSON, in a directory of test vectors.
pub const CASES: &str = "cases.jsonl";
/// File with the memory contents.
pub const BYTES: &str = "bytes.bin";

/// A launch, with its memory before and after.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Case {
    pub launch: Recorded,
    pub buffers: Vec<Kept>,
}

/// A whole allocation used by a launch, including bytes that the launch must not modify.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Kept {
    pub name: String,
    /// Consecutive ranges of the bytes file; uninitialised bytes are 0xff.
    pub before: Vec<Range<usize>>,
    pub after: Vec<Range<usize>>,
}

/// A range of a case's allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Index of the allocation.
    pub buffer: usize,
    pub offset: usize,
    pub bytes: usize,
}

/// A [`Call`] without its memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Recorded {
    source: String,
    definitions: Vec<String>,
    /// Digest of all sources: a launch recorded with another version is not comparable.
    version: u64,
    kernel: String,
    blocks: u32,
    threads: u32,
    shared_bytes: u32,
    arguments: Vec<Argument<Place>>,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(self).map_err(|_| fmt::Error)?)
    }
}

impl FromStr for Case {
    type Err = Error;

    fn from_str(line: &str) -> Result<Case, Error> {
        serde_json::from_str(line).map_err(|error| Error::refused("vectors", error.to_string()))
    }
}

/// Writes a float as its bits, because JSON has no infinity.
pub(super) mod bits {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(crate) fn serialize<S: Serializer>(value: &f32, to: S) -> Result<S::Ok, S::Error> {
        value.to_bits().serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f32, D::Error> {
        u32::deserialize(from).map(f32::from_bits)
    }
}

impl Recorded {
    /// Records a call whose memory is at `place`.
    pub fn new<M>(call: &Call<M>, place: impl Fn(&M) -> Place) -> Recorded {
        let place = |memory: &M| Ok::<Place, Infallible>(place(memory));
        let arguments = call.arguments.iter().map(|argument| argument.map(place));
        let Ok(arguments) = arguments.collect::<Result<_, Infallible>>();
        Recorded {
            source: call.program.source.name.to_owned(),
            definitions: call.program.definitions.clone(),
            version: call.program.version(),
            kernel: call.kernel.to_owned(),
            blocks: call.blocks,
            threads: call.threads,
            shared_bytes: call.shared_bytes,
            arguments,
        }
    }

    /// Kernel name.
    pub fn kernel(&self) -> &str {
        &self.kernel
    }

    /// The program that contains the kernel.
    ///
    /// # Errors
    /// This build has another version of the program, or none.
    pub fn program(&self) -> Result<Program, Error> {
        let refused = |text| Err(Error::refused("vectors", text));
        let Some(source) = source(&self.source) else { return refused(format!("no source `{}`", self.source)) };
        let program = Program { source, definitions: self.definitions.clone() };
        if program.version() != self.version {
            return refused(format!(
                "`{}` is {:016x}, but the launch was recorded with {:016x}: expected those of one build",
                self.source,
                program.version(),
                self.version
            ));
        }
        Ok(program)
    }

    /// Restores the call with the caller's memory, which must have the recorded sizes.
    ///
    /// # Errors
    /// The kernel does not exist, its parameters differ, or a memory has another size.
    pub fn call<M: Memory>(&self, memory: impl Fn(Place) -> Option<M>) -> Result<Call<M>, Error> {
        let program = self.program()?;
        let (kernel, _) = self.signature(&program)?;
        let of = |place: &Place| match memory(*place) {
            Some(memory) if memory.bytes() == place.bytes => Ok(memory),
            other => {
                let got = other.map_or(0, |memory| memory.bytes());
                Err(self.refused(format!("memory of {got} bytes, expected {}", place.bytes)))
            }
        };
        let arguments = self.arguments.iter().map(|argument| argument.map(of)).collect::<Result<_, Error>>()?;
        let Recorded { blocks, threads, shared_bytes, .. } = *self;
        Ok(Call { program, kernel, blocks, threads, shared_bytes, arguments })
    }

    /// The memory that the launch can write, and its format.
    ///
    /// # Errors
    /// The kernel does not exist, or its parameters differ.
    pub fn written(&self) -> Result<Vec<(Place, Format)>, Error> {
        let program = self.program()?;
        let (_, parameters) = self.signature(&program)?;
        let of = |(argument, parameter): (&Argument<Place>, &Parameter)| match (argument, parameter) {
            (Argument::Writes(place) | Argument::Updates(place), Parameter::Memory { format, .. }) => {
                Some((*place, *format))
            }
            _ => None,
        };
        Ok(self.arguments.iter().zip(&parameters).filter_map(of).collect())
    }

    /// The kernel's name and parameters, if they match the arguments.
    fn signature(&self, program: &Program) -> Result<(&'static str, Vec<Parameter>), Error> {
        let signature = program.signature(&self.kernel);
        let (kernel, parameters) =
            signature.ok_or_else(|| self.refused(format!("no kernel of known types in `{}`", self.source)))?;
        let fits = |(argument, parameter): (&Argument<Place>, &Parameter)| match (argument, parameter) {
            (Argument::Reads(_) | Argument::Absent, Parameter::Memory { .. }) => true,
            (Argument::Writes(_) | Argument::Updates(_), Parameter::Memory { is_const, .. }) => !is_const,
            (Argument::Int(_), Parameter::Int) | (Argument::Float(_), Parameter::Float) => true,
            _ => false,
        };
        if self.arguments.len() != parameters.len() || !self.arguments.iter().zip(&parameters).all(fits) {
            return Err(self.refused(format!("arguments {:?}, expected {parameters:?}", self.arguments)));
        }
        Ok((kernel, parameters))
    }

    fn refused(&self, text: String) -> Error {
        Error::refused("vectors", format!("{}: {text}", self.kernel))
    }
}

impl fmt::Display for Recorded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Recorded { source, kernel, blocks, threads, .. } = self;
        write!(f, "{kernel} of {source} {}, {blocks} blocks of {threads} threads", self.definitions.join(" "))
    }
}

impl Program {
    /// Whether every operation is rounded as on a CPU, so that all devices produce the same bits.
    pub fn is_exact(&self) -> bool {
        self.source.arithmetic == "--fmad=false"
    }

    /// A digest of the source and of all headers: FNV-1a, which protects against mistakes but not
    /// against attacks.
    fn version(&self) -> u64 {
        let headers = super::HEADERS.iter().flat_map(|(name, text)| [*name, *text]);
        let parts = [self.source.name, self.source.text, self.source.arithmetic].into_iter().chain(headers);
        let step = |digest: u64, byte: u8| (digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        parts.flat_map(str::bytes).fold(0xcbf2_9ce4_8422_2325, step)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Element;
    use super::super::elementwise::Elementwise;
    use super::*;

    /// Memory of the given number of bytes.
    impl Memory for usize {
        fn bytes(&self) -> usize {
            *self
        }
    }

    fn recorded() -> (Call<usize>, Recorded) {
        let convert = Elementwise { from: Element::F32, to: Element::Bf16 };
        let call = convert.convert(1, 8, 32, 0.1, 16, true).unwrap();
        let recorded = Recorded::new(&call, |bytes| Place { buffer: *bytes, offset: 0, bytes: *bytes });
        (call, recorded)
    }

    #[test]
    fn a_recorded_call_round_trips() {
        let (call, recorded) = recorded();
        assert_eq!(recorded.call(|place| Some(place.buffer)).unwrap(), call);
        let place = Place { buffer: 16, offset: 0, bytes: 16 };
        assert_eq!(recorded.written().unwrap(), [(place, Format::Bf16)]);
        assert!(call.program.is_exact());
    }

    #[test]
    fn a_case_round_trips_as_a_line() {
        let (_, mut launch) = recorded();
        launch.arguments.extend([Argument::Absent, Argument::Float(f32::NEG_INFINITY)]);
        let kept = Kept { name: "a buffer".into(), before: vec![0..80, 160..200], after: vec![7..9, 0..1] };
        let case = Case { launch, buffers: vec![kept] };
        let line = case.to_string();
        assert_eq!((line.parse::<Case>(), line.lines().count()), (Ok(case), 1));
        let refused = line.replace("\"blocks\"", "\"grid\"").parse::<Case>().unwrap_err().to_string();
        assert!(refused.contains("missing field `blocks`"), "{refused}");
    }

    #[test]
    fn mismatched_calls_are_rejected() {
        let (_, recorded) = recorded();
        let text = |recorded: Recorded, bytes: usize| {
            recorded.call(|place| Some(place.bytes.min(bytes))).unwrap_err().to_string()
        };
        assert_eq!(text(recorded.clone(), 16), "vectors: convert: memory of 16 bytes, expected 32");
        let other = Recorded { source: "weather.cu".into(), ..recorded.clone() };
        assert_eq!(text(other, 64), "vectors: no source `weather.cu`");
        let other = Recorded { version: 7, ..recorded.clone() };
        assert!(text(other, 64).ends_with("was recorded with 0000000000000007: expected those of one build"));
        let other = Recorded { kernel: "multiply".into(), ..recorded.clone() };
        assert_eq!(text(other, 64), "vectors: multiply: no kernel of known types in `elementwise.cu`");
        // Memory that is read-only according to the kernel's source is not written.
        let mut other = recorded;
        other.arguments[0] = Argument::Writes(Place { buffer: 0, offset: 0, bytes: 32 });
        assert!(text(other, 64).contains("convert: arguments [Writes("));
    }
}
