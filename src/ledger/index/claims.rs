//! Devices in the index: agents' reports, drivers' slices, taint rules and claims.

use super::{Effect, Index};
use crate::devices::{DeviceRule, Selector};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_plan::objects::Kind;

impl Index {
    /// The report of a node's agent appeared or changed, or is invalid.
    pub fn apply_report(&mut self, metadata: &ObjectMeta, report: Result<&GPUTopology, String>) -> Effect {
        self.record_version("GPUTopology", metadata);
        let name = metadata.name.as_deref().unwrap_or_default();
        let mut effect = Effect::default();
        if self.usage.set_report(name, report) {
            effect.room.insert(name.to_string());
            // The GPUs that its pods really have may differ from the plan.
            self.touch_node(name, &mut effect);
        }
        effect
    }

    /// The report of a node was deleted.
    pub fn delete_report(&mut self, metadata: &ObjectMeta) -> Effect {
        self.record_version("GPUTopology", metadata);
        self.usage.remove_report(metadata.name.as_deref().unwrap_or_default());
        Effect::default()
    }

    /// A driver's slice appeared or changed.
    pub fn apply_slice(&mut self, slice: &ResourceSlice, driver: &str) -> Effect {
        self.record_version("ResourceSlice", &slice.metadata);
        Effect { room: self.devices.apply_slice(slice, driver, &mut self.usage), ..Effect::default() }
    }

    /// A driver's slice was deleted.
    pub fn delete_slice(&mut self, metadata: &ObjectMeta) -> Effect {
        self.record_version("ResourceSlice", metadata);
        let name = metadata.name.as_deref().unwrap_or_default();
        Effect { room: self.devices.delete_slice(name, &mut self.usage), ..Effect::default() }
    }

    /// A DeviceTaintRule appeared or changed; `None` if it was deleted or keeps no pod away.
    pub fn apply_device_rule(&mut self, name: &str, rule: Option<DeviceRule>) -> Effect {
        Effect { room: self.devices.set_rule(name, rule, &mut self.usage), ..Effect::default() }
    }

    /// A DeviceClass appeared or changed; `None` if it was deleted.
    pub fn apply_device_class(&mut self, name: &str, selectors: Option<Vec<Selector>>) -> Effect {
        Effect { room: self.devices.set_class(name, selectors, &mut self.usage), ..Effect::default() }
    }

    /// A claim appeared or changed, whether or not it belongs to a job.
    pub fn apply_claim(&mut self, claim: &ResourceClaim, content: serde_json::Value) -> Effect {
        let room = self.devices.apply_claim(claim, &mut self.usage);
        let mut effect = self.apply_object(Kind::ResourceClaim, &claim.metadata, content);
        effect.room.extend(room);
        effect
    }

    /// A claim was deleted.
    pub fn delete_claim(&mut self, metadata: &ObjectMeta) -> Effect {
        let room = self.devices.delete_claim(metadata.uid.as_deref().unwrap_or_default(), &mut self.usage);
        let mut effect = self.delete_object(Kind::ResourceClaim, metadata);
        effect.room.extend(room);
        effect
    }
}
