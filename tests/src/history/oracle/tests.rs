//! Runs every oracle on a correct history and on one with an injected violation.

use super::*;
use crate::history::{ClaimFact, NodeFact, OfferFact};
use serde_json::json;
use std::collections::BTreeMap;
use switchyard_crds::{TrainJob, TrainJobStatus};
use switchyard_plan::eligible::NodeFacts;
use switchyard_plan::resources;

/// Builder for a history; each step is a revision.
#[derive(Default)]
struct Scenario {
    changes: Vec<Change>,
    known: BTreeMap<String, Fact>,
}

impl Scenario {
    fn step(&mut self, name: &str, what: ChangeKind, fact: Fact) {
        let revision = self.changes.len() as u64 + 1;
        self.known.insert(name.into(), fact.clone());
        self.changes.push(Change { revision, what, name: name.into(), uid: format!("uid-{name}"), fact });
    }

    /// Adds the object, or modifies it if it exists.
    fn set(&mut self, name: &str, fact: Fact) {
        let what = if self.known.contains_key(name) { ChangeKind::Modified } else { ChangeKind::Added };
        self.step(name, what, fact);
    }

    fn delete(&mut self, name: &str) {
        let fact = self.known[name].clone();
        self.step(name, ChangeKind::Deleted, fact);
        self.known.remove(name);
    }

    fn node(&mut self, name: &str, cpu: &str) {
        let allocatable = serde_json::from_value(json!({"cpu": cpu, "memory": "1Gi", "pods": "4"})).unwrap();
        let allocatable = Some(resources::of_quantities(&allocatable));
        let facts = NodeFacts { name: name.into(), ready: true, ..NodeFacts::default() };
        self.set(name, Fact::Node(NodeFact { ready: true, silent: false, open: true, allocatable, facts }));
    }

    fn job(&mut self, nodes: usize, stage: &str, attempt: i32) {
        self.status(nodes, job(stage, attempt));
    }

    fn status(&mut self, nodes: usize, status: TrainJobStatus) {
        let spec = json!({"trainer": {"framework": "Plain", "image": "i", "numNodes": nodes, "resourcesPerNode": {"limits": {"cpu": "500m"}}}});
        let mut whole = TrainJob::new("j", serde_json::from_value(spec).unwrap());
        whole.status = Some(status.clone());
        self.set(
            "j",
            Fact::Job(Box::new(JobFact {
                nodes,
                generation: 1,
                status,
                whole: Some(whole.into()),
                ..JobFact::default()
            })),
        );
    }

    /// Sets the pod of this attempt and rank to `gated`, `bound` or a phase, on node `n`.
    fn pod(&mut self, attempt: u32, rank: u32, state: &str) {
        let mut pod = PodFact { job: "uid-j".into(), ..PodFact::default() };
        let spec = json!({"containers": [{"name": "trainer", "resources": {"requests": {"cpu": "500m"}}}]});
        pod.view.requests = resources::pod_requests(&serde_json::from_value(spec).unwrap());
        pod.view.name = format!("j-{attempt}-{rank}");
        (pod.view.attempt, pod.view.node_rank) = (attempt, rank);
        pod.view.gated = state == "gated";
        pod.view.node = (state != "gated").then(|| "n".into());
        pod.view.deleting = state == "deleting";
        pod.view.phase = match state {
            "running" | "deleting" => Phase::Running,
            "succeeded" => Phase::Succeeded,
            _ => Phase::Pending,
        };
        let name = pod.view.name.clone();
        self.set(&name, Fact::Pod(Box::new(pod)));
    }

    fn history(&self) -> History {
        History::new(self.changes.clone()).unwrap()
    }

    /// Returns all violations found by all oracles, by oracle name.
    fn violations(&self) -> Vec<(&'static str, u64)> {
        let history = self.history();
        let all = ORACLES.iter().flat_map(|(name, oracle)| {
            oracle(&history).into_iter().map(|violation| (*name, violation.revision)).collect::<Vec<_>>()
        });
        all.collect()
    }
}

