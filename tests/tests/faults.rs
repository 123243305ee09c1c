//! The fault layer: whichever component dies and whichever message is lost, at any moment, a job
//! must end as in a run without faults.
//!
//! The controller under test is the real program behind a proxy. Counts and seeds are printed;
//! `cargo xtask chaos` runs the full set. Each row has a mutant that it must catch.

mod kills;
mod leaders;
mod mutants;
mod overlaps;
mod points;
mod random;
mod views;
mod zombies;

use anyhow::{Context, Result, ensure};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use serde_json::Value;
use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};
use switchyard_tests::faults::{Lane, Plan, Scenario};
use switchyard_tests::{ControlPlane, ControllerOptions, Kubelet, KubeletOptions};
use tokio::sync::OnceCell;

/// A run without faults.
struct Quiet {
    state: Value,
    /// Writes up to the final state.
    writes: u64,
    calls: u64,
}

type Base = HashMap<Scenario, Quiet>;

/// Starts nodes for many small jobs.
async fn kubelet(prefix: &str) -> Result<Kubelet> {
    let mut options = KubeletOptions::new(prefix, 8);
    options.capacity =
        [("cpu", "1000"), ("memory", "1000Gi"), ("pods", "1000")].map(|(a, b)| (a.into(), b.into())).into();
    Kubelet::start(ControlPlane::shared().config().await?, options).await
}

async fn lane<'a>(kubelet: &'a Kubelet, name: &str) -> Result<Lane<'a>> {
    Lane::new(ControlPlane::shared(), kubelet, name, ControllerOptions::default()).await
}

/// Runs every scenario once without faults, shared by all tests.
async fn base() -> Result<&'static Base> {
    static BASE: OnceCell<Base> = OnceCell::const_new();
    BASE.get_or_try_init(async || {
        let kubelet = kubelet("base").await?;
        let lanes = lanes(&kubelet, "base", 4).await?;
        let played = on_lanes(lanes, Scenario::ALL.to_vec(), async |lane, number, scenario| {
            let (name, before) = (format!("b{number}"), lane.proxy.calls());
            lane.play(scenario, &name, Plan::Quiet).await.with_context(|| format!("{scenario:?}"))?;
            let state = lane.settled_state(&name).await?;
            let writes = lane.proxy.writes();
            lane.clean_up(&name).await?;
            Ok((scenario, Quiet { state, writes, calls: lane.proxy.calls() - before }))
        });
        Ok(played.await?.into_iter().collect())
    })
    .await
}

/// Distributes items over several lanes. Each free lane takes the next item and uses its number as
/// a unique name.
async fn on_lanes<I: Send, T>(
    lanes: Vec<Lane<'_>>,
    items: Vec<I>,
    play: impl AsyncFn(&mut Lane<'_>, usize, I) -> Result<T>,
) -> Result<Vec<T>> {
    let queue = Mutex::new(items.into_iter().enumerate().collect::<VecDeque<_>>());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    let work = async |mut lane: Lane<'_>| -> Result<Vec<T>> {
        let mut done = Vec::new();
        while let Some((number, item)) = next() {
            done.push(play(&mut lane, number, item).await?);
        }
        ensure!(lane.panics() == 0, "the controller panicked");
        Ok(done)
    };
    let mut running: FuturesUnordered<_> = lanes.into_iter().map(work).collect();
    let mut done = Vec::new();
    while let Some(result) = running.next().await {
        done.extend(result?);
    }
    Ok(done)
}

/// Starts `count` lanes: as many as keep two cores busy, or more where runs mostly wait.
async fn lanes<'a>(kubelet: &'a Kubelet, prefix: &str, count: usize) -> Result<Vec<Lane<'a>>> {
    let mut lanes = Vec::new();
    for number in 0..count {
        lanes.push(lane(kubelet, &format!("{prefix}-{number}")).await?);
    }
    Ok(lanes)
}
