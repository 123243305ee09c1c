//! The pod of one node: the user's template merged with Switchyard's additions.

use super::builder::{PodBuilder, add_volumes, from_annotation, mount, mounts};
use super::{Defaults, claim, config_name, fabric, job_labels, key_name, metadata};
use crate::eligible::NodeRules;
use crate::frameworks;
use crate::job::{EnvEntry, GangPod, ValidJob, identity, set_devices, trainer, trainer_mut};
use crate::kueue;
use k8s_openapi::api::core::v1::{
    Capabilities, ConfigMapVolumeSource, Container, ContainerPort, EmptyDirVolumeSource, EnvVar, LocalObjectReference,
    Pod, PodSchedulingGate, PodSecurityContext, PodSpec, SeccompProfile, SecretVolumeSource, SecurityContext,
    Toleration, Volume,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use switchyard_crds::names::TRAINER;
use switchyard_crds::{Checkpoint, Framework, PlacedNode, TrainJob, labels};
use switchyard_worker_contract::{env, pod as paths};

/// Volume of the engine's configuration.
pub(super) const CONFIG: &str = "switchyard-config";
/// Volume of the job's key.
pub(super) const KEY: &str = "switchyard-key";
/// Volume for the run's output. A user's volume of this name replaces ours.
pub(super) const RUN: &str = "switchyard-run";
/// User and group of the worker image.
const WORKER_UID: i64 = 65532;
/// Readable by owner and group: a Secret's files belong to root, and the worker is in the group.
const KEY_MODE: i32 = 0o440;
/// Annotation with a pod's secondary networks, read by Multus.
const NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";
/// Default time between SIGTERM and SIGKILL.
const GRACE_SECONDS: i64 = env::DEFAULT_GRACE_SECONDS as i64;
/// Taints of a node whose kubelet reports NotReady, or has stopped reporting.
const UNREACHABLE_TAINTS: [&str; 2] = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"];
const NO_EXECUTE: &str = "NoExecute";

/// The gated pod of this node rank in an attempt.
pub fn pod(job: &TrainJob, valid: &ValidJob, defaults: &Defaults, attempt: u32, node_rank: u32) -> Pod {
    let (gang_pod, whole) = (GangPod::new(job, valid, attempt, node_rank), job);
    let job = gang_pod.job;
    let template_metadata =
        job.spec.template.as_ref().and_then(|template| template.metadata.clone()).unwrap_or_default();
    let name = valid.pod_name(attempt, node_rank);
    let mut meta = metadata(job, name.clone());
    let mut merged = template_metadata.labels.unwrap_or_default();
    merged.extend(pod_labels(job, valid, attempt, node_rank));
    let mut annotations = template_metadata.annotations.unwrap_or_default();
    kueue::join(whole, valid, (attempt, node_rank), &mut merged, &mut annotations);
    meta.labels = Some(merged);
    annotations.entry("kubectl.kubernetes.io/default-container".into()).or_insert_with(|| TRAINER.into());
    let mut spec = gang_pod.requested().spec.clone();
    let builder = PodBuilder { pod: gang_pod, defaults };
    if valid.request.nodes > 1 {
        spec.hostname = Some(name);
        spec.subdomain = Some(valid.name.clone());
    }
    spec.restart_policy = Some("Never".into());
    spec.scheduling_gates.get_or_insert_default().retain(|gate| gate.name != labels::GANG_GATE);
    spec.scheduling_gates.get_or_insert_default().insert(0, PodSchedulingGate { name: labels::GANG_GATE.into() });
    spec.termination_grace_period_seconds.get_or_insert(GRACE_SECONDS);
    spec.automount_service_account_token.get_or_insert(false);
    spec.enable_service_links.get_or_insert(false);
    tolerate_unreachable_nodes(&mut spec);
    secure_pod(&mut spec, job.spec.trainer.framework);
    builder.volumes(&mut spec);
    builder.trainer(&mut spec);
    builder.worker_image(&mut spec);
    fabric::attach(&mut spec, &builder);
    if spec.host_network == Some(true) && gang_pod.nodes() > 1 {
        declare_port(&mut spec, gang_pod.port(node_rank));
    }
    if let Some(networks) = fabric::networks(&spec, &builder) {
        annotations.entry(NETWORKS.into()).or_insert_with(|| networks.into());
    }
    meta.annotations = Some(annotations);
    claim::attach(&mut spec, job, &gang_pod.name());
    spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten()).for_each(secure_container);
    Pod { metadata: meta, spec: Some(spec), status: None }
}

