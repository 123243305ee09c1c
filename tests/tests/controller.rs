//! `switchyard controller` as a process: leader election, signals, HTTP pages, rights, and missing
//! dependencies.

use anyhow::{Context, Result};
use kube::ResourceExt;
use rustix::process::Signal;
use serde_json::json;
use std::net::SocketAddr;
use switchyard_crds::TrainJob;
use switchyard_tests::TIMEOUT;
use switchyard_tests::{
    ControlPlane, ControllerOptions, Daemon, Jobs, Kubelet, KubeletOptions, Options, Program, condition_of,
    http_address, merge, page, plain_job, programs, shifted_clock, start_controller, template_on,
};

fn wait_for<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> Result<T> {
    switchyard_tests::found(what, TIMEOUT, || Ok(found()))
}

/// The address in a controller's log.
fn address_of(controller: &Daemon) -> Result<SocketAddr> {
    wait_for("a log with listen=ADDRESS", || http_address(controller)).with_context(|| controller.tail())
}

fn leads(address: SocketAddr) -> Option<bool> {
    let metrics = page(address, "/metrics")?;
    Some(metrics.lines().any(|line| line == "switchyard_leader 1"))
}

fn holder(plane: &ControlPlane, namespace: &str) -> String {
    let path = "jsonpath={.spec.holderIdentity}";
    plane.kubectl(&["get", "lease", "switchyard-controller", "-n", namespace, "-o", path]).stdout
}

/// A candidate with a Lease of these seconds. Busy machines renew one of 4 s too late, and lose it
/// rightly.
fn candidate(plane: &ControlPlane, namespace: &str, name: &str, duration: &str) -> Result<(Daemon, SocketAddr)> {
    candidate_with(plane, namespace, name, [duration, "7"], Vec::new())
}

