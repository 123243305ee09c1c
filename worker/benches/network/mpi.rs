//! Open MPI's all-reduce over TCP, started by `mpirun` across the hosts.

use super::Outcome;
use super::hosts::{Hosts, wait_all};
use super::links::parse;
use super::role::Times;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;

/// Takes the place of ssh: runs a daemon in the namespace of the host, under a name of its own.
fn agent(hosts: &Hosts) -> String {
    let case = |host| format!("{}) namespace={}; name=host-{host};;\n", Hosts::address(host), hosts.namespace(host));
    let cases: String = (0..hosts.len()).map(case).collect();
    format!(
        "#!/bin/sh\nwhile [ \"${{1#-}}\" != \"$1\" ]; do shift; done\ncase $1 in\n{cases}esac\nshift\n\
         exec nsenter --net=$namespace -- unshare --uts sh -c \"hostname $name; $*\"\n"
    )
}

/// Seconds of each call, for each size.
pub fn all_reduce(hosts: &Hosts, python: &Path, sizes: &[(usize, usize)]) -> Outcome<Vec<Times>> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("agent");
    std::fs::write(&path, agent(hosts))?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/mpi_network.py");
    let names: Vec<String> = (0..hosts.len()).map(|host| format!("{}:1", Hosts::address(host))).collect();
    let mpirun = python.with_file_name("mpirun");
    let mut command = hosts.command(0, mpirun.to_str().ok_or("the path of mpirun is not UTF-8")?);
    command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--map-by", "node"]);
    command.args(["--host", &names.join(",")]).arg("--prtemca").arg("plm_ssh_agent").arg(&path);
    command.args([
        "--prtemca",
        "prte_if_include",
        "eth0",
        "--mca",
        "btl",
        "self,tcp",
        "--mca",
        "btl_tcp_if_include",
        "eth0",
    ]);
    let cores: Vec<String> = hosts.cores.iter().map(usize::to_string).collect();
    command.env("NETWORK_CORES", cores.join(",")).args(["-x", "NETWORK_CORES"]);
    command.args(["--mca", "pml", "ob1"]).arg(python).args([script, &serde_json::to_string(sizes)?]);
    parse(&wait_all(vec![command.stdout(Stdio::piped()).spawn()?])?)
}
