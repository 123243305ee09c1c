//! Records launches in files with their memory before and after, so that a device can replay them
//! ([`switchyard_cuda::kernels::recorded`]).

use crate::counts::Counts;
use crate::device::{Device, Launch, LaunchError, Span};
use crate::ptx::Module;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use switchyard_cuda::kernels::recorded::{BYTES, CASES, Case, Kept, Place, Recorded};
use switchyard_cuda::kernels::{Argument, Call, Memory};

/// Unit of deduplication: tests fill memory of many sizes with the same values.
const PIECE: usize = 4096;

/// Writes launches into a folder, without duplicates.
pub struct Recorder(Mutex<Files>);

struct Files {
    cases: File,
    bytes: File,
    /// Length of the bytes file.
    end: usize,
    /// Pieces in the bytes file, with their offsets.
    known: HashMap<Vec<u8>, usize>,
    /// Lines of the cases file.
    made: HashSet<String>,
}

/// An allocation used by a call.
struct Used {
    name: String,
    span: Span,
    before: Vec<u8>,
}

impl Recorder {
    /// Records into this folder, replacing its vectors.
    ///
    /// # Errors
    /// A file cannot be created.
    pub fn new(folder: &Path) -> io::Result<Recorder> {
        std::fs::create_dir_all(folder)?;
        let files = Files {
            cases: File::create(folder.join(CASES))?,
            bytes: File::create(folder.join(BYTES))?,
            end: 0,
            known: HashMap::new(),
            made: HashSet::new(),
        };
        Ok(Recorder(Mutex::new(files)))
    }

    /// Runs a kernel to completion with seed 0, and records the launch.
    ///
    /// # Errors
    /// Errors from [`Device::launch`], or the launch cannot be recorded.
    pub fn launch(&self, device: &mut Device, module: &Module, call: &Call<Span>) -> Result<Counts, LaunchError> {
        let used = used(device, call);
        let counts = device.launch(module, &Launch::new(call, 0))?;
        let refused = |text: String| LaunchError::Refused { kernel: call.kernel().to_owned(), text };
        let place = |span: &Span| {
            let holds = |used: &Used| used.span.address() <= span.address() && span.address() < end(used.span);
            let buffer = used.iter().position(holds).unwrap_or(used.len());
            let offset = used.get(buffer).map_or(0, |used| (span.address() - used.span.address()) as usize);
            Place { buffer, offset, bytes: span.bytes() }
        };
        let launch = Recorded::new(call, place);
        let mut files = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = files.add(device, launch, &used).map_err(|error| refused(format!("cannot be recorded: {error}")))?;
        if let Some(line) = kept {
            // A record that does not parse back to the same call would be useless.
            let part = |place: Place| used.get(place.buffer)?.span.part(place.offset..place.offset + place.bytes);
            let again = line.parse().and_then(|case: Case| case.launch.call(part));
            if again.map_err(|error| refused(error.to_string()))? != *call {
                return Err(refused(format!("{line:?} parses to a different call")));
            }
        }
        Ok(counts)
    }
}

impl Files {
    /// The line that was written; `None` if the launch is already recorded.
    fn add(&mut self, device: &Device, launch: Recorded, used: &[Used]) -> io::Result<Option<String>> {
        let before = used.iter().map(|used| self.keep(&used.before)).collect::<io::Result<Vec<_>>>()?;
        let mut case = Case { launch, buffers: Vec::new() };
        for (used, before) in used.iter().zip(before) {
            let after = self.keep(&device.download::<u8>(used.span))?;
            case.buffers.push(Kept { name: used.name.clone(), before, after });
        }
        let line = case.to_string();
        if !self.made.insert(line.clone()) {
            return Ok(None);
        }
        writeln!(self.cases, "{line}")?;
        Ok(Some(line))
    }

    /// Stores these bytes; returns consecutive ranges of the bytes file.
    fn keep(&mut self, bytes: &[u8]) -> io::Result<Vec<Range<usize>>> {
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for piece in bytes.chunks(PIECE) {
            let start = self.place(piece)?;
            match ranges.last_mut() {
                Some(last) if last.end == start => last.end += piece.len(),
                _ => ranges.push(start..start + piece.len()),
            }
        }
        Ok(ranges)
    }

    fn place(&mut self, piece: &[u8]) -> io::Result<usize> {
        if let Some(start) = self.known.get(piece) {
            return Ok(*start);
        }
        self.bytes.write_all(piece)?;
        let start = self.end;
        self.end += piece.len();
        self.known.insert(piece.to_vec(), start);
        Ok(start)
    }
}

/// The distinct allocations that contain the memory of a call.
fn used(device: &Device, call: &Call<Span>) -> Vec<Used> {
    let mut all: Vec<Used> = Vec::new();
    for argument in call.arguments() {
        let (Argument::Reads(span) | Argument::Writes(span) | Argument::Updates(span)) = argument else { continue };
        // The launch itself rejects a span outside every allocation.
        if let Some((name, span)) = device.allocation(*span)
            && all.iter().all(|used| used.span != span)
        {
            all.push(Used { name: name.to_owned(), span, before: device.download(span) });
        }
    }
    all
}

fn end(span: Span) -> u64 {
    span.address() + span.bytes() as u64
}
