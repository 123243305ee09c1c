//! Runs what waited in a stream, and compares what it uses with what others used before.

use super::Gpu;
use super::queue::Operation;
use super::work::{Launch, Source, Work};
use crate::host::{self, Queued};
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
    /// Runs an operation, and compares what it used with what others used before.
    pub(crate) fn run(&mut self, operation: Operation) {
        let Operation { name, stream, index, clock, work } = operation;
        if self.failed.is_some() {
            return;
        }
        let stamp = Stamp { stream, index, name };
        for Touched { range, writes } in self.execute(work, &stamp) {
            if let Some((other, wrote)) = self.shadow.touch(&range, writes, &stamp, &clock) {
                let (name, does) = (&stamp.name, if writes { "writes" } else { "reads" });
                let (did, place) = (if wrote { "wrote" } else { "read" }, self.place(&range));
                let streams = [stream, other.stream].map(|stream| self.stream_name(stream));
                self.end(&format!(
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
                // SAFETY: the program gave this range to the copy, and has not freed it, which is checked when it does.
                unsafe { host::write(to.range.start, &bytes) };
                self.forget_seen(&to.range);
                let read = reads(from..from + bytes.len() as u64);
                // The host waits for a copy to other memory.
                let is_pinned = self.holding(&to.range).is_some();
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
        match self.device.launch_bare(&launch.module, &launch.bare(seed)) {
            Ok(touched) => touched,
            Err(error) => self.end(&format!("launch {}: {error}", launch.number)),
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

    /// The bytes of pinned memory, which the host must not have changed since the copy was queued.
    fn unchanged(&mut self, queued: &Queued, stamp: &Stamp) -> Vec<u8> {
        // SAFETY: the program gave this range to the copy, and has not freed it, which is checked when it does.
        let (bytes, changed) = unsafe { queued.now() };
        if let Some(byte) = changed {
            let (name, stream) = (&stamp.name, self.stream_name(stamp.stream));
            self.end(&format!(
                "the host changed byte {byte} of {} bytes of pinned memory while {name} in {stream} was queued",
                bytes.len()
            ));
        }
        bytes
    }

    /// The device itself has changed memory of the host: copies that are queued find other bytes there.
    fn forget_seen(&mut self, range: &Range<u64>) {
        for queued in self.queue.pending().filter_map(|operation| operation.work.host()) {
            if queued.range.start < range.end && range.start < queued.range.end {
                queued.seen = None;
            }
        }
    }
}
