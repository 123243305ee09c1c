//! Memory: shared between the processes of a node, lockable, and the memory limit.

use super::fault::{Fault, Outcome, each};
use super::input::CheckInput;
use k8s_openapi::api::core::v1::{Container, EmptyDirVolumeSource};
use switchyard_core::quantity::parse_quantity;
use switchyard_core::units::binary;
use switchyard_crds::PreflightSeverity;

/// Mount through which processes exchange data in host memory.
const SHM: &str = "/dev/shm";
/// Size that container runtimes mount there by default, in bytes.
const DEFAULT: u64 = 64 << 20;
/// Sufficient size per GPU, in bytes. This is our estimate: NCCL needs 9.6 MB per connection, and
/// data loaders need more.
const PER_GPU: u64 = 1 << 30;
/// Host memory of a process with CUDA, NCCL and a framework, without data, in bytes. This is our
/// rough lower bound.
const PER_PROCESS: u64 = 2 << 30;

/// What is mounted at `/dev/shm`.
enum Shared<'a> {
    /// Nothing, so the runtime's default applies.
    Runtime,
    /// A volume in memory or on disk.
    Volume(&'a EmptyDirVolumeSource),
    /// A mount of unknown size.
    Other,
}

fn shared_memory<'a>(input: &CheckInput<'a>) -> Shared<'a> {
    let Some(mount) = input.mount(SHM) else { return Shared::Runtime };
    let volumes = input.gang.pod.volumes.iter().flatten();
    let volume = volumes.into_iter().find(|volume| volume.name == mount.name);
    match volume.and_then(|volume| volume.empty_dir.as_ref()) {
        Some(empty) => Shared::Volume(empty),
        None => Shared::Other,
    }
}

fn bytes(quantity: Option<&str>) -> Option<u64> {
    quantity.and_then(parse_quantity).map(|bytes| bytes as u64)
}

fn size_of(empty: &EmptyDirVolumeSource) -> Option<u64> {
    bytes(empty.size_limit.as_ref().map(|limit| limit.0.as_str()))
}

/// Check 7: size of `/dev/shm`.
pub(super) fn shared(input: &CheckInput<'_>) -> Outcome {
    let gang = input.gang;
    if gang.gpus == 0 {
        return Err("no GPUs: NCCL is not used, and what a program's data loaders share is not known".into());
    }
    if gang.gpus < 2 && gang.processes < 2 {
        return Err("one process with one GPU on each node: nothing is shared".into());
    }
    if gang.pod.host_ipc == Some(true) {
        return Err("hostIPC: the pods use /dev/shm of the node".into());
    }
    let wanted = PER_GPU * u64::from(gang.gpus.max(gang.processes));
    let fix = format!(
        "mount an emptyDir with medium: Memory and sizeLimit: {}Gi at /dev/shm, or leave that mount to Switchyard",
        wanted >> 30
    );
    let too_small = |severity: PreflightSeverity, size: u64, from: &str| {
        Fault::of(severity, format!("/dev/shm has {}", binary(size)))
            .effect("NCCL stops with \"failed to extend /dev/shm\", or data loaders end with \"bus error\"")
            .evidence(format!("{from}; {} are enough for {} GPUs", binary(wanted), gang.gpus))
            .fix(fix.clone())
    };
    let severity = |size: u64| if size <= DEFAULT { PreflightSeverity::Block } else { PreflightSeverity::Warn };
    match shared_memory(input) {
        Shared::Other => Err("what is mounted at /dev/shm has no size that is known here".into()),
        Shared::Runtime => each(gang, |_, _, facts| {
            let size = facts.host.as_ref().and_then(|host| host.shared_memory_bytes);
            let size = size.ok_or("host.sharedMemoryBytes is not reported")?;
            let from = "nothing is mounted there; host.sharedMemoryBytes of the GPUTopology";
            Ok((size < wanted).then(|| too_small(severity(size), size, from)).into_iter().collect())
        }),
        Shared::Volume(empty) => {
            let is_memory = empty.medium.as_deref() == Some("Memory");
            let mut faults = Vec::new();
            match size_of(empty) {
                Some(size) if size < wanted => {
                    faults.push(too_small(severity(size), size, "sizeLimit of the volume at /dev/shm"));
                }
                Some(size) if is_memory && bytes(input.limit("memory")).is_some_and(|limit| size > limit) => {
                    let limit = input.limit("memory").unwrap_or_default();
                    faults.push(
                        Fault::warn(format!(
                            "/dev/shm may have {}, and the container {limit} of memory in all",
                            binary(size)
                        ))
                        .effect("what is in /dev/shm counts: the container is killed before it is full")
                        .evidence("sizeLimit of the volume at /dev/shm; memory of the trainer's limits")
                        .fix("raise the memory limit, or lower sizeLimit"),
                    );
                }
                _ if !is_memory => faults.push(
                    Fault::warn("/dev/shm is on a disk")
                        .effect("what processes exchange is written to the node's disk")
                        .evidence("medium of the volume at /dev/shm")
                        .fix(fix.clone()),
                ),
                _ => {}
            }
            Ok(faults.into_iter().map(Fault::of_job).collect())
        }
    }
}

