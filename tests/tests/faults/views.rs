//! G3: the controller's view is stale, or lacks events until the next list.

use super::{base, kubelet, lane, lanes, on_lanes};
use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::Binding;
use kube::api::PostParams;
use serde_json::{Value, json};
use std::time::Duration;
use switchyard_tests::faults::{Plan, Scenario};
use switchyard_tests::{TIMEOUT, chaos, condition_of, plain_job, template_on, until_async};

/// Event delay in milliseconds, and loss rate: one event in this many is lost together with its
/// watch (0: none).
pub const VIEWS: [(u64, u64); 5] = [(100, 0), (1000, 0), (0, 5), (100, 3), (0, 2)];
/// Additional views of the full set, for the scenarios without timeouts, because with these delays
/// a timeout can expire legitimately.
const VERY_LATE: [(u64, u64); 2] = [(5_000, 0), (30_000, 0)];
const WITHOUT_TIMEOUT: [Scenario; 4] = [Scenario::Create, Scenario::Finish, Scenario::Restart, Scenario::Delete];

/// The scenarios of a view, by controller. A controller whose watches are cut receives events one
/// at a time, so several share them.
fn share((delay, cut): (u64, u64)) -> std::slice::Chunks<'static, Scenario> {
    let scenarios = if delay < 5_000 { &Scenario::ALL[..] } else { &WITHOUT_TIMEOUT };
    scenarios.chunks(if cut > 0 { 3 } else { scenarios.len() })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stale_views_change_nothing() -> Result<()> {
    let kubelet = kubelet("stale").await?;
    // The longest first, because the lanes run concurrently.
    let very_late = VERY_LATE.into_iter().rev().take(chaos::size(0, VERY_LATE.len()));
    let views = very_late.chain((0..chaos::size(1, 3)).flat_map(|_| VIEWS));
    let shares: Vec<_> = views.flat_map(|view| share(view).map(move |scenarios| (view, scenarios))).collect();
    let lanes = lanes(&kubelet, "stale", chaos::size(shares.len(), 2 + VERY_LATE.len())).await?;
    let played = on_lanes(lanes, shares, async |lane, number, ((delay, cut), scenarios)| {
        // Losing half of the events means one new watch per event.
        lane.timeout = 4 * TIMEOUT + 6 * Duration::from_millis(delay);
        lane.proxy.set_events(Duration::from_millis(delay), cut);
        let before = lane.proxy.cuts();
        // The existing watches predate this setting. A restarted controller opens new ones.
        lane.restart()?;
        // Without faults that end the controller, its jobs can run concurrently.
        let lane = &*lane;
        let runs = scenarios.iter().copied().map(async |scenario| {
            let name = format!("s{number}-{}", scenario as u8);
            let ended = match lane.play(scenario, &name, Plan::Quiet).await {
                Ok(()) => lane.expect_state(&name, &base().await?[&scenario].state).await,
                Err(error) => Err(error),
            };
            ended.with_context(|| format!("{scenario:?} with events {delay} ms late, one in {cut} lost"))?;
            lane.clean_up(&name).await
        });
        try_join_all(runs).await?;
        Ok((scenarios.len(), lane.proxy.cuts() - before))
    });
    // The runs need the states without faults only at their end.
    let (played, _) = tokio::try_join!(played, base())?;
    let (plans, cut) = played.iter().fold((0, 0), |(plans, cut), (more, cuts)| (plans + more, cut + cuts));
    ensure!(cut > 0, "no watch was cut");
    chaos::report("g3-stale-views", &json!({"plans": plans, "watchesCut": cut, "violations": 0}))
}

/// Regression: with a late pod watch, the controller rolled back gangs that the scheduler had
/// bound, because it did not query the API server first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gang_bound_behind_a_stale_view_is_not_rolled_back() -> Result<()> {
    let kubelet = kubelet("unseen").await?;
    let lane = lane(&kubelet, "unseen").await?;
    let mut job = plain_job("a", 2, "run");
    job["spec"]["template"]["spec"] = template_on(&kubelet.nodes())["spec"].take();
    job["spec"]["template"]["spec"]["schedulerName"] = json!("by-hand");
    lane.jobs.create(job).await?;
    // Reported ten seconds after the placement, and rolled back after sixty.
    let reported = lane.jobs.wait("a", "reported", |job| {
        condition_of(job, "Succeeded").is_some_and(|stage| stage.message.contains("no scheduler has reported on it"))
    });
    let placed = reported.await?.status.and_then(|status| status.placement).context("no placement")?.nodes;
    lane.proxy.hold_pods(true);
    for (rank, node) in placed.iter().enumerate() {
        let pod = format!("a-1-{rank}");
        let target = json!({"apiVersion": "v1", "kind": "Node", "name": node.node_name});
        let binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target});
        let binding: Binding = serde_json::from_value(binding)?;
        let _: Value =
            lane.jobs.pods_api().create_subresource("binding", &pod, &PostParams::default(), &binding).await?;
    }
    let request = format!("GET /api/v1/namespaces/{}/pods/a-1-0", lane.jobs.namespace);
    until_async("requested", TIMEOUT, async || Ok(lane.proxy.log().contains(&request)))
        .await
        .with_context(|| format!("{:#?}", lane.proxy.log()))?;
    lane.proxy.hold_pods(false);
    let runs = lane.jobs.wait_stage("a", "Running").await?;
    ensure!(runs.status.and_then(|status| status.attempt) == Some(1), "it was rolled back");
    Ok(())
}
