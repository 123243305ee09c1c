//! Programs that stop slowly and do not fence their files: rank 0 of the next attempt must not
//! write concurrently with rank 0 of the previous one.

use super::kubelet;
use anyhow::{Result, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use switchyard_tests::{ControlPlane, ControllerOptions, Jobs, chaos, merge, plain_job, start_controller, template_on};

/// Concurrent jobs, with two processes each.
const CONCURRENCY: usize = 4;

/// Rank 0 holds a lock on the directory while its process lives, because it can write there for
/// that long. Rank 1 of the first attempt fails once rank 0 has started. `SLOW` is rank 0's work
/// before it obeys SIGTERM.
const PROGRAM: &str = r#"
cd "$DIRECTORY"
began="began-$SWITCHYARD_ATTEMPT"
if [ "$SWITCHYARD_NODE_RANK" = 1 ]; then
    while [ ! -e "$began" ]; do sleep 0.1; done
    [ "$SWITCHYARD_ATTEMPT" = 2 ] && exit 0
    exit 7
fi
trap "$SLOW; exit 0" TERM
exec 9>lock
flock --nonblock 9 || echo "attempt $SWITCHYARD_ATTEMPT" >> two-writers
touch "$began"
[ "$SWITCHYARD_ATTEMPT" = 2 ] && exit 0
while true; do sleep 0.1; done
"#;

fn job(name: &str, nodes: &[String], directory: &Path, slow: &str, gang_policy: Value) -> Result<Value> {
    fs::create_dir_all(directory)?;
    let mut job = plain_job(name, 2, "worker");
    let env = [("DIRECTORY", directory.display().to_string()), ("SLOW", slow.to_string())];
    let env: Vec<Value> = env.map(|(name, value)| json!({"name": name, "value": value})).into();
    merge(&mut job["spec"], json!({"trainer": {"command": ["sh", "-c", PROGRAM], "env": env}}));
    merge(&mut job["spec"], json!({"template": template_on(nodes), "failurePolicy": {"maxRestarts": 1}}));
    merge(&mut job["spec"], json!({"gangPolicy": gang_policy}));
    Ok(job)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slowly_stopping_attempts_never_share_a_directory() -> Result<()> {
    let kubelet = kubelet("overlap").await?;
    let plane = ControlPlane::shared();
    let namespace = plane.namespace("overlap").await?;
    let options = ControllerOptions { namespace: Some(namespace.clone()), ..ControllerOptions::default() };
    let _controller = start_controller(plane, &namespace, &options)?;
    let jobs = Jobs::new(plane.client().await?, &namespace);
    let folder = tempfile::tempdir()?;
    let run = async |name: String, slow: &str, gang_policy: Value| -> Result<bool> {
        let directory = folder.path().join(&name);
        jobs.create(job(&name, &kubelet.nodes(), &directory, slow, gang_policy)?).await?;
        let done = jobs.wait_stage(&name, "Complete").await?.status.unwrap();
        ensure!(done.attempt == Some(2), "{name} did not restart: {done:?}");
        jobs.api().delete(&name, &Default::default()).await?;
        jobs.wait_gone(&name).await?;
        Ok(directory.join("two-writers").exists())
    };
    let wanted = chaos::size(20, 200);
    let names = stream::iter((0..wanted).map(|number| format!("slow-{number}")));
    let runs = names.map(|name| run(name, "sleep 1", json!({}))).buffer_unordered(CONCURRENCY);
    let overlaps: Vec<bool> = runs.try_collect().await?;
    let count = overlaps.iter().filter(|overlaps| **overlaps).count();
    // Negative control: the same program with the other policy, where rank 0 continues until its
    // successor has started. The lock must detect it.
    let until = "while [ ! -e began-2 ]; do sleep 0.1; done";
    ensure!(run("control".into(), until, json!({"replacement": "Immediate"})).await?, "the lock detects no overlap");
    ensure!(count == 0, "{count} of {wanted} restarts had two writers");
    chaos::report("g10-overlaps", &json!({"restarts": wanted, "twoWriters": count}))
}
