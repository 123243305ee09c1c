//! The fault layer: whatever dies or gets lost at whatever moment, a job ends as if nothing had happened.
//!
//! The controller under test is the real program behind a proxy. Counts and seeds are printed; `cargo xtask chaos` runs the long
//! ones in full.

#![allow(missing_docs, clippy::unwrap_used)]

use anyhow::{Context, Result, ensure};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use serde_json::Value;
use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;
use switchyard_tests::chaos::{self, report, size};
use switchyard_tests::faults::{Fault, Lane, Plan, Point, Scenario, Weather};
use switchyard_tests::{ControlPlane, ControllerOptions, Jobs, Kubelet, KubeletOptions, Options};

/// Lanes at a time: two cores are busy with four.
const LANES: usize = 4;

async fn kubelet(prefix: &str) -> Result<Kubelet> {
    let mut options = KubeletOptions::new(prefix, 8);
    options.capacity =
        [("cpu", "1000"), ("memory", "1000Gi"), ("pods", "1000")].map(|(a, b)| (a.into(), b.into())).into();
    Kubelet::start(ControlPlane::shared().config().await?, options).await
}

/// The final state of every scenario without faults, and the number of writes up to it.
async fn baselines(lane: &mut Lane<'_>) -> Result<HashMap<Scenario, (Value, u64)>> {
    let mut found = HashMap::new();
    for scenario in Scenario::ALL {
        lane.play(scenario, "base", Plan::Quiet).await.with_context(|| format!("{scenario:?}"))?;
        let state = lane.settled("base").await?;
        found.insert(scenario, (state, lane.proxy.writes()));
        lane.clear("base").await?;
    }
    Ok(found)
}

/// Plays all points on several lanes. Answers how many faults came about.
async fn play_all(
    kubelet: &Kubelet,
    prefix: &str,
    points: Vec<Point>,
    base: &HashMap<Scenario, (Value, u64)>,
) -> Result<usize> {
    let queue = Mutex::new(points.into_iter().enumerate().collect::<VecDeque<_>>());
    let work = async |lane: usize| -> Result<usize> {
        let mut lane = Lane::new(ControlPlane::shared(), kubelet, &format!("{prefix}-{lane}"), &[]).await?;
        let mut came = 0;
        loop {
            let Some((number, point)) = queue.lock().unwrap().pop_front() else { break };
            came += usize::from(lane.point(&point, &format!("p{number}"), &base[&point.scenario].0).await?);
        }
        ensure!(lane.panics() == 0, "the controller panicked");
        Ok(came)
    };
    let mut lanes: FuturesUnordered<_> = (0..LANES).map(work).collect();
    let mut came = 0;
    while let Some(result) = lanes.next().await {
        came += result?;
    }
    Ok(came)
}

fn points(base: &HashMap<Scenario, (Value, u64)>, faults: &[Fault]) -> Vec<Point> {
    let mut points = Vec::new();
    for scenario in Scenario::ALL {
        for write in 1..=base[&scenario].1 {
            points.extend(faults.iter().map(|fault| Point { scenario, write, fault: fault.clone() }));
        }
    }
    points
}

/// G1: the controller dies before and after each of its writes, in eight scenarios.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crash_points_have_the_same_final_state() -> Result<()> {
    let kubelet = kubelet("crash").await?;
    let mut first = Lane::new(ControlPlane::shared(), &kubelet, "crash-base", &[]).await?;
    let base = baselines(&mut first).await?;
    drop(first);
    let points = points(&base, &[Fault::KillBefore, Fault::KillAfter]);
    let count = points.len();
    let came = play_all(&kubelet, "crash", points, &base).await?;
    report("g1-crash-points", &serde_json::json!({"points": count, "reached": came, "violations": 0}))?;
    ensure!(came >= 400, "{came} crash points were reached; 400 are wanted");
    Ok(())
}

/// G2: a write is done, and its answer is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_replies_have_no_double_effect() -> Result<()> {
    let kubelet = kubelet("reply").await?;
    let mut first = Lane::new(ControlPlane::shared(), &kubelet, "reply-base", &[]).await?;
    let base = baselines(&mut first).await?;
    drop(first);
    let points = points(&base, &[Fault::DropReply]);
    let count = points.len();
    let came = play_all(&kubelet, "reply", points, &base).await?;
    report("g2-lost-replies", &serde_json::json!({"points": count, "reached": came, "violations": 0}))?;
    ensure!(came >= 200, "{came} replies were lost; 200 are wanted");
    Ok(())
}

