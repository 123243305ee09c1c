//! A development cluster, with our own kubelet or with real nodes: `cargo xtask cluster
//! up|down|status|check`.
#![forbid(unsafe_code)]
#![allow(missing_docs)]

#[path = "../../../xtask/src/cluster/arguments.rs"]
mod arguments;

use anyhow::{Context, Result, bail, ensure};
use arguments::{Action, MAX_REAL_NODES, SKIPPED, Up};
use clap::{Parser, Subcommand};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde::{Deserialize, Serialize};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};
use switchyard_tests::nodes::{MAX_NODES, Nodes, NodesOptions, clean_all, missing};
use switchyard_tests::{ControlPlane, Kubelet, KubeletOptions, Options, Policy, TIMEOUT, root};

const _: () = assert!(
    MAX_REAL_NODES == MAX_NODES,
    "xtask's arguments and the test library disagree on the maximum of real nodes"
);

/// A development cluster.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask cluster", bin_name = "cargo xtask cluster")]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Folder for the cluster's state; by default a folder in the cache, chosen by this clone's
    /// path.
    #[arg(long, global = true, hide = true, value_name = "FOLDER")]
    folder: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Command {
    #[command(flatten)]
    Action(Action),
    /// Runs the cluster in the background.
    #[command(hide = true)]
    Serve(Up),
}

/// State that `status` and `down` read.
#[derive(Debug, Serialize, Deserialize)]
struct State {
    pid: i32,
    url: String,
    kubeconfig: PathBuf,
    nodes: Vec<String>,
    /// Policy of the pods, if the nodes use our own kubelet.
    policy: Option<String>,
}

impl State {
    /// Describes the nodes as text.
    fn kind(&self) -> String {
        match &self.policy {
            Some(policy) => format!("{} nodes, pods do `{policy}`", self.nodes.len()),
            None => format!("{} real nodes", self.nodes.len()),
        }
    }
}

fn main() -> ExitCode {
    let Cli { command, folder } = Cli::parse();
    let result = folder.map_or_else(default_folder, Ok).and_then(|folder| match command {
        Command::Action(Action::Up(up)) => start(&folder, &up),
        Command::Action(Action::Down) => down(&folder),
        Command::Action(Action::Status) => status(&folder),
        Command::Action(Action::Check) => check(),
        Command::Serve(up) => serve(&folder, &up),
    });
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the folder of this clone's cluster.
fn default_folder() -> Result<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let base = base.or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache")));
    let mut hasher = DefaultHasher::new();
    root().hash(&mut hasher);
    Ok(base
        .context("neither XDG_CACHE_HOME nor HOME is set")?
        .join(format!("switchyard/cluster-{:016x}", hasher.finish())))
}

/// Returns the running cluster's state, if one is running.
fn running(folder: &Path) -> Option<State> {
    let state: State = serde_json::from_slice(&std::fs::read(folder.join("state.json")).ok()?).ok()?;
    let pid = Pid::from_raw(state.pid)?;
    let command = std::fs::read_to_string(format!("/proc/{}/cmdline", state.pid)).unwrap_or_default();
    (test_kill_process(pid).is_ok() && command.contains("serve")).then_some(state)
}

