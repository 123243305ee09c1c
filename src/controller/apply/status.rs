//! Writes the status with the resource version from which it was computed.

use super::error::ApiError;
use super::executor::Executor;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::api::{DynamicObject, Patch, PatchParams, PostParams};
use kube::core::ApiResource;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use switchyard_crds::labels::STATUS_MANAGER;
use switchyard_crds::{TrainJob, TrainJobStatus, conditions, labels};
use switchyard_plan::cluster::Action;
use switchyard_plan::objects::{self, Object};
use switchyard_plan::slices;

/// Upper bound on the length of condition messages written here, in characters.
const MAX_MESSAGE: usize = 1024;

impl Executor {
    /// Writes the status of a job, after the slices of a large placement. Returns the new resource
    /// version.
    ///
    /// # Errors
    /// `Stale` if the job has changed since it was read.
    pub async fn write_status(&self, job: &TrainJob, mut status: TrainJobStatus) -> Result<Option<String>, ApiError> {
        self.write_slices(job, &mut status).await?;
        let (namespace, name) = (job.namespace().unwrap_or_default(), job.name_any());
        let api = Api::<TrainJob>::namespaced(self.client.clone(), &namespace);
        let mut next = job.clone();
        // Omit the managed fields, because the write does not need them.
        next.metadata.managed_fields = None;
        next.status = Some(status);
        let params = PostParams { field_manager: Some(STATUS_MANAGER.into()), ..PostParams::default() };
        let operation = format!("write the status of TrainJob {name}");
        let written = self.call(&operation, api.replace_status(&name, &params, &next)).await?;
        Ok(written.resource_version())
    }

    /// Moves the nodes of a large placement to slices, and writes these if the placement is new.
    async fn write_slices(&self, job: &TrainJob, status: &mut TrainJobStatus) -> Result<(), ApiError> {
        let Some(placement) = status.placement.as_mut().filter(|placement| placement.slices.is_some()) else {
            return Ok(());
        };
        if slices::of(job) != placement.slices.as_ref() {
            let (namespace, uid) = (job.namespace().unwrap_or_default(), job.uid().unwrap_or_default());
            let slices = objects::placement_slices(job, placement).into_iter();
            let creates = slices.map(|slice| Action::Create(Object::PlacementSlice(Box::new(slice)))).collect();
            if let Some(error) = self.apply(&namespace, &uid, creates).await.errors.into_iter().next() {
                return Err(error);
            }
        }
        placement.nodes.clear();
        Ok(())
    }

    /// Reports an invalid job. A job without an attempt fails; a job with one was started by
    /// another version of this program, and keeps running. Returns the job if it keeps running and
    /// was not reported before.
    ///
    /// # Errors
    /// The server refuses the read or the write.
    pub async fn report_unreadable(
        &self,
        namespace: &str,
        name: &str,
        version: &str,
        why: &str,
    ) -> Result<Option<ObjectReference>, ApiError> {
        let api =
            Api::<DynamicObject>::namespaced_with(self.client.clone(), namespace, &ApiResource::erase::<TrainJob>(&()));
        let operation = format!("get TrainJob {name}");
        let Some(job) = self.call(&operation, api.get_opt(name)).await? else { return Ok(None) };
        let Some(conditions) = unreadable(&job.data, why) else { return Ok(None) };
        let keeps_running = has_started(&job.data);
        let version = if keeps_running { job.metadata.resource_version.as_deref().unwrap_or(version) } else { version };
        let patch = json!({"metadata": {"resourceVersion": version}, "status": {"conditions": conditions}});
        let params = PatchParams { field_manager: Some(STATUS_MANAGER.into()), ..PatchParams::default() };
        let operation = format!("write the status of TrainJob {name}");
        self.call(&operation, api.patch_status(name, &params, &Patch::Merge(patch))).await?;
        let reference = ObjectReference {
            api_version: Some(labels::API_VERSION.into()),
            kind: Some("TrainJob".into()),
            name: job.metadata.name,
            namespace: job.metadata.namespace,
            uid: job.metadata.uid,
            ..ObjectReference::default()
        };
        Ok(Some(reference).filter(|_| keeps_running))
    }
}

/// Whether a job has had an attempt, and so may have pods.
fn has_started(job: &Value) -> bool {
    job.pointer("/status/attempt").and_then(Value::as_i64).is_some_and(|attempt| attempt > 0)
}

/// The new conditions of an invalid job; `None` if nothing needs to change.
fn unreadable(job: &Value, why: &str) -> Option<Vec<Value>> {
    let now = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let why: String = why.chars().take(MAX_MESSAGE).collect();
    let condition = |kind: &str, state: &str, reason: &str| json!({"type": kind, "status": state, "reason": reason, "message": why, "lastTransitionTime": now});
    if !has_started(job) {
        let summary = condition(conditions::SUCCEEDED, "False", "Failed");
        return Some(vec![summary, condition(conditions::FAILED, "True", conditions::INVALID_SPEC)]);
    }
    let mut all = job.pointer("/status/conditions").and_then(Value::as_array).cloned().unwrap_or_default();
    let is = |condition: &Value, kind: &str, state: &str| condition["type"] == kind && condition["status"] == state;
    let is_finished = all.iter().any(|c| is(c, conditions::COMPLETE, "True") || is(c, conditions::FAILED, "True"));
    let is_reported = all.iter().any(|c| is(c, conditions::READABLE, "False") && c["message"] == why);
    if is_finished || is_reported {
        return None;
    }
    all.retain(|condition| condition["type"] != conditions::READABLE);
    all.push(condition(conditions::READABLE, "False", conditions::OTHER_VERSION));
    Some(all)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Regression test: rolling back a release set `Failed` on running jobs, and rolling it out
    /// again deleted their pods.
    #[test]
    fn a_job_started_by_another_version_is_only_reported() {
        let condition =
            |kind: &str, state: &str| json!({"type": kind, "status": state, "reason": "Running", "message": ""});
        let job = |status: Value| json!({"spec": {"trainer": {"framework": "Future"}}, "status": status});
        let kinds = |job: &Value| {
            let conditions = unreadable(job, "unknown variant `Future`")?;
            Some(
                conditions
                    .iter()
                    .map(|c| format!("{}={}", c["type"].as_str().unwrap(), c["status"].as_str().unwrap()))
                    .collect::<Vec<_>>(),
            )
        };
        let expected = |kinds: &[&str]| Some(kinds.iter().map(ToString::to_string).collect::<Vec<_>>());
        let ended = expected(&["Succeeded=False", "Failed=True"]);
        assert_eq!(kinds(&json!({"spec": "text"})), ended, "it never started");
        assert_eq!(kinds(&job(json!({"attempt": "two"}))), ended);
        let runs = json!([condition("Succeeded", "Unknown"), condition("Placed", "True")]);
        let mut running = job(json!({"attempt": 2, "conditions": runs}));
        assert_eq!(kinds(&running), expected(&["Succeeded=Unknown", "Placed=True", "Readable=False"]));
        running["status"]["conditions"] = unreadable(&running, "unknown variant `Future`").unwrap().into();
        assert_eq!(kinds(&running), None, "it is already reported");
        let complete = json!([condition("Complete", "True")]);
        assert_eq!(kinds(&job(json!({"attempt": 1, "conditions": complete}))), None, "it is finished");
    }
}
