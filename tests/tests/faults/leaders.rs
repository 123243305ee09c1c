//! G5: two controllers that both believe they lead, and leaders that are paused for longer than
//! their Lease.

use super::{Base, base, kubelet, on_lanes};
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use std::time::{Duration, Instant};
use switchyard_tests::faults::{Lane, Plan, Scenario};
use switchyard_tests::{
    ControlPlane, ControllerOptions, Daemon, Kubelet, TIMEOUT, chaos, start_controller, until_async,
};

/// Lease duration in seconds for these tests; the default is 15.
const LEASE: u64 = 4;

/// The second controller of a lane bypasses the proxy.
fn second(lane: &Lane<'_>, arguments: &[&str]) -> Result<Daemon> {
    let namespace = lane.jobs.namespace.clone();
    let options = ControllerOptions {
        arguments: arguments.iter().map(ToString::to_string).collect(),
        environment: vec![("POD_NAMESPACE", namespace.clone()), ("POD_NAME", "second".into())],
        namespace: Some(namespace.clone()),
        ..ControllerOptions::default()
    };
    start_controller(ControlPlane::shared(), &format!("{namespace}-second"), &options)
}

async fn two_lanes<'a>(
    kubelet: &'a Kubelet,
    prefix: &str,
    count: usize,
    arguments: &[&str],
) -> Result<(Vec<Lane<'a>>, Vec<(String, Daemon)>)> {
    let (mut lanes, mut seconds) = (Vec::new(), Vec::new());
    for number in 0..count {
        let own = arguments.iter().map(ToString::to_string).collect();
        let options = ControllerOptions { arguments: own, ..ControllerOptions::default() };
        let lane = Lane::new(ControlPlane::shared(), kubelet, &format!("{prefix}-{number}"), options).await?;
        seconds.push((lane.jobs.namespace.clone(), second(&lane, arguments)?));
        lanes.push(lane);
    }
    Ok((lanes, seconds))
}

fn second_of<'a>(seconds: &'a [(String, Daemon)], lane: &Lane<'_>) -> Result<&'a Daemon> {
    let found = seconds.iter().find(|(namespace, _)| *namespace == lane.jobs.namespace);
    found.map(|(_, daemon)| daemon).context("the lane has no second controller")
}

async fn check(lane: &mut Lane<'_>, scenario: Scenario, name: &str, base: &Base) -> Result<()> {
    lane.expect_state(name, &base[&scenario].state).await.with_context(|| format!("{scenario:?}"))?;
    lane.clean_up(name).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_controllers_at_once_decide_nothing_twice() -> Result<()> {
    let kubelet = kubelet("two").await?;
    let base = base().await?;
    let (lanes, seconds) = two_lanes(&kubelet, "two", 4, &[]).await?;
    let plays: Vec<Scenario> = (0..chaos::size(2, 13)).flat_map(|_| Scenario::ALL).collect();
    let played = on_lanes(lanes, plays, async |lane, number, scenario| {
        let (name, second) = (format!("t{number}"), second_of(&seconds, lane)?);
        // Pause the leader in the middle of the run, and resume it while the other controller is
        // working.
        let pause = async {
            tokio::time::sleep(Duration::from_millis(60 + 40 * (number as u64 % 5))).await;
            second.signal(Signal::STOP);
            tokio::time::sleep(Duration::from_millis(400)).await;
            second.signal(Signal::CONT);
        };
        let (played, ()) = tokio::join!(lane.play(scenario, &name, Plan::Quiet), pause);
        played.with_context(|| format!("{scenario:?}"))?;
        check(lane, scenario, &name, base).await
    });
    let plays = played.await?.len();
    chaos::report("g5-two-controllers", &json!({"plays": plays, "pauses": plays, "doubleRuns": 0}))
}

/// Current holder of the lane's Lease.
async fn holder(lane: &Api<Lease>) -> String {
    let lease = lane.get_opt("switchyard-controller").await.ok().flatten();
    lease.and_then(|lease| lease.spec?.holder_identity).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_leader_is_replaced_and_does_nothing_when_it_wakes() -> Result<()> {
    let kubelet = kubelet("leader").await?;
    let base = base().await?;
    let duration = format!("--lease-duration-seconds={LEASE}");
    let arguments = ["--leader-elect", "Enabled", &duration, "--renew-deadline-seconds=2", "--retry-period-seconds=1"];
    let (lanes, seconds) = two_lanes(&kubelet, "leader", 8, &arguments).await?;
    let plays: Vec<Scenario> = (0..chaos::size(1, 13)).flat_map(|_| Scenario::ALL).collect();
    let played = on_lanes(lanes, plays, async |lane, number, scenario| {
        let name = format!("l{number}");
        let leases = Api::<Lease>::namespaced(lane.jobs.client.clone(), &lane.jobs.namespace);
        let pids = [lane.pid(), second_of(&seconds, lane)?.pid()];
        let pause = async {
            tokio::time::sleep(Duration::from_millis(50 * (number as u64 % 7))).await;
            let (before, stopped) = (holder(&leases).await, Instant::now());
            let pid = pids[usize::from(before.starts_with("second-"))];
            let signal = |signal| Pid::from_raw(pid as i32).map(|pid| kill_process(pid, signal));
            signal(Signal::STOP);
            let takeover = until_async("led by the other controller", TIMEOUT, async || {
                let now = holder(&leases).await;
                Ok(!now.is_empty() && now != before)
            });
            let takeover = takeover.await;
            tokio::time::sleep(Duration::from_secs(2 * LEASE).saturating_sub(stopped.elapsed())).await;
            signal(Signal::CONT);
            takeover
        };
        let (played, takeover) = tokio::join!(lane.play(scenario, &name, Plan::Quiet), pause);
        played.with_context(|| format!("{scenario:?}"))?;
        check(lane, scenario, &name, base).await?;
        takeover
    });
    let takeovers = played.await?;
    let longest = takeovers.iter().max().copied().unwrap_or_default();
    ensure!(!longest.is_zero(), "no takeover was measured");
    chaos::report(
        "g5-leader-pauses",
        &json!({
            "pauses": takeovers.len(), "doubleRuns": 0, "leaseSeconds": LEASE, "pauseSeconds": 2 * LEASE,
            "longestTakeoverSeconds": (longest.as_secs_f64() * 100.0).round() / 100.0,
        }),
    )
}
