//! What the checks look at: objects of the cluster, and answers of the API server to what is created on trial.

use futures::future::join_all;
use jiff::Timestamp;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, RuleWithOperations, ServiceReference, ValidatingAdmissionPolicy,
    ValidatingAdmissionPolicyBinding, ValidatingWebhookConfiguration, WebhookClientConfig,
};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Event, Namespace, Pod, Service};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceSlice};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::ListParams;
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Debug;
use switchyard_crds::labels::LEASE;
use switchyard_crds::{TrainJob, generate};
use switchyard_plan::policies::Probe;
use switchyard_service::trial;

/// Everything that was read. What could not be read is empty, and in `unread`.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub now: Timestamp,
    pub crds: BTreeMap<String, CustomResourceDefinition>,
    pub policies: Vec<ValidatingAdmissionPolicy>,
    pub bindings: Vec<ValidatingAdmissionPolicyBinding>,
    pub releases: Vec<Release>,
    pub device_classes: Vec<String>,
    pub drivers: Vec<String>,
    /// Webhooks without which no pod is created, and whose Service does not exist.
    pub dead_webhooks: Vec<String>,
    /// What could not be read, with the API server's words.
    pub unread: Vec<(String, String)>,
}

/// One installation.
#[derive(Debug, Default)]
pub(super) struct Release {
    pub controller: Deployment,
    pub agents: Option<DaemonSet>,
    pub lease: Option<Lease>,
    pub namespace: Option<Namespace>,
    /// Messages of warnings about the agents' DaemonSet.
    pub warnings: Vec<String>,
    /// Answers to what was created on trial where the release works: a pod of others, one with the label of a job, a TrainJob with a
    /// capability that nobody may have.
    pub foreign: Answer,
    pub forged: Answer,
    pub job: Answer,
}

/// `Some`: refused, in these words.
pub(super) type Answer = Option<String>;

impl Release {
    /// Values of an argument of the controller.
    pub fn arguments(&self, name: &str) -> Vec<&str> {
        let template = self.controller.spec.as_ref().and_then(|spec| spec.template.spec.as_ref());
        let arguments = template.into_iter().flat_map(|pod| &pod.containers).flat_map(|c| c.args.iter().flatten());
        arguments.filter_map(|argument| argument.strip_prefix(name)?.strip_prefix('=')).collect()
    }

    pub fn place(&self) -> String {
        self.controller.namespace().unwrap_or_default()
    }

    /// The name that helm gave its objects, by label.
    pub fn name(&self) -> &str {
        instance(self.controller.labels())
    }
}

/// The release of an object, by its labels.
pub(super) fn instance(labels: &BTreeMap<String, String>) -> &str {
    labels.get("app.kubernetes.io/instance").map_or("", String::as_str)
}

/// The error in the API server's words.
fn words(error: kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message,
        error => error.to_string(),
    }
}

fn ours(component: &str) -> ListParams {
    ListParams::default()
        .labels(&format!("app.kubernetes.io/part-of=switchyard,app.kubernetes.io/component={component}"))
}

/// Reads and tries everything.
pub(super) async fn gather(client: &Client) -> Seen {
    let mut seen = Seen { now: Timestamp::now(), ..Seen::default() };
    seen.policies = seen.list(client, &ours("policy")).await;
    seen.bindings = seen.list(client, &ours("policy")).await;
    for (_, crd) in generate::crds() {
        let found = Api::<CustomResourceDefinition>::all(client.clone()).get_opt(&crd.name_any()).await;
        let found = seen.noted("get CustomResourceDefinitions", found).flatten();
        seen.crds.extend(found.map(|found| (found.name_any(), found)));
    }
    let controllers: Vec<Deployment> = seen.list(client, &ours("controller")).await;
    let mut agents: Vec<DaemonSet> = seen.list(client, &ours("node-agent")).await;
    for controller in controllers {
        let is_same = |agent: &DaemonSet| {
            agent.namespace() == controller.namespace() && instance(agent.labels()) == instance(controller.labels())
        };
        let agents = agents.iter().position(is_same).map(|at| agents.swap_remove(at));
        let release = Release { controller, agents, ..Release::default() };
        let release = seen.release(client, release).await;
        seen.releases.push(release);
    }
    let classes: Vec<DeviceClass> = seen.list(client, &ListParams::default()).await;
    let slices: Vec<ResourceSlice> = seen.list(client, &ListParams::default()).await;
    seen.device_classes = classes.iter().map(ResourceExt::name_any).collect();
    seen.drivers = slices.into_iter().map(|slice| slice.spec.driver).collect();
    seen.webhooks(client).await;
    seen
}

