//! Parses manifests into workloads.

use super::command;
use super::cursor::Cursor;
use super::path::Path;
use super::view::{Container, Count, Group, Kind, Origin, Processes, Setting, Variable, Workload};
use serde_json::Value;
use switchyard_crds::labels;
use switchyard_crds::names::TRAINER;

/// Maximum depth of nested lists.
const MAX_LIST_DEPTH: usize = 4;
/// Maximum depth of pod templates below a spec; a JobSet's are at six.
const MAX_TEMPLATE_DEPTH: usize = 12;

/// The workloads of a document; empty if it starts no pods.
pub(super) fn workloads(document: &Value) -> Vec<Workload> {
    let mut found = Vec::new();
    collect(&Cursor::new(document), 0, &mut found);
    found
}

fn collect(top: &Cursor<'_>, depth: usize, found: &mut Vec<Workload>) {
    let kind_word = top.text("kind").unwrap_or_default();
    if kind_word.ends_with("List") && depth < MAX_LIST_DEPTH {
        return top.list("items").iter().for_each(|item| collect(item, depth + 1, found));
    }
    let group = top.text("apiVersion").unwrap_or_default().split('/').next().unwrap_or_default();
    let (kind, nodes, groups) = match (group, kind_word) {
        (labels::GROUP, "TrainJob") => switchyard(top),
        ("trainer.kubeflow.org", "TrainJob") => kubeflow(top),
        (_, "ConfigMap") => conf(top),
        _ => replicas(top, kind_word).unwrap_or_else(|| pods(top)),
    };
    if !groups.is_empty() {
        let name = top.at(&["metadata"]).and_then(|meta| meta.text("name")).unwrap_or_default().to_owned();
        let framework = top.at(&["spec", "trainer"]).filter(|_| kind == Kind::TrainJob);
        let framework = framework.and_then(|trainer| trainer.text("framework")).unwrap_or_default().to_owned();
        found.push(Workload { kind, kind_word: kind_word.to_owned(), name, groups, framework, nodes });
    }
}

type Parsed = (Kind, Option<u64>, Vec<Group>);

/// Our TrainJob: the template, with the settings of `trainer`, or of each role, applied to its
/// container.
fn switchyard(top: &Cursor<'_>) -> Parsed {
    let template = top.at(&["spec", "template", "spec"]);
    let trainer = top.at(&["spec", "trainer"]);
    let roles = top.get("spec").map(|spec| spec.list("roles")).unwrap_or_default();
    if roles.is_empty() {
        let nodes = trainer.as_ref().and_then(|trainer| trainer.number("numNodes")).unwrap_or(1);
        return (Kind::TrainJob, Some(nodes), vec![with_trainer(template.as_ref(), trainer.as_ref())]);
    }
    let nodes = roles.iter().map(|role| role.number("replicas").unwrap_or(1)).sum();
    let mut groups: Vec<Group> = roles.iter().map(|role| with_trainer(template.as_ref(), Some(role))).collect();
    // Variables of all roles, reported once.
    groups.extend(
        trainer
            .iter()
            .map(|trainer| Group { containers: vec![of_container(trainer, "resourcesPerNode")], ..Group::default() }),
    );
    (Kind::TrainJob, Some(nodes), groups)
}

/// Pods of a template whose training container has the settings of `trainer`.
fn with_trainer(template: Option<&Cursor<'_>>, trainer: Option<&Cursor<'_>>) -> Group {
    let mut group = template.map(of_pod).unwrap_or_default();
    if let Some(trainer) = trainer {
        group.processes = field(trainer, "numProcPerNode");
        // The training container of the template, or the one that will be added.
        let names: Vec<Option<&str>> = template
            .iter()
            .flat_map(|spec| spec.list("initContainers").into_iter().chain(spec.list("containers")))
            .map(|container| container.text("name"))
            .collect();
        let trainer_container = of_container(trainer, "resourcesPerNode");
        match names.iter().position(|name| *name == Some(TRAINER)).and_then(|index| group.containers.get_mut(index)) {
            Some(container) => {
                container.variables.extend(trainer_container.variables);
                container.processes = trainer_container.processes.or(container.processes.take());
                container.gpus = container.gpus.filter(|gpus| *gpus > 0).or(trainer_container.gpus);
                container.rdma = container.rdma.take().or(trainer_container.rdma);
            }
            None => group.containers.push(trainer_container),
        }
    }
    group
}