fn job(stage: &str, attempt: i32) -> TrainJobStatus {
    let condition = |kind: &str, state: &str, reason: &str| json!({"type": kind, "status": state, "reason": reason, "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"});
    let mut conditions = vec![condition("Succeeded", "Unknown", stage)];
    if stage == "Complete" || stage == "Failed" {
        conditions.push(condition(stage, "True", stage));
    }
    match stage {
        "Starting" | "Running" => conditions.push(condition("Placed", "True", "Placed")),
        "Queued" => conditions.push(condition("Placed", "False", "NoRoom")),
        _ => {}
    }
    let placement =
        json!({"reason": "", "nodes": [{"firstRank": 0, "nodeName": "n"}, {"firstRank": 1, "nodeName": "n"}]});
    serde_json::from_value(json!({
        "attempt": attempt, "restarts": {"application": 0, "infrastructure": 0, "preemption": 0, "total": attempt - 1}, "conditions": conditions, "placement": placement,
    }))
    .unwrap()
}

/// Two nodes, a job with two pods, a failure, a second attempt, and the end.
fn complete_run() -> Scenario {
    let mut scenario = Scenario::default();
    scenario.node("n", "1");
    scenario.node("m", "1");
    scenario.job(2, "Placing", 1);
    for attempt in 1..=2 {
        scenario.pod(attempt, 0, "gated");
        scenario.pod(attempt, 1, "gated");
        scenario.job(2, "Starting", attempt as i32);
        for state in ["bound", "running"] {
            scenario.pod(attempt, 0, state);
            scenario.pod(attempt, 1, state);
        }
        scenario.job(2, "Running", attempt as i32);
        if attempt == 1 {
            scenario.job(2, "Restarting", 2);
            scenario.pod(1, 0, "deleting");
            scenario.pod(1, 1, "deleting");
            scenario.delete("j-1-0");
            scenario.delete("j-1-1");
        }
    }
    scenario
}

#[test]
fn a_faultless_run_is_clean() {
    let mut scenario = complete_run();
    assert_eq!(scenario.violations(), []);
    scenario.pod(2, 0, "succeeded");
    assert_eq!(scenario.violations(), [], "one of two is done");
    scenario.pod(2, 1, "succeeded");
    scenario.job(2, "Complete", 2);
    scenario.delete("j");
    assert_eq!(scenario.violations(), []);
}

#[test]
fn a_history_with_a_gap_is_rejected() {
    let whole = complete_run().changes;
    let without = |revision: u64| whole.iter().filter(|change| change.revision != revision).cloned().collect();
    // Remove the creation of a pod, then a deletion, which the next pod with that name reveals.
    assert!(History::new(without(4)).unwrap_err().to_string().contains("j-1-0 is Modified, but the change before it"));
    let mut twice = whole.clone();
    twice.push(whole[3].clone());
    assert!(History::new(twice).unwrap_err().to_string().contains("occurs twice"));
    let mut again = whole.clone();
    again.push(Change { revision: 1000, what: ChangeKind::Added, ..whole[0].clone() });
    assert!(History::new(again).unwrap_err().to_string().contains("n is Added, but the change before it"));
    let mut shuffled = whole.clone();
    shuffled.reverse();
    assert_eq!(History::new(shuffled).unwrap().changes(), whole);
}

#[test]
fn over_allocated_nodes_are_detected() {
    let mut scenario = Scenario::default();
    scenario.node("n", "1");
    scenario.job(3, "Starting", 1);
    (0..3).for_each(|rank| scenario.pod(1, rank, "gated"));
    scenario.pod(1, 0, "bound");
    scenario.pod(1, 1, "bound");
    assert_eq!(scenario.violations().iter().filter(|(name, _)| *name == "over_allocated").count(), 0);
    scenario.pod(1, 2, "bound");
    assert_eq!(scenario.violations(), [("over_allocated", 8)]);
    assert_eq!(
        over_allocated(&scenario.history())[0].to_string(),
        "revision 8: j-1-2: node n: cpu: 1500m requested, 1 allocatable"
    );
    // A node that shrinks below its pods' requests.
    scenario.pod(1, 2, "succeeded");
    scenario.node("n", "900m");
    assert_eq!(over_allocated(&scenario.history()).len(), 2);
    // A node that registered again and has not reported yet is unknown.
    scenario.set("n", Fact::Node(NodeFact { ready: true, open: true, ..NodeFact::default() }));
    assert_eq!(over_allocated(&scenario.history()).len(), 2);
    scenario.node("n", "900m");
    assert_eq!(over_allocated(&scenario.history()).len(), 3);
    // Finished pods occupy nothing.
    scenario.pod(1, 1, "succeeded");
    assert_eq!(over_allocated(&scenario.history()).len(), 3);
}

