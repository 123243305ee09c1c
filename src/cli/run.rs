//! `switchyard run` and `switchyard plan`.

use crate::args::{Cli, MachinesArgs, Output, PlanArgs, RunArgs};
use crate::event_loop::event_loop;
use crate::failure::Failure;
use crate::output::{emit, json_line, print, yaml};
use crate::{machine, manifest, report, screen};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;
use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_crds::{Framework, TrainJob, conditions};
use switchyard_local::{self as local, Interval, Machines, Observer, RunDir, RunDirError, Update, Worker};
use switchyard_plan::local::{
    Devices, Hosts, LocalSnapshot, PodSnapshot, VISIBLE, count_pods, plan as make_plan, plan_pods as make_pod_plan,
};
use switchyard_worker_contract::event::{Inspection, member_name};
use switchyard_worker_contract::exit::Exit;
use switchyard_worker_contract::pod::RENDEZVOUS_PORT;

/// Time between progress lines without a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// Runs a TrainJob on this machine.
pub(super) fn run(cli: &Cli, args: &RunArgs) -> Result<Exit, Failure> {
    let job = manifest::read(&args.file)?;
    let topology = machine::this_machine()?;
    if job.spec.trainer.framework != Framework::Switchyard {
        return run_pods(cli, args, job, &topology);
    }
    let machines = machines(&args.machines).map_err(Failure::usage)?;
    let exit = if args.worker.is_some() { Exit::Usage } else { Exit::Unexpected };
    let worker = Worker::find(args.worker.as_deref()).map_err(|error| Failure::new(error, exit))?;
    let name = job.metadata.name.clone().unwrap_or_default();
    let run_dir = RunDir::choose(&name, args.run_dir.as_deref());
    let runtime = event_loop()?;
    let mut show = Show::new(cli, &topology, &run_dir);
    // Start the processes from this thread, because the kernel kills them when their parent thread
    // ends.
    let tasks = tokio::task::LocalSet::new();
    let visible = visible_devices();
    let devices = Devices { indexes: &args.devices, visible: visible.as_deref() };
    let ended =
        tasks.block_on(&runtime, local::run(job, devices, &topology, machines.as_ref(), &run_dir, &worker, &mut show));
    show.clear();
    let advice = report::after_run(&run_dir).unwrap_or_else(|failure| {
        eprintln!("warning: {failure}");
        None
    });
    if let (Some(advice), Output::Table) = (&advice, cli.output) {
        show.result(&ended, advice);
    }
    Ok(conclude(cli, &ended?, &run_dir, advice.map(|_| run_dir.path().join(report::PAGE))))
}

/// Runs the pods of another framework on this machine.
fn run_pods(cli: &Cli, args: &RunArgs, job: TrainJob, topology: &GPUTopology) -> Result<Exit, Failure> {
    for (flag, is_set) in [("--devices", !args.devices.is_empty()), ("--hosts", !args.machines.hosts.is_empty())] {
        if is_set {
            let framework = job.spec.trainer.framework;
            return Err(Failure::usage(format!("{flag}: got a list with framework {framework:?}; expected none")));
        }
    }
    let launcher = std::env::current_exe().map_err(Failure::unexpected)?;
    let run_dir = RunDir::choose(job.metadata.name.as_deref().unwrap_or_default(), args.run_dir.as_deref());
    let runtime = event_loop()?;
    let mut show = Show::new(cli, topology, &run_dir);
    // As above, the processes end with this thread.
    let tasks = tokio::task::LocalSet::new();
    let visible = visible_devices();
    let ended =
        tasks.block_on(&runtime, local::run_pods(job, topology, visible.as_deref(), &run_dir, &launcher, &mut show));
    let outcome = ended?;
    let complete = outcome.job.status.as_ref().and_then(|status| status.condition(conditions::COMPLETE));
    if let Some(complete) = complete.filter(|_| outcome.exit == Exit::Done) {
        show.print(&format!("done        {}", complete.message));
    }
    Ok(conclude(cli, &outcome, &run_dir, None))
}

/// The GPUs that the environment of this command shows.
fn visible_devices() -> Option<String> {
    std::env::var(VISIBLE).ok().filter(|visible| !visible.is_empty())
}

/// Prints how a run ended. `page`: its report.
fn conclude(cli: &Cli, outcome: &local::Outcome, run_dir: &RunDir, page: Option<PathBuf>) -> Exit {
    match cli.output {
        Output::Yaml => print(&yaml(&outcome.job)),
        Output::Json => {
            json_line("RunResult", json!({"exitCode": outcome.exit.code(), "trainJob": outcome.job, "report": page}));
        }
        Output::Table | Output::Dot if outcome.exit != Exit::Done => {
            eprintln!("{}; status, plan and logs in {}", outcome.exit.meaning(), run_dir.short());
        }
        Output::Table | Output::Dot => {}
    }
    outcome.exit
}

