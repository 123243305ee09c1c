//! The watchdog thread: detects a hung training thread.

mod stall;

use crate::comm::{Aborter, Cause};
use crate::recorder::{Identity, Recorder, Stall};
use stall::{Observation, StallDetector};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use switchyard_worker_contract::config::{self, OnHang};
use switchyard_worker_contract::event::{GpuReport, GpuTrouble, Stuck};

/// How long the training thread has to report that its GPU is gone.
const GONE_GRACE: Duration = Duration::from_secs(5);

/// State shared by a rank and its watchdog.
pub(super) struct Watch {
    pub recorder: Arc<Recorder>,
    /// Set once the group exists.
    aborter: OnceLock<Aborter>,
}

impl Watch {
    pub fn new(recorder: Recorder) -> Arc<Watch> {
        Arc::new(Watch { recorder: Arc::new(recorder), aborter: OnceLock::new() })
    }

    pub fn set_aborter(&self, aborter: Aborter) {
        let _ = self.aborter.set(aborter);
    }
}

/// A watchdog's message to the process.
#[derive(Debug, Clone, PartialEq)]
pub enum Alarm {
    /// The rank has hung or its GPU is gone, and the group has ended with this root cause. The
    /// process must exit, because the training thread cannot.
    End(Cause),
    /// On rank 0: the longest-hung rank while the job keeps waiting; `None` when all have
    /// recovered.
    Stuck(Option<Stuck>),
    /// New events on this rank's GPU.
    Gpu(GpuReport),
    /// On rank 0: the job's worst GPU problem; `None` if there is none any more.
    GpuTrouble(Option<GpuTrouble>),
}

/// Called with a rank's alarms.
pub type OnAlarm = Arc<dyn Fn(Alarm) + Send + Sync>;

/// The watchdog thread; it ends when this is dropped.
pub(super) struct Watchdog {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Starts the thread.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        config: config::Watchdog,
        identity: Identity,
        watch: Arc<Watch>,
        on_alarm: Option<OnAlarm>,
    ) -> std::io::Result<Watchdog> {
        let stop: Arc<(Mutex<bool>, Condvar)> = Arc::default();
        let stopped = Arc::clone(&stop);
        let body = move || {
            let mut detector = StallDetector::new(config, Instant::now());
            let alarm = |alarm| {
                if let Some(on_alarm) = &on_alarm {
                    on_alarm(alarm)
                }
            };
            let (mut warned, mut last_stuck, mut since) = (None, None, 0);
            let (mut last_trouble, mut gone) = (None, None);
            let check_gpu = |last_trouble: &mut Option<GpuTrouble>, gone: &mut Option<Instant>| {
                if let Some(report) = watch.recorder.take_gpu_changes() {
                    if let Some(trouble) = report.worst_fault() {
                        eprintln!("warning: rank {}: GPU {}: {trouble}", identity.rank, report.bus);
                    }
                    if report.is_unusable() {
                        gone.get_or_insert_with(Instant::now);
                    }
                    alarm(Alarm::Gpu(report));
                }
                let trouble = watch.aborter.get().and_then(Aborter::gpu_trouble);
                if *last_trouble != trouble {
                    *last_trouble = trouble;
                    alarm(Alarm::GpuTrouble(trouble));
                }
            };
            while !wait(&stopped, detector.interval()) {
                let recorder = &watch.recorder;
                recorder.mark_alive();
                let entry = recorder.latest();
                let observation = Observation {
                    progress: recorder.progress(),
                    operation: entry.operation,
                    median: recorder.median(),
                };
                let check = detector.check(observation, Instant::now());
                if check.stalled.is_zero() {
                    since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
                }
                recorder.set_stall(Stall { entry, since, share: check.share(), on_hang: config.on_hang });
                let stuck = watch.aborter.get().and_then(Aborter::stuck);
                if last_stuck != stuck {
                    last_stuck = stuck;
                    alarm(Alarm::Stuck(stuck));
                }
                check_gpu(&mut last_trouble, &mut gone);
                // Calls on a lost GPU may fail, which the calling thread reports, or block forever.
                if let Some(aborter) =
                    watch.aborter.get().filter(|_| gone.is_some_and(|at: Instant| at.elapsed() > GONE_GRACE))
                    && aborter.failure().is_none()
                {
                    let text = format!("the GPU is gone{}, in {}", recorder.gpu_errors(), recorder.activity());
                    let cause = Cause::failed(identity.rank, text);
                    aborter.abort(cause.clone());
                    alarm(Alarm::End(aborter.failure().unwrap_or(cause)));
                    return;
                }
                // A waiting rank is not the cause unless all ranks wait, which rank 0 detects.
                let Some(time) = check.hang().filter(|_| !entry.operation.waits()) else { continue };
                let text = describe(recorder, time, since);
                match (config.on_hang, watch.aborter.get()) {
                    (OnHang::Report, _) if warned == Some(observation.progress) => {}
                    (OnHang::Report, _) => {
                        warned = Some(observation.progress);
                        eprintln!("warning: rank {} {text}; failurePolicy.onHang is Report: it goes on", identity.rank);
                    }
                    (OnHang::Restart, Some(aborter)) => {
                        let cause = Cause::hung(identity.rank, text);
                        aborter.abort(cause.clone());
                        alarm(Alarm::End(aborter.failure().unwrap_or(cause)));
                        return;
                    }
                    // Without a group there is no aborter, and joining is a wait.
                    (OnHang::Restart, None) => {}
                }
            }
            // Report events since the last check as well.
            check_gpu(&mut last_trouble, &mut gone);
        };
        let thread = std::thread::Builder::new().name("watchdog".into()).spawn(body)?;
        Ok(Watchdog { stop, thread: Some(thread) })
    }
}

/// Waits for `pause` or the stop; returns whether to stop.
fn wait((stop, changed): &(Mutex<bool>, Condvar), pause: Duration) -> bool {
    let stop = stop.lock().unwrap_or_else(PoisonError::into_inner);
    *changed.wait_timeout_while(stop, pause, |stop| !*stop).unwrap_or_else(PoisonError::into_inner).0
}

fn describe(recorder: &Recorder, time: Duration, since: u64) -> String {
    let (hour, minute, second) = (since / 3600 % 24, since / 60 % 60, since % 60);
    let (activity, pid, seconds) = (recorder.activity(), std::process::id(), time.as_secs_f64());
    let gpu = recorder.gpu_errors();
    format!(
        "stands still for {seconds:.0} s, since {hour:02}:{minute:02}:{second:02} UTC, in {activity} (process {pid}){gpu}"
    )
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        *self.stop.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.stop.1.notify_all();
        if let Some(thread) = self.thread.take() {
            // That thread has already reported a panic.
            let _ = thread.join();
        }
    }
}
