//! Objects created on trial.

use kube::Api;
use kube::api::PostParams;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Debug;

/// Lets the API server judge the creation of an object without storing it (a server dry run).
///
/// # Errors
/// The server would not create it; its words.
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
