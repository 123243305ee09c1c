//! Queries which container uses which device, through the kubelet's PodResources API on its Unix
//! socket.

mod call;
mod messages;

use call::{CallError, call};
use messages::{AllocatableResponse, Container, ListResponse};
use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;
use switchyard_crds::device_use::{DeviceClaim, DeviceUse, DeviceUseSource};

const LIST: &str = "/v1.PodResourcesLister/List";
const ALLOCATABLE: &str = "/v1.PodResourcesLister/GetAllocatableResources";
/// Time limit of a call: the kubelet responds from memory.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Pauses before retries: a kubelet that restarts is back within seconds.
const PAUSES: [Duration; 3] = [Duration::from_secs(1), Duration::from_secs(2), Duration::from_secs(4)];
/// `maxItems` of `status.inUse`.
const MAX_USES: usize = 1024;
/// `maxItems` of the CDI devices of a claim.
const MAX_CDI: usize = 32;

/// The kubelet's response.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Resources {
    /// Devices in use by containers, sorted by key.
    pub in_use: Vec<DeviceUse>,
    /// Resource and device of every plugin device that the kubelet can allocate.
    pub allocatable: BTreeSet<(String, String)>,
    /// A note if the response exceeded a limit.
    pub note: Option<String>,
}

/// Queries the kubelet, with retries. Calls `failed` after every failed attempt.
///
/// # Errors
/// The last failure, as one sentence.
pub(crate) async fn query(socket: &Path, failed: impl Fn()) -> Result<Resources, String> {
    let mut pauses = PAUSES.into_iter();
    loop {
        let error = match tokio::time::timeout(CALL_TIMEOUT, query_both(socket)).await {
            Ok(Ok(resources)) => return Ok(resources),
            Ok(Err(error)) => error,
            Err(_) => CallError::Malformed(format!("no answer within {} s", CALL_TIMEOUT.as_secs())),
        };
        failed();
        // Do not retry if the socket is missing: there is no kubelet, or it lacks this API.
        let absent = matches!(&error, CallError::Connect(error) if error.kind() == std::io::ErrorKind::NotFound);
        match pauses.next().filter(|_| !absent) {
            Some(pause) => tokio::time::sleep(pause).await,
            None => return Err(format!("{}: {error}", socket.display())),
        }
    }
}

async fn query_both(socket: &Path) -> Result<Resources, CallError> {
    let pods = call::<ListResponse>(socket, LIST).await?;
    let allocatable = call::<AllocatableResponse>(socket, ALLOCATABLE).await?;
    Ok(resources(pods, allocatable))
}

fn resources(list: ListResponse, allocatable: AllocatableResponse) -> Resources {
    let mut in_use = Vec::new();
    for pod in list.pods {
        for container in pod.containers {
            in_use.extend(uses(&pod.namespace, &pod.name, container));
        }
    }
    let key = |entry: &DeviceUse| {
        let DeviceUse { device, resource, namespace, pod, container, .. } = entry.clone();
        (device, resource, namespace, pod, container)
    };
    in_use.sort();
    in_use.dedup_by_key(|entry| key(entry));
    let count = in_use.len();
    in_use.truncate(MAX_USES);
    let note = (count > MAX_USES).then(|| format!("{count} devices in use, of which {MAX_USES} are listed"));
    let devices = allocatable.devices.into_iter();
    let allocatable =
        devices.flat_map(|group| group.ids.into_iter().map(move |id| (group.resource.clone(), id))).collect();
    Resources { in_use, allocatable, note }
}

fn uses(namespace: &str, pod: &str, container: Container) -> Vec<DeviceUse> {
    // The API limits the length of every string.
    let clip = |text: &str, max: usize| text.chars().take(max).collect::<String>();
    let entry = |device: &str, resource: &str, source, claim| DeviceUse {
        device: clip(device, 256),
        resource: clip(resource, 256),
        namespace: clip(namespace, 63),
        pod: clip(pod, 253),
        container: clip(&container.name, 253),
        source,
        claim,
    };
    let plugin = |resource: &str, id: &String| entry(id, resource, DeviceUseSource::DevicePlugin, None);
    let mut all: Vec<DeviceUse> = container
        .devices
        .iter()
        .flat_map(|group| group.ids.iter().map(move |id| plugin(&group.resource, id)))
        .collect();
    for claim in &container.claims {
        all.extend(claim.devices.iter().map(|device| {
            let cdi = device.cdi.iter().take(MAX_CDI).map(|cdi| clip(&cdi.name, 256));
            let of_claim =
                DeviceClaim { name: clip(&claim.name, 253), pool: clip(&device.pool, 253), cdi_devices: cdi.collect() };
            entry(&device.device, &device.driver, DeviceUseSource::DynamicResource, Some(of_claim))
        }));
    }
    all
}
