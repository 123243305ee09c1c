//! The benchmark of a large cluster, small: that all of its parts still work, and what can be counted.

use anyhow::Result;
use switchyard_tests::size::{Scale, measure};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_benchmark_of_a_large_cluster_works_when_it_is_small() -> Result<()> {
    let scale =
        Scale { nodes: 200, others: 600, running: 12, waiting: 10, gang: 140, probes: 3, seconds: 8, program: None };
    let measured = measure(&scale).await?;
    let number = |path: &str| measured.pointer(path).and_then(serde_json::Value::as_f64).unwrap_or(f64::NAN);
    assert_eq!(number("/sync/storedObjects"), 1000.0, "{measured}");
    assert_eq!([number("/gang/nodesInSlices"), number("/gang/slices")], [140.0, 1.0], "{measured}");
    assert!(number("/gang/configMaps") >= 1.0 && number("/gang/trainJobKiB") <= 256.0, "{measured}");
    // Which place in the queue a job has may be told a minute late, and where the machine is busy that is now.
    assert!(number("/quiet/writes") <= number("/waitingJobs"), "nothing happens: {measured}");
    // Eight nodes became free one after the other: those that wait take them, and those that still wait say so once each at most.
    assert!(number("/churn/placed") >= 1.0, "{measured}");
    assert!(number("/churn/writesOfWaiting") <= number("/churn/stillWaiting"), "{measured}");
    assert!(number("/passes/plan/count") >= 30.0, "{measured}");
    Ok(())
}
