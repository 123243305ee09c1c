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
struct Story {
    changes: Vec<Change>,
    known: BTreeMap<String, Fact>,
}

impl Story {
    fn step(&mut self, name: &str, what: What, fact: Fact) {
        let revision = self.changes.len() as u64 + 1;
        self.known.insert(name.into(), fact.clone());
        self.changes.push(Change { revision, what, name: name.into(), uid: format!("uid-{name}"), fact });
    }

    /// Adds the object, or modifies it if it exists.
    fn set(&mut self, name: &str, fact: Fact) {
        let what = if self.known.contains_key(name) { What::Modified } else { What::Added };
        self.step(name, what, fact);
    }

    fn gone(&mut self, name: &str) {
        let fact = self.known[name].clone();
        self.step(name, What::Deleted, fact);
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
    fn judged(&self) -> Vec<(&'static str, u64)> {
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
fn life() -> Story {
    let mut story = Story::default();
    story.node("n", "1");
    story.node("m", "1");
    story.job(2, "Placing", 1);
    for attempt in 1..=2 {
        story.pod(attempt, 0, "gated");
        story.pod(attempt, 1, "gated");
        story.job(2, "Starting", attempt as i32);
        for state in ["bound", "running"] {
            story.pod(attempt, 0, state);
            story.pod(attempt, 1, state);
        }
        story.job(2, "Running", attempt as i32);
        if attempt == 1 {
            story.job(2, "Restarting", 2);
            story.pod(1, 0, "deleting");
            story.pod(1, 1, "deleting");
            story.gone("j-1-0");
            story.gone("j-1-1");
        }
    }
    story
}

#[test]
fn a_life_without_faults_is_clean() {
    let mut story = life();
    assert_eq!(story.judged(), []);
    story.pod(2, 0, "succeeded");
    assert_eq!(story.judged(), [], "one of two is done");
    story.pod(2, 1, "succeeded");
    story.job(2, "Complete", 2);
    story.gone("j");
    assert_eq!(story.judged(), []);
}

#[test]
fn a_history_with_a_gap_is_none() {
    let whole = life().changes;
    let without = |revision: u64| whole.iter().filter(|change| change.revision != revision).cloned().collect();
    // Remove the creation of a pod, then a deletion, which the next pod with that name reveals.
    assert!(History::new(without(4)).unwrap_err().to_string().contains("j-1-0 is Modified: a change before it"));
    let mut twice = whole.clone();
    twice.push(whole[3].clone());
    assert!(History::new(twice).unwrap_err().to_string().contains("there twice"));
    let mut again = whole.clone();
    again.push(Change { revision: 1000, what: What::Added, ..whole[0].clone() });
    assert!(History::new(again).unwrap_err().to_string().contains("n is Added: a change before it"));
    let mut shuffled = whole.clone();
    shuffled.reverse();
    assert_eq!(History::new(shuffled).unwrap().changes(), whole);
}

#[test]
fn too_much_on_a_node_is_seen() {
    let mut story = Story::default();
    story.node("n", "1");
    story.job(3, "Starting", 1);
    (0..3).for_each(|rank| story.pod(1, rank, "gated"));
    story.pod(1, 0, "bound");
    story.pod(1, 1, "bound");
    assert_eq!(story.judged().iter().filter(|(name, _)| *name == "over_allocated").count(), 0);
    story.pod(1, 2, "bound");
    assert_eq!(story.judged(), [("over_allocated", 8)]);
    assert_eq!(over_allocated(&story.history())[0].to_string(), "revision 8: j-1-2: node n: cpu: 1500m of 1 asked for");
    // A node that shrinks below its pods' requests.
    story.pod(1, 2, "succeeded");
    story.node("n", "900m");
    assert_eq!(over_allocated(&story.history()).len(), 2);
    // A node that registered again and has not reported yet is unknown.
    story.set("n", Fact::Node(NodeFact { ready: true, open: true, ..NodeFact::default() }));
    assert_eq!(over_allocated(&story.history()).len(), 2);
    story.node("n", "900m");
    assert_eq!(over_allocated(&story.history()).len(), 3);
    // Finished pods occupy nothing.
    story.pod(1, 1, "succeeded");
    assert_eq!(over_allocated(&story.history()).len(), 3);
}

#[test]
fn room_promised_twice_is_seen() {
    let mut story = Story::default();
    // Two pods of 500m each are placed on this node.
    story.node("n", "900m");
    story.job(2, "Placing", 1);
    story.pod(1, 0, "gated");
    story.pod(1, 1, "gated");
    story.job(2, "Starting", 1);
    assert_eq!(over_promised(&story.history())[0].to_string(), "revision 5: j: node n: cpu: 1 of 900m promised");
    // A finished pod occupies nothing.
    story.changes.truncate(4);
    story.pod(1, 1, "succeeded");
    story.job(2, "Starting", 1);
    assert_eq!(over_promised(&story.history()), []);
}

#[test]
fn a_gate_lifted_too_early_is_seen() {
    let mut story = Story::default();
    story.node("n", "1");
    story.job(2, "Starting", 1);
    story.pod(1, 0, "gated");
    story.pod(1, 0, "bound");
    let early = story.judged();
    assert!(early.contains(&("partial_gangs", 4)), "{early:?}");
    // Now all pods exist and nothing is partial at the end, but the earlier violation remains.
    story.pod(1, 1, "gated");
    story.pod(1, 1, "bound");
    assert_eq!(story.judged(), [("partial_gangs", 4)]);
}

#[test]
fn half_a_gang_at_the_end_is_seen() {
    let mut story = life();
    story.gone("j-2-1");
    assert_eq!(story.judged(), [("partial_gangs", story.changes.len() as u64)]);
    assert!(partial_gangs(&story.history())[0].text.starts_with("holds room for 1 of 2 pods"));
}

#[test]
fn two_attempts_at_once_are_seen() {
    let at_once = |state: &str, ready: bool| {
        let mut story = life();
        story.changes.truncate(9);
        story.known.retain(|name, _| !name.starts_with("j-2"));
        story.known.insert("j-1-0".into(), story.changes[7].fact.clone());
        story.job(2, "Restarting", 2);
        story.pod(1, 0, state);
        story.set("n", Fact::Node(NodeFact { ready, open: true, ..NodeFact::default() }));
        story.pod(2, 0, "gated");
        story.pod(2, 1, "gated");
        story.pod(2, 0, "running");
        double_runs(&story.history())
    };
    assert_eq!(at_once("running", true)[0].text, "runs while j-1-0 runs");
    assert_eq!(at_once("deleting", true), [], "it is being deleted");
    assert_eq!(at_once("running", false), [], "its node is lost");
}

#[test]
fn a_pod_made_again_after_its_gate_was_lifted_is_seen() {
    let mut story = life();
    story.gone("j-2-1");
    story.pod(2, 1, "gated");
    assert_eq!(double_runs(&story.history())[0].text, "created again after its gate was lifted");
    let mut gated = Story::default();
    gated.job(1, "Placing", 1);
    gated.pod(1, 0, "gated");
    gated.gone("j-1-0");
    gated.pod(1, 0, "gated");
    assert_eq!(double_runs(&gated.history()), []);
}

#[test]
fn counters_that_go_back_and_life_after_the_end_are_seen() {
    let mut story = life();
    story.job(2, "Running", 1);
    assert_eq!(
        monotone_attempts(&story.history())[0].text,
        "attempt and restarts went from 2 [0, 0, 0, 1] to 1 [0, 0, 0, 0]"
    );
    let mut old = life();
    old.pod(1, 0, "gated");
    assert_eq!(monotone_attempts(&old.history())[0].text, "created while attempt 2 is current");
    let mut over = life();
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
fn charged_after(happens: impl FnOnce(&mut Story)) -> Vec<(&'static str, u64)> {
    let mut story = Story::default();
    story.node("n", "1");
    story.job(1, "Placing", 1);
    story.pod(1, 0, "gated");
    story.job(1, "Starting", 1);
    story.pod(1, 0, "running");
    story.job(1, "Running", 1);
    happens(&mut story);
    let mut status = job("Restarting", 2);
    status.restarts = Some(
        serde_json::from_value(json!({"application": 0, "infrastructure": 1, "preemption": 0, "total": 1})).unwrap(),
    );
    story.status(1, status);
    story.judged().into_iter().filter(|(name, _)| *name == "ended_in_health").collect()
}

#[test]
fn an_attempt_that_is_ended_though_all_is_well_is_seen() {
    let node = |ready: bool, silent: bool| Fact::Node(NodeFact { ready, silent, open: true, ..NodeFact::default() });
    assert_eq!(
        charged_after(|story| story.set("n", node(false, false))),
        [("ended_in_health", 8)],
        "it says that it is not ready"
    );
    assert_eq!(charged_after(|_| {}), [("ended_in_health", 7)]);
    assert_eq!(charged_after(|story| story.set("n", node(false, true))), []);
    // The node was silent, but came back before the decision was written.
    let back = |story: &mut Story| {
        story.set("n", node(false, true));
        story.set("n", node(true, false));
    };
    assert_eq!(charged_after(back), []);
    assert_eq!(charged_after(|story| story.gone("n")), []);
    assert_eq!(charged_after(|story| story.pod(1, 0, "deleting")), []);
}

#[test]
fn a_status_that_is_written_on_and_on_is_seen() {
    let mut story = life();
    for turn in 0..12 {
        let mut status = job(if turn % 2 == 0 { "Starting" } else { "Running" }, 2);
        status.ready = Some(format!("{turn}/2"));
        story.status(2, status);
    }
    let writes = status_writes(&story.history());
    // `life` itself contributes one write before the twelve.
    assert_eq!((writes.telling, writes.longest_burst), (writes.writes, 13));
    assert_eq!(story.judged(), [("too_many_status_writes", story.changes.len() as u64 - 8)]);
    // The same twelve writes with news between them.
    let mut story = life();
    for turn in 0..12 {
        story.job(2, if turn % 2 == 0 { "Starting" } else { "Running" }, 2);
        story.node("m", if turn % 2 == 0 { "2" } else { "1" });
    }
    assert_eq!(story.judged(), []);
}

/// Regression from a churn run: messages of a queued job were delayed beyond the quiet period.
#[test]
fn words_that_a_waiting_job_is_told_late_are_known_from_other_writes() {
    let says = |stage: &str, words: &str| {
        let mut status = job(stage, 0);
        status.conditions[0].message = words.into();
        status
    };
    let late = |statuses: &[TrainJobStatus]| {
        let mut story = Story::default();
        statuses.iter().for_each(|status| story.status(2, status.clone()));
        let history = story.history();
        late_words(&history, 1).iter().map(|change| change.revision).collect::<Vec<_>>()
    };
    let queued = |words: &str| says("Queued", words);
    assert_eq!(late(&[queued("no room"), queued("no room; tenth")]), [2]);
    assert_eq!(
        late(&[queued("no room"), queued("tenth"), queued("ninth")]),
        [2],
        "the position is reported repeatedly"
    );
    assert!(late(&[says("Running", "2 of 2"), says("Running", "all")]).is_empty(), "it does not wait");
    assert!(late(&[queued("no room"), says("Starting", "no room")]).is_empty(), "it is placed");
    let restarted = TrainJobStatus { attempt: Some(1), ..queued("no room") };
    assert!(late(&[queued("no room"), restarted]).is_empty(), "not only words");
}

#[test]
fn a_job_that_nobody_wakes_is_seen() {
    let mut story = Story::default();
    story.node("m", "1");
    story.node("n", "400m");
    story.job(2, "Placing", 1);
    story.pod(1, 0, "gated");
    story.pod(1, 1, "gated");
    story.job(2, "Queued", 1);
    assert_eq!(story.judged(), [], "one of two nodes has room");
    story.node("n", "500m");
    assert_eq!(story.judged(), [("waits_in_vain", 7)]);
}

/// Status of a job with two pods, placed on node `n` with these GPUs.
fn placed_on(gpus: [&str; 2], at: &str) -> TrainJobStatus {
    let mut status = job("Starting", 1);
    let place = |rank: i32, gpu: &str| json!({"firstRank": rank, "nodeName": "n", "gpus": [gpu]});
    status.placement =
        serde_json::from_value(json!({"reason": "", "nodes": [place(0, gpus[0]), place(1, gpus[1])]})).unwrap();
    let time = serde_json::from_value(json!(at)).unwrap();
    status.conditions.iter_mut().for_each(|condition| condition.last_transition_time = Clone::clone(&time));
    status
}

#[test]
fn a_gpu_for_two_pods_is_seen() {
    let story = |gpus: [&str; 2]| {
        let mut story = Story::default();
        story.node("n", "8");
        story.job(2, "Placing", 1);
        story.pod(1, 0, "gated");
        story.pod(1, 1, "gated");
        story.status(2, placed_on(gpus, "2026-01-01T00:00:00Z"));
        story
    };
    assert_eq!(story(["a", "b"]).judged(), []);
    let twice = story(["a", "a"]);
    assert_eq!(twice.judged(), [("double_gpus", 5); 2], "said of each of the two");
    let found = double_gpus(&twice.history())[0].text.clone();
    assert_eq!(found, r#"a is for several pods: {"j-1-0", "j-1-1"}"#);
    // Another user's claim holds one of the GPUs, before or after the placement.
    let claim = |story: &mut Story| {
        let gpus = [(("n".to_string(), "gpu-0".to_string()), "b".to_string())].into();
        story.set("offer", Fact::Offer(OfferFact { node: "n".into(), gpus }));
        let devices = vec![("n".into(), "gpu-0".into())];
        story.set("stranger", Fact::Claim(ClaimFact { job: String::new(), devices }));
    };
    let mut before = Story::default();
    claim(&mut before);
    before.node("n", "8");
    before.job(2, "Placing", 1);
    before.pod(1, 0, "gated");
    before.pod(1, 1, "gated");
    before.status(2, placed_on(["a", "b"], "2026-01-01T00:00:00Z"));
    assert_eq!(double_gpus(&before.history())[0].text, r#"b is for several pods: {"j-1-1", "stranger"}"#);
    let mut after = story(["a", "b"]);
    claim(&mut after);
    assert_eq!(double_gpus(&after.history()), [], "that is for the scheduler to decide");
}

#[test]
fn a_gang_that_stays_half_bound_is_seen() {
    let story = |seconds: u32| {
        let mut story = life();
        story.changes.truncate(3);
        story.known.retain(|name, _| !name.starts_with("j-"));
        story.pod(1, 0, "gated");
        story.pod(1, 1, "gated");
        story.status(2, placed_on(["a", "b"], "2026-01-01T00:00:00Z"));
        story.pod(1, 0, "bound");
        // Another job's condition sets the current time.
        let time = format!("2026-01-01T00:{:02}:{:02}Z", seconds / 60, seconds % 60);
        let mut other = placed_on(["c", "d"], &time);
        other.conditions.retain(|condition| condition.type_ == "Succeeded");
        story.set("other", Fact::Job(Box::new(JobFact { status: other, ..JobFact::default() })));
        half_gangs(&story.history())
    };
    // The job's default timeout is 300 s.
    assert_eq!(story(310), []);
    assert_eq!(story(330)[0].text, "1 of 2 pods bound 330 s after the place was decided");
}