impl Seen {
    fn noted<T>(&mut self, what: &str, answer: kube::Result<T>) -> Option<T> {
        answer.map_err(|error| self.unread.push((what.into(), words(error)))).ok()
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
        let namespace = Api::<Namespace>::all(client.clone()).get_opt(&place).await;
        release.namespace = self.noted("get the namespace", namespace).flatten();
        if let Some(agents) = &release.agents {
            let about = format!("involvedObject.kind=DaemonSet,involvedObject.name={}", agents.name_any());
            let events = Api::<Event>::namespaced(client.clone(), &place);
            let events = events.list(&ListParams::default().fields(&about)).await;
            let events = self.noted("list events", events).map(|list| list.items).unwrap_or_default();
            let warnings = events.into_iter().filter(|event| event.type_.as_deref() == Some("Warning"));
            release.warnings = warnings.filter_map(|event| event.message).collect();
        }
        let works_in = release.arguments("--watch-namespace").first().map_or(place, |first| (*first).to_string());
        let pods = Api::<Pod>::namespaced(client.clone(), &works_in);
        release.foreign = trial(&pods, &Probe::Foreign.pod()).await.err();
        release.forged = trial(&pods, &Probe::Forged.pod()).await.err();
        release.job = match daring_job() {
            Some(job) => trial(&Api::<TrainJob>::namespaced(client.clone(), &works_in), &job).await.err(),
            None => None,
        };
        release
    }

    /// Webhooks that must answer before a pod is created, and cannot.
    async fn webhooks(&mut self, client: &Client) {
        let validating: Vec<ValidatingWebhookConfiguration> = self.list(client, &ListParams::default()).await;
        let mutating: Vec<MutatingWebhookConfiguration> = self.list(client, &ListParams::default()).await;
        let mut needed: Vec<(String, ServiceReference)> = Vec::new();
        let mut need =
            |name: &str, policy: &Option<String>, rules: &Option<Vec<RuleWithOperations>>, at: WebhookClientConfig| {
                let fails_closed = policy.as_deref() != Some("Ignore");
                if let Some(service) = at.service.filter(|_| fails_closed && rules.iter().flatten().any(is_about_pods))
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
            let found = Api::<Service>::namespaced(client.clone(), &at.namespace).get_opt(&at.name).await;
            (format!("{name} (Service {}/{})", at.namespace, at.name), found)
        }));
        for (name, found) in found.await {
            if let Some(None) = self.noted("get Services of webhooks", found) {
                self.dead_webhooks.push(name);
            }
        }
    }
}

fn is_about_pods(rule: &RuleWithOperations) -> bool {
    let has = |words: &Option<Vec<String>>, wanted: &[&str]| {
        words.iter().flatten().any(|word| wanted.contains(&word.as_str()))
    };
    has(&rule.api_groups, &["", "*"])
        && has(&rule.resources, &["pods", "*", "*/*"])
        && has(&rule.operations, &["CREATE", "*"])
}

/// A TrainJob that no setting allows.
fn daring_job() -> Option<TrainJob> {
    let container = json!({"name": "trainer", "securityContext": {"capabilities": {"add": ["SWITCHYARD_PROBE"]}}});
    let job = json!({"metadata": {"name": "switchyard-probe"}, "spec": {
        "trainer": {"framework": "Plain", "image": "probe", "command": ["probe"]},
        "template": {"spec": {"containers": [container]}}}});
    serde_json::from_value(job).ok()
}
