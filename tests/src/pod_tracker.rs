//! A watch-backed view of a namespace's pods, for benchmarks that poll thousands of pods.

use crate::follow::{Update, follow};
use anyhow::{Result, bail};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, ResourceExt};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Timeout of any milestone.
const LIMIT: Duration = Duration::from_secs(600);

/// Current state of a pod.
#[derive(Debug, Clone, Copy, Default)]
pub struct PodState {
    /// The pod has a scheduling gate.
    pub gated: bool,
    /// The pod's phase is `Running`.
    pub running: bool,
}

/// Current pods by name.
#[derive(Clone)]
pub struct PodTracker(Arc<Mutex<HashMap<String, PodState>>>);

impl PodTracker {
    /// Watches a namespace until the runtime ends.
    pub fn watch(client: Client, namespace: &str) -> PodTracker {
        let tracker = PodTracker(Arc::default());
        let shared = tracker.clone();
        follow(Api::<Pod>::namespaced(client, namespace), move |change| {
            let mut pods = shared.0.lock().unwrap_or_else(PoisonError::into_inner);
            match change {
                Update::Applied(pod) => {
                    let gates = pod.spec.as_ref().and_then(|spec| spec.scheduling_gates.as_ref());
                    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
                    let now = PodState {
                        gated: gates.is_some_and(|gates| !gates.is_empty()),
                        running: phase == Some("Running"),
                    };
                    pods.insert(pod.name_any(), now);
                }
                Update::Deleted(pod) => drop(pods.remove(&pod.name_any())),
            }
        });
        tracker
    }

    /// Number of pods that satisfy a condition.
    pub fn count(&self, condition: impl Fn(&str, &PodState) -> bool) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().filter(|(name, pod)| condition(name, pod)).count()
    }

    /// Waits until exactly `count` pods satisfy a condition.
    ///
    /// # Errors
    /// Timeout.
    pub async fn until(&self, what: &str, count: usize, condition: impl Fn(&str, &PodState) -> bool) -> Result<()> {
        let deadline = Instant::now() + LIMIT;
        while self.count(&condition) != count {
            if Instant::now() > deadline {
                bail!("{what}: {} of {count} after {} s", self.count(&condition), LIMIT.as_secs());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }
}
