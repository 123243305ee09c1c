//! Devices: agents' reports, the GPUs that drivers offer in ResourceSlices, and their allocation to
//! ResourceClaims.

mod rules;
mod selectors;

pub use rules::DeviceRule;
pub use selectors::Selector;

use crate::usage::{Share, Usage};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use selectors::Facts;
use std::collections::{BTreeMap, BTreeSet};

/// Driver, pool and name of a device.
type Device = (String, String, String);

/// A GPU offered in a ResourceSlice.
#[derive(Debug)]
struct Offered {
    slice: String,
    node: String,
    uuid: String,
    /// Counter sets that it shares with other devices of its pool, as a MIG partition does with its
    /// GPU and that GPU's other partitions.
    counters: Vec<String>,
    /// Whether its slice has a taint for it that keeps pods away.
    is_tainted: bool,
    facts: Facts,
}

/// An allocated claim.
#[derive(Debug, Default)]
struct Allocated {
    devices: Vec<Device>,
    /// UIDs of its pods.
    pods: Vec<String>,
}

/// The GPUs that drivers offer, and the claims they are allocated to.
#[derive(Debug, Default)]
pub struct Devices {
    /// Node and devices by slice.
    slices: BTreeMap<String, (String, Vec<Device>)>,
    /// Every GPU, by its device. A driver may publish a new slice before it withdraws the old one.
    gpus: BTreeMap<Device, Offered>,
    /// Allocated claims, by UID.
    claims: BTreeMap<String, Allocated>,
    /// UIDs of allocated claims, by the pools of their devices.
    by_pool: BTreeMap<String, BTreeSet<String>>,
    /// DeviceTaintRules that keep pods away from devices, by name.
    rules: BTreeMap<String, DeviceRule>,
    /// CEL selectors of DeviceClasses, by name.
    classes: BTreeMap<String, Vec<Selector>>,
}

impl Devices {
    /// A slice appeared or changed. Returns the nodes on which placement is affected.
    pub fn apply_slice(&mut self, slice: &ResourceSlice, driver: &str, usage: &mut Usage) -> BTreeSet<String> {
        let name = slice.metadata.name.clone().unwrap_or_default();
        let Some(node) = slice.spec.node_name.clone().filter(|_| slice.spec.driver == driver) else {
            return self.delete_slice(&name, usage);
        };
        let mut changed = self.forget(&name, Some(&node), usage);
        let mut devices = Vec::new();
        for device in slice.spec.devices.iter().flatten() {
            let attributes = device.attributes.as_ref();
            let named = |name: &str| attributes.and_then(|all| all.get(name))?.string.clone();
            // An attribute without a domain is the driver's own.
            let Some(uuid) = named("uuid").or_else(|| named(&format!("{driver}/uuid"))) else { continue };
            let is_tainted = device.taints.iter().flatten().any(|taint| rules::blocks_scheduling(&taint.effect));
            let counters = device.consumes_counters.iter().flatten().map(|of| of.counter_set.clone()).collect();
            let facts = Facts::of(device);
            let device = (driver.to_string(), slice.spec.pool.name.clone(), device.name.clone());
            let offered = Offered { slice: name.clone(), node: node.clone(), uuid, counters, is_tainted, facts };
            self.gpus.insert(device.clone(), offered);
            devices.push(device);
        }
        self.slices.insert(name.clone(), (node, devices));
        changed.extend(self.offer(&name, usage));
        // Recompute the shares of claims on this pool, because their devices may have changed.
        for uid in self.by_pool.get(&slice.spec.pool.name).into_iter().flatten() {
            changed.extend(usage.set_share(&taker(uid), self.share(&self.claims[uid])));
        }
        changed
    }

    /// Offers the devices of a slice that have no taint against pods. Returns the slice's node if
    /// the offer changed.
    fn offer(&self, name: &str, usage: &mut Usage) -> Option<String> {
        let (node, devices) = self.slices.get(name)?;
        let is_open = |(device, offered): &(&Device, &Offered)| {
            let mut rules = self.rules.values();
            !offered.is_tainted && !rules.any(|rule| rule.selects(device, &offered.facts, &self.classes))
        };
        let offered = devices.iter().filter_map(|device| Some((device, self.gpus.get(device)?)));
        let open = offered.filter(is_open).map(|(_, offered)| offered.uuid.clone()).collect();
        // A node whose devices are all tainted still allocates GPUs through claims.
        let open = Some(open).filter(|_| !devices.is_empty());
        usage.set_offer(name, node, open).then(|| node.clone())
    }

