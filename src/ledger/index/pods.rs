//! Pods: the jobs they belong to, and the resources they take.

use super::{Effect, Index, JobState, PodKey, PodLocation};
use crate::job::{JobId, Key, attempt_of, placement_of};
use crate::usage::Share;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use std::collections::BTreeSet;
use std::sync::Arc;
use switchyard_crds::PlacedNode;
use switchyard_plan::cluster::ownership;
use switchyard_plan::cluster::view::{Phase, PodView};

impl Index {
    /// A pod appeared or changed, whether or not it belongs to a job.
    pub fn apply_pod(&mut self, pod: &Pod) -> Effect {
        self.record_version("Pod", &pod.metadata);
        let mut effect = Effect::default();
        let Some(uid) = pod.metadata.uid.clone() else { return effect };
        let Some(parent) = ownership::parent(&pod.metadata) else {
            self.apply_unlabelled(&uid, &pod.metadata, &mut effect);
            let pod = PodView::of(pod);
            let is_lasting = pod.is_lasting;
            let before = self.usage.share(&uid).map(|share| (share.node.clone(), share.gpus.clone()));
            let node = pod.node.filter(|_| !matches!(pod.phase, Phase::Succeeded | Phase::Failed));
            let share = node.map(|node| {
                // A pod that has lost its labels keeps its GPUs.
                let gpus = before.filter(|(before, _)| *before == node).map(|(_, gpus)| gpus).unwrap_or_default();
                Share { node, amount: pod.requests, gpus, is_lasting, ..Share::default() }
            });
            effect.room.extend(self.usage.set_share(&uid, share));
            return effect;
        };
        let namespace = pod.metadata.namespace.clone().unwrap_or_default();
        let job = JobId { namespace: namespace.clone(), uid: parent.uid.clone() };
        let mut next = PodView::of(pod);
        self.schedulers.observe(pod, &next);
        let pod_key = PodKey { attempt: next.attempt, node_rank: next.node_rank, name: next.name.clone() };
        let state = self.job_states.entry(job.clone()).or_default();
        state.key.get_or_insert_with(|| Key { namespace, name: parent.name.clone() });
        if let Some(before) = state.pods.get(&pod_key).filter(|before| before.uid == next.uid) {
            if let Some(refused) = &mut next.unschedulable {
                refused.since = before.unschedulable.as_ref().and_then(|before| before.since);
            }
            if let (Some(rules), Some(before)) = (&mut next.rules, &before.rules)
                && before.reach.is_some()
                && (&rules.claims, &rules.devices) == (&before.claims, &before.devices)
            {
                let rules = Arc::make_mut(rules);
                rules.reach.clone_from(&before.reach);
                rules.absent.clone_from(&before.absent);
            }
            next.warning = before.warning.clone().filter(|_| next.is_silent());
            next.progress = before.progress.clone().filter(|_| next.is_silent());
            next.admission = before.admission.clone().filter(|_| next.waits_for_kueue());
        }
        let before = self.pods.insert(uid.clone(), PodLocation { job: job.clone(), pod_key: pod_key.clone() });
        if let Some(PodLocation { pod_key: before, .. }) = before.filter(|before| before.pod_key != pod_key) {
            state.pods.remove(&before);
        }
        state.unlabelled.remove(&pod_key.name);
        // Only changes that the plan reads count, not a new resource version alone.
        let is_news = state.pods.get_mut(&pod_key).is_none_or(|before| {
            before.version.clone_from(&next.version);
            *before != next
        });
        state.pods.insert(pod_key.clone(), next);
        effect.room.extend(self.recount_pod(&job, &pod_key));
        if is_news {
            self.touch(&job, &mut effect);
        }
        effect
    }

    /// A pod without a job's label appeared or changed. It is not ours unless the label was
    /// removed.
    fn apply_unlabelled(&mut self, uid: &str, metadata: &ObjectMeta, effect: &mut Effect) {
        let namespace = metadata.namespace.clone().unwrap_or_default();
        let named = ownership::named_parent(metadata).map(|owner| JobId { namespace, uid: owner.uid.clone() });
        let name = metadata.name.clone().unwrap_or_default();
        let is_known = |index: &Index, job: &JobId| {
            index.job_states.get(job).is_some_and(|state| state.unlabelled.get(&name).is_some_and(|known| known == uid))
        };
        if named.as_ref().is_some_and(|job| is_known(self, job)) {
            return;
        }
        self.forget_pod(uid, effect);
        if let (Some(job), Some((attempt, node_rank))) = (named, ownership::position(&name)) {
            self.job_states.entry(job.clone()).or_default().unlabelled.insert(name.clone(), uid.to_string());
            self.touch(&job, effect);
            self.pods.insert(uid.to_string(), PodLocation { job, pod_key: PodKey { attempt, node_rank, name } });
        }
    }

