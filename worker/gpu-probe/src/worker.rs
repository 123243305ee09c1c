//! Runs the worker as a single-rank job.

use crate::outcome::Outcome;
use crate::scratch;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;
use switchyard_worker_contract::config::EngineConfig;
use switchyard_worker_contract::env;
use switchyard_worker_contract::event::{Event, Finished, GpuPaths, Inspection, Progress, Ready};

/// Last log lines quoted in an outcome.
const LINES: usize = 20;

/// The worker program, with the environment that selects libraries and GPU.
pub(crate) struct Worker {
    program: PathBuf,
    variables: Vec<(&'static str, String)>,
}

/// Reports of a completed run.
pub(crate) struct CompletedRun {
    pub(crate) ready: Ready,
    pub(crate) progress: Vec<Progress>,
    pub(crate) finished: Finished,
    /// Seconds from process start to the first report.
    pub(crate) seconds_to_first: f64,
}

impl CompletedRun {
    pub(crate) fn losses(&self) -> Vec<f64> {
        self.progress.iter().map(|progress| progress.loss).collect()
    }

    /// Implementations in use on the GPU.
    pub(crate) fn paths(&self) -> GpuPaths {
        self.ready.gpu.clone().unwrap_or_default()
    }

    /// Steps skipped because their gradients overflowed.
    pub(crate) fn skipped(&self) -> u64 {
        self.progress.last().and_then(|progress| progress.skipped_steps).unwrap_or(0)
    }
}

impl Worker {
    /// `program` defaults to the worker next to this program. `python`: see
    /// [`switchyard_cuda::find`]. `device`: GPU index.
    pub(crate) fn new(program: Option<&Path>, python: Option<&Path>, device: usize) -> Result<Worker, Outcome> {
        let own = || std::env::current_exe().map(|probe| probe.with_file_name("switchyard-worker"));
        let program = program.map_or_else(own, |program| Ok(program.to_path_buf()));
        let program = program.map_err(|error| Outcome::failed("current_exe", error.to_string()))?;
        if !program.is_file() {
            let looked_for = vec![program.display().to_string()];
            return Err(Outcome::Absent { reason: "no worker".into(), looked_for });
        }
        let mut variables = Vec::new();
        // For the first GPU, leave CUDA_VISIBLE_DEVICES as the machine's owner set it.
        if device > 0 {
            variables.push(("CUDA_VISIBLE_DEVICES", device.to_string()));
        }
        if let Some(environment) = python.and_then(|python| python.parent()?.parent()) {
            variables.push(("VIRTUAL_ENV", environment.display().to_string()));
        }
        Ok(Worker { program, variables })
    }

    /// The same program with its own cache of kernels and algorithms.
    pub(crate) fn with_cache(mut self, folder: &Path) -> Worker {
        self.variables.push((env::GPU_CACHE, folder.display().to_string()));
        self
    }

    /// Trains as the only rank of a job. Runs with the same name share a folder.
    pub(crate) fn train(&self, name: &str, config: &EngineConfig, attempt: u32) -> Result<CompletedRun, Outcome> {
        let prepared =
            self.command(name, config, attempt, None).map_err(|error| io("a folder for the worker", &error))?;
        let Prepared { mut command, log } = prepared;
        let start = Instant::now();
        let mut child = command.spawn().map_err(|error| io("switchyard-worker", &error))?;
        let events = Events::of(&mut child, start);
        let status = child.wait().map_err(|error| io("switchyard-worker", &error))?;
        match events {
            Events { ready: Some(ready), finished: Some(finished), progress, seconds_to_first, .. }
                if status.success() =>
            {
                Ok(CompletedRun { ready, progress, finished, seconds_to_first })
            }
            Events { cause, .. } => Err(Outcome::Failed {
                call: format!("switchyard-worker, {name}"),
                code: status.code().map(i64::from),
                text: cause.unwrap_or_else(|| last_lines(&std::fs::read_to_string(log).unwrap_or_default())),
                figures: None,
            }),
        }
    }