    /// Forgets a slice and its devices; its offer stays if it is on the node `kept`. Returns the
    /// node whose offer was withdrawn.
    fn forget(&mut self, name: &str, kept: Option<&str>, usage: &mut Usage) -> BTreeSet<String> {
        let Some((node, devices)) = self.slices.remove(name) else { return BTreeSet::new() };
        for device in &devices {
            if self.gpus.get(device).is_some_and(|offered| offered.slice == name) {
                self.gpus.remove(device);
            }
        }
        if kept == Some(node.as_str()) {
            return BTreeSet::new();
        }
        usage.set_offer(name, &node, None);
        BTreeSet::from([node])
    }

    /// A slice was deleted.
    pub fn delete_slice(&mut self, name: &str, usage: &mut Usage) -> BTreeSet<String> {
        self.forget(name, None, usage)
    }

    /// A claim appeared or changed. Returns the node on which devices became free.
    pub fn apply_claim(&mut self, claim: &ResourceClaim, usage: &mut Usage) -> Option<String> {
        let uid = claim.metadata.uid.clone().unwrap_or_default();
        let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
        let results = allocation.and_then(|allocation| allocation.devices.as_ref()?.results.as_deref());
        let devices: Vec<Device> = results
            .unwrap_or_default()
            .iter()
            .filter(|result| result.admin_access != Some(true))
            .map(|result| (result.driver.clone(), result.pool.clone(), result.device.clone()))
            .collect();
        if devices.is_empty() {
            return self.delete_claim(&uid, usage);
        }
        let consumers = claim.status.iter().flat_map(|status| status.reserved_for.iter().flatten());
        let pods = consumers.filter(|consumer| consumer.resource == "pods").map(|pod| pod.uid.clone()).collect();
        let allocated = Allocated { devices, pods };
        let freed = usage.set_share(&taker(&uid), self.share(&allocated));
        self.forget_claim(&uid);
        for (_, pool, _) in &allocated.devices {
            self.by_pool.entry(pool.clone()).or_default().insert(uid.clone());
        }
        self.claims.insert(uid, allocated);
        freed
    }

    /// A claim was deleted or deallocated.
    pub fn delete_claim(&mut self, uid: &str, usage: &mut Usage) -> Option<String> {
        self.forget_claim(uid);
        usage.set_share(&taker(uid), None)
    }

    fn forget_claim(&mut self, uid: &str) {
        for (_, pool, _) in self.claims.remove(uid).unwrap_or_default().devices {
            if let Some(claims) = self.by_pool.get_mut(&pool) {
                claims.remove(uid);
                if claims.is_empty() {
                    self.by_pool.remove(&pool);
                }
            }
        }
    }

    /// UUIDs of the GPUs allocated to a claim; `None` if it is not allocated, or no slice offers
    /// its devices.
    pub fn allocated(&self, uid: &str) -> Option<Vec<String>> {
        let gpus = self.claims.get(uid)?.devices.iter().filter_map(|device| self.gpus.get(device));
        Some(gpus.map(|offered| offered.uuid.clone()).collect()).filter(|gpus: &Vec<String>| !gpus.is_empty())
    }

    /// The GPUs that are unavailable to other pods while a claim is allocated: its devices, and all
    /// that share counters with one of them. All devices of a claim are on one node.
    fn share(&self, claim: &Allocated) -> Option<Share> {
        let mut share = Share { reserved_for: claim.pods.clone(), ..Share::default() };
        for device in &claim.devices {
            if let Some(offered) = self.gpus.get(device) {
                share.node.clone_from(&offered.node);
                share.gpus.push(offered.uuid.clone());
                share.gpus.extend(self.counter_siblings(device, offered));
            }
        }
        Some(share).filter(|share| !share.gpus.is_empty())
    }

    /// UUIDs of the other devices of a pool that share counters with this one.
    fn counter_siblings<'a>(
        &'a self,
        (driver, pool, name): &'a Device,
        of: &'a Offered,
    ) -> impl Iterator<Item = String> + 'a {
        let first = (driver.clone(), pool.clone(), String::new());
        let of_pool = self.gpus.range(first..).take_while(move |((d, p, _), _)| (d, p) == (driver, pool));
        let others = of_pool.filter(move |((.., other), _)| !of.counters.is_empty() && other != name);
        let shares = others.filter(|(_, other)| other.counters.iter().any(|set| of.counters.contains(set)));
        shares.map(|(_, other)| other.uuid.clone())
    }
}

/// The name under which a claim's share is recorded.
pub fn taker(uid: &str) -> String {
    format!("claim/{uid}")
}

#[cfg(test)]
mod tests;
