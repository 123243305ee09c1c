//! Obstacles to creating or starting a pod, from messages of the API server, the scheduler and the
//! kubelet: how long to wait, and which field to change.

use super::clock::{self, time_of};
use super::events;
use super::view::{Progress, Waiting};
use crate::status::Draft;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::events::v1::Event;
use switchyard_crds::names::TRAINER;
use switchyard_crds::{TrainJobStatus, conditions};

/// A pod that cannot be created or started for this long has failed.
pub(super) const START_GRACE: SignedDuration = SignedDuration::from_secs(300);

/// A bound pod that has not started for this long has failed on that node, unless the reason is
/// known to be temporary.
pub(super) const STUCK_GRACE: SignedDuration = SignedDuration::from_mins(10);

/// How long to wait for an obstacle to disappear.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Limit {
    /// No wait: only a different manifest helps.
    None,
    /// [`START_GRACE`], because the user may still create the missing object. Then the job ends,
    /// since another attempt would fail the same way.
    Grace,
    /// [`START_GRACE`], then another attempt, because the node may be at fault.
    Attempt,
    /// [`STUCK_GRACE`], then another attempt: the cause is unknown and may be temporary.
    Stuck,
    /// It is temporary, or ends when there is room.
    Unlimited,
}

/// The change that helps, and how long to wait for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Remedy {
    pub limit: Limit,
    /// The change that helps.
    pub change: Option<String>,
}

impl Remedy {
    fn new(limit: Limit, change: impl Into<String>) -> Remedy {
        Remedy { limit, change: Some(change.into()) }
    }

    fn unknown(limit: Limit) -> Remedy {
        Remedy { limit, change: None }
    }

    /// The message, followed by the change that helps.
    pub fn sentence(&self, message: &str) -> String {
        match &self.change {
            Some(change) => format!("{message}; {change}"),
            None => message.to_string(),
        }
    }
}

/// Error of a failed write to the API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WriteError {
    pub text: String,
    /// Since when the same write has been failing.
    pub since: Timestamp,
    /// The API server refused the write, so a retry does not help until something is changed.
    pub is_refusal: bool,
}

impl WriteError {
    /// The error that follows `before`. It keeps the earlier start time if the cause is the same.
    pub fn after(before: Option<&WriteError>, text: String, is_refusal: bool, now: Timestamp) -> WriteError {
        // Another pod may run into the same obstacle.
        let same = before
            .filter(|before| before.is_refusal == is_refusal && write_remedy(&before.text) == write_remedy(&text));
        WriteError { since: same.map_or(now, |before| before.since), text, is_refusal }
    }

    /// The last refusal recorded in the status. The limit it started continues under another
    /// leader.
    pub fn from_status(status: &TrainJobStatus) -> Option<WriteError> {
        let condition = status.condition(conditions::PODS_CREATED)?;
        Some(WriteError { text: condition.message.clone(), since: condition.last_transition_time.0, is_refusal: true })
    }

    /// Records the error in a condition if it has a time limit that ends the job.
    pub(super) fn record(write_error: Option<&WriteError>, draft: &mut Draft<'_>) {
        match write_error.filter(|write_error| write_error.ends().is_some()) {
            Some(write_error) => {
                let (text, since) = (write_error.sentence(), write_error.since);
                draft.condition_since(conditions::PODS_CREATED, "False", events::REFUSED, text, since);
            }
            None => draft.remove_condition(conditions::PODS_CREATED),
        }
    }

    /// One sentence that includes the field to change.
    pub fn sentence(&self) -> String {
        write_remedy(&self.text).sentence(&self.text)
    }

    /// Whether a ResourceQuota has no room for the pods.
    pub fn is_quota(&self) -> bool {
        self.text.starts_with("cannot create Pod ") && self.text.contains(EXCEEDED_QUOTA)
    }

    /// When the error ends the job, `None` if never.
    pub(super) fn ends(&self) -> Option<Timestamp> {
        match write_remedy(&self.text).limit {
            Limit::None => Some(self.since),
            Limit::Grace => self.since.saturating_add(START_GRACE).ok(),
            Limit::Attempt | Limit::Stuck | Limit::Unlimited => None,
        }
    }

    /// Whether the error ends the job now.
    pub(super) fn is_final(&self, now: Timestamp) -> bool {
        self.ends().is_some_and(|at| clock::is_over(at, START_GRACE, now))
    }
}

/// The server's message when a ResourceQuota has no room.
const EXCEEDED_QUOTA: &str = "exceeded quota";

