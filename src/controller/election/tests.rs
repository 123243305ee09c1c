//! Runs the scenarios of `scenarios.txt` with real candidates against an in-memory Lease.
#![allow(missing_docs, clippy::unwrap_used)]

use super::leadership::Leadership;
use super::*;
use http::{Method, Request, Response, StatusCode};
use jiff::Timestamp;
use kube::client::Body;
use serde_json::{Value, json};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Timing used in `scenarios.txt`.
const SCENARIO_TIMING: Timing = Timing {
    duration: Duration::from_secs(15),
    renew_deadline: Duration::from_secs(10),
    retry: Duration::from_secs(2),
};

thread_local! {
    static SIMULATED_TIME: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// The simulated time of this thread's scenario.
fn simulated_time() -> Duration {
    SIMULATED_TIME.get()
}

/// An API server's storage of the Lease, with optimistic concurrency.
#[derive(Default)]
struct Store {
    lease: Option<Value>,
    version: u64,
    is_down: bool,
    /// Whether the next write is stored but its response is lost.
    loses_response: bool,
    /// Clock error of the times written, in hours.
    skew: i64,
    writes: u32,
}

impl Store {
    fn put(&mut self, mut lease: Value) {
        self.version += 1;
        lease["metadata"]["resourceVersion"] = self.version.to_string().into();
        self.lease = Some(lease);
    }

    fn edit(&mut self, pointer: &str, value: Value) {
        let mut lease = self.lease.clone().expect("the Lease exists");
        match lease.pointer_mut(pointer) {
            Some(slot) => *slot = value,
            None => lease["metadata"]["labels"] = value,
        }
        self.put(lease);
    }

    /// Handles one request as the API server does.
    fn handle(&mut self, method: &Method, body: Value) -> (StatusCode, Value) {
        let error = |code: StatusCode| {
            let reason = code.canonical_reason().unwrap_or_default().replace(' ', "");
            let status = json!({"status": "Failure", "code": code.as_u16(), "reason": reason, "message": "no"});
            (code, status)
        };
        if self.is_down {
            return error(StatusCode::INTERNAL_SERVER_ERROR);
        }
        let current = self.lease.as_ref().map(|lease| lease["metadata"]["resourceVersion"].clone());
        match (method, current) {
            (&Method::GET, Some(_)) => return (StatusCode::OK, self.lease.clone().unwrap()),
            (&Method::POST, None) => {}
            (&Method::PUT, Some(version)) if body["metadata"]["resourceVersion"] == version => {}
            (&Method::POST | &Method::PUT, Some(_)) => return error(StatusCode::CONFLICT),
            _ => return error(StatusCode::NOT_FOUND),
        }
        let mut body = body;
        for field in ["renewTime", "acquireTime"] {
            let time: Timestamp = body["spec"][field].as_str().unwrap().parse().unwrap();
            let skewed = time + jiff::SignedDuration::from_hours(self.skew);
            body["spec"][field] = serde_json::to_value(MicroTime(skewed)).unwrap();
        }
        self.writes += 1;
        self.put(body);
        match std::mem::take(&mut self.loses_response) {
            true => error(StatusCode::GATEWAY_TIMEOUT),
            false => (StatusCode::OK, self.lease.clone().unwrap()),
        }
    }
}

fn client(store: &Arc<Mutex<Store>>) -> Client {
    let store = Arc::clone(store);
    let service = tower::service_fn(move |request: Request<Body>| {
        let store = Arc::clone(&store);
        async move {
            let method = request.method().clone();
            let bytes = request.into_body().collect_bytes().await.unwrap();
            let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
            let (code, response) = store.lock().unwrap().handle(&method, body);
            let body = Body::from(serde_json::to_vec(&response).unwrap());
            Ok::<_, std::io::Error>(Response::builder().status(code).body(body).unwrap())
        }
    });
    Client::new(service, "default")
}

fn no_policy_report() -> Receiver<Option<String>> {
    tokio::sync::watch::channel(None).1
}

/// A memory that saves the candidate's name, and records restored names in [`RESTORED`].
fn named_memory(name: &str) -> LeaseMemory {
    let (save, restore) = (name.to_string(), name.to_string());
    LeaseMemory {
        save: Box::new(move || Some(save.clone())),
        restore: Box::new(move |memory| {
            RESTORED.with_borrow_mut(|all| all.push(format!("{restore} restores {memory}")))
        }),
    }
}

thread_local! {
    static RESTORED: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// A candidate and its state between rounds.
struct TestCandidate {
    candidate: Candidate,
    cache: LeaseCache,
    role: Role,
    leader: Leader,
    leadership: Leadership,
}

impl TestCandidate {
    fn new(name: &str, store: &Arc<Mutex<Store>>) -> TestCandidate {
        let (leader, leadership) = channel(simulated_time);
        let candidate = Candidate {
            client: client(store),
            namespace: "default".into(),
            identity: name.into(),
            timing: SCENARIO_TIMING,
            clock: simulated_time,
            server: Arc::default(),
            memory: named_memory(name),
            policies: no_policy_report(),
        };
        TestCandidate { candidate, cache: LeaseCache::default(), role: Role::Standby, leader, leadership }
    }

    async fn round(&mut self) -> &'static str {
        match self.candidate.round(&mut self.cache, &mut self.role, &self.leader).await {
            Err(error) => {
                println!("{}: {error}", self.candidate.identity);
                "error"
            }
            Ok(_) if matches!(self.role, Role::Leading { .. }) => "leads",
            Ok(_) => "waits",
        }
    }
}

/// Runs the lines of one scenario. Returns the deviations.
async fn run_scenario(scenario: &str) -> Vec<String> {
    let store = Arc::new(Mutex::new(Store::default()));
    let mut candidates: BTreeMap<String, TestCandidate> = BTreeMap::new();
    let mut deviations = Vec::new();
    for line in scenario.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (command, expected) = line.split_once(" -> ").unwrap_or((line, ""));
        let fields: Vec<&str> = command.split(' ').collect();
        SIMULATED_TIME.set(Duration::from_secs(1000) + Duration::from_secs_f64(fields[0].parse().unwrap()));
        let edit = |pointer: &str, value: Value| store.lock().unwrap().edit(pointer, value);
        let mut found = "";
        match fields[1..] {
            ["api", state] => store.lock().unwrap().is_down = state == "down",
            ["lost", _] => store.lock().unwrap().loses_response = true,
            ["clock", hours] => store.lock().unwrap().skew = hours.parse().unwrap(),
            ["holder", name] => edit("/spec/holderIdentity", name.trim_matches('-').into()),
            ["label"] => edit("/metadata/labels", json!({"touched": line.len().to_string()})),
            ["duration", seconds] => {
                edit("/spec/leaseDurationSeconds", seconds.parse::<i32>().unwrap().into());
            }
            ["delete"] => store.lock().unwrap().lease = None,
            [who, "?"] => found = if candidates[who].leadership.is_held() { "yes" } else { "no" },
            [who] => {
                let candidate = candidates.entry(who.into()).or_insert_with(|| TestCandidate::new(who, &store));
                found = candidate.round().await;
            }
            _ => panic!("not a scenario line: {line}"),
        }
        if found != expected {
            deviations.push(format!("{line}, but found {found}"));
        }
    }
    deviations
}

