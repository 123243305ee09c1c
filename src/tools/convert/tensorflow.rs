//! TFJob: roles named like TensorFlow's task types, or a job without roles if there are only
//! workers.

use super::ConvertError;
use super::pods::{self, Draft};
use super::reader::Reader;
use super::replicas::{self, Family};
use super::roles::{self, Source};
use switchyard_fabric::lint::Cursor;

/// Replica types of a TFJob, and the task types that they are for TensorFlow. The one that trains
/// is first, because it joins the rendezvous.
const TYPES: [(&str, &str); 5] =
    [("Worker", "worker"), ("Chief", "chief"), ("Master", "chief"), ("PS", "ps"), ("Evaluator", "evaluator")];

const ONLY_WORKERS: Family = Family { framework: "TensorFlow", roles: "tfReplicaSpecs", container: "tensorflow" };

pub(super) fn convert<'a>(top: &Cursor<'a>, reader: &mut Reader<'a>, draft: &mut Draft) -> Result<(), ConvertError> {
    let spec = top.get("spec").unwrap_or_else(|| top.clone());
    let all = spec.get("tfReplicaSpecs");
    let all = all.ok_or_else(|| pods::unusable(&spec, "tfReplicaSpecs", "the roles of a TFJob, such as Worker"))?;
    let mut sources: Vec<Source<'a>> = Vec::new();
    for (theirs, name) in TYPES {
        if let Some(replicas) = all.get(theirs).filter(|_| sources.iter().all(|known| known.name != name)) {
            sources.push(Source { name, replicas, runs_program: true });
        }
    }
    if sources.iter().all(|source| source.name == "worker") {
        return replicas::convert(&ONLY_WORKERS, top, reader, draft);
    }
    draft.trainer.insert("framework".into(), "TensorFlow".into());
    sources.iter().for_each(|source| pods::restart_policy(&source.replicas, reader, draft));
    let all_workers = spec.get("successPolicy").filter(|field| field.value == "AllWorkers");
    all_workers.iter().for_each(|field| reader.done(field));
    let decides = if all_workers.is_some() { "worker" } else { "chief" };
    let awaited = sources.iter().find(|source| source.name == decides).or(sources.first());
    if let Some(awaited) = awaited {
        // kubeflow/training-operator: the chief decides, without one worker 0, or all workers.
        draft.spec.insert("successPolicy".into(), serde_json::json!({"role": awaited.name}));
    }
    roles::convert(&sources, ONLY_WORKERS.container, reader, draft)?;
    pods::run_policy(&spec, reader, draft);
    Ok(())
}
