//! One attempt: its objects and pods, from the first create to all pods ended.
//!
//! ```text
//! pods gated ─> all exist ─> place (decision) ─> gates lifted ─> bound ─> running ─> all succeeded ─> Complete
//!      ^                                              │             │         │
//!      └──────────────── next attempt <── too late ───┴── failure ──┴─────────┘
//! ```

use super::events::{self, EventDraft};
use super::view::{Phase, PodView};
use super::{
    Action, Reconciliation, Snapshot, clock, degraded, delete_unfinished, end, fabric, failure, gang, give_back,
    transport,
};
use crate::ValidJob;
use crate::objects::{self, Object};
use crate::restart;
use crate::status::{self, Draft, Ending};
use jiff::{SignedDuration, Timestamp};
use switchyard_crds::conditions::{self, Stage};
use switchyard_crds::{DeviceAllocation, PlacementStatus};

/// Seconds before a gang that the scheduler did not bind in time is tried again.
const ROLLBACK_PAUSE: SignedDuration = SignedDuration::from_secs(10);

/// The current attempt and its pods.
pub(super) struct Attempt<'a> {
    pub snapshot: Snapshot<'a>,
    pub valid: &'a ValidJob,
    pub number: u32,
    /// Pods of this attempt by node rank; `None`: does not exist.
    pub pods: Vec<Option<&'a PodView>>,
    /// The place of the gang is decided: gates may be lifted, and a pod that is not there has been deleted.
    pub placed: bool,
    pub now: Timestamp,
}

impl<'a> Attempt<'a> {
    fn of(snapshot: &Snapshot<'a>, valid: &'a ValidJob, number: u32, now: Timestamp) -> Attempt<'a> {
        let mut pods = vec![None; valid.request.nodes as usize];
        for pod in snapshot.pods.iter().copied().filter(|pod| pod.attempt == number) {
            if let Some(slot) = pods.get_mut(pod.node_rank as usize) {
                *slot = Some(pod);
            }
        }
        let status = snapshot.job.status.as_ref();
        let placed = status.is_some_and(|status| status.is(conditions::PLACED));
        Attempt { snapshot: *snapshot, valid, number, pods, placed, now }
    }

    pub fn existing(&self) -> Vec<&'a PodView> {
        self.pods.iter().copied().flatten().collect()
    }

    fn all(&self, is: impl Fn(&PodView) -> bool) -> bool {
        self.pods.iter().all(|pod| pod.is_some_and(&is))
    }

    fn count(&self, is: impl Fn(&PodView) -> bool) -> usize {
        self.pods.iter().flatten().filter(|pod| is(pod)).count()
    }

    /// When the place was decided.
    fn placed_at(&self) -> Option<Timestamp> {
        let status = self.snapshot.job.status.as_ref()?;
        status.condition(conditions::PLACED).map(|condition| condition.last_transition_time.0)
    }

    fn draft(&self) -> Draft<'a> {
        let mut draft = Draft::new(self.snapshot.job, self.now);
        let pods = self.existing();
        draft.count(&pods, self.valid.request.nodes as i32);
        draft.newest_figures(&self.snapshot, &pods, self.now);
        draft
    }
}

/// The next step of an attempt.
pub(super) fn step(snapshot: &Snapshot<'_>, valid: &ValidJob, number: u32, now: Timestamp) -> Reconciliation {
    let attempt = Attempt::of(snapshot, valid, number, now);
    if attempt.placed && attempt.all(|pod| pod.phase == Phase::Succeeded) {
        let pods = attempt.pods.len();
        let text = format!("all {pods} node{} done in attempt {number}", if pods == 1 { " is" } else { "s are" });
        return end(snapshot, now, Ending::complete(text));
    }
    if let Some(by) = snapshot.gives_way_to.filter(|_| attempt.placed) {
        return gives_way(&attempt, by);
    }
    let verdict = failure::judge(&attempt);
    if let failure::Verdict::Failed(failed) = &verdict {
        return after_failure(&attempt, failed);
    }
    if let Some(why) = transport::refused(snapshot.job).filter(|_| attempt.placed) {
        return end(snapshot, now, Ending::failed(conditions::TRANSPORT_DIFFERS, why));
    }
    let mut result = if !attempt.placed { gather(&attempt) } else { follow(&attempt) };
    if let failure::Verdict::Look(at) = verdict {
        result.wake_at(at);
    }
    let old = attempt.snapshot.pods.iter().filter(|pod| pod.attempt < attempt.number);
    if let Some(at) = old.filter_map(|pod| pod.settles(now)).min() {
        result.wake_at(at);
    }
    result
}

