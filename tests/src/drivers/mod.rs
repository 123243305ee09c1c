//! Fake GPU drivers on real kubelets: they give containers the GPUs of a node, through claims or by
//! count.
//!
//! ```text
//! GPUTopology ─┬> ClaimDriver   ResourceSlice; NodePrepareResources ─> CDI file ─> container environment
//!              └> DevicePlugin  ListAndWatch;  Allocate ─> container environment
//! ```
//!
//! Both put the UUIDs of a container's GPUs in `NVIDIA_VISIBLE_DEVICES`. There are no device files.

mod claims;
mod grpc;
mod messages;
mod plugin;

pub use claims::ClaimDriver;
pub use plugin::DevicePlugin;

use crate::TIMEOUT;
use crate::nodes::Nodes;
use anyhow::{Context, Result};
use bytes::Bytes;
use grpc::{Answer, Server};
use messages::{Empty, PluginInfo, RegistrationStatus};
use prost::Message;
use std::sync::Arc;
use tokio::sync::mpsc;

/// Environment variable with a container's GPUs, as comma-separated UUIDs.
pub const VISIBLE: &str = "NVIDIA_VISIBLE_DEVICES";
/// Folder that the kubelet watches for plugins.
const REGISTRY: &str = "/var/lib/kubelet/plugins_registry";

/// Returns the file name of a socket that a kubelet calls.
///
/// Go's gRPC client sends the socket path as the host name, with `%2F` for `/`. Our HTTP/2 library
/// rejects this as a host, but accepts it as the user name before an `@`.
fn socket_name(plugin: &str) -> String {
    format!("plugin@{}.sock", plugin.replace('/', "-"))
}

/// Offers a plugin to a node's kubelet, and waits until it is accepted.
async fn register(nodes: &Nodes, node: &str, info: PluginInfo) -> Result<Server> {
    let (status_sender, mut statuses) = mpsc::unbounded_channel();
    let socket = nodes.path(node, &format!("{REGISTRY}/{}", socket_name(&info.name)))?;
    let plugin = format!("{} on {node}", info.name);
    let handler = Arc::new(move |path: String, message: Bytes| {
        let (info, status_sender) = (info.clone(), status_sender.clone());
        let answer = async move {
            match path.as_str() {
                "/pluginregistration.Registration/GetInfo" => Ok(Answer::of(&info)),
                "/pluginregistration.Registration/NotifyRegistrationStatus" => {
                    // Ignore errors: the receiver is gone when the kubelet calls again later.
                    let _ = status_sender.send(RegistrationStatus::decode(message)?);
                    Ok(Answer::of(&Empty {}))
                }
                _ => Ok(Answer::Unknown),
            }
        };
        Box::pin(answer) as futures::future::BoxFuture<'static, Result<Answer>>
    });
    let server = Server::start(&socket, handler)?;
    let status = tokio::time::timeout(TIMEOUT, statuses.recv()).await;
    let status = status.ok().flatten().with_context(|| format!("the kubelet did not take {plugin}"))?;
    anyhow::ensure!(status.plugin_registered, "the kubelet refused {plugin}: {}", status.error);
    Ok(server)
}
