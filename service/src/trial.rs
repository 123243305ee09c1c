//! API server queries in the form of writes that store nothing: dry-run creates, and access
//! reviews.

use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::api::PostParams;
use kube::{Api, Client};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Debug;

/// Lets the API server judge the creation of an object without storing it (a server dry run).
///
/// # Errors
/// The server would reject the object; the error is its message.
pub async fn trial<K>(api: &Api<K>, object: &K) -> Result<(), String>
where
    K: Clone + Debug + DeserializeOwned + Serialize,
{
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    match api.create(&dry_run, object).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) => Err(status.message),
        Err(error) => Err(error.to_string()),
    }
}

/// Whether a service account (`system:serviceaccount:NAMESPACE:NAME`) has a permission, directly or
/// through its groups.
///
/// # Errors
/// The API server does not answer the review.
pub async fn may(client: &Client, account: &str, what: &ResourceAttributes) -> kube::Result<bool> {
    let namespace = account.split(':').nth(2).unwrap_or_default();
    let groups = ["system:serviceaccounts", &format!("system:serviceaccounts:{namespace}"), "system:authenticated"];
    let spec = SubjectAccessReviewSpec {
        user: Some(account.to_string()),
        groups: Some(groups.map(str::to_string).to_vec()),
        resource_attributes: Some(what.clone()),
        ..SubjectAccessReviewSpec::default()
    };
    let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
    let answer = Api::<SubjectAccessReview>::all(client.clone()).create(&PostParams::default(), &review).await?;
    Ok(answer.status.is_some_and(|status| status.allowed))
}
