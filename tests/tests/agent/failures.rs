//! Failures around an agent: the API server is unreachable, a scan hangs, the driver is gone, or
//! the node is deleted.

use super::*;
use switchyard_tests::{Cable, until_async};

#[tokio::test(flavor = "multi_thread")]
async fn after_an_outage_the_latest_facts_are_written_once() -> Result<()> {
    let scene = Scene::new("agent-outage").await?;
    let mut cable = Cable::new(scene.plane).await?;
    let options = AgentOptions { server: Some(cable.url()), ..AgentOptions::default() };
    let mut agent = Agent::start(scene.plane, scene.node, &scene.host, &options)?;
    scene.kernel("1.0.0").await?;

    cable.cut().await;
    // The last change arrives during a backoff.
    for (release, seconds) in [("2.0.0", 2), ("3.0.0", 4), ("4.0.0", 2)] {
        scene.host.set_kernel(release)?;
        tokio::time::sleep(Duration::from_secs(seconds)).await;
    }
    agent.daemon.ensure_running()?;
    assert_eq!(kernel(&scene.api().get(scene.node).await?), Some("1.0.0"), "the cable was not cut");
    let ready = agent.page("/readyz");
    assert!(ready.starts_with("HTTP/1.1 503") && ready.contains("the report is not written"), "{ready}");
    assert!(agent.page("/healthz").starts_with("HTTP/1.1 200"), "an outage is no reason to restart the agent");
    let failures = agent.metric("switchyard_agent_write_failures_total{reason=\"unreachable\"}")
        + agent.metric("switchyard_agent_write_failures_total{reason=\"timeout\"}");
    assert!((1.0..=8.0).contains(&failures), "{failures} tries in 8 s");

    cable.mend().await?;
    scene.kernel("4.0.0").await?;
    assert_eq!(scene.writes().await, 2, "what was true in between is never written");
    until("ready", || agent.page("/readyz").ends_with("ok\n")).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hanging_scan_is_reported_and_the_facts_stay() -> Result<()> {
    let scene = Scene::new("agent-hang").await?;
    let mut agent = scene.agent(&["--scan-timeout-seconds", "1"])?;
    let healthy = scene.kernel("1.0.0").await?;
    let facts = |report: &GPUTopology| {
        let mut status = report.status.clone().unwrap_or_default();
        status.conditions.clear();
        status
    };

    scene.host.hang()?;
    let hangs = |report: &GPUTopology| condition(report, "Reported") == "Reported=False ScanHangs";
    let hanging = scene.report("reported as hanging", hangs).await?;
    assert_eq!(condition(&hanging, "Fresh"), "Fresh=False ScanHangs");
    assert_eq!(facts(&hanging), facts(&healthy), "the last facts stay");
    let health = agent.page("/healthz");
    assert!(health.starts_with("HTTP/1.1 500") && health.ends_with("a scan of the machine hangs\n"), "{health}");
    let writes = scene.writes().await;
    // Several timeouts of the scan.
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(scene.writes().await, writes, "a scan that still hangs is not reported again");

    // A new process hangs too, and keeps the data of the previous one.
    agent.daemon.signal(Signal::TERM);
    assert_eq!(agent.daemon.wait(TIMEOUT), Some(0), "a hanging thread does not delay the exit");
    let agent = scene.agent(&["--scan-timeout-seconds", "1"])?;
    let unchanged =
        scene.report("reported by the new one", |report| condition(report, "Consistent").contains("Unknown")).await?;
    assert_eq!(facts(&unchanged), facts(&healthy));
    assert_eq!(transition(&unchanged, "Reported"), transition(&hanging, "Reported"), "it was False before");

    scene.host.release("2.0.0")?;
    let healed = scene.kernel("2.0.0").await?;
    assert_eq!(condition(&healed, "Reported"), "Reported=True Complete");
    assert_eq!(condition(&healed, "Fresh"), "Fresh=True Current");
    assert!(transition(&healed, "Fresh") >= transition(&hanging, "Fresh"));
    until("healthy", || agent.page("/healthz").starts_with("HTTP/1.1 200")).await?;
    Ok(())
}

/// Two GPUs, then a missing driver, then the GPUs again.
#[tokio::test(flavor = "multi_thread")]
async fn a_missing_driver_does_not_mean_no_gpus() -> Result<()> {
    let scene = Scene::new("agent-driver").await?;
    for bus_id in ["0000:1b:00.0", "0000:43:00.0"] {
        scene.host.add_gpu(bus_id)?;
    }
    scene.host.install_driver()?;
    let agent = scene.agent(&[])?;
    let counts = |report: &GPUTopology| report.status.as_ref().map(|status| (status.gpu_count, status.gpus.len()));
    let report = scene.report("with GPUs", |report| counts(report) == Some((Some(2), 2))).await?;
    assert_eq!(condition(&report, "Consistent"), "Consistent=False Contradiction");
    let message_of = |report: &GPUTopology, kind: &str| {
        let mut conditions = report.status.iter().flat_map(|status| &status.conditions);
        conditions
            .find(|condition| condition.type_ == kind)
            .map(|condition| condition.message.clone())
            .unwrap_or_default()
    };
    assert_eq!(
        message_of(&report, "Consistent"),
        "links[0000:1b:00.0 to 0000:43:00.0].count: got 2 active NVLinks there and 1 back; expected the same number both ways"
    );
    until("reporting both events", || agent.metric("switchyard_agent_gpu_events_total") == 2.0).await?;
    let errors = "switchyard_agent_gpu_nvlink_errors_total{gpu=\"0000:1b:00.0\",kind=\"crc_data\"}";
    assert_eq!(agent.metric(errors), 61.0);

    scene.host.remove_driver()?;
    let failed = |report: &GPUTopology| condition(report, "Reported") == "Reported=False SourceUnavailable";
    let report = scene.report("without a driver", failed).await?;
    assert_eq!(counts(&report), Some((None, 0)), "unknown is absent");
    assert_eq!(condition(&report, "Fresh"), "Fresh=True Current");
    let message = message_of(&report, "Reported");
    assert!(message.contains("2 NVIDIA GPUs on the PCI bus, but NVML does not work"), "{message}");

    scene.host.install_driver()?;
    scene.report("with GPUs again", |report| counts(report) == Some((Some(2), 2))).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_report_follows_the_lifetime_of_its_node() -> Result<()> {
    let scene = Scene::new("agent-node").await?;
    let agent = scene.agent(&["--renew-seconds", "2"])?;
    let first = scene.kernel("1.0.0").await?;
    Api::<Node>::all(scene.client.clone()).delete(scene.node, &Default::default()).await?;
    // By the garbage collector.
    until_async("deleted", TIMEOUT, async || Ok(scene.api().get_opt(scene.node).await?.is_none())).await?;
    let failures = || agent.metric("switchyard_agent_write_failures_total{reason=\"no_node\"}");
    until("noticed by the agent", || failures() > 0.0).await?;
    assert!(scene.api().get_opt(scene.node).await?.is_none(), "a report was created for a deleted node");

    let node = scene.make_node().await?;
    let second = scene.kernel("1.0.0").await?;
    assert_ne!(second.uid(), first.uid());
    assert_eq!(second.owner_references().first().map(|owner| owner.uid.clone()), node.uid());
    Ok(())
}

/// Kills the agent at any time between its start and its first idle minute, with a change before
/// each start.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_agent_leaves_nothing_half_done() -> Result<()> {
    let scene = Scene::new("agent-killed").await?;
    const KILLS: u64 = 12;
    for kill in 0..KILLS {
        scene.host.set_kernel(&format!("{kill}.0.0"))?;
        let mut agent = scene.agent(&[])?;
        // A first report takes about 100 ms, or seconds on a loaded machine.
        tokio::time::sleep(Duration::from_millis(kill * kill * 10)).await;
        if kill == KILLS / 2 {
            scene.kernel(&format!("{kill}.0.0")).await?;
        }
        agent.daemon.kill();
    }
    // A write in flight either reaches the server or is lost.
    let writes = scene.writes().await;
    let seen = scene.api().get_opt(scene.node).await?;
    let reported = seen.as_ref().and_then(kernel).map(str::to_owned);
    assert!(writes > 0 && (writes as u64) < KILLS, "{writes} of {KILLS} agents reported, the first killed at once");
    let _agent = scene.agent(&[])?;
    let last = scene.kernel(&format!("{}.0.0", KILLS - 1)).await?;
    assert_eq!(last.owner_references().len(), 1);
    assert_eq!(condition(&last, "Reported"), "Reported=True Complete");
    let again = usize::from(reported != kernel(&last).map(str::to_owned));
    assert_eq!(scene.writes().await, writes + again, "what was written before is not written again");
    Ok(())
}