/// Before the gang has a place: creates what is missing, then asks for a place.
fn gather(attempt: &Attempt<'_>) -> Reconciliation {
    let status = attempt.snapshot.job.status.as_ref();
    let not_before = status.and_then(|status| status.attempt_time.as_ref()).map(|time| time.0);
    if let Some(not_before) = not_before.filter(|at| !clock::is_over(*at, restart::LONGEST_PAUSE, attempt.now)) {
        // The stage and its reason were written with the decision to start again.
        let mut result = attempt.draft().act(&attempt.snapshot, attempt.now);
        result.actions = old_pods(attempt);
        result.wake_at(not_before);
        return result;
    }
    let mut actions = old_pods(attempt);
    let strangers = objects_of(attempt, &mut actions);
    let missing = attempt.pods.iter().filter(|pod| pod.is_none()).count();
    let numbered = (0_u32..).zip(&attempt.pods).filter(|(_, pod)| pod.is_none());
    let (job, defaults) = (attempt.snapshot.job, attempt.snapshot.defaults);
    actions.extend(numbered.map(|(rank, _)| {
        Action::Create(Object::Pod(Box::new(objects::pod(job, attempt.valid, defaults, attempt.number, rank))))
    }));
    let desired = attempt.pods.len();
    if missing > 0 || attempt.existing().iter().any(|pod| pod.deleting) {
        let mut draft = attempt.draft();
        let text = match (attempt.snapshot.trouble, strangers.first()) {
            (Some(trouble), _) => trouble.to_string(),
            (None, Some(stranger)) => stranger.clone(),
            (None, None) => format!("{} of {desired} pods exist", desired - missing),
        };
        // After a failure the stage stays Restarting, with the cause, until the next attempt is complete.
        let is_restart =
            status.and_then(|s| status::reason_of(s, conditions::SUCCEEDED)) == Some(Stage::Restarting.reason());
        if !is_restart || attempt.snapshot.trouble.is_some() {
            let stage = if is_restart { Stage::Restarting } else { Stage::Placing };
            draft.stage(stage, text);
        }
        let mut result = draft.act(&attempt.snapshot, attempt.now);
        result.actions = actions;
        return result;
    }
    let mut result = place(attempt);
    if result.status.is_none() || result.waiting {
        result.actions = actions;
    }
    result
}

/// All pods exist: the whole gang gets a place, or waits.
fn place(attempt: &Attempt<'_>) -> Reconciliation {
    let pods = attempt.existing();
    let mut draft = attempt.draft();
    if let Some(pod) = pods.iter().find(|pod| pod.gated_by_others) {
        draft.stage(Stage::Queued, format!("a scheduling gate of somebody else holds pod {}", pod.name));
        return draft.act(&attempt.snapshot, attempt.now);
    }
    let Snapshot { job, defaults, nodes, levels, .. } = attempt.snapshot;
    let question = gang::Question { job, valid: attempt.valid, defaults, nodes, levels, now: attempt.now };
    match gang::place(&question) {
        Ok(placed) => {
            match fabric::decide(&question, &placed.status) {
                Ok(decided) => match fabric::enforced(job, decided.as_ref()) {
                    Some(refused) => {
                        fabric::tell_findings(&mut draft, decided);
                        return not_ready(attempt, draft, refused.to_string());
                    }
                    None => fabric::tell(&mut draft, decided),
                },
                Err(refused) => return not_ready(attempt, draft, refused.to_string()),
            }
            let reason = placed.status.reason.clone();
            draft.next.placement = Some(placed.status);
            draft.condition(conditions::PLACED, "True", "Placed", reason.clone());
            draft.stage(Stage::Starting, format!("0 of {} pods run", pods.len()));
            draft.decide(vec![EventDraft::normal(events::PLACED, reason)])
        }
        Err(why) => {
            let why = match attempt.snapshot.held_for {
                Some(held) => format!("{why}; {held}"),
                None => why.to_string(),
            };
            if let Some(result) = other_way(attempt, &why) {
                return result;
            }
            let is_new = status::reason_of(&draft.next, conditions::PLACED) != Some(conditions::NO_ROOM);
            draft.condition(conditions::PLACED, "False", conditions::NO_ROOM, why.clone());
            draft.stage(Stage::Queued, why.clone());
            let mut result = draft.act(&attempt.snapshot, attempt.now);
            result.waiting = true;
            if is_new {
                result.events.push(EventDraft::normal(events::NO_ROOM, why));
            }
            result
        }
    }
}

