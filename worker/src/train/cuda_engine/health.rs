//! The GPU health thread: monitors a rank's GPU through NVML and updates the recorder, which
//! heartbeats, the watchdog and error messages read. It uses neither compute nor memory of the GPU.
//! Without NVML the GPU is not monitored; nothing else changes.

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

/// Longest wait for an event; bounds how long dropping [`Health`] blocks.
const EVENT_TIMEOUT: Duration = Duration::from_millis(100);
/// Interval between reads of clocks, temperature, utilisation, memory and link.
const READ_INTERVAL: Duration = Duration::from_secs(1);
/// How long to wait for the driver's error report after a failed call.
const ERROR_REPORT_TIMEOUT: Duration = Duration::from_secs(1);

/// Loads NVML.
///
/// # Errors
/// NVML is missing or does not work.
pub(super) fn nvml() -> Result<Nvml, Error> {
    let places = Places::new(|name| std::env::var_os(name), Path::new("/"), None);
    Nvml::new(&places.open(&NVML)?.library)
}

/// Monitors a rank's GPU. The thread ends when this is dropped.
pub(super) struct Health {
    handle: HealthHandle,
    thread: Option<JoinHandle<()>>,
}

/// A handle for error reporting.
#[derive(Clone)]
pub(super) struct HealthHandle {
    recorder: Arc<Recorder>,
    /// `None` if the GPU is not monitored.
    shared: Option<Arc<Shared>>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    /// Completed waits for events; `None` after the thread has ended.
    rounds: Mutex<Option<u64>>,
    changed: Condvar,
}

impl Health {
    /// Starts monitoring the GPU at a bus address. `logs`: whether this rank logs why monitoring is
    /// unavailable.
    pub fn start((rank, bus): (u32, &str), logs: bool, recorder: &Arc<Recorder>) -> Health {
        let begin = || -> Result<_, String> {
            let gpu = nvml().and_then(|nvml| nvml.gpu(bus)).map_err(|error| error.to_string())?;
            let listener = gpu.listen().map_err(|error| error.to_string())?;
            let shared = Arc::new(Shared { rounds: Mutex::new(Some(0)), ..Shared::default() });
            let report = GpuReport { rank, bus: bus.to_owned(), ..GpuReport::default() };
            recorder.start_gpu_report(report);
            let (own, thread_recorder) = (Arc::clone(&shared), Arc::clone(recorder));
            let thread = std::thread::Builder::new().name("gpu-health".into()).spawn(move || {
                own.watch(&gpu, listener.as_ref(), &thread_recorder);
                own.end();
            });
            Ok((thread.map_err(|error| error.to_string())?, shared))
        };
        let (thread, shared) = match begin() {
            Ok((thread, shared)) => (Some(thread), Some(shared)),
            Err(reason) => {
                if logs {
                    eprintln!(
                        "note: the GPUs are not monitored for errors and slow clocks: {reason}; containers need `utility` in \
                         NVIDIA_DRIVER_CAPABILITIES"
                    );
                }
                (None, None)
            }
        };
        Health { handle: HealthHandle { recorder: Arc::clone(recorder), shared }, thread }
    }

    pub fn handle(&self) -> &HealthHandle {
        &self.handle
    }
}

impl Drop for Health {
    fn drop(&mut self) {
        if let Some(shared) = &self.handle.shared {
            shared.stop.store(true, Ordering::Release);
        }
        if let Some(thread) = self.thread.take() {
            // That thread has already reported a panic.
            let _ = thread.join();
        }
    }
}

impl HealthHandle {
    /// Errors that the driver has reported for the GPU, as a suffix for the message of a failed
    /// call; empty if there are none. Waits briefly, because the driver's report can arrive after
    /// the call's error.
    pub fn errors(&self) -> String {
        if let Some(shared) = &self.shared {
            shared.wait_for_new_round();
        }
        self.recorder.gpu_errors()
    }

    /// Adds the driver's reported errors to a failed GPU operation.
    ///
    /// # Errors
    /// The operation's error.
    pub fn explain<T>(&self, outcome: Result<T, TrainError>) -> Result<T, TrainError> {
        outcome.map_err(|error| match error {
            TrainError::Cuda { source, details } if details.is_empty() => {
                TrainError::Cuda { source, details: self.errors() }
            }
            other => other,
        })
    }
}

