//! A control plane for developers, with nodes whose kubelet is ours: `cargo xtask cluster up|down|status`.
#![forbid(unsafe_code)]
#![allow(missing_docs)]

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde::{Deserialize, Serialize};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};
use switchyard_tests::{ControlPlane, Kubelet, KubeletOptions, Options, Policy, root};

/// Time to become ready, on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// A control plane for developers.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask cluster", bin_name = "cargo xtask cluster")]
struct Cli {
    #[command(subcommand)]
    command: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Start it in the background.
    Up(Up),
    /// End it, and leave nothing.
    Down,
    /// Say what runs.
    Status,
    /// What runs in the background.
    #[command(hide = true)]
    Serve(Up),
}

#[derive(Debug, Clone, clap::Args)]
struct Up {
    /// Nodes.
    #[arg(long, default_value_t = 4)]
    nodes: usize,
    /// What pods do that do not say so themselves: worker (the pod's command runs as processes of this machine), run,
    /// succeed-after=2s, fail=3@2s, oom, hang, image=missing, ignore-delete.
    #[arg(long, default_value = "worker")]
    policy: String,
}

/// What `status` and `down` know.
#[derive(Debug, Serialize, Deserialize)]
struct State {
    pid: i32,
    url: String,
    kubeconfig: PathBuf,
    nodes: Vec<String>,
    policy: String,
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Action::Up(up) => start(&up),
        Action::Down => down(),
        Action::Status => status(),
        Action::Serve(up) => serve(&up),
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The folder of this clone's cluster.
fn folder() -> Result<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let base = base.or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache")));
    let mut hasher = DefaultHasher::new();
    root().hash(&mut hasher);
    Ok(base
        .context("neither XDG_CACHE_HOME nor HOME is set")?
        .join(format!("switchyard/cluster-{:016x}", hasher.finish())))
}

/// The cluster that runs, if one does.
fn running(folder: &Path) -> Option<State> {
    let state: State = serde_json::from_slice(&std::fs::read(folder.join("state.json")).ok()?).ok()?;
    let pid = Pid::from_raw(state.pid)?;
    let command = std::fs::read_to_string(format!("/proc/{}/cmdline", state.pid)).unwrap_or_default();
    (test_kill_process(pid).is_ok() && command.contains("serve")).then_some(state)
}

fn start(up: &Up) -> Result<ExitCode> {
    let _: Policy = up.policy.parse().context("--policy")?;
    let folder = folder()?;
    if let Some(state) = running(&folder) {
        println!(
            "already up: {} nodes, policy {}\nexport KUBECONFIG={}",
            state.nodes.len(),
            state.policy,
            state.kubeconfig.display()
        );
        return Ok(ExitCode::SUCCESS);
    }
    // What a killed one left. Its processes ended with it.
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder)?;
    let begin = Instant::now();
    let log = std::fs::File::create(folder.join("cluster.log"))?;
    // A session of its own: it outlives the terminal.
    let mut child = Command::new("setsid")
        .arg(std::env::current_exe()?)
        .args(["serve", "--nodes", &up.nodes.to_string(), "--policy", &up.policy])
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .context("cannot start setsid (util-linux)")?;
    println!("starting etcd, kube-apiserver, kube-controller-manager, kube-scheduler and {} nodes", up.nodes);
    while begin.elapsed() < PATIENCE {
        if let Some(state) = running(&folder) {
            println!(
                "up after {:.1} s: Kubernetes at {}, {} nodes, pods do `{}`\n\nexport KUBECONFIG={}\n\nnext:\n  \
                 target/release/switchyard controller --leader-elect Disabled &\n  kubectl apply -f examples/gpt-pods.yaml\n  \
                 kubectl get trainjobs.training.switchyard.dev -w\n\nkubectl is in the cache of `cargo xtask programs kubernetes`; \
                 `cargo xtask cluster down` ends it",
                begin.elapsed().as_secs_f64(),
                state.url,
                state.nodes.len(),
                state.policy,
                state.kubeconfig.display(),
            );
            return Ok(ExitCode::SUCCESS);
        }
        if let Some(status) = child.try_wait()?
            && !status.success()
        {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    bail!("it did not come up:\n{}", std::fs::read_to_string(folder.join("cluster.log")).unwrap_or_default());
}

fn serve(up: &Up) -> Result<ExitCode> {
    let folder = folder()?;
    let options =
        Options { controller_manager: true, scheduler: true, folder: Some(folder.join("plane")), ..Options::default() };
    let plane = ControlPlane::start(&options)?;
    plane.install_crds_now()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let mut options = KubeletOptions::new("node", up.nodes);
        options.policy = up.policy.parse()?;
        options.programs = Some(root().join("target/release"));
        let kubelet = Kubelet::start(plane.config().await?, options).await?;
        let state = State {
            pid: i32::try_from(std::process::id())?,
            url: plane.url(),
            kubeconfig: plane.kubeconfig("admin"),
            nodes: kubelet.nodes(),
            policy: up.policy.clone(),
        };
        // Complete or not there.
        std::fs::write(folder.join("state.new"), serde_json::to_vec(&state)?)?;
        std::fs::rename(folder.join("state.new"), folder.join("state.json"))?;
        let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
        terminate.recv().await;
        drop(kubelet);
        anyhow::Ok(())
    })?;
    Ok(ExitCode::SUCCESS)
}

fn down() -> Result<ExitCode> {
    let folder = folder()?;
    if let Some(state) = running(&folder)
        && let Some(pid) = Pid::from_raw(state.pid)
    {
        kill_process(pid, Signal::TERM)?;
        let begin = Instant::now();
        while running(&folder).is_some() {
            if begin.elapsed() > Duration::from_secs(20) {
                let _ = kill_process(pid, Signal::KILL);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        println!("down");
    } else {
        println!("nothing runs");
    }
    match std::fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error).context(folder.display().to_string()),
        _ => Ok(ExitCode::SUCCESS),
    }
}

fn status() -> Result<ExitCode> {
    let Some(state) = running(&folder()?) else {
        println!("nothing runs");
        return Ok(ExitCode::FAILURE);
    };
    println!("Kubernetes at {}, process {}", state.url, state.pid);
    println!("nodes: {}; pods do `{}`", state.nodes.join(", "), state.policy);
    println!("export KUBECONFIG={}", state.kubeconfig.display());
    Ok(ExitCode::SUCCESS)
}