/// There is room, but the job must not start over the fabric that is there. Nodes, their ports and other jobs may change that.
fn not_ready(attempt: &Attempt<'_>, mut draft: Draft<'_>, why: String) -> Reconciliation {
    if let Some(result) = make_anew(attempt, &why) {
        return result;
    }
    let is_new = status::reason_of(&draft.next, conditions::PLACED) != Some(conditions::FABRIC_NOT_READY);
    draft.condition(conditions::FABRIC_READY, "False", conditions::FABRIC_NOT_READY, why.clone());
    draft.condition(conditions::PLACED, "False", conditions::FABRIC_NOT_READY, why.clone());
    draft.stage(Stage::Queued, why.clone());
    let mut result = draft.act(&attempt.snapshot, attempt.now);
    result.waiting = true;
    if is_new {
        result.events.push(EventDraft::warning(events::FABRIC_NOT_READY, why));
    }
    result
}

/// What pods ask for is fixed when they are made. Where the nodes offer devices that they did not then, the pods are made once more.
fn make_anew(attempt: &Attempt<'_>, why: &str) -> Option<Reconciliation> {
    let Snapshot { job, nodes, defaults, .. } = attempt.snapshot;
    let wanted = fabric::before(job, attempt.valid, defaults, nodes)?.resources;
    let asked = job.status.as_ref().and_then(|status| status.fabric.as_ref()).map(|fabric| &fabric.resources);
    if wanted.is_empty() || asked == Some(&wanted) {
        return None;
    }
    let names: Vec<&str> = wanted.iter().map(|resource| resource.name.as_str()).collect();
    Some(anew(attempt, conditions::FABRIC_NOT_READY, format!("the nodes offer {} now", names.join(", ")), why))
}

/// In which way pods get their GPUs is fixed likewise.
fn other_way(attempt: &Attempt<'_>, why: &str) -> Option<Reconciliation> {
    let way = gang::other_allocation(attempt.snapshot.job, attempt.snapshot.nodes)?;
    Some(anew(attempt, conditions::NO_ROOM, format!("the nodes give GPUs by {way:?} now"), why))
}

/// Another attempt, since the nodes have changed. The event has the reason of the condition.
fn anew(attempt: &Attempt<'_>, reason: &'static str, change: String, why: &str) -> Reconciliation {
    let mut draft = attempt.draft();
    next_attempt(attempt, &mut draft, attempt.now);
    let text = format!("{change}: the pods are made anew; {why}");
    draft.condition(conditions::PLACED, "False", reason, text.clone());
    draft.stage(Stage::Placing, text.clone());
    draft.decide(vec![EventDraft::normal(reason, text)])
}

