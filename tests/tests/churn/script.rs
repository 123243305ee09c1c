//! Generates churn events from a seed.

use serde_json::{Value, json};
use std::collections::VecDeque;
use std::time::Duration;
use switchyard_tests::{Command, Random, plain_job};

/// Maximum number of existing jobs.
const LIVE_JOBS: usize = 50;
/// Nodes cordoned together.
pub const BLOCK: usize = 10;
/// Share of the blocks that can be cordoned at once, as (cordoned, of). At the maximum, the jobs
/// have a third of the nodes.
const CORDONED: (usize, usize) = (13, 20);
/// Maximum numbers of nodes lost and deleted at a time. A lost node is back before its kubelet
/// stops retrying writes.
const LOST: usize = 6;
/// Longest delay between two events, milliseconds.
const LONGEST_WAIT: usize = 80;

#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    Create(Box<Value>),
    /// Sets `spec.suspend` of a job.
    Suspend(String, bool),
    Delete(String),
    /// Sends a command to the pod of this job and rank, in its current attempt.
    Command(String, usize, Command),
    /// Deletes the pod of this job and rank.
    DeletePod(String, usize),
    /// Cordons or uncordons a block of nodes.
    Cordon(usize, bool),
    Lose(usize),
    /// Marks a node NotReady; its pods keep running.
    Unready(usize),
    /// Restores a lost or NotReady node.
    Recover(usize),
    /// Loses a node and deletes its object.
    DeleteNode(usize),
    /// Registers a deleted node again.
    RegisterNode(usize),
    /// The agent of a node reports one of several ailments, or a healthy node.
    Report(usize, usize),
}

impl Event {
    /// Name in the result.
    pub fn kind(&self) -> &'static str {
        match self {
            Event::Create(_) => "create",
            Event::Suspend(_, true) => "suspend",
            Event::Suspend(_, false) => "resume",
            Event::Delete(_) => "delete",
            Event::Command(_, _, Command::Evict) => "evict",
            Event::Command(_, _, Command::Preempt) => "preempt",
            Event::Command(..) => "exit",
            Event::DeletePod(..) => "deletePod",
            Event::Cordon(_, true) => "cordon",
            Event::Cordon(_, false) => "uncordon",
            Event::Lose(_) => "loseNode",
            Event::Unready(_) => "unreadyNode",
            Event::Recover(_) => "recoverNode",
            Event::DeleteNode(_) => "deleteNode",
            Event::RegisterNode(_) => "registerNode",
            Event::Report(..) => "report",
        }
    }
}

/// Events of a seed, each with the delay before it.
pub fn script(seed: u64, events: usize, nodes: usize) -> Vec<(Duration, Event)> {
    let none = VecDeque::new;
    let (jobs, random) = (Vec::new(), Random::new(seed));
    let mut writer = Writer { random, nodes, created: 0, jobs, cordoned: none(), lost: none(), deleted: none() };
    // Most nodes start cordoned, so that jobs queue even in a short run.
    writer.cordoned.extend(0..writer.max_cordoned());
    let mut script: Vec<(Duration, Event)> =
        writer.cordoned.iter().map(|block| (Duration::ZERO, Event::Cordon(*block, true))).collect();
    while script.len() < events {
        if let Some(event) = writer.event() {
            script.push((Duration::from_millis(writer.random.below(LONGEST_WAIT) as u64), event));
        }
    }
    script
}

struct Writer {
    random: Random,
    nodes: usize,
    created: usize,
    /// Name and number of pods of each job.
    jobs: Vec<(String, usize)>,
    cordoned: VecDeque<usize>,
    lost: VecDeque<usize>,
    deleted: VecDeque<usize>,
}

impl Writer {
    /// A random event; `None` if the drawn event is currently impossible.
    fn event(&mut self) -> Option<Event> {
        let dice = self.random.below(100);
        match dice {
            0..40 if self.jobs.len() < LIVE_JOBS => Some(self.create()),
            0..10 => {
                // Delete the oldest job or any. Old jobs are often finished and would use up the
                // job limit.
                let end = if dice < 5 { 1 } else { self.jobs.len() };
                Some(Event::Delete(self.jobs.remove(self.random.below(end)).0))
            }
            10..40 => None,
            40..55 => self.command(),
            55..61 => self.job().map(|(job, rank)| Event::DeletePod(job, rank)),
            61..72 => self.job().map(|(job, _)| Event::Suspend(job, dice < 65)),
            72..80 => {
                let block = self.other(&self.cordoned, self.nodes / BLOCK, self.max_cordoned())?;
                self.cordoned.push_back(block);
                Some(Event::Cordon(block, true))
            }
            80..83 => Some(Event::Cordon(self.cordoned.pop_front()?, false)),
            83..88 => {
                let node = self.other(&self.lost, self.nodes, LOST)?;
                self.lost.push_back(node);
                Some(if dice < 85 { Event::Unready(node) } else { Event::Lose(node) })
            }
            88..93 => Some(Event::Recover(self.lost.pop_front()?)),
            93..97 => {
                let node = self.other(&self.deleted, self.nodes, LOST)?;
                self.deleted.push_back(node);
                Some(Event::DeleteNode(node))
            }
            _ => Some(Event::RegisterNode(self.deleted.pop_front()?)),
        }
    }

