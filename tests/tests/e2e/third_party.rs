//! A foreign image: plain Python that reduces over sockets between the processes named by the
//! environment, as torchrun would start them.

use crate::e2e::{Cluster, stage};
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use switchyard_tests::nodes::{Image, Nodes};

const IMAGE: &str = "example.test/python:1";
/// Standard library folders that the program does not need.
const LEFT_OUT: [&str; 7] =
    ["dist-packages", "site-packages", "test", "idlelib", "tkinter", "ensurepip", "__pycache__"];

/// Starts as many processes as torchrun would, with torchrun's environment, and sums their ranks
/// over sockets.
const PROGRAM: &str = r#"
import os, socket, struct, sys, time
nodes, node, each = (int(os.environ["PET_" + name]) for name in ("NNODES", "NODE_RANK", "NPROC_PER_NODE"))
address = (os.environ["PET_MASTER_ADDR"], int(os.environ["PET_MASTER_PORT"]))
world = nodes * each

def number(connection):
    data = b""
    while len(data) < 8:
        part = connection.recv(8 - len(data))
        assert part, "the peer closed the connection"
        data += part
    return struct.unpack("!q", data)[0]

def connected():
    # Names of pods take a moment to be known.
    for _ in range(600):
        try:
            return socket.create_connection(address, 5)
        except OSError:
            time.sleep(0.1)
    sys.exit(f"{address} is not reached")

def run(rank):
    if rank == 0:
        server = socket.create_server(("", address[1]), backlog=world)
        others = [server.accept()[0] for _ in range(world - 1)]
        total = sum(number(other) for other in others)
        for other in others:
            other.sendall(struct.pack("!q", total))
    else:
        connection = connected()
        connection.settimeout(120)
        connection.sendall(struct.pack("!q", rank))
        total = number(connection)
    assert total == world * (world - 1) // 2, total
    print(f"rank {rank} of {world}: {total}", flush=True)

children = []
for local in range(each):
    child = os.fork()
    if child == 0:
        run(node * each + local)
        os._exit(0)
    children.append(child)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"#;

#[test]
fn a_third_party_image_finds_its_peers() -> Result<()> {
    let cluster = Cluster::start(2)?;
    python(&cluster.nodes, cluster.folder.path())?;
    cluster.install()?;
    cluster.team("others")?;
    cluster.apply(
        "others",
        &json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "program"}, "data": {"sum.py": PROGRAM},
        }),
    )?;
    cluster.apply("others", &json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "sum"},
        "spec": {
            "trainer": {
                "framework": "Torch", "numNodes": 2, "numProcPerNode": 2, "image": IMAGE,
                "command": ["/usr/bin/python3", "/program/sum.py"],
                "resourcesPerNode": {"limits": {"memory": "256Mi"}},
            },
            "failurePolicy": {"maxRestarts": 0},
            "template": {"spec": {
                "securityContext": {"runAsNonRoot": true, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
                "volumes": [{"name": "program", "configMap": {"name": "program"}}],
                "containers": [{
                    "name": "trainer",
                    "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}},
                    "volumeMounts": [{"name": "program", "mountPath": "/program"}],
                }],
            }},
        },
    }))?;
    let job = cluster.wait_job("others", "sum", "over", |job| matches!(stage(job), "Complete" | "Failed"))?;
    ensure!(stage(&job) == "Complete", "{:#}", job["status"]);
    let logs = cluster.sh("switchyard logs sum --namespace others")?;
    for rank in 0..4 {
        ensure!(logs.contains(&format!("rank {rank} of 4: 6")), "{logs}");
    }
    ensure!(
        logs.contains("[node 0] rank 0") && logs.contains("[node 1] rank 2"),
        "ranks are on the wrong nodes: {logs}"
    );
    Ok(())
}

/// Loads an image with this machine's Python onto all nodes.
fn python(nodes: &Nodes, folder: &Path) -> Result<()> {
    let ask = "import sys, sysconfig; print(sys.executable); print(sysconfig.get_paths()['stdlib'])";
    let output = Command::new("python3").args(["-I", "-c", ask]).output().context("cannot start python3")?;
    let words = String::from_utf8(output.stdout)?;
    let (program, library) = words.trim().split_once('\n').context("python3 printed no path")?;
    let mut image = Image { name: IMAGE, command: vec!["/usr/bin/python3".into()], ..Image::default() };
    image.add_program(&PathBuf::from(program).canonicalize()?, "/usr/bin/python3")?;
    image.add_program(Path::new("/bin/busybox"), "/bin/sh")?;
    add(&mut image, Path::new(library))?;
    nodes.import(&image.archive(folder)?)
}

/// Adds all files below a folder at the same paths.
fn add(image: &mut Image<'_>, folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let text = path.display().to_string();
        match path.metadata() {
            Ok(about) if about.is_dir() && !LEFT_OUT.contains(&name) && !name.starts_with("config-") => {
                add(image, &path)?
            }
            Ok(about) if about.is_file() && name.ends_with(".so") => image.add_program(&path, &text)?,
            Ok(about) if about.is_file() => image.files.push((path.clone(), text)),
            _ => {}
        }
    }
    Ok(())
}
