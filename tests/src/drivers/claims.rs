//! A dynamic resource allocation (DRA) driver: offers the GPUs of a report, and passes allocated
//! GPUs to the container.

use super::grpc::{Answer, Server};
use super::messages::{
    Claim, Claims, PluginInfo, Prepared, PreparedClaim, PreparedDevice, Unprepared, UnpreparedClaim,
};
use super::{VISIBLE, register, socket_name};
use crate::gpus::{DRIVER, GpuNodes};
use crate::nodes::Nodes;
use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use futures::future::BoxFuture;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::{Api, Client, ResourceExt};
use prost::Message;
use serde_json::json;
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use switchyard_crds::gpu_topology::GPUTopology;
use tokio::task::JoinSet;

/// Interval between checks of the offered devices; only a change causes a write.
const OFFER_INTERVAL: Duration = Duration::from_secs(2);

/// The driver on one node; it stops on drop.
#[derive(Debug)]
pub struct ClaimDriver {
    _servers: [Server; 2],
    _offers: JoinSet<()>,
}

/// State of the driver.
struct Node {
    client: Client,
    name: String,
    /// Folder that containerd watches for CDI files.
    cdi: PathBuf,
    /// GPU UUIDs by device name.
    uuids: BTreeMap<String, String>,
}

impl ClaimDriver {
    /// Registers with a node's kubelet, then offers the GPUs of its report.
    ///
    /// # Errors
    /// The kubelet rejects the driver, or the API server rejects the offer.
    pub async fn start(nodes: &Nodes, gpus: &GpuNodes, report: &GPUTopology) -> Result<ClaimDriver> {
        let name = report.name_any();
        let folder = format!("/var/lib/kubelet/plugins/{DRIVER}");
        std::fs::create_dir_all(nodes.path(&name, &folder)?)?;
        let listed = report.status.iter().flat_map(|status| &status.gpus);
        let uuids = listed.map(|gpu| (format!("gpu-{}", gpu.index), gpu.uuid.clone())).collect();
        let cdi = nodes.path(&name, "/run/cdi")?;
        let node = Arc::new(Node { client: nodes.plane.client().await?, name: name.clone(), cdi, uuids });
        let handler = Arc::new(move |path: String, message: Bytes| {
            let node = Arc::clone(&node);
            Box::pin(async move { node.handle(&path, message).await }) as BoxFuture<'static, Result<Answer>>
        });
        let endpoint = format!("{folder}/{}", socket_name(DRIVER));
        let server = Server::start(&nodes.path(&name, &endpoint)?, handler)?;
        let info = PluginInfo {
            kind: "DRAPlugin".into(),
            name: DRIVER.into(),
            endpoint,
            supported_versions: ["v1.DRAPlugin", "v1beta1.DRAPlugin"].map(String::from).to_vec(),
        };
        let registration = register(nodes, &name, info).await?;
        // Register first: the kubelet deletes ResourceSlices of drivers it does not know.
        gpus.offer(report).await?;
        // A restarted kubelet deletes the ResourceSlices of its node's drivers, so offer them
        // repeatedly.
        let (gpus, report) = (gpus.clone(), report.clone());
        let mut offers = JoinSet::new();
        offers.spawn(async move {
            loop {
                tokio::time::sleep(OFFER_INTERVAL).await;
                // Ignore errors: the API server may be down, and the next attempt follows soon.
                let _ = gpus.offer(&report).await;
            }
        });
        Ok(ClaimDriver { _servers: [registration, server], _offers: offers })
    }
}

impl Node {
    async fn handle(&self, path: &str, message: Bytes) -> Result<Answer> {
        // The messages are the same in v1 and v1beta1.
        match path.rsplit_once('/').map(|(_, method)| method) {
            Some("NodePrepareResources") => {
                let mut claims = HashMap::new();
                for claim in Claims::decode(message)?.claims {
                    let prepared = self.prepare(&claim).await;
                    let failed =
                        |error: anyhow::Error| PreparedClaim { error: format!("{error:#}"), devices: Vec::new() };
                    claims.insert(claim.uid, prepared.unwrap_or_else(failed));
                }
                Ok(Answer::of(&Prepared { claims }))
            }
            Some("NodeUnprepareResources") => {
                let claims = Claims::decode(message)?.claims.into_iter().map(|claim| {
                    // Unpreparing a claim that was never prepared succeeds as well.
                    let _ = std::fs::remove_file(self.cdi_file(&claim.uid));
                    (claim.uid, UnpreparedClaim::default())
                });
                Ok(Answer::of(&Unprepared { claims: claims.collect() }))
            }
            _ => Ok(Answer::Unknown),
        }
    }

    fn cdi_file(&self, uid: &str) -> PathBuf {
        self.cdi.join(format!("{DRIVER}-{uid}.json"))
    }

    /// Writes the CDI file that the container runtime applies to containers with this claim.
    async fn prepare(&self, claim: &Claim) -> Result<PreparedClaim> {
        let object = Api::<ResourceClaim>::namespaced(self.client.clone(), &claim.namespace).get(&claim.name).await?;
        ensure!(object.uid().as_deref() == Some(claim.uid.as_str()), "the claim {} is another one now", claim.name);
        let allocation = object.status.and_then(|status| status.allocation).context("the claim has no allocation")?;
        let results = allocation.devices.and_then(|devices| devices.results).unwrap_or_default();
        let mine: Vec<_> = results.iter().filter(|found| found.driver == DRIVER && found.pool == self.name).collect();
        let uuid = |device: &str| self.uuids.get(device).cloned().with_context(|| format!("no device {device}"));
        let uuids = mine.iter().map(|found| uuid(&found.device)).collect::<Result<Vec<_>>>()?;
        let kind = format!("{DRIVER}/claim");
        let edits = json!({"env": [format!("{VISIBLE}={}", uuids.join(","))]});
        let spec =
            json!({"cdiVersion": "0.6.0", "kind": kind, "devices": [{"name": claim.uid, "containerEdits": edits}]});
        // Rename into place, because containerd reads the folder whenever it changes.
        let file = self.cdi_file(&claim.uid);
        std::fs::write(file.with_extension("new"), spec.to_string())?;
        std::fs::rename(file.with_extension("new"), file)?;
        let devices = mine.iter().map(|found| PreparedDevice {
            request_names: vec![found.request.clone()],
            pool_name: found.pool.clone(),
            device_name: found.device.clone(),
            cdi_device_ids: vec![format!("{kind}={}", claim.uid)],
        });
        Ok(PreparedClaim { devices: devices.collect(), error: String::new() })
    }
}
