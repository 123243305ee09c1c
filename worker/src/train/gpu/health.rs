//! The thread that watches the GPU of a rank through NVML, and tells the recorder what it sees: heartbeats, the watchdog and errors take it
//! from there. It computes nothing and uses no memory of the GPU. Without NVML nobody watches, and all else is as with it.

use crate::recorder::Recorder;
use crate::train::TrainError;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use switchyard_cuda::Error;
use switchyard_cuda::find::{NVML, Places};
use switchyard_cuda::nvml::{Gpu, GpuEvent, Listener, Nvml, State};
use switchyard_worker_contract::gpu::{GpuReport, PcieWidth, Slowed, SlowedBy};

/// Longest wait for an error: how long the end of a rank may wait for this thread.
const WAIT: Duration = Duration::from_millis(100);
/// Between two looks at clocks, temperature, memory and link.
const LOOK: Duration = Duration::from_secs(1);
/// How long a failed call waits for what the driver has to say of it.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// NVML on this machine.
///
/// # Errors
/// It is not there or does not work.
pub(super) fn nvml() -> Result<Nvml, Error> {
    let places = Places::new(|name| std::env::var_os(name), Path::new("/"), None);
    Nvml::new(&places.open(&NVML)?.library)
}

/// Who watches the GPU of a rank. The thread ends when this is dropped.
pub(super) struct Health {
    sight: Sight,
    thread: Option<JoinHandle<()>>,
}

/// What others may ask of it.
#[derive(Clone)]
pub(super) struct Sight {
    recorder: Arc<Recorder>,
    /// Absent: nobody watches.
    shared: Option<Arc<Shared>>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    /// Times that the thread has listened, until it ends.
    rounds: Mutex<Option<u64>>,
    changed: Condvar,
}

impl Health {
    /// Begins to watch the GPU at an address. `says`: whether this rank writes into the log why nobody does.
    pub fn start((rank, bus): (u32, &str), says: bool, recorder: &Arc<Recorder>) -> Health {
        let begin = || -> Result<_, String> {
            let gpu = nvml().and_then(|nvml| nvml.gpu(bus)).map_err(|error| error.to_string())?;
            let listener = gpu.listen().map_err(|error| error.to_string())?;
            let shared = Arc::new(Shared { rounds: Mutex::new(Some(0)), ..Shared::default() });
            let report = GpuReport { rank, bus: bus.to_owned(), ..GpuReport::default() };
            recorder.watch_gpu(report);
            let (own, told) = (Arc::clone(&shared), Arc::clone(recorder));
            let thread = std::thread::Builder::new().name("gpu-health".into()).spawn(move || {
                own.watch(&gpu, listener.as_ref(), &told);
                own.end();
            });
            Ok((thread.map_err(|error| error.to_string())?, shared))
        };
        let (thread, shared) = match begin() {
            Ok((thread, shared)) => (Some(thread), Some(shared)),
            Err(reason) => {
                if says {
                    eprintln!(
                        "note: nobody watches the GPUs for errors and slow clocks: {reason}; a container needs utility in \
                         NVIDIA_DRIVER_CAPABILITIES"
                    );
                }
                (None, None)
            }
        };
        Health { sight: Sight { recorder: Arc::clone(recorder), shared }, thread }
    }

    pub fn sight(&self) -> &Sight {
        &self.sight
    }
}

impl Drop for Health {
    fn drop(&mut self) {
        if let Some(shared) = &self.sight.shared {
            shared.stop.store(true, Ordering::Release);
        }
        if let Some(thread) = self.thread.take() {
            // A panic in that thread was reported there.
            let _ = thread.join();
        }
    }
}

impl Sight {
    /// What the driver has reported of the GPU, to be appended to what a failed call says; empty if nothing. The driver may be a moment
    /// later than the call.
    pub fn errors(&self) -> String {
        if let Some(shared) = &self.shared {
            shared.listen_again();
        }
        self.recorder.gpu_errors()
    }

    /// The outcome of something on the GPU, with what the driver has reported of it.
    ///
    /// # Errors
    /// That of the outcome.
    pub fn explain<T>(&self, outcome: Result<T, TrainError>) -> Result<T, TrainError> {
        outcome.map_err(|error| match error {
            TrainError::Cuda { source, seen } if seen.is_empty() => TrainError::Cuda { source, seen: self.errors() },
            other => other,
        })
    }
}

