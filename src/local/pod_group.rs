//! Runs one attempt of a job of another framework: starts its pods' processes, passes their output
//! on, and ends all of them when the job is complete, a pod fails, or a stop is requested.

use super::attempt::{GRACE_FOR_PIPES, GRACE_FOR_SURVIVORS, Signals, notify, report_unrecorded};
use super::cause::RootCause;
use super::error::AttemptError;
use super::process::{Message, Process, next_exit, start_pod};
use super::run_dir::RunDir;
use super::{Observer, Update};
use rustix::process::Signal;
use std::path::Path;
use std::process::ExitStatus;
use std::time::Duration;
use switchyard_plan::local::{AttemptEnd, PodPlan, PodState, Verdict};
use switchyard_plan::restart::ROOT_CAUSE_GRACE;
use switchyard_worker_contract::exit::{Exit, describe};
use tokio::sync::mpsc::{Receiver, channel};
use tokio::time::Instant;

/// The outcome of an attempt.
pub(super) struct Ended {
    pub end: AttemptEnd,
    /// The pod that ended the attempt, by its position, and the cause.
    pub failed: Option<(usize, RootCause)>,
    pub states: Vec<PodState>,
}

/// Starts every pod of `plan` and waits until all of their processes have ended.
pub(super) async fn run(
    plan: &PodPlan,
    launcher: &Path,
    run_dir: &RunDir,
    signals: &mut Signals,
    observer: &mut dyn Observer,
) -> Result<Ended, AttemptError> {
    let (sender, receiver) = channel(1024);
    let states = vec![PodState::Running; plan.pods.len()];
    let mut group = Group { plan, processes: Vec::new(), states, failed: Vec::new(), stop: None, deadline: None };
    for (index, pod) in plan.pods.iter().enumerate() {
        match start_pod(pod, index, plan.attempt, launcher, run_dir, &sender) {
            Ok(process) => group.processes.push(process),
            Err(error) => {
                group.kill_all();
                for process in &mut group.processes {
                    process.reap().await;
                }
                return Err(error);
            }
        }
    }
    drop(sender);
    group.watch(receiver, signals, observer).await;
    Ok(group.ended())
}

/// Why all processes are stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    Complete,
    /// The pod at this position failed.
    Failed(usize),
    Requested(Exit),
}

/// Response to a deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Due {
    /// A failure counts now.
    Judge,
    Kill,
    /// End the attempt without the remaining processes and output.
    GiveUp,
}

/// The processes of an attempt and its state.
struct Group<'a> {
    plan: &'a PodPlan,
    processes: Vec<Process>,
    states: Vec<PodState>,
    /// Positions of the failed pods, in the order of their ends.
    failed: Vec<usize>,
    stop: Option<Stop>,
    deadline: Option<(Instant, Due)>,
}

