//! Runs queued operations and checks their memory uses against earlier ones.

use super::Gpu;
use super::queue::Operation;
use super::work::{Launch, Source, Work};
use crate::host::{self, HostRange};
use crate::shadow::Stamp;
use std::ops::Range;
use switchyard_cuda_reference::Touched;

fn reads(range: Range<u64>) -> Touched {
    Touched { range, writes: false }
}

fn writes(range: Range<u64>) -> Touched {
    Touched { range, writes: true }
}

impl Gpu {
    /// Runs an operation and checks its memory uses against earlier ones.
    pub(crate) fn run(&mut self, operation: Operation) {
        let Operation { name, stream, index, clock, work } = operation;
        if self.failed.is_some() {
            return;
        }
        let stamp = Stamp { stream, index, name };
        for Touched { range, writes } in self.execute(work, &stamp) {
            if let Some((other, wrote)) = self.shadow.touch(&range, writes, &stamp, &clock) {
                let (name, does) = (&stamp.name, if writes { "writes" } else { "reads" });
                let (did, place) = (if wrote { "wrote" } else { "read" }, self.describe(&range));
                let streams = [stream, other.stream].map(|stream| self.stream_name(stream));
                self.report(&format!(
                    "{name} in {} {does} {place}, which {} in {} {did}, with no order between",
                    streams[0], other.name, streams[1]
                ));
            }
        }
    }

    fn execute(&mut self, work: Work, stamp: &Stamp) -> Vec<Touched> {
        match work {
            #[cfg(test)]
            Work::Nothing => Vec::new(),
            Work::Launch(launch) => self.launch(&launch),
            Work::Fill { to, byte } => {
                self.write(to.start, &vec![byte; (to.end - to.start) as usize]);
                vec![writes(to)]
            }
            Work::Upload { from: Source::Staged(bytes), to } => {
                self.write(to, &bytes);
                vec![writes(to..to + bytes.len() as u64)]
            }
            Work::Upload { from: Source::Pinned(queued), to } => {
                let bytes = self.unchanged(&queued, stamp);
                if !self.is_stale(bytes.len()) {
                    self.write(to, &bytes);
                }
                vec![reads(queued.range), writes(to..to + bytes.len() as u64)]
            }
            Work::Download { from, to } => {
                self.unchanged(&to, stamp);
                let bytes = self.read(from, (to.range.end - to.range.start) as usize);
                // SAFETY: the program passed this range to the copy and has not freed it, which
                // `free` checks.
                unsafe { host::write(to.range.start, &bytes) };
                self.forget_seen(&to.range);
                let read = reads(from..from + bytes.len() as u64);
                // For other memory, the host waits for the copy.
                let is_pinned = self.find_allocation(&to.range).is_some();
                if is_pinned { vec![read, writes(to.range)] } else { vec![read] }
            }
            Work::Copy { from, to, bytes, count } => self.copy(from, to, bytes, count),
            Work::Send(collective) => collective.send(self, stamp),
            Work::Receive(collective) => collective.receive(self),
            Work::Product(product) => {
                let is_wrong = self.is_wrong();
                product.run(self, stamp, is_wrong)
            }
            Work::Convolution(convolution) => {
                let is_wrong = self.is_wrong();
                convolution.run(self, stamp, is_wrong)
            }
            Work::Dataflow(flow) => {
                let is_wrong = self.is_wrong();
                flow.run(self, stamp, is_wrong)
            }
        }
    }

    fn launch(&mut self, launch: &Launch) -> Vec<Touched> {
        if self.fails(launch.number) {
            return Vec::new();
        }
        let seed = self.settings.seed;
        match self.device.launch_raw(&launch.module, &launch.raw(seed)) {
            Ok(touched) => touched,
            Err(error) => self.report(&format!("launch {}: {error}", launch.number)),
        }
    }

    fn copy(&mut self, from: (u64, u64), to: (u64, u64), bytes: u64, count: u64) -> Vec<Touched> {
        let line = |(start, pitch): (u64, u64), index: u64| start + index * pitch..start + index * pitch + bytes;
        let mut touched = Vec::new();
        for index in 0..count {
            let (from, to) = (line(from, index), line(to, index));
            let [source, target] = [&from, &to].map(|range| self.device.at(range.start, bytes as usize));
            if let (Some(source), Some(target)) = (source, target) {
                self.device.copy(source, target);
            }
            touched.extend([reads(from), writes(to)]);
        }
        touched
    }

    /// The content of pinned memory, which the host must not have changed since the copy was
    /// queued.
    fn unchanged(&mut self, queued: &HostRange, stamp: &Stamp) -> Vec<u8> {
        // SAFETY: the program passed this range to the copy and has not freed it, which `free`
        // checks.
        let (bytes, changed) = unsafe { queued.now() };
        if let Some(byte) = changed {
            let (name, stream) = (&stamp.name, self.stream_name(stamp.stream));
            self.report(&format!(
                "the host changed byte {byte} of {} bytes of pinned memory while {name} in {stream} was queued",
                bytes.len()
            ));
        }
        bytes
    }

    /// Call after the device itself has changed host memory: queued copies then find other bytes
    /// there.
    fn forget_seen(&mut self, range: &Range<u64>) {
        for queued in self.queue.pending().filter_map(|operation| operation.work.host()) {
            if queued.range.start < range.end && range.start < queued.range.end {
                queued.seen = None;
            }
        }
    }
}
