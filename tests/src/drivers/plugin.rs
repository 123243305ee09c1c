//! A device plugin: pods request a number of GPUs, and the kubelet chooses which.

use super::grpc::{Answer, Server};
use super::messages::{Allocate, Allocated, AllocatedContainer, Device, Devices, Empty, PluginInfo};
use super::{VISIBLE, register, socket_name};
use crate::gpus::{RESOURCE, uuids};
use crate::nodes::Nodes;
use anyhow::Result;
use bytes::Bytes;
use futures::future::BoxFuture;
use kube::ResourceExt;
use prost::Message;
use std::sync::Arc;
use switchyard_crds::gpu_topology::GPUTopology;

/// The plugin on one node; it stops on drop.
#[derive(Debug)]
pub struct DevicePlugin {
    _servers: [Server; 2],
}

impl DevicePlugin {
    /// Registers the GPUs of a report with its node's kubelet.
    ///
    /// # Errors
    /// The kubelet rejects the plugin.
    pub async fn start(nodes: &Nodes, report: &GPUTopology) -> Result<DevicePlugin> {
        let name = report.name_any();
        let healthy = |id: String| Device { id, health: "Healthy".into() };
        let devices = Devices { devices: uuids(report).into_iter().map(healthy).collect() };
        let handler = Arc::new(move |path: String, message: Bytes| {
            let answer = answer(&path, message, &devices);
            Box::pin(std::future::ready(answer)) as BoxFuture<'static, Result<Answer>>
        });
        // Next to the kubelet's own socket, in the folder it creates for plugins.
        let endpoint = format!("/var/lib/kubelet/device-plugins/{}", socket_name(RESOURCE));
        let server = Server::start(&nodes.path(&name, &endpoint)?, handler)?;
        let info = PluginInfo {
            kind: "DevicePlugin".into(),
            name: RESOURCE.into(),
            endpoint,
            supported_versions: vec!["v1beta1".into()],
        };
        Ok(DevicePlugin { _servers: [register(nodes, &name, info).await?, server] })
    }
}

fn answer(path: &str, message: Bytes, devices: &Devices) -> Result<Answer> {
    Ok(match path {
        // No options: no PreStartContainer call, and no preferred allocation.
        "/v1beta1.DevicePlugin/GetDevicePluginOptions" => Answer::of(&Empty {}),
        "/v1beta1.DevicePlugin/ListAndWatch" => Answer::Open(devices.encode_to_vec()),
        "/v1beta1.DevicePlugin/Allocate" => {
            let containers = Allocate::decode(message)?.containers.into_iter().map(|container| {
                let visible = (VISIBLE.to_string(), container.devices.join(","));
                AllocatedContainer { environment: [visible].into() }
            });
            Answer::of(&Allocated { containers: containers.collect() })
        }
        _ => Answer::Unknown,
    })
}
