//! `switchyard-worker train`: one rank, or several as threads of one process.
//!
//! With several ranks, each is a device with an equal share of the process's CPUs, its own
//! membership in the group, and its own network and weights. They share the data.

use crate::comm::{Aborter, Cause, CommError, GroupConfig};
use crate::model::Registry;
use crate::process::{self, StopSignals, variable};
use crate::train::fault::Fault;
use crate::train::{self, Alarm, OnAlarm, Preparation, Reporter, RunOptions, SharedData, TrainError, config};
use std::io::Stdout;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use switchyard_worker_contract::config::EngineConfig;
use switchyard_worker_contract::event::{Event, Failure, member_name};
use switchyard_worker_contract::exit::Exit;
use switchyard_worker_contract::{CpuList, env};

/// Time for the other ranks of a process to report before it exits because one of them hangs.
const EXIT_DELAY: Duration = Duration::from_millis(300);

/// State shared by the ranks of this process.
struct Process<'a> {
    config: EngineConfig,
    run_dir: PathBuf,
    fault: Option<Fault>,
    registry: &'a Registry,
    stop_signals: Arc<StopSignals>,
}

/// Sets up this process from its environment. An error is printed and becomes the exit code.
fn set_up(registry: &Registry) -> Result<(Process<'_>, GroupConfig), Exit> {
    let refuse = |exit: Exit, text: String| {
        eprintln!("error: {text}");
        exit
    };
    process::die_with_parent().and_then(|()| process::pin()).map_err(|text| refuse(Exit::Usage, text))?;
    process::raise_open_files();
    let group = GroupConfig::from_env().map_err(|error| refuse(Exit::Usage, error.to_string()))?;
    let settings = config::from_env().and_then(|config| {
        let fault = variable(env::FAULT).map(|text| Fault::parse(&text)).transpose()?;
        Ok((config, fault))
    });
    let (config, fault) = settings.map_err(|error| refuse(error.exit(group.rank()), error.to_string()))?;
    let saves = config.checkpoint.as_ref().is_some_and(|checkpoint| checkpoint.on_suspend);
    let stop_signals = process::stop_on_signal(group.rank(), saves)
        .map_err(|error| refuse(Exit::Unexpected, format!("cannot handle signals: {error}")))?;
    let run_dir = PathBuf::from(variable(env::RUN_DIR).unwrap_or_else(|| ".".into()));
    Ok((Process { config, run_dir, fault, registry, stop_signals }, group))
}

pub(super) fn serve() -> Exit {
    let registry = Registry::default();
    let (process, group) = match set_up(&registry) {
        Ok(process) => process,
        Err(exit) => return exit,
    };
    process.run_rank(&group, |group, _| {
        let kernel = variable(env::KERNEL);
        let joined = |handle: Aborter| process.stop_signals.set_aborter(handle);
        train::serve(&process.config, group, (kernel.as_deref(), process.fault), joined)
    })
}

pub(super) fn train(registry: &Registry) -> Exit {
    let (process, group) = match set_up(registry) {
        Ok(process) => process,
        Err(exit) => return exit,
    };
    match process.config.devices_per_process {
        0 | 1 => process.run_rank(&group, |group, reporter| {
            let data = SharedData::open(&process.config, group.world())?;
            process.train(group, &process.config, &Arc::new(data), reporter)
        }),
        devices => process.train_devices(&group, devices),
    }
}

