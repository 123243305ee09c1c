//! Schedulers known to exist. If a known scheduler is silent for a minute, it is restarting or has
//! lost its watches; an unknown one may not exist.

use k8s_openapi::api::core::v1::Pod;
use std::collections::BTreeSet;
use switchyard_crds::TrainJob;
use switchyard_plan::cluster::view::{DEFAULT_SCHEDULER, PodView};

/// Names of schedulers that have bound or refused a pod of a job.
#[derive(Debug, Default)]
pub struct Schedulers(BTreeSet<String>);

impl Schedulers {
    /// Records the scheduler of a job's pod. Pods are gated at creation, so the API server lets
    /// only a scheduler bind them.
    pub fn observe(&mut self, pod: &Pod, view: &PodView) {
        let name = pod.spec.as_ref().and_then(|spec| spec.scheduler_name.as_ref());
        if let Some(name) = name.filter(|name| !self.0.contains(*name))
            && (view.node.is_some() || view.unschedulable.is_some())
        {
            self.0.insert(name.clone());
        }
    }

    /// Whether the job's scheduler is known to exist. Every cluster has the default one.
    pub fn is_known(&self, job: &TrainJob) -> bool {
        let spec = job.spec.template.as_ref().and_then(|template| template.spec.as_ref());
        let name = spec.and_then(|spec| spec.scheduler_name.as_ref());
        name.is_none_or(|name| name == DEFAULT_SCHEDULER || self.0.contains(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pod(scheduler: &str, more: Value) -> Pod {
        let mut pod = json!({
            "metadata": {"name": "a-1-0", "namespace": "team", "uid": "p0"},
            "spec": {"containers": [], "schedulerName": scheduler},
        });
        for (field, value) in more.as_object().unwrap() {
            pod["spec"][field] = value.clone();
        }
        serde_json::from_value(pod).unwrap()
    }

    #[test]
    fn a_scheduler_is_known_once_it_has_bound_or_refused_a_pod() {
        let mut schedulers = Schedulers::default();
        let job = |scheduler: Value| -> TrainJob {
            let trainer = json!({"framework": "Plain", "image": "i", "numNodes": 1});
            let template = json!({"spec": {"containers": [], "schedulerName": scheduler}});
            let spec = json!({"trainer": trainer, "template": template});
            serde_json::from_value(json!({
                "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "a"}, "spec": spec,
            }))
            .unwrap()
        };
        let mut observe = |pod: &Pod| schedulers.observe(pod, &PodView::of(pod));
        observe(&pod("volcano", json!({"schedulingGates": [{"name": "other"}]})));
        let bound = pod("bins", json!({"nodeName": "n0"}));
        observe(&bound);
        let mut refused = pod("spread", json!({}));
        let condition = json!({"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]});
        refused.status = serde_json::from_value(condition).unwrap();
        observe(&refused);
        let names = [json!(null), json!("default-scheduler"), json!("bins"), json!("spread"), json!("volcano")];
        let known = names.map(|name| schedulers.is_known(&job(name)));
        assert_eq!(known, [true, true, true, true, false]);
    }
}