impl Shared {
    fn watch(&self, gpu: &Gpu, listener: Option<&Listener>, recorder: &Recorder) {
        let first = gpu.state();
        let (start, mut last_read) = (Instant::now(), Instant::now());
        // Check at once, so that existing problems are reported immediately.
        let mut due = start;
        while !self.stop.load(Ordering::Acquire) {
            let heard = match listener {
                Some(listener) => listener.wait(EVENT_TIMEOUT),
                None => {
                    std::thread::park_timeout(EVENT_TIMEOUT);
                    Ok(GpuEvent::Nothing)
                }
            };
            let now = Instant::now();
            match heard {
                Ok(GpuEvent::Nothing) => self.count(),
                Ok(GpuEvent::Xid(xid)) => recorder.update_gpu_report(|report| add_xid(report, xid)),
                Ok(GpuEvent::Lost) => return recorder.update_gpu_report(|report| report.is_lost = true),
                // The driver is gone, so there is nothing left to read.
                Err(_) => return,
            }
            if now >= due {
                let state = gpu.state();
                let passed = now.duration_since(last_read).as_secs_f64();
                recorder.update_gpu_report(|report| add_state(report, (&first, &state), passed));
                (last_read, due) = (now, now + READ_INTERVAL);
            }
        }
        let (state, passed) = (gpu.state(), last_read.elapsed().as_secs_f64());
        recorder.update_gpu_report(|report| add_state(report, (&first, &state), passed));
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

    /// Waits until the thread has completed a full wait for events from now on without a new one.
    fn wait_for_new_round(&self) {
        let rounds = self.rounds.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(enough) = rounds.map(|rounds| rounds + 2) else { return };
        let is_waiting = |rounds: &mut Option<u64>| rounds.is_some_and(|rounds| rounds < enough);
        drop(self.changed.wait_timeout_while(rounds, ERROR_REPORT_TIMEOUT, is_waiting));
    }
}

fn add_xid(report: &mut GpuReport, xid: u32) {
    if report.xids.len() < GpuReport::MAX_XIDS {
        report.xids.push(xid);
    }
}

/// Adds a reading. `first`: the state when monitoring began, whose errors belong to others.
/// `passed`: seconds since the last reading.
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
    if let Some(percent) = state.busy_percent {
        *report.busy_seconds.get_or_insert_default() += passed * f64::from(percent) / 100.0;
    }
    let since = |first: Option<u64>, now: Option<u64>| Some(now?.saturating_sub(first?));
    // A lost GPU has no counters; keep the last known values.
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
    fn readings_add_up_and_earlier_errors_do_not_count() {
        let mut report = GpuReport::default();
        let first = State { corrected: Some(7), uncorrected: Some(2), ..State::default() };
        let warm = State { celsius: Some(70), busy_percent: Some(75), lanes: Some((16, 16)), ..first };
        let hot = State { corrected: Some(9), celsius: Some(91), lanes: Some((8, 16)), ..first };
        let lost = State::default();
        for state in [warm, hot, warm, lost] {
            add_state(&mut report, (&first, &state), 2.0);
        }
        assert_eq!((report.seconds, report.corrected_errors, report.uncorrected_errors), (8.0, Some(0), Some(0)));
        assert_eq!((report.busy_seconds, report.busy_percent()), (Some(3.0), Some(37.5)));
        assert_eq!((report.highest_celsius, report.pcie), (Some(91), Some(PcieWidth { lanes: 8, most: 16 })));
        add_state(&mut report, (&first, &hot), 2.0);
        assert_eq!(report.corrected_errors, Some(2));
    }

    #[test]
    fn the_number_of_recorded_xids_is_bounded() {
        let mut report = GpuReport::default();
        (0..100).for_each(|xid| add_xid(&mut report, xid));
        assert_eq!((report.xids.len(), report.xids.last()), (GpuReport::MAX_XIDS, Some(&15)));
    }
}
