//! What a watch has seen of the pods of a namespace.

use crate::LIMIT;
use anyhow::{Result, bail};
use futures::TryStreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PodSeen {
    pub gated: bool,
    pub running: bool,
}

/// Pods by name, as they are now.
#[derive(Clone)]
pub(crate) struct Seen(Arc<Mutex<HashMap<String, PodSeen>>>);

impl Seen {
    /// Watches a namespace until the runtime ends.
    pub fn watch(client: Client, namespace: &str) -> Seen {
        let seen = Seen(Arc::default());
        let own = seen.clone();
        let api = Api::<Pod>::namespaced(client, namespace);
        tokio::spawn(async move {
            let mut events = Box::pin(watcher(api, watcher::Config::default()).default_backoff());
            while let Ok(event) = events.try_next().await {
                match event {
                    Some(watcher::Event::Apply(pod) | watcher::Event::InitApply(pod)) => {
                        let gates = pod.spec.as_ref().and_then(|spec| spec.scheduling_gates.as_ref());
                        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
                        let now = PodSeen {
                            gated: gates.is_some_and(|gates| !gates.is_empty()),
                            running: phase == Some("Running"),
                        };
                        own.0.lock().unwrap().insert(pod.name_any(), now);
                    }
                    Some(watcher::Event::Delete(pod)) => drop(own.0.lock().unwrap().remove(&pod.name_any())),
                    Some(_) => {}
                    None => return,
                }
            }
        });
        seen
    }

    pub fn count(&self, is: impl Fn(&str, &PodSeen) -> bool) -> usize {
        self.0.lock().unwrap().iter().filter(|(name, pod)| is(name, pod)).count()
    }

    /// Waits for a number of pods.
    pub async fn until(&self, what: &str, count: usize, is: impl Fn(&str, &PodSeen) -> bool) -> Result<()> {
        let give_up = Instant::now() + LIMIT;
        while self.count(&is) != count {
            if Instant::now() > give_up {
                bail!("{what}: {} of {count} after {} s", self.count(&is), LIMIT.as_secs());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }
}
