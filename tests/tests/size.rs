//! A small version of the large-cluster benchmark: checks that all of its parts still work, and the
//! countable results.

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, TryStreamExt};
use serde_json::json;
use switchyard_crds::TrainJob;
use switchyard_tests::size::{Scale, measure};
use switchyard_tests::{
    ControlPlane, ControllerOptions, Jobs, Options, condition_of, merge, plain_job, start_controller,
};

/// Number and size in bytes of the stored manifests: 60 MiB that any user with the right to create
/// TrainJobs can store.
const LARGE: (usize, usize) = (48, 1_300_000);
/// Maximum memory of the controller that reads them, bytes.
const MAX_MEMORY: u64 = 200 << 20;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_benchmark_of_a_large_cluster_works_when_it_is_small() -> Result<()> {
    let scale =
        Scale { nodes: 200, others: 600, running: 12, waiting: 10, gang: 140, probes: 3, seconds: 8, program: None };
    let measured = measure(&scale).await?;
    let number = |path: &str| measured.pointer(path).and_then(serde_json::Value::as_f64).unwrap_or(f64::NAN);
    assert_eq!(number("/sync/storedObjects"), 1000.0, "{measured}");
    assert_eq!([number("/gang/nodesInSlices"), number("/gang/slices")], [140.0, 1.0], "{measured}");
    assert!(number("/gang/configMaps") >= 1.0 && number("/gang/trainJobKiB") <= 256.0, "{measured}");
    // A queue position may be reported up to a minute late, which on a busy machine can fall into
    // this window.
    assert!(number("/quiet/writes") <= number("/waitingJobs"), "too many writes while quiet: {measured}");
    // Eight nodes became free one after the other. Queued jobs take them, and each remaining job
    // reports its reason at most once.
    assert!(number("/churn/placed") >= 1.0, "{measured}");
    assert!(number("/churn/writesOfWaiting") <= number("/churn/stillWaiting"), "{measured}");
    assert!(number("/passes/plan/count") >= 30.0, "{measured}");
    Ok(())
}

/// Regression (finding 6): a few hundred suspended jobs of a megabyte each sent both controllers
/// into an out-of-memory crash loop.
#[tokio::test]
async fn megabyte_manifests_are_refused_and_not_kept_in_memory() -> Result<()> {
    let plane = ControlPlane::start(&Options::default())?;
    plane.install_crds().await?;
    let namespace = plane.namespace("large").await?;
    let jobs = Jobs::new(plane.client().await?, &namespace);
    let large = |number: usize| {
        let mut job = plain_job(&format!("large-{number}"), 1, "run");
        let annotations = json!({"note": "x".repeat(LARGE.1)});
        merge(&mut job["spec"], json!({"suspend": true, "template": {"metadata": {"annotations": annotations}}}));
        job
    };
    let create = |number: usize| jobs.create(large(number));
    futures::stream::iter(0..LARGE.0).map(create).buffer_unordered(4).try_for_each(|_| async { Ok(()) }).await?;
    let controller = start_controller(&plane, "large", &ControllerOptions::default())?;
    for number in 0..LARGE.0 {
        let is_refused = |job: &TrainJob| {
            condition_of(job, "Failed").is_some_and(|failed| failed.message.contains("expected at most 262144"))
        };
        jobs.wait(&format!("large-{number}"), "refused", is_refused).await.with_context(|| controller.tail())?;
    }
    let status = std::fs::read_to_string(format!("/proc/{}/status", controller.pid()))?;
    let peak =
        status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    let peak = peak.context("no VmHWM")? << 10;
    println!("controller peak: {} MiB", peak >> 20);
    ensure!(peak < MAX_MEMORY, "the controller needed {} MiB", peak >> 20);
    Ok(())
}
