use super::board::{Board, by_namespace, pod_state, state, table};
use super::controller::absence as outdated;
use super::logs::{chosen, instead_of_trainers, is_from_rank};
use super::report::event;
use crate::args::LogsArgs;
use crate::failure::Failure;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use kube::runtime::watcher::Event;
use serde_json::{Value, json};
use switchyard_crds::{PlacedNode, PlacementSlice, TrainJob};
use switchyard_plan::cluster::view::{Phase, PodView};
use switchyard_plan::slices;

fn job(name: &str, status: Value) -> TrainJob {
    serde_json::from_value(json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob",
        "metadata": {"name": name, "namespace": "team", "uid": name, "creationTimestamp": "2026-11-20T11:58:02Z"},
        "spec": {"trainer": {"numNodes": 2, "framework": "Torch"}},
        "status": status,
    }))
    .unwrap()
}

fn condition(kind: &str, status: &str, reason: &str, message: &str) -> Value {
    json!({"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": "2026-11-20T12:00:00Z"})
}

fn running() -> TrainJob {
    job(
        "gpt-124m",
        json!({
            "attempt": 2, "ready": "2/2", "restarts": {"application": 0, "infrastructure": 1, "preemption": 0, "total": 1},
            "conditions": [condition("Succeeded", "Unknown", "Running", "training"), condition("Placed", "True", "Placed", "")],
            "placement": {
                "reason": "r", "predictedBusBandwidth": "96G",
                "nodes": [{"firstRank": 0, "nodeName": "gpu-01", "gpus": ["a", "b"]}, {"firstRank": 2, "nodeName": "gpu-03", "gpus": ["c", "d"]}],
            },
            "trainerStatus": {
                "step": 8000, "totalSteps": 20000, "progressPercentage": 40, "loss": "2.184", "validationLoss": "2.310",
                "throughput": "20900", "throughputUnit": "Tokens", "estimatedRemainingSeconds": 11100,
                "exposedCommunicationPercent": "3.2", "inputWaitPercent": "0.4", "lastUpdatedTime": "2026-11-20T14:08:00Z",
            },
        }),
    )
}

fn waiting() -> TrainJob {
    let why = "4 whole nodes in one rack are needed; the best has 2 (switchyard explain gpt-rack)";
    job(
        "gpt-rack",
        json!({"ready": "0/4", "conditions": [condition("Succeeded", "Unknown", "Queued", "waits"), condition("Placed", "False", "NoRoom", why)]}),
    )
}

fn pod(name: &str, phase: Phase) -> PodView {
    let object = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "uid": name}});
    PodView { phase, ready: phase == Phase::Running, ..PodView::of(&serde_json::from_value(object).unwrap()) }
}

/// A pod whose trainer has ended while its kubelet still reports this phase.
fn ended(name: &str, phase: &str, code: i32, reason: &str) -> PodView {
    let terminated = json!({"exitCode": code, "reason": reason});
    let object = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "uid": name},
        "status": {"phase": phase, "containerStatuses": [
            {"name": "trainer", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": {"terminated": terminated}},
        ]},
    });
    PodView::of(&serde_json::from_value(object).unwrap())
}

fn now() -> Timestamp {
    "2026-11-20T14:08:02Z".parse().unwrap()
}

#[test]
fn a_line_per_job_with_its_figures_or_what_it_waits_for() {
    let jobs = [running(), waiting()].into_iter().map(|job| (crate::snapshot::name_of(&job), job)).collect();
    let board = Board { jobs, ..Board::default() };
    insta::assert_snapshot!(table(&board, now(), 100));
}

/// Regression: a successful job was shown as `READY 0/2`.
#[test]
fn a_finished_job_has_no_ready_count() {
    let cells = |complete: &str| {
        let over = condition("Complete", complete, "Completed", "all nodes are done");
        let board = Board {
            jobs: [("a".into(), job("a", json!({"ready": "0/2", "conditions": [over]})))].into(),
            ..Board::default()
        };
        table(&board, now(), 100)
    };
    assert!(cells("False").contains("0/2") && !cells("True").contains("0/2"), "{}", cells("True"));
}

