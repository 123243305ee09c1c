//! Claims, volumes and classes of a snapshot: resolves where the pods of a job can use their
//! volumes, as the controller does.

use super::read;
use serde_json::{Error, Value};
use std::collections::{BTreeMap, BTreeSet};
use switchyard_plan::cluster::view::PodView;
use switchyard_plan::eligible::{DeviceSource, NodeRules, Reach};
use switchyard_plan::volumes::{self, PersistentVolume, PersistentVolumeClaim, StorageClass};

/// Namespace and name.
type Name = (String, String);

#[derive(Debug, Default)]
pub(super) struct Storage {
    claims: BTreeMap<Name, PersistentVolumeClaim>,
    volumes: Vec<PersistentVolume>,
    classes: BTreeMap<String, StorageClass>,
    devices: BTreeSet<(&'static str, Name)>,
}

impl Storage {
    pub(super) fn add(&mut self, kind: &str, item: &Value) -> Result<(), Error> {
        let text = |path: &str| item.pointer(path).and_then(Value::as_str).unwrap_or_default().to_string();
        let name = (text("/metadata/namespace"), text("/metadata/name"));
        match kind {
            "PersistentVolumeClaim" => drop(self.claims.insert(name, read(item)?)),
            "PersistentVolume" => self.volumes.push(read(item)?),
            "StorageClass" => drop(self.classes.insert(name.1, read(item)?)),
            "ResourceClaim" => drop(self.devices.insert(("ResourceClaim", name))),
            "ResourceClaimTemplate" => drop(self.devices.insert(("ResourceClaimTemplate", name))),
            _ => {}
        }
        Ok(())
    }

    /// Resolves the volumes and devices in the rules of a pod. Without any claim in the snapshot,
    /// claims are not checked, because the user may have been unable to list them.
    pub(super) fn resolve(&self, namespace: &str, rules: &mut NodeRules) {
        let named = |name: &String| (namespace.to_string(), name.clone());
        let mut reach: Vec<Reach> = Vec::new();
        if !self.claims.is_empty() {
            for name in &rules.claims {
                match self.claims.get(&named(name)) {
                    Some(claim) => {
                        let class = volumes::class(claim).and_then(|class| self.classes.get(class));
                        reach.extend(volumes::reach(claim, class, &self.volumes));
                    }
                    None => rules.absent.push(volumes::absent_claim(name)),
                }
            }
        }
        for device in &rules.devices {
            let (kind, name) = match device {
                DeviceSource::Claim(name) => ("ResourceClaim", name),
                DeviceSource::Template(name) => ("ResourceClaimTemplate", name),
            };
            let is_listed = self.devices.iter().any(|(listed, _)| *listed == kind);
            if is_listed && !self.devices.contains(&(kind, named(name))) {
                rules.absent.push(volumes::absent_device(kind, name));
            }
        }
        rules.reach = Some(reach);
    }
}

/// The first missing object that a pod references. Until it is created, the job waits without a
/// queue position.
pub(super) fn absent<'a>(pods: impl Iterator<Item = &'a PodView>) -> Option<&'a str> {
    pods.filter_map(|pod| pod.rules.as_ref()).find_map(|rules| rules.absent.first()).map(String::as_str)
}