/// G3: what the controller sees is old, or missing until the next list.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stale_views_change_nothing() -> Result<()> {
    let kubelet = kubelet("stale").await?;
    let mut lane = Lane::new(ControlPlane::shared(), &kubelet, "stale", &[]).await?;
    let base = baselines(&mut lane).await?;
    let views = [(100, 0), (1000, 0), (0, 5), (100, 3), (0, 2)];
    let mut plans = 0;
    for round in 0..size(1, 3) {
        for (delay, cut) in views {
            lane.proxy.set_events(std::time::Duration::from_millis(delay), cut);
            // The watches that there are were begun before: the controller that is started now has others.
            lane.start_again()?;
            for scenario in Scenario::ALL {
                let name = format!("s{round}-{plans}");
                let played = lane.play(scenario, &name, Plan::Quiet).await;
                played.with_context(|| format!("{scenario:?} with events {delay} ms late, every {cut}th lost"))?;
                lane.must_become(&name, &base[&scenario].0)
                    .await
                    .with_context(|| format!("{scenario:?} {delay} {cut}"))?;
                lane.clear(&name).await?;
                plans += 1;
            }
        }
    }
    ensure!(lane.proxy.cuts() > 0, "no watch was cut");
    ensure!(lane.panics() == 0, "the controller panicked");
    report("g3-stale-views", &serde_json::json!({"plans": plans, "watchesCut": lane.proxy.cuts(), "violations": 0}))
}

/// G4, first half: calls fail in a sequence that the seed decides.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn api_weather_leaves_nothing_stuck() -> Result<()> {
    let seed = chaos::seed().unwrap_or(20261121);
    let kubelet = kubelet("weather").await?;
    let mut lane = Lane::new(ControlPlane::shared(), &kubelet, "weather", &[]).await?;
    let base = baselines(&mut lane).await?;
    let (quiet, wanted) = (lane.proxy.calls(), size(150, 10_000) as u64);
    let mut plays = 0_u64;
    while lane.proxy.faults() < wanted {
        for scenario in Scenario::ALL {
            let name = format!("w{plays}");
            let weather = Plan::Weather(Weather::new(seed + plays, 150));
            lane.play(scenario, &name, weather)
                .await
                .with_context(|| format!("seed {seed}, play {plays}, {scenario:?}"))?;
            lane.must_become(&name, &base[&scenario].0).await.with_context(|| format!("seed {seed}, play {plays}"))?;
            lane.clear(&name).await?;
            plays += 1;
        }
    }
    ensure!(lane.panics() == 0, "the controller panicked");
    let calls = (lane.proxy.calls() - quiet) as f64 / plays as f64;
    let quiet = quiet as f64 / Scenario::ALL.len() as f64;
    ensure!(calls <= 3.0 * quiet, "{calls:.0} calls per play; {quiet:.0} without faults");
    report(
        "g4-api-weather",
        &serde_json::json!({
            "seed": seed, "plays": plays, "faults": lane.proxy.faults(), "callsPerPlay": calls, "callsPerQuietPlay": quiet, "stuck": 0, "panics": 0,
        }),
    )
}

/// G5: two controllers that both believe they lead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_controllers_at_once_decide_nothing_twice() -> Result<()> {
    let kubelet = kubelet("two").await?;
    let mut lane = Lane::new(ControlPlane::shared(), &kubelet, "two", &[]).await?;
    let base = baselines(&mut lane).await?;
    // The second one goes straight to the API server.
    let options = ControllerOptions { namespace: Some(lane.jobs.namespace.clone()), ..ControllerOptions::default() };
    let second = switchyard_tests::start_controller(ControlPlane::shared(), "two-second", &options)?;
    let (mut plays, mut pauses) = (0, 0);
    for round in 0..size(1, 13) {
        for scenario in Scenario::ALL {
            let name = format!("t{round}-{plays}");
            // Stopped in the middle of the play, and let go while the other one works.
            let pause = async {
                tokio::time::sleep(std::time::Duration::from_millis(60 + 40 * (plays % 5))).await;
                second.signal(rustix::process::Signal::STOP);
                tokio::time::sleep(std::time::Duration::from_millis(400)).await;
                second.signal(rustix::process::Signal::CONT);
            };
            let (played, ()) = tokio::join!(lane.play(scenario, &name, Plan::Quiet), pause);
            played.with_context(|| format!("{scenario:?}"))?;
            lane.must_become(&name, &base[&scenario].0).await.with_context(|| format!("{scenario:?}"))?;
            lane.clear(&name).await?;
            (plays, pauses) = (plays + 1, pauses + 1);
        }
    }
    report("g5-two-controllers", &serde_json::json!({"plays": plays, "pauses": pauses, "doubleRuns": 0}))
}