    /// Removes a pod from its job.
    fn forget_pod(&mut self, uid: &str, effect: &mut Effect) {
        let Some(PodLocation { job, pod_key }) = self.pods.remove(uid) else { return };
        if let Some(state) = self.job_states.get_mut(&job) {
            if state.pods.get(&pod_key).is_some_and(|pod| pod.uid == uid) {
                state.pods.remove(&pod_key);
            }
            if state.unlabelled.get(&pod_key.name).is_some_and(|known| known == uid) {
                state.unlabelled.remove(&pod_key.name);
            }
        }
        self.touch(&job, effect);
        self.drop_if_empty(&job);
    }

    /// A pod was deleted.
    pub fn delete_pod(&mut self, metadata: &ObjectMeta) -> Effect {
        self.record_version("Pod", metadata);
        let mut effect = Effect::default();
        let Some(uid) = &metadata.uid else { return effect };
        effect.room.extend(self.usage.set_share(uid, None));
        effect.quota = self.quota_freed(metadata.namespace.as_deref().unwrap_or_default());
        if let Some(state) = self.pods.get(uid).and_then(|location| self.job_states.get_mut(&location.job)) {
            state.writes.forget(uid);
            state.progress.forget(uid);
        }
        self.forget_pod(uid, &mut effect);
        effect
    }

    /// Recounts the resources of a job's pods. Returns the nodes on which some were released.
    pub(super) fn recount(&mut self, job: &JobId) -> BTreeSet<String> {
        let pod_keys: Vec<_> =
            self.job_states.get(job).map(|state| state.pods.keys().cloned().collect()).unwrap_or_default();
        pod_keys.iter().filter_map(|pod_key| self.recount_pod(job, pod_key)).collect()
    }

    /// Recounts the resources of a pod. It takes them on the node to which it is bound, or will be
    /// once the placement of its gang is decided.
    fn recount_pod(&mut self, job: &JobId, pod_key: &PodKey) -> Option<String> {
        let state = self.job_states.get(job)?;
        let pod = state.pods.get(pod_key)?;
        let promised = self.promised(state, pod);
        // The resources promised to a pod of an ended attempt stay taken until the pod is gone: its
        // gate is lifted, so it may be bound or run, and its claim may get devices, before the
        // cache shows any of this. The cache may show the end of the job before it shows the lifted
        // gate.
        let is_open = !pod.gated || state.writes.was_released(&pod.uid);
        let before = self.usage.share(&pod.uid).filter(|_| promised.is_none() && is_open);
        let promised = promised.map(|placed| (placed.node_name.as_str(), placed.gpus.as_slice()));
        let promised = promised.or(before.map(|share| (share.node.as_str(), share.gpus.as_slice())));
        let node = pod.node.as_deref().or(promised.map(|(node, _)| node));
        let share = node.filter(|_| !pod.is_over()).map(|node| Share {
            gpus: promised.filter(|(place, _)| *place == node).map(|(_, gpus)| gpus.to_vec()).unwrap_or_default(),
            amount: pod.requests.clone(),
            node: node.to_string(),
            ..Share::default()
        });
        let uid = pod.uid.clone();
        self.usage.set_share(&uid, share)
    }

    /// The placement of a pod according to the last decision.
    fn promised<'a>(&'a self, state: &'a JobState, pod: &PodView) -> Option<&'a PlacedNode> {
        let job = self.jobs.get(state.key.as_ref()?)?;
        let attempt = attempt_of(job);
        let (attempt, placement) = match &state.assumed {
            Some((attempt, placement)) => (*attempt, placement),
            None => (attempt, placement_of(job)?),
        };
        if pod.attempt != attempt {
            return None;
        }
        placement.nodes.get(pod.node_rank as usize)
    }
}
