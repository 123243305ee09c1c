//! Safety properties of preemptions by the queue policy.

use super::{Fact, History, JobFact, Violation, World};
use jiff::{SignedDuration, Timestamp};
use std::collections::BTreeSet;
use switchyard_crds::TrainJob;
use switchyard_crds::conditions::{PLACED, Stage};
use switchyard_plan::cluster::is_over;
use switchyard_plan::cluster::queue_order::recent_preemptions;
use switchyard_plan::cluster::queue_policy::PolicySettings;
use switchyard_worker_contract::event::{Event, Ready};

/// When a job was last placed, or left its nodes.
fn placement_changed(job: &JobFact) -> Option<Timestamp> {
    let placed = job.status.conditions.iter().find(|condition| condition.type_ == PLACED)?;
    Some(placed.last_transition_time.0)
}

fn preemptions(job: &JobFact) -> i32 {
    job.status.restarts.as_ref().map_or(0, |restarts| restarts.preemption)
}

/// Whether this change is a preemption by the queue policy, and not by a job of higher priority.
fn is_by_policy(before: &JobFact, job: &JobFact) -> bool {
    let names_policy = || job.status.conditions.iter().any(|condition| condition.message.contains("(queue policy "));
    preemptions(job) > preemptions(before) && names_policy()
}

/// The number of preemptions by the queue policy.
pub fn policy_preemptions(history: &History) -> usize {
    let mut count = 0;
    history.walk(|before, _, change| {
        if let (Some(Fact::Job(before)), Fact::Job(job)) = (before, &change.fact) {
            count += usize::from(is_by_policy(before, job));
        }
    });
    count
}

/// The queue policy preempts no job before its quantum has passed, and none more often than it may,
/// in all and within a day.
pub fn excessive_preemptions(history: &History, policy: &PolicySettings) -> Vec<Violation> {
    let mut found = Vec::new();
    history.walk(|before, _, change| {
        let (Some(Fact::Job(before)), Fact::Job(job)) = (before, &change.fact) else { return };
        if !is_by_policy(before, job) {
            return;
        }
        let Some((since, until)) = placement_changed(before).zip(placement_changed(job)) else {
            return found.push(Violation::at(change, "is preempted without a placement".into()));
        };
        let ran = until.duration_since(since);
        if ran < policy.quantum {
            let text = format!("is preempted after {} s of {}", ran.as_secs(), policy.quantum.as_secs());
            found.push(Violation::at(change, text));
        }
        let today = job.whole.as_ref().map_or(0, |whole| recent_preemptions(whole, until));
        for (count, most, period) in
            [(preemptions(job), policy.max_preemptions, ""), (today, policy.max_preemptions_per_day, " within a day")]
        {
            if count > most {
                found.push(Violation::at(change, format!("is preempted {count} times{period}; allowed are {most}")));
            }
        }
    });
    found
}

/// After a preemption by the queue policy, a job resumes from the checkpoint that it saved when it
/// was stopped: the next attempt that trains starts with the last step of the preempted one. Also
/// returns how many preemptions were judged.
///
/// `log` is the log of rank 0 of a job's attempt, by the job's namespace and name. For jobs that
/// save a checkpoint only when they are stopped, so that no other one has this step.
pub fn lost_steps(history: &History, log: impl Fn(&str, u32) -> String) -> (usize, Vec<Violation>) {
    let (mut judged, mut found) = (0, Vec::new());
    let end = history.walk(|_, _, _| {});
    history.walk(|before, _, change| {
        let (Some(Fact::Job(before)), Fact::Job(job)) = (before, &change.fact) else { return };
        let last = end.jobs.get(change.uid.as_str()).map_or(0, |(_, job)| job.attempt());
        let Some(done) = last_step(&log(&change.name, before.attempt())).filter(|_| is_by_policy(before, job)) else {
            return;
        };
        let mut later = (before.attempt() + 1..=last).map(|attempt| (attempt, log(&change.name, attempt)));
        let Some((attempt, ready)) = later.find_map(|(attempt, log)| Some((attempt, ready(&log)?))) else { return };
        judged += 1;
        if ready.resumed_step != Some(done) {
            let text = format!(
                "attempt {attempt} resumes from {:?}, and attempt {} stopped after step {done}",
                ready.resumed_step,
                before.attempt()
            );
            found.push(Violation::at(change, text));
        }
    });
    (judged, found)
}

fn events(log: &str) -> impl DoubleEndedIterator<Item = Event> {
    log.lines().filter_map(|line| serde_json::from_str(line).ok())
}

fn ready(log: &str) -> Option<Ready> {
    events(log).find_map(|event| if let Event::Ready(ready) = event { Some(ready) } else { None })
}

/// The last step that a rank reported.
fn last_step(log: &str) -> Option<u64> {
    events(log).rev().find_map(|event| if let Event::Progress(progress) = event { Some(progress.step) } else { None })
}

