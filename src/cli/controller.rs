//! `switchyard controller`: flags, signals, and then the controller.

use crate::args::{ControllerArgs, Toggle, levels};
use crate::failure::Failure;
use crate::input;
use jiff::SignedDuration;
use std::time::Duration;
use switchyard_controller::{self as controller, Settings, Timing};
use switchyard_plan::objects::Defaults;
use switchyard_service::{Connection, connect, telemetry};
use switchyard_worker_contract::exit::Exit;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch::{Sender, channel};

/// Default namespace of the Lease.
const NAMESPACE: &str = "switchyard-system";

pub(super) fn controller(args: &ControllerArgs) -> Result<Exit, Failure> {
    telemetry::start(args.log_format, &args.log_level).map_err(Failure::usage)?;
    let election = timing(args).map_err(Failure::usage)?;
    let levels = levels(&args.domains).map_err(|error| Failure::usage(format!("--domain: {error}")))?;
    let fabric_profile = args.fabric_profile.as_deref().map(input::fabric_profile).transpose()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::unexpected(format!("cannot start: {error}")))?;
    runtime.block_on(async {
        let connection = Connection { kubeconfig: args.kubeconfig.clone(), context: args.context.clone() };
        let config = connect(&connection).await.map_err(Failure::usage)?;
        // Outside a pod, the namespace of a kubeconfig is only where its user works.
        let namespace = args.namespace.clone().unwrap_or_else(|| NAMESPACE.to_string());
        let settings = Settings {
            namespace,
            identity: identity(args),
            listen: args.listen,
            election,
            watch_namespace: args.watch_namespace.clone(),
            concurrent_reconciles: args.concurrent_reconciles.into(),
            defaults: Defaults {
                worker_image: args.worker_image.clone(),
                gpu_class: args.gpu_device_class.clone(),
                gpu_driver: args.gpu_driver.clone(),
                fabric_profile,
            },
            levels,
            node_grace: SignedDuration::from_secs(args.node_grace_seconds.into()),
            fleet_brake_percent: args.fleet_brake_percent,
            admission_policies: args.admission_policies.clone(),
        };
        let (stop, stopped) = channel(false);
        let (sent, exit) = channel(Exit::Done);
        stop_on_signal(stop, sent)
            .map_err(|error| Failure::unexpected(format!("cannot listen to signals: {error}")))?;
        controller::run(settings, config, stopped).await.map_err(Failure::usage)?;
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
             together, so that a leader stops before another one may begin",
            args.renew_deadline_seconds, args.retry_period_seconds, args.lease_duration_seconds
        ));
    }
    Ok(Some(timing))
}

/// A name that is unique to this start of the program, even in the same pod.
fn identity(args: &ControllerArgs) -> String {
    let name =
        args.identity.clone().unwrap_or_else(|| rustix::system::uname().nodename().to_string_lossy().into_owned());
    let mut random = [0; 4];
    // Without random bytes, the process id distinguishes two starts.
    if getrandom::fill(&mut random).is_err() {
        random = std::process::id().to_ne_bytes();
    }
    format!("{name}-{:08x}", u32::from_ne_bytes(random))
}

/// The first signal stops gracefully; the second one at once.
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
            // A pod that is asked to stop has succeeded.
            sent.send_replace(if exit == Exit::Terminated { Exit::Done } else { exit });
            stop.send_replace(true);
        }
    });
    Ok(())
}
