//! G4, second half: API server and etcd are killed while a job starts, and restart with the stored
//! objects.

use anyhow::{Result, ensure};
use serde_json::json;
use std::time::Duration;
use switchyard_tests::{Command, ControlPlane, ControllerOptions, Jobs, Kubelet, KubeletOptions, Options, chaos};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_api_server_and_etcd_are_killed() -> Result<()> {
    let options = Options { scheduler: true, fsync: true, ..Options::default() };
    let mut plane = ControlPlane::start(&options)?;
    plane.install_crds().await?;
    let mut nodes = KubeletOptions::new("killed", 4);
    nodes.capacity = [("cpu", "100"), ("memory", "100Gi"), ("pods", "100")].map(|(a, b)| (a.into(), b.into())).into();
    let kubelet = Kubelet::start(plane.config().await?, nodes).await?;
    let namespace = plane.namespace("killed").await?;
    let own = ControllerOptions { namespace: Some(namespace.clone()), ..ControllerOptions::default() };
    let mut controller = switchyard_tests::start_controller(&plane, "controller", &own)?;
    let jobs = Jobs::new(plane.client().await?, &namespace);
    let kills = chaos::size(2, 20);
    for kill in 0..kills {
        let name = format!("k{kill}");
        jobs.create(switchyard_tests::plain_job(&name, 4, "run")).await?;
        // At a different moment of the job's start each time.
        tokio::time::sleep(Duration::from_millis(37 * kill as u64 % 400)).await;
        plane.restart_all()?;
        jobs.wait_stage(&name, "Running").await?;
        for rank in 0..4 {
            kubelet.send(&namespace, &format!("{name}-1-{rank}"), Command::Exit(0, String::new()))?;
        }
        let done = jobs.wait_stage(&name, "Complete").await?;
        let status = done.status.unwrap();
        ensure!(
            status.attempt == Some(1) && status.restarts.is_some_and(|r| r.total == 0),
            "an attempt was lost: {:?}",
            status.attempt
        );
        controller.ensure_running()?;
    }
    chaos::report("g4-kills", &json!({"kills": kills, "stuck": 0}))
}