#[test]
fn resources_promised_twice_are_detected() {
    let mut scenario = Scenario::default();
    // Two pods of 500m each are placed on this node.
    scenario.node("n", "900m");
    scenario.job(2, "Placing", 1);
    scenario.pod(1, 0, "gated");
    scenario.pod(1, 1, "gated");
    scenario.job(2, "Starting", 1);
    assert_eq!(
        over_promised(&scenario.history())[0].to_string(),
        "revision 5: j: node n: cpu: 1 promised, 900m allocatable"
    );
    // A finished pod occupies nothing.
    scenario.changes.truncate(4);
    scenario.pod(1, 1, "succeeded");
    scenario.job(2, "Starting", 1);
    assert_eq!(over_promised(&scenario.history()), []);
}

#[test]
fn a_gate_lifted_too_early_is_detected() {
    let mut scenario = Scenario::default();
    scenario.node("n", "1");
    scenario.job(2, "Starting", 1);
    scenario.pod(1, 0, "gated");
    scenario.pod(1, 0, "bound");
    let early = scenario.violations();
    assert!(early.contains(&("partial_gangs", 4)), "{early:?}");
    // Now all pods exist and nothing is partial at the end, but the earlier violation remains.
    scenario.pod(1, 1, "gated");
    scenario.pod(1, 1, "bound");
    assert_eq!(scenario.violations(), [("partial_gangs", 4)]);
}

#[test]
fn a_partial_gang_at_the_end_is_detected() {
    let mut scenario = complete_run();
    scenario.delete("j-2-1");
    assert_eq!(scenario.violations(), [("partial_gangs", scenario.changes.len() as u64)]);
    assert!(partial_gangs(&scenario.history())[0].text.starts_with("holds resources for 1 of 2 pods"));
}

#[test]
fn concurrent_attempts_are_detected() {
    let concurrent = |state: &str, ready: bool| {
        let mut scenario = complete_run();
        scenario.changes.truncate(9);
        scenario.known.retain(|name, _| !name.starts_with("j-2"));
        scenario.known.insert("j-1-0".into(), scenario.changes[7].fact.clone());
        scenario.job(2, "Restarting", 2);
        scenario.pod(1, 0, state);
        scenario.set("n", Fact::Node(NodeFact { ready, open: true, ..NodeFact::default() }));
        scenario.pod(2, 0, "gated");
        scenario.pod(2, 1, "gated");
        scenario.pod(2, 0, "running");
        double_runs(&scenario.history())
    };
    assert_eq!(concurrent("running", true)[0].text, "runs while j-1-0 runs");
    assert_eq!(concurrent("deleting", true), [], "it is being deleted");
    assert_eq!(concurrent("running", false), [], "its node is lost");
}

#[test]
fn a_pod_recreated_after_its_gate_was_lifted_is_detected() {
    let mut scenario = complete_run();
    scenario.delete("j-2-1");
    scenario.pod(2, 1, "gated");
    assert_eq!(double_runs(&scenario.history())[0].text, "created again after its gate was lifted");
    let mut gated = Scenario::default();
    gated.job(1, "Placing", 1);
    gated.pod(1, 0, "gated");
    gated.delete("j-1-0");
    gated.pod(1, 0, "gated");
    assert_eq!(double_runs(&gated.history()), []);
}

#[test]
fn decreasing_counters_and_pods_after_the_end_are_detected() {
    let mut scenario = complete_run();
    scenario.job(2, "Running", 1);
    assert_eq!(
        monotone_attempts(&scenario.history())[0].text,
        "attempt and restarts went from 2 [0, 0, 0, 1] to 1 [0, 0, 0, 0]"
    );
    let mut old = complete_run();
    old.pod(1, 0, "gated");
    assert_eq!(monotone_attempts(&old.history())[0].text, "created while attempt 2 is current");
    let mut over = complete_run();
    over.job(2, "Complete", 2);
    over.pod(3, 0, "gated");
    over.job(2, "Failed", 2);
    let texts: Vec<String> = monotone_attempts(&over.history()).into_iter().map(|found| found.text).collect();
    assert_eq!(
        texts,
        ["created after the end of its job", "complete and failed went from (true, false) to (false, true)"]
    );
}

