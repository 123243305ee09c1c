//! A tenant without a GPU quota who tries to get GPUs, nodes, memory or a queue position. During
//! each attack, a job of another tenant must get all GPUs of its nodes.
//!
//! Attacks run in lanes: each has its own nodes and its own hostile tenant, and takes the next
//! attack when it is done.

mod attacks;

use super::Scene;
use anyhow::{Context, Result, ensure};
use attacks::Act::{self, Create, Delete, Patch as Change, PatchStatus, Settle};
use attacks::{Attack, attacks, pod};
use k8s_openapi::api::core::v1::{Pod, ResourceQuota};
use kube::api::{ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use std::sync::atomic::{AtomicUsize, Ordering};
use switchyard_crds::TrainJob;
use switchyard_tests::gpus::{RESOURCE, gpu_job};
use switchyard_tests::{Jobs, KubeletOptions, condition_of, merge, stage_of, template_on};

/// Concurrent attacks.
const LANES: usize = 8;
/// Nodes of a lane, with eight GPUs each.
const NODES: u32 = 2;

/// Half of the controller's memory limit in the chart. An unoptimised build needs more than a
/// shipped one.
const MEMORY: u64 = 256 << 20;

const CLAIMS: &str = r#"{"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "claims"}, "rules": [
    {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims", "resourceclaimtemplates"], "verbs": ["create"]}]}"#;

struct Tenant {
    client: Client,
    /// The namespace with the administrator's rights.
    jobs: Jobs,
    nodes: Vec<String>,
}

impl Tenant {
    fn api(&self, kind: &str, api: Option<&str>) -> Api<DynamicObject> {
        let (group, version) = match (api, kind) {
            (Some(api), _) => api.split_once('/').unwrap_or(("", api)),
            (None, "TrainJob") => ("training.switchyard.dev", "v1alpha1"),
            (None, _) => ("", "v1"),
        };
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        if ["Node", "GPUTopology", "PriorityClass"].contains(&kind) {
            return Api::all_with(self.client.clone(), &resource);
        }
        Api::namespaced_with(self.client.clone(), &self.jobs.namespace, &resource)
    }

    async fn send(&self, act: &Act) -> Result<()> {
        match act {
            Create(object) => {
                let mut object = object.clone();
                if object["kind"] == "TrainJob" && object.pointer("/spec/template/spec/nodeName").is_none() {
                    merge(&mut object["spec"], json!({"template": template_on(&self.nodes)}));
                }
                let text = |field: &str| object[field].as_str().unwrap_or_default().to_string();
                let api = self.api(&text("kind"), Some(&text("apiVersion")));
                api.create(&PostParams::default(), &serde_json::from_value(object)?).await?;
            }
            Change(kind, name, patch) => {
                self.api(kind, None).patch(name, &PatchParams::default(), &Patch::Merge(patch)).await?;
            }
            PatchStatus(kind, name, patch) => {
                self.api(kind, None).patch_status(name, &PatchParams::default(), &Patch::Merge(patch)).await?;
            }
            Delete(kind, name) => drop(self.api(kind, None).delete(name, &DeleteParams::default()).await?),
            Settle(name) => {
                let has_settled = |job: &TrainJob| {
                    let is_refused =
                        condition_of(job, "Succeeded").is_some_and(|c| c.message.contains("cannot create"));
                    let is = |kind: &str, state: &str| condition_of(job, kind).is_some_and(|c| c.status == state);
                    is_refused || is("Placed", "True") || !matches!(stage_of(job), None | Some("Created" | "Placing"))
                };
                self.jobs.wait(name, "looked at by the controller", has_settled).await?;
            }
        }
        Ok(())
    }

    /// Checks that no pod of the tenant has a GPU, and that no job requesting all GPUs is placed.
    async fn holds_nothing(&self) -> Result<()> {
        for pod in self.jobs.pods().await? {
            let spec = pod.spec.as_ref().context("no spec")?;
            let asks = |container: &k8s_openapi::api::core::v1::Container| {
                container
                    .resources
                    .as_ref()
                    .is_some_and(|all| all.limits.iter().flatten().any(|(name, _)| name == RESOURCE))
            };
            ensure!(spec.node_name.is_none() || !spec.containers.iter().any(asks), "{} has GPUs", pod.name_any());
        }
        for job in self.jobs.api().list(&ListParams::default()).await?.items {
            let resources = job.spec.trainer.resources_per_node.as_ref();
            let wants_gpus = resources.is_some_and(|resources| resources.limits.contains_key(RESOURCE));
            let is_placed = condition_of(&job, "Placed").is_some_and(|placed| placed.status == "True");
            ensure!(!(wants_gpus && is_placed), "{} is placed", job.name_any());
        }
        Ok(())
    }

    /// Deletes everything as the administrator, except objects held by finalizers and kubelets.
    async fn clear(&self) -> Result<()> {
        let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        let all = ListParams::default();
        self.jobs.api().delete_collection(&DeleteParams::default(), &all).await?;
        self.jobs.pods_api().delete_collection(&now, &all).await?;
        Ok(())
    }
}

impl Tenant {
    /// Mallory in a namespace of her own, with these nodes.
    async fn start(scene: &Scene, nodes: &[String]) -> Result<Tenant> {
        let evil = scene.plane.namespace("evil").await?;
        scene.grant("mallory", &evil, "edit")?;
        scene.grant("mallory", &evil, "claims")?;
        let admin = scene.jobs.client.clone();
        let hard = json!({"requests.nvidia.com/gpu": "0", "limits.cpu": "2", "limits.memory": "2Gi", "pods": "20"});
        let quota = json!({"metadata": {"name": "small"}, "spec": {"hard": hard}});
        // Otherwise one pod could keep all others off its node, or off a whole zone.
        let alone = json!({"metadata": {"name": "alone"}, "spec": {"hard": {"pods": "0"}, "scopeSelector":
            {"matchExpressions": [{"scopeName": "CrossNamespacePodAffinity", "operator": "Exists"}]}}});
        let quotas = Api::<ResourceQuota>::namespaced(admin.clone(), &evil);
        for quota in [quota, alone] {
            let quota: ResourceQuota = serde_json::from_value(quota)?;
            let counted =
                |quota: Option<&ResourceQuota>| quota.and_then(|quota| quota.status.as_ref()?.used.as_ref()).is_some();
            quotas.create(&Default::default(), &quota).await?;
            kube::runtime::wait::await_condition(quotas.clone(), &quota.name_any(), counted).await?;
        }
        let mut config = scene.plane.config().await?;
        config.auth_info.impersonate = Some("mallory".into());
        Ok(Tenant { client: Client::try_from(config)?, jobs: Jobs::new(admin, &evil), nodes: nodes.to_vec() })
    }

    /// Sends an attack, and checks the answer of the API server.
    async fn attack(&self, (title, refusal, acts): &Attack) -> Result<()> {
        let mut answer = Ok(());
        for act in acts {
            answer = self.send(act).await;
            if answer.is_err() {
                break;
            }
        }
        let error = answer.as_ref().err().map(ToString::to_string);
        let is_expected = match (refusal, &error) {
            (Some(words), Some(error)) => error.contains(words),
            (refusal, error) => refusal.is_none() && error.is_none(),
        };
        ensure!(is_expected, "{title}: expected {refusal:?}, got {error:?}");
        Ok(())
    }
}

/// Creates a job of another tenant that requests all GPUs of these nodes.
async fn create_good(scene: &Scene, name: &str, nodes: &[String]) -> Result<TrainJob> {
    let mut job = gpu_job(name, NODES, 8, "succeed-after=0.1s");
    merge(&mut job["spec"], json!({"template": template_on(nodes)}));
    scene.jobs.create(job).await
}

/// Takes attacks until none is left; returns how many.
async fn lane(scene: &Scene, tenant: Tenant, uid: &str, next: &AtomicUsize) -> Result<usize> {
    let attacks = attacks(&tenant.nodes[0], uid);
    let mut done = 0;
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        let Some(attack) = attacks.get(number) else { return Ok(done) };
        let title = attack.0;
        tenant.attack(attack).await?;
        let name = format!("good-{number}");
        create_good(scene, &name, &tenant.nodes).await?;
        let good = scene.jobs.wait_stage(&name, "Complete").await.with_context(|| format!("while there is {title}"))?;
        ensure!(good.status.and_then(|status| status.attempt) == Some(1), "{title}: restarted");
        tenant.holds_nothing().await.with_context(|| title.to_string())?;
        tenant.clear().await?;
        done += 1;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_without_gpus_holds_nothing_in_forty_ways() -> Result<()> {
    let mut options = KubeletOptions::new("n", LANES * NODES as usize);
    options.capacity.push((RESOURCE.into(), "8".into()));
    let scene = Scene::start(options).await?;
    scene.turn_policies_on()?;
    let made = scene.plane.kubectl_with(&["create", "-f", "-"], CLAIMS);
    ensure!(made.code == Some(0), "{}", made.stderr);
    let nodes = scene.kubelet.nodes();
    let uid = create_good(&scene, "good", &nodes[..NODES as usize]).await?.uid().context("a UID")?;
    scene.jobs.wait_stage("good", "Complete").await?;
    let next = AtomicUsize::new(0);
    let lanes = nodes.chunks(NODES as usize).map(async |nodes| {
        let tenant = Tenant::start(&scene, nodes).await?;
        lane(&scene, tenant, &uid, &next).await
    });
    let done: usize = futures::future::try_join_all(lanes).await?.into_iter().sum();
    assert_eq!(done, attacks("node", "uid").len());
    assert!(done >= 40, "{done} attacks");
    println!("CPU seconds: {:?} and {:.1}", scene.plane.cpu_seconds(), scene.controller.usage().cpu_seconds);
    let memory = scene.controller.usage().rss_bytes;
    assert!(memory < MEMORY, "the controller has {memory} bytes");
    let log = std::fs::read_to_string(&scene.controller.log)?;
    assert!(!log.contains("panicked"), "{}", scene.controller.tail());
    Ok(())
}

/// `holds_nothing` recognises GPU pods by this limit.
#[test]
fn gpu_pods_have_a_gpu_limit() {
    let Create(made) = pod("p", json!({}), json!({}), 8) else { panic!("another act") };
    let made: Pod = serde_json::from_value(made).unwrap();
    let limits = made.spec.unwrap().containers[0].resources.clone().unwrap().limits.unwrap();
    assert_eq!(limits[RESOURCE].0, "8");
}
