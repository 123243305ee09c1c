//! Writes the status, under the resource version that it was made from.

use super::error::Refusal;
use super::executor::Executor;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::json;
use switchyard_crds::labels::STATUS_MANAGER;
use switchyard_crds::{TrainJob, TrainJobStatus, conditions};
use switchyard_plan::cluster::Action;
use switchyard_plan::objects::{self, Object};
use switchyard_plan::slices;

impl Executor {
    /// Writes the status of a job; before it, the slices of a place that does not stand in it. Returns the new resource version.
    ///
    /// # Errors
    /// `Stale` when the job has changed since it was read.
    pub async fn write_status(&self, job: &TrainJob, mut status: TrainJobStatus) -> Result<Option<String>, Refusal> {
        self.write_slices(job, &mut status).await?;
        let (namespace, name) = (job.namespace().unwrap_or_default(), job.name_any());
        let api = Api::<TrainJob>::namespaced(self.client.clone(), &namespace);
        let mut next = job.clone();
        // Others' entries would be sent back for nothing.
        next.metadata.managed_fields = None;
        next.status = Some(status);
        let params = PostParams { field_manager: Some(STATUS_MANAGER.into()), ..PostParams::default() };
        let what = format!("write the status of TrainJob {name}");
        let written = self.call(&what, api.replace_status(&name, &params, &next)).await?;
        Ok(written.resource_version())
    }

    /// Writes the nodes of a large place to its slices, if it is a new one, and takes them out of the status.
    async fn write_slices(&self, job: &TrainJob, status: &mut TrainJobStatus) -> Result<(), Refusal> {
        let Some(placement) = status.placement.as_mut().filter(|placement| placement.slices.is_some()) else {
            return Ok(());
        };
        if slices::of(job) != placement.slices.as_ref() {
            let (namespace, uid) = (job.namespace().unwrap_or_default(), job.uid().unwrap_or_default());
            let slices = objects::placement_slices(job, placement).into_iter();
            let creates = slices.map(|slice| Action::Create(Object::PlacementSlice(Box::new(slice)))).collect();
            if let Some(refusal) = self.apply(&namespace, &uid, creates).await.refusals.into_iter().next() {
                return Err(refusal);
            }
        }
        placement.nodes.clear();
        Ok(())
    }

    /// Ends a job whose spec cannot even be read.
    ///
    /// # Errors
    /// The server refuses the write.
    pub async fn refuse_unreadable(
        &self,
        namespace: &str,
        name: &str,
        version: &str,
        why: &str,
    ) -> Result<(), Refusal> {
        let now = k8s_openapi::jiff::Timestamp::now();
        let condition = |kind: &str, state: &str, reason: &str| json!({"type": kind, "status": state, "reason": reason, "message": why, "lastTransitionTime": now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()});
        let patch = json!({
            "metadata": {"resourceVersion": version},
            "status": {"conditions": [
                condition(conditions::SUCCEEDED, "False", "Failed"),
                condition(conditions::FAILED, "True", conditions::INVALID_SPEC),
            ]},
        });
        let api = Api::<kube::core::PartialObjectMeta<TrainJob>>::namespaced(self.client.clone(), namespace);
        let params = PatchParams { field_manager: Some(STATUS_MANAGER.into()), ..PatchParams::default() };
        self.call(
            &format!("write the status of TrainJob {name}"),
            api.patch_status(name, &params, &Patch::Merge(patch)),
        )
        .await?;
        Ok(())
    }
}