#[test]
fn narrow_tables_drop_empty_columns_first() {
    let jobs = [running(), waiting()].into_iter().map(|job| (crate::snapshot::name_of(&job), job)).collect();
    let board = Board { jobs, all_namespaces: true, ..Board::default() };
    let text = table(&board, now(), 60);
    assert!(text.lines().all(|line| line.chars().count() <= 60), "{text}");
    let head = text.lines().next().unwrap();
    assert!(head.contains("PROGRESS") && !head.contains("QUEUE"), "{text}");
}

#[test]
fn one_job_is_shown_with_its_pods() {
    let pods = [pod("gpt-124m-2-0", Phase::Running), pod("gpt-124m-2-1", Phase::Failed)];
    let pods = pods.into_iter().map(|pod| ((pod.attempt, pod.node_rank), pod)).collect();
    let board = Board { jobs: [("gpt-124m".into(), running())].into(), pods, only: true, ..Board::default() };
    insta::assert_snapshot!(table(&board, now(), 100));
}

/// Regression: a watch showed `-` instead of the GPUs of a large job.
#[test]
fn a_placement_in_slices_is_shown_once_complete() {
    let nodes: Vec<PlacedNode> = (0..129)
        .map(|rank| PlacedNode {
            first_rank: 8 * rank,
            node_name: format!("n{rank}"),
            gpus: (0..8).map(|gpu| format!("GPU-{rank}-{gpu}")).collect(),
            ..PlacedNode::default()
        })
        .collect();
    let named = slices::named("large", 1, &nodes).unwrap();
    let slice = |name: String| PlacementSlice::new(&name, slices::cut(1, &nodes).remove(0));
    let large = |loss: &str| {
        let figures = json!({"step": 1, "totalSteps": 2, "progressPercentage": 50, "loss": loss, "lastUpdatedTime": "2026-11-20T14:08:00Z"});
        job(
            "large",
            json!({"attempt": 1, "placement": {"reason": "r", "nodes": [], "slices": named}, "trainerStatus": figures}),
        )
    };
    let mut board = Board { only: true, ..Board::default() };
    board.pods.insert((1, 128), PodView { node_rank: 128, ..pod("large-1-128", Phase::Running) });
    let last = |board: &Board| table(board, now(), 100).trim_end().rsplit('\n').next().unwrap().to_owned();
    board.job(Event::Apply(large("2")));
    assert!(!last(&board).contains("1024-1031"), "{}", last(&board));
    slices::names(&named).for_each(|name| board.slice(Event::Apply(slice(name))));
    assert!(last(&board).starts_with("1024-1031") && last(&board).ends_with('8'), "{}", last(&board));
    board.job(Event::Apply(large("1")));
    assert!(last(&board).starts_with("1024-1031"), "it stays with the next figures: {}", last(&board));
}

/// Regression: a failed job's pod was shown as running, because the kubelet had reported the
/// trainer's exit but not yet the pod's.
#[test]
fn the_end_of_a_trainer_is_shown_before_that_of_its_pod() {
    let of = |code, reason| pod_state(&ended("gpt-2-1", "Running", code, reason), now());
    assert_eq!(of(5, "OOMKilled"), "Failed: exit 5 OOMKilled");
    assert_eq!(of(0, "Completed"), "Succeeded");
}

/// A kubelet keeps its last reported phase until a pod is finished, so a pod that ended immediately
/// stays Pending although it has output.
#[test]
fn a_pod_that_ended_immediately_has_a_log() {
    let pods = vec![pod("gpt-124m-2-0", Phase::Succeeded), ended("gpt-124m-2-1", "Pending", 0, "Completed")];
    let names: Vec<String> = chosen(&args(), &running(), pods).unwrap().into_iter().map(|pod| pod.name).collect();
    assert_eq!(names, ["gpt-124m-2-0", "gpt-124m-2-1"]);
}