/// The trainer container of a pod as the user and the framework want it: command, arguments,
/// environment.
pub(crate) fn trainer_container(pod: GangPod<'_>) -> Container {
    let mut spec = pod.requested().spec.clone();
    PodBuilder { pod, defaults: &Defaults::default() }.trainer(&mut spec);
    trainer(&spec).cloned().unwrap_or_default()
}

fn pod_labels(job: &TrainJob, valid: &ValidJob, attempt: u32, node_rank: u32) -> BTreeMap<String, String> {
    let mut all = job_labels(job);
    let pod_values =
        [(labels::ATTEMPT, attempt), (labels::NODE_RANK, node_rank), (labels::RANK, valid.first_rank(node_rank))];
    all.extend(pod_values.map(|(label, value)| (label.to_string(), value.to_string())));
    if let Some(role) = valid.role_of(node_rank) {
        all.insert(labels::ROLE.into(), role.name.clone());
        all.insert(labels::ROLE_INDEX.into(), (node_rank - role.first_node).to_string());
    }
    all
}

/// A patch with our labels for an existing pod, and nothing else. The server rejects it for a pod
/// of the same name with another UID.
pub fn label_patch(job: &TrainJob, valid: &ValidJob, attempt: u32, node_rank: u32, uid: &str) -> Pod {
    let metadata = ObjectMeta {
        name: Some(valid.pod_name(attempt, node_rank)),
        namespace: job.metadata.namespace.clone(),
        uid: Some(uid.to_string()),
        labels: Some(pod_labels(job, valid, attempt, node_rank)),
        ..ObjectMeta::default()
    };
    Pod { metadata, spec: None, status: None }
}

/// Declares the port that the pod uses on its host, so that the scheduler accounts for it.
fn declare_port(spec: &mut PodSpec, port: u16) {
    let Some(trainer) = trainer_mut(spec) else { return };
    let ports = trainer.ports.get_or_insert_default();
    if !ports.iter().any(|own| own.container_port == i32::from(port)) {
        let (container_port, host_port) = (port.into(), Some(port.into()));
        ports.push(ContainerPort { container_port, host_port, ..ContainerPort::default() });
    }
}

/// Keeps Kubernetes from evicting the pod from an unhealthy node. Admission adds tolerations of 300
/// s to pods that tolerate neither taint, although the containers may keep training: the controller
/// decides instead, from its grace period, the ranks' progress and the rest of the fleet.
fn tolerate_unreachable_nodes(spec: &mut PodSpec) {
    let tolerations = spec.tolerations.get_or_insert_default();
    for key in UNREACHABLE_TAINTS {
        // The same test as in the DefaultTolerationSeconds admission plugin.
        let is_any =
            |field: &Option<String>, value: &str| field.as_deref().is_none_or(|is| is.is_empty() || is == value);
        if !tolerations.iter().any(|own| is_any(&own.key, key) && is_any(&own.effect, NO_EXECUTE)) {
            tolerations.push(Toleration {
                key: Some(key.into()),
                operator: Some("Exists".into()),
                effect: Some(NO_EXECUTE.into()),
                ..Toleration::default()
            });
        }
    }
}

/// Sets everything that Pod Security `restricted` requires unless the template sets it. Exception:
/// the user of other images, because most of them run as root.
fn secure_pod(spec: &mut PodSpec, framework: Framework) {
    let context: &mut PodSecurityContext = spec.security_context.get_or_insert_default();
    context
        .seccomp_profile
        .get_or_insert_with(|| SeccompProfile { type_: "RuntimeDefault".into(), localhost_profile: None });
    if framework == Framework::Switchyard {
        context.run_as_non_root.get_or_insert(true);
        context.run_as_user.get_or_insert(WORKER_UID);
        context.run_as_group.get_or_insert(WORKER_UID);
        context.fs_group.get_or_insert(WORKER_UID);
        // Otherwise a large data volume would have its group changed at every start.
        context.fs_group_change_policy.get_or_insert_with(|| "OnRootMismatch".into());
    }
}

/// Sets `runAsNonRoot` unless the template sets it, for namespaces that enforce Pod Security
/// `restricted`.
pub fn run_as_non_root(pod: &mut Pod) {
    let context = pod.spec.get_or_insert_default().security_context.get_or_insert_default();
    context.run_as_non_root.get_or_insert(true);
}

