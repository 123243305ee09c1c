//! What a rank is doing right now, and what it did last: for the watchdog, for its heartbeats, and for `switchyard doctor`
//! after its death.
//!
//! ```text
//! training thread ── begin(operation) ──> ring (relaxed stores into a mapped file; no lock, no allocation)
//! reader, saver, lanes ── counters ─────> progress
//! watchdog thread: reads both ──> stands still? ──> abort the group, report, end the process
//! control thread:  heartbeat with the operation ──> rank 0, which says what the others wait for
//! ```
//!
//! Only the training thread begins operations. The format of the file is that of
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

/// A number that changes whenever there is progress.
type Counter = Box<dyn Fn() -> u64 + Send + Sync>;

/// The layer that is running.
struct Layers {
    position: Arc<AtomicU32>,
    names: Vec<String>,
}

/// The recorder of a rank.
pub(crate) struct Recorder {
    words: Words,
    start: Instant,
    step: AtomicU64,
    counters: Mutex<Vec<Counter>>,
    layers: OnceLock<Layers>,
    /// Median of the last steps in microseconds; 0: unknown.
    median_us: AtomicU64,
    /// As the watchdog has seen it last.
    still: Mutex<Option<Standing>>,
    /// How the GPU of the rank fares, and whether somebody should be told; absent where nobody watches it.
    gpu: Mutex<Option<(GpuReport, bool)>>,
}

/// Who records.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Identity {
    pub rank: u32,
    pub world: u32,
    pub attempt: u32,
}

/// How long a rank has been without progress.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Standing {
    /// The operation.
    pub entry: Entry,
    /// Since when, seconds since 1970.
    pub since: u64,
    /// This time as a share of what the job allows.
    pub share: f32,
    pub on_hang: OnHang,
}

impl Standing {
    /// Whether it is too long.
    pub fn is_late(&self) -> bool {
        self.share > 1.0
    }

    /// Whether it is long enough to be part of what holds up the others when one of them is late.
    pub fn is_long(&self) -> bool {
        self.share > 0.25
    }
}

/// What a heartbeat says.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Vitals {
    pub pid: u32,
    /// The operation, in words.
    pub doing: String,
    /// It waits for other ranks.
    pub waits: bool,
    /// `None`: nobody watches it.
    pub still: Option<Standing>,
    /// Operations begun.
    pub count: u64,
    /// What a person should look at: where the GPU of the rank is, and what it has met.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<(Option<PciAddress>, GpuFault)>,
}

impl Recorder {
    /// Records into a file of the run directory.
    ///
    /// # Errors
    /// The file cannot be created or mapped.
    pub fn in_file(run_dir: &Path, identity: Identity) -> io::Result<Recorder> {
        let folder = run_dir.join(record::DIR);
        std::fs::create_dir_all(&folder)?;
        Ok(Recorder::new(Words::in_file(&folder.join(file(identity.rank, identity.attempt)))?, identity))
    }

    /// Records into memory of its own, which is lost with the process.
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
            still: Mutex::default(),
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

    /// The step that the next operations belong to.
    pub fn step(&self, step: u64) {
        self.step.store(step, Ordering::Relaxed);
    }

    /// Begins an operation, and so ends the one before it. Called by the training thread only.
    pub fn begin(&self, operation: Operation, index: u32) {
        let entry = Entry { operation, step: self.step.load(Ordering::Relaxed), index, since_us: self.now_us() };
        let count = self.words.at(at::COUNT);
        let number = count.load(Ordering::Relaxed);
        let slot = RING_AT + ENTRY * (number % RING as u64) as usize;
        for (place, word) in entry.pack().into_iter().enumerate() {
            // Whoever sees a word also sees the count before it.
            self.words.at(slot + place).store(word, Ordering::Release);
        }
        count.store(number + 1, Ordering::Release);
    }

    /// The operation that is under way.
    pub fn latest(&self) -> Entry {
        loop {
            let count = self.words.at(at::COUNT).load(Ordering::Acquire);
            let slot = RING_AT + ENTRY * (count.wrapping_sub(1) % RING as u64) as usize;
            let words = std::array::from_fn(|place| self.words.at(slot + place).load(Ordering::Acquire));
            // A slot is written again after 63 other operations; then the count has changed.
            if let Some(entry) = Entry::unpack(words)
                && self.words.at(at::COUNT).load(Ordering::Acquire).wrapping_sub(count) < RING as u64 - 1
            {
                return entry;
            }
        }
    }