/// The gang has a place: gates are lifted, and the pods are followed until they end.
fn follow(attempt: &Attempt<'_>) -> Reconciliation {
    let mut actions = old_pods(attempt);
    let strangers = objects_of(attempt, &mut actions);
    let placement = attempt.snapshot.job.status.as_ref().and_then(|status| status.placement.as_ref());
    // All gates are lifted together, and not before every claim and the files for NCCL exist.
    let mut claims = claims(attempt, placement);
    claims.extend(fabric_config(attempt));
    if claims.is_empty() {
        actions.extend(releases(attempt, placement));
    }
    actions.extend(claims);
    if let Some(result) = roll_back(attempt) {
        return result;
    }
    let desired = attempt.pods.len();
    let running = attempt.count(|pod| matches!(pod.phase, Phase::Running | Phase::Succeeded));
    let mut draft = attempt.draft();
    let is_new = status::reason_of(&draft.next, conditions::SUCCEEDED) != Some(Stage::Running.reason());
    let mut events = Vec::new();
    events.extend(degraded::tell(attempt, placement, &mut draft));
    events.extend(transport::tell(&attempt.snapshot, attempt.valid, &mut draft));
    if let Some(text) = attempt.snapshot.trouble.map(str::to_string).or_else(|| strangers.first().cloned()) {
        draft.stage(if running == desired { Stage::Running } else { Stage::Starting }, text);
    } else if running == desired {
        let ended = attempt.count(PodView::is_over);
        let text = if ended == 0 {
            format!("{desired} of {desired} nodes train")
        } else {
            format!("{} of {desired} nodes train, {ended} are done", desired - ended)
        };
        draft.stage(Stage::Running, text);
        if is_new {
            let of = if attempt.number > 1 { format!(" in attempt {}", attempt.number) } else { String::new() };
            events.push(EventDraft::normal(events::RUNNING, format!("all {desired} pods run{of}")));
        }
    } else if is_new {
        // A pod that was seen running stays so for the stage: a kubelet that restarts reports less for a moment.
        draft.stage(Stage::Starting, starting(attempt, running));
    }
    let mut result = draft.act(&attempt.snapshot, attempt.now);
    result.actions = actions;
    result.events = if result.status.is_some() { events } else { Vec::new() };
    if running < desired
        && let Some(at) = attempt.placed_at()
    {
        result.wake_at(due(attempt, at));
    }
    result
}

fn schedule_timeout(attempt: &Attempt<'_>) -> SignedDuration {
    SignedDuration::from_secs(attempt.snapshot.job.spec.gang_policy.schedule_timeout_seconds.into())
}

fn due(attempt: &Attempt<'_>, placed: Timestamp) -> Timestamp {
    placed.saturating_add(schedule_timeout(attempt)).unwrap_or(Timestamp::MAX)
}

/// What the pods that do not run wait for.
fn starting(attempt: &Attempt<'_>, running: usize) -> String {
    let desired = attempt.pods.len();
    let why = attempt.existing().into_iter().find_map(|pod| {
        let waits =
            pod.waiting.as_ref().filter(|w| !matches!(w.reason.as_str(), "ContainerCreating" | "PodInitializing"));
        let why = match (waits, &pod.unschedulable) {
            (Some(waiting), _) => format!("{}: {}", waiting.reason, waiting.message),
            (None, Some(message)) => format!("not scheduled: {message}"),
            (None, None) => return None,
        };
        Some(format!("; pod {}: {why}", pod.name))
    });
    format!("{running} of {desired} pods run{}", why.unwrap_or_default())
}

/// Creates the claims of the pods that are not there.
fn claims(attempt: &Attempt<'_>, placement: Option<&PlacementStatus>) -> Vec<Action> {
    let Snapshot { job, objects: existing, defaults, .. } = attempt.snapshot;
    if job.status.as_ref().and_then(|status| status.device_allocation) != Some(DeviceAllocation::Claims) {
        return Vec::new();
    }
    let nodes = placement.map(|placement| placement.nodes.as_slice()).unwrap_or_default();
    let missing = (0_u32..).zip(nodes).filter_map(|(rank, node)| {
        let claim = objects::claim(job, attempt.valid, defaults, attempt.number, rank, node);
        let name = claim.metadata.name.clone().unwrap_or_default();
        (!existing.contains_key(&(objects::CLAIM, name))).then(|| Action::Create(Object::Claim(Box::new(claim))))
    });
    missing.collect()
}

/// Creates the files for NCCL, if they are not there.
fn fabric_config(attempt: &Attempt<'_>) -> Option<Action> {
    let Snapshot { job, objects: existing, .. } = attempt.snapshot;
    let config = Object::ConfigMap(objects::fabric_config(job, attempt.valid, attempt.number)?);
    let is_there = existing.contains_key(&(config.kind(), config.name().to_string()));
    (!is_there).then_some(Action::Create(config))
}

