//! What a gang asks of the cluster's autoscaler: nodes, by a ProvisioningRequest and the PodTemplate that it names.
//!
//! Gated pods are nothing to autoscalers. A ProvisioningRequest is: the autoscaler tries on its own whether pods like the template fit, and makes nodes
//! for all of them or for none. The template has what the scheduler looks at, as the pods were admitted with it, and nothing else of the job.

use super::{Defaults, Object, config_name, metadata, pod};
use crate::ValidJob;
use crate::cluster::admitted::Admitted;
use k8s_openapi::api::core::v1::{
    Container, NodeAffinity, PodSpec, PodTemplate, PodTemplateSpec, ResourceRequirements, Volume,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::Value;
use std::collections::BTreeMap;
use switchyard_core::quantity::{PODS, Resources};
use switchyard_crds::names::TRAINER;
use switchyard_crds::{PodSet, PodTemplateRef, ProvisioningRequest, ProvisioningRequestSpec, TrainJob};

/// Annotation of a pod: the request that made its room. For such a pod the autoscaler makes no other.
const CONSUMES: &str = "autoscaling.x-k8s.io/consume-provisioning-request";
/// Annotation of a pod: the class of that request.
const CLASS: &str = "autoscaling.x-k8s.io/provisioning-class-name";

/// Name of the request of an attempt, and of its template.
pub fn provisioning_name(valid: &ValidJob, attempt: u32) -> String {
    config_name(valid, attempt)
}

/// The request for an attempt, after the template that it names.
pub fn provisioning(
    job: &TrainJob,
    valid: &ValidJob,
    defaults: &Defaults,
    attempt: u32,
    admitted: &Admitted,
    class: &str,
) -> [Object; 2] {
    let name = provisioning_name(valid, attempt);
    let made = pod(job, valid, defaults, attempt, 0);
    let labels = made.metadata.labels.clone();
    let spec = asks(made.spec.unwrap_or_default(), admitted);
    let template = PodTemplate {
        metadata: metadata(job, name.clone()),
        template: Some(PodTemplateSpec {
            // Those by which spread and anti-affinity of the pods know each other.
            metadata: Some(ObjectMeta { labels, ..ObjectMeta::default() }),
            spec: Some(spec),
        }),
    };
    let pods = PodSet {
        pod_template_ref: PodTemplateRef { name: name.clone() },
        count: i32::try_from(valid.request.nodes).unwrap_or(i32::MAX),
    };
    let spec = ProvisioningRequestSpec { provisioning_class_name: class.into(), pod_sets: vec![pods] };
    let mut request = ProvisioningRequest::new(&name, spec);
    request.metadata = metadata(job, name);
    [Object::PodTemplate(Box::new(template)), Object::ProvisioningRequest(Box::new(request))]
}

/// What a pod asks of a node: one container with all requests, sidecars and overhead included.
fn asks(pod: PodSpec, admitted: &Admitted) -> PodSpec {
    let trainer = pod.containers.into_iter().find(|container| container.name == TRAINER).unwrap_or_default();
    let host_ports = trainer.ports.into_iter().flatten().filter(|port| port.host_port.is_some()).collect::<Vec<_>>();
    let container = Container {
        name: TRAINER.into(),
        image: trainer.image,
        ports: Some(host_ports).filter(|ports| !ports.is_empty()),
        resources: Some(amounts(&admitted.requests)),
        ..Container::default()
    };
    // Where the pods say different things, which no gang of one template does, the first of them counts.
    let rules = admitted.rules.first();
    let mut affinity = pod.affinity;
    let required = rules.and_then(|rules| rules.required.clone());
    if required.is_some() || affinity.as_ref().is_some_and(|affinity| affinity.node_affinity.is_some()) {
        let node = affinity.get_or_insert_default().node_affinity.get_or_insert_with(NodeAffinity::default);
        node.required_during_scheduling_ignored_during_execution = required;
    }
    let volumes = pod.volumes.into_iter().flatten();
    let claimed: Vec<Volume> = volumes.filter(|volume| volume.persistent_volume_claim.is_some()).collect();
    PodSpec {
        containers: vec![container],
        node_selector: rules.map(|rules| rules.selector.clone()).filter(|selector| !selector.is_empty()),
        tolerations: rules.map(|rules| rules.tolerations.clone()).filter(|tolerations| !tolerations.is_empty()),
        affinity,
        topology_spread_constraints: pod.topology_spread_constraints,
        priority_class_name: pod.priority_class_name,
        scheduler_name: pod.scheduler_name,
        host_network: pod.host_network,
        volumes: Some(claimed).filter(|volumes| !volumes.is_empty()),
        restart_policy: pod.restart_policy,
        ..PodSpec::default()
    }
}

fn amounts(requests: &Resources) -> ResourceRequirements {
    let exact = |amount: i64| if amount % 1000 == 0 { (amount / 1000).to_string() } else { format!("{amount}m") };
    let named = requests.names().filter(|name| *name != PODS && requests.get(name) > 0);
    let all = named.map(|name| (name.to_string(), Quantity(exact(requests.get(name))))).collect();
    let all = Some(all).filter(|all: &BTreeMap<String, Quantity>| !all.is_empty());
    // Extended resources are limits as well as requests, or the server refuses them.
    ResourceRequirements { limits: all.clone(), requests: all, ..ResourceRequirements::default() }
}

/// Has the patch of a pod say whose room it takes.
pub fn consume(patch: &mut Value, request: &str, class: &str) {
    patch["metadata"]["annotations"][CONSUMES] = request.into();
    patch["metadata"]["annotations"][CLASS] = class.into();
}