/// Kubeflow Trainer: the trainer on top of a runtime defined elsewhere, and overrides of its pods.
fn kubeflow(top: &Cursor<'_>) -> Parsed {
    let mut groups = Vec::new();
    let mut nodes = None;
    if let Some(trainer) = top.at(&["spec", "trainer"]) {
        nodes = trainer.number("numNodes");
        let container = of_container(&trainer, "resourcesPerNode");
        groups.push(Group {
            processes: field(&trainer, "numProcPerNode"),
            containers: vec![container],
            ..Group::default()
        });
    }
    for overrides in ["podTemplateOverrides", "podSpecOverrides"] {
        let entries = top.get("spec").map(|spec| spec.list(overrides)).unwrap_or_default();
        groups.extend(entries.iter().map(|entry| of_pod(&entry.get("spec").unwrap_or_else(|| entry.clone()))));
    }
    (Kind::KubeflowTrainJob, nodes, groups)
}

/// Jobs of the training operator and MPIJobs: `…ReplicaSpecs`, with a template for each role.
fn replicas(top: &Cursor<'_>, kind_word: &str) -> Option<Parsed> {
    let spec = top.get("spec")?;
    let (_, roles) = spec.fields().into_iter().find(|(key, _)| key.ends_with("ReplicaSpecs"))?;
    let kind = match kind_word {
        "PyTorchJob" => Kind::PyTorchJob,
        "MPIJob" => Kind::MpiJob,
        _ => Kind::ReplicaJob,
    };
    let mut nodes = 0;
    let mut groups = Vec::new();
    for (role, entry) in roles.fields() {
        let Some(pod) = entry.at(&["template", "spec"]) else { continue };
        let mut group = of_pod(&pod);
        let trains = role != "Launcher";
        if trains {
            nodes += entry.number("replicas").unwrap_or(1);
            group.processes = match kind {
                Kind::PyTorchJob => field(&spec, "nprocPerNode"),
                Kind::MpiJob => field(&spec, "slotsPerWorker"),
                _ => None,
            };
        }
        groups.push(group);
    }
    Some((kind, Some(nodes), groups))
}

/// A Pod, or any kind with pod templates: Job, CronJob, JobSet, StatefulSet, Volcano's Job, …
fn pods(top: &Cursor<'_>) -> Parsed {
    let Some(spec) = top.get("spec") else { return (Kind::Pods, None, Vec::new()) };
    let mut groups = Vec::new();
    if spec.get("containers").is_some() {
        groups.push(of_pod(&spec));
    } else {
        templates(&spec, 0, &mut groups);
    }
    (Kind::Pods, None, groups)
}

/// The pods of every `template` in an object.
fn templates(at: &Cursor<'_>, depth: usize, groups: &mut Vec<Group>) {
    if depth == MAX_TEMPLATE_DEPTH {
        return;
    }
    for (key, field) in at.fields() {
        match field.get("spec").filter(|pod| key == "template" && pod.get("containers").is_some()) {
            Some(pod) => groups.push(of_pod(&pod)),
            None => templates(&field, depth + 1, groups),
        }
    }
    at.items().iter().for_each(|item| templates(item, depth + 1, groups));
}

/// A ConfigMap with an `nccl.conf`.
fn conf(top: &Cursor<'_>) -> Parsed {
    let data = top.get("data").map(|data| data.fields()).unwrap_or_default();
    let files = data.into_iter().filter(|(name, _)| name.ends_with("nccl.conf"));
    let container = |(_, file): (&str, Cursor<'_>)| {
        let lines = file.value.as_str().unwrap_or_default().lines();
        let lines = lines.filter(|line| !line.starts_with('#') && !line.trim().is_empty());
        let variable = |line: &str| {
            let (name, setting) = match line.split_once('=') {
                Some((name, value)) => (name, Setting::Text(value.to_owned())),
                None => (line, Setting::Absent),
            };
            Variable { name: name.to_owned(), setting, path: file.path.clone(), origin: Origin::Conf }
        };
        Container { path: file.path.clone(), variables: lines.map(variable).collect(), ..Container::default() }
    };
    let containers: Vec<Container> = files.map(container).collect();
    let groups = if containers.is_empty() { Vec::new() } else { vec![Group { containers, ..Group::default() }] };
    (Kind::NcclConf, None, groups)
}

fn field(spec: &Cursor<'_>, name: &str) -> Option<Processes> {
    let found = spec.get(name)?;
    let (count, words) = match found.value {
        Value::String(text) => (command::count(text), text.clone()),
        value => (value.as_u64().map_or(Count::Open, Count::Number), value.to_string()),
    };
    Some(Processes { count, path: found.path, words: format!("{name}: {words}") })
}

