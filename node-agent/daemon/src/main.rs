//! The node agent: describes its machine periodically, and keeps the `GPUTopology` of its node up
//! to date.
//!
//! ```text
//! scan (thread: sysfs, procfs, NVML) ─┐
//!                                     ├─> report, consistent (pure) ─> write ─> API server
//! pod_resources (kubelet's socket) ───┘
//! ```
//!
//! How a machine is described is in the library `switchyard-node-agent`. The agent makes no
//! decisions about jobs.
#![forbid(unsafe_code)]

mod agent;
mod args;
mod consistent;
mod kubelet;
mod metrics;
mod pages;
mod pause;
mod pod_resources;
mod ports;
mod report;
mod scan;
mod write;

use agent::Agent;
use args::{Args, Toggle};
use metrics::Metrics;
use pages::{Health, Pages};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use switchyard_crds::gpu_topology::{GPUTopology, GPUTopologySpec};
use switchyard_node_agent::Roots;
use switchyard_service::{Connection, telemetry};
use switchyard_worker_contract::exit::Exit;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

/// Text of `--version`. `cargo xtask` sets the commit, so a new commit recompiles only this file.
const VERSION: &str = match option_env!("SWITCHYARD_VERSION") {
    Some(version) => version,
    None => env!("CARGO_PKG_VERSION"),
};

fn main() -> ExitCode {
    let args = Args::parse_as(VERSION);
    if let Err(message) = telemetry::start(args.log_format, &args.log_level) {
        return fail(&message, Exit::Usage);
    }
    // One thread is enough for a few calls a minute, and needs no memory pools per thread.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&format!("cannot start: {error}"), Exit::Unexpected),
    };
    let code = runtime.block_on(async { if args.once { once(&args).await } else { serve(&args).await } });
    // Do not wait for a name lookup in progress.
    runtime.shutdown_background();
    code
}

fn agent(args: &Args, node_name: &str) -> Agent {
    let roots = Roots {
        sysfs: args.sysfs_root.clone(),
        procfs: args.proc_root.clone(),
        dev: args.dev_root.clone(),
        nvml_library: args.nvml_lib.clone(),
        measured: args.measured.clone(),
        read_acs: args.read_acs,
        node_name: node_name.to_owned(),
    };
    Agent {
        period: Duration::from_secs(args.period_seconds.into()),
        scan_timeout: Duration::from_secs(args.scan_timeout_seconds.into()),
        source: scan::ScanSource { roots, kubelet_config: args.kubelet_config.clone() },
        pod_resources: Some(args.pod_resources.clone().into()).filter(|_| !args.pod_resources.is_empty()),
        metrics: Arc::new(Metrics::new()),
        health: Arc::new(Health::new()),
    }
}

async fn once(args: &Args) -> ExitCode {
    let host = || rustix::system::uname().nodename().to_string_lossy().to_lowercase();
    let name = args.node_name.clone().unwrap_or_else(host);
    let agent = agent(args, &name);
    let (machine, kubelet) = match agent.once().await {
        Ok(known) => known,
        Err(message) => return fail(&message, Exit::Usage),
    };
    let mut topology = GPUTopology::new(&name, GPUTopologySpec {});
    topology.status = Some(report::draft(&machine, &kubelet).status(None, jiff::Timestamp::now()));
    match serde_saphyr::to_string(&topology) {
        Ok(text) => print(&text),
        Err(error) => fail(&format!("the GPUTopology cannot be written as YAML: {error}"), Exit::Unexpected),
    }
}

/// Prints a result. A closed pipe (`| head`) is not an error; a full disk is.
fn print(text: &str) -> ExitCode {
    use std::io::Write;
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            fail(&format!("the result cannot be printed: {error}"), Exit::Unexpected)
        }
        _ => ExitCode::SUCCESS,
    }
}

async fn serve(args: &Args) -> ExitCode {
    let (mut interrupt, mut terminate) = match (signal(SignalKind::interrupt()), signal(SignalKind::terminate())) {
        (Ok(interrupt), Ok(terminate)) => (interrupt, terminate),
        (Err(error), _) | (_, Err(error)) => {
            return fail(&format!("cannot handle signals: {error}"), Exit::Unexpected);
        }
    };
    tokio::select! {
        message = report(args) => fail(&message, Exit::Usage),
        _ = interrupt.recv() => ExitCode::from(Exit::Interrupted.code()),
        // SIGTERM is a clean exit; the next agent picks up any unwritten report.
        _ = terminate.recv() => ExitCode::SUCCESS,
    }
}

/// Reports until an error ends it, and returns the error.
async fn report(args: &Args) -> String {
    let Some(name) = &args.node_name else { return "--node-name: got nothing; expected the name of this node".into() };
    let agent = agent(args, name);
    let listener = match TcpListener::bind(args.listen).await {
        Ok(listener) => listener,
        Err(error) => return format!("--listen {}: {error}", args.listen),
    };
    let connection = Connection { kubeconfig: args.kubeconfig.clone(), context: args.context.clone() };
    let config = match switchyard_service::connect(&connection).await {
        Ok(config) => config,
        Err(message) => return message,
    };
    let answered = {
        let metrics = Arc::clone(&agent.metrics);
        Arc::new(move |verb, resource, status| metrics.request(verb, resource, status))
    };
    let client = match switchyard_service::client(config, "switchyard-node-agent", answered, Arc::default()) {
        Ok(client) => client,
        Err(message) => return message,
    };
    let pages = Pages { health: Arc::clone(&agent.health), metrics: Arc::clone(&agent.metrics) };
    let writer = write::Writer::new(client, name, Duration::from_secs(args.renew_seconds.into()));
    tokio::select! {
        () = pages::serve(listener, pages) => "health and metrics are no longer served".into(),
        ended = agent.run(writer, args.gpu_events == Toggle::Enabled) => ended.err().unwrap_or_default(),
    }
}

/// Prints an error to standard error and returns its exit code.
fn fail(message: &str, exit: Exit) -> ExitCode {
    eprintln!("error: {message}");
    ExitCode::from(exit.code())
}