/// A candidate with these seconds of its Lease, and up to its deadline for renewing it.
fn candidate_with(
    plane: &ControlPlane,
    namespace: &str,
    name: &str,
    [duration, deadline]: [&str; 2],
    environment: Vec<(&'static str, String)>,
) -> Result<(Daemon, SocketAddr)> {
    let arguments = [
        "--leader-elect",
        "Enabled",
        "--lease-duration-seconds",
        duration,
        "--renew-deadline-seconds",
        deadline,
        "--retry-period-seconds=1",
        "--namespace",
        namespace,
        "--identity",
        name,
    ];
    let options = ControllerOptions {
        namespace: Some(namespace.into()),
        arguments: arguments.map(String::from).to_vec(),
        environment,
        ..ControllerOptions::default()
    };
    // Tests share the folder of logs, and their candidates have equal names.
    let controller = start_controller(plane, &format!("{namespace}-{name}"), &options)?;
    let address = address_of(&controller)?;
    Ok((controller, address))
}

#[tokio::test]
async fn a_stopped_leader_is_replaced_and_notices_at_once() -> Result<()> {
    let plane = ControlPlane::shared();
    let namespace = plane.namespace("leaders").await?;
    let (first, first_page) = candidate(plane, &namespace, "first", "10")?;
    wait_for("the first leads", || leads(first_page).filter(|leads| *leads))?;
    let (mut second, second_page) = candidate(plane, &namespace, "second", "10")?;
    wait_for("the second is ready", || page(second_page, "/readyz").filter(|page| page.contains("standing by")))?;

    first.signal(Signal::STOP);
    wait_for("the second leads", || leads(second_page).filter(|leads| *leads))?;
    assert!(holder(plane, &namespace).starts_with("second-"));
    first.signal(Signal::CONT);
    // No page served after the pause may claim that the first candidate still leads.
    for _ in 0..20 {
        assert!(!wait_for("the first one's page", || leads(first_page))?);
    }
    assert_eq!(leads(second_page), Some(true));

    // A leader that receives SIGTERM releases the Lease.
    second.signal(Signal::TERM);
    assert_eq!(second.wait(TIMEOUT), Some(0), "{}", second.tail());
    assert!(second.tail().contains("released the Lease"), "{}", second.tail());
    wait_for("the first leads again", || leads(first_page).filter(|leads| *leads))?;
    assert!(holder(plane, &namespace).starts_with("first-"));
    Ok(())
}

#[tokio::test]
async fn a_released_lease_is_acquired_long_before_it_expires() -> Result<()> {
    let plane = ControlPlane::shared();
    let namespace = plane.namespace("handover").await?;
    let (mut first, first_page) = candidate(plane, &namespace, "giver", "3600")?;
    wait_for("the first leads", || leads(first_page).filter(|leads| *leads))?;
    let (_second, second_page) = candidate(plane, &namespace, "taker", "3600")?;
    wait_for("the second is ready", || page(second_page, "/readyz").filter(|page| page.contains("standing by")))?;
    first.signal(Signal::INT);
    assert_eq!(first.wait(TIMEOUT), Some(130), "{}", first.tail());
    wait_for("the second leads", || leads(second_page).filter(|leads| *leads))?;
    Ok(())
}

/// A candidate whose clock jumps neither takes the Lease of a live leader nor waits longer for a
/// dead one.
#[tokio::test]
async fn clock_skew_does_not_decide_who_leads() -> Result<()> {
    let plane = ControlPlane::shared();
    let namespace = plane.namespace("clocks").await?;
    let offset = plane.folder().join("clocks.offset");
    std::fs::write(&offset, "0")?;
    let lease = |field: &str| {
        let path = format!("jsonpath={{.spec.{field}}}");
        plane.kubectl(&["get", "lease", "switchyard-controller", "-n", &namespace, "-o", &path]).stdout
    };
    let lease_times = ["10", "7"];
    // Wait longer than the Lease lasts. Its leader renews it every 0.8 to 1 s.
    let renewals = || -> Result<()> {
        for _ in 0..14 {
            let before = lease("renewTime");
            wait_for("a renewal", || (lease("renewTime") != before).then_some(()))?;
        }
        Ok(())
    };
    let (mut live, live_page) = candidate_with(plane, &namespace, "live", lease_times, Vec::new())?;
    wait_for("the first leads", || leads(live_page).filter(|leads| *leads))?;
    let (mut wrong, wrong_page) = candidate_with(plane, &namespace, "wrong", lease_times, shifted_clock(&offset))?;
    wait_for("the second is ready", || page(wrong_page, "/readyz").filter(|page| page.contains("standing by")))?;
    for seconds in ["3600", "-3600"] {
        std::fs::write(&offset, seconds)?;
        renewals()?;
        assert!(holder(plane, &namespace).starts_with("live-") && lease("leaseTransitions") == "1", "{seconds}");
    }
    live.kill();
    wait_for("the one an hour behind leads", || leads(wrong_page).filter(|leads| *leads))?;
    let skew = || {
        let page = page(wrong_page, "/metrics")?;
        page.lines().find_map(|line| line.strip_prefix("switchyard_clock_skew_seconds ")?.parse::<f64>().ok())
    };
    wait_for("the skew", || skew().filter(|skew| (-3610.0..-3590.0).contains(skew)))?;
    let annotation = "metadata.annotations.training\\.switchyard\\.dev/clock-skew-seconds";
    let noted = plane.kubectl(&[
        "get",
        "lease",
        "switchyard-controller",
        "-n",
        &namespace,
        "-o",
        &format!("jsonpath={{.{annotation}}}"),
    ]);
    assert!(noted.stdout.starts_with("-36") || noted.stdout.starts_with("-35"), "{}", noted.stdout);

    // A leader whose clock jumps keeps the Lease, and loses it when it dies.
    let (_next, next_page) = candidate_with(plane, &namespace, "next", lease_times, Vec::new())?;
    wait_for("the third is ready", || page(next_page, "/readyz").filter(|page| page.contains("standing by")))?;
    std::fs::write(&offset, "3600")?;
    renewals()?;
    assert!(holder(plane, &namespace).starts_with("wrong-") && lease("leaseTransitions") == "2");
    wrong.kill();
    wait_for("the third leads, an hour before the time in the Lease", || leads(next_page).filter(|leads| *leads))?;
    Ok(())
}

/// Regression: after each change of leader, a gang that could not start reserved its nodes for
/// another day.
#[tokio::test]
async fn the_next_leader_keeps_the_reservation_time_of_the_queue_head() -> Result<()> {
    let plane = ControlPlane::shared();
    let namespace = plane.namespace("memory").await?;
    let kubelet = Kubelet::start(plane.config().await?, KubeletOptions::new(&namespace, 2)).await?;
    let jobs = Jobs::new(plane.client().await?, &namespace);
    let create = async |name: &str, nodes: u32| {
        let mut job = plain_job(name, nodes, "run");
        let spec = json!({"template": template_on(&kubelet.nodes()), "trainer": {"resourcesPerNode": {"limits": {"cpu": "6"}}}});
        merge(&mut job["spec"], spec);
        jobs.create(job).await
    };
    let (mut first, _) = candidate(plane, &namespace, "first", "10")?;
    create("runs", 1).await?;
    jobs.wait_stage("runs", "Running").await?;
    let big = create("big", 2).await?;
    jobs.wait_stage("big", "Queued").await?;
    create("late", 1).await?;
    let is_behind =
        |job: &TrainJob| condition_of(job, "Placed").is_some_and(|c| c.message.contains("ahead in the queue"));
    jobs.wait("late", "behind the gang", is_behind).await?;
    let annotation = "jsonpath={.metadata.annotations.training\\.switchyard\\.dev/memory}";
    let memory =
        || plane.kubectl(&["get", "lease", "switchyard-controller", "-n", &namespace, "-o", annotation]).stdout;
    let uid = big.uid().context("a UID")?;
    wait_for("the reservation in the Lease", || memory().contains(&uid).then_some(()))?;
    first.kill();
    // The reservation is a day and an hour old.
    let since = jiff::Timestamp::now() - jiff::SignedDuration::from_hours(25);
    let text = json!({"holder": [uid, since]}).to_string();
    let note = json!({"metadata": {"annotations": {"training.switchyard.dev/memory": text}}}).to_string();
    let patched =
        plane.kubectl(&["patch", "lease", "switchyard-controller", "-n", &namespace, "--type=merge", "-p", &note]);
    assert_eq!(patched.code, Some(0), "{}", patched.stderr);
    let (next, _) = candidate(plane, &namespace, "next", "10")?;
    jobs.wait_stage("late", "Running").await?;
    assert!(jobs.api().get("big").await?.status.is_some_and(|status| status.placement.is_none()));
    wait_for("the rest in the Lease", || memory().contains("rests").then_some(()))
        .with_context(|| format!("{}\n{}", memory(), next.tail()))?;
    Ok(())
}

#[tokio::test]
async fn without_crds_or_api_server_it_waits_and_logs_why() -> Result<()> {
    let mut plane = ControlPlane::start(&Options::default())?;
    let mut controller = start_controller(&plane, "early", &ControllerOptions::default())?;
    let address = address_of(&controller)?;
    // The watches fail one after another, in any order.
    let missing = "cannot watch TrainJob";
    let ready = wait_for("what is missing", || page(address, "/readyz").filter(|page| page.contains(missing)))?;
    assert!(ready.starts_with("HTTP/1.1 503"), "{ready}");
    assert!(page(address, "/healthz").unwrap().starts_with("HTTP/1.1 200"));
    plane.install_crds().await?;
    wait_for("readiness", || page(address, "/readyz").filter(|page| page.starts_with("HTTP/1.1 200")))
        .with_context(|| controller.tail())?;

    plane.kill_api_server();
    let mut late = start_controller(&plane, "late", &ControllerOptions::default())?;
    let address = address_of(&late)?;
    let ready = wait_for("what is missing", || page(address, "/readyz").filter(|page| page.contains("cannot watch")))?;
    assert!(ready.starts_with("HTTP/1.1 503"), "{ready}");
    for controller in [&mut controller, &mut late] {
        controller.signal(Signal::TERM);
        assert_eq!(controller.wait(TIMEOUT), Some(0), "{}", controller.tail());
    }
    Ok(())
}

#[tokio::test]
async fn the_charts_rights_suffice_for_a_whole_job() -> Result<()> {
    let plane = ControlPlane::start(&Options { controller_manager: true, scheduler: true, ..Options::default() })?;
    plane.install_crds().await?;
    plane.apply_chart(&[])?;
    let kubeconfig = plane.controller_kubeconfig()?;

    let namespace = plane.namespace("rights").await?;
    let _kubelet = Kubelet::start(plane.config().await?, KubeletOptions::new("rights", 2)).await?;
    let arguments = ["--leader-elect", "Enabled", "--namespace", "switchyard-system"].map(String::from).to_vec();
    let options = ControllerOptions { kubeconfig: Some(kubeconfig), arguments, ..ControllerOptions::default() };
    let controller = start_controller(&plane, "rights", &options)?;
    let jobs = Jobs::new(plane.client().await?, &namespace);
    let mut job = plain_job("a", 2, "succeed-after=0.1s");
    job["spec"]["ttlSecondsAfterFinished"] = 1.into();
    jobs.create(job).await?;
    jobs.wait_gone("a").await.with_context(|| controller.tail())?;
    let log = std::fs::read_to_string(&controller.log)?;
    assert!(log.contains("Complete") && !log.contains("forbidden"), "{log}");
    Ok(())
}

#[test]
fn invalid_flags_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let run = |arguments: &[&str]| {
        let arguments = ["controller"].iter().chain(arguments);
        Program::new(&programs().join("switchyard"), folder.path(), arguments)
            .env("HOME", folder.path().to_str().unwrap())
            .env("KUBECONFIG", folder.path().join("none").to_str().unwrap())
            .run(TIMEOUT)
    };
    for (arguments, words) in [
        (&["--log-level", "loud"][..], "--log-level: got `loud`; expected"),
        (&["--listen", "here"], "--listen"),
        (&["--kubeconfig", "/no/such/file"], "--kubeconfig /no/such/file"),
        (&["--context", "none"], "--context"),
        (&["--renew-deadline-seconds", "15"], "--renew-deadline-seconds"),
        (&["--concurrent-reconciles", "0"], "--concurrent-reconciles"),
        (&[], "kubeconfig"),
    ] {
        let ended = run(arguments);
        assert_eq!(ended.code, Some(2), "{arguments:?}: {}", ended.stderr);
        assert!(ended.stderr.contains(words), "{arguments:?}: {}", ended.stderr);
    }
}