fn secure_container(container: &mut Container) {
    let context: &mut SecurityContext = container.security_context.get_or_insert_default();
    // A privileged container always allows privilege escalation, so the template has decided.
    if context.privileged != Some(true) {
        context.allow_privilege_escalation.get_or_insert(false);
        context.capabilities.get_or_insert_with(|| Capabilities { drop: Some(vec!["ALL".into()]), add: None });
    }
}

impl PodBuilder<'_> {
    fn is_ours(&self) -> bool {
        self.pod.job.spec.trainer.framework == Framework::Switchyard
    }

    /// Whether the pod reads its attempt's ConfigMap.
    fn has_config(&self) -> bool {
        self.is_ours() || frameworks::uses_mpirun(self.pod.job)
    }

    fn has_key(&self) -> bool {
        self.is_ours() && self.pod.valid.request.nodes > 1
    }

    fn volumes(&self, spec: &mut PodSpec) {
        if !self.has_config() {
            return;
        }
        let config = ConfigMapVolumeSource {
            name: config_name(self.pod.valid, self.pod.attempt),
            ..ConfigMapVolumeSource::default()
        };
        let mut own_entries = vec![Volume { name: CONFIG.into(), config_map: Some(config), ..Volume::default() }];
        if self.has_key() {
            let secret = SecretVolumeSource {
                secret_name: Some(key_name(self.pod.job, self.pod.valid)),
                default_mode: Some(KEY_MODE),
                ..SecretVolumeSource::default()
            };
            own_entries.push(Volume { name: KEY.into(), secret: Some(secret), ..Volume::default() });
        }
        let is_mounted = trainer(spec).is_some_and(|trainer| mounts(trainer, paths::RUN_DIR));
        let has_own = spec.volumes.iter().flatten().any(|volume| volume.name == RUN);
        if self.is_ours() && !is_mounted && !has_own {
            let empty = EmptyDirVolumeSource::default();
            own_entries.push(Volume { name: RUN.into(), empty_dir: Some(empty), ..Volume::default() });
        }
        add_volumes(spec, own_entries);
    }

    /// Sets the image of a job that names none, and its pull secrets.
    fn worker_image(&self, spec: &mut PodSpec) {
        let Some(trainer) = trainer_mut(spec).filter(|trainer| self.is_ours() && trainer.image.is_none()) else {
            return;
        };
        trainer.image = Some(self.defaults.worker_image.clone());
        let secrets = &self.defaults.image_pull_secrets;
        if spec.image_pull_secrets.is_none() && !secrets.is_empty() {
            let secret = |name: &String| LocalObjectReference { name: name.clone() };
            spec.image_pull_secrets = Some(secrets.iter().map(secret).collect());
        }
    }

    fn trainer(&self, spec: &mut PodSpec) {
        let Some(trainer) = trainer_mut(spec) else { return };
        let trainer_spec = &self.pod.job.spec.trainer;
        if let Some(image) = &trainer_spec.image {
            trainer.image = Some(image.clone());
        }
        if self.is_ours() {
            trainer.command = Some(vec!["switchyard-worker".into(), "pod".into()]);
            trainer.args = None;
            trainer.security_context.get_or_insert_default().read_only_root_filesystem.get_or_insert(true);
        } else {
            if !trainer_spec.command.is_empty() {
                trainer.command = Some(trainer_spec.command.clone());
            }
            if !trainer_spec.args.is_empty() {
                trainer.args = Some(trainer_spec.args.clone());
            }
            if let Some(command) = frameworks::command(&self.pod) {
                trainer.command = Some(command);
                trainer.args = None;
            }
        }
        if self.has_config() {
            self.mounts(trainer);
        }
        if let Some(status) = &self.pod.job.status {
            set_devices(trainer, status);
        }
        trainer.termination_message_path = Some(paths::TERMINATION_LOG.into());
        trainer.termination_message_policy.get_or_insert_with(|| "FallbackToLogsOnError".into());
        let mut merged: Vec<EnvVar> = trainer.env.take().unwrap_or_default();
        let mut set = |name: String, value: String| {
            merged.retain(|before| before.name != name);
            merged.push(EnvVar { name, value: Some(value), value_from: None });
        };
        trainer_spec.env.iter().for_each(|entry| set(entry.name.clone(), entry.value.clone()));
        self.environment().into_iter().for_each(|entry| set(entry.name, entry.value));
        // Added after the user's variables: the user's values win, and references to them resolve.
        for entry in frameworks::environment(&self.pod) {
            if !merged.iter().any(|before| before.name == entry.name) {
                merged.push(entry.into());
            }
        }
        if self.pod.job.status.as_ref().is_some_and(|status| status.device_allocation.is_some()) {
            merged.push(from_annotation(env::RANK_CPUS, labels::RANK_CPUS));
        }
        trainer.env = Some(merged);
    }

    fn mounts(&self, trainer: &mut Container) {
        let mounts_run = mounts(trainer, paths::RUN_DIR);
        let mounts = trainer.volume_mounts.get_or_insert_default();
        let mut own_entries = vec![(CONFIG, paths::CONFIG_DIR, true)];
        if self.has_key() {
            own_entries.push((KEY, paths::KEY_DIR, true));
        }
        if self.is_ours() && !mounts_run {
            own_entries.push((RUN, paths::RUN_DIR, false));
        }
        if let Some((name, path)) = self.pod.job.spec.checkpoint.as_ref().and_then(mounted)
            // The user's mount of the same volume may have more options, such as a subPath.
            && !mounts.iter().any(|mount| mount.name == name && mount.mount_path.trim_end_matches('/') == path)
        {
            own_entries.push((name, path, false));
        }
        for (name, path, read_only) in own_entries {
            mount(trainer, name, path, read_only);
        }
    }

    /// The environment that makes the container a rank, with a reason for each entry.
    pub(super) fn environment(&self) -> Vec<EnvEntry> {
        let mut entries = identity(&self.pod);
        let mut set = |name: &str, value: String, reason: &str| entries.push(EnvEntry::new(name, value, reason));
        if self.pod.nodes() > 1 {
            set(env::RENDEZVOUS, self.pod.address(0), "rank 0 listens here and nowhere else");
        }
        if self.is_ours() {
            set(
                env::CONFIG,
                format!("{}/{}", paths::CONFIG_DIR, paths::CONFIG_FILE),
                "engine configuration, from the ConfigMap",
            );
            set(env::RUN_DIR, paths::RUN_DIR.into(), "where the trained model goes");
            set(
                env::TERMINATION_LOG,
                paths::TERMINATION_LOG.into(),
                "the root cause and the last figures, for the status",
            );
            let grace = self.pod.requested().spec.termination_grace_period_seconds;
            if let Some(seconds) = grace.filter(|seconds| *seconds != GRACE_SECONDS) {
                let reason = "terminationGracePeriodSeconds of the template: how long a save may take";
                set(env::GRACE_SECONDS, seconds.to_string(), reason);
            }
            if self.has_key() {
                set(
                    env::KEY_FILE,
                    format!("{}/{}", paths::KEY_DIR, paths::KEY_FILE),
                    "key of the job, from the Secret",
                );
            }
        }
        entries
    }
}

