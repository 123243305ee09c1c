//! The GPU of each rank: chosen on the command line, otherwise the set with the fastest ring, as in
//! a cluster.

use crate::cluster::machine::{Machine, Shapes};
use crate::job::{Invalid, ValidJob};
use serde::Serialize;
use std::collections::BTreeSet;
use std::fmt;
use switchyard_core::placement::Request;
use switchyard_core::rates::gigabytes;
use switchyard_core::units::binary;
use switchyard_crds::gpu_topology::{GPUTopology, Gpu, MigMode};
use switchyard_worker_contract::config::{self, EngineConfig};

/// Variable that restricts the GPUs visible to a process. The driver reads it.
pub const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";
const FLAG: &str = "--devices";

/// The GPUs that a run may use.
#[derive(Debug, Clone, Copy, Default)]
pub struct Devices<'a> {
    /// GPU indices, one per rank, in rank order. Empty for the best set.
    pub indexes: &'a [u32],
    /// Value of `CUDA_VISIBLE_DEVICES` in the environment of the command.
    pub visible: Option<&'a str>,
}

/// A chosen GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedGpu {
    /// The rank that uses it.
    pub rank: u32,
    /// The driver's index.
    pub index: u32,
    pub uuid: String,
    /// Product name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Its connection to the rest of the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link: Option<String>,
}

/// `GPU 1: NVIDIA H200, 140 GiB, 18 NVLinks`.
impl fmt::Display for PlannedGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {}: {}", self.index, self.model.as_deref().unwrap_or("unknown model"))?;
        let facts = [self.memory_bytes.map(binary), self.link.clone()];
        facts.iter().flatten().try_for_each(|fact| write!(f, ", {fact}"))
    }
}

fn invalid(got: impl Into<String>, expected: impl Into<String>) -> Invalid {
    Invalid { field: FLAG.to_owned(), got: got.into(), expected: expected.into() }
}

/// The GPUs of a run and the reason for them.
#[derive(Debug, Default)]
pub(super) struct Chosen {
    /// The GPU of each rank. Empty if each process uses the GPU with its local index.
    pub gpus: Vec<PlannedGpu>,
    pub reason: String,
}

/// Chooses the GPU of each rank of `request`, the part of the job on these nodes.
pub(super) fn choose(
    devices: Devices<'_>,
    nodes: &[GPUTopology],
    (job, request, engine): (&ValidJob, &Request, &EngineConfig),
) -> Result<Chosen, Invalid> {
    if devices.indexes.is_empty() {
        return best(devices.visible, nodes, (job, request, engine));
    }
    let gpus = nodes.iter().filter_map(|node| node.status.as_ref()).flat_map(|status| status.gpus.clone());
    let gpus = listed(devices, &gpus.collect::<Vec<_>>(), (job, request, engine))?;
    Ok(Chosen { gpus, reason: FLAG.to_owned() })
}

/// The set with the fastest ring among the whole, healthy and visible GPUs, in the local rank order
/// of a cluster. Leaves the choice to the driver on CPUs, on several nodes, if the report lists no
/// whole GPU, and if the user's `CUDA_VISIBLE_DEVICES` means something else: one GPU for all ranks,
/// or a MIG instance.
fn best(
    visible: Option<&str>,
    nodes: &[GPUTopology],
    (job, request, engine): (&ValidJob, &Request, &EngineConfig),
) -> Result<Chosen, Invalid> {
    let chooses_itself = job.env.iter().any(|(name, _)| name == VISIBLE);
    let ([node], false, config::Device::Cuda) = (nodes, chooses_itself, engine.device) else {
        return Ok(Chosen::default());
    };
    let Some(status) = node.status.as_ref().filter(|status| !status.gpus.is_empty()) else {
        return Ok(Chosen::default());
    };
    let (machine, usable) = usable(visible, node)?;
    let ranks = request.processes_per_node * request.nodes;
    let set = u8::try_from(ranks).ok().and_then(|ranks| machine.shape.best_set(usable, ranks, None));
    let Some(set) = set.filter(|_| ranks > 0) else {
        if usable == 0 || visible.is_some() {
            return Ok(Chosen::default());
        }
        let expected = format!("at most {}, the whole and healthy GPUs of this machine", usable.count_ones());
        return Err(Invalid { field: "spec.trainer.numProcPerNode".to_owned(), got: ranks.to_string(), expected });
    };
    let chosen = machine.shape.by_rail(set).into_iter().map(|gpu| &status.gpus[usize::from(gpu)]);
    let gpus: Vec<PlannedGpu> = (0..).zip(chosen).map(|(rank, gpu)| planned(rank, gpu)).collect();
    let out_of = format!("{ranks} of {} usable GPUs", usable.count_ones());
    let reason = match ranks {
        1 => out_of,
        _ => format!("{out_of}: ring of {} GB/s", gigabytes(machine.shape.ring[set as usize])),
    };
    Ok(Chosen { gpus, reason })
}