/// The machines of a run on several.
fn machines(args: &MachinesArgs) -> Result<Option<Machines>, String> {
    let (Some(node_rank), Some(path)) = (args.node_rank, &args.key_file) else { return Ok(None) };
    let mut port = RENDEZVOUS_PORT;
    let mut names = Vec::new();
    for host in &args.hosts {
        let (name, text) = match host.rsplit_once(':') {
            Some((name, text)) if !host.ends_with(']') => (name, Some(text)),
            _ => (host.as_str(), None),
        };
        let invalid = |expected: &str| format!("--hosts: got {host:?}; expected {expected}");
        if name.is_empty() || (name.contains(':') && !name.starts_with('[')) {
            return Err(invalid("a name or an address, an IPv6 one in brackets"));
        }
        if let Some(text) = text {
            if !names.is_empty() {
                return Err(invalid("no port: only the first machine has one"));
            }
            let number = text.parse().ok().filter(|port| *port > 0);
            port = number.ok_or_else(|| invalid("a port from 1 to 65535 after the colon"))?;
        }
        names.push(name.to_owned());
    }
    let token = key(path)?;
    Ok(Some(Machines { hosts: Hosts { names, node_rank }, port, token }))
}

/// Reads the secret of a run on several machines.
fn key(path: &Path) -> Result<[u8; 32], String> {
    let refuse = |got: String| format!("--key-file {}: {got}", path.display());
    let open = || {
        let file = File::open(path)?;
        let mode = file.metadata()?.permissions().mode() & 0o777;
        let mut bytes = Vec::new();
        file.take(33).read_to_end(&mut bytes)?;
        io::Result::Ok((mode, bytes))
    };
    let (mode, bytes) = open().map_err(|error| refuse(error.to_string()))?;
    if mode & 0o077 != 0 {
        return Err(refuse(format!("got mode {mode:03o}; expected 600: others must not read it")));
    }
    let longer = if bytes.len() > 32 { "more than 32".to_owned() } else { bytes.len().to_string() };
    bytes.try_into().map_err(|_| refuse(format!("got {longer} bytes; expected 32")))
}

/// Shows the plan of a TrainJob.
pub(super) fn plan(cli: &Cli, args: &PlanArgs) -> Result<Exit, Failure> {
    let job = manifest::read(&args.file)?;
    let nodes: Result<Vec<GPUTopology>, Failure> = if args.topology.is_empty() {
        machine::this_machine().map(|topology| vec![topology])
    } else {
        args.topology.iter().map(|path| machine::read_file(path)).collect()
    };
    let nodes = nodes.map_err(Failure::usage)?;
    if let (true, Some(machine)) = (job.spec.trainer.framework != Framework::Switchyard, nodes.first()) {
        return plan_pods(cli, &job, machine);
    }
    let snapshot = LocalSnapshot {
        job: &job,
        nodes: &nodes,
        attempt: 1,
        rendezvous: "ADDRESS:PORT",
        run_dir: "RUN_DIR",
        devices: Devices::default(),
        hosts: None,
    };
    let plan = make_plan(&snapshot).map_err(local::RunError::from)?;
    emit(cli.output, "Plan", &plan, || yaml(&plan));
    Ok(Exit::Done)
}

/// Shows the plan of another framework's pods on this machine. Each run finds free addresses.
fn plan_pods(cli: &Cli, job: &TrainJob, machine: &GPUTopology) -> Result<Exit, Failure> {
    let count = count_pods(job).map_err(local::RunError::from)?;
    let addresses = local::addresses(Ipv4Addr::LOCALHOST, (RENDEZVOUS_PORT..).take(count as usize));
    let visible = visible_devices();
    let snapshot = PodSnapshot { job, machine, attempt: 1, addresses: &addresses, visible: visible.as_deref() };
    let plan = make_pod_plan(&snapshot).map_err(local::RunError::from)?;
    emit(cli.output, "Plan", &plan, || yaml(&plan));
    Ok(Exit::Done)
}

/// Shows a run: as a bar on a terminal, as lines elsewhere, as JSON for programs.
struct Show<'a> {
    output: Output,
    quiet: bool,
    verbose: bool,
    machine: &'a GPUTopology,
    run_dir: &'a RunDir,
    bar: Option<ProgressBar>,
    ascii: bool,
    inspection: Option<Inspection>,
    last_line: Option<Instant>,
    /// Width of the names of pods.
    name_width: usize,
}

