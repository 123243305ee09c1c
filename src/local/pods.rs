//! Runs a job of another framework on this machine, from its plan to its end, across attempts. Each
//! pod is a process that runs the command of its container.

use super::attempt::Signals;
use super::cause::RootCause;
use super::pod_group;
use super::run::{Outcome, Run, RunError};
use super::run_dir::RunDir;
use super::{Observer, Update};
use std::ffi::{OsStr, OsString};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use switchyard_crds::TrainJob;
use switchyard_crds::conditions::{self, Stage};
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_plan::local::{
    Address, Next, PlannedPod, PodPlan, PodSnapshot, Progress, RunEnd, count_pods, next, plan_pods,
};
use switchyard_plan::status::Ending;
use switchyard_worker_contract::exit::Exit;
use switchyard_worker_contract::pod::RENDEZVOUS_PORT;

/// First port of Linux's ephemeral range: another program's connection could take a port from there
/// between its choice and the pod's start.
const FIRST_EPHEMERAL: u16 = 32_768;

/// Runs the pods of a valid job on this machine until the job ends. `visible`: the value of
/// `CUDA_VISIBLE_DEVICES`. `launcher`: the program whose command `__exec` is [`super::exec`].
///
/// # Errors
/// The job cannot start, or its processes cannot be supervised; in that case none is left running.
pub async fn run_pods(
    job: TrainJob,
    machine: &GPUTopology,
    visible: Option<&str>,
    run_dir: &RunDir,
    launcher: &Path,
    observer: &mut dyn Observer,
) -> Result<Outcome, RunError> {
    let mut signals = Signals::listen()?;
    // Drop the status of an earlier run.
    let job = TrainJob { status: None, ..job };
    let mut free = FreeAddresses::find(count_pods(&job)?)?;
    let plan_attempt = |attempt: u32, addresses: &[Address]| {
        plan_pods(&PodSnapshot { job: &job, machine, attempt, addresses, visible })
    };
    let mut plan = plan_attempt(1, &free.addresses)?;
    plan.pods.iter().try_for_each(find_program)?;
    run_dir.create()?;
    let mut run = Run::new(job.clone(), run_dir);
    observer.observe(Update::PodsStarting { plan: &plan, run_dir })?;
    loop {
        let attempt = plan.attempt;
        run_dir.replace("plan.yaml", &serde_saphyr::to_string(&plan).unwrap_or_default())?;
        let running = format!("attempt {attempt}: {} pods run", plan.pods.len());
        run.write(Progress::Stage(Stage::Running, running), &plan)?;
        // The pods listen on them now.
        drop(free);
        let ended = pod_group::run(&plan, launcher, run_dir, &mut signals, observer).await;
        let ended = match ended {
            Ok(ended) => ended,
            Err(error) => {
                let failed = Ending::failed(conditions::INFRASTRUCTURE_FAILURE, error.to_string());
                let _ = run.write(Progress::Ended(failed), &plan);
                return Err(error.into());
            }
        };
        run.pods = Some(plan.counts(&ended.states));
        if let Some((pod, cause)) = &ended.failed {
            observer.observe(Update::PodFailed { attempt, pod: &plan.pods[*pod], cause })?;
        }
        let summary = ended.failed.as_ref().map(|(pod, cause)| summary(&plan.pods[*pod], cause)).unwrap_or_default();
        match next(ended.end, &job.spec.failure_policy, &run.restarts) {
            Next::Restart(restarts) => {
                run.restarts = restarts;
                run.record(Progress::Stage(Stage::Restarting, summary), &plan, observer)?;
                free = FreeAddresses::find(plan.pods.len() as u32)?;
                plan = plan_attempt(attempt + 1, &free.addresses)?;
                observer.observe(Update::Restarting {
                    attempt: plan.attempt,
                    saved: None,
                    restarts: run.restarts.total.unsigned_abs(),
                    max_restarts: plan.max_restarts,
                })?;
            }
            Next::End(end) => {
                let (progress, exit) = progress(end, &plan, &summary);
                run.record(progress, &plan, observer)?;
                return Ok(Outcome { exit, job: run.job, cause: ended.failed.map(|(_, cause)| cause) });
            }
        }
    }
}

