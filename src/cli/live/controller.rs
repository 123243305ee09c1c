//! Detects from its Lease whether a controller runs. Without one, statuses are out of date.

use super::Live;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use switchyard_core::units::duration;
use switchyard_crds::labels::LEASE;

/// The chart's default namespace.
const SYSTEM: &str = "switchyard-system";
/// A Lease not renewed for this many times its duration has no live holder.
const MAX_MISSED_RENEWALS: i64 = 3;

/// Returns the holder of a Lease.
///
/// # Errors
/// The Lease has no holder, or has not been renewed since the returned time.
pub(crate) fn holder(lease: &Lease, now: Timestamp) -> Result<String, String> {
    let name = format!("{}/{}", lease.namespace().unwrap_or_default(), lease.name_any());
    let spec = lease.spec.clone().unwrap_or_default();
    let Some(holder) = spec.holder_identity.filter(|holder| !holder.is_empty()) else {
        return Err(format!("the Lease {name} has no holder"));
    };
    let lasts = i64::from(spec.lease_duration_seconds.unwrap_or(10));
    let age = spec.renew_time.map(|time| now.duration_since(time.0).as_secs());
    match age {
        Some(age) if age <= MAX_MISSED_RENEWALS * lasts => Ok(holder),
        Some(age) => Err(format!("{holder} has not renewed the Lease {name} for {}", duration(age as f64))),
        None => Err(format!("{holder} has never renewed the Lease {name}")),
    }
}

/// Why no controller keeps statuses up to date; `None` if one does or if that is unknown.
pub(super) fn absence<'a>(leases: impl Iterator<Item = &'a Lease>, now: Timestamp) -> Option<String> {
    let mut whys = Vec::new();
    for lease in leases {
        whys.push(holder(lease, now).err()?);
    }
    let why = whys.first()?;
    Some(format!("no controller runs: {why}; what is shown is as it was then"))
}

impl Live {
    /// The controllers' Leases that the user can read: all in the cluster, or else the one in the
    /// chart's default namespace.
    pub(super) async fn leases(&self) -> Vec<Lease> {
        let named = ListParams::default().fields(&format!("metadata.name={LEASE}"));
        match Api::<Lease>::all(self.client.clone()).list(&named).await {
            Ok(list) => list.items,
            Err(_) => {
                let usual = Api::<Lease>::namespaced(self.client.clone(), SYSTEM).get_opt(LEASE).await;
                usual.ok().flatten().into_iter().collect()
            }
        }
    }
}
