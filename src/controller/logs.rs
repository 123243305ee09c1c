//! Pod logs, as stored by the kubelet.

use super::Context;
use super::reader::Source;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::LogParams;
use switchyard_crds::names::TRAINER;

/// Reads a part of the log of a pod's trainer.
///
/// # Errors
/// The log is unavailable now.
pub(super) async fn read<T>(context: &Context, source: &Source<T>, params: LogParams) -> Result<String, kube::Error> {
    let api = Api::<Pod>::namespaced(context.client.clone(), &source.key.namespace);
    api.logs(&source.pod, &LogParams { container: Some(TRAINER.into()), ..params }).await
}