/// Substrings of admission errors for pods, and the change that helps.
const ADMISSION: [(&str, &str); 7] = [
    ("denied the request", "change what it names in spec.template"),
    ("denied request", "change what it names in spec.template"),
    (
        "violates PodSecurity",
        "remove what it names from spec.template, or use a namespace whose Pod Security level allows it",
    ),
    ("serviceaccount \"", "create the ServiceAccount, or correct spec.template.spec.serviceAccountName"),
    ("no PriorityClass", "create the PriorityClass, or correct spec.template.spec.priorityClassName"),
    ("RuntimeClass \"", "create the RuntimeClass, or correct spec.template.spec.runtimeClassName"),
    ("usage per", "set spec.trainer.resourcesPerNode.limits to what the LimitRange of the namespace allows"),
];

/// Remedy for a refused write. `text` is `cannot create Pod a-1-0: ` followed by the server's
/// message.
fn write_remedy(text: &str) -> Remedy {
    let Some((_, why)) = text.strip_prefix("cannot create Pod ").and_then(|rest| rest.split_once(": ")) else {
        return Remedy::unknown(Limit::Unlimited);
    };
    if why.contains(EXCEEDED_QUOTA) {
        let change = "it is created once enough quota is free; or lower spec.trainer.numNodes or resourcesPerNode";
        return Remedy::new(Limit::Unlimited, change);
    }
    // Message of the server's own validation. Messages of webhooks begin with the webhook's name.
    if why.starts_with("Pod \"") && why.contains("\" is invalid: ") {
        return Remedy::new(Limit::None, "the fields are under spec.template");
    }
    let known = ADMISSION.iter().find(|(fragment, _)| why.contains(fragment));
    known.map_or(Remedy::unknown(Limit::Unlimited), |(_, change)| Remedy::new(Limit::Grace, *change))
}

/// Remedy for a kubelet message about a container or a pod.
pub(super) fn start_remedy(waiting: &Waiting) -> Remedy {
    let Waiting { container, reason, message } = waiting;
    let list = if container == TRAINER { "spec.trainer" } else { "spec.template.spec.containers[*]" };
    let is_mentioned = |fragments: &[&str]| fragments.iter().any(|fragment| message.contains(fragment));
    match reason.as_str() {
        "InvalidImageName" => Remedy::new(Limit::None, format!("set {list}.image to a valid image name")),
        // Messages of the kubelet (pkg/kubelet/kuberuntime/security_context.go).
        "CreateContainerConfigError" if is_mentioned(&["runAsNonRoot", "non-root"]) => Remedy::new(
            Limit::None,
            "set spec.template.spec.securityContext.runAsUser to a user ID other than 0, or runAsNonRoot to false where \
             the namespace allows that",
        ),
        // Messages of runc and crun: even the process that sets up the container needs more memory.
        _ if is_mentioned(&["OOM-killed", "memory limit too low"]) => Remedy::new(
            Limit::None,
            "raise spec.trainer.resourcesPerNode.limits.memory: no container can start with so little",
        ),
        "CreateContainerConfigError" => match missing(message) {
            Some(what) => Remedy::new(
                Limit::Grace,
                format!(
                    "create {what} in the job's namespace, or correct its name in spec.template.spec.containers[*].env"
                ),
            ),
            None => Remedy::unknown(Limit::Grace),
        },
        "FailedMount" => match missing(message) {
            Some(what) => Remedy::new(
                Limit::Grace,
                format!("create {what} in the job's namespace, or correct its name in spec.template.spec.volumes"),
            ),
            None if is_mentioned(&["hostPath type check failed"]) => {
                Remedy::new(Limit::Grace, "correct hostPath.path or hostPath.type in spec.template.spec.volumes")
            }
            None => Remedy::new(Limit::Attempt, "check spec.template.spec.volumes"),
        },
        "FailedAttachVolume" => Remedy::new(Limit::Attempt, "check spec.template.spec.volumes"),
        "ErrImagePull" | "ImagePullBackOff" | "ErrImageNeverPull" => {
            // A different node would pull from the same registry.
            let is_absent = is_mentioned(&["not found", "manifest unknown", "access denied", "authorization failed"]);
            let limit = if is_absent { Limit::Grace } else { Limit::Attempt };
            Remedy::new(limit, format!("check {list}.image and spec.template.spec.imagePullSecrets"))
        }
        "FailedCreatePodSandBox" if is_mentioned(&["no runtime for"]) => Remedy::new(
            Limit::Attempt,
            "correct spec.template.spec.runtimeClassName, or configure that runtime on the node",
        ),
        "FailedCreatePodSandBox" | "NetworkNotReady" | "CreateContainerError" | "RunContainerError" => {
            Remedy::unknown(Limit::Attempt)
        }
        _ => Remedy::unknown(Limit::Stuck),
    }
}

