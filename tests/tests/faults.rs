//! The fault layer: whatever dies or gets lost at whatever moment, a job ends as if nothing had happened.
//!
//! The controller under test is the real program behind a proxy. Every point prints what it is when it fails, and can be run
//! alone: `SWITCHYARD_POINT='Restart 7 KillAfter' cargo test -p switchyard-tests --test faults one_point`.

#![allow(missing_docs, clippy::unwrap_used)]

use anyhow::{Context, Result, ensure};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use serde_json::Value;
use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;
use switchyard_tests::faults::{Fault, Lane, Plan, Point, Scenario};
use switchyard_tests::{ControlPlane, Kubelet, KubeletOptions};

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
        let state = lane.play(scenario, "base", Plan::Quiet).await.with_context(|| format!("{scenario:?}"))?;
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
    println!("G1 crash points: {count} points, {came} reached, 0 violations");
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
    println!("G2 lost replies: {count} points, {came} reached, 0 violations");
    ensure!(came >= 200, "{came} replies were lost; 200 are wanted");
    Ok(())
}
