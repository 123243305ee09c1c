//! Flight recorder: a rank's current and recent operations, for the watchdog, for heartbeats, and
//! for `switchyard doctor` after the rank has died.
//!
//! ```text
//! training thread ── begin(operation) ──> ring (stores to a mapped file; no lock, no allocation)
//! reader, saver, lanes ── counters ─────> progress
//! watchdog thread: reads both ──> hung? ──> abort the group, report, exit the process
//! control thread:  heartbeat with the operation ──> rank 0, which reports what the others wait for
//! ```
//!
//! Only the training thread begins operations. The file format is defined in
//! [`switchyard_worker_contract::recorder`].

mod words;

use crate::nn::Network;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use switchyard_worker_contract::config::OnHang;
use switchyard_worker_contract::gpu::{GpuFault, GpuReport, PciAddress};
use switchyard_worker_contract::record;
use switchyard_worker_contract::recorder::{ENTRY, Entry, MAGIC, Operation, RING, RING_AT, TEXT, at, file};
use words::Words;

/// Changes whenever there is progress.
type Counter = Box<dyn Fn() -> u64 + Send + Sync>;

/// Tracks the running layer.
struct Layers {
    position: Arc<AtomicU32>,
    names: Vec<String>,
}

pub(crate) struct Recorder {
    words: Words,
    start: Instant,
    step: AtomicU64,
    counters: Mutex<Vec<Counter>>,
    layers: OnceLock<Layers>,
    /// Median of the last steps in microseconds; 0 if unknown.
    median_us: AtomicU64,
    /// Last seen by the watchdog.
    stall: Mutex<Option<Stall>>,
    /// Health of the rank's GPU, and whether there are changes to report; absent if the GPU is not
    /// monitored.
    gpu: Mutex<Option<(GpuReport, bool)>>,
}

/// The recording rank.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Identity {
    pub rank: u32,
    pub world: u32,
    pub attempt: u32,
}

/// A rank that makes no progress.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Stall {
    /// The current operation.
    pub entry: Entry,
    /// Start of the stall, in seconds since 1970.
    pub since: u64,
    /// Duration as a share of the job's limit.
    pub share: f32,
    pub on_hang: OnHang,
}

impl Stall {
    /// Whether the limit is exceeded.
    pub fn is_overdue(&self) -> bool {
        self.share > 1.0
    }

    /// Whether it is long enough to be reported along with another rank that is overdue.
    pub fn is_long(&self) -> bool {
        self.share > 0.25
    }
}

/// Content of a heartbeat.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Vitals {
    pub pid: u32,
    /// The operation as text.
    pub doing: String,
    /// It waits for other ranks.
    pub waits: bool,
    /// `None` without a watchdog.
    #[serde(rename = "still")]
    pub stall: Option<Stall>,
    /// Operations begun.
    pub count: u64,
    /// Address and worst problem of the rank's GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<(Option<PciAddress>, GpuFault)>,
}

impl Recorder {
    /// Records to a file in the run directory.
    ///
    /// # Errors
    /// The file cannot be created or mapped.
    pub fn in_file(run_dir: &Path, identity: Identity) -> io::Result<Recorder> {
        let folder = run_dir.join(record::DIR);
        std::fs::create_dir_all(&folder)?;
        Ok(Recorder::new(Words::in_file(&folder.join(file(identity.rank, identity.attempt)))?, identity))
    }

    /// Records to private memory, which is lost with the process.
    pub fn private(identity: Identity) -> Recorder {
        Recorder::new(Words::private(), identity)
    }