#[tokio::test]
async fn every_scenario_matches() {
    let scenarios: Vec<&str> = include_str!("scenarios.txt").split("\nscenario ").skip(1).collect();
    assert!(scenarios.len() >= 20, "{} scenarios", scenarios.len());
    let mut deviations = Vec::new();
    for scenario in scenarios {
        let (title, lines) = scenario.split_once('\n').unwrap();
        deviations.extend(run_scenario(lines).await.into_iter().map(|deviation| format!("{title}: {deviation}")));
    }
    assert!(deviations.is_empty(), "{}", deviations.join("\n"));
}

#[tokio::test]
async fn a_deviation_from_a_scenario_is_detected() {
    assert_eq!(run_scenario("0 a -> leads\n0 b -> leads").await, ["0 b -> leads, but found waits"]);
    assert_eq!(run_scenario("0 a -> leads\n0 b -> waits\n14 b -> leads").await.len(), 1);
}

/// Regression test: the state of the leader was lost when another one took over.
#[tokio::test]
async fn each_leader_restores_the_state_that_the_previous_one_saved() {
    assert_eq!(
        run_scenario(
            "0 a -> leads\n1 a -> leads\n2 b -> waits\n60 b -> leads\n61 b -> leads\n120 c -> waits\n180 c -> leads"
        )
        .await,
        [""; 0]
    );
    assert_eq!(RESTORED.take(), ["b restores a", "c restores b"]);
    // A candidate that has just acquired the Lease has not saved anything yet.
    assert_eq!(
        run_scenario("0 a -> leads\n1 a -> leads\n2 b -> waits\n60 b -> leads\n62 c -> waits\n120 c -> leads").await,
        [""; 0]
    );
    assert_eq!(RESTORED.take(), ["b restores a", "c restores a"]);
}

#[test]
fn a_leader_stops_before_the_lease_is_free() {
    let timing = Timing::default();
    assert!(timing.renew_deadline + timing.retry < timing.duration);
}

/// Runs the whole loop in real time: when the leader is stopped, the other candidate takes over
/// without waiting for the lease duration.
#[tokio::test]
async fn a_released_lease_is_acquired_at_once() {
    let store = Arc::new(Mutex::new(Store::default()));
    let start = |name: &str| {
        let (leader, leadership) = channel(boot_time);
        let (stop, stopped) = tokio::sync::watch::channel(false);
        let timing = Timing {
            duration: Duration::from_secs(3600),
            renew_deadline: Duration::from_secs(1800),
            retry: Duration::from_millis(20),
        };
        let (client, namespace, identity) = (client(&store), "default".into(), name.into());
        let policies = no_policy_report();
        let candidate = Candidate {
            client,
            namespace,
            identity,
            timing,
            clock: boot_time,
            server: Arc::default(),
            memory: named_memory(""),
            policies,
        };
        (leadership, stop, tokio::spawn(candidate.run(leader, stopped)))
    };
    let until_leads = async |leadership: &mut Leadership| {
        let changed = async {
            while !leadership.is_held() {
                leadership.changed().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), changed).await.expect("leads within 30 s");
    };
    let (mut first, stop_first, first_task) = start("first");
    until_leads(&mut first).await;
    let (mut second, stop_second, second_task) = start("second");
    assert!(!second.is_held());
    stop_first.send_replace(true);
    first_task.await.unwrap();
    assert!(!first.is_held());
    until_leads(&mut second).await;
    assert_eq!(store.lock().unwrap().lease.as_ref().unwrap()["spec"]["leaseTransitions"], 2);
    stop_second.send_replace(true);
    second_task.await.unwrap();
    assert_eq!(store.lock().unwrap().lease.as_ref().unwrap()["spec"]["holderIdentity"], "");
}
