//! Builds a trace from the objects of a cluster: finished TrainJobs, and foreign pods as one job
//! each.

use super::log::Log;
use super::{Format, Row, Skipped, Trace, gpus};
use crate::fabric::Fabric;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use serde::de::DeserializeOwned;
use serde_json::Value;
use switchyard_crds::names::GPU_RESOURCE;
use switchyard_crds::{Preemptible, TrainJob, labels};
use switchyard_plan::job;
use switchyard_plan::resources::of_quantities;

/// A finished job according to its object.
struct FinishedJob {
    name: String,
    gpus: u64,
    submit: Option<Timestamp>,
    start: Option<Timestamp>,
    end: Option<Timestamp>,
    /// Seconds.
    limit: Option<i64>,
    is_preemptible: bool,
    namespace: String,
}

/// Builds a trace from the TrainJobs and pods in a list of objects.
///
/// # Errors
/// A job has more GPUs than the cluster, or no job has ended.
pub fn from_objects(items: &[Value], fabric: &Fabric) -> Result<Trace, String> {
    let mut log = Log::default();
    let jobs = of_kind::<TrainJob>(items, "TrainJob").map(|job| of_job(&job));
    let pods = of_kind::<Pod>(items, "Pod").filter_map(|pod| of_pod(&pod));
    for (number, past) in jobs.chain(pods).enumerate() {
        let FinishedJob { name, gpus: count, submit, start, end, limit, is_preemptible, namespace } = past;
        if count == 0 {
            log.skip(Skipped::NoGpus);
            continue;
        }
        let gpus = gpus(&count.to_string(), fabric)
            .map_err(|expected| format!("{name}: {count} GPUs; expected {expected}"))?;
        let (Some(submit), Some(start), Some(end)) = (submit, start, end) else {
            log.skip(Skipped::NoEnd);
            continue;
        };
        let duration = end.duration_since(start).as_secs_f64();
        let limit = limit.map(|limit| limit as f64);
        let preemptible = Some(is_preemptible);
        let line = number as u64 + 1;
        log.add(submit, Row { line, submit: 0.0, duration, gpus, queue: namespace, limit, preemptible });
    }
    let none = "no TrainJob and no pod with GPUs of this cluster has ended: name a trace with --trace";
    log.finish(Format::Objects).map_err(|_| none.to_owned())
}

fn of_kind<'a, T: DeserializeOwned>(items: &'a [Value], kind: &'static str) -> impl Iterator<Item = T> + 'a {
    let of_kind = items.iter().filter(move |item| item["kind"] == kind);
    // An object that cannot be parsed has not run under this version.
    of_kind.filter_map(|item| serde_json::from_value(item.clone()).ok())
}

fn of_job(job: &TrainJob) -> FinishedJob {
    let status = job.status.as_ref();
    let placed = status.and_then(|status| status.placed_time.as_ref().or(status.start_time.as_ref()));
    let namespace = job.metadata.namespace.clone().unwrap_or_default();
    FinishedJob {
        name: format!("TrainJob {namespace}/{}", job.metadata.name.as_deref().unwrap_or_default()),
        gpus: job::total_gpus(job),
        submit: job.metadata.creation_timestamp.as_ref().map(|time| time.0),
        start: placed.map(|time| time.0),
        end: status.and_then(|status| status.completion_time.as_ref()).map(|time| time.0),
        limit: job.spec.active_deadline_seconds,
        is_preemptible: job.spec.preemptible() == Preemptible::Always,
        namespace,
    }
}