/// When nothing happens any more, the first waiting job cannot be placed even if all running jobs
/// behind it made way that may be preempted. Otherwise it would wait without end.
///
/// For jobs of one priority without roles, each of whose pods takes a whole node.
pub fn starved_head(history: &History, policy: &PolicySettings) -> Option<String> {
    let world = history.walk(|_, _, _| {});
    let now = world.jobs.values().filter_map(|(_, job)| placement_changed(job)).max()?;
    // By then every running job has passed its quantum and all thresholds.
    let longest = policy.thresholds.iter().copied().fold(policy.quantum, SignedDuration::max);
    let now = now.saturating_add(longest).unwrap_or(now);
    let live = || world.jobs.values().filter_map(|(name, job)| Some((*name, *job, job.whole.as_deref()?)));
    let is_waiting = |job: &JobFact| job.stage() == Stage::Queued.reason();
    let (head, wanted, whole) =
        live().filter(|(_, job, _)| is_waiting(job)).min_by_key(|(.., whole)| place(policy, whole, now))?;
    let behind = live().filter(|(_, job, other)| {
        job.is(PLACED)
            && !is_over(other)
            && policy.is_preemptible(other, now)
            && place(policy, other, now) > place(policy, whole, now)
    });
    let (names, freed): (Vec<&str>, Vec<usize>) = behind.map(|(name, job, _)| (name, job.nodes)).unzip();
    let room = free_nodes(&world) + freed.iter().sum::<usize>();
    (room >= wanted.nodes).then(|| {
        format!("{head} waits for {} nodes, although {names:?} and free nodes have {room} of them", wanted.nodes)
    })
}

/// Place in the queue: by level, then by creation.
fn place<'a>(
    policy: &PolicySettings,
    job: &'a TrainJob,
    now: Timestamp,
) -> (usize, Option<Timestamp>, Option<&'a str>) {
    let created = job.metadata.creation_timestamp.as_ref().map(|time| time.0);
    (policy.level(job, now), created, job.metadata.name.as_deref())
}

/// Open nodes without a pod.
fn free_nodes(world: &World<'_>) -> usize {
    let taken: BTreeSet<&str> = world.pods.values().filter_map(|pod| pod.holds()).collect();
    world.nodes.iter().filter(|(name, node)| node.ready && node.open && !taken.contains(**name)).count()
}

#[cfg(test)]
mod tests {
    use super::super::{Change, ChangeKind, NodeFact};
    use super::*;
    use jiff::SignedDuration;
    use serde_json::{Value, json};
    use switchyard_plan::cluster::queue_policy::QueuePolicy;

    fn policy() -> PolicySettings {
        PolicySettings {
            policy: QueuePolicy::LeastAttainedService,
            thresholds: vec![SignedDuration::from_secs(60)],
            quantum: SignedDuration::from_secs(20),
            max_preemptions: 2,
            max_preemptions_per_day: 1,
            ..PolicySettings::default()
        }
    }

