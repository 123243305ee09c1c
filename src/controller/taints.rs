//! DeviceTaintRules: taints that administrators and drivers put on devices for claims. The API is
//! optional. The fields used here exist in all its versions.

use super::Context;
use super::queue::Pass;
use super::watch::{Handler, run as watch};
use k8s_openapi::api::resource::v1::DeviceClass;
use kube::Api;
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use kube::runtime::watcher;
use std::time::Duration;
use switchyard_ledger::devices::{DeviceRule, Selector};
use tokio::sync::watch::Receiver;
use tracing::{info, warn};

const GROUP: &str = "resource.k8s.io";
/// Supported versions, most preferred first.
const VERSIONS: [&str; 3] = ["v1", "v1beta2", "v1alpha3"];
const KIND: &str = "DeviceTaintRule";
const RESOURCE: &str = "devicetaintrules";
/// Pause between two checks. It is long, because a new API comes with a restart of the API server.
const PERIOD: Duration = Duration::from_secs(300);
/// Pause after a failed check.
const RETRY_PERIOD: Duration = Duration::from_secs(10);

/// Polls until the cluster serves the kind, or until `stop` becomes true; then watches it.
pub(super) async fn run(context: Context, mut stop: Receiver<bool>) {
    loop {
        let found = context.served_version().await;
        let pause = if found.is_ok() { PERIOD } else { RETRY_PERIOD };
        if let Ok(Some(version)) = found {
            let kind = GroupVersionKind::gvk(GROUP, version, KIND);
            let resource = ApiResource::from_gvk_with_plural(&kind, RESOURCE);
            info!(version, "placements avoid devices tainted by {RESOURCE}");
            // Later versions do not select devices by class.
            if version == "v1alpha3" {
                watch_classes(&context);
            }
            let handler = Handler::<DynamicObject> {
                kind: KIND,
                pass: Pass::Required,
                apply: Box::new(|index, rule| {
                    let name = rule.metadata.name.clone().unwrap_or_default();
                    let parsed = DeviceRule::of(&rule.data["spec"]).unwrap_or_else(|error| {
                        warn!(
                            rule = name,
                            error, "ignoring an invalid DeviceTaintRule: the scheduler may reject placements"
                        );
                        None
                    });
                    for fault in parsed.iter().flat_map(DeviceRule::selectors).filter_map(Selector::fault) {
                        warn!(rule = name, fault, "the rule taints all devices that its other fields select");
                    }
                    index.apply_device_rule(&name, parsed)
                }),
                delete: |index, metadata| index.apply_device_rule(metadata.name.as_deref().unwrap_or_default(), None),
            };
            let api = Api::all_with(context.client.clone(), &resource);
            watch(&context, handler, KIND.into(), api, watcher::Config::default());
            return;
        }
        if tokio::time::timeout(pause, stop.wait_for(|stop| *stop)).await.is_ok() {
            return;
        }
    }
}

/// Watches DeviceClasses, by which rules can select devices.
fn watch_classes(context: &Context) {
    let handler = Handler::<DeviceClass> {
        kind: "DeviceClass",
        pass: Pass::Required,
        apply: Box::new(|index, class| {
            let name = class.metadata.name.unwrap_or_default();
            let selectors = Selector::all(&class.spec.selectors.unwrap_or_default());
            index.apply_device_class(&name, Some(selectors))
        }),
        delete: |index, metadata| index.apply_device_class(metadata.name.as_deref().unwrap_or_default(), None),
    };
    let api = Api::all(context.client.clone());
    watch(context, handler, "DeviceClass".into(), api, watcher::Config::default());
}

impl Context {
    /// The most preferred version that the cluster serves.
    async fn served_version(&self) -> kube::Result<Option<&'static str>> {
        for version in VERSIONS {
            match self.client.list_api_group_resources(&format!("{GROUP}/{version}")).await {
                Ok(list) if list.resources.iter().any(|resource| resource.name == RESOURCE) => {
                    return Ok(Some(version));
                }
                Ok(_) => {}
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }
}
