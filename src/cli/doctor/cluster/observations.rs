//! Observations for the checks: cluster objects, and the API server's responses to dry-run
//! creations.

use super::rights::{self, Accounts, MissingPermissions};
use crate::connect::error_message;
use futures::future::join_all;
use jiff::Timestamp;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, RuleWithOperations, ServiceReference, ValidatingAdmissionPolicy,
    ValidatingAdmissionPolicyBinding, ValidatingWebhookConfiguration, WebhookClientConfig,
};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Event, Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceSlice};
use k8s_openapi::api::resource::v1alpha3::DeviceTaintRule;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::ListParams;
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Debug;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_crds::labels::LEASE;
use switchyard_crds::{TrainJob, generate};
use switchyard_plan::policies::Probe;
use switchyard_service::{ServerClock, trial};

/// All observations. What could not be read is empty here and listed in `unread`.
#[derive(Debug, Default)]
pub(super) struct Observations {
    pub now: Timestamp,
    pub crds: BTreeMap<String, CustomResourceDefinition>,
    pub policies: Vec<ValidatingAdmissionPolicy>,
    pub bindings: Vec<ValidatingAdmissionPolicyBinding>,
    pub releases: Vec<Release>,
    pub device_classes: Vec<DeviceClass>,
    /// The rules that can select devices by class or CEL, which only `v1alpha3` has.
    pub taint_rules: Vec<DeviceTaintRule>,
    pub drivers: Vec<String>,
    pub nodes: Vec<Node>,
    pub reports: Vec<GPUTopology>,
    pub jobs: Vec<TrainJob>,
    /// Webhooks that must respond before a pod or TrainJob is created, and why they cannot.
    pub dead_webhooks: Vec<(String, &'static str)>,
    /// What could not be read, with the API server's message.
    pub unread: Vec<(String, String)>,
}

/// An installation.
#[derive(Debug, Default)]
pub(super) struct Release {
    pub controller: Deployment,
    pub agents: Option<DaemonSet>,
    pub lease: Option<Lease>,
    /// Warning events about the agents' DaemonSet.
    pub warnings: Vec<String>,
    /// Responses to dry-run creations in the release's namespaces: a foreign pod, a foreign pod
    /// with a job label, and a TrainJob with a capability that is never allowed.
    pub foreign: Denial,
    pub forged: Denial,
    pub job: Denial,
    /// The response to a dry-run agent pod.
    pub agent_pod: Denial,
    /// Missing permissions of its accounts.
    pub missing_permissions: BTreeMap<String, MissingPermissions>,
}

/// The error message if the creation was refused.
pub(super) type Denial = Option<String>;

impl Release {
    /// Values of a controller argument.
    pub fn arguments(&self, name: &str) -> Vec<&str> {
        let template = self.controller.spec.as_ref().and_then(|spec| spec.template.spec.as_ref());
        let arguments = template.into_iter().flat_map(|pod| &pod.containers).flat_map(|c| c.args.iter().flatten());
        arguments.filter_map(|argument| argument.strip_prefix(name)?.strip_prefix('=')).collect()
    }

    fn accounts<'a>(&'a self, place: &'a str) -> Accounts<'a> {
        Accounts {
            place,
            controller: self.controller.spec.as_ref().and_then(|spec| spec.template.spec.as_ref()),
            agents: self.agents.as_ref().and_then(|agents| agents.spec.as_ref()?.template.spec.as_ref()),
            watched: self.arguments("--watch-namespace"),
            is_autoscaling: !self.arguments("--provisioning-class").is_empty(),
        }
    }

    pub fn place(&self) -> String {
        self.controller.namespace().unwrap_or_default()
    }

