//! PaddleJob of the operator of PaddlePaddle itself: parameter servers and trainers, or trainers
//! alone.

use super::ConvertError;
use super::pods::{self, Draft};
use super::reader::Reader;
use super::roles::{self, Source};
use serde_json::json;
use switchyard_fabric::lint::Cursor;

/// Name of the training container in the operator's examples.
const CONTAINER: &str = "paddle";

pub(super) fn convert<'a>(top: &Cursor<'a>, reader: &mut Reader<'a>, draft: &mut Draft) -> Result<(), ConvertError> {
    let spec = top.get("spec").unwrap_or_else(|| top.clone());
    let worker = spec.get("worker").ok_or_else(|| pods::unusable(&spec, "worker", "the trainers of a PaddleJob"))?;
    draft.trainer.insert("framework".into(), "Paddle".into());
    match spec.get("ps") {
        Some(servers) => {
            let source = |name, replicas| Source { name, replicas, runs_program: true };
            roles::convert(&[source("worker", worker), source("ps", servers)], CONTAINER, reader, draft)?;
            // Servers never end by themselves.
            draft.spec.insert("successPolicy".into(), json!({"role": "worker"}));
        }
        None => {
            let nodes = pods::pod_count(&worker, "replicas", reader)?.unwrap_or(1);
            draft.trainer.insert("numNodes".into(), nodes.into());
            pods::template(&worker, CONTAINER, reader, draft)?;
        }
    }
    pods::run_policy(&spec, reader, draft);
    Ok(())
}