/// G6: the pods of a lost node go on; the next attempt does not wait for them, and they end when the node is back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn zombies_hold_nothing_up() -> Result<()> {
    let kubelet = kubelet("zombie").await?;
    let mut lane = Lane::new(ControlPlane::shared(), &kubelet, "zombie", &[]).await?;
    let wanted = size(3, 50);
    for number in 0..wanted {
        let name = format!("z{number}");
        let mut job = switchyard_tests::plain_job(&name, 2, "run");
        let spec = switchyard_tests::template_on(&kubelet.nodes())["spec"].take();
        job["spec"]["template"]["spec"] = spec;
        lane.jobs.create(job).await?;
        let first = lane.jobs.wait_stage(&name, "Running").await?;
        let node = first.status.unwrap().placement.unwrap().nodes[1].node_name.clone();
        kubelet.lose_node(&node).await?;
        let second = lane.jobs.wait(&name, "running in attempt 2", |job| {
            switchyard_tests::stage_of(job) == Some("Running")
                && job.status.as_ref().is_some_and(|s| s.attempt == Some(2))
        });
        let status = second.await?.status.unwrap();
        ensure!(status.restarts.as_ref().is_some_and(|restarts| restarts.infrastructure == 1), "{:?}", status.restarts);
        ensure!(
            status.placement.is_some_and(|p| p.nodes.iter().all(|n| n.node_name != node)),
            "placed on the lost node"
        );
        let zombies = lane.jobs.pods().await?;
        let zombie = format!("{name}-1-1");
        ensure!(zombies.iter().any(|pod| pod.metadata.name.as_ref() == Some(&zombie)), "the zombie is gone already");
        kubelet.recover_node(&node).await?;
        lane.jobs
            .wait_pods("without the zombie", |pods| pods.iter().all(|pod| pod.metadata.name.as_ref() != Some(&zombie)))
            .await?;
        lane.clear(&name).await?;
    }
    report("g6-zombies", &serde_json::json!({"zombies": wanted, "doubleRuns": 0}))
}

/// G4, second half: API server and etcd are killed while a job starts, and come back with what was written.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_api_server_and_etcd_are_killed() -> Result<()> {
    let options = Options { scheduler: true, fsync: true, ..Options::default() };
    let mut plane = ControlPlane::start(&options)?;
    plane.install_crds().await?;
    let mut nodes = KubeletOptions::new("killed", 4);
    nodes.capacity = [("cpu", "100"), ("memory", "100Gi"), ("pods", "100")].map(|(a, b)| (a.into(), b.into())).into();
    let kubelet = Kubelet::start(plane.config().await?, nodes).await?;
    let namespace = plane.namespace("killed").await?;
    let account = serde_json::json!({"metadata": {"name": "default"}});
    let accounts =
        kube::Api::<k8s_openapi::api::core::v1::ServiceAccount>::namespaced(plane.client().await?, &namespace);
    accounts.create(&Default::default(), &serde_json::from_value(account)?).await?;
    let own = ControllerOptions { namespace: Some(namespace.clone()), ..ControllerOptions::default() };
    let mut controller = switchyard_tests::start_controller(&plane, "controller", &own)?;
    let jobs = Jobs::new(plane.client().await?, &namespace);
    let kills = size(2, 20);
    for kill in 0..kills {
        let name = format!("k{kill}");
        jobs.create(switchyard_tests::plain_job(&name, 4, "run")).await?;
        // At another moment of its start each time.
        tokio::time::sleep(std::time::Duration::from_millis(37 * kill as u64 % 400)).await;
        plane.restart_all()?;
        jobs.wait_stage(&name, "Running").await?;
        for rank in 0..4 {
            kubelet.order(
                &namespace,
                &format!("{name}-1-{rank}"),
                switchyard_tests::Command::Exit(0, String::new()),
            )?;
        }
        let done = jobs.wait_stage(&name, "Complete").await?;
        let status = done.status.unwrap();
        ensure!(
            status.attempt == Some(1) && status.restarts.is_some_and(|r| r.total == 0),
            "an attempt was lost: {:?}",
            status.attempt
        );
        controller.must_run()?;
    }
    report("g4-kills", &serde_json::json!({"kills": kills, "stuck": 0}))
}