/// Lifts the gates of all pods that still have one.
fn releases(attempt: &Attempt<'_>, placement: Option<&PlacementStatus>) -> Vec<Action> {
    let per_node = attempt.valid.request.processes_per_node;
    let node_of = |pod: &PodView| {
        let first = (pod.node_rank * per_node) as i32;
        let nodes = placement.map(|placement| placement.nodes.as_slice()).unwrap_or_default();
        // Written in rank order; looked up by rank nevertheless, since a status can be edited.
        let guess = nodes.get(pod.node_rank as usize).filter(|node| node.first_rank == first);
        guess.or_else(|| nodes.iter().find(|node| node.first_rank == first))
    };
    let gated = attempt.existing().into_iter().filter(|pod| pod.gated && !pod.deleting);
    gated
        .filter_map(|pod| {
            let wanted = objects::pod(
                attempt.snapshot.job,
                attempt.valid,
                attempt.snapshot.defaults,
                attempt.number,
                pod.node_rank,
            );
            let interface = fabric::interface(attempt.snapshot.job, &wanted, pod.node_rank);
            let patch = objects::placement_patch(&wanted, node_of(pod)?, interface);
            Some(Action::Release { pod: pod.name.clone(), uid: pod.uid.clone(), patch })
        })
        .collect()
}

/// Takes a gang back that the scheduler did not bind as a whole in time.
fn roll_back(attempt: &Attempt<'_>) -> Option<Reconciliation> {
    let at = attempt.placed_at()?;
    let unbound: Vec<&PodView> = attempt.existing().into_iter().filter(|pod| pod.node.is_none()).collect();
    if unbound.is_empty() || !clock::is_over(due(attempt, at), schedule_timeout(attempt), attempt.now) {
        return None;
    }
    let why = unbound.iter().find_map(|pod| Some(format!("pod {}: {}", pod.name, pod.unschedulable.as_ref()?)));
    let (open, all) = (unbound.len(), attempt.pods.len());
    let seconds = schedule_timeout(attempt).as_secs();
    let why = why.unwrap_or_else(|| "the scheduler gives no reason".into());
    let text = format!("{open} of {all} pods not scheduled within {seconds} s: {why}");
    let mut draft = attempt.draft();
    next_attempt(attempt, &mut draft, attempt.now.saturating_add(ROLLBACK_PAUSE).unwrap_or(attempt.now));
    // The scheduler did not want it there.
    draft.next.placement = None;
    draft.condition(conditions::PLACED, "False", "ScheduleTimeout", text.clone());
    draft.stage(Stage::Placing, format!("attempt {} follows: {text}", attempt.number + 1));
    Some(draft.decide(vec![EventDraft::warning(events::ROLLED_BACK, text)]))
}

fn next_attempt(attempt: &Attempt<'_>, draft: &mut Draft<'_>, not_before: Timestamp) {
    draft.next.attempt = Some(attempt.number as i32 + 1);
    draft.next.attempt_time = Some(status::time(not_before));
    let Snapshot { job, nodes, defaults, .. } = attempt.snapshot;
    draft.next.device_allocation = gang::allocation(job, nodes);
    draft.next.fabric = fabric::before(job, attempt.valid, defaults, nodes);
    draft.count(&[], attempt.valid.request.nodes as i32);
}

/// A job of higher priority needs the room.
fn gives_way(attempt: &Attempt<'_>, by: &str) -> Reconciliation {
    let pod = attempt.existing().first().map(|pod| pod.name.clone()).unwrap_or_default();
    let mut result = decided(attempt, &failure::preempted(pod, by));
    if let Some(next) = &mut result.status {
        next.placement = None;
        // Not `Restarting`: for that it would keep its nodes.
        for condition in next.conditions.iter_mut().filter(|condition| condition.type_ == conditions::PLACED) {
            condition.reason = conditions::PREEMPTED.to_string();
        }
    }
    result
}

