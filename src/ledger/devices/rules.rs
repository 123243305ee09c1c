//! DeviceTaintRules: taints that administrators and drivers put on devices without changing their
//! slices.

use super::selectors::{Facts, Selector};
use super::{Device, Devices};
use crate::usage::Usage;
use k8s_openapi::api::resource::v1::DeviceSelector;
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Whether a taint keeps away pods whose claims do not tolerate it. Our claims tolerate none.
pub(super) fn blocks_scheduling(effect: &str) -> bool {
    matches!(effect, "NoSchedule" | "NoExecute")
}

/// The devices that a rule taints: those that match all fields. An absent field matches all.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceRule {
    driver: Option<String>,
    pool: Option<String>,
    device: Option<String>,
    /// A DeviceClass whose selectors must match.
    class: Option<String>,
    selectors: Vec<Selector>,
}

/// The fields common to `v1alpha3`, `v1beta2` and `v1`, and the selectors of `v1alpha3`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    device_selector: Option<Selected>,
    taint: Taint,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Selected {
    driver: Option<String>,
    pool: Option<String>,
    device: Option<String>,
    device_class_name: Option<String>,
    #[serde(default)]
    selectors: Vec<DeviceSelector>,
}

#[derive(Deserialize)]
struct Taint {
    effect: String,
}

impl DeviceRule {
    /// Parses the `spec` of a DeviceTaintRule; `Ok(None)` if it keeps no pod away.
    ///
    /// # Errors
    /// The spec is invalid.
    pub fn of(spec: &Value) -> Result<Option<DeviceRule>, String> {
        let Spec { device_selector, taint } = Spec::deserialize(spec).map_err(|error| error.to_string())?;
        // Without a selector, a rule selects nothing.
        let Some(selector) = device_selector.filter(|_| blocks_scheduling(&taint.effect)) else { return Ok(None) };
        let Selected { driver, pool, device, device_class_name, selectors } = selector;
        let selectors = Selector::all(&selectors);
        Ok(Some(DeviceRule { driver, pool, device, class: device_class_name, selectors }))
    }

    /// The DeviceClass that limits it to devices of that class.
    pub fn class(&self) -> Option<&str> {
        self.class.as_deref()
    }

    /// Its own CEL selectors.
    pub fn selectors(&self) -> &[Selector] {
        &self.selectors
    }

    /// Whether it taints a device, as `applyPatches` in Kubernetes'
    /// `dynamic-resource-allocation/resourceslice/tracker` (1.34) decides. A selector that is not
    /// evaluated selects every device.
    pub(super) fn selects(
        &self,
        (driver, pool, name): &Device,
        facts: &Facts,
        classes: &BTreeMap<String, Vec<Selector>>,
    ) -> bool {
        let is = |wanted: &Option<String>, is: &String| wanted.as_ref().is_none_or(|wanted| wanted == is);
        if !(is(&self.driver, driver) && is(&self.pool, pool) && is(&self.device, name)) {
            return false;
        }
        let class = match &self.class {
            None => &[],
            Some(class) => match classes.get(class) {
                Some(selectors) => selectors.as_slice(),
                // Kubernetes skips a rule whose class does not exist.
                None => return false,
            },
        };
        class.iter().chain(&self.selectors).all(|selector| selector.matches(driver, facts))
    }
}

impl Devices {
    /// Sets a rule; `None` removes it. Returns the nodes on which placement is affected.
    pub fn set_rule(&mut self, name: &str, rule: Option<DeviceRule>, usage: &mut Usage) -> BTreeSet<String> {
        if self.rules.get(name) == rule.as_ref() {
            return BTreeSet::new();
        }
        match rule {
            Some(rule) => drop(self.rules.insert(name.to_string(), rule)),
            None => drop(self.rules.remove(name)),
        }
        self.offer_all(usage)
    }

    /// Sets the CEL selectors of a DeviceClass; `None` removes the class. Returns the nodes on
    /// which placement is affected.
    pub fn set_class(&mut self, name: &str, selectors: Option<Vec<Selector>>, usage: &mut Usage) -> BTreeSet<String> {
        match selectors {
            Some(selectors) => drop(self.classes.insert(name.to_string(), selectors)),
            None => drop(self.classes.remove(name)),
        }
        if self.rules.values().any(|rule| rule.class() == Some(name)) { self.offer_all(usage) } else { BTreeSet::new() }
    }

    fn offer_all(&self, usage: &mut Usage) -> BTreeSet<String> {
        self.slices.keys().filter_map(|slice| self.offer(slice, usage)).collect()
    }
}
