//! Node request of a gang for the cluster autoscaler: a ProvisioningRequest and the PodTemplate
//! that it references.
//!
//! Autoscalers ignore gated pods. For a ProvisioningRequest, the autoscaler itself checks whether
//! pods like the template fit, and adds nodes for all of them or for none. The template contains
//! only the fields that the scheduler considers, as the pods were admitted with them.

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

/// Pod annotation: the request that the pod consumes. The autoscaler adds no other nodes for this
/// pod.
const CONSUMES: &str = "autoscaling.x-k8s.io/consume-provisioning-request";
/// Pod annotation: the class of that request.
const CLASS: &str = "autoscaling.x-k8s.io/provisioning-class-name";

/// Name of an attempt's request, and of its template in a job without roles.
pub fn provisioning_name(valid: &ValidJob, attempt: u32) -> String {
    config_name(valid, attempt)
}

/// The objects of an attempt's request. Templates come first because the request references them.
pub fn provisioning(
    job: &TrainJob,
    valid: &ValidJob,
    defaults: &Defaults,
    attempt: u32,
    admitted: &Admitted,
    class: &str,
) -> Vec<Object> {
    let name = provisioning_name(valid, attempt);
    let template = |name: &str, first_node: u32, admitted: &Admitted| {
        let template_pod = pod(job, valid, defaults, attempt, first_node);
        let labels = template_pod.metadata.labels.clone();
        let spec = scheduling_spec(template_pod.spec.unwrap_or_default(), admitted);
        let template = PodTemplate {
            metadata: metadata(job, name.to_string()),
            template: Some(PodTemplateSpec {
                // Labels by which the pods' spread and anti-affinity terms select each other.
                metadata: Some(ObjectMeta { labels, ..ObjectMeta::default() }),
                spec: Some(spec),
            }),
        };
        Object::PodTemplate(Box::new(template))
    };
    let pods = |name: &str, count: u32| PodSet {
        pod_template_ref: PodTemplateRef { name: name.to_string() },
        count: i32::try_from(count).unwrap_or(i32::MAX),
    };
    let (mut objects, mut pod_sets) = (Vec::new(), Vec::new());
    if valid.roles.is_empty() {
        objects.push(template(&name, 0, admitted));
        pod_sets.push(pods(&name, valid.request.nodes));
    }
    for (role, admitted) in valid.roles.iter().zip(&admitted.roles) {
        let name = format!("{name}-{}", role.name);
        objects.push(template(&name, role.first_node, admitted));
        pod_sets.push(pods(&name, role.pods()));
    }
    let spec = ProvisioningRequestSpec { provisioning_class_name: class.into(), pod_sets };
    let mut request = ProvisioningRequest::new(&name, spec);
    request.metadata = metadata(job, name);
    objects.push(Object::ProvisioningRequest(Box::new(request)));
    objects
}

/// Resource requests of a pod as a single container, including sidecars and overhead.
fn scheduling_spec(pod: PodSpec, admitted: &Admitted) -> PodSpec {
    let trainer = pod.containers.into_iter().find(|container| container.name == TRAINER).unwrap_or_default();
    let host_ports = trainer.ports.into_iter().flatten().filter(|port| port.host_port.is_some()).collect::<Vec<_>>();
    let container = Container {
        name: TRAINER.into(),
        image: trainer.image,
        ports: Some(host_ports).filter(|ports| !ports.is_empty()),
        resources: Some(amounts(&admitted.requests)),
        ..Container::default()
    };
    // If pods differ, which never happens in a gang with one template, the first one's rules are
    // used.
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
    // Extended resources must be limits as well as requests, or the server rejects them.
    ResourceRequirements { limits: all.clone(), requests: all, ..ResourceRequirements::default() }
}

/// Adds the request that a pod consumes to the pod's patch.
pub fn annotate_consumer(patch: &mut Value, request: &str, class: &str) {
    patch["metadata"]["annotations"][CONSUMES] = request.into();
    patch["metadata"]["annotations"][CLASS] = class.into();
}
