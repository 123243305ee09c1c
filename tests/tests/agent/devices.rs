//! Device usage as reported by a kubelet.

use super::*;
use switchyard_crds::device_use::{DeviceUse, DeviceUseSource};
use switchyard_crds::gpu_topology::{Facts, SourceState};
use switchyard_tests::{PodResources, Reply, message};

/// A pod with one container that has one GPU from a plugin and one device from a claim.
fn list(pod: &str, gpu: &str) -> Vec<u8> {
    let devices = message([(1, &b"nvidia.com/gpu"[..]), (2, gpu.as_bytes())]);
    let cdi = message([(1, &b"k8s.gpu.nvidia.com/gpu=gpu-3"[..])]);
    let device = message([(1, &cdi[..]), (2, b"gpu.nvidia.com"), (3, b"node-a"), (4, b"gpu-3")]);
    let claim = message([(2, &b"gpus"[..]), (3, b"team"), (4, &device)]);
    let container = message([(1, &b"trainer"[..]), (2, &devices), (5, &claim)]);
    let pod = message([(1, pod.as_bytes()), (2, b"team"), (3, &container)]);
    message([(1, &pod[..])])
}

fn in_use(report: &GPUTopology) -> Vec<DeviceUse> {
    report.status.as_ref().map(|status| status.in_use.clone()).unwrap_or_default()
}

fn names(report: &GPUTopology) -> Vec<String> {
    in_use(report).iter().map(|entry| format!("{} {} {}", entry.device, entry.resource, entry.pod)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn devices_in_use_follow_the_kubelet() -> Result<()> {
    let scene = Scene::new("agent-devices").await?;
    let agent = scene.agent(&[])?;
    let without = scene.kernel("1.0.0").await?;
    let source = |report: &GPUTopology| report.status.as_ref().and_then(|status| status.source(Facts::InUse).cloned());
    let status = source(&without).context("no source")?;
    assert_eq!(status.state, SourceState::Unavailable);
    assert!(status.message.is_some_and(|message| message.contains("kubelet.sock: No such file")));
    assert_eq!(condition(&without, "Reported"), "Reported=True Complete", "without a kubelet the machine is the same");

    let kubelet = PodResources::start(&scene.host.path(""))?;
    let nothing = || Reply::Message(Vec::new());
    kubelet.set(Reply::Message(list("job-1-0", "GPU-7")), nothing());
    let used = scene.report("in use", |report| in_use(report).len() == 2).await?;
    assert_eq!(names(&used), ["GPU-7 nvidia.com/gpu job-1-0", "gpu-3 gpu.nvidia.com job-1-0"]);
    let [plugin, claimed] = in_use(&used).try_into().map_err(|_| anyhow::anyhow!("two devices"))?;
    assert_eq!((plugin.source, plugin.claim), (DeviceUseSource::DevicePlugin, None));
    assert_eq!((plugin.namespace.as_str(), plugin.container.as_str()), ("team", "trainer"));
    let claim = claimed.claim.context("no claim")?;
    assert_eq!((claimed.source, claim.name.as_str()), (DeviceUseSource::DynamicResource, "gpus"));
    assert_eq!((claim.pool.as_str(), claim.cdi_devices), ("node-a", vec!["k8s.gpu.nvidia.com/gpu=gpu-3".to_string()]));
    assert_eq!(source(&used).map(|source| source.state), Some(SourceState::Complete));

    let writes = scene.writes().await;
    scanned(&agent).await?;
    assert_eq!(scene.writes().await, writes, "the same uses are not written again");
    kubelet.set(Reply::Message(list("job-2-0", "GPU-7")), nothing());
    scene.report("of the next pod", |report| names(report)[0].ends_with("job-2-0")).await?;
    assert_eq!(scene.writes().await, writes + 1);
    assert_eq!(agent.metric("switchyard_agent_pod_resources_failures_total").min(2.0), 1.0, "the first question only");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_answers_are_reported_and_do_no_harm() -> Result<()> {
    let scene = Scene::new("agent-malformed").await?;
    let kubelet = PodResources::start(&scene.host.path(""))?;
    let mut agent = scene.agent(&[])?;
    scene.kernel("1.0.0").await?;
    let good = || Reply::Message(list("job-1-0", "GPU-7"));
    let nothing = || Reply::Message(Vec::new());
    let cut = [&[0, 0, 0, 1, 0][..], &list("job-1-0", "GPU-7")].concat();
    let deep = [&[0, 0, 0, 0, 6][..], &message([(1, &[0x0a, 200, 1, 1][..])])].concat();
    for (list, allocatable, expected) in [
        (Reply::Raw(cut), nothing(), "expected the 256 of its header"),
        (Reply::Raw(deep), nothing(), "malformed"),
        (good(), Reply::Refused(12), "gRPC status 12"),
        (Reply::Silence, nothing(), "no answer within 5 s"),
    ] {
        kubelet.set(good(), nothing());
        scene.report("in use", |report| in_use(report).len() == 2).await?;
        kubelet.set(list, allocatable);
        let report = scene.report(expected, |report| in_use(report).is_empty()).await?;
        let source = report.status.as_ref().and_then(|status| status.source(Facts::InUse)).context("no source")?;
        let message = source.message.clone().unwrap_or_default();
        assert!(message.contains(expected), "`{message}` does not contain `{expected}`");
        assert_eq!(kernel(&report), Some("1.0.0"), "no other fact is lost");
        agent.daemon.ensure_running()?;
    }
    assert!(agent.metric("switchyard_agent_pod_resources_failures_total") >= 16.0, "each is tried four times");
    Ok(())
}

/// Compares the GPUs that the kubelet reports with the machine's GPUs; this machine has none.
#[tokio::test(flavor = "multi_thread")]
async fn missing_gpus_contradict_the_kubelet() -> Result<()> {
    let scene = Scene::new("agent-allocatable").await?;
    let kubelet = PodResources::start(&scene.host.path(""))?;
    let gpus = message([(1, &b"nvidia.com/gpu"[..]), (2, b"GPU-7"), (2, b"GPU-8")]);
    kubelet.set(Reply::Message(Vec::new()), Reply::Message(message([(1, &gpus[..])])));
    let _agent = scene.agent(&[])?;
    let is_contradictory = |report: &GPUTopology| condition(report, "Consistent") == "Consistent=False Contradiction";
    let report = scene.report("inconsistent", is_contradictory).await?;
    let message =
        report.status.iter().flat_map(|status| &status.conditions).map(|c| c.message.clone()).collect::<String>();
    assert_eq!(
        message,
        "gpus: got no GPU-7; expected it, as the kubelet gives it to containers; \
         gpus: got no GPU-8; expected it, as the kubelet gives it to containers"
    );
    kubelet.set(Reply::Message(Vec::new()), Reply::Message(Vec::new()));
    scene.report("consistent", |report| condition(report, "Consistent") == "Consistent=True NoContradiction").await?;
    Ok(())
}