/// The object that a kubelet cannot find: `configmap "a" not found`, `references non-existent
/// config key: k`.
fn missing(message: &str) -> Option<String> {
    for (word, kind) in [("configmap", "ConfigMap"), ("secret", "Secret")] {
        let named = message.split(&format!("{word} \"")).nth(1).and_then(|rest| rest.split_once("\" not found"));
        if let Some((name, _)) = named.filter(|(name, _)| !name.contains('"')) {
            return Some(format!("{kind} {name}"));
        }
    }
    let key = message
        .split("references non-existent config key: ")
        .nth(1)
        .or_else(|| message.split("couldn't find key ").nth(1))?;
    Some(format!("key {}", key.split_whitespace().next()?.trim_end_matches(['.', ','])))
}

/// Substrings of scheduler messages, and the field that causes them.
const SCHEDULER: [(&str, &str); 6] = [
    ("anti-affinity", "spec.template.spec.affinity.podAntiAffinity"),
    ("pod affinity", "spec.template.spec.affinity.podAffinity"),
    ("topology spread", "spec.template.spec.topologySpreadConstraints"),
    ("free ports", "spec.template.spec.containers[*].ports[*].hostPort"),
    ("persistentvolumeclaim", "spec.template.spec.volumes[*].persistentVolumeClaim.claimName"),
    ("volume", "spec.template.spec.volumes"),
];

/// The field that a scheduler message refers to.
pub(super) fn field_of(message: &str) -> Option<&'static str> {
    let message = message.to_lowercase();
    SCHEDULER.iter().find(|(fragment, _)| message.contains(fragment)).map(|(_, field)| *field)
}

/// The kubelet is pulling an image. It reports nothing more until it is done, which may take hours.
/// A pull without progress ends in an error.
const PULLING: &str = "Pulling";

/// Events that show progress of a pod.
const PROGRESS: [&str; 5] = [PULLING, "Pulled", "Created", "Started", "SuccessfulAttachVolume"];

/// The last progress in a pod's events.
pub fn progress(events: &[Event]) -> Progress {
    let reason = |event: &Event| event.reason.clone().unwrap_or_default();
    let steps = events.iter().filter(|event| PROGRESS.contains(&reason(event).as_str()));
    // Within one second, a pull begins after the last container was started, and ends before the
    // next one is created.
    let last = steps.max_by_key(|event| (time_of(event), reason(event) != PULLING));
    last.map_or_else(Progress::default, |last| Progress { at: time_of(last), is_pulling: reason(last) == PULLING })
}

/// A problem that only a pod's events show, not its container states: a failed volume, sandbox or
/// network. `None` if the last event shows progress.
pub fn warning(events: &[Event]) -> Option<Waiting> {
    let is_warning = |event: &Event| event.type_.as_deref() == Some("Warning");
    let reason = |event: &Event| event.reason.clone().unwrap_or_default();
    let is_relevant = |event: &&Event| {
        if is_warning(event) { reason(event) != "FailedScheduling" } else { PROGRESS.contains(&reason(event).as_str()) }
    };
    // Kubelet timestamps have a resolution of one second. Within the same second, progress takes
    // precedence.
    let last = events.iter().filter(is_relevant).max_by_key(|event| (time_of(event), !is_warning(event)))?;
    let message = without_ids(last.note.as_deref().unwrap_or_default());
    is_warning(last).then(|| Waiting { container: String::new(), reason: reason(last), message })
}

/// Minimum number of hex digits in a sandbox or container ID.
const MIN_ID_DIGITS: usize = 32;

