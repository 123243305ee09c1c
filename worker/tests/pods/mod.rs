//! Pods of a job as real processes.
#![allow(dead_code, reason = "each test binary uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a test helper may end the test")]

use crate::collective_support::{TIMEOUT, free_port, wait_until};
use crate::plain;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use switchyard_worker_contract::config::{EngineConfig, Gpt, Length, Model, Schedule, ScheduleKind};
use switchyard_worker_contract::env;
use switchyard_worker_contract::event::{Event, Finished, Ready};
use switchyard_worker_contract::termination::Termination;

pub const WORKER: &str = env!("CARGO_BIN_EXE_switchyard-worker");

/// A folder shared by the pods of a job, with data, configuration and key.
pub struct Job {
    pub folder: tempfile::TempDir,
    nodes: u32,
    procs: u32,
    /// Where rank 0 listens.
    pub port: u16,
}

impl Job {
    pub fn new(nodes: u32, procs: u32, steps: u64) -> Job {
        let job = Job { folder: tempfile::tempdir().unwrap(), nodes, procs, port: free_port() };
        let text: String = (0..2000).map(|line| format!("line {line} of the text, {}\n", line * 7919 % 1000)).collect();
        fs::write(job.path("data.txt"), text).unwrap();
        let plain = plain::gpt(&job.path("data.txt"), &[]);
        let config = EngineConfig {
            model: Model::Gpt(Gpt {
                layers: 1,
                hidden_size: 16,
                heads: 2,
                context_length: 16,
                vocabulary_size: 256,
                tied_head: true,
            }),
            batch_size_per_process: 2,
            length: Length::Steps(steps),
            schedule: Schedule { kind: ScheduleKind::Constant, warmup_steps: Some(0), ..plain.schedule },
            fetch_every_steps: 5,
            cpu_threads: 0,
            ..plain
        };
        job.write(&config);
        job.write_key(0o600);
        job
    }

    pub fn write(&self, config: &EngineConfig) {
        fs::write(self.path("engine.json"), serde_json::to_string(config).unwrap()).unwrap();
    }

    /// Changes the configuration.
    pub fn with(self, change: impl FnOnce(&mut EngineConfig)) -> Job {
        let mut config = serde_json::from_str(&self.read("engine.json")).unwrap();
        change(&mut config);
        self.write(&config);
        self
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write_key(&self, mode: u32) {
        let _ = fs::remove_file(self.path("key"));
        fs::write(self.path("key"), [5; 32]).unwrap();
        fs::set_permissions(self.path("key"), Permissions::from_mode(mode)).unwrap();
    }

    /// The command of this node's pod, ready to be modified and started.
    pub fn command(&self, node: u32) -> Command {
        let run_dir = self.path(&format!("run-{node}"));
        fs::create_dir_all(&run_dir).unwrap();
        let mut command = Command::new(WORKER);
        command.arg("pod").env(env::JOB, "pods").env(env::ATTEMPT, "1").env(env::NODE_RANK, node.to_string());
        command.env(env::NUM_NODES, self.nodes.to_string()).env(env::PROCS_PER_NODE, self.procs.to_string());
        command.env(env::RENDEZVOUS, format!("127.0.0.2:{}", self.port)).env(env::CONFIG, self.path("engine.json"));
        command.env(env::KEY_FILE, self.path("key")).env(env::RUN_DIR, run_dir);
        command.env(env::TERMINATION_LOG, self.path(&format!("termination-{node}")));
        // As on two hosts.
        command.env("NCCL_HOSTID", format!("host {node}"));
        command.env(env::HOST_ID, format!("host {node}")).env(env::CONNECT_TIMEOUT_SECONDS, "600");
        command.stdout(File::create(self.path(&format!("out-{node}"))).unwrap());
        command.stderr(File::create(self.path(&format!("err-{node}"))).unwrap());
        command
    }

    pub fn start(&self, node: u32) -> Running {
        Running(self.command(node).spawn().unwrap())
    }

    /// Starts all pods with these additional variables and waits for their exit codes.
    pub fn run(&self, extra: &[(&str, &str)]) -> Vec<i32> {
        let mut pods: Vec<Running> = (0..self.nodes)
            .map(|node| Running(self.command(node).envs(extra.iter().copied()).spawn().unwrap()))
            .collect();
        pods.iter_mut().map(Running::code).collect()
    }

    pub fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    pub fn termination(&self, node: u32) -> Termination {
        let message = self.read(&format!("termination-{node}"));
        let parsed = Termination::parse(&message);
        parsed.unwrap_or_else(|| panic!("{message:?}; {}", self.read(&format!("err-{node}"))))
    }

    pub fn wait_for(&self, name: &str, word: &str) {
        assert!(wait_until(|| self.read(name).contains(word)), "no {word} in {name}: {}", self.read(name));
    }

    /// Running processes of this job.
    pub fn processes(&self) -> Vec<String> {
        let folder = self.folder.path().display().to_string();
        let of_job = |pid: &String| {
            let read = |name: &str| fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
            String::from_utf8_lossy(&read("environ")).contains(&folder)
        };
        let entries = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.file_name().display().to_string());
        entries.filter(|name| name.parse::<u32>().is_ok()).filter(of_job).collect()
    }
}