    /// Progress within an operation, by any thread.
    pub fn count(&self, counter: impl Fn() -> u64 + Send + Sync + 'static) {
        self.counters.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(counter));
    }

    /// From now on it is known which layer is running.
    pub fn follow(&self, network: &Network) {
        let names = (0..network.layers()).map(|layer| network.name(layer).0.to_owned()).collect();
        let _ = self.layers.set(Layers { position: network.position(), names });
    }

    /// The median of the last steps.
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
            // Each counter has a factor of its own, so that one that goes back does not hide one that goes on.
            sum.wrapping_add(counter().wrapping_mul(2 * index as u64 + 0x9e37_79b9_7f4a_7c15))
        })
    }

    /// The layer that is running, if the rank computes.
    fn layer(&self) -> Option<&str> {
        let layers = self.layers.get()?;
        let computes =
            matches!(self.latest().operation, Operation::Forward | Operation::Backward | Operation::Evaluate);
        let position = layers.position.load(Ordering::Relaxed) as usize;
        layers.names.get(position).map(String::as_str).filter(|_| computes)
    }

    /// The process is alive: called by the watchdog.
    pub fn alive(&self) {
        self.set(at::ALIVE, self.now_us());
        self.set_text(at::LAYER, self.layer().unwrap_or_default());
    }

    /// How long it stands still, for the heartbeats.
    pub fn set_still(&self, still: Standing) {
        *self.still.lock().unwrap_or_else(PoisonError::into_inner) = Some(still);
    }

    /// What it does, in words.
    pub fn doing(&self) -> String {
        let entry = self.latest();
        match self.layer() {
            Some(layer) => format!("{entry}, layer {layer}"),
            None => entry.to_string(),
        }
    }

    pub fn vitals(&self) -> Vitals {
        Vitals {
            pid: std::process::id(),
            doing: self.doing(),
            waits: self.latest().operation.waits(),
            still: *self.still.lock().unwrap_or_else(PoisonError::into_inner),
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

    /// Somebody watches the GPU of the rank from now on.
    pub fn watch_gpu(&self, report: GpuReport) {
        *self.gpu() = Some((report, false));
    }

    /// Changes what is known of the GPU. What a person should know at once is news.
    pub fn change_gpu(&self, change: impl FnOnce(&mut GpuReport)) {
        if let Some((report, is_news)) = &mut *self.gpu() {
            let before = (report.worst_fault(), report.xids.len(), report.uncorrected_errors.unwrap_or(0));
            change(report);
            *is_news |= before != (report.worst_fault(), report.xids.len(), report.uncorrected_errors.unwrap_or(0));
        }
    }

    /// What is known of the GPU, if it is news since the last call.
    pub fn gpu_news(&self) -> Option<GpuReport> {
        let mut gpu = self.gpu();
        let (report, is_news) = gpu.as_mut()?;
        std::mem::take(is_news).then(|| report.clone())
    }

    /// What is known of the GPU.
    pub fn gpu_report(&self) -> Option<GpuReport> {
        self.gpu().as_ref().map(|(report, _)| report.clone())
    }

    /// What the driver has reported of the GPU, to be appended to an error; empty if nothing.
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
    fn what_was_recorded_is_in_the_file_although_nobody_closed_it() {
        let folder = tempfile::tempdir().unwrap();
        let recorder = Recorder::in_file(folder.path(), IDENTITY).unwrap();
        recorder.step(17);
        recorder.begin(Operation::Forward, 1);
        let names = vec!["embedding".into(), "blocks.0".into()];
        let _ = recorder.layers.set(Layers { position: Arc::new(AtomicU32::new(1)), names });
        recorder.alive();
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
    fn a_reader_of_the_ring_never_sees_half_an_operation() {
        let recorder = Recorder::private(IDENTITY);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 0..200_000 {
                    recorder.step(number.into());
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
            recorder.count(move || counter.load(Ordering::Relaxed));
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
    fn long_names_are_cut_where_a_character_ends() {
        let recorder = Recorder::private(IDENTITY);
        recorder.set_text(at::LAYER, &"ä".repeat(40));
        let bytes: Vec<u8> = (0..TEXT / 8)
            .flat_map(|word| recorder.words.at(at::LAYER + word).load(Ordering::Relaxed).to_ne_bytes())
            .collect();
        assert_eq!(std::str::from_utf8(&bytes).unwrap().trim_end_matches('\0').chars().count(), 31);
    }
}