    /// The Helm release name of its objects, from their label.
    pub fn name(&self) -> &str {
        release_name(self.controller.labels())
    }
}

/// The release of an object, from its labels.
pub(super) fn release_name(labels: &BTreeMap<String, String>) -> &str {
    labels.get("app.kubernetes.io/instance").map_or("", String::as_str)
}

fn ours(component: &str) -> ListParams {
    ListParams::default()
        .labels(&format!("app.kubernetes.io/part-of=switchyard,app.kubernetes.io/component={component}"))
}

/// Reads all objects and runs all dry-run creations.
pub(super) async fn gather(client: &Client, clock: &ServerClock) -> Observations {
    let mut observations = Observations::default();
    observations.policies = observations.list(client, &ours("policy")).await;
    observations.bindings = observations.list(client, &ours("policy")).await;
    for (_, crd) in generate::crds() {
        let found = Api::<CustomResourceDefinition>::all(client.clone()).get_opt(&crd.name_any()).await;
        let found = observations.noted("get CustomResourceDefinitions", found).flatten();
        observations.crds.extend(found.map(|found| (found.name_any(), found)));
    }
    let controllers: Vec<Deployment> = observations.list(client, &ours("controller")).await;
    let mut agents: Vec<DaemonSet> = observations.list(client, &ours("node-agent")).await;
    for controller in controllers {
        let is_same = |agent: &DaemonSet| {
            agent.namespace() == controller.namespace()
                && release_name(agent.labels()) == release_name(controller.labels())
        };
        let agents = agents.iter().position(is_same).map(|at| agents.swap_remove(at));
        let release = Release { controller, agents, ..Release::default() };
        let release = observations.release(client, release).await;
        observations.releases.push(release);
    }
    observations.device_classes = observations.list(client, &ListParams::default()).await;
    let rules = Api::<DeviceTaintRule>::all(client.clone()).list(&ListParams::default()).await;
    if !matches!(&rules, Err(kube::Error::Api(status)) if status.code == 404) {
        observations.taint_rules =
            observations.noted("list devicetaintrules", rules).map(|list| list.items).unwrap_or_default();
    }
    let slices: Vec<ResourceSlice> = observations.list(client, &ListParams::default()).await;
    observations.drivers = slices.into_iter().map(|slice| slice.spec.driver).collect();
    observations.nodes = observations.list(client, &ListParams::default()).await;
    observations.reports = observations.list(client, &ListParams::default()).await;
    observations.jobs = observations.list(client, &ListParams::default()).await;
    observations.webhooks(client).await;
    observations.now = clock.now();
    observations
}

impl Observations {
    fn noted<T>(&mut self, what: &str, answer: kube::Result<T>) -> Option<T> {
        answer.map_err(|error| self.unread.push((what.into(), error_message(&error)))).ok()
    }

    async fn list<K>(&mut self, client: &Client, which: &ListParams) -> Vec<K>
    where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
    {
        let listed = Api::<K>::all(client.clone()).list(which).await;
        self.noted(&format!("list {}", K::plural(&())), listed).map(|list| list.items).unwrap_or_default()
    }

    async fn release(&mut self, client: &Client, mut release: Release) -> Release {
        let place = release.place();
        let lease = Api::<Lease>::namespaced(client.clone(), &place).get_opt(LEASE).await;
        release.lease = self.noted("get the Lease", lease).flatten();
        if let Some(agents) = &release.agents {
            let about = format!("involvedObject.kind=DaemonSet,involvedObject.name={}", agents.name_any());
            let events = Api::<Event>::namespaced(client.clone(), &place);
            let events = events.list(&ListParams::default().fields(&about)).await;
            let events = self.noted("list events", events).map(|list| list.items).unwrap_or_default();
            let warnings = events.into_iter().filter(|event| event.type_.as_deref() == Some("Warning"));
            release.warnings = warnings.filter_map(|event| event.message).collect();
        }
        let works_in =
            release.arguments("--watch-namespace").first().map_or(place.clone(), |first| (*first).to_string());
        let pods = Api::<Pod>::namespaced(client.clone(), &works_in);
        if let Some(pod) = release.agents.as_ref().and_then(agent_pod) {
            let here = Api::<Pod>::namespaced(client.clone(), &place);
            release.agent_pod = trial(&here, &pod).await.err();
        }
        release.missing_permissions = rights::missing_permissions(client, &release.accounts(&place)).await;
        release.foreign = trial(&pods, &Probe::Foreign.pod()).await.err();
        release.forged = trial(&pods, &Probe::Forged.pod()).await.err();
        release.job = match forbidden_job() {
            Some(job) => trial(&Api::<TrainJob>::namespaced(client.clone(), &works_in), &job).await.err(),
            None => None,
        };
        release
    }