/// Regression: the reason was only in the condition, and the screen kept saying that the pods were
/// not created yet.
#[test]
fn errors_of_pod_creation_are_shown() {
    let trouble = "cannot create ConfigMap a-1: the name is taken by an object that does not belong to this job";
    let placed = condition("Placed", "False", "Placing", "the pods are not created yet");
    let making = job("a", json!({"conditions": [condition("Succeeded", "Unknown", "Placing", trouble), placed]}));
    let board = Board { jobs: [("a".into(), making)].into(), ..Board::default() };
    let text = table(&board, now(), 200);
    assert!(text.contains(trouble) && !text.contains("not created yet"), "{text}");
}

#[test]
fn stalled_and_slow_ranks_are_shown_next_to_the_figures() {
    let shown = |conditions: &[Value]| {
        let mut job = running();
        let told = conditions.iter().map(|condition| serde_json::from_value(condition.clone()).unwrap());
        job.status.as_mut().unwrap().conditions.extend(told);
        table(&Board { jobs: [("a".into(), job)].into(), ..Board::default() }, now(), 300)
    };
    let hung = condition("Progressing", "False", "Hung", "rank 3 on gpu-03 stands still");
    let slow = condition("Straggler", "True", "SlowRank", "rank 2 on gpu-03 computes longer");
    let gpu = condition("GPUTrouble", "True", "XidError", "rank 1 on gpu-03, GPU 0000:17:00.0: XID 31");
    let text = shown(&[hung, slow, gpu]);
    let all =
        "; rank 3 on gpu-03 stands still; rank 2 on gpu-03 computes longer; rank 1 on gpu-03, GPU 0000:17:00.0: XID 31";
    assert!(text.contains(all), "{text}");
    let well = condition("Progressing", "True", "StepsMade", "step 8000 of 20000");
    let even = condition("Straggler", "False", "EvenPace", "no rank is slow");
    let fine = condition("GPUTrouble", "False", "GPUsWell", "the driver reports nothing");
    assert_eq!(shown(&[well, even, fine]), shown(&[]));
}

/// Regression: the figures hid the controller's messages about nodes and about pods that did not
/// start.
#[test]
fn problems_of_a_job_with_figures_are_shown() {
    let shown = |stage: &str, message: &str| {
        let mut job = running();
        for condition in job.status.as_mut().unwrap().conditions.iter_mut().filter(|c| c.type_ == "Succeeded") {
            (condition.reason, condition.message) = (stage.into(), message.into());
        }
        table(&Board { jobs: [("a".into(), job)].into(), ..Board::default() }, now(), 300)
    };
    let text = shown("Running", "2 of 2 nodes train; node gpu-01 is cordoned: a drain waits");
    assert!(text.contains("step 8000/20000") && text.contains("; node gpu-01 is cordoned: a drain waits"), "{text}");
    let text = shown("Starting", "0 of 2 pods run; pod gpt-124m-2-0: FailedMount: no");
    assert!(text.contains("FailedMount: no") && !text.contains("step 8000/20000"), "{text}");
}

#[test]
fn a_change_is_one_line_without_escape_codes() {
    assert_eq!(state(&running()), "Running ready=2/2 attempt=2 step=8000/20000 loss=2.184 eta=3h05m");
    assert_eq!(state(&waiting()), "Queued ready=0/4 reason=NoRoom");
    assert_eq!(state(&job("new", Value::Null)), "New", "a change from it is `New->Placing`, where it was `-->Placing`");
}

/// The same job with other figures.
fn trains(stage: &str, spec: Value, figures: Value) -> TrainJob {
    let mut job = serde_json::to_value(running()).unwrap();
    job["status"]["conditions"][0]["reason"] = stage.into();
    job["spec"].as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    job["status"]["trainerStatus"].as_object_mut().unwrap().extend(figures.as_object().unwrap().clone());
    serde_json::from_value(job).unwrap()
}

fn lease(renewed: &str, holder: &str) -> Lease {
    let spec = json!({"holderIdentity": holder, "leaseDurationSeconds": 10, "renewTime": renewed});
    let metadata = json!({"name": "switchyard-controller", "namespace": "switchyard-system"});
    serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
}