/// The values of a machine's GPUs, and those that are whole, healthy and visible.
pub(super) fn usable(visible: Option<&str>, node: &GPUTopology) -> Result<(Machine, u32), Invalid> {
    let field = "report of this machine".to_owned();
    let machine = Shapes::default().machine(node);
    let machine = machine.map_err(|got| Invalid { field, got, expected: "a readable report".to_owned() })?;
    let gpus = node.status.iter().flat_map(|status| &status.gpus).enumerate();
    let seen = gpus.filter(|(_, gpu)| visible.is_none_or(|list| makes_visible(list, &[gpu])));
    let usable = machine.usable & seen.fold(0, |mask, (position, _)| mask | 1 << position);
    Ok((machine, usable))
}

/// UUIDs of the GPUs of each pod, in local rank order: the set with the fastest ring among those
/// that the pods before it leave. `requested`: the number of GPUs of each pod.
///
/// # Errors
/// The first pod that gets no GPUs, and the number of those that are left.
pub(super) fn disjoint_sets(
    machine: &Machine,
    usable: u32,
    requested: &[u32],
) -> Result<Vec<Vec<String>>, (usize, u32)> {
    let mut free = usable;
    let set = |(pod, count): (usize, &u32)| {
        if *count == 0 {
            return Ok(Vec::new());
        }
        let set = u8::try_from(*count).ok().and_then(|count| machine.shape.best_set(free, count, None));
        let set = set.ok_or((pod, free.count_ones()))?;
        free &= !set;
        Ok(machine.shape.by_rail(set).into_iter().map(|gpu| machine.gpus[usize::from(gpu)].uuid.clone()).collect())
    };
    requested.iter().enumerate().map(set).collect()
}

fn listed(
    devices: Devices<'_>,
    gpus: &[Gpu],
    (job, request, engine): (&ValidJob, &Request, &EngineConfig),
) -> Result<Vec<PlannedGpu>, Invalid> {
    let Devices { indexes, visible } = devices;
    let list = indexes.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    if engine.device == config::Device::Cpu {
        return Err(invalid(list, "spec.engine.device Cuda"));
    }
    let ranks = request.processes_per_node * request.nodes;
    if indexes.len() != ranks as usize {
        return Err(invalid(
            list,
            format!("one GPU for each of {ranks} ranks, or trainer.numProcPerNode {}", indexes.len()),
        ));
    }
    let mut seen = BTreeSet::new();
    if let Some(twice) = indexes.iter().find(|index| !seen.insert(**index)) {
        return Err(invalid(format!("{list}: GPU {twice} twice"), "a separate GPU for each rank"));
    }
    let chosen: Vec<&Gpu> = indexes.iter().map(|index| find_gpu(*index, gpus)).collect::<Result<_, _>>()?;
    if let Some(visible) = visible.filter(|visible| !makes_visible(visible, &chosen)) {
        return Err(invalid(list, format!("GPUs that {VISIBLE}={visible} lists, or that variable unset")));
    }
    if let Some((_, value)) = job.env.iter().find(|(name, _)| name == VISIBLE) {
        let expected = format!("no --devices, because spec.trainer.env sets {VISIBLE}={value}");
        return Err(invalid(list, expected));
    }
    Ok((0..).zip(chosen).map(|(rank, gpu)| planned(rank, gpu)).collect())
}