    /// A random number that is not in `these`, if there is room for another. A node is either lost
    /// or deleted, never both.
    fn other(&self, these: &VecDeque<usize>, end: usize, max: usize) -> Option<usize> {
        let number = self.random.below(end);
        let is_away = end == self.nodes && (self.lost.contains(&number) || self.deleted.contains(&number));
        (these.len() < max && !these.contains(&number) && !is_away).then_some(number)
    }

    fn max_cordoned(&self) -> usize {
        self.nodes / BLOCK * CORDONED.0 / CORDONED.1
    }

    /// A random existing job and one of its ranks.
    fn job(&self) -> Option<(String, usize)> {
        let (name, size) = self.jobs.get(self.random.below(self.jobs.len()))?;
        Some((name.clone(), self.random.below(*size)))
    }

    fn command(&self) -> Option<Event> {
        let (job, rank) = self.job()?;
        let command = match self.random.below(10) {
            0..3 => Command::Exit(0, String::new()),
            3..5 => Command::Exit(1, "a bug".into()),
            5 => Command::Exit(77, String::new()),
            6 | 7 => Command::Evict,
            _ => Command::Preempt,
        };
        Some(Event::Command(job, rank, command))
    }

    fn create(&mut self) -> Event {
        let random = &self.random;
        // Favour large jobs, so that together they request more nodes than exist.
        let (name, size) = (format!("j{}", self.created), 1 + random.below(8).max(random.below(8)));
        let seconds = random.below(40) as f64 / 10.0;
        let policy = match random.below(10) {
            0..7 => "run".to_string(),
            7 => format!("succeed-after={seconds}s"),
            8 => format!("fail=3@{seconds}s"),
            _ => "oom".to_string(),
        };
        let mut job = plain_job(&name, size as u32, &policy);
        let spec = &mut job["spec"];
        // A small and a medium pod can share a node.
        spec["trainer"]["resourcesPerNode"]["limits"]["cpu"] = (*random.pick(&["300m", "700m", "900m"])).into();
        spec["suspend"] = (random.below(16) == 0).into();
        spec["failurePolicy"] = json!({
            "maxRestarts": random.below(4), "maxInfrastructureRestarts": random.below(4), "maxPreemptionRestarts": random.below(4),
            "rules": [{"action": "FailTrainJob", "onExitCodes": {"operator": "In", "values": [77]}}],
        });
        // Sidecars of both kinds get the namespace's default requests.
        let side = |name: &str| json!({"name": name, "image": "none"});
        match random.below(4) {
            0 => spec["template"]["spec"]["containers"] = json!([side("proxy")]),
            1 => {
                let mut native = side("mesh");
                native["restartPolicy"] = "Always".into();
                spec["template"]["spec"]["initContainers"] = json!([native]);
            }
            _ => {}
        }
        // Some gangs are rolled back when a node disappears between placement and binding.
        spec["gangPolicy"] = json!({"scheduleTimeoutSeconds": *random.pick(&[5, 20, 300])});
        if random.below(4) == 0 {
            spec["ttlSecondsAfterFinished"] = random.below(10).into();
        }
        self.created += 1;
        self.jobs.push((name, size));
        Event::Create(Box::new(job))
    }
}

#[test]
fn a_script_is_reproducible_and_covers_every_event() {
    let events = |seed| script(seed, 300, 200);
    assert_eq!(events(7), events(7));
    assert_ne!(events(7), events(8));
    let kinds: std::collections::BTreeSet<&str> = events(7).iter().map(|(_, event)| event.kind()).collect();
    assert_eq!(kinds.len(), 15, "{kinds:?}");
    assert_eq!(events(7), script(7, 2000, 200)[..300], "a shorter script is a prefix of a longer one");
}
