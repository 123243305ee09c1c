//! Watches the pods of all gangs and checks every state.

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, ResourceExt};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use switchyard_tests::{Update, follow};

const KUEUE_GATE: &str = "kueue.x-k8s.io/admission";
const OWN_GATE: &str = "training.switchyard.dev/gang";

/// Pods of a gang by name: whether Kueue gates the pod, and whether Switchyard has ungated it.
type Gang = BTreeMap<String, (bool, bool)>;

#[derive(Default)]
struct State {
    gangs: BTreeMap<String, Gang>,
    partial: BTreeSet<String>,
    states: usize,
}

#[derive(Clone)]
pub(crate) struct Watched(Arc<Mutex<State>>);

impl Watched {
    /// Watches a namespace until the runtime ends. Writes the first pod in each state of interest
    /// to the `record` folder.
    pub fn start(client: Client, namespace: &str, record: Option<PathBuf>) -> Watched {
        let watched = Watched(Arc::default());
        let own = watched.clone();
        follow(Api::<Pod>::namespaced(client, namespace), move |change| match change {
            Update::Applied(pod) => {
                if let Some(folder) = &record {
                    keep(folder, pod);
                }
                own.see(pod);
            }
            Update::Deleted(pod) => own.forget(pod),
        });
        watched
    }

    fn see(&self, pod: &Pod) {
        let mut state = self.0.lock().unwrap();
        let gates = pod.spec.as_ref().and_then(|spec| spec.scheduling_gates.as_deref()).unwrap_or_default();
        let has = |name: &str| gates.iter().any(|gate| gate.name == name);
        let group = group(pod);
        let gang = state.gangs.entry(group.clone()).or_default();
        gang.insert(pod.name_any(), (has(KUEUE_GATE), !has(OWN_GATE)));
        let is_partial = gang.values().any(|(held, _)| *held) && gang.values().any(|(_, let_go)| *let_go);
        state.states += 1;
        if is_partial {
            state.partial.insert(group);
        }
    }

    fn forget(&self, pod: &Pod) {
        if let Some(gang) = self.0.lock().unwrap().gangs.get_mut(&group(pod)) {
            gang.remove(&pod.name_any());
        }
    }

    /// Gangs with a pod that was ungated while Kueue still gated another one.
    pub fn partial(&self) -> BTreeSet<String> {
        self.0.lock().unwrap().partial.clone()
    }

    /// Number of pod states checked.
    pub fn states(&self) -> usize {
        self.0.lock().unwrap().states
    }
}

fn group(pod: &Pod) -> String {
    pod.labels().get("kueue.x-k8s.io/pod-group-name").cloned().unwrap_or_default()
}

/// Saves the first pod that Kueue gates and the first that it stops.
fn keep(folder: &Path, pod: &Pod) {
    let gates = pod.spec.as_ref().and_then(|spec| spec.scheduling_gates.as_deref()).unwrap_or_default();
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    let is_stopped = conditions.iter().any(|condition| condition.type_ == "TerminationTarget");
    let name = match pod.metadata.deletion_timestamp {
        Some(_) if is_stopped => "stopped-pod.json",
        None if gates.iter().any(|gate| gate.name == KUEUE_GATE) => "held-pod.json",
        _ => return,
    };
    let file = folder.join(name);
    if !file.exists() {
        let mut pod = pod.clone();
        pod.metadata.managed_fields = None;
        let text = serde_json::to_string_pretty(&pod).unwrap_or_default();
        let _ = std::fs::write(file, text + "\n");
    }
}