fn screen(job: TrainJob, leases: Vec<Lease>) -> String {
    let (jobs, leases) = ([("a".into(), job)].into(), by_namespace(leases));
    table(&Board { jobs, leases, ..Board::default() }, now(), 200)
}

/// Regression: with the kubelet away for three minutes, the screen still showed "step 410/6000, ETA
/// 2m20s".
#[test]
fn figures_show_their_age_and_stale_ones_no_eta() {
    let at = |time: &str| screen(trains("Running", json!({}), json!({"lastUpdatedTime": time})), Vec::new());
    let fresh = at("2026-11-20T14:07:32Z");
    assert!(fresh.contains("40 %  ") && fresh.contains("3h04m") && !fresh.contains("old"), "{fresh}");
    let late = at("2026-11-20T14:06:02Z");
    assert!(late.contains("40 % (2m00s old)") && late.contains("; figures are 2m00s old"), "{late}");
    assert!(late.contains("3h03m"), "the time that has passed since is taken off: {late}");
    let stale = at("2026-11-20T14:00:02Z");
    assert!(stale.contains("40 % (8m00s old)") && !stale.contains("3h0"), "{stale}");
}

/// Regression: the screen showed "60 %, ETA 10s" for a job that had restarted at step 0.
#[test]
fn a_suspended_job_has_no_eta_and_only_checkpointed_progress() {
    let text = screen(trains("Suspended", json!({}), json!({})), Vec::new());
    assert!(!text.contains("40 %") && !text.contains("3h0"), "{text}");
    let text = screen(trains("Suspended", json!({"checkpoint": {"path": "/c"}}), json!({})), Vec::new());
    assert!(text.contains("40 %") && !text.contains("3h0"), "{text}");
}

/// Regression: after `helm uninstall` the screen still showed "Running, ETA 8m43s".
#[test]
fn without_a_controller_there_is_no_end_and_a_warning() {
    let with = screen(running(), vec![lease("2026-11-20T14:08:00.000000Z", "pod-a")]);
    assert!(with.contains("3h04m") && !with.contains("warning"), "{with}");
    let without = screen(running(), vec![lease("2026-11-20T14:05:02.000000Z", "pod-a")]);
    let says = "pod-a has not renewed the Lease switchyard-system/switchyard-controller for 3m00s";
    assert!(without.starts_with("warning") && without.contains(says) && !without.contains("3h04m"), "{without}");
    let given_back = screen(running(), vec![lease("2026-11-20T14:08:00.000000Z", "")]);
    assert!(given_back.contains("has no holder"), "{given_back}");
    let two = [lease("2026-11-20T14:05:02.000000Z", "a"), lease("2026-11-20T14:08:00.000000Z", "b")];
    assert_eq!(outdated(two.iter(), now()), None, "which of two releases has the job is not board");
}

/// A pod whose init container is in this state.
fn initializing(name: &str, phase: &str, state: Value) -> PodView {
    let status = |name: &str, state: &Value| json!({"name": name, "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state});
    let waits = json!({"waiting": {"reason": "PodInitializing"}});
    let object = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "uid": name}, "spec": {"nodeName": "n", "containers": []},
        "status": {"phase": phase, "initContainerStatuses": [status("load", &state)], "containerStatuses": [status("trainer", &waits)]},
    });
    PodView::of(&serde_json::from_value(object).unwrap())
}

/// Regression: `status` showed "PodInitializing", and `logs` reported that there was no log yet.
#[test]
fn an_init_container_is_shown_with_its_time_exit_and_log() {
    let runs = initializing("gpt-124m-2-0", "Pending", json!({"running": {"startedAt": "2026-11-20T14:05:02Z"}}));
    assert_eq!(pod_state(&runs, now()), "Pending: init container load for 3m00s");
    let failed = initializing("gpt-124m-2-0", "Failed", json!({"terminated": {"exitCode": 3, "reason": "Error"}}));
    assert_eq!(pod_state(&failed, now()), "Failed: init container load, exit 3 Error");
    let note = "the trainer of gpt-124m-2-0 has not started: this is the log of its init container load";
    for pod in [runs, failed] {
        let pods = chosen(&args(), &running(), vec![pod]).unwrap();
        assert_eq!(instead_of_trainers(&args(), &pods).as_deref(), Some(note));
        let named = LogsArgs { container: Some("mesh".into()), ..args() };
        assert_eq!(instead_of_trainers(&named, &chosen(&named, &running(), pods).unwrap()), None);
    }
    let started = vec![pod("gpt-124m-2-0", Phase::Running)];
    assert_eq!(instead_of_trainers(&args(), &chosen(&args(), &running(), started).unwrap()), None);
}