impl Group<'_> {
    async fn watch(&mut self, mut messages: Receiver<Message>, signals: &mut Signals, observer: &mut dyn Observer) {
        let mut listening = true;
        while self.running() > 0 || listening {
            let deadline = self.deadline;
            tokio::select! {
                message = messages.recv(), if listening => match message {
                    Some(message) => self.on_message(message, observer),
                    None => listening = false,
                },
                (index, status) = next_exit(&mut self.processes) => self.on_exit(index, status),
                (exit, signal) = signals.next() => {
                    if matches!(self.deadline, Some((_, Due::GiveUp))) {
                        return;
                    }
                    self.on_signal(exit, signal, observer);
                },
                due = passed(deadline) => match due {
                    Due::Judge => self.judge(true),
                    Due::Kill => self.kill_all(),
                    Due::GiveUp => return,
                },
            }
        }
    }

    fn on_message(&mut self, message: Message, observer: &mut dyn Observer) {
        match message {
            Message::Text(index, line) => {
                notify(observer, Update::Output { pod: &self.plan.pods[index], line: &line });
                self.processes[index].remember(line);
            }
            Message::LogFailed(error) => report_unrecorded(&error, observer),
            // Only a worker prints events.
            Message::Event(..) => {}
        }
    }

    fn on_exit(&mut self, index: usize, status: ExitStatus) {
        let process = &mut self.processes[index];
        // As in a container, whose processes end with the first one.
        process.signal_group(Signal::KILL);
        process.observed.ended = Some(status);
        self.states[index] = match (status.success(), self.stop) {
            (true, _) => PodState::Succeeded,
            (false, None) => PodState::Failed,
            (false, Some(_)) => PodState::Stopped,
        };
        if self.stop.is_none() {
            if !status.success() {
                self.failed.push(index);
            }
            self.judge(false);
        }
        if self.running() == 0 {
            self.deadline = Some((Instant::now() + GRACE_FOR_PIPES, Due::GiveUp));
        }
    }

    fn judge(&mut self, is_due: bool) {
        match self.plan.judge(&self.states, &self.failed) {
            Verdict::Complete => self.stop(Stop::Complete),
            Verdict::Failed(pod) => self.stop(Stop::Failed(pod)),
            Verdict::FailsSoon(pod) if is_due => self.stop(Stop::Failed(pod)),
            Verdict::FailsSoon(_) => {
                self.deadline.get_or_insert((Instant::now() + ROOT_CAUSE_GRACE.unsigned_abs(), Due::Judge));
            }
            Verdict::Continue => {}
        }
    }

    fn on_signal(&mut self, exit: Exit, signal: &str, observer: &mut dyn Observer) {
        if self.stop.is_some() {
            return self.kill_all();
        }
        notify(observer, Update::Stopping { signal, saves: false });
        self.stop(Stop::Requested(exit));
    }

    /// Requests all processes to end.
    fn stop(&mut self, why: Stop) {
        self.stop = Some(why);
        self.signal_all(Signal::TERM);
        let grace = Duration::from_secs(self.plan.grace_seconds.into());
        self.deadline = Some((Instant::now() + grace, Due::Kill));
    }

    fn kill_all(&mut self) {
        self.signal_all(Signal::KILL);
        self.deadline = Some((Instant::now() + GRACE_FOR_SURVIVORS, Due::GiveUp));
    }

    fn signal_all(&self, signal: Signal) {
        self.processes.iter().for_each(|process| process.signal_group(signal));
    }

    fn running(&self) -> usize {
        self.processes.iter().filter(|process| process.observed.ended.is_none()).count()
    }

    /// Returns the outcome of the attempt, after [`Group::watch`].
    fn ended(self) -> Ended {
        let end = match self.stop {
            _ if self.running() > 0 => AttemptEnd::Unkillable,
            Some(Stop::Complete) => AttemptEnd::Done,
            Some(Stop::Requested(exit)) => AttemptEnd::Stopped(exit),
            // Exit codes of other programs have no meaning for the decision about a restart.
            Some(Stop::Failed(_)) | None => AttemptEnd::Failed(None),
        };
        let failed = match self.stop {
            Some(Stop::Failed(pod)) => Some((pod, self.cause(pod))),
            _ => None,
        };
        Ended { end, failed, states: self.states }
    }

    fn cause(&self, pod: usize) -> RootCause {
        let observed = &self.processes[pod].observed;
        let code = observed.ended.and_then(|status| status.code());
        let cause = match (code, observed.ended) {
            (Some(code), _) => format!("exit code {code}"),
            (None, Some(status)) => describe(status),
            (None, None) => String::new(),
        };
        RootCause {
            rank: self.plan.pods[pod].first_rank,
            server: None,
            pid: Some(observed.pid),
            cause,
            during: String::new(),
            code,
            log: observed.log.clone(),
            others: Vec::new(),
        }
    }
}

/// Waits until a deadline has passed. Never resolves without one.
async fn passed(deadline: Option<(Instant, Due)>) -> Due {
    let Some((at, due)) = deadline else { return std::future::pending().await };
    tokio::time::sleep_until(at).await;
    due
}