/// Volume and directory of the checkpoints, if the job names a volume.
pub(super) fn mounted(checkpoint: &Checkpoint) -> Option<(&str, &str)> {
    Some((checkpoint.volume_name.as_deref()?, checkpoint.path.trim_end_matches('/')))
}

/// Strategic merge patch that lifts only our gate and pins the pod to its node. `rules` are the
/// admitted pod's rules: while a pod is gated, each node affinity term may be narrowed, but none
/// may be removed
/// (<https://kubernetes.io/docs/concepts/scheduling-eviction/pod-scheduling-readiness/>).
pub fn placement_patch(rules: &NodeRules, placed: &PlacedNode, interface: Option<&str>) -> Value {
    let node = &placed.node_name;
    let field = json!({"key": "metadata.name", "operator": "In", "values": [node]});
    let terms: Vec<Value> = match &rules.required {
        Some(selector) => selector
            .node_selector_terms
            .iter()
            .map(|term| {
                let mut term = serde_json::to_value(term).expect("invariant: a selector term serialises to JSON");
                match term["matchFields"].as_array_mut() {
                    Some(fields) => fields.push(field.clone()),
                    None => term["matchFields"] = json!([field]),
                }
                term
            })
            .collect(),
        None => vec![json!({"matchFields": [field]})],
    };
    let mut patch = json!({"spec": {
        "schedulingGates": [{"$patch": "delete", "name": labels::GANG_GATE}],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}},
    }});
    if !placed.gpus.is_empty() {
        patch["metadata"]["annotations"][labels::RANK_CPUS] = placed.shape.cpus.join(";").into();
    }
    if let Some(interface) = interface {
        patch["metadata"]["annotations"][labels::SOCKET_INTERFACE] = interface.into();
    }
    patch
}