/// Judges a job whose first attempt runs, and is charged to the infrastructure after an event.
fn charged_after(event: impl FnOnce(&mut Scenario)) -> Vec<(&'static str, u64)> {
    let mut scenario = Scenario::default();
    scenario.node("n", "1");
    scenario.job(1, "Placing", 1);
    scenario.pod(1, 0, "gated");
    scenario.job(1, "Starting", 1);
    scenario.pod(1, 0, "running");
    scenario.job(1, "Running", 1);
    event(&mut scenario);
    let mut status = job("Restarting", 2);
    status.restarts = Some(
        serde_json::from_value(json!({"application": 0, "infrastructure": 1, "preemption": 0, "total": 1})).unwrap(),
    );
    scenario.status(1, status);
    scenario.violations().into_iter().filter(|(name, _)| *name == "unfounded_restarts").collect()
}

#[test]
fn a_restart_without_a_fault_is_detected() {
    let node = |ready: bool, silent: bool| Fact::Node(NodeFact { ready, silent, open: true, ..NodeFact::default() });
    assert_eq!(
        charged_after(|scenario| scenario.set("n", node(false, false))),
        [("unfounded_restarts", 8)],
        "its condition is NotReady"
    );
    assert_eq!(charged_after(|_| {}), [("unfounded_restarts", 7)]);
    assert_eq!(charged_after(|scenario| scenario.set("n", node(false, true))), []);
    // The node was silent, but came back before the decision was written.
    let back = |scenario: &mut Scenario| {
        scenario.set("n", node(false, true));
        scenario.set("n", node(true, false));
    };
    assert_eq!(charged_after(back), []);
    assert_eq!(charged_after(|scenario| scenario.delete("n")), []);
    assert_eq!(charged_after(|scenario| scenario.pod(1, 0, "deleting")), []);
}

#[test]
fn endless_status_writes_are_detected() {
    let mut scenario = complete_run();
    for round in 0..12 {
        let mut status = job(if round % 2 == 0 { "Starting" } else { "Running" }, 2);
        status.ready = Some(format!("{round}/2"));
        scenario.status(2, status);
    }
    let writes = status_writes(&scenario.history());
    // `complete_run` itself contributes one write before the twelve.
    assert_eq!((writes.informative, writes.longest_burst), (writes.writes, 13));
    assert_eq!(scenario.violations(), [("too_many_status_writes", scenario.changes.len() as u64 - 8)]);
    // The same twelve writes with news between them.
    let mut scenario = complete_run();
    for round in 0..12 {
        scenario.job(2, if round % 2 == 0 { "Starting" } else { "Running" }, 2);
        scenario.node("m", if round % 2 == 0 { "2" } else { "1" });
    }
    assert_eq!(scenario.violations(), []);
}

/// Regression from a churn run: messages of a queued job were delayed beyond the quiet period.
#[test]
fn late_queue_messages_are_told_from_other_writes() {
    let status_with = |stage: &str, message: &str| {
        let mut status = job(stage, 0);
        status.conditions[0].message = message.into();
        status
    };
    let late = |statuses: &[TrainJobStatus]| {
        let mut scenario = Scenario::default();
        statuses.iter().for_each(|status| scenario.status(2, status.clone()));
        let history = scenario.history();
        late_messages(&history, 1).iter().map(|change| change.revision).collect::<Vec<_>>()
    };
    let queued = |message: &str| status_with("Queued", message);
    assert_eq!(late(&[queued("no room"), queued("no room; tenth")]), [2]);
    assert_eq!(
        late(&[queued("no room"), queued("tenth"), queued("ninth")]),
        [2],
        "the position is reported repeatedly"
    );
    assert!(late(&[status_with("Running", "2 of 2"), status_with("Running", "all")]).is_empty(), "not waiting");
    assert!(late(&[queued("no room"), status_with("Starting", "no room")]).is_empty(), "it is placed");
    let restarted = TrainJobStatus { attempt: Some(1), ..queued("no room") };
    assert!(late(&[queued("no room"), restarted]).is_empty(), "more than the message changed");
}

