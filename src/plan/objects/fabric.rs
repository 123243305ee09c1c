//! Pod additions for the fabric: resources, shared memory, the network interface, and the node's
//! NCCL file.

use super::builder::{PodBuilder, add_volumes, from_annotation, mount, mounts};
use super::{metadata, object};
use crate::job::{ValidJob, trainer_mut};
use k8s_openapi::api::core::v1::{
    ConfigMap, ConfigMapVolumeSource, Container, EmptyDirVolumeSource, EnvVar, KeyToPath, PodSpec,
    ResourceRequirements, Volume,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::json;
use std::collections::BTreeMap;
use switchyard_crds::{Framework, TrainJob, labels};
use switchyard_fabric::profile::{self, Profile};
use switchyard_fabric::{self as fabric, CONF_DIR, CONF_FILE, CONF_PATH, MERGE_SCRIPT, STAGING_DIR};

/// Volume of the NCCL file as the container sees it, and name of the init container that writes it.
const FABRIC: &str = "switchyard-fabric";
/// Volume of our part of that file.
const FABRIC_PLAN: &str = "switchyard-fabric-plan";
/// Volume of `/dev/shm`.
const SHARED_MEMORY: &str = "switchyard-shm";
/// Mount path of the shared memory through which processes exchange data.
const SHM: &str = "/dev/shm";
/// Name of the NCCL file in its volumes.
const CONF: &str = "nccl.conf";
/// Nodes per ConfigMap. A ConfigMap holds 1 MiB at most, and the file of a node has up to 3 KiB.
const CONFIG_NODES: u32 = 256;
/// Name of the file with the reasons, which the init container prints to its log.
const REASONS: &str = "reasons.txt";

/// Adds everything the fabric needs.
pub(super) fn attach(spec: &mut PodSpec, builder: &PodBuilder<'_>) {
    let job = builder.pod.job;
    let framework = job.spec.trainer.framework;
    let uses_host_network = spec.host_network == Some(true);
    if uses_host_network {
        // Otherwise cluster names would be looked up at the node's own resolver.
        spec.dns_policy.get_or_insert_with(|| "ClusterFirstWithHostNet".into());
    }
    let count = builder.pod.requested().gpus;
    let is_own = framework == Framework::Switchyard;
    if is_own && count == 0 {
        return;
    }
    let profile = profile(builder);
    let several = builder.pod.nodes() > 1;
    let (position, members) = builder.pod.collective();
    let mut volumes = Vec::new();
    let Some(trainer) = trainer_mut(spec) else { return };
    if several {
        for (name, value) in fabric::interfaces(framework, uses_host_network, profile) {
            let entry = match value {
                Some(value) => EnvVar { name: name.into(), value: Some(value), value_from: None },
                None => from_annotation(name, labels::SOCKET_INTERFACE),
            };
            set_unless_set(trainer, entry);
        }
    }
    if count > 1 && !mounts(trainer, SHM) {
        let limits = trainer.resources.as_ref().and_then(|resources| resources.limits.as_ref());
        let size = fabric::shared_memory(profile, limits.and_then(|limits| limits.get("memory")));
        let memory = EmptyDirVolumeSource { medium: Some("Memory".into()), size_limit: Some(size) };
        volumes.push(Volume { name: SHARED_MEMORY.into(), empty_dir: Some(memory), ..Volume::default() });
        mount(trainer, SHARED_MEMORY, SHM, false);
    }
    if members > 1 && count > 0 {
        set_unless_set(trainer, EnvVar { name: CONF_FILE.into(), value: Some(CONF_PATH.into()), value_from: None });
        if is_own {
            // The worker image has no NCCL file of its own to merge, and no shell to do it.
            mount(trainer, FABRIC_PLAN, CONF_DIR, true);
        } else {
            mount(trainer, FABRIC, CONF_DIR, true);
            let mut writer = Container {
                name: FABRIC.into(),
                image: trainer.image.clone(),
                image_pull_policy: trainer.image_pull_policy.clone(),
                command: Some(vec!["/bin/sh".into(), "-c".into(), MERGE_SCRIPT.into()]),
                security_context: trainer.security_context.clone(),
                resources: Some(cpu_and_memory(trainer.resources.as_ref())),
                ..Container::default()
            };
            mount(&mut writer, FABRIC, CONF_DIR, false);
            mount(&mut writer, FABRIC_PLAN, STAGING_DIR, true);
            spec.init_containers.get_or_insert_default().push(writer);
            let empty = Some(EmptyDirVolumeSource::default());
            volumes.push(Volume { name: FABRIC.into(), empty_dir: empty, ..Volume::default() });
        }
        let item = |key: String, path: &str| KeyToPath { key, path: path.into(), mode: None };
        let plan = ConfigMapVolumeSource {
            name: config_name(builder.pod.valid, builder.pod.attempt, position / CONFIG_NODES),
            items: Some(vec![item(key(position), CONF), item(REASONS.into(), REASONS)]),
            ..ConfigMapVolumeSource::default()
        };
        volumes.push(Volume { name: FABRIC_PLAN.into(), config_map: Some(plan), ..Volume::default() });
    }
    add_volumes(spec, volumes);
}

/// The administrator's profile, else the built-in profile that was found when the attempt started.
fn profile<'a>(builder: &PodBuilder<'a>) -> Option<&'a Profile> {
    let found = || profile::find_pack(builder.pod.job.status.as_ref()?.fabric.as_ref()?.profile.as_deref()?);
    builder.defaults.fabric_profile.as_ref().or_else(found)
}