/// The decision after a failure; where that is the absence of a pod, it has to be confirmed.
fn after_failure(attempt: &Attempt<'_>, failed: &failure::PodFailure) -> Reconciliation {
    let is_seen = attempt.existing().iter().any(|pod| pod.name == failed.pod);
    let absent = if is_seen { None } else { Some(failed.pod.clone()) };
    Reconciliation { absent, ..decided(attempt, failed) }
}

/// Another attempt, or the end.
fn decided(attempt: &Attempt<'_>, failed: &failure::PodFailure) -> Reconciliation {
    let status = attempt.snapshot.job.status.as_ref();
    let restarts = status.and_then(|status| status.restarts.clone()).unwrap_or_default();
    let since = status.and_then(|status| status.attempt_time.as_ref()).map(|time| time.0);
    let lasted = since.map(|since| attempt.now.duration_since(since)).unwrap_or_default();
    match restart::decide(&failed.failure, &attempt.snapshot.job.spec.failure_policy, &restarts) {
        restart::Decision::GiveUp(why) => {
            let message = format!("{}; {why}", failed.sentence());
            end(&attempt.snapshot, attempt.now, Ending::failed(why.reason(), message))
        }
        restart::Decision::Restart(next) => {
            let pause = restart::pause(restarts.total, lasted);
            let mut draft = attempt.draft();
            next_attempt(attempt, &mut draft, attempt.now.saturating_add(pause).unwrap_or(attempt.now));
            draft.next.restarts = Some(next);
            draft.condition(conditions::PLACED, "False", conditions::RESTARTING, failed.sentence());
            let wait = if pause.is_zero() { String::new() } else { format!(" in {} s", pause.as_secs()) };
            let text = format!("attempt {} starts{wait}: {}", attempt.number + 1, failed.sentence());
            draft.stage(Stage::Restarting, text.clone());
            draft.decide(vec![EventDraft::warning(events::RESTARTING, text)])
        }
    }
}

/// Pods of older attempts that have not ended are deleted, and what ended two attempts ago: the logs of the last failure stay.
fn old_pods(attempt: &Attempt<'_>) -> Vec<Action> {
    let is_old = |pod: &PodView| {
        pod.attempt < attempt.number && !pod.deleting && (!pod.is_over() || pod.attempt + 1 < attempt.number)
    };
    let old = attempt.snapshot.pods.iter().filter(|pod| is_old(pod) && pod.settles(attempt.now).is_none());
    old.map(|pod| delete_unfinished(pod)).collect()
}

/// Creates or repairs the objects beside the pods. Answers what cannot be done, one sentence each.
fn objects_of(attempt: &Attempt<'_>, actions: &mut Vec<Action>) -> Vec<String> {
    let Snapshot { job, objects: existing, .. } = attempt.snapshot;
    let mut strangers = Vec::new();
    let config = objects::config_map(job, attempt.valid, attempt.number).map(Object::ConfigMap);
    for object in objects::shared(job, attempt.valid).into_iter().chain(config) {
        if let Object::Secret(_) = object {
            // Nobody may read Secrets, so it cannot be observed; it is created with the first pods of every attempt.
            if attempt.existing().is_empty() {
                actions.push(Action::Create(object));
            }
            continue;
        }
        let (kind, name) = (object.kind(), object.name().to_string());
        match existing.get(&(kind, name.clone())) {
            None => actions.push(Action::Create(object)),
            Some(view) if !view.owned => {
                strangers.push(format!(
                    "{kind} {name} exists and does not belong to this job: delete it, or name the job otherwise"
                ));
            }
            Some(view) if view.deleting => {}
            Some(view) if view.covers(&object.content()) => {}
            // What is immutable cannot be repaired, and what is immutable was right when it was made.
            Some(_) if kind == "ConfigMap" => {}
            Some(_) => actions.push(Action::Repair(object)),
        }
    }
    let of_attempt = |kind: &str| kind == "ConfigMap" || kind == objects::CLAIM;
    let is_current = |name: &str| objects::is_of_attempt(attempt.valid, attempt.number, name);
    actions.extend(give_back(&attempt.snapshot, |kind, name| of_attempt(kind) && !is_current(name)));
    strangers
}