    /// Finds webhooks that must respond before a pod or one of our objects is written, but cannot.
    async fn webhooks(&mut self, client: &Client) {
        let validating: Vec<ValidatingWebhookConfiguration> = self.list(client, &ListParams::default()).await;
        let mutating: Vec<MutatingWebhookConfiguration> = self.list(client, &ListParams::default()).await;
        let mut needed: Vec<(String, ServiceReference)> = Vec::new();
        let mut need =
            |name: &str, policy: &Option<String>, rules: &Option<Vec<RuleWithOperations>>, at: WebhookClientConfig| {
                let fails_closed = policy.as_deref() != Some("Ignore");
                if let Some(service) = at.service.filter(|_| fails_closed && rules.iter().flatten().any(is_about_ours))
                {
                    needed.push((name.into(), service));
                }
            };
        for hook in validating.into_iter().flat_map(|configuration| configuration.webhooks.unwrap_or_default()) {
            need(&hook.name, &hook.failure_policy, &hook.rules, hook.client_config);
        }
        for hook in mutating.into_iter().flat_map(|configuration| configuration.webhooks.unwrap_or_default()) {
            need(&hook.name, &hook.failure_policy, &hook.rules, hook.client_config);
        }
        let found = join_all(needed.into_iter().map(async |(name, at)| {
            let service = Api::<Service>::namespaced(client.clone(), &at.namespace).get_opt(&at.name).await;
            let of_service = ListParams::default().labels(&format!("kubernetes.io/service-name={}", at.name));
            let slices = Api::<EndpointSlice>::namespaced(client.clone(), &at.namespace).list(&of_service).await;
            (format!("{name} (Service {}/{})", at.namespace, at.name), service, slices)
        }));
        for (name, service, slices) in found.await {
            let service = self.noted("get Services of webhooks", service);
            let slices = self.noted("list EndpointSlices of webhooks", slices);
            match (service, slices) {
                (Some(None), _) => self.dead_webhooks.push((name, "its Service does not exist")),
                (Some(Some(_)), Some(slices)) if !slices.items.iter().any(answers) => {
                    self.dead_webhooks.push((name, "no pod behind its Service is ready"));
                }
                _ => {}
            }
        }
    }
}

/// Whether a Service has a ready endpoint.
fn answers(slice: &EndpointSlice) -> bool {
    slice.endpoints.iter().any(|endpoint| {
        let ready = endpoint.conditions.as_ref().and_then(|conditions| conditions.ready);
        ready.unwrap_or(true) && !endpoint.addresses.is_empty()
    })
}

/// A pod from the DaemonSet's template.
fn agent_pod(agents: &DaemonSet) -> Option<Pod> {
    let template = agents.spec.as_ref()?.template.clone();
    let mut metadata = template.metadata.unwrap_or_default();
    metadata.name = Some("switchyard-probe".into());
    Some(Pod { metadata, spec: template.spec, status: None })
}

/// Whether a webhook is called for pods or for our own kinds.
fn is_about_ours(rule: &RuleWithOperations) -> bool {
    let has = |words: &Option<Vec<String>>, wanted: &[&str]| {
        words.iter().flatten().any(|word| wanted.contains(&word.as_str()))
    };
    let of_pods = has(&rule.api_groups, &["", "*"]) && has(&rule.resources, &["pods", "*", "*/*"]);
    let ours =
        ["trainjobs", "trainjobs/status", "gputopologies", "gputopologies/status", "placementslices", "*", "*/*"];
    let of_ours = has(&rule.api_groups, &["training.switchyard.dev", "*"]) && has(&rule.resources, &ours);
    (of_pods || of_ours) && has(&rule.operations, &["CREATE", "UPDATE", "*"])
}

/// A TrainJob that no configuration allows.
fn forbidden_job() -> Option<TrainJob> {
    let container = json!({"name": "trainer", "securityContext": {"capabilities": {"add": ["SWITCHYARD_PROBE"]}}});
    let job = json!({"metadata": {"name": "switchyard-probe"}, "spec": {
        "trainer": {"framework": "Plain", "image": "probe", "command": ["probe"]},
        "template": {"spec": {"containers": [container]}}}});
    serde_json::from_value(job).ok()
}