fn start(folder: &Path, up: &Up) -> Result<ExitCode> {
    let _: Policy = up.policy.parse().context("--policy")?;
    if let Some(state) = running(folder) {
        println!("already up: {}\nexport KUBECONFIG={}", state.kind(), state.kubeconfig.display());
        return Ok(ExitCode::SUCCESS);
    }
    if up.nodes > 0
        && let Some(what) = missing()?
    {
        eprintln!("skipped: {what}");
        return Ok(ExitCode::from(SKIPPED));
    }
    // Left over from a killed cluster. Its processes ended with it.
    let _ = std::fs::remove_dir_all(folder);
    std::fs::create_dir_all(folder)?;
    let begin = Instant::now();
    let log = std::fs::File::create(folder.join("cluster.log"))?;
    // A separate session, so that the cluster outlives the terminal.
    let (nodes, own_nodes) = (up.nodes.to_string(), up.own_nodes.to_string());
    // Report a missing folder here, because the background process cannot.
    let images = up.images.as_ref().map(|images| images.canonicalize().with_context(|| images.display().to_string()));
    let images = images.transpose()?;
    let mut child = std::process::Command::new("setsid")
        .arg(std::env::current_exe()?)
        .args(["serve", "--nodes", &nodes, "--own-nodes", &own_nodes, "--policy", &up.policy, "--folder"])
        .arg(folder)
        .args(images.iter().flat_map(|images| [Path::new("--images"), images]))
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .context("cannot start setsid (util-linux)")?;
    println!("starting etcd, kube-apiserver, kube-controller-manager, kube-scheduler and the nodes");
    let mut printed = 0;
    while begin.elapsed() < TIMEOUT {
        let text = std::fs::read_to_string(folder.join("cluster.log")).unwrap_or_default();
        print!("{}", text.get(printed..).unwrap_or_default());
        std::io::stdout().flush()?;
        printed = text.len();
        if let Some(state) = running(folder) {
            let next = if up.nodes > 0 {
                "kubectl get nodes\n  docs/first-job-on-a-laptop.md"
            } else {
                "target/debug/switchyard controller --leader-elect Disabled &\n  kubectl apply -f examples/gpt-pods.yaml\n  \
                 target/debug/switchyard status gpt-pods --watch"
            };
            println!(
                "up after {:.1} s: Kubernetes at {}, {}\n\nexport KUBECONFIG={}\n\nnext:\n  {next}\n\n\
                 kubectl is in the cache of `cargo xtask programs kubernetes`; `cargo xtask cluster down` ends it",
                begin.elapsed().as_secs_f64(),
                state.url,
                state.kind(),
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
    bail!("the cluster did not start:\n{}", std::fs::read_to_string(folder.join("cluster.log")).unwrap_or_default());
}

fn serve(folder: &Path, up: &Up) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    if up.nodes > 0 {
        let report = |part: &str, time: Duration| println!("  {part}: {:.1} s", time.as_secs_f64());
        let nodes = Nodes::start(&NodesOptions::new(up.nodes), report)?;
        let begin = Instant::now();
        let archives = up.images.as_deref().map(archives).transpose()?.unwrap_or_default();
        for archive in &archives {
            nodes.import(archive)?;
        }
        if !archives.is_empty() {
            report(&format!("{} images imported", archives.len()), begin.elapsed());
        }
        return runtime.block_on(run_until_terminated(folder, &nodes.plane, nodes.names(), None));
    }
    let options =
        Options { controller_manager: true, scheduler: true, folder: Some(folder.join("plane")), ..Options::default() };
    let plane = ControlPlane::start(&options)?;
    plane.install_crds_now()?;
    runtime.block_on(async {
        let mut options = KubeletOptions::new("node", up.own_nodes);
        options.policy = up.policy.parse()?;
        options.programs = std::env::current_exe()?.parent().map(Path::to_path_buf);
        let kubelet = Kubelet::start(plane.config().await?, options).await?;
        run_until_terminated(folder, &plane, kubelet.nodes(), Some(up.policy.clone())).await
    })
}

/// Lists the image archives in a folder.
fn archives(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<PathBuf>>>()?;
    let mut archives: Vec<PathBuf> =
        paths.into_iter().filter(|path| path.extension().is_some_and(|end| end == "tar")).collect();
    archives.sort();
    ensure!(
        !archives.is_empty(),
        "--images {}: expected files *.tar, as `cargo xtask images` writes them",
        folder.display()
    );
    Ok(archives)
}

/// Writes the state file, then waits for SIGTERM.
async fn run_until_terminated(
    folder: &Path,
    plane: &ControlPlane,
    nodes: Vec<String>,
    policy: Option<String>,
) -> Result<ExitCode> {
    let pid = i32::try_from(std::process::id())?;
    let state = State { pid, url: plane.url(), kubeconfig: plane.kubeconfig("admin"), nodes, policy };
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    // Rename into place, so that readers never see a partial file.
    std::fs::write(folder.join("state.new"), serde_json::to_vec(&state)?)?;
    std::fs::rename(folder.join("state.new"), folder.join("state.json"))?;
    terminate.recv().await;
    Ok(ExitCode::SUCCESS)
}

fn down(folder: &Path) -> Result<ExitCode> {
    if let Some(state) = running(folder)
        && let Some(pid) = Pid::from_raw(state.pid)
    {
        kill_process(pid, Signal::TERM)?;
        let begin = Instant::now();
        while running(folder).is_some() {
            if begin.elapsed() > Duration::from_secs(60) {
                let _ = kill_process(pid, Signal::KILL);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        println!("down");
    } else {
        println!("no cluster runs");
    }
    // Left over from killed clusters, of this clone or another.
    for name in clean_all()? {
        println!("cleaned up {name}, whose owner was killed");
    }
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error).context(folder.display().to_string()),
        _ => Ok(ExitCode::SUCCESS),
    }
}

fn status(folder: &Path) -> Result<ExitCode> {
    let Some(state) = running(folder) else {
        println!("no cluster runs");
        return Ok(ExitCode::FAILURE);
    };
    println!("Kubernetes at {}, process {}", state.url, state.pid);
    println!("{}: {}", state.kind(), state.nodes.join(", "));
    println!("export KUBECONFIG={}", state.kubeconfig.display());
    Ok(ExitCode::SUCCESS)
}

fn check() -> Result<ExitCode> {
    let what = missing()?;
    println!("{}", what.as_deref().unwrap_or("this machine can run real nodes"));
    Ok(if what.is_some() { ExitCode::from(SKIPPED) } else { ExitCode::SUCCESS })
}