/// A pod that is killed if the test ends first.
pub struct Running(pub Child);

impl Running {
    pub fn ended(&mut self) -> ExitStatus {
        let mut status = None;
        let ended = wait_until(|| {
            status = self.0.try_wait().unwrap();
            status.is_some()
        });
        assert!(ended, "the pod has not ended within {TIMEOUT:?}");
        status.unwrap()
    }

    pub fn code(&mut self) -> i32 {
        self.ended().code().unwrap()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn events(log: &str) -> Vec<Event> {
    log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// The `ready` event of a rank, once the pod has printed it; lines of different ranks come in any
/// order.
pub fn ready_of(job: &Job, node: u32, rank: u32) -> Ready {
    let log = || job.read(&format!("out-{node}"));
    let event = || ready(&log()).into_iter().find(|ready| ready.rank == rank);
    assert!(wait_until(|| event().is_some()), "rank {rank} is not ready: {}", log());
    event().unwrap()
}

/// The process ID of a rank, once the rank is ready.
pub fn pid_of(job: &Job, node: u32, rank: u32) -> Pid {
    Pid::from_raw(ready_of(job, node, rank).pid as i32).unwrap()
}

/// The `ready` events in a log.
pub fn ready(log: &str) -> Vec<Ready> {
    let only = |event| if let Event::Ready(ready) = event { Some(ready) } else { None };
    events(log).into_iter().filter_map(only).collect()
}

/// The `finished` event of rank 0.
pub fn finished(log: &str) -> Option<Finished> {
    let only = |event| if let Event::Finished(finished) = event { Some(finished) } else { None };
    events(log).into_iter().filter_map(only).find(|finished| finished.rank == 0)
}

/// The step from which the last attempt resumed.
pub fn resumed(job: &Job) -> Option<u64> {
    ready(&job.read("out-0")).first().and_then(|ready| ready.resumed_step)
}

/// The last step that rank 0 reported.
pub fn last_step(job: &Job) -> u64 {
    let last = events(&job.read("out-0")).into_iter().rev().find_map(|event| match event {
        Event::Progress(progress) => Some(progress.step),
        _ => None,
    });
    last.unwrap_or(0)
}

/// Waits until rank 0 has reported a step; returns whether its pod is still running.
pub fn wait_for_step(job: &Job, pod: &mut Running, step: u64) -> bool {
    assert!(wait_until(|| last_step(job) >= step || pod.0.try_wait().unwrap().is_some()), "no step {step}");
    pod.0.try_wait().unwrap().is_none()
}
