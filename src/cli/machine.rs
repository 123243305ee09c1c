//! Finds the machine named on the command line: this one, one described by a file, or a cluster
//! node.

use crate::args::ClusterArgs;
use crate::failure::Failure;
use crate::{input, snapshot};
use jiff::Timestamp;
use serde::Deserialize;
use std::path::Path;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_crds::labels::API_VERSION;
use switchyard_node_agent::{Roots, describe};

/// This machine, described as a node agent would.
pub(super) fn this_machine() -> Result<GPUTopology, Failure> {
    describe(&Roots::local(node_name()), Timestamp::now())
        .map_err(|error| Failure::unexpected(format!("cannot describe this machine: {error}")))
}

/// The host name as a node name, derived as by the kubelet: lower case, without characters that the
/// API rejects.
fn node_name() -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().to_lowercase();
    let name: String = host
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || c == '-' || c == '.' { c } else { '-' })
        .take(253)
        .collect();
    let name = name.trim_matches(['-', '.']);
    if name.is_empty() { "localhost".to_string() } else { name.to_string() }
}

pub(super) fn read_file(path: &Path) -> Result<GPUTopology, Failure> {
    let name = input::name(path);
    let text = input::read_object(path, "GPUTopology")?;
    let wrong = |error: serde_saphyr::Error| Failure::usage(format!("{name} is not a GPUTopology\n{error}"));
    let head: serde_json::Value = serde_saphyr::from_str(&text).map_err(wrong)?;
    for (field, expected) in [("apiVersion", API_VERSION), ("kind", "GPUTopology")] {
        let got = head.get(field).and_then(serde_json::Value::as_str);
        if got != Some(expected) {
            let got = got.map_or("nothing".to_string(), |got| format!("`{got}`"));
            return Err(Failure::usage(format!(
                "{name} is not a GPUTopology: {field}: got {got}; expected `{expected}`"
            )));
        }
    }
    let topology: GPUTopology = serde_saphyr::from_str(&text).map_err(wrong)?;
    if topology.status.is_none() {
        return Err(Failure::usage(format!("{name}: status: got nothing; expected the description of a machine")));
    }
    Ok(topology)
}

/// The requested machine: this one, one from a file, or a cluster node.
pub(super) fn find(target: Option<&str>, source: &ClusterArgs) -> Result<GPUTopology, Failure> {
    let names_a_cluster = source.snapshot.is_some() || source.kubeconfig.is_some() || source.context.is_some();
    match target {
        None if names_a_cluster => Err(Failure::usage("got a cluster but no node of it; expected NODE or --cluster")),
        None => this_machine(),
        Some(target) if is_file(target) => read_file(Path::new(target)).map_err(|error| {
            let why = if Path::new(target).exists() { "there is one of that name" } else { "by its name" };
            Failure::usage(format!("{error}\n`{target}` was taken for a file, not for a node: {why}"))
        }),
        Some(node) => reported_by(source, node),
    }
}

pub(super) fn is_file(target: &str) -> bool {
    let has_ending = [".yaml", ".yml", ".json"].iter().any(|ending| target.ends_with(ending));
    target.contains('/') || has_ending || Path::new(target).exists()
}

/// The report of a cluster node.
fn reported_by(source: &ClusterArgs, node: &str) -> Result<GPUTopology, Failure> {
    let also = |error: &str| format!("{error}\n`{node}` was taken for a node: there is no file of that name");
    let (items, cluster) = match &source.snapshot {
        Some(path) => {
            let file = snapshot::read_file(path)?;
            (file.items, input::name(path))
        }
        None => {
            let items = snapshot::report(source, node)
                .map_err(|Failure { message, exit }| Failure::new(also(&message), exit))?;
            (items, "the cluster".to_string())
        }
    };
    let found = in_snapshot(&items, node)?;
    found.ok_or_else(|| Failure::usage(also(&format!("no GPUTopology {node} in {cluster}"))))
}

fn in_snapshot(items: &[serde_json::Value], node: &str) -> Result<Option<GPUTopology>, Failure> {
    let is_it = |item: &&serde_json::Value| {
        item["kind"] == "GPUTopology" && item.pointer("/metadata/name").is_some_and(|name| name == node)
    };
    let report = items.iter().find(is_it).map(GPUTopology::deserialize);
    report.transpose().map_err(|error| Failure::usage(format!("GPUTopology {node}: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_recognised() {
        for file in ["./import", "gpu-07.yaml", "gpu-07.json", "Cargo.toml"] {
            assert!(is_file(file), "{file}");
        }
        for node in ["gpu-07", "ip-10-0-0-1.ec2.internal"] {
            assert!(!is_file(node), "{node}");
        }
    }
}
