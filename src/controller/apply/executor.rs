//! Executes actions: other objects before pods, with concurrent calls that each have a deadline.

use super::error::{ApiError, Cause};
use futures::StreamExt;
use futures::stream;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod, PodTemplate, Secret, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions, PropagationPolicy};
use kube::{Api, Client, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Debug;
use std::time::Duration;
use switchyard_crds::labels::PLAN_MANAGER;
use switchyard_crds::{PlacementSlice, ProvisioningRequest, TrainJob};
use switchyard_plan::cluster::ownership;
use switchyard_plan::cluster::view::{NodeView, PodView};
use switchyard_plan::cluster::{Action, Premise};
use switchyard_plan::objects::{Kind, Object};
use tokio::sync::Semaphore;

/// Deadline of one call, including retries by the client.
pub(super) const DEADLINE: Duration = Duration::from_secs(15);
/// Upper bound on concurrent calls over all jobs. With more, the API server of the test bench
/// creates no more pods per second.
const MAX_CALLS: usize = 64;

/// Executes writes.
#[derive(Clone)]
pub struct Executor {
    pub(super) client: Client,
    calls: std::sync::Arc<Semaphore>,
}

/// The result of executing actions.
#[derive(Debug, Default)]
pub struct Applied {
    /// Kinds and resource versions of the objects written.
    pub written: Vec<(&'static str, String)>,
    /// UIDs of the objects deleted.
    pub deleted: Vec<String>,
    /// The writes that failed.
    pub errors: Vec<ApiError>,
}

/// The result of one successful action.
enum Done {
    Written(&'static str, Option<String>),
    Deleted(String),
}

/// The job that owns the objects.
#[derive(Debug, Clone, Copy)]
struct Job<'a> {
    namespace: &'a str,
    uid: &'a str,
}

impl Executor {
    pub fn new(client: Client) -> Executor {
        Executor { client, calls: std::sync::Arc::new(Semaphore::new(MAX_CALLS)) }
    }

    /// Executes the actions of the job with this UID. Pods are created last, and only if everything
    /// else succeeded, because a pod without its configuration would hang.
    pub async fn apply(&self, namespace: &str, uid: &str, actions: Vec<Action>) -> Applied {
        let job = Job { namespace, uid };
        let is_create = |action: &Action| matches!(action, Action::Create(Object::Pod(_)));
        let (pods, others): (Vec<Action>, Vec<Action>) = actions.into_iter().partition(is_create);
        let mut applied = Applied::default();
        self.execute_all(job, others, &mut applied).await;
        if applied.errors.is_empty() {
            self.execute_all(job, pods, &mut applied).await;
        }
        applied
    }

    async fn execute_all(&self, job: Job<'_>, actions: Vec<Action>, applied: &mut Applied) {
        let calls = actions.into_iter().map(|action| self.execute(job, action));
        let mut results = stream::iter(calls).buffer_unordered(MAX_CALLS);
        while let Some(result) = results.next().await {
            match result {
                Ok(Done::Written(kind, version)) => applied.written.extend(version.map(|version| (kind, version))),
                Ok(Done::Deleted(uid)) => applied.deleted.push(uid),
                Err(error) => applied.errors.push(error),
            }
        }
    }

    /// Waits for a free slot, then makes a call with a deadline.
    pub(super) async fn call<T>(
        &self,
        operation: &str,
        call: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, ApiError> {
        let _permit = self.calls.acquire().await.expect("invariant: the semaphore is never closed");
        match tokio::time::timeout(DEADLINE, call).await {
            Ok(result) => result.map_err(|error| ApiError::new(operation.to_string(), &error)),
            Err(_) => Err(ApiError::timeout(operation.to_string(), DEADLINE)),
        }
    }

    async fn execute(&self, job: Job<'_>, action: Action) -> Result<Done, ApiError> {
        match action {
            Action::Create(object) => match object {
                Object::Pod(pod) => self.create(job, Kind::Pod, *pod).await,
                Object::Service(service) => self.create(job, Kind::Service, *service).await,
                Object::Claim(claim) => self.create(job, Kind::ResourceClaim, *claim).await,
                Object::ConfigMap(config) => self.create(job, Kind::ConfigMap, config).await,
                Object::PodDisruptionBudget(budget) => self.create(job, Kind::PodDisruptionBudget, budget).await,
                Object::NetworkPolicy(policy) => self.create(job, Kind::NetworkPolicy, policy).await,
                Object::PlacementSlice(slice) => self.create(job, Kind::PlacementSlice, *slice).await,
                Object::PodTemplate(template) => self.create(job, Kind::PodTemplate, *template).await,
                Object::ProvisioningRequest(request) => self.create(job, Kind::ProvisioningRequest, *request).await,
                Object::Secret(secret) => self.create_secret(job, secret).await,
            },
            Action::Repair(object) => match object {
                Object::Pod(pod) => self.repair(job, Kind::Pod, &*pod).await,
                Object::Service(service) => self.repair(job, Kind::Service, &*service).await,
                Object::PodDisruptionBudget(budget) => self.repair(job, Kind::PodDisruptionBudget, &budget).await,
                Object::NetworkPolicy(policy) => self.repair(job, Kind::NetworkPolicy, &policy).await,
                // These are immutable or created once, so an object of this name is already right.
                Object::Claim(_)
                | Object::ConfigMap(_)
                | Object::Secret(_)
                | Object::PlacementSlice(_)
                | Object::PodTemplate(_)
                | Object::ProvisioningRequest(_) => Ok(Done::Written("", None)),
            },
            Action::Release { pod, uid, mut patch } => {
                // The UID makes the server reject the patch for a new pod of the same name.
                patch["metadata"]["uid"] = uid.into();
                let api = Api::<Pod>::namespaced(self.client.clone(), job.namespace);
                let params = PatchParams { field_manager: Some(PLAN_MANAGER.into()), ..PatchParams::default() };
                let operation = format!("remove the scheduling gate of Pod {pod}");
                let pod = self.call(&operation, api.patch(&pod, &params, &Patch::Strategic(patch))).await?;
                Ok(Done::Written("Pod", pod.resource_version()))
            }
            Action::Delete { kind, name, uid, version } => match kind {
                Kind::ConfigMap => self.delete::<ConfigMap>(job, kind, &name, uid, version).await,
                Kind::NetworkPolicy => self.delete::<NetworkPolicy>(job, kind, &name, uid, version).await,
                Kind::PlacementSlice => self.delete::<PlacementSlice>(job, kind, &name, uid, version).await,
                Kind::Pod => self.delete::<Pod>(job, kind, &name, uid, version).await,
                Kind::PodDisruptionBudget => self.delete::<PodDisruptionBudget>(job, kind, &name, uid, version).await,
                Kind::PodTemplate => self.delete::<PodTemplate>(job, kind, &name, uid, version).await,
                Kind::ProvisioningRequest => self.delete::<ProvisioningRequest>(job, kind, &name, uid, version).await,
                Kind::ResourceClaim => self.delete::<ResourceClaim>(job, kind, &name, uid, version).await,
                Kind::Secret => self.delete::<Secret>(job, kind, &name, uid, version).await,
                Kind::Service => self.delete::<Service>(job, kind, &name, uid, version).await,
                Kind::TrainJob => self.delete::<TrainJob>(job, kind, &name, uid, version).await,
            },
        }
    }

    async fn create<K>(&self, job: Job<'_>, kind: Kind, object: K) -> Result<Done, ApiError>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
            + Serialize
            + DeserializeOwned
            + Clone
            + Debug,
    {
        let api = Api::<K>::namespaced(self.client.clone(), job.namespace);
        let name = object.name_any();
        let params = PostParams { field_manager: Some(PLAN_MANAGER.into()), ..PostParams::default() };
        let operation = format!("create {kind} {name}");
        match self.call(&operation, api.create(&params, &object)).await {
            Ok(written) => Ok(Done::Written(kind.name(), written.resource_version())),
            Err(error) if error.cause == Cause::Exists => {
                let Some(found) = self.call(&operation, api.get_opt(&name)).await? else { return Err(error) };
                let owner = match kind {
                    Kind::Pod => ownership::parent(found.meta()).map(|parent| parent.uid.as_str()),
                    _ => ownership::owner(found.meta()),
                };
                if owner != Some(job.uid) {
                    return Err(ApiError { operation, message: name_taken(found.meta()), cause: Cause::Taken });
                }
                if kind == Kind::Pod {
                    return Ok(Done::Written(kind.name(), found.resource_version()));
                }
                // The object belongs to the job, but another client removed our labels.
                self.repair(job, kind, &object).await
            }
            Err(error) => Err(error),
        }
    }

    /// Creates a Secret. An existing one is not compared, because only its pods may read it, and
    /// its name contains the job's UID.
    async fn create_secret(&self, job: Job<'_>, mut secret: Secret) -> Result<Done, ApiError> {
        let operation = format!("create Secret {}", secret.name_any());
        let mut key = vec![0; 32];
        if let Err(error) = getrandom::fill(&mut key) {
            return Err(ApiError {
                operation,
                message: format!("cannot read random bytes: {error}"),
                cause: Cause::Unreachable,
            });
        }
        secret.data = Some([("key".to_string(), ByteString(key))].into());
        let api = Api::<Secret>::namespaced(self.client.clone(), job.namespace);
        let params = PostParams { field_manager: Some(PLAN_MANAGER.into()), ..PostParams::default() };
        match self.call(&operation, api.create(&params, &secret)).await {
            Ok(_) => Ok(Done::Written("Secret", None)),
            Err(error) if error.cause == Cause::Exists => Ok(Done::Written("Secret", None)),
            Err(error) => Err(error),
        }
    }

    /// Applies our fields, even those that another manager owns.
    async fn repair<K>(&self, job: Job<'_>, kind: Kind, object: &K) -> Result<Done, ApiError>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
            + Serialize
            + DeserializeOwned
            + Clone
            + Debug,
    {
        let api = Api::<K>::namespaced(self.client.clone(), job.namespace);
        let name = object.name_any();
        let params = PatchParams::apply(PLAN_MANAGER).force();
        let operation = format!("repair {kind} {name}");
        let written = self.call(&operation, api.patch(&name, &params, &Patch::Apply(object))).await?;
        Ok(Done::Written(kind.name(), written.resource_version()))
    }

    async fn delete<K>(
        &self,
        job: Job<'_>,
        kind: Kind,
        name: &str,
        uid: String,
        version: Option<String>,
    ) -> Result<Done, ApiError>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()> + DeserializeOwned + Clone + Debug,
    {
        let api = Api::<K>::namespaced(self.client.clone(), job.namespace);
        let params = DeleteParams {
            preconditions: Some(Preconditions { uid: Some(uid.clone()), resource_version: version }),
            propagation_policy: Some(PropagationPolicy::Background),
            ..DeleteParams::default()
        };
        match self.call(&format!("delete {kind} {name}"), api.delete(name, &params)).await {
            Ok(_) => Ok(Done::Deleted(uid)),
            Err(error) if error.cause == Cause::Gone => Ok(Done::Deleted(uid)),
            // After a conflict, either the object was replaced or changed, or the conflict was
            // spurious; the watch cache will show which.
            Err(error) => Err(error),
        }
    }

    /// Re-checks a premise about a node, or about a pod of the job with this UID, against the API
    /// server, bypassing the cache.
    pub async fn verify(&self, namespace: &str, premise: &Premise, uid: &str) -> Result<bool, ApiError> {
        let name = match premise {
            Premise::NodeGone(name) | Premise::NodeSilent(name) => {
                let api = Api::<Node>::all(self.client.clone());
                let found = self.call(&format!("get Node {name}"), api.get_opt(name)).await?;
                let is_silent = |node: &Node| NodeView::of(node).silent_since.is_some();
                return Ok(found.is_none_or(|node| matches!(premise, Premise::NodeSilent(_)) && is_silent(&node)));
            }
            Premise::Absent(name) | Premise::Unbound(name) => name,
        };
        let api = Api::<Pod>::namespaced(self.client.clone(), namespace);
        let found = self.call(&format!("get Pod {name}"), api.get_opt(name)).await?;
        // The pod may have lost its label, so check its owner.
        let owned =
            found.filter(|found| ownership::named_parent(&found.metadata).is_some_and(|parent| parent.uid == uid));
        Ok(owned.is_none_or(|pod| matches!(premise, Premise::Unbound(_)) && PodView::of(&pod).node.is_none()))
    }

    /// Whether a slice of the job with this UID exists.
    pub async fn has_slice(&self, namespace: &str, name: &str, uid: &str) -> Result<bool, ApiError> {
        let api = Api::<kube::core::PartialObjectMeta<PlacementSlice>>::namespaced(self.client.clone(), namespace);
        let found = self.call(&format!("get PlacementSlice {name}"), api.get_metadata_opt(name)).await?;
        Ok(found.is_some_and(|found| ownership::owner(&found.metadata) == Some(uid)))
    }

    /// Whether the job with this UID is really gone, according to the API server. Checked before
    /// its objects are deleted.
    pub async fn is_gone(&self, namespace: &str, name: &str, uid: &str) -> Result<bool, ApiError> {
        let api = Api::<kube::core::PartialObjectMeta<TrainJob>>::namespaced(self.client.clone(), namespace);
        match self.call(&format!("get TrainJob {name}"), api.get_metadata_opt(name)).await {
            Ok(found) => Ok(found.is_none_or(|found| found.metadata.uid.as_deref() != Some(uid))),
            Err(error) if error.cause == Cause::Unknown => Ok(true),
            Err(error) => Err(error),
        }
    }
}

/// The reason why an object of this name cannot be created: the name belongs to an earlier job, or
/// to another user.
fn name_taken(holder: &ObjectMeta) -> String {
    let message = "the name is taken by an object that does not belong to this job";
    if holder.deletion_timestamp.is_none() {
        return message.into();
    }
    let finalizers = holder.finalizers.as_deref().unwrap_or_default();
    let state = if finalizers.is_empty() {
        "and should be gone soon".to_string()
    } else {
        format!("but its finalizers ({}) are still pending", finalizers.join(", "))
    };
    format!("{message}: it is being deleted, {state}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// Regression test: pods of a job that was deleted and created again blocked the new job, and
    /// no message said that they were the old job's.
    #[test]
    fn an_object_that_is_being_deleted_is_reported_as_such() {
        let message = |metadata: Value| name_taken(&serde_json::from_value(metadata).unwrap());
        let text = "the name is taken by an object that does not belong to this job";
        assert_eq!(message(json!({"name": "a-1-0"})), text);
        let ending = json!({"name": "a-1-0", "deletionTimestamp": "2026-11-27T10:00:00Z"});
        assert_eq!(message(ending.clone()), format!("{text}: it is being deleted, and should be gone soon"));
        let mut held = ending;
        held["finalizers"] = json!(["example.com/hold"]);
        assert_eq!(
            message(held),
            format!("{text}: it is being deleted, but its finalizers (example.com/hold) are still pending")
        );
    }
}