impl<'a> Show<'a> {
    fn new(cli: &Cli, machine: &'a GPUTopology, run_dir: &'a RunDir) -> Self {
        Show {
            output: cli.output,
            quiet: cli.quiet,
            verbose: cli.verbose,
            machine,
            run_dir,
            bar: None,
            ascii: cli.ascii || !utf8_locale(),
            inspection: None,
            last_line: None,
            name_width: 0,
        }
    }

    /// Whether to print text for people on standard error.
    fn is_verbose(&self) -> bool {
        !self.quiet && self.output != Output::Json
    }

    fn print(&self, text: &str) {
        if self.is_verbose() {
            match &self.bar {
                Some(bar) => bar.suspend(|| eprintln!("{text}")),
                None => eprintln!("{text}"),
            }
        }
    }

    /// Prints the advice, as part of the result after a successful run and as an explanation
    /// otherwise.
    fn result(&self, ended: &Result<local::Outcome, local::RunError>, advice: &str) {
        if ended.as_ref().is_ok_and(|outcome| outcome.exit == Exit::Done) {
            print(advice);
        } else {
            self.print(advice.trim_end());
        }
    }

    fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    fn progress(&mut self, interval: &Interval) {
        if self.output == Output::Json {
            let figures = &interval.figures;
            return json_line(
                "RunProgress",
                json!({
                    "time": interval.at, "step": figures.step, "totalSteps": figures.total_steps, "loss": figures.loss,
                    "validationLoss": figures.validation_loss, "accuracy": figures.accuracy,
                    "itemsPerSecond": figures.items_per_second, "item": figures.item,
                    "lossScale": figures.loss_scale, "skippedSteps": figures.skipped_steps,
                    "stepMilliseconds": interval.breakdown.step_ms, "computeMilliseconds": interval.breakdown.compute_ms,
                    "communicationWaitMilliseconds": interval.breakdown.communication_wait_ms,
                    "pipelineWaitMilliseconds": interval.breakdown.pipeline_wait_ms, "inputWaitMilliseconds": interval.breakdown.input_wait_ms,
                    "communicationWaitPercent": figures.communication_percent, "inputWaitPercent": figures.input_percent,
                    "remainingSeconds": figures.remaining_seconds, "learningRate": interval.breakdown.learning_rate,
                    "gradientNorm": interval.breakdown.gradient_norm, "slowest": figures.slowest,
                }),
            );
        }
        if self.quiet {
            return;
        }
        if let Some(bar) = &self.bar {
            bar.set_position(interval.figures.step);
            bar.set_message(screen::bar_message(interval));
            return;
        }
        let last = interval.figures.step == interval.figures.total_steps;
        if last || self.last_line.is_none_or(|at| at.elapsed() >= LINE_INTERVAL) {
            self.last_line = Some(Instant::now());
            eprintln!("{}", screen::plain_line(interval, interval.at));
        }
    }
}

