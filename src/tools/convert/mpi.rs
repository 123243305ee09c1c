//! MPIJob: the roles launcher and worker. A Launcher that computes too is the first of equal pods,
//! or the role head if its pod differs.

use super::pods::{self, Draft};
use super::reader::Reader;
use super::roles::{self, Source};
use super::{ConvertError, replicas};
use serde_json::{Value, json};
use switchyard_fabric::lint::Cursor;

/// Options of `mpirun` that name hosts.
const HOSTS: [&str; 6] = ["--hostfile", "-hostfile", "--machinefile", "-machinefile", "--host", "-H"];

/// Folder of the files in which an MPIJob lists its hosts.
const HOST_FILES: &str = "/etc/mpi/";

pub(super) fn convert<'a>(top: &Cursor<'a>, reader: &mut Reader<'a>, draft: &mut Draft) -> Result<(), ConvertError> {
    let spec = top.get("spec").unwrap_or_else(|| top.clone());
    let roles = spec.get("mpiReplicaSpecs");
    let roles = roles.ok_or_else(|| pods::unusable(&spec, "mpiReplicaSpecs", "the roles Launcher and Worker"))?;
    let launcher =
        roles.get("Launcher").ok_or_else(|| pods::unusable(&roles, "Launcher", "the role that calls mpirun"))?;
    let worker = roles.get("Worker");
    draft.trainer.insert("framework".into(), "MPI".into());
    let launches_and_works = spec.get("runLauncherAsWorker").filter(|field| field.value == true);
    if let Some(field) = spec.get("runLauncherAsWorker") {
        reader.done(&field);
    }
    let container =
        |role: &Cursor<'a>| role.at(&["template", "spec"]).and_then(|spec| spec.list("containers").into_iter().next());
    let head = |worker: &Cursor<'a>| {
        let source = |name, replicas: &Cursor<'a>| Source { name, replicas: replicas.clone(), runs_program: false };
        let workers = source("worker", worker);
        let head = source("head", &launcher);
        let usual = container(worker).and_then(|container| container.text("name").map(str::to_owned));
        let usual = usual.unwrap_or_default();
        let needed = roles::are_needed(&workers, &head, &usual);
        needed.then_some(([workers, Source { runs_program: true, ..head }], usual))
    };
    match &worker {
        Some(worker) if launches_and_works.is_none() => with_launcher(&spec, &launcher, worker, reader, draft)?,
        _ => match worker.as_ref().and_then(head) {
            Some((sources, usual)) => {
                pods::processes(&spec, "slotsPerWorker", reader, draft);
                replicas::first_and_others(&sources, &usual, reader, draft)?;
                draft.spec.insert("successPolicy".into(), json!({"role": "head"}));
            }
            None => alike(&spec, &launcher, worker.as_ref(), reader, draft)?,
        },
    }
    hosts(&launcher, container(&launcher).as_ref(), reader);
    for role in [Some(&launcher), worker.as_ref()].into_iter().flatten() {
        pods::restart_policy(role, reader, draft);
    }
    if let Some(field) = spec.get("mpiImplementation") {
        if field.value == "OpenMPI" {
            reader.done(&field);
        } else {
            reader.note(&field, "the image needs Open MPI 5: other implementations are started by ssh only");
        }
    }
    pods::run_policy(&spec, reader, draft);
    Ok(())
}

/// A launcher that computes nothing is a role of its own.
fn with_launcher<'a>(
    spec: &Cursor<'a>,
    launcher: &Cursor<'a>,
    worker: &Cursor<'a>,
    reader: &mut Reader<'a>,
    draft: &mut Draft,
) -> Result<(), ConvertError> {
    let sources = [
        Source { name: "worker", replicas: worker.clone(), runs_program: false },
        Source { name: "launcher", replicas: launcher.clone(), runs_program: true },
    ];
    roles::convert(&sources, "", reader, draft)?;
    pods::processes(spec, "slotsPerWorker", reader, draft);
    let processes = draft.trainer.remove("numProcPerNode");
    let Some(roles) = draft.spec.get_mut("roles").and_then(Value::as_array_mut) else { return Ok(()) };
    if let (Some(processes), Some(worker)) = (processes, roles.first_mut()) {
        worker["numProcPerNode"] = processes;
    }
    // Node 0 runs mpirun.
    roles.reverse();
    draft.spec.insert("successPolicy".into(), json!({"role": "launcher"}));
    Ok(())
}

