//! A watch-backed view of a namespace's pods, for benchmarks that poll thousands of pods.

use anyhow::{Result, bail};
use futures::TryStreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::{WatchStreamExt, watcher};
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
        let api = Api::<Pod>::namespaced(client, namespace);
        tokio::spawn(async move {
            let mut events = Box::pin(watcher(api, watcher::Config::default()).default_backoff());
            while let Ok(event) = events.try_next().await {
                match event {
                    Some(watcher::Event::Apply(pod) | watcher::Event::InitApply(pod)) => {
                        let gates = pod.spec.as_ref().and_then(|spec| spec.scheduling_gates.as_ref());
                        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
                        let now = PodState {
                            gated: gates.is_some_and(|gates| !gates.is_empty()),
                            running: phase == Some("Running"),
                        };
                        shared.0.lock().unwrap_or_else(PoisonError::into_inner).insert(pod.name_any(), now);
                    }
                    Some(watcher::Event::Delete(pod)) => {
                        shared.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&pod.name_any());
                    }
                    Some(_) => {}
                    None => return,
                }
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