impl Observer for Show<'_> {
    fn observe(&mut self, update: Update<'_>) -> Result<(), RunDirError> {
        match update {
            Update::Starting { plan, inspection, run_dir } => {
                self.print(&screen::header(plan, inspection, &run_dir.short(), self.machine));
                for warning in &plan.warnings {
                    self.print(&format!("warning: {warning}"));
                }
                for skipped in &inspection.skipped {
                    self.print(&format!("warning: {skipped}"));
                }
                if self.verbose {
                    for process in plan.processes().chain(&plan.servers) {
                        let member = member_name(process.rank, plan.world());
                        for entry in &process.env {
                            self.print(&format!("  {member}  {}={}  ({})", entry.name, entry.value, entry.reason));
                        }
                    }
                }
                if self.output == Output::Json {
                    json_line("RunStarting", json!({"runDir": run_dir.text(), "plan": plan, "inspection": inspection}));
                }
                self.inspection = Some(inspection.clone());
            }
            Update::PodsStarting { plan, run_dir } => {
                self.name_width = plan.pods.iter().map(|pod| pod.name.len()).max().unwrap_or(0);
                self.print(&format!("{}  {}\n  place    {}", plan.job, run_dir.short(), plan.reason));
                for warning in &plan.warnings {
                    self.print(&format!("warning: {warning}"));
                }
                if self.output == Output::Json {
                    json_line("RunStarting", json!({"runDir": run_dir.text(), "plan": plan}));
                }
            }
            Update::Output { pod, line } => match self.output {
                Output::Json => json_line("RunOutput", json!({"pod": pod.name, "role": pod.role, "line": line})),
                Output::Table if !self.quiet => {
                    print(&format!("{:width$} | {line}", pod.name, width = self.name_width))
                }
                Output::Table | Output::Yaml | Output::Dot => {}
            },
            Update::PodFailed { attempt, pod, cause } => {
                eprintln!("{}", screen::pod_failure(pod, cause, attempt));
                if self.output == Output::Json {
                    json_line(
                        "RunFailure",
                        json!({
                            "attempt": attempt, "pod": pod.name, "role": pod.role, "pid": cause.pid, "cause": cause.cause,
                            "log": cause.log.path, "lastLines": cause.log.tail,
                        }),
                    );
                }
            }
            Update::Ready { attempt, plan, ranks } => {
                self.print(&screen::rank_table(plan, ranks));
                if let Some(line) = screen::resumed(plan, ranks) {
                    self.print(&line);
                }
                if let Some(inspection) = &self.inspection {
                    self.print(&screen::fusion(plan, inspection, ranks));
                    if self.is_verbose() && std::io::stderr().is_terminal() {
                        self.bar = Some(bar(inspection.total_steps, self.ascii));
                    }
                }
                if self.output == Output::Json {
                    json_line("RunReady", json!({"attempt": attempt, "ranks": ranks}));
                }
            }
            Update::Progress(interval) => self.progress(interval),
            Update::Evaluation { step, loss, accuracy } => {
                if self.output == Output::Json {
                    json_line("RunEvaluation", json!({"step": step, "loss": loss, "accuracy": accuracy}));
                }
            }
            Update::Standstill(interval) => self.print(&match interval.figures.stuck {
                Some(stuck) => format!(
                    "warning: rank {} is stuck in {}; failurePolicy.onHang is Report: the job keeps waiting",
                    stuck.rank,
                    stuck.doing()
                ),
                None => "no rank is stuck any more".to_owned(),
            }),
            Update::GpuTrouble(gpu) => self.print(&match gpu {
                Some(gpu) => format!("warning: rank {}, {}", gpu.rank, gpu.what()),
                None => "no GPU is in trouble any more".to_owned(),
            }),
            Update::Checkpoint(report) => {
                if let Some(failure) = &report.failure {
                    self.print(&format!("warning: the checkpoint of step {} is not saved: {failure}", report.step));
                }
                if self.output == Output::Json {
                    json_line("RunCheckpoint", json!(report));
                }
            }
            Update::Failed { attempt, cause } => {
                self.clear();
                eprintln!("{}", screen::failure(cause, attempt));
                if self.output == Output::Json {
                    json_line(
                        "RunFailure",
                        json!({
                            "attempt": attempt, "rank": cause.rank, "pid": cause.pid, "cause": cause.cause, "during": cause.during,
                            "log": cause.log.path, "lastLines": cause.log.tail,
                        }),
                    );
                }
            }
            Update::Restarting { attempt, saved, restarts, max_restarts } => {
                let from = match saved {
                    Some(true) => " from the newest checkpoint, if there is one",
                    Some(false) => " from the beginning",
                    None => "",
                };
                self.print(&format!("restart {restarts} of {max_restarts}: attempt {attempt} starts{from}"));
                if self.output == Output::Json {
                    json_line(
                        "RunRestarting",
                        json!({"attempt": attempt, "restarts": restarts, "maxRestarts": max_restarts}),
                    );
                }
            }
            Update::Stopping { signal, saves } => {
                self.clear();
                let first = if saves { ", which save a checkpoint first" } else { "" };
                self.print(&format!("{signal}: stopping all processes{first}; again to kill them immediately"));
            }
            Update::Surviving { cause, processes, seconds } => {
                self.print(&screen::survivors(cause, processes, seconds));
                if self.output == Output::Json {
                    let all = processes.iter().map(|it| json!({"rank": it.rank, "pid": it.pid, "state": it.state}));
                    let cause = cause.map(|cause| json!({"rank": cause.rank, "cause": cause.cause}));
                    json_line("RunSurvivors", json!({"cause": cause, "processes": all.collect::<Vec<_>>()}));
                }
            }
            Update::Unrecorded(error) => {
                self.print(&format!("warning: {error}; the training continues, but the run directory is incomplete"));
                if self.output == Output::Json {
                    json_line("RunUnrecorded", json!({"cause": error.to_string()}));
                }
            }
            Update::Finished { report, inspection, seconds, items_per_second, figures } => {
                self.clear();
                if self.output == Output::Table {
                    print(&screen::summary(
                        report,
                        inspection,
                        seconds,
                        items_per_second,
                        figures,
                        &self.run_dir.short(),
                    ));
                }
            }
        }
        Ok(())
    }
}

fn bar(total: u64, ascii: bool) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(10));
    let style = ProgressStyle::with_template("step {pos}/{len} [{bar:24}] {percent:>3}%   {msg}");
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
    bar.set_style(style.progress_chars(if ascii { "=> " } else { "━╸ " }));
    bar
}

/// Whether the locale supports more than ASCII.
fn utf8_locale() -> bool {
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"]
        .iter()
        .find_map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()));
    locale.is_some_and(|locale| locale.to_lowercase().replace('-', "").contains("utf8"))
}