    fn new(words: Words, identity: Identity) -> Recorder {
        let start = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_micros() as u64);
        let recorder = Recorder {
            words,
            start: Instant::now(),
            step: AtomicU64::new(0),
            counters: Mutex::default(),
            layers: OnceLock::new(),
            median_us: AtomicU64::new(0),
            stall: Mutex::default(),
            gpu: Mutex::default(),
        };
        let header = [
            (at::RANK, identity.rank.into()),
            (at::WORLD, identity.world.into()),
            (at::ATTEMPT, identity.attempt.into()),
            (at::PID, std::process::id().into()),
            (at::START, start),
            (at::MAGIC, MAGIC),
        ];
        header.into_iter().for_each(|(at, value)| recorder.set(at, value));
        recorder.set_text(at::HOST, &rustix::system::uname().nodename().to_string_lossy());
        recorder.begin(Operation::Join, 0);
        recorder
    }

    fn set(&self, at: usize, value: u64) {
        self.words.at(at).store(value, Ordering::Relaxed);
    }

    fn set_text(&self, at: usize, text: &str) {
        let mut bytes = [0; TEXT];
        let len = (0..TEXT).rev().find(|len| text.is_char_boundary(*len)).unwrap_or(0).min(text.len());
        bytes[..len].copy_from_slice(&text.as_bytes()[..len]);
        for (index, word) in bytes.as_chunks().0.iter().enumerate() {
            self.set(at + index, u64::from_ne_bytes(*word));
        }
    }

    fn now_us(&self) -> u64 {
        self.start.elapsed().as_micros() as u64
    }

    /// Sets the step of the next operations.
    pub fn set_step(&self, step: u64) {
        self.step.store(step, Ordering::Relaxed);
    }

    /// Begins an operation, which ends the previous one. Called only by the training thread.
    pub fn begin(&self, operation: Operation, index: u32) {
        let entry = Entry { operation, step: self.step.load(Ordering::Relaxed), index, since_us: self.now_us() };
        let count = self.words.at(at::COUNT);
        let number = count.load(Ordering::Relaxed);
        let slot = RING_AT + ENTRY * (number % RING as u64) as usize;
        for (index, word) in entry.pack().into_iter().enumerate() {
            // A reader that sees this word also sees the count before it.
            self.words.at(slot + index).store(word, Ordering::Release);
        }
        count.store(number + 1, Ordering::Release);
    }

    /// The current operation.
    pub fn latest(&self) -> Entry {
        loop {
            let count = self.words.at(at::COUNT).load(Ordering::Acquire);
            let slot = RING_AT + ENTRY * (count.wrapping_sub(1) % RING as u64) as usize;
            let words = std::array::from_fn(|index| self.words.at(slot + index).load(Ordering::Acquire));
            // A slot is reused after 63 other operations; in that case the count has changed.
            if let Some(entry) = Entry::unpack(words)
                && self.words.at(at::COUNT).load(Ordering::Acquire).wrapping_sub(count) < RING as u64 - 1
            {
                return entry;
            }
        }
    }

    /// Adds a counter of progress within an operation. It can be advanced by any thread.
    pub fn add_counter(&self, counter: impl Fn() -> u64 + Send + Sync + 'static) {
        self.counters.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(counter));
    }

    /// Tracks which layer of the network is running.
    pub fn track_layers(&self, network: &Network) {
        let names = (0..network.layers()).map(|layer| network.name(layer).0.to_owned()).collect();
        let _ = self.layers.set(Layers { position: network.position(), names });
    }

    pub fn set_median(&self, median: Duration) {
        self.median_us.store(median.as_micros() as u64, Ordering::Relaxed);
    }

    pub fn median(&self) -> Option<Duration> {
        Some(Duration::from_micros(self.median_us.load(Ordering::Relaxed))).filter(|median| !median.is_zero())
    }

    /// Changes whenever there is progress.
    pub fn progress(&self) -> u64 {
        let counters = self.counters.lock().unwrap_or_else(PoisonError::into_inner);
        let position = self.layers.get().map_or(0, |layers| layers.position.load(Ordering::Relaxed).into());
        let own = self.words.at(at::COUNT).load(Ordering::Acquire).wrapping_mul(1 << 32).wrapping_add(position);
        counters.iter().enumerate().fold(own, |sum, (index, counter)| {
            // Each counter has its own factor, so that one that decreases does not cancel one that
            // increases.
            sum.wrapping_add(counter().wrapping_mul(2 * index as u64 + 0x9e37_79b9_7f4a_7c15))
        })
    }

    /// The running layer, if the rank is computing.
    fn layer(&self) -> Option<&str> {
        let layers = self.layers.get()?;
        let is_computing =
            matches!(self.latest().operation, Operation::Forward | Operation::Backward | Operation::Evaluate);
        let position = layers.position.load(Ordering::Relaxed) as usize;
        layers.names.get(position).map(String::as_str).filter(|_| is_computing)
    }

    /// Records that the process is alive. Called by the watchdog.
    pub fn mark_alive(&self) {
        self.set(at::ALIVE, self.now_us());
        self.set_text(at::LAYER, self.layer().unwrap_or_default());
    }

    /// Sets the current stall, for heartbeats.
    pub fn set_stall(&self, stall: Stall) {
        *self.stall.lock().unwrap_or_else(PoisonError::into_inner) = Some(stall);
    }

    /// Describes the current operation.
    pub fn activity(&self) -> String {
        let entry = self.latest();
        match self.layer() {
            Some(layer) => format!("{entry}, layer {layer}"),
            None => entry.to_string(),
        }
    }

    pub fn vitals(&self) -> Vitals {
        Vitals {
            pid: std::process::id(),
            doing: self.activity(),
            waits: self.latest().operation.waits(),
            stall: *self.stall.lock().unwrap_or_else(PoisonError::into_inner),
            count: self.words.at(at::COUNT).load(Ordering::Relaxed),
            gpu: self
                .gpu()
                .as_ref()
                .and_then(|(report, _)| Some((PciAddress::parse(&report.bus), report.worst_fault()?))),
        }
    }

    fn gpu(&self) -> MutexGuard<'_, Option<(GpuReport, bool)>> {
        self.gpu.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts monitoring of the rank's GPU.
    pub fn start_gpu_report(&self, report: GpuReport) {
        *self.gpu() = Some((report, false));
    }

    /// Updates the GPU report. A new problem, XID or uncorrected error marks it as changed.
    pub fn update_gpu_report(&self, change: impl FnOnce(&mut GpuReport)) {
        if let Some((report, has_changed)) = &mut *self.gpu() {
            let before = (report.worst_fault(), report.xids.len(), report.uncorrected_errors.unwrap_or(0));
            change(report);
            *has_changed |= before != (report.worst_fault(), report.xids.len(), report.uncorrected_errors.unwrap_or(0));
        }
    }

    /// The GPU report if it has changed since the last call.
    pub fn take_gpu_changes(&self) -> Option<GpuReport> {
        let mut gpu = self.gpu();
        let (report, has_changed) = gpu.as_mut()?;
        std::mem::take(has_changed).then(|| report.clone())
    }

    pub fn gpu_report(&self) -> Option<GpuReport> {
        self.gpu().as_ref().map(|(report, _)| report.clone())
    }

    /// Errors that the driver has reported for the GPU, as a suffix for error messages; empty if
    /// there are none.
    pub fn gpu_errors(&self) -> String {
        self.gpu().as_ref().map(|(report, _)| report.errors()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use switchyard_worker_contract::recorder::Recording;

    const IDENTITY: Identity = Identity { rank: 3, world: 4, attempt: 2 };

    #[test]
    fn records_are_in_the_file_without_closing_it() {
        let folder = tempfile::tempdir().unwrap();
        let recorder = Recorder::in_file(folder.path(), IDENTITY).unwrap();
        recorder.set_step(17);
        recorder.begin(Operation::Forward, 1);
        let names = vec!["embedding".into(), "blocks.0".into()];
        let _ = recorder.layers.set(Layers { position: Arc::new(AtomicU32::new(1)), names });
        recorder.mark_alive();
        recorder.begin(Operation::Reduce, 5);
        let bytes = std::fs::read(folder.path().join("record/rank-3.attempt-2.recorder")).unwrap();
        let found = Recording::read(&bytes).unwrap();
        let operations: Vec<String> = found.entries.iter().map(ToString::to_string).collect();
        let expected = [
            "joining the group",
            "step 17: forward pass of micro-batch 1",
            "step 17: waiting for the all-reduce of bucket 5",
        ];
        assert_eq!(operations, expected);
        assert_eq!((found.rank, found.world, found.attempt, found.pid), (3, 4, 2, std::process::id()));
        assert_eq!(found.layer, "blocks.0");
        assert!(!found.host.is_empty() && found.alive_us >= found.entries[2].since_us);
    }

    #[test]
    fn readers_never_see_a_partial_operation() {
        let recorder = Recorder::private(IDENTITY);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 0..200_000 {
                    recorder.set_step(number.into());
                    recorder.begin(Operation::Reduce, number);
                }
            });
            loop {
                let entry = recorder.latest();
                assert!(entry.operation == Operation::Join || entry.step == u64::from(entry.index), "{entry:?}");
                if entry.step == 199_999 {
                    return;
                }
            }
        });
    }

    #[test]
    fn every_counter_is_progress() {
        let recorder = Recorder::private(IDENTITY);
        let (rows, bytes) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(9)));
        for counter in [&rows, &bytes] {
            let counter = Arc::clone(counter);
            recorder.add_counter(move || counter.load(Ordering::Relaxed));
        }
        let mut seen = std::collections::BTreeSet::from([recorder.progress()]);
        rows.store(1, Ordering::Relaxed);
        assert!(seen.insert(recorder.progress()));
        bytes.store(0, Ordering::Relaxed);
        assert!(seen.insert(recorder.progress()), "the next all-reduce begins");
        recorder.begin(Operation::Input, 0);
        assert!(seen.insert(recorder.progress()));
    }

    #[test]
    fn long_names_are_truncated_at_a_character_boundary() {
        let recorder = Recorder::private(IDENTITY);
        recorder.set_text(at::LAYER, &"ä".repeat(40));
        let bytes: Vec<u8> = (0..TEXT / 8)
            .flat_map(|word| recorder.words.at(at::LAYER + word).load(Ordering::Relaxed).to_ne_bytes())
            .collect();
        assert_eq!(std::str::from_utf8(&bytes).unwrap().trim_end_matches('\0').chars().count(), 31);
    }
}
