//! GPU nodes in a cluster without GPUs: node agent reports, driver offers, and topology labels.
//!
//! The machines are the fixtures in `tests/fixtures/topo`, parsed like `switchyard topo import`.

use crate::{root, until_async};
use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use switchyard_crds::device_use::{DeviceUse, DeviceUseSource};
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_topology::import::{NicRate, Options, import};
use switchyard_topology::matrix::parse;

/// GPU driver, and name of its device class.
pub const DRIVER: &str = "gpu.nvidia.com";
/// Extended resource of the device plugin.
pub const RESOURCE: &str = "nvidia.com/gpu";

/// A machine type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Machine {
    /// Name of the topology matrix file, without extension.
    pub fixture: &'static str,
    /// Product name of the GPUs.
    pub model: &'static str,
    /// NIC rate in gigabits per second.
    pub gigabits: u64,
}

/// Machine types of all fixtures.
pub const MACHINES: [Machine; 14] = [
    Machine { fixture: "f01-dgx-1v", model: "V100", gigabits: 100 },
    Machine { fixture: "f02-dgx-a100", model: "A100", gigabits: 200 },
    Machine { fixture: "f03-h100", model: "H100", gigabits: 400 },
    Machine { fixture: "f03b-hgx-h100", model: "H100", gigabits: 400 },
    Machine { fixture: "f04-h200", model: "H200", gigabits: 400 },
    Machine { fixture: "f04-h200-vm", model: "H200", gigabits: 400 },
    Machine { fixture: "f06-gb200", model: "GB200", gigabits: 400 },
    Machine { fixture: "f06b-gb300", model: "GB300", gigabits: 800 },
    Machine { fixture: "f07-l40s", model: "L40S", gigabits: 200 },
    Machine { fixture: "f08-a30", model: "A30", gigabits: 100 },
    Machine { fixture: "f09-pcie-8", model: "L40S", gigabits: 200 },
    Machine { fixture: "f10-b200", model: "B200", gigabits: 400 },
    Machine { fixture: "f12-dgx-2", model: "V100", gigabits: 100 },
    Machine { fixture: "f15-nps4", model: "L40S", gigabits: 200 },
];

impl Machine {
    /// Returns the machine type of a fixture.
    ///
    /// # Panics
    /// The fixture does not exist.
    pub fn of(fixture: &str) -> Machine {
        *MACHINES.iter().find(|machine| machine.fixture == fixture).unwrap_or_else(|| panic!("no fixture {fixture}"))
    }

