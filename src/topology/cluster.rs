//! Converts `GPUTopology` reports to a [`Cluster`]: names become positions, CPU lists become cores.

use switchyard_core::model::{Cluster, Core, Node, NumaNode};
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_worker_contract::{CpuList, CpuListError};

/// A cluster with the names of its nodes, by position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedCluster {
    /// Input for placement.
    pub cluster: Cluster,
    /// Name of each node of `cluster.nodes`.
    pub names: Vec<String>,
}

/// Why a report is unusable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// A CPU list is invalid.
    #[error("GPUTopology {node}: {field}: {source}")]
    CpuList { node: String, field: &'static str, source: CpuListError },
    /// A report has no usable CPU.
    #[error("GPUTopology {node}: status.cpus names no usable CPU: expected status.cpus.usable or status.cpus.online")]
    NoCpus { node: String },
}

/// Builds the cluster from these reports, in order.
///
/// # Errors
/// The first inconsistent report.
pub fn build<'a>(reports: impl IntoIterator<Item = &'a GPUTopology>) -> Result<NamedCluster, BuildError> {
    let mut named = NamedCluster { cluster: Cluster::default(), names: Vec::new() };
    for report in reports {
        let name = report.metadata.name.clone().unwrap_or_default();
        named.cluster.nodes.push(node(&name, report)?);
        named.names.push(name);
    }
    Ok(named)
}

fn node(name: &str, report: &GPUTopology) -> Result<Node, BuildError> {
    let status = report.status.clone().unwrap_or_default();
    let cpus = status.cpus.unwrap_or_default();
    let parse = |field: &'static str, text: &str| {
        text.parse::<CpuList>().map_err(|source| BuildError::CpuList { node: name.to_string(), field, source })
    };
    let usable = match (&cpus.usable, &cpus.online) {
        (Some(usable), _) => parse("status.cpus.usable", usable)?,
        (None, Some(online)) => parse("status.cpus.online", online)?,
        (None, None) => CpuList::default(),
    };
    if usable.is_empty() {
        return Err(BuildError::NoCpus { node: name.to_string() });
    }
    let mut cores: Vec<Core> = Vec::new();
    for siblings in &cpus.siblings {
        let own = parse("status.cpus.siblings", siblings)?.intersection(&usable);
        if !own.is_empty() {
            cores.push(Core { cpus: own.iter().collect() });
        }
    }
    // A CPU with unknown siblings counts as a core of its own.
    let grouped = CpuList::new(cores.iter().flat_map(|core| core.cpus.iter().copied()));
    cores.extend(usable.iter().filter(|cpu| !grouped.contains(*cpu)).map(|cpu| Core { cpus: vec![cpu] }));
    cores.sort();

    let mut numa_nodes = Vec::new();
    let mut placed = CpuList::default();
    for numa in &status.numa_nodes {
        let list = parse("status.numaNodes.cpus", numa.cpus.as_deref().unwrap_or_default())?;
        let (own, rest): (Vec<Core>, Vec<Core>) = cores.into_iter().partition(|core| list.contains(core.cpus[0]));
        cores = rest;
        placed = CpuList::new(placed.iter().chain(list.iter()));
        if !own.is_empty() {
            numa_nodes.push((NumaNode { id: numa.id, cores: own, distances: Vec::new() }, numa.distances.clone()));
        }
    }
    // Distances cover every NUMA node of the machine; keep those to nodes with usable cores.
    let kept: Vec<usize> = numa_nodes
        .iter()
        .filter_map(|(node, _)| status.numa_nodes.iter().position(|numa| numa.id == node.id))
        .collect();
    let mut numa_nodes: Vec<NumaNode> = numa_nodes
        .into_iter()
        .map(|(node, distances)| NumaNode {
            distances: kept.iter().filter_map(|position| distances.get(*position).copied()).collect(),
            ..node
        })
        .collect();
    if !cores.is_empty() {
        // Without NUMA information (a container without /sys/devices/system/node), all cores share
        // one memory.
        match numa_nodes.first_mut() {
            Some(first) => first.cores.extend(cores),
            None => numa_nodes.push(NumaNode { id: 0, cores, distances: Vec::new() }),
        }
    }
    Ok(Node { numa_nodes, quota_millicores: cpus.quota_millicores, memory_bytes: status.memory_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use switchyard_crds::gpu_topology::{Cpus, GPUTopologySpec, GPUTopologyStatus, NumaNode as Report};

    fn report(usable: &str, siblings: &[&str], numa: &[(u32, &str, &[u32])]) -> GPUTopology {
        let mut report = GPUTopology::new("box", GPUTopologySpec {});
        report.status = Some(GPUTopologyStatus {
            cpus: Some(Cpus {
                usable: Some(usable.into()),
                siblings: siblings.iter().map(|list| (*list).into()).collect(),
                ..Cpus::default()
            }),
            numa_nodes: numa
                .iter()
                .map(|(id, cpus, distances)| Report {
                    id: *id,
                    cpus: Some((*cpus).into()),
                    distances: distances.to_vec(),
                    ..Report::default()
                })
                .collect(),
            ..GPUTopologyStatus::default()
        });
        report
    }

    #[test]
    fn cores_are_grouped_by_numa_node_and_siblings() {
        let named = build([&report(
            "0-7",
            &["0,4", "1,5", "2,6", "3,7"],
            &[(0, "0-1,4-5", &[10, 21]), (1, "2-3,6-7", &[21, 10])],
        )])
        .unwrap();
        let node = &named.cluster.nodes[0];
        assert_eq!(node.numa_nodes.len(), 2);
        assert_eq!(node.numa_nodes[1].cores, [Core { cpus: vec![2, 6] }, Core { cpus: vec![3, 7] }]);
        assert_eq!(node.numa_nodes[1].distances, [21, 10]);
        assert_eq!(named.names, ["box"]);
    }

    #[test]
    fn unusable_cpus_and_their_numa_nodes_are_ignored() {
        let named = build([&report(
            "2,6",
            &["0,4", "1,5", "2,6", "3,7"],
            &[(0, "0-1,4-5", &[10, 21]), (1, "2-3,6-7", &[21, 10])],
        )])
        .unwrap();
        let node = &named.cluster.nodes[0];
        assert_eq!(node.numa_nodes.len(), 1);
        assert_eq!((node.numa_nodes[0].id, node.cores()), (1, 1));
        assert_eq!(node.numa_nodes[0].distances, [10]);
    }

    #[test]
    fn without_topology_every_cpu_is_a_core_of_one_node() {
        let named = build([&report("0-2", &[], &[])]).unwrap();
        assert_eq!(named.cluster.nodes[0].numa_nodes[0].cores.len(), 3);
    }

    #[test]
    fn unusable_reports_are_named() {
        assert!(build([&report("", &[], &[])]).unwrap_err().to_string().contains("GPUTopology box"));
        assert!(build([&report("0-x", &[], &[])]).unwrap_err().to_string().contains("status.cpus.usable"));
    }
}
