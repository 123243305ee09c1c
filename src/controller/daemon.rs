//! Command-line entry point of the controller: arguments, signal handling, startup. Shared by
//! `switchyard controller` and by `switchyard-controller`, the binary of the controller image.

mod args;

pub use args::{ControllerArgs, QueueArgs, Toggle};

use crate::{Settings, Timing};
use jiff::SignedDuration;
use std::fmt::Display;
use std::path::Path;
use std::time::Duration;
use switchyard_fabric::profile::Profile;
use switchyard_plan::cluster::levels::{DomainLevel, LevelError, Levels};
use switchyard_plan::objects::Defaults;
use switchyard_service::file::{self, ONE_OBJECT};
use switchyard_service::{Connection, connect, telemetry};
use switchyard_worker_contract::exit::Exit;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch::{Sender, channel};

/// Default namespace of the Lease.
const NAMESPACE: &str = "switchyard-system";

/// Why the controller exits without having been signalled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    pub message: String,
    pub exit: Exit,
}

impl Failure {
    /// An argument, or a file that it names, is wrong.
    fn usage(message: impl Display) -> Failure {
        Failure { message: message.to_string(), exit: Exit::Usage }
    }

    /// The machine, the cluster or this program failed.
    fn unexpected(message: impl Display) -> Failure {
        Failure { message: message.to_string(), exit: Exit::Unexpected }
    }
}

/// Runs the controller until a signal stops it, or it fails.
///
/// # Errors
/// An argument is invalid, or the machine or the cluster rejects a call.
pub fn start(args: &ControllerArgs) -> Result<Exit, Failure> {
    telemetry::start(args.log_format, &args.log_level).map_err(Failure::usage)?;
    let election = timing(args).map_err(Failure::usage)?;
    let queue = args.queue.settings().map_err(Failure::usage)?;
    let levels = levels(&args.domains).map_err(|error| Failure::usage(format!("--domain: {error}")))?;
    let fabric_profile = args.fabric_profile.as_deref().map(fabric_profile).transpose().map_err(Failure::usage)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::unexpected(format!("cannot start: {error}")))?;
    runtime.block_on(async {
        let connection = Connection { kubeconfig: args.kubeconfig.clone(), context: args.context.clone() };
        let config = connect(&connection).await.map_err(Failure::usage)?;
        // Outside a pod, ignore the kubeconfig's namespace: it only reflects where its user works.
        let namespace = args.namespace.clone().unwrap_or_else(|| NAMESPACE.to_string());
        let settings = Settings {
            namespace,
            identity: identity(args),
            listen: args.listen,
            secure_metrics: args.secure_metrics,
            election,
            watch_namespaces: args.watch_namespaces.clone(),
            concurrent_reconciles: args.concurrent_reconciles.into(),
            defaults: Defaults {
                worker_image: args.worker_image.clone(),
                image_pull_secrets: args.image_pull_secrets.clone(),
                gpu_class: args.gpu_device_class.clone(),
                gpu_driver: args.gpu_driver.clone(),
                fabric_profile,
            },
            levels,
            node_grace: SignedDuration::from_secs(args.node_grace_seconds.into()),
            longest_schedule_timeout: SignedDuration::from_secs(args.max_schedule_timeout_seconds.into()),
            mass_outage_percent: args.fleet_brake_percent,
            queue,
            provisioning_class: args.provisioning_class.clone(),
            admission_policies: args.admission_policies.clone(),
        };
        let (stop, stopped) = channel(false);
        let (sent, exit) = channel(Exit::Done);
        stop_on_signal(stop, sent).map_err(|error| Failure::unexpected(format!("cannot handle signals: {error}")))?;
        crate::run(settings, config, stopped).await.map_err(Failure::usage)?;
        Ok(*exit.borrow())
    })
}

fn timing(args: &ControllerArgs) -> Result<Option<Timing>, String> {
    if args.leader_elect == Toggle::Disabled {
        return Ok(None);
    }
    let seconds = |seconds: u16| Duration::from_secs(seconds.into());
    let timing = Timing {
        duration: seconds(args.lease_duration_seconds),
        renew_deadline: seconds(args.renew_deadline_seconds),
        retry: seconds(args.retry_period_seconds),
    };
    if timing.renew_deadline + timing.retry >= timing.duration {
        return Err(format!(
            "--renew-deadline-seconds and --retry-period-seconds: got {} and {}; expected less than --lease-duration-seconds ({}) \
             together, so that a leader stops before another candidate can lead",
            args.renew_deadline_seconds, args.retry_period_seconds, args.lease_duration_seconds
        ));
    }
    Ok(Some(timing))
}

/// A name that is unique to this process, even if the pod restarts its container.
fn identity(args: &ControllerArgs) -> String {
    let name =
        args.identity.clone().unwrap_or_else(|| rustix::system::uname().nodename().to_string_lossy().into_owned());
    let mut random = [0; 4];
    // Without random bytes, fall back to the process id.
    if getrandom::fill(&mut random).is_err() {
        random = std::process::id().to_ne_bytes();
    }
    format!("{name}-{:08x}", u32::from_ne_bytes(random))
}

/// The first signal stops the controller gracefully, the second one immediately.
fn stop_on_signal(stop: Sender<bool>, sent: Sender<Exit>) -> std::io::Result<()> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::spawn(async move {
        loop {
            let exit = tokio::select! {
                _ = interrupt.recv() => Exit::Interrupted,
                _ = terminate.recv() => Exit::Terminated,
            };
            if *stop.borrow() {
                std::process::exit(exit.code().into());
            }
            // Kubernetes expects exit code 0 from a pod that it terminates.
            sent.send_replace(if exit == Exit::Terminated { Exit::Done } else { exit });
            stop.send_replace(true);
        }
    });
    Ok(())
}

/// The levels given on the command line, or the built-in ones if there are none.
///
/// # Errors
/// See [`Levels::new`].
pub fn levels(domains: &[DomainLevel]) -> Result<Levels, LevelError> {
    if domains.is_empty() { Ok(Levels::default()) } else { Levels::new(domains.to_vec()) }
}

/// Reads an administrator's fabric profile.
///
/// # Errors
/// The file cannot be read or is not a valid profile.
pub fn fabric_profile(path: &Path) -> Result<Profile, String> {
    let text = file::read(path, "fabric profile of at most 1 MiB", ONE_OBJECT)?;
    Profile::parse(&text).map_err(|error| format!("--fabric-profile {}: {error}", file::name(path)))
}