/// Without workers, or if the launcher computes too, all pods are alike: the first one runs the
/// launcher's command.
fn alike<'a>(
    spec: &Cursor<'a>,
    launcher: &Cursor<'a>,
    worker: Option<&Cursor<'a>>,
    reader: &mut Reader<'a>,
    draft: &mut Draft,
) -> Result<(), ConvertError> {
    let main = worker.unwrap_or(launcher).clone();
    let mut nodes = pods::pod_count(&main, "replicas", reader)?.unwrap_or(1);
    pods::number(launcher, "replicas", reader);
    nodes += u64::from(worker.is_some());
    draft.trainer.insert("numNodes".into(), nodes.into());
    let container =
        |role: &Cursor<'a>| role.at(&["template", "spec"]).and_then(|spec| spec.list("containers").into_iter().next());
    let usual = container(&main).and_then(|container| container.text("name").map(str::to_owned)).unwrap_or_default();
    pods::template(&main, &usual, reader, draft)?;
    if worker.is_some() {
        let (theirs, workers) = (container(launcher), container(&main));
        let theirs = theirs.ok_or_else(|| pods::unusable(launcher, "template", "a template of pods"))?;
        // The workers of an MPIJob wait for ssh; ours start mpirun's daemon.
        for key in ["command", "args"] {
            if let Some(field) = workers.as_ref().and_then(|container| container.get(key)) {
                reader.note(&field, "workers start no ssh server: each pod but the first runs the daemon of mpirun");
            }
            draft.trainer.remove(key);
            if let Some(value) = reader.take(&theirs, key) {
                draft.trainer.insert(key.into(), value);
            }
        }
        theirs.get("name").iter().for_each(|name| reader.done(name));
        launcher_env(&theirs, reader, draft);
        replicas::note_differences(launcher, &main, reader);
    }
    pods::processes(spec, "slotsPerWorker", reader, draft);
    Ok(())
}

/// Adds the launcher's variables to every pod.
fn launcher_env<'a>(launcher: &Cursor<'a>, reader: &mut Reader<'a>, draft: &mut Draft) {
    let container = draft.container();
    for entry in launcher.list("env") {
        let name = entry.text("name").unwrap_or_default();
        let known = container["env"].as_array().into_iter().flatten().find(|known| known["name"] == name);
        match known {
            Some(known) if known == entry.value => reader.done(&entry),
            Some(_) => reader.note(&entry, "the pods of a TrainJob are alike: the value of Worker is taken"),
            // Not a list. Validation will reject the result because of it, so it must still contain
            // it.
            None if !container["env"].is_null() && !container["env"].is_array() => {
                reader.note(&entry, "the pods of a TrainJob are alike: the value of Worker is taken");
            }
            None => {
                let value = entry.value.clone();
                match container["env"].as_array_mut() {
                    Some(list) => list.push(value),
                    None => container["env"] = json!([value]),
                }
                reader.done(&entry);
            }
        }
    }
}

/// Whether a command or script has this word, rather than a longer one that contains it.
fn is_word(text: &str, word: &str) -> bool {
    text.split(|c: char| !c.is_alphanumeric() && !"-_./".contains(c)).any(|part| part.rsplit('/').next() == Some(word))
}

/// Hosts named in a command would override the placement.
fn hosts<'a>(launcher: &Cursor<'a>, container: Option<&Cursor<'a>>, reader: &mut Reader<'a>) {
    let Some(container) = container else { return };
    for word in container.list("command").into_iter().chain(container.list("args")) {
        let text = word.value.as_str().unwrap_or_default();
        let names = |option: &str| text.split_whitespace().any(|part| part.split('=').next() == Some(option));
        if HOSTS.into_iter().any(names) {
            reader.note(
                &word,
                "mpirun knows its hosts and how many processes they take: delete the option in spec.trainer",
            );
        } else if text.contains(HOST_FILES) || is_word(text, "ssh") {
            reader.note(
                &word,
                "the script reads the hosts of an MPIJob or uses ssh, and a TrainJob has neither: its hosts are in \
                 /etc/switchyard/hostfile, and mpirun knows them without it",
            );
        }
    }
    if let Some(Value::Bool(true)) = launcher.at(&["template", "spec", "hostNetwork"]).map(|field| field.value.clone())
    {
        let field = launcher.at(&["template", "spec"]).and_then(|spec| spec.get("hostNetwork"));
        field.into_iter().for_each(|field| reader.note(&field, "two jobs on one node would take the same port"));
    }
}