fn of_pod(spec: &Cursor<'_>) -> Group {
    let containers = spec.list("initContainers").into_iter().chain(spec.list("containers"));
    Group {
        host_network: spec.get("hostNetwork").is_some_and(|field| field.value == true),
        host_access: host_access(spec),
        processes: None,
        containers: containers.map(|container| of_container(&container, "resources")).collect(),
    }
}

/// Fields of a pod that give it access to its node.
fn host_access(spec: &Cursor<'_>) -> Vec<(Path, String)> {
    let mut found = Vec::new();
    for name in ["hostNetwork", "hostPID", "hostIPC"] {
        let field = spec.get(name).filter(|field| field.value == true);
        found.extend(field.map(|field| (field.path, format!("{name}: true"))));
    }
    for volume in spec.list("volumes") {
        let path =
            volume.get("hostPath").map(|field| (field.path.clone(), field.text("path").unwrap_or_default().to_owned()));
        found.extend(path.map(|(field, path)| (field, format!("hostPath {path}"))));
    }
    for container in spec.list("initContainers").into_iter().chain(spec.list("containers")) {
        let Some(context) = container.get("securityContext") else { continue };
        let privileged = context.get("privileged").filter(|field| field.value == true);
        found.extend(privileged.map(|field| (field.path, "privileged: true".to_owned())));
        if let Some(added) = context
            .at(&["capabilities", "add"])
            .filter(|added| added.value.as_array().is_some_and(|list| !list.is_empty()))
        {
            found.push((added.path.clone(), format!("capabilities {}", added.value)));
        }
    }
    found
}

fn of_container(container: &Cursor<'_>, resources: &str) -> Container {
    let mut read = Container { path: container.path.clone(), ..Container::default() };
    for entry in container.list("env") {
        let Some(name) = entry.text("name") else { continue };
        let (setting, path) = match entry.get("value") {
            Some(value) => match value.value {
                Value::String(text) if text.contains("$(") => (Setting::Computed, value.path),
                Value::String(text) => (Setting::Text(text.clone()), value.path),
                other => (Setting::NotText(other.to_string()), value.path),
            },
            None if entry.get("valueFrom").is_some() => (Setting::Computed, entry.path),
            None => (Setting::Text(String::new()), entry.path),
        };
        read.variables.push(Variable { name: name.to_owned(), setting, path, origin: Origin::Env });
    }
    let line: Vec<Cursor<'_>> = container.list("command").into_iter().chain(container.list("args")).collect();
    let mut words = Vec::new();
    for part in line {
        let own = command::words(part.value.as_str().unwrap_or_default());
        for (name, setting) in command::assignments(&own) {
            let variable =
                Variable { name: name.to_owned(), setting, path: part.path.clone(), origin: Origin::Command };
            read.variables.push(variable);
        }
        words.extend(own.into_iter().map(|word| (word, part.path.clone())));
    }
    let (texts, paths): (Vec<String>, Vec<_>) = words.into_iter().unzip();
    read.processes = command::processes(&texts).map(|(count, words)| {
        let option = words.split('=').next().unwrap_or_default();
        let at = texts.iter().position(|word| word.split('=').next() == Some(option)).unwrap_or_default();
        Processes { count, path: paths[at].clone(), words }
    });
    if let Some(resources) = container.get(resources) {
        let limits = resources.get("limits").map(|limits| limits.fields()).unwrap_or_default();
        let requests = resources.get("requests").map(|requests| requests.fields()).unwrap_or_default();
        let amounts = if limits.is_empty() { requests } else { limits };
        read.gpus = gpus(&amounts);
        read.rdma = amounts.iter().map(|(name, _)| *name).find(|name| is_rdma(name)).map(str::to_owned);
    }
    read
}

/// Number of GPUs and MIG devices; `None` if some are shared or an amount is invalid.
fn gpus(amounts: &[(&str, Cursor<'_>)]) -> Option<u64> {
    let is_gpu = |name: &str| name.ends_with("/gpu") || name.starts_with("nvidia.com/mig-");
    if amounts.iter().any(|(name, _)| name.contains("gpu.shared")) {
        return None;
    }
    let counts = amounts
        .iter()
        .filter(|(name, _)| is_gpu(name))
        .map(|(_, amount)| amount.value.as_u64().or_else(|| amount.value.as_str()?.trim().parse().ok()));
    counts.sum()
}

/// Resources of RDMA device plugins and of EFA.
fn is_rdma(name: &str) -> bool {
    name.starts_with("rdma/") || name.starts_with("vpc.amazonaws.com/efa") || name.contains("sriov")
}