fn find_gpu(index: u32, gpus: &[Gpu]) -> Result<&Gpu, Invalid> {
    let Some(gpu) = gpus.iter().find(|gpu| gpu.index == index) else {
        let known = gpus.iter().map(|gpu| gpu.index.to_string()).collect::<Vec<_>>().join(", ");
        let expected = if gpus.is_empty() { "a machine with GPUs".to_owned() } else { format!("one of {known}") };
        return Err(invalid(format!("GPU {index}"), expected));
    };
    match &gpu.mig {
        Some(mig) if mig.mode == MigMode::Enabled => {
            let parts = mig.instances.len();
            Err(invalid(format!("GPU {index}, which MIG splits into {parts} instances"), "a whole GPU"))
        }
        _ => Ok(gpu),
    }
}

/// Whether a list of indices and UUIDs contains all of these.
fn makes_visible(visible: &str, chosen: &[&Gpu]) -> bool {
    let names: Vec<&str> = visible.split(',').map(str::trim).collect();
    let is_named = |gpu: &Gpu| {
        // The driver accepts a prefix of a UUID.
        let by_name = |name: &&str| name.starts_with("GPU-") && gpu.uuid.starts_with(*name);
        names.iter().any(|name| by_name(name) || *name == gpu.index.to_string())
    };
    chosen.iter().all(|gpu| is_named(gpu))
}