/// Check 8: memory that can be locked, which RDMA requires.
pub(super) fn locked(input: &CheckInput<'_>) -> Outcome {
    input.uses_rdma()?;
    if input.trainer().is_some_and(|trainer| may_lock(input, trainer)) {
        return Ok(Vec::new());
    }
    each(input.gang, |_, _, facts| {
        let limit = facts.host.as_ref().and_then(|host| host.locked_memory_limit.as_deref());
        let limit = limit.ok_or("host.lockedMemoryLimit is not reported")?;
        let Ok(bytes) = limit.parse::<u64>() else { return Ok(Vec::new()) };
        Ok(vec![
            Fault::block(format!("containers may lock {} of memory; RDMA needs all of it", binary(bytes)))
                .effect("ibv_reg_mr fails with \"Cannot allocate memory\", and NCCL ends")
                .evidence("host.lockedMemoryLimit of the GPUTopology, the container runtime's default; no IPC_LOCK as root")
                .fix("set LimitMEMLOCK=infinity in the service of the container runtime (systemctl edit containerd) and restart it"),
        ])
    })
}

/// The limit does not apply to root with the capability. For other users the capability has no
/// effect.
fn may_lock(input: &CheckInput<'_>, trainer: &Container) -> bool {
    let context = trainer.security_context.as_ref();
    let of_pod = input.gang.pod.security_context.as_ref();
    let user = context.and_then(|context| context.run_as_user).or(of_pod.and_then(|pod| pod.run_as_user));
    let added = context.and_then(|context| context.capabilities.as_ref()?.add.as_ref());
    let has_capability = added.into_iter().flatten().any(|name| name == "IPC_LOCK" || name == "ALL");
    let is_privileged = context.is_some_and(|context| context.privileged == Some(true));
    user == Some(0) && (has_capability || is_privileged)
}

/// Check 27: memory limit. A container that runs out of memory is killed in the middle of a
/// collective, and the other ranks report a network error. Before the start only the arithmetic can
/// be checked; a later kill is reported as reason `OOMKilled` of the attempt.
pub(super) fn limit(input: &CheckInput<'_>) -> Outcome {
    if input.gang.gpus == 0 {
        return Err("no GPUs: how much a process needs is not known".into());
    }
    let Some(limit) = bytes(input.limit("memory")) else {
        return Err("no memory limit; an out-of-memory kill is reported when it happens (OOMKilled)".into());
    };
    let shared = match shared_memory(input) {
        Shared::Volume(empty) if empty.medium.as_deref() == Some("Memory") => size_of(empty).unwrap_or(0),
        _ => 0,
    };
    let processes = u64::from(input.gang.processes);
    let least = shared + processes * PER_PROCESS;
    // Check 7 reports a volume larger than the limit.
    if least <= limit || shared > limit {
        return Ok(Vec::new());
    }
    let fault = Fault::warn(format!(
        "a memory limit of {} for {processes} processes with {} of /dev/shm",
        binary(limit),
        binary(shared)
    ))
    .effect("a container that is killed for memory shows as an error of NCCL on all other ranks")
    .evidence(format!(
        "memory of the trainer's limits; {} for each process is our own rough lower bound",
        binary(PER_PROCESS)
    ))
    .fix(format!("raise the memory limit to {}Gi or more", least.div_ceil(1 << 30)));
    Ok(vec![fault.of_job()])
}