/// The secondary networks that a gang's pods join. `None` if there are none, or if the pods use the
/// host network.
pub(super) fn networks<'a>(spec: &PodSpec, builder: &PodBuilder<'a>) -> Option<&'a str> {
    let joins = builder.pod.collective().1 > 1 && builder.pod.requested().gpus > 0 && spec.host_network != Some(true);
    profile(builder).filter(|_| joins)?.networks.as_deref()
}

/// Sets a variable unless the user has set it.
fn set_unless_set(trainer: &mut Container, entry: EnvVar) {
    let env = trainer.env.get_or_insert_default();
    if !env.iter().any(|own| own.name == entry.name) {
        env.push(entry);
    }
}

/// Resources of the init container: the trainer's cores and memory. The trainer starts after it, so
/// this adds nothing to the pod's requests and keeps its QoS class.
fn cpu_and_memory(trainer: Option<&ResourceRequirements>) -> ResourceRequirements {
    let part = |amounts: Option<&BTreeMap<String, Quantity>>| {
        let mut part = amounts?.clone();
        part.retain(|name, _| ["cpu", "memory"].contains(&name.as_str()));
        Some(part)
    };
    let (limits, requests) =
        trainer.map_or((None, None), |all| (part(all.limits.as_ref()), part(all.requests.as_ref())));
    ResourceRequirements { limits, requests, claims: None }
}

/// Name of the ConfigMap with this number, which contains the files of some nodes.
fn config_name(valid: &ValidJob, attempt: u32, number: u32) -> String {
    let name = format!("{}-fabric", super::config_name(valid, attempt));
    if number == 0 { name } else { format!("{name}-{number}") }
}

/// Key of a node's file.
fn key(rank: u32) -> String {
    format!("nccl-{rank}.conf")
}

/// NCCL files for the nodes of a placed attempt, `CONFIG_NODES` nodes per ConfigMap. Empty if the
/// job needs none.
pub fn fabric_configs(job: &TrainJob, valid: &ValidJob, attempt: u32) -> Vec<ConfigMap> {
    let members = valid.collective().map_or(valid, |role| &role.valid);
    let is_alone = !valid.roles.is_empty() && valid.collective().is_none();
    if is_alone || members.pod.gpus == 0 || members.request.nodes < 2 {
        return Vec::new();
    }
    // A job placed by an older version has no decisions: its files exist, but are empty.
    let decisions =
        job.status.as_ref().and_then(|status| status.fabric.as_ref()).map(|fabric| fabric.decisions.as_slice());
    let decisions = decisions.unwrap_or_default();
    let config = |number: u32| {
        let first = number * CONFIG_NODES;
        let nodes = first..members.request.nodes.min(first + CONFIG_NODES);
        let files = nodes.map(|rank| (key(rank), fabric::conf(decisions, rank)));
        let reasons = (REASONS.to_string(), fabric::reasons(decisions));
        let data: BTreeMap<String, String> = files.chain([reasons]).collect();
        let mut metadata = metadata(job, config_name(valid, attempt, number));
        metadata.labels.get_or_insert_default().insert(labels::ATTEMPT.into(), attempt.to_string());
        object(metadata, json!({"immutable": true, "data": data}))
    };
    (0..members.request.nodes.div_ceil(CONFIG_NODES)).map(config).collect()
}