fn planned(rank: u32, gpu: &Gpu) -> PlannedGpu {
    let nvlinks = gpu.nvlinks.as_ref().filter(|links| links.up > 0).map(|links| format!("{} NVLinks", links.up));
    let pcie = gpu.pcie_link.as_ref().and_then(|link| {
        let generation = link.generation.or(link.max_generation)?;
        Some(format!("PCIe {generation} x{}", link.width.or(link.max_width)?))
    });
    PlannedGpu {
        rank,
        index: gpu.index,
        uuid: gpu.uuid.clone(),
        model: gpu.model.clone(),
        memory_bytes: gpu.memory_bytes,
        link: nvlinks.or(pcie),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::tests::job;
    use crate::validate;
    use serde_json::json;
    use switchyard_crds::gpu_topology::{GPUTopologySpec, GPUTopologyStatus, Link, LinkKind, LinkVia};
    use switchyard_crds::gpu_topology::{Mig, NvLinks, PcieLink};

    fn gpu(index: u32) -> Gpu {
        Gpu {
            index,
            uuid: format!("GPU-{index}{index}"),
            model: Some("NVIDIA H200".into()),
            memory_bytes: Some(150_109_814_784),
            ..Gpu::default()
        }
    }

    fn chosen(indexes: &[u32], visible: Option<&str>, env: serde_json::Value) -> Result<Vec<PlannedGpu>, String> {
        let split = Gpu { mig: Some(Mig { mode: MigMode::Enabled, instances: Vec::new() }), ..gpu(2) };
        let linked = Gpu { nvlinks: Some(NvLinks { up: 18, down: Vec::new() }), ..gpu(1) };
        let pcie = PcieLink { generation: Some(5), width: Some(16), ..PcieLink::default() };
        let gpus = [Gpu { pcie_link: Some(pcie), ..gpu(0) }, linked, split];
        let job = job("two", json!({"trainer": {"numProcPerNode": 2, "env": env}, "engine": {"device": "Cuda"}}));
        let valid = validate(&job).unwrap();
        let engine = valid.engine.as_ref().unwrap();
        listed(Devices { indexes, visible }, &gpus, (&valid, &valid.request, engine)).map_err(|fault| fault.to_string())
    }

    #[test]
    fn ranks_get_gpus_in_list_order() {
        for visible in [None, Some("0,1,2"), Some("GPU-11,GPU-0")] {
            let gpus = chosen(&[1, 0], visible, json!([])).unwrap();
            let expected: Vec<String> = gpus.iter().map(|gpu| format!("{} {gpu}", gpu.rank)).collect();
            assert_eq!(
                expected,
                ["0 GPU 1: NVIDIA H200, 140 GiB, 18 NVLinks", "1 GPU 0: NVIDIA H200, 140 GiB, PCIe 5 x16"]
            );
        }
    }

    #[test]
    fn an_impossible_device_choice_is_rejected_with_the_reason() {
        for (indexes, visible, expected) in [
            (&[0][..], None, "--devices: got 0; expected one GPU for each of 2 ranks, or trainer.numProcPerNode 1"),
            (&[0, 0], None, "--devices: got 0,0: GPU 0 twice; expected a separate GPU for each rank"),
            (&[0, 7], None, "--devices: got GPU 7; expected one of 0, 1, 2"),
            (&[0, 2], None, "--devices: got GPU 2, which MIG splits into 0 instances; expected a whole GPU"),
            (
                &[0, 1],
                Some("0,3"),
                "--devices: got 0,1; expected GPUs that CUDA_VISIBLE_DEVICES=0,3 lists, or that variable unset",
            ),
        ] {
            assert_eq!(chosen(indexes, visible, json!([])), Err(expected.to_owned()));
        }
        let env = json!([{"name": VISIBLE, "value": "5"}]);
        let expected =
            "--devices: got 0,1; expected no --devices, because spec.trainer.env sets CUDA_VISIBLE_DEVICES=5";
        assert_eq!(chosen(&[0, 1], None, env), Err(expected.to_owned()));
    }

    /// Four GPUs; NVLink joins 0 with 3 and 1 with 2, with 100 GB/s in theory.
    fn pairs(change: impl FnOnce(&mut GPUTopologyStatus)) -> GPUTopology {
        let link = |a: u32, b: u32| Link {
            a: gpu(a).uuid,
            b: gpu(b).uuid,
            kind: LinkKind::NVLink,
            count: Some(4),
            via: Some(LinkVia::Direct),
            megabytes_per_second: Some(100_000),
            path_class: None,
        };
        let mut report = GPUTopology::new("box", GPUTopologySpec {});
        let gpus = (0..4).map(gpu).collect();
        let mut status =
            GPUTopologyStatus { gpus, links: vec![link(0, 3), link(1, 2)], ..GPUTopologyStatus::default() };
        change(&mut status);
        report.status = Some(status);
        report
    }

    fn placed(ranks: u32, visible: Option<&str>, env: serde_json::Value, node: &GPUTopology) -> Result<String, String> {
        let job = job("two", json!({"trainer": {"numProcPerNode": ranks, "env": env}, "engine": {"device": "Cuda"}}));
        let valid = validate(&job).unwrap();
        let engine = valid.engine.as_ref().unwrap();
        let devices = Devices { indexes: &[], visible };
        let chosen = choose(devices, std::slice::from_ref(node), (&valid, &valid.request, engine))
            .map_err(|fault| fault.to_string())?;
        let indexes: Vec<String> = chosen.gpus.iter().map(|gpu| gpu.index.to_string()).collect();
        Ok(format!("{} ({})", indexes.join(","), chosen.reason))
    }

    #[test]
    fn without_a_list_ranks_get_the_set_with_the_fastest_ring() {
        let whole = pairs(|_| {});
        assert_eq!(placed(2, None, json!([]), &whole).unwrap(), "1,2 (2 of 4 usable GPUs: ring of 82.4 GB/s)");
        assert_eq!(placed(2, Some("0,2,3"), json!([]), &whole).unwrap(), "0,3 (2 of 3 usable GPUs: ring of 82.4 GB/s)");
        assert_eq!(placed(1, Some("GPU-33"), json!([]), &whole).unwrap(), "3 (1 of 1 usable GPUs)");
        let split = pairs(|status| {
            status.gpus[1].mig = Some(Mig { mode: MigMode::Enabled, instances: Vec::new() });
        });
        assert_eq!(placed(2, None, json!([]), &split).unwrap(), "0,3 (2 of 3 usable GPUs: ring of 82.4 GB/s)");
        assert_eq!(
            placed(4, None, json!([]), &split).unwrap_err(),
            "spec.trainer.numProcPerNode: got 4; expected at most 3, the whole and healthy GPUs of this machine"
        );
    }

    #[test]
    fn the_driver_chooses_where_the_user_has_chosen() {
        let whole = pairs(|_| {});
        let env = json!([{"name": VISIBLE, "value": "2"}]);
        assert_eq!(placed(2, None, env, &whole).unwrap(), " ()");
        // Ranks that share a GPU, and a MIG instance.
        for visible in ["0", "MIG-1234"] {
            assert_eq!(placed(2, Some(visible), json!([]), &whole).unwrap(), " ()");
        }
        assert_eq!(placed(2, None, json!([]), &pairs(|status| status.gpus.clear())).unwrap(), " ()");
    }
}
