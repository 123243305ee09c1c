//! Cost of an idle node agent: `cargo xtask bench agent`.
//!
//! Runs the real program with its defaults against a real API server, for this machine and for a
//! mock machine with 256 CPUs and two GPUs. Nothing changes during the run, so the figures are the
//! constant cost per node.

#![allow(missing_docs, clippy::unwrap_used)]

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use switchyard_tests::{Agent, AgentOptions, ControlPlane, Host, agent_plane};

/// Five scans at the default period of 60 s.
const MEASURED: Duration = Duration::from_secs(300);
const TIMEOUT: Duration = Duration::from_secs(60);
const CPUS: u32 = 256;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let file =
        arguments.iter().position(|word| word == "--json").and_then(|at| arguments.get(at + 1)).map(PathBuf::from);
    let plane = agent_plane(&[])?;
    let (small, large) = (Host::new()?, Host::new()?);
    grow(&large)?;
    let hosts = [("this machine", "bench-small", &small), ("256 CPUs, 2 GPUs (mock)", "bench-large", &large)];
    let mut agents = Vec::new();
    for (what, node, host) in hosts {
        agents.push((what, node, start(&plane, node, host)?));
    }
    let before: Vec<_> = agents.iter().map(|(_, node, agent)| (agent.daemon.usage(), calls(&plane, node))).collect();
    let begin = Instant::now();
    std::thread::sleep(MEASURED);
    let seconds = begin.elapsed().as_secs_f64();
    let mut rows = Vec::new();
    println!(
        "{:<26} {:>8} {:>13} {:>6} {:>8} {:>12}",
        "", "RSS MiB", "CPU % of core", "calls", "scans", "report bytes"
    );
    for ((what, node, agent), (usage, calls_before)) in agents.iter().zip(before) {
        let now = agent.daemon.usage();
        let row = json!({
            "host": what,
            "rssMiB": round(now.rss_bytes as f64 / f64::from(1 << 20)),
            "cpuPercent": round((now.cpu_seconds - usage.cpu_seconds) * 100.0 / seconds),
            "calls": calls(&plane, node) - calls_before,
            "scans": agent.metric("switchyard_agent_scan_seconds_count"),
            "meanScanMilliseconds": round(agent.metric("switchyard_agent_scan_seconds_sum") * 1000.0
                / agent.metric("switchyard_agent_scan_seconds_count")),
            "reportBytes": report(&plane, node)?.len(),
        });
        println!(
            "{what:<26} {:>8} {:>13} {:>6} {:>8} {:>12}",
            row["rssMiB"], row["cpuPercent"], row["calls"], row["scans"], row["reportBytes"]
        );
        rows.push(row);
    }
    println!("goals: at most 30 MiB and 0.1 % of a core");
    if let Some(file) = file {
        let document = json!({
            "command": "cargo xtask bench agent", "kubernetes": "v1.34.4", "seconds": round(seconds),
            "profile": if cfg!(debug_assertions) { "dev: without optimisation, an upper bound" } else { "dist" },
            "goals": {"rssMiB": 30, "cpuPercent": 0.1}, "agents": rows,
        });
        std::fs::write(&file, format!("{}\n", serde_json::to_string_pretty(&document)?))?;
        println!("written: {}", file.display());
    }
    Ok(())
}

fn round(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// Starts an agent with its defaults and waits for its first report.
fn start(plane: &ControlPlane, node: &str, host: &Host) -> Result<Agent> {
    let object = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}});
    let made = plane.kubectl_with(&["create", "-f", "-"], &object.to_string());
    ensure!(made.code == Some(0), "{}", made.stderr);
    // The mock's event stream ends with a missing driver and would start over every minute.
    let arguments = vec!["--gpu-events".into(), "Disabled".into()];
    let options = AgentOptions { arguments, period: Some(60), ..AgentOptions::default() };
    let agent = Agent::start(plane, node, host, &options)?;
    let deadline = Instant::now() + TIMEOUT;
    while !report(plane, node)?.contains("conditions") {
        ensure!(Instant::now() < deadline, "no report\n{}", agent.daemon.tail());
        std::thread::sleep(Duration::from_millis(200));
    }
    Ok(agent)
}

/// The stored object as raw JSON.
fn report(plane: &ControlPlane, node: &str) -> Result<String> {
    let path = format!("/apis/training.switchyard.dev/v1alpha1/gputopologies/{node}");
    Ok(plane.kubectl(&["get", "--raw", &path]).stdout)
}

/// Number of agent calls about a node, reads included.
fn calls(plane: &ControlPlane, node: &str) -> usize {
    let audit_entries = plane.audit_entries();
    let of_node = |entry: &&Value| entry.pointer("/objectRef/name").and_then(Value::as_str) == Some(node);
    let of_agent = |entry: &&Value| {
        entry
            .pointer("/user/username")
            .and_then(Value::as_str)
            .is_some_and(|user| user.ends_with("switchyard-node-agent"))
    };
    audit_entries.iter().filter(of_node).filter(of_agent).count()
}

/// Gives the host 256 CPUs, with the kernel's sysfs files for them, and two GPUs.
fn grow(host: &Host) -> Result<()> {
    std::fs::remove_file(host.path("sys/devices")).context("the link to this machine's devices")?;
    let devices = "sys/devices/system";
    host.file(&format!("{devices}/cpu/online"), &format!("0-{}", CPUS - 1))?;
    for cpu in 0..CPUS {
        let base = format!("{devices}/cpu/cpu{cpu}");
        let core = cpu % (CPUS / 2);
        let (siblings, socket) = (format!("{core},{}", core + CPUS / 2), core / (CPUS / 4));
        host.file(&format!("{base}/topology/physical_package_id"), &socket.to_string())?;
        host.file(&format!("{base}/topology/core_cpus_list"), &siblings)?;
        for (index, level, kind, size) in
            [(0, 1, "Data", "48K"), (1, 1, "Instruction", "32K"), (2, 2, "Unified", "2M"), (3, 3, "Unified", "105M")]
        {
            let cache = format!("{base}/cache/index{index}");
            let first = socket * (CPUS / 4);
            let of_socket = format!("{first}-{},{}-{}", first + 63, first + 128, first + 191);
            let shared = if level == 3 { &of_socket } else { &siblings };
            for (name, text) in
                [("level", level.to_string().as_str()), ("type", kind), ("size", size), ("shared_cpu_list", shared)]
            {
                host.file(&format!("{cache}/{name}"), text)?;
            }
        }
    }
    for (node, cpus) in [(0, "0-63,128-191"), (1, "64-127,192-255")] {
        let base = format!("{devices}/node/node{node}");
        host.file(&format!("{base}/cpulist"), cpus)?;
        host.file(&format!("{base}/meminfo"), &format!("Node {node} MemTotal:       1056000000 kB"))?;
        host.file(&format!("{base}/distance"), if node == 0 { "10 21" } else { "21 10" })?;
    }
    for bus_id in ["0000:1b:00.0", "0000:43:00.0"] {
        host.add_gpu(bus_id)?;
    }
    host.install_driver()
}