impl Shared {
    fn watch(&self, gpu: &Gpu, listener: Option<&Listener>, recorder: &Recorder) {
        let first = gpu.state();
        let (start, mut looked) = (Instant::now(), Instant::now());
        // The first look is at once: what is wrong from the start must not wait.
        let mut due = start;
        while !self.stop.load(Ordering::Acquire) {
            let heard = match listener {
                Some(listener) => listener.wait(WAIT),
                None => {
                    std::thread::park_timeout(WAIT);
                    Ok(GpuEvent::Nothing)
                }
            };
            let now = Instant::now();
            match heard {
                Ok(GpuEvent::Nothing) => self.count(),
                Ok(GpuEvent::Xid(xid)) => recorder.change_gpu(|report| add_xid(report, xid)),
                Ok(GpuEvent::Lost) => return recorder.change_gpu(|report| report.is_lost = true),
                // The driver is gone, and with it all that could be said.
                Err(_) => return,
            }
            if now >= due {
                let state = gpu.state();
                let passed = now.duration_since(looked).as_secs_f64();
                recorder.change_gpu(|report| add_state(report, (&first, &state), passed));
                (looked, due) = (now, now + LOOK);
            }
        }
        let (state, passed) = (gpu.state(), looked.elapsed().as_secs_f64());
        recorder.change_gpu(|report| add_state(report, (&first, &state), passed));
    }

    fn count(&self) {
        if let Some(rounds) = &mut *self.rounds.lock().unwrap_or_else(PoisonError::into_inner) {
            *rounds += 1;
        }
        self.changed.notify_all();
    }

    fn end(&self) {
        *self.rounds.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.changed.notify_all();
    }

    /// Waits until the thread has listened once more from now on, and heard nothing new.
    fn listen_again(&self) {
        let rounds = self.rounds.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(enough) = rounds.map(|rounds| rounds + 2) else { return };
        let waits = |rounds: &mut Option<u64>| rounds.is_some_and(|rounds| rounds < enough);
        drop(self.changed.wait_timeout_while(rounds, LAST_WORDS, waits));
    }
}

fn add_xid(report: &mut GpuReport, xid: u32) {
    if report.xids.len() < GpuReport::MAX_XIDS {
        report.xids.push(xid);
    }
}

/// Adds a look. `first`: the state when the watch began, whose errors are those of others. `passed`: seconds since the last look.
fn add_state(report: &mut GpuReport, (first, state): (&State, &State), passed: f64) {
    report.seconds += passed;
    if let Some(reasons) = state.reasons {
        let causes = [
            (SlowedBy::Power, reasons.power()),
            (SlowedBy::Temperature, reasons.temperature()),
            (SlowedBy::PowerBrake, reasons.power_brake()),
            (SlowedBy::Hardware, reasons.hardware()),
        ];
        for (by, _) in causes.into_iter().filter(|(_, holds)| *holds) {
            match report.slowed.iter_mut().find(|slowed| slowed.by == by) {
                Some(slowed) => slowed.seconds += passed,
                None => report.slowed.push(Slowed { by, seconds: passed }),
            }
        }
    }
    let since = |first: Option<u64>, now: Option<u64>| Some(now?.saturating_sub(first?));
    // A GPU that is lost has no counters any more: what is known of it stays.
    report.corrected_errors = since(first.corrected, state.corrected).or(report.corrected_errors);
    report.uncorrected_errors = since(first.uncorrected, state.uncorrected).or(report.uncorrected_errors);
    report.highest_celsius = report.highest_celsius.max(state.celsius);
    if let Some((lanes, most)) = state.lanes {
        let fewest = report.pcie.map_or(lanes, |width| width.lanes.min(lanes));
        report.pcie = Some(PcieWidth { lanes: fewest, most });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_add_up_and_errors_of_others_do_not_count() {
        let mut report = GpuReport::default();
        let first = State { corrected: Some(7), uncorrected: Some(2), ..State::default() };
        let warm = State { celsius: Some(70), lanes: Some((16, 16)), ..first };
        let hot = State { corrected: Some(9), celsius: Some(91), lanes: Some((8, 16)), ..first };
        let lost = State::default();
        for state in [warm, hot, warm, lost] {
            add_state(&mut report, (&first, &state), 2.0);
        }
        assert_eq!((report.seconds, report.corrected_errors, report.uncorrected_errors), (8.0, Some(0), Some(0)));
        assert_eq!((report.highest_celsius, report.pcie), (Some(91), Some(PcieWidth { lanes: 8, most: 16 })));
        add_state(&mut report, (&first, &hot), 2.0);
        assert_eq!(report.corrected_errors, Some(2));
    }

    #[test]
    fn a_gpu_that_repeats_itself_is_heard_out_only_so_long() {
        let mut report = GpuReport::default();
        (0..100).for_each(|xid| add_xid(&mut report, xid));
        assert_eq!((report.xids.len(), report.xids.last()), (GpuReport::MAX_XIDS, Some(&15)));
    }
}
