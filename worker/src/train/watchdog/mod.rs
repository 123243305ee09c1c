//! The thread that notices when the training thread of its rank stands still.

mod still;

use crate::comm::{Aborter, Cause};
use crate::recorder::{Identity, Recorder, Standing};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use still::{Seen, Still};
use switchyard_worker_contract::config::{self, OnHang};
use switchyard_worker_contract::event::{GpuReport, GpuTrouble, Stuck};

/// How long the thread that trains has to say that its GPU is gone.
const GONE: Duration = Duration::from_secs(5);

/// What the watchdog of a rank watches.
pub(super) struct Watch {
    pub recorder: Arc<Recorder>,
    /// Of the group, once there is one.
    aborter: OnceLock<Aborter>,
}

impl Watch {
    pub fn new(recorder: Recorder) -> Arc<Watch> {
        Arc::new(Watch { recorder: Arc::new(recorder), aborter: OnceLock::new() })
    }

    /// The group exists.
    pub fn joined(&self, aborter: Aborter) {
        let _ = self.aborter.set(aborter);
    }
}

/// What a watchdog says to the process.
#[derive(Debug, Clone, PartialEq)]
pub enum Alarm {
    /// The rank stands still for too long, or its GPU is gone, and the group has ended with this root cause. The process must end, because
    /// the training thread cannot.
    End(Cause),
    /// To rank 0: of the ranks that stand still while the job goes on waiting, this one does so for longest; `None`: all go
    /// on.
    Standstill(Option<Stuck>),
    /// What the GPU of this rank has met; there is news.
    Gpu(GpuReport),
    /// To rank 0: of the GPUs of all ranks, this is the one that a person should look at; `None`: none any more.
    GpuTrouble(Option<GpuTrouble>),
}

/// Called with the alarms of a rank.
pub type OnAlarm = Arc<dyn Fn(Alarm) + Send + Sync>;

/// The thread; it ends when this is dropped.
pub(super) struct Watchdog {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Starts to watch.
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
            let mut still = Still::new(config, Instant::now());
            let alarm = |alarm| {
                if let Some(on_alarm) = &on_alarm {
                    on_alarm(alarm)
                }
            };
            let (mut warned, mut told, mut since) = (None, None, 0);
            let (mut told_gpu, mut gone) = (None, None);
            let gpu_look = |told: &mut Option<GpuTrouble>, gone: &mut Option<Instant>| {
                if let Some(report) = watch.recorder.gpu_news() {
                    if let Some(trouble) = report.worst_fault() {
                        eprintln!("warning: rank {}: GPU {}: {trouble}", identity.rank, report.bus);
                    }
                    if report.is_unusable() {
                        gone.get_or_insert_with(Instant::now);
                    }
                    alarm(Alarm::Gpu(report));
                }
                let trouble = watch.aborter.get().and_then(Aborter::gpu_trouble);
                if *told != trouble {
                    *told = trouble;
                    alarm(Alarm::GpuTrouble(trouble));
                }
            };
            while !wait(&stopped, still.pause()) {
                let recorder = &watch.recorder;
                recorder.alive();
                let entry = recorder.latest();
                let seen =
                    Seen { progress: recorder.progress(), operation: entry.operation, median: recorder.median() };
                let look = still.look(seen, Instant::now());
                if look.still.is_zero() {
                    since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
                }
                recorder.set_still(Standing { entry, since, share: look.share(), on_hang: config.on_hang });
                let stuck = watch.aborter.get().and_then(Aborter::stuck);
                if told != stuck {
                    told = stuck;
                    alarm(Alarm::Standstill(stuck));
                }
                gpu_look(&mut told_gpu, &mut gone);
                // Calls about a GPU that is gone may fail, which is said by the thread that makes them, or wait for ever.
                if let Some(aborter) =
                    watch.aborter.get().filter(|_| gone.is_some_and(|at: Instant| at.elapsed() > GONE))
                    && aborter.failure().is_none()
                {
                    let text = format!("the GPU is gone{}, in {}", recorder.gpu_errors(), recorder.doing());
                    let cause = Cause::failed(identity.rank, text);
                    aborter.abort(cause.clone());
                    alarm(Alarm::End(aborter.failure().unwrap_or(cause)));
                    return;
                }
                // A rank that waits is not the cause, unless all of them wait: that is for rank 0 to see.
                let Some(time) = look.hang().filter(|_| !entry.operation.waits()) else { continue };
                let text = describe(recorder, time, since);
                match (config.on_hang, watch.aborter.get()) {
                    (OnHang::Report, _) if warned == Some(seen.progress) => {}
                    (OnHang::Report, _) => {
                        warned = Some(seen.progress);
                        eprintln!("warning: rank {} {text}; failurePolicy.onHang is Report: it goes on", identity.rank);
                    }
                    (OnHang::Restart, Some(aborter)) => {
                        let cause = Cause::hung(identity.rank, text);
                        aborter.abort(cause.clone());
                        alarm(Alarm::End(aborter.failure().unwrap_or(cause)));
                        return;
                    }
                    // Only a group that does not exist yet has no handle, and to join it is to wait.
                    (OnHang::Restart, None) => {}
                }
            }
            // What happened since then is told as well.
            gpu_look(&mut told_gpu, &mut gone);
        };
        let thread = std::thread::Builder::new().name("watchdog".into()).spawn(body)?;
        Ok(Watchdog { stop, thread: Some(thread) })
    }
}

/// Waits for the time to pass, or for the end; returns whether it is the end.
fn wait((stop, changed): &(Mutex<bool>, Condvar), pause: Duration) -> bool {
    let stop = stop.lock().unwrap_or_else(PoisonError::into_inner);
    *changed.wait_timeout_while(stop, pause, |stop| !*stop).unwrap_or_else(PoisonError::into_inner).0
}

fn describe(recorder: &Recorder, time: Duration, since: u64) -> String {
    let (hour, minute, second) = (since / 3600 % 24, since / 60 % 60, since % 60);
    let (doing, pid, seconds) = (recorder.doing(), std::process::id(), time.as_secs_f64());
    let gpu = recorder.gpu_errors();
    format!(
        "stands still for {seconds:.0} s, since {hour:02}:{minute:02}:{second:02} UTC, in {doing} (process {pid}){gpu}"
    )
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        *self.stop.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.stop.1.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic in that thread was reported there.
            let _ = thread.join();
        }
    }
}