    /// A preemptible job of one node, created at second 0.
    fn job(name: &str, stage: &str, placed: bool, second: u8, preemptions: [i32; 2], message: &str) -> Fact {
        let at = format!("2026-01-01T00:00:{second:02}Z");
        let condition = |kind: &str, status: &str, reason: &str| -> Value {
            json!({"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": at})
        };
        let [all, today] = preemptions;
        let whole: TrainJob = serde_json::from_value(json!({
            "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob",
            "metadata": {"name": name, "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"trainer": {"framework": "Plain", "image": "i"}, "queue": {"preemptible": "Always"}},
            "status": {
                "conditions": [
                    condition("Succeeded", "Unknown", stage),
                    condition(PLACED, if placed { "True" } else { "False" }, "Preempted"),
                ],
                "restarts": {
                    "application": 0, "preemption": all, "total": all,
                    "recent": [{"since": "2026-01-01T00:00:00Z", "infrastructure": 0, "preemption": today}],
                },
            },
        }))
        .unwrap();
        let status = whole.status.clone().unwrap_or_default();
        Fact::Job(Box::new(JobFact { nodes: 1, status, whole: Some(whole.into()), ..JobFact::default() }))
    }

    fn history(facts: Vec<(&str, Fact)>) -> History {
        let mut known = BTreeSet::new();
        let changes = (1..).zip(facts).map(|(revision, (name, fact))| {
            let what = if known.insert(name.to_owned()) { ChangeKind::Added } else { ChangeKind::Modified };
            Change { revision, what, name: name.into(), uid: name.into(), fact }
        });
        History::new(changes.collect()).unwrap()
    }

    const BY: &str =
        "pod a-1-0: preempted by t/b, which comes first in the queue (queue policy LeastAttainedService: …)";

    #[test]
    fn preemptions_that_come_too_soon_or_too_often_are_detected() {
        let found = |second: u8, after: [i32; 2], message: &str| -> Vec<String> {
            let before = [after[0] - 1, after[1] - 1];
            let facts = vec![
                ("a", job("a", "Running", true, 10, before, "")),
                ("a", job("a", "Restarting", false, second, after, message)),
            ];
            let history = history(facts);
            let found = excessive_preemptions(&history, &policy());
            assert!(found.is_empty() || policy_preemptions(&history) == 1);
            found.into_iter().map(|violation| violation.text).collect()
        };
        assert_eq!(found(30, [1, 1], BY), [""; 0]);
        assert_eq!(found(29, [1, 1], BY), ["is preempted after 19 s of 20"]);
        assert_eq!(found(30, [3, 1], BY), ["is preempted 3 times; allowed are 2"]);
        assert_eq!(found(30, [2, 2], BY), ["is preempted 2 times within a day; allowed are 1"]);
        assert_eq!(found(11, [3, 3], "preempted by t/b (priority 9)"), [""; 0], "not by the policy");
    }

    #[test]
    fn a_preempted_job_that_does_not_resume_where_it_stopped_is_detected() {
        let progress = |step: u64| {
            let figures = [
                "rank",
                "totalSteps",
                "intervalSteps",
                "loss",
                "learningRate",
                "gradientNorm",
                "itemsPerSecond",
                "stepMs",
                "maxStepMs",
                "forwardMs",
                "backwardMs",
                "communicationWaitMs",
                "inputWaitMs",
                "optimizerMs",
            ];
            let mut event = json!({"event": "progress", "step": step});
            figures.into_iter().for_each(|figure| event[figure] = 0.into());
            event.to_string()
        };
        let ready = |resumed: Option<u64>| {
            json!({
                "event": "ready", "rank": 0, "pid": 1, "host": "h", "cpus": "0", "threads": 1, "kernel": "portable",
                "address": "127.0.0.1:1", "transport": "shm", "allReduceMs": 0, "resumedStep": resumed,
            })
            .to_string()
        };
        // The logs of three attempts; the second one ends before it trains.
        let judged = |resumed: Option<u64>, by: &str| {
            let attempt = |number: i32, mut fact: Fact| {
                if let Fact::Job(job) = &mut fact {
                    job.status.attempt = Some(number);
                }
                fact
            };
            let facts = vec![
                ("a", attempt(1, job("a", "Running", true, 10, [0, 0], ""))),
                ("a", attempt(2, job("a", "Restarting", false, 30, [1, 1], by))),
                ("a", attempt(3, job("a", "Restarting", false, 40, [1, 1], ""))),
            ];
            let logs = [format!("{}\n{}\n", ready(None), progress(7)), String::new(), ready(resumed)];
            let (count, found) = lost_steps(&history(facts), |_, attempt| logs[attempt as usize - 1].clone());
            (count, found.into_iter().map(|violation| violation.text).collect::<Vec<_>>())
        };
        assert_eq!(judged(Some(7), BY), (1, vec![]));
        assert_eq!(
            judged(Some(5), BY),
            (1, vec!["attempt 3 resumes from Some(5), and attempt 1 stopped after step 7".into()])
        );
        assert_eq!(judged(None, BY).1.len(), 1, "it starts from scratch");
        assert_eq!(judged(None, "preempted by t/b (priority 9)"), (0, vec![]), "not by the policy");
    }

    #[test]
    fn a_head_that_could_preempt_is_starved() {
        let node = || Fact::Node(NodeFact { ready: true, open: true, ..NodeFact::default() });
        let starved = |policy: &PolicySettings, running: Fact| {
            let waiting = job("first", "Queued", false, 0, [0, 0], "");
            starved_head(&history(vec![("first", waiting), ("second", running)]), policy)
        };
        let second = |preemptions: [i32; 2]| job("second", "Running", true, 0, preemptions, "");
        let earlier = || job("earlier", "Running", true, 0, [0, 0], "");
        assert!(starved(&policy(), second([0, 0])).is_some_and(|text| text.contains("second")));
        assert_eq!(starved(&policy(), second([2, 0])), None, "it has been preempted as often as it may");
        assert!(starved(&policy(), earlier()).is_some(), "it passes the threshold");
        let complete = || {
            let Fact::Job(mut job) = second([0, 0]) else { unreachable!() };
            let mut whole = job.whole.as_deref().cloned().unwrap();
            let conditions = &mut whole.status.as_mut().unwrap().conditions;
            conditions[0].type_ = "Complete".into();
            conditions[0].status = "True".into();
            job.whole = Some(whole.into());
            Fact::Job(job)
        };
        assert_eq!(starved(&policy(), complete()), None, "it is over");
        let by_age = PolicySettings { policy: QueuePolicy::Opportunistic, ..policy() };
        assert_eq!(starved(&by_age, earlier()), None, "it comes first");
        let free = history(vec![("n", node()), ("first", job("first", "Queued", false, 0, [0, 0], ""))]);
        assert!(starved_head(&free, &policy()).is_some(), "there is a free node");
    }
}