/// Removes sandbox and container IDs. Each retry has a new sandbox, and the same problem should
/// yield the same message.
fn without_ids(message: &str) -> String {
    let mut text = String::new();
    let is_digit = |letter: char| letter.is_ascii_digit() || ('a'..='f').contains(&letter);
    let mut rest = message;
    while let Some(start) = rest.find(is_digit) {
        let length = rest[start..].find(|letter| !is_digit(letter)).unwrap_or(rest.len() - start);
        text.push_str(&rest[..start]);
        text.push_str(if length < MIN_ID_DIGITS { &rest[start..start + length] } else { "…" });
        rest = &rest[start + length..];
    }
    text + rest
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    fn event(kind: &str, reason: &str, second: u32, note: &str) -> Event {
        let time = format!("2026-11-23T10:00:{second:02}Z");
        let document = json!({"metadata": {"name": "e"}, "eventTime": null, "type": kind, "reason": reason, "note": note,
            "deprecatedLastTimestamp": time});
        serde_json::from_value(document).unwrap()
    }

    #[test]
    fn the_last_warning_of_a_pod_counts_unless_it_made_progress() {
        let scheduled = event("Normal", "Scheduled", 1, "assigned");
        let unscheduled = event("Warning", "FailedScheduling", 9, "no node");
        let mount = event("Warning", "FailedMount", 1, "configmap \"a\" not found");
        let later = event("Warning", "FailedMount", 3, "configmap \"b\" not found");
        let note = |events: &[&Event]| warning(&events.iter().map(|event| (*event).clone()).collect::<Vec<_>>());
        let message_of = |events: &[&Event]| note(events).map(|warning| warning.message);
        assert_eq!(message_of(&[&scheduled]), None);
        assert_eq!(message_of(&[&unscheduled]), None, "scheduler messages are in a condition");
        assert_eq!(message_of(&[&scheduled, &mount, &unscheduled]).unwrap(), "configmap \"a\" not found");
        assert_eq!(message_of(&[&later, &mount]).unwrap(), "configmap \"b\" not found");
        assert_eq!(message_of(&[&later, &event("Normal", "Pulling", 3, "image")]), None, "it has been mounted since");
        assert!(message_of(&[&later, &event("Normal", "Pulled", 2, "image")]).is_some());
    }

    #[test]
    fn the_same_problem_in_another_sandbox_has_the_same_message() {
        let of =
            |id: &str| without_ids(&format!("failed to setup network for sandbox \"{}\": 10.0.0.7 é", id.repeat(32)));
        assert_eq!(of("a1"), of("07"));
        assert_eq!(of("a1"), "failed to setup network for sandbox \"…\": 10.0.0.7 é");
        assert_eq!(without_ids("dead beef 0123456789abcdef"), "dead beef 0123456789abcdef");
    }

    #[test]
    fn objects_that_a_kubelet_cannot_find_are_named() {
        for (message, what) in [
            ("MountVolume.SetUp failed for volume \"text\" : configmap \"texxt\" not found", Some("ConfigMap texxt")),
            ("secret \"s\" not found", Some("Secret s")),
            ("couldn't find key token in Secret team/s", Some("key token")),
            (
                "MountVolume.SetUp failed for volume \"a\" : configmap references non-existent config key: k",
                Some("key k"),
            ),
            ("timed out waiting for the condition", None),
        ] {
            assert_eq!(missing(message).as_deref(), what, "{message}");
        }
    }

    /// Pod names are chosen by users and must not be mistaken for the server's words.
    #[test]
    fn admission_errors_are_classified() {
        let limit = |why: &str| write_remedy(&format!("cannot create Pod a-1-0: {why}")).limit;
        for (why, expected) in [
            ("Pod \"a-1-0\" is invalid: spec.volumes[1].name: Duplicate value: \"v\"", Limit::None),
            ("pods \"a-1-0\" is forbidden: no PriorityClass with name p was found", Limit::Grace),
            ("pods \"a-1-0\" is forbidden: pod rejected: RuntimeClass \"r\" not found", Limit::Grace),
            ("pods \"a-1-0\" is forbidden: maximum cpu usage per Container is 1, but limit is 2", Limit::Grace),
            ("pods \"a-1-0\" is forbidden: violates PodSecurity \"baseline:latest\": hostPath volumes", Limit::Grace),
            ("admission webhook \"w\" denied the request: Pod \"a\" is invalid: no", Limit::Grace),
            ("pods is forbidden: User \"c\" cannot create resource \"pods\" in API group \"\"", Limit::Unlimited),
            ("the API server cannot be reached: closed", Limit::Unlimited),
        ] {
            assert_eq!(limit(why), expected, "{why}");
        }
        assert_eq!(write_remedy("cannot create ConfigMap a: ConfigMap \"a\" is invalid: no").limit, Limit::Unlimited);
    }

    #[test]
    fn the_limit_counts_from_the_first_refusal_of_the_same_write() {
        let at = |second: i64| Timestamp::from_second(second).unwrap();
        let missing = |pod: &str| {
            format!("cannot create Pod {pod}: pods \"{pod}\" is forbidden: no PriorityClass with name p was found")
        };
        let first = WriteError::after(None, missing("a-1-0"), true, at(0));
        let second = WriteError::after(Some(&first), missing("a-1-1"), true, at(9));
        assert_eq!((second.since, second.is_final(at(299)), second.is_final(at(300))), (at(0), false, true));
        let other = WriteError::after(
            Some(&second),
            "cannot create Pod a-1-0: pods is forbidden: exceeded quota: q".into(),
            true,
            at(10),
        );
        assert_eq!((other.since, other.ends()), (at(10), None));
    }
}