impl Process<'_> {
    /// Runs each device on its own thread.
    fn train_devices(&self, group: &GroupConfig, devices: u32) -> Exit {
        let data = match SharedData::open(&self.config, group.world()) {
            Ok(data) => Arc::new(data),
            Err(error) => return self.run_rank(group, |_, _| Err(error)),
        };
        let cpus = process::allowed_cpus();
        let config = EngineConfig { cpu_threads: (self.config.cpu_threads / devices).max(1), ..self.config.clone() };
        let exits: Vec<Exit> = std::thread::scope(|scope| {
            let start = |device: u32| {
                let group = GroupConfig { local_rank: group.local_rank + device, ..group.clone() };
                let (data, own, config) = (&data, cpu_share(&cpus, device, devices), &config);
                let body = move || {
                    self.run_rank(&group, |group, reporter| {
                        process::pin_thread(&own).map_err(TrainError::Usage)?;
                        self.train(group, config, data, reporter)
                    })
                };
                std::thread::Builder::new().name(format!("device-{device}")).spawn_scoped(scope, body)
            };
            let threads: Vec<_> = (0..devices).map(start).collect();
            threads
                .into_iter()
                .map(|thread| match thread.map(std::thread::ScopedJoinHandle::join) {
                    Ok(Ok(exit)) => exit,
                    _ => Exit::Unexpected,
                })
                .collect()
        });
        // The device that failed by itself determines the exit code of the process.
        let worst = |exit: &&Exit| match exit {
            Exit::Done => 0,
            Exit::PeerFailure => 1,
            _ => 2,
        };
        exits.iter().max_by_key(worst).copied().unwrap_or(Exit::Unexpected)
    }

    /// Runs a rank. An error that ends it early is printed as an event and becomes the exit code.
    fn run_rank(
        &self,
        group: &GroupConfig,
        body: impl FnOnce(&GroupConfig, &mut Reporter<Stdout>) -> Result<(), TrainError>,
    ) -> Exit {
        let rank = group.rank();
        let mut reporter = Reporter::new(std::io::stdout());
        let outcome = catch_unwind(AssertUnwindSafe(|| body(group, &mut reporter)));
        let (failure, exit) = match outcome {
            Ok(Ok(())) => return Exit::Done,
            Ok(Err(error)) => describe(&error, rank),
            Err(panic) => {
                let text = panic
                    .downcast_ref::<String>()
                    .map(String::as_str)
                    .or_else(|| panic.downcast_ref::<&str>().copied());
                let cause = format!("panicked: {}", text.unwrap_or("no message"));
                (failure(rank, rank, cause, String::new(), Exit::OwnFailure), Exit::OwnFailure)
            }
        };
        if !matches!(exit, Exit::Interrupted | Exit::Terminated) {
            eprintln!("error: {}: {}", member_name(failure.origin_rank, group.world()), failure.cause);
        }
        reporter.event(&Event::Failed(failure));
        exit
    }

    fn train(
        &self,
        group: &GroupConfig,
        config: &EngineConfig,
        data: &Arc<SharedData>,
        reporter: &mut Reporter<Stdout>,
    ) -> Result<(), TrainError> {
        let kernel = variable(env::KERNEL);
        let place = (group.world(), group.local_rank);
        let preparation = Preparation::new(config, data, place, kernel, self.registry)?;
        let run_dir: &Path = &self.run_dir;
        let rank = group.rank();
        let on_alarm: OnAlarm = Arc::new(move |alarm| match alarm {
            Alarm::End(cause) => exit_hung(rank, &cause),
            Alarm::Stuck(stuck) => Reporter::new(std::io::stdout()).event(&Event::Standstill { stuck }),
            Alarm::Gpu(report) => Reporter::new(std::io::stdout()).event(&Event::Gpu(report)),
            Alarm::GpuTrouble(gpu) => Reporter::new(std::io::stdout()).event(&Event::GpuTrouble { gpu }),
        });
        let options =
            RunOptions { run_dir, fault: self.fault, stop: self.stop_signals.signal(), on_alarm: Some(on_alarm) };
        train::run(preparation, group, &options, reporter, |handle: Aborter| self.stop_signals.set_aborter(handle))
    }
}

/// An equal share of the CPUs; with fewer CPUs than devices, some devices share one.
fn cpu_share(cpus: &CpuList, device: u32, devices: u32) -> CpuList {
    let all: Vec<u32> = cpus.iter().collect();
    let bound = |i: u32| (u64::from(i) * all.len() as u64 / u64::from(devices)) as usize;
    let (from, to) = (bound(device), bound(device + 1));
    let own =
        if from < to { &all[from..to] } else { &all[from.min(all.len().saturating_sub(1))..][..1.min(all.len())] };
    CpuList::new(own.iter().copied())
}

/// Exits the process of a rank whose training thread hangs. The other ranks of the process get a
/// moment to report why they end.
fn exit_hung(rank: u32, cause: &Cause) {
    let (failure, exit) = describe(&CommError::Failed(cause.clone()).into(), rank);
    eprintln!("error: rank {}: {}", failure.origin_rank, failure.cause);
    Reporter::new(std::io::stdout()).event(&Event::Failed(failure));
    std::thread::sleep(EXIT_DELAY);
    process::exit_now(exit)
}

fn describe(error: &TrainError, rank: u32) -> (Failure, Exit) {
    let exit = error.exit(rank);
    // From this rank's view, the failure began with the rank that did not arrive.
    let origin = match error {
        TrainError::Comm(CommError::Failed(cause)) => {
            let failure = failure(rank, cause.origin_rank, cause.text.clone(), cause.during.clone(), exit);
            return (failure, exit);
        }
        TrainError::Comm(CommError::Missing { missing, .. }) => missing.first().copied().unwrap_or(rank),
        TrainError::Comm(CommError::Unreachable { .. }) => 0,
        _ => rank,
    };
    (failure(rank, origin, error.to_string(), String::new(), exit), exit)
}

fn failure(rank: u32, origin_rank: u32, cause: String, during: String, exit: Exit) -> Failure {
    Failure { rank, origin_rank, cause: process::with_open_files(cause), during, exit_code: exit.code() }
}

#[cfg(test)]
mod tests {
    use super::cpu_share;
    use switchyard_worker_contract::CpuList;

    #[test]
    fn devices_divide_the_cpus() {
        let cpus: CpuList = "0-6".parse().unwrap();
        let shares: Vec<String> = (0..3).map(|device| cpu_share(&cpus, device, 3).to_string()).collect();
        assert_eq!(shares, ["0-1", "2-3", "4-6"]);
        let one: CpuList = "5".parse().unwrap();
        assert_eq!((0..2).map(|device| cpu_share(&one, device, 2).to_string()).collect::<Vec<_>>(), ["5", "5"]);
        assert_eq!(cpu_share(&CpuList::new([]), 0, 2).to_string(), "");
    }
}