    /// Returns the report of the agent on a node of this type.
    ///
    /// # Panics
    /// The fixture cannot be read.
    pub fn report(&self, node: &str) -> GPUTopology {
        let path = root().join(format!("tests/fixtures/topo/{}.txt", self.fixture));
        let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let matrix = parse(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let rates = vec![NicRate { nic: None, megabits_per_second: self.gigabits * 1000 }];
        let options = Options { name: node.into(), gpu_model: Some(self.model.into()), rates };
        import(&matrix, &options).unwrap_or_else(|error| panic!("{}: {error}", path.display())).topology
    }
}

/// UUIDs of a report's GPUs, ordered by index.
pub fn uuids(report: &GPUTopology) -> Vec<String> {
    report.status.iter().flat_map(|status| &status.gpus).map(|gpu| gpu.uuid.clone()).collect()
}

/// Returns the agent's record that the device plugin assigned a GPU to a pod's trainer container.
pub fn device_use(uuid: &str, namespace: &str, pod: &str) -> DeviceUse {
    DeviceUse {
        device: uuid.into(),
        resource: RESOURCE.into(),
        namespace: namespace.into(),
        pod: pod.into(),
        container: "trainer".into(),
        source: DeviceUseSource::DevicePlugin,
        claim: None,
    }
}

/// Returns a Plain TrainJob of `nodes` pods with `gpus` GPUs each.
pub fn gpu_job(name: &str, nodes: u32, gpus: u32, policy: &str) -> Value {
    let mut job = crate::plain_job(name, nodes, policy);
    job["spec"]["trainer"]["numProcPerNode"] = gpus.into();
    job["spec"]["trainer"]["resourcesPerNode"]["limits"][RESOURCE] = gpus.into();
    job
}

/// Acts as the agent and the driver of all nodes.
#[derive(Clone)]
pub struct GpuNodes {
    client: Client,
}

impl GpuNodes {
    /// Creates the device class if it is missing.
    ///
    /// # Errors
    /// The API server rejects it.
    pub async fn start(client: Client) -> Result<GpuNodes> {
        let expression =
            format!("device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].?type.orValue('') == 'gpu'");
        let class = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": DRIVER},
            "spec": {"selectors": [{"cel": {"expression": expression}}]},
        });
        let nodes = GpuNodes { client };
        nodes.apply::<DeviceClass>(DRIVER, class).await?;
        Ok(nodes)
    }

    async fn apply<K>(&self, name: &str, object: Value) -> Result<()>
    where
        K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug,
    {
        let params = PatchParams::apply("gpu-nodes").force();
        let _: K = Api::all(self.client.clone())
            .patch(name, &params, &Patch::Apply(object))
            .await
            .context(name.to_string())?;
        Ok(())
    }

    /// Adds labels, report and offer for a node of this machine type.
    ///
    /// # Errors
    /// The API server rejects an object.
    pub async fn add(&self, node: &str, machine: &Machine, labels: &[(&str, &str)]) -> Result<GPUTopology> {
        let report = machine.report(node);
        self.label(node, labels).await?;
        self.report(&report).await?;
        self.offer(&report).await?;
        Ok(report)
    }

    /// Sets labels of a node.
    ///
    /// # Errors
    /// The API server rejects the patch.
    pub async fn label(&self, node: &str, labels: &[(&str, &str)]) -> Result<()> {
        let labels: BTreeMap<&str, &str> = labels.iter().copied().collect();
        let patch = Patch::Merge(json!({"metadata": {"labels": labels}}));
        Api::<Node>::all(self.client.clone()).patch_metadata(node, &PatchParams::default(), &patch).await?;
        Ok(())
    }

    /// Writes a report, as the agent does.
    ///
    /// # Errors
    /// The API server rejects the report.
    pub async fn report(&self, report: &GPUTopology) -> Result<()> {
        let api = Api::<GPUTopology>::all(self.client.clone());
        let bare = GPUTopology { status: None, ..report.clone() };
        match api.create(&PostParams::default(), &bare).await {
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            other => drop(other?),
        }
        self.replace_status(&api, report).await
    }

    async fn replace_status<K>(&self, api: &Api<K>, object: &K) -> Result<()>
    where
        K: Resource<DynamicType = ()> + DeserializeOwned + Serialize + Clone + Debug,
    {
        let name = object.name_any();
        let mut next = object.clone();
        next.meta_mut().resource_version = api.get_metadata(&name).await?.resource_version();
        api.replace_status(&name, &PostParams::default(), &next).await?;
        Ok(())
    }

    /// Deletes a node's report.
    ///
    /// # Errors
    /// The API server rejects the request.
    pub async fn delete_report(&self, node: &str) -> Result<()> {
        Api::<GPUTopology>::all(self.client.clone()).delete(node, &DeleteParams::default()).await?;
        Ok(())
    }

    /// Offers a report's GPUs for claims, as the driver does.
    ///
    /// # Errors
    /// The API server rejects the offer.
    pub async fn offer(&self, report: &GPUTopology) -> Result<()> {
        let node = report.name_any();
        let device = |gpu: &switchyard_crds::gpu_topology::Gpu| {
            let text = |value: Option<&String>| json!({"string": value.cloned().unwrap_or_default()});
            json!({"name": format!("gpu-{}", gpu.index), "attributes": {
                "uuid": {"string": gpu.uuid}, "type": {"string": "gpu"}, "productName": text(gpu.model.as_ref()),
                "resource.kubernetes.io/pciBusID": text(gpu.bus_id.as_ref()),
            }})
        };
        let devices: Vec<Value> = report.status.iter().flat_map(|status| &status.gpus).map(device).collect();
        let name = format!("{node}-{DRIVER}");
        let slice = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": name},
            "spec": {
                "driver": DRIVER, "nodeName": node, "devices": devices,
                "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            },
        });
        self.apply::<ResourceSlice>(&name, slice).await
    }

    /// Returns the UUIDs of the allocated GPUs by claim name, for a namespace's claims. Empty for
    /// unallocated claims.
    ///
    /// # Errors
    /// The API server rejects a request, or a claim holds a device that no driver offers.
    pub async fn allocated(&self, namespace: &str) -> Result<BTreeMap<String, BTreeSet<String>>> {
        let slices = Api::<ResourceSlice>::all(self.client.clone()).list(&ListParams::default()).await?.items;
        let mut names = BTreeMap::new();
        for slice in &slices {
            for device in slice.spec.devices.iter().flatten() {
                let uuid = device.attributes.as_ref().and_then(|all| all.get("uuid")?.string.clone());
                names.insert(
                    (slice.spec.pool.name.clone(), device.name.clone()),
                    uuid.context("a device without UUID")?,
                );
            }
        }
        let claims =
            Api::<ResourceClaim>::namespaced(self.client.clone(), namespace).list(&ListParams::default()).await?;
        let mut allocated = BTreeMap::new();
        for claim in claims {
            let results =
                claim.status.as_ref().and_then(|status| status.allocation.as_ref()?.devices.as_ref()?.results.clone());
            let uuid = |result: &k8s_openapi::api::resource::v1::DeviceRequestAllocationResult| {
                names
                    .get(&(result.pool.clone(), result.device.clone()))
                    .cloned()
                    .context("no ResourceSlice offers the device")
            };
            let got = results.iter().flatten().map(uuid).collect::<Result<BTreeSet<String>>>()?;
            allocated.insert(claim.name_any(), got);
        }
        Ok(allocated)
    }

    /// Creates another user's claim for exactly these GPUs of a node, with a pod that uses it.
    /// Waits until they are allocated.
    ///
    /// # Errors
    /// They are not allocated in time.
    pub async fn occupy(&self, namespace: &str, name: &str, node: &str, uuids: &[String]) -> Result<()> {
        let list = serde_json::to_string(uuids)?;
        let expression = format!("device.attributes['{DRIVER}'].?uuid.orValue('') in {list}");
        let claim: ResourceClaim = serde_json::from_value(json!({
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"devices": {"requests": [{"name": "gpus", "exactly": {
                "deviceClassName": DRIVER, "count": uuids.len(), "allocationMode": "ExactCount",
                "selectors": [{"cel": {"expression": expression}}],
            }}]}},
        }))?;
        let pod = serde_json::from_value(json!({
            "metadata": {"name": name, "namespace": namespace},
            "spec": {
                "containers": [{"name": "main", "image": "bench/none:1", "resources": {"claims": [{"name": "gpus"}]}}],
                "resourceClaims": [{"name": "gpus", "resourceClaimName": name}],
                "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                    {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]},
                ]}}},
            },
        }))?;
        Api::namespaced(self.client.clone(), namespace).create(&PostParams::default(), &claim).await?;
        Api::<k8s_openapi::api::core::v1::Pod>::namespaced(self.client.clone(), namespace)
            .create(&PostParams::default(), &pod)
            .await?;
        let is_allocated = async || {
            let got = self.allocated(namespace).await?.remove(name).unwrap_or_default();
            Ok(got.len() == uuids.len())
        };
        until_async(&format!("allocated to {name}"), crate::TIMEOUT, is_allocated).await.map(drop)
    }
}
