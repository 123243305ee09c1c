//! Waits until gangs can request nodes. The ProvisioningRequest kind belongs to the cluster's
//! autoscaler, which may be installed later or never. Until the cluster serves it, nothing is
//! watched or requested.

use super::Context;
use super::queue::Pass;
use super::watch::{Handler, scopes, spawn_in};
use k8s_openapi::api::core::v1::PodTemplate;
use kube::core::DeserializeGuard;
use kube::runtime::watcher;
use std::time::Duration;
use switchyard_crds::{ProvisioningRequest, labels};
use switchyard_ledger::index::{Effect, Index};
use switchyard_plan::objects::{Kind, observed_content};
use tokio::sync::watch::Receiver;
use tracing::{info, warn};

/// API group and version of the kind.
const API: &str = "autoscaling.x-k8s.io/v1";
/// Plural name of the kind.
const RESOURCE: &str = "provisioningrequests";
/// Pause between two checks.
const PERIOD: Duration = Duration::from_secs(10);

/// Polls until the cluster serves the kind, or until `stop` becomes true; then lets gangs request
/// nodes.
pub(super) async fn run(context: Context, mut stop: Receiver<bool>) {
    let Some(class) = context.settings.provisioning_class.clone() else { return };
    let mut logged: Option<String> = None;
    while let Err(why) = context.check_api().await {
        // Log a reason once, not at every check.
        if logged.as_ref() != Some(&why) {
            warn!(error = why, "gangs cannot request nodes until the cluster serves {RESOURCE} of {API}");
            logged = Some(why);
        }
        if tokio::time::timeout(PERIOD, stop.wait_for(|stop| *stop)).await.is_ok() {
            return;
        }
    }
    info!(class, "gangs that lack nodes can request them");
    watch(&context);
    context.index().provisioning_class = Some(class);
    context.requeue_all();
}

impl Context {
    async fn check_api(&self) -> Result<(), String> {
        match self.client.list_api_group_resources(API).await {
            Ok(list) if list.resources.iter().any(|resource| resource.name == RESOURCE) => Ok(()),
            Ok(_) => Err(format!("the cluster serves {API}, but without {RESOURCE}")),
            Err(kube::Error::Api(status)) if status.code == 404 => Err(format!("the cluster does not serve {API}")),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// Watches ProvisioningRequests and their PodTemplates.
fn watch(context: &Context) {
    let labelled = || watcher::Config::default().labels(labels::JOB_UID);
    for namespace in scopes(&context.settings) {
        let requests = Handler::<DeserializeGuard<ProvisioningRequest>> {
            kind: Kind::ProvisioningRequest.name(),
            pass: Pass::Required,
            apply: Box::new(|index, request| match request.0 {
                // Only the status is kept, because the spec never changes.
                Ok(request) => {
                    let content = serde_json::json!({"status": request.status});
                    index.apply_object(Kind::ProvisioningRequest, &request.metadata, content)
                }
                // An invalid request is treated as one without a status.
                Err(_) => Effect::default(),
            }),
            delete: |index: &mut Index, metadata| index.delete_object(Kind::ProvisioningRequest, metadata),
        };
        let templates = Handler::<PodTemplate> {
            kind: Kind::PodTemplate.name(),
            pass: Pass::Required,
            apply: Box::new(|index, template| {
                let content = observed_content(&serde_json::to_value(&template).unwrap_or_default());
                index.apply_object(Kind::PodTemplate, &template.metadata, content)
            }),
            delete: |index: &mut Index, metadata| index.delete_object(Kind::PodTemplate, metadata),
        };
        spawn_in(context, requests, namespace, labelled());
        spawn_in(context, templates, namespace, labelled());
    }
}