    /// The worker's plan for this job, including its memory.
    pub(crate) fn inspect(&self, config: &EngineConfig) -> Result<Inspection, Outcome> {
        let mut command = Command::new(&self.program);
        command.arg("inspect").envs(self.variables.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let text =
            serde_json::to_string(config).map_err(|error| Outcome::failed("configuration", error.to_string()))?;
        let answered = command.spawn().and_then(|mut child| {
            child.stdin.take().map_or(Ok(()), |mut input| input.write_all(text.as_bytes()))?;
            child.wait_with_output()
        });
        let output = answered.map_err(|error| io("switchyard-worker inspect", &error))?;
        serde_json::from_slice(&output.stdout).map_err(|_| Outcome::Failed {
            call: "switchyard-worker inspect".into(),
            code: output.status.code().map(i64::from),
            text: last_lines(&String::from_utf8_lossy(&output.stderr)),
            figures: None,
        })
    }

    /// The command of a run. `wrapper`: a program that launches it, with arguments.
    pub(crate) fn command(
        &self,
        name: &str,
        config: &EngineConfig,
        attempt: u32,
        wrapper: Option<(&Path, &[&str])>,
    ) -> std::io::Result<Prepared> {
        let folder = scratch::folder(name)?;
        let [file, key, log] = ["engine.json", "key", "log"].map(|name| folder.join(name));
        std::fs::write(&file, serde_json::to_vec(config)?)?;
        // A single rank authenticates no peers, so any key works.
        std::fs::write(&key, [0; 32])?;
        std::fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
        let mut command = match wrapper {
            Some((program, arguments)) => {
                let mut command = Command::new(program);
                command.args(arguments).arg(&self.program);
                command
            }
            None => {
                let mut command = Command::new(&self.program);
                // The worker exits with the part that started it.
                command.env(env::PARENT_PID, std::process::id().to_string());
                command
            }
        };
        command.arg("train").envs(self.variables.iter().map(|(name, value)| (name, value)));
        command.env(env::JOB, "gpu-probe").env(env::ATTEMPT, attempt.to_string()).env(env::RENDEZVOUS, "127.0.0.1:0");
        for (name, count) in [(env::NODE_RANK, 0), (env::LOCAL_RANK, 0), (env::NUM_NODES, 1), (env::PROCS_PER_NODE, 1)]
        {
            command.env(name, count.to_string());
        }
        command.env(env::CONFIG, file).env(env::KEY_FILE, key).env(env::RUN_DIR, &folder);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(File::create(&log)?);
        Ok(Prepared { command, log })
    }
}

/// A run that has not been started.
pub(crate) struct Prepared {
    pub(crate) command: Command,
    /// Its human-readable log.
    pub(crate) log: PathBuf,
}

/// Events parsed from a run's output.
#[derive(Default)]
struct Events {
    ready: Option<Ready>,
    progress: Vec<Progress>,
    finished: Option<Finished>,
    cause: Option<String>,
    seconds_to_first: f64,
}

impl Events {
    /// Reads until the process closes its output.
    fn of(child: &mut Child, start: Instant) -> Events {
        let mut events = Events::default();
        let Some(output) = child.stdout.take() else { return events };
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            match serde_json::from_str(&line) {
                Ok(Event::Ready(ready)) => events.ready = Some(ready),
                Ok(Event::Progress(progress)) => {
                    if events.progress.is_empty() {
                        events.seconds_to_first = start.elapsed().as_secs_f64();
                    }
                    events.progress.push(progress);
                }
                Ok(Event::Finished(finished)) => events.finished = Some(finished),
                Ok(Event::Failed(failure)) => events.cause = Some(failure.cause),
                _ => {}
            }
        }
        events
    }
}

/// Adds the implementations of a GPU run to its figures.
///
/// # Errors
/// A library refused something, so that a slower implementation ran: the figures are not of what
/// was to be measured. They are kept.
pub(crate) fn check_paths(paths: &GpuPaths, mut figures: Value) -> Result<Value, Outcome> {
    figures["paths"] = json!(paths);
    match paths.fallbacks.as_slice() {
        [] => Ok(figures),
        [first, more @ ..] => {
            let text = format!("{first} ({} more); expected none", more.len());
            Err(Outcome::Failed { call: "fallback".into(), code: None, text, figures: Some(figures) })
        }
    }
}

fn io(call: &str, error: &std::io::Error) -> Outcome {
    Outcome::failed(call, error.to_string())
}

/// The end of a log, on one line.
pub(crate) fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(LINES)..].join("; ")
}
