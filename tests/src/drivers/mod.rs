//! Drivers of GPUs that are not there, on real kubelets: what gives a container the GPUs of a node, by claims or by numbers.
//!
//! ```text
//! GPUTopology ─┬> ClaimDriver   ResourceSlice; NodePrepareResources ─> CDI file ─> the container's environment
//!              └> DevicePlugin  ListAndWatch;  Allocate ─> the container's environment
//! ```
//!
//! Both say in `NVIDIA_VISIBLE_DEVICES` which GPUs a container has, by UUID. Neither has a device file to give.

mod claims;
mod grpc;
mod messages;
mod plugin;

pub use claims::ClaimDriver;
pub use plugin::DevicePlugin;

use crate::nodes::Nodes;
use anyhow::{Context, Result};
use bytes::Bytes;
use grpc::{Answer, Server};
use messages::{Empty, PluginInfo, RegistrationStatus};
use prost::Message;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// Variable in which a container finds its GPUs: UUIDs with commas.
pub const VISIBLE: &str = "NVIDIA_VISIBLE_DEVICES";
/// Folder that the kubelet watches for plug-ins.
const REGISTRY: &str = "/var/lib/kubelet/plugins_registry";
/// For the kubelet to take a plug-in, on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Offers a plug-in to the kubelet of a node, and waits until it has taken it.
async fn register(nodes: &Nodes, node: &str, info: PluginInfo) -> Result<Server> {
    let (told, mut answers) = mpsc::unbounded_channel();
    let socket = nodes.path(node, &format!("{REGISTRY}/{}.sock", info.name.replace('/', "-")))?;
    let of = format!("{} on {node}", info.name);
    let handler = Arc::new(move |path: String, message: Bytes| {
        let (info, told) = (info.clone(), told.clone());
        let answer = async move {
            match path.as_str() {
                "/pluginregistration.Registration/GetInfo" => Ok(Answer::of(&info)),
                "/pluginregistration.Registration/NotifyRegistrationStatus" => {
                    // Nobody listens any more when the kubelet asks again.
                    let _ = told.send(RegistrationStatus::decode(message)?);
                    Ok(Answer::of(&Empty {}))
                }
                _ => Ok(Answer::Unknown),
            }
        };
        Box::pin(answer) as futures::future::BoxFuture<'static, Result<Answer>>
    });
    let server = Server::start(&socket, handler)?;
    let status = tokio::time::timeout(PATIENCE, answers.recv()).await;
    let status = status.ok().flatten().with_context(|| format!("the kubelet did not take {of}"))?;
    anyhow::ensure!(status.plugin_registered, "the kubelet refused {of}: {}", status.error);
    Ok(server)
}
