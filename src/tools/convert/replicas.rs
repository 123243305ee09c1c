//! Jobs of ranks that are alike but for the first one: PyTorchJob and PaddleJob with the roles
//! Master and Worker.

use super::pods::{self, Draft};
use super::reader::Reader;
use super::roles::{self, Source};
use super::{ConvertError, advice};
use serde_json::{Value, json};
use switchyard_fabric::lint::Cursor;

/// A job kind with these roles.
pub(super) struct Family {
    pub framework: &'static str,
    pub roles: &'static str,
    /// Name of the training container.
    pub container: &'static str,
}

pub(super) const PYTORCH: Family = Family { framework: "Torch", roles: "pytorchReplicaSpecs", container: "pytorch" };
pub(super) const PADDLE: Family = Family { framework: "Paddle", roles: "paddleReplicaSpecs", container: "paddle" };

pub(super) fn convert<'a>(
    family: &Family,
    top: &Cursor<'a>,
    reader: &mut Reader<'a>,
    draft: &mut Draft,
) -> Result<(), ConvertError> {
    let spec = top.get("spec").unwrap_or_else(|| top.clone());
    let roles = spec.get(family.roles);
    let roles = roles.ok_or_else(|| pods::unusable(&spec, family.roles, "the roles Master and Worker"))?;
    let (master, worker) = (roles.get("Master"), roles.get("Worker"));
    let main = worker.clone().or_else(|| master.clone());
    let main = main.ok_or_else(|| pods::unusable(&roles, "Worker", "a role Master or Worker"))?;
    draft.trainer.insert("framework".into(), family.framework.into());
    for role in [&master, &worker].into_iter().flatten() {
        pods::restart_policy(role, reader, draft);
    }
    pods::processes(&spec, "nprocPerNode", reader, draft);
    elastic(&spec, reader, draft);
    let sources = master.clone().zip(worker.clone()).map(|(master, worker)| {
        let source = |name, replicas| Source { name, replicas, runs_program: true };
        [source("worker", worker), source("master", master)]
    });
    match sources.filter(|[worker, master]| roles::are_needed(worker, master, family.container)) {
        Some(sources) => {
            first_and_others(&sources, family.container, reader, draft)?;
            // kubeflow/training-operator: the master decides.
            draft.spec.insert("successPolicy".into(), json!({"role": "master"}));
        }
        None => {
            let mut nodes = 0;
            for role in [&master, &worker].into_iter().flatten() {
                nodes +=
                    pods::pod_count(role, "replicas", reader)?.unwrap_or(u64::from(role.get("replicas").is_none()));
            }
            draft.trainer.insert("numNodes".into(), nodes.max(1).into());
            pods::template(&main, family.container, reader, draft)?;
            if let (Some(master), Some(worker)) = (&master, &worker) {
                note_differences(master, worker, reader);
            }
        }
    }
    pods::run_policy(&spec, reader, draft);
    Ok(())
}

/// Two roles of one rendezvous. The second source has rank 0, and the first one's template is
/// shared.
pub(super) fn first_and_others<'a>(
    sources: &[Source<'a>; 2],
    usual: &str,
    reader: &mut Reader<'a>,
    draft: &mut Draft,
) -> Result<(), ConvertError> {
    roles::convert(sources, usual, reader, draft)?;
    let processes = draft.trainer.remove("numProcPerNode");
    let Some(roles) = draft.spec.get_mut("roles").and_then(Value::as_array_mut) else { return Ok(()) };
    roles.reverse();
    for role in roles.iter_mut() {
        role["rendezvous"] = "Join".into();
        if let Some(processes) = &processes {
            role["numProcPerNode"] = processes.clone();
        }
    }
    Ok(())
}

/// All pods of a TrainJob are equal: what the roles share is already in the TrainJob, and other
/// fields are noted.
pub(super) fn note_differences<'a>(other: &Cursor<'a>, main: &Cursor<'a>, reader: &mut Reader<'a>) {
    for (key, field) in other.fields() {
        match (main.get(key), field.value) {
            _ if reader.is_done(&field) || advice::of(key).is_some() => {}
            (Some(known), value) if known.value == value => reader.done(&field),
            (Some(known), Value::Object(_)) => note_differences(&field, &known, reader),
            (Some(known), Value::Array(items))
                if known.value.as_array().is_some_and(|list| list.len() == items.len()) =>
            {
                for (item, known) in field.items().iter().zip(known.items()) {
                    if reader.is_done(item) {
                        continue;
                    }
                    if item.value == known.value {
                        reader.done(item);
                    } else if item.value.is_object() {
                        note_differences(item, &known, reader);
                    } else {
                        reader.note(item, ALIKE);
                    }
                }
            }
            (Some(_), value) if !value.is_null() => reader.note(&field, ALIKE),
            _ => {}
        }
    }
}

const ALIKE: &str = "the pods of a TrainJob are alike: the value of Worker is taken";

/// Two fields of the elastic policy apply to any job.
fn elastic<'a>(spec: &Cursor<'a>, reader: &mut Reader<'a>, draft: &mut Draft) {
    let Some(elastic) = spec.get("elasticPolicy") else { return };
    for (name, field) in elastic.fields() {
        match name {
            "nProcPerNode" => pods::processes(&elastic, name, reader, draft),
            "maxRestarts" => pods::restarts(&field, reader, draft),
            _ => reader.note(&field, advice::of("elasticPolicy").unwrap_or(advice::DEFAULT)),
        }
    }
    reader.done(&elastic);
}
