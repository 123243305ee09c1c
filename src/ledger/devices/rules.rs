//! DeviceTaintRules: taints that administrators and drivers put on devices without changing their
//! slices.

use super::{Device, Devices};
use crate::usage::Usage;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeSet;

/// Whether a taint keeps away pods whose claims do not tolerate it. Our claims tolerate none.
pub(super) fn blocks_scheduling(effect: &str) -> bool {
    matches!(effect, "NoSchedule" | "NoExecute")
}

/// The devices that a rule taints. An absent field matches all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceRule {
    driver: Option<String>,
    pool: Option<String>,
    device: Option<String>,
}

/// The fields common to `v1alpha3`, `v1beta2` and `v1`, and the selectors of `v1alpha3`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    device_selector: Option<Selector>,
    taint: Taint,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Selector {
    driver: Option<String>,
    pool: Option<String>,
    device: Option<String>,
    device_class_name: Option<String>,
    #[serde(default)]
    selectors: Vec<Value>,
}

#[derive(Deserialize)]
struct Taint {
    effect: String,
}

impl DeviceRule {
    /// Parses the `spec` of a DeviceTaintRule; `Ok(None)` if it keeps no pod away.
    ///
    /// # Errors
    /// The spec is invalid, or selects devices by class or by CEL.
    pub fn of(spec: &Value) -> Result<Option<DeviceRule>, String> {
        let Spec { device_selector, taint } = Spec::deserialize(spec).map_err(|error| error.to_string())?;
        // Without a selector, a rule selects nothing.
        let Some(selector) = device_selector.filter(|_| blocks_scheduling(&taint.effect)) else { return Ok(None) };
        let Selector { driver, pool, device, device_class_name, selectors } = selector;
        if device_class_name.is_some() || !selectors.is_empty() {
            return Err("it selects devices by deviceClassName or selectors, which are not evaluated".into());
        }
        Ok(Some(DeviceRule { driver, pool, device }))
    }

    pub(super) fn selects(&self, (driver, pool, name): &Device) -> bool {
        let is = |wanted: &Option<String>, is: &String| wanted.as_ref().is_none_or(|wanted| wanted == is);
        is(&self.driver, driver) && is(&self.pool, pool) && is(&self.device, name)
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
        self.slices.keys().filter_map(|slice| self.offer(slice, usage)).collect()
    }
}