/// `None` if the pod belongs to a TrainJob or has no GPUs, as most pods of a cluster.
fn of_pod(pod: &Pod) -> Option<FinishedJob> {
    let (metadata, spec, status) = (&pod.metadata, pod.spec.as_ref()?, pod.status.as_ref());
    if metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(labels::JOB_UID)) {
        return None;
    }
    let limits = spec.containers.iter().filter_map(|container| container.resources.as_ref()?.limits.as_ref());
    let gpus: i64 = limits.map(|limits| of_quantities(limits).get(GPU_RESOURCE) / 1000).sum();
    let gpus = u64::try_from(gpus).ok().filter(|gpus| *gpus > 0)?;
    let has_ended = matches!(status.and_then(|status| status.phase.as_deref()), Some("Succeeded" | "Failed"));
    let containers = status.and_then(|status| status.container_statuses.as_ref()).into_iter().flatten();
    let ends =
        containers.filter_map(|container| Some(container.state.as_ref()?.terminated.as_ref()?.finished_at.as_ref()?.0));
    let namespace = metadata.namespace.clone().unwrap_or_default();
    Some(FinishedJob {
        name: format!("pod {namespace}/{}", metadata.name.as_deref().unwrap_or_default()),
        gpus,
        submit: metadata.creation_timestamp.as_ref().map(|time| time.0),
        start: status.and_then(|status| status.start_time.as_ref()).map(|time| time.0),
        end: ends.max().filter(|_| has_ended),
        limit: spec.active_deadline_seconds,
        is_preemptible: false,
        namespace,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    fn job(name: &str, nodes: u32, status: &Value) -> Value {
        json!({
            "apiVersion": labels::API_VERSION, "kind": "TrainJob",
            "metadata": {"name": name, "namespace": "vision", "creationTimestamp": "2026-11-20T12:00:00Z"},
            "spec": {
                "activeDeadlineSeconds": 7200,
                "trainer": {"framework": "Plain", "image": "i", "numNodes": nodes, "resourcesPerNode": {"limits": {"nvidia.com/gpu": 8}}},
            },
            "status": status,
        })
    }

    fn pod(name: &str, gpus: &str, labels: &Value, phase: &str) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": "nlp", "creationTimestamp": "2026-11-20T11:59:00Z", "labels": labels},
            "spec": {"containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": gpus}}}]},
            "status": {
                "phase": phase, "startTime": "2026-11-20T12:00:00Z",
                "containerStatuses": [{
                    "name": "c", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                    "state": {"terminated": {"exitCode": 0, "finishedAt": "2026-11-20T12:10:00Z"}},
                }],
            },
        })
    }

    #[test]
    fn jobs_and_pods_that_have_ended_are_the_trace() {
        let ran = json!({"placedTime": "2026-11-20T12:05:00Z", "completionTime": "2026-11-20T13:05:00Z"});
        let mut preemptible = job("preemptible", 1, &ran);
        preemptible["spec"]["queue"] = json!({"preemptible": "Always"});
        let items = [
            job("ended", 2, &ran),
            preemptible,
            job("runs", 2, &json!({"placedTime": "2026-11-20T12:05:00Z"})),
            pod("notebook", "1", &json!({}), "Succeeded"),
            pod("runs", "4", &json!({}), "Running"),
            pod("of-a-job", "8", &json!({labels::JOB_UID: "u"}), "Succeeded"),
            pod("web", "0", &json!({}), "Succeeded"),
        ];
        let Trace { format, rows, skipped } = from_objects(&items, &Fabric::regular(2, 1)).unwrap();
        let rows: Vec<_> =
            rows.iter().map(|row| (row.submit, row.duration, row.gpus, row.limit, row.preemptible)).collect();
        let hour = |gpus, preemptible| (60.0, 3600.0, gpus, Some(7200.0), Some(preemptible));
        assert_eq!(rows, [(0.0, 600.0, 1, None, Some(false)), hour(16, false), hour(8, true)]);
        assert_eq!((format, skipped), (Format::Objects, vec![(Skipped::NoEnd, 2)]));
    }

    #[test]
    fn unusable_objects_are_reported() {
        let fabric = Fabric::regular(2, 1);
        assert!(
            from_objects(&[job("runs", 1, &json!({}))], &fabric).unwrap_err().starts_with("no TrainJob and no pod")
        );
        let large = from_objects(&[job("large", 3, &json!({}))], &fabric).unwrap_err();
        assert_eq!(
            large,
            "TrainJob vision/large: 24 GPUs; expected 1 to 16: a job gets all its GPUs at once, and the cluster has no more"
        );
    }
}