fn args() -> LogsArgs {
    LogsArgs {
        job: "gpt-124m".into(),
        rank: None,
        node_rank: None,
        attempt: None,
        follow: false,
        tail: None,
        container: None,
        connection: Default::default(),
    }
}

#[test]
fn logs_default_to_the_newest_attempt_and_follow_ranks_to_nodes() {
    let pods = || {
        let names = ["gpt-124m-1-0", "gpt-124m-2-0", "gpt-124m-2-1"];
        names.map(|name| pod(name, if name.ends_with("1-0") { Phase::Failed } else { Phase::Running })).to_vec()
    };
    let names = |args: LogsArgs| -> Result<Vec<String>, Failure> {
        Ok(chosen(&args, &running(), pods())?.into_iter().map(|pod| pod.name).collect())
    };
    assert_eq!(names(args()).unwrap(), ["gpt-124m-2-0", "gpt-124m-2-1"]);
    assert_eq!(names(LogsArgs { attempt: Some(1), ..args() }).unwrap(), ["gpt-124m-1-0"]);
    for (rank, name) in [(0, "gpt-124m-2-0"), (1, "gpt-124m-2-0"), (2, "gpt-124m-2-1"), (3, "gpt-124m-2-1")] {
        assert_eq!(names(LogsArgs { rank: Some(rank), ..args() }).unwrap(), [name], "{rank}");
    }
    let error = |args| names(args).unwrap_err().message;
    assert_eq!(error(LogsArgs { rank: Some(4), ..args() }), "--rank 4: the job has ranks 0 to 3");
    assert_eq!(error(LogsArgs { node_rank: Some(7), ..args() }), "no log of node 7: attempt 2 has pods of nodes 0-1");
    let gone = error(LogsArgs { attempt: Some(9), ..args() });
    assert!(gone.contains("attempt 9 has no pods any more"), "{gone}");
}

#[test]
fn logs_of_pods_that_have_not_started_are_an_error() {
    let error = chosen(&args(), &running(), vec![pod("gpt-124m-2-0", Phase::Pending)]).unwrap_err();
    assert_eq!(error.message, "no log yet: gpt-124m-2-0 not started (switchyard status gpt-124m)");
}

#[test]
fn a_line_belongs_to_the_rank_it_names() {
    let failed = r#"{"event":"failed","rank":12,"originRank":1,"cause":"c","during":"d","exitCode":4}"#;
    let parsed = serde_json::from_str::<switchyard_worker_contract::event::Event>(failed);
    assert!(parsed.is_ok(), "{parsed:?}");
    assert!(is_from_rank(12, failed) && !is_from_rank(1, failed));
    assert!(is_from_rank(1, "[rank 1] words") && !is_from_rank(1, "[rank 12] words") && !is_from_rank(1, "words"));
}

#[test]
fn a_log_line_becomes_a_timed_event() {
    let line = r#"2026-11-20T14:08:02.5Z {"event":"evaluation","step":3,"loss":2.5}"#;
    let made: Value = serde_json::from_str(&event(line, 2).unwrap()).unwrap();
    assert_eq!((&made["attempt"], &made["rank"], &made["event"]["step"]), (&json!(2), &json!(0), &json!(3)));
    assert_eq!(made["time"], "2026-11-20T14:08:02.5Z");
    assert_eq!(event("2026-11-20T14:08:02Z [rank 1] words", 1), None);
    assert_eq!(event("words", 1), None);
}