fn progress(end: RunEnd, plan: &PodPlan, summary: &str) -> (Progress, Exit) {
    match end {
        RunEnd::Complete => {
            let done = match plan.pods.iter().filter(|pod| pod.is_awaited).count() {
                awaited if awaited < plan.pods.len() => format!("{awaited} awaited pods succeeded"),
                all => format!("{all} pods succeeded"),
            };
            (Progress::Ended(Ending::complete(done)), Exit::Done)
        }
        RunEnd::Stopped(exit) => (Progress::Stopped(format!("{} before the end", exit.meaning())), exit),
        RunEnd::GivenUp(exit, why) => {
            (Progress::Ended(Ending::failed(why.reason(), format!("{summary}; {why}"))), exit)
        }
    }
}

/// Summarises a failure in one line.
fn summary(pod: &PlannedPod, cause: &RootCause) -> String {
    format!("pod {} ({}): {}", pod.name, cause.place(), cause.cause)
}

/// Addresses whose ports are kept free until the pods start.
struct FreeAddresses {
    addresses: Vec<Address>,
    _listeners: Vec<TcpListener>,
}

impl FreeAddresses {
    /// Finds this many addresses, with a different host and port each. Starts anywhere: hosts and
    /// ports of two runs rarely meet.
    fn find(count: u32) -> Result<FreeAddresses, RunError> {
        let mut start = [0_u8; 3];
        // Without random bytes, start at the first ones.
        let _ = getrandom::fill(&mut start);
        let [network, high, low] = start;
        let first_host = Ipv4Addr::new(127, network.max(1), 0, 1);
        let size = FIRST_EPHEMERAL - RENDEZVOUS_PORT;
        let start = u16::from_be_bytes([high, low]) % size;
        let ports = (0..size).map(|step| RENDEZVOUS_PORT + (start + step) % size);
        let listen = |port| Some((port, TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).ok()?));
        let (ports, listeners): (Vec<u16>, Vec<_>) = ports.filter_map(listen).take(count as usize).unzip();
        if ports.len() < count as usize {
            return Err(RunError::Ports { found: ports.len(), count, first: RENDEZVOUS_PORT, end: FIRST_EPHEMERAL });
        }
        Ok(FreeAddresses { addresses: addresses(first_host, ports), _listeners: listeners })
    }
}

/// A host and a port for each pod. Hosts are consecutive.
pub fn addresses(first_host: Ipv4Addr, ports: impl IntoIterator<Item = u16>) -> Vec<Address> {
    let hosts = (first_host.to_bits()..).map(Ipv4Addr::from_bits);
    hosts.zip(ports).map(|(host, port)| Address { host: host.to_string(), port }).collect()
}

/// Checks that this machine has the program of a pod.
fn find_program(pod: &PlannedPod) -> Result<(), RunError> {
    let Some(program) = pod.argv.first() else { return Ok(()) };
    let path = pod.env.get("PATH").map(OsString::from).or_else(|| std::env::var_os("PATH")).unwrap_or_default();
    if is_there(program, &path) {
        return Ok(());
    }
    let image = pod.image.clone().unwrap_or_default();
    Err(RunError::NoProgram { field: pod.field.clone(), program: program.clone(), image })
}

fn is_there(program: &str, path: &OsStr) -> bool {
    let is_program =
        |file: PathBuf| file.metadata().is_ok_and(|it| it.is_file() && it.permissions().mode() & 0o111 != 0);
    if program.contains('/') {
        return is_program(PathBuf::from(program));
    }
    std::env::split_paths(path).any(|folder| is_program(folder.join(program)))
}