#[test]
fn a_job_that_waits_despite_room_is_detected() {
    let mut scenario = Scenario::default();
    scenario.node("m", "1");
    scenario.node("n", "400m");
    scenario.job(2, "Placing", 1);
    scenario.pod(1, 0, "gated");
    scenario.pod(1, 1, "gated");
    scenario.job(2, "Queued", 1);
    assert_eq!(scenario.violations(), [], "one of two nodes has room");
    scenario.node("n", "500m");
    assert_eq!(scenario.violations(), [("waits_despite_room", 7)]);
}

/// Status of a job with two pods, placed on node `n` with these GPUs.
fn placed_on(gpus: [&str; 2], at: &str) -> TrainJobStatus {
    let mut status = job("Starting", 1);
    let placed_node = |rank: i32, gpu: &str| json!({"firstRank": rank, "nodeName": "n", "gpus": [gpu]});
    status.placement =
        serde_json::from_value(json!({"reason": "", "nodes": [placed_node(0, gpus[0]), placed_node(1, gpus[1])]}))
            .unwrap();
    let time = serde_json::from_value(json!(at)).unwrap();
    status.conditions.iter_mut().for_each(|condition| condition.last_transition_time = Clone::clone(&time));
    status
}

#[test]
fn a_gpu_assigned_to_two_pods_is_detected() {
    let scenario = |gpus: [&str; 2]| {
        let mut scenario = Scenario::default();
        scenario.node("n", "8");
        scenario.job(2, "Placing", 1);
        scenario.pod(1, 0, "gated");
        scenario.pod(1, 1, "gated");
        scenario.status(2, placed_on(gpus, "2026-01-01T00:00:00Z"));
        scenario
    };
    assert_eq!(scenario(["a", "b"]).violations(), []);
    let twice = scenario(["a", "a"]);
    assert_eq!(twice.violations(), [("double_gpus", 5); 2], "one violation per pod");
    let found = double_gpus(&twice.history())[0].text.clone();
    assert_eq!(found, r#"a is assigned to several pods: {"j-1-0", "j-1-1"}"#);
    // Another user's claim holds one of the GPUs, before or after the placement.
    let claim = |scenario: &mut Scenario| {
        let gpus = [(("n".to_string(), "gpu-0".to_string()), "b".to_string())].into();
        scenario.set("offer", Fact::Offer(OfferFact { node: "n".into(), gpus }));
        let devices = vec![("n".into(), "gpu-0".into())];
        scenario.set("stranger", Fact::Claim(ClaimFact { job: String::new(), devices }));
    };
    let mut before = Scenario::default();
    claim(&mut before);
    before.node("n", "8");
    before.job(2, "Placing", 1);
    before.pod(1, 0, "gated");
    before.pod(1, 1, "gated");
    before.status(2, placed_on(["a", "b"], "2026-01-01T00:00:00Z"));
    assert_eq!(double_gpus(&before.history())[0].text, r#"b is assigned to several pods: {"j-1-1", "stranger"}"#);
    let mut after = scenario(["a", "b"]);
    claim(&mut after);
    assert_eq!(double_gpus(&after.history()), [], "that is for the scheduler to decide");
}

#[test]
fn a_gang_that_stays_half_bound_is_detected() {
    let scenario = |seconds: u32| {
        let mut scenario = complete_run();
        scenario.changes.truncate(3);
        scenario.known.retain(|name, _| !name.starts_with("j-"));
        scenario.pod(1, 0, "gated");
        scenario.pod(1, 1, "gated");
        scenario.status(2, placed_on(["a", "b"], "2026-01-01T00:00:00Z"));
        scenario.pod(1, 0, "bound");
        // Another job's condition sets the current time.
        let time = format!("2026-01-01T00:{:02}:{:02}Z", seconds / 60, seconds % 60);
        let mut other = placed_on(["c", "d"], &time);
        other.conditions.retain(|condition| condition.type_ == "Succeeded");
        scenario.set("other", Fact::Job(Box::new(JobFact { status: other, ..JobFact::default() })));
        partly_bound_gangs(&scenario.history())
    };
    // The job's default timeout is 300 s.
    assert_eq!(scenario(310), []);
    assert_eq!(scenario(330)[0].text, "1 of 2 pods bound 330 s after the placement");
}
