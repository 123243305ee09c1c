//! Dry runs without kubectl, whose process costs far more CPU time than its request.

use anyhow::Result;
use kube::core::{ApiResource, DynamicObject, GroupVersionKind, TypeMeta};
use kube::{Client, Resource};
use serde_json::Value;

/// Returns why the API server refuses to create an object, as the client's user or as another one;
/// `None` if it accepts. Nothing is stored.
///
/// # Errors
/// The object has no kind, or the API server does not answer.
pub async fn refusal(client: &Client, user: Option<&str>, namespace: &str, object: &Value) -> Result<Option<String>> {
    let types: TypeMeta = serde_json::from_value(object.clone())?;
    let resource = ApiResource::from_gvk(&GroupVersionKind::try_from(types)?);
    let url = format!("{}?dryRun=All", DynamicObject::url_path(&resource, Some(namespace)));
    let mut request = http::Request::post(url).header(http::header::CONTENT_TYPE, "application/json");
    if let Some(user) = user {
        request = request.header("Impersonate-User", user);
    }
    match client.request::<Value>(request.body(serde_json::to_vec(object)?)?).await {
        Ok(_) => Ok(None),
        Err(kube::Error::Api(status)) => Ok(Some(status.message.clone())),
        Err(error) => Err(error.into()),
    }
}
