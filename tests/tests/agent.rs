//! The node agent as a program: on a real API server, with the chart's manifests, a token like its
//! pod's, and a kubelet socket.

mod daemon_set;
mod devices;
mod failures;

use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client, ResourceExt};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_tests::TIMEOUT;
use switchyard_tests::{
    Agent, AgentOptions, ControlPlane, Host, Program, agent_plane, agent_program, found_async, until_async,
};

const SYSTEM: &str = "switchyard-system";
const USER: &str = "system:serviceaccount:switchyard-system:switchyard-node-agent";

/// A control plane with the chart's manifests.
fn plane() -> &'static ControlPlane {
    static PLANE: OnceLock<ControlPlane> = OnceLock::new();
    PLANE.get_or_init(|| agent_plane(&[]).unwrap_or_else(|error| panic!("{error:#}")))
}

/// A node and its agent's report.
struct Scene {
    plane: &'static ControlPlane,
    client: Client,
    node: &'static str,
    host: Host,
}

impl Scene {
    async fn new(node: &'static str) -> Result<Scene> {
        let plane = plane();
        let scene = Scene { plane, client: plane.client().await?, node, host: Host::new()? };
        scene.make_node().await?;
        Ok(scene)
    }

    async fn make_node(&self) -> Result<Node> {
        let node: Node = serde_json::from_value(json!({"metadata": {"name": self.node}}))?;
        Ok(Api::all(self.client.clone()).create(&Default::default(), &node).await?)
    }

    fn agent(&self, arguments: &[&str]) -> Result<Agent> {
        let arguments = arguments.iter().map(ToString::to_string).collect();
        Agent::start(self.plane, self.node, &self.host, &AgentOptions { arguments, ..AgentOptions::default() })
    }

    fn api(&self) -> Api<GPUTopology> {
        Api::all(self.client.clone())
    }

    /// Waits until the report satisfies `is`.
    async fn report(&self, what: &str, is: impl Fn(&GPUTopology) -> bool) -> Result<GPUTopology> {
        let mut seen = None;
        let report = found_async(what, TIMEOUT, async || {
            seen = self.api().get_opt(self.node).await?;
            Ok(seen.clone().filter(&is))
        });
        report.await.with_context(|| {
            let log = std::fs::read_to_string(self.plane.folder().join(format!("{}.log", self.node)));
            format!("{}: {seen:#?}\n{}", self.node, log.unwrap_or_default())
        })
    }

    async fn kernel(&self, release: &str) -> Result<GPUTopology> {
        self.report(&format!("with kernel {release}"), |report| kernel(report) == Some(release)).await
    }

    /// Number of agent calls for this node so far, by RBAC verb and resource, from the audit log.
    fn calls(&self, verb: &str, resource: &str) -> usize {
        let audit_entries = self.plane.audit_entries();
        let calls = audit_entries.iter().filter(|entry| {
            let field = |path: &str| entry.pointer(path).and_then(Value::as_str).unwrap_or_default();
            let sub = field("/objectRef/subresource");
            let target = if sub.is_empty() {
                field("/objectRef/resource").to_string()
            } else {
                format!("{}/{sub}", field("/objectRef/resource"))
            };
            field("/user/username") == USER
                && field("/objectRef/name") == self.node
                && field("/verb") == verb
                && target == resource
        });
        calls.count()
    }

    /// Number of report writes that the API server accepted.
    async fn writes(&self) -> usize {
        // A call appears in the audit log shortly after its effect is visible.
        tokio::time::sleep(Duration::from_secs(1)).await;
        self.calls("patch", "gputopologies/status")
    }
}

async fn until(what: &str, is: impl Fn() -> bool) -> Result<()> {
    until_async(what, TIMEOUT, async || Ok(is())).await.map(drop)
}

/// Waits until the agent has completed three more scans, enough to repeat a write.
async fn scanned(agent: &Agent) -> Result<()> {
    let scans = || agent.metric("switchyard_agent_scans_total{outcome=\"complete\"}");
    let wanted = scans() + 3.0;
    until("scanned", || scans() >= wanted).await
}

fn kernel(report: &GPUTopology) -> Option<&str> {
    report.status.as_ref()?.host.as_ref()?.kernel.as_deref()
}

/// Formats a condition, for example `Reported=True Complete`.
fn condition(report: &GPUTopology, kind: &str) -> String {
    let conditions = report.status.iter().flat_map(|status| &status.conditions);
    let found = conditions.into_iter().find(|condition| condition.type_ == kind);
    found.map_or_else(String::new, |found| format!("{}={} {}", found.type_, found.status, found.reason))
}

fn transition(report: &GPUTopology, kind: &str) -> Option<jiff::Timestamp> {
    let mut conditions = report.status.iter().flat_map(|status| &status.conditions);
    Some(conditions.find(|condition| condition.type_ == kind)?.last_transition_time.0)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_report_is_written_once_and_a_change_once_more() -> Result<()> {
    let scene = Scene::new("agent-once").await?;
    let mut agent = scene.agent(&[])?;
    let first = scene.kernel("1.0.0").await?;
    let node: Node = Api::all(scene.client.clone()).get(scene.node).await?;
    let owner = first.owner_references().first().context("no owner")?.clone();
    assert_eq!((owner.kind.as_str(), Some(owner.uid), owner.block_owner_deletion), ("Node", node.uid(), None));
    for (kind, expected) in [
        ("Reported", "Reported=True Complete"),
        ("Consistent", "Consistent=True NoContradiction"),
        ("Fresh", "Fresh=True Current"),
    ] {
        assert_eq!(condition(&first, kind), expected);
    }
    until("ready", || agent.page("/readyz").ends_with("ok\n")).await?;

    scanned(&agent).await?;
    let calls =
        async |scene: &Scene| (scene.writes().await, scene.calls("get", "gputopologies"), scene.calls("get", "nodes"));
    assert_eq!(calls(&scene).await, (1, 1, 1), "an agent without news neither reads nor writes");
    let quiet = scene.kernel("1.0.0").await?;
    assert_eq!(quiet.resource_version(), first.resource_version());

    scene.host.set_kernel("2.0.0")?;
    let second = scene.kernel("2.0.0").await?;
    scanned(&agent).await?;
    assert_eq!(scene.writes().await, 2, "one change, one write");
    assert_eq!(scene.kernel("2.0.0").await?.resource_version(), second.resource_version());
    let observed = |report: &GPUTopology| report.status.as_ref().and_then(|status| status.observed_time.clone());
    assert!(observed(&second) > observed(&first));
    assert_eq!(transition(&second, "Fresh"), transition(&first, "Fresh"), "no condition changed its status");

    // Killed at any time, an agent recovers its state from what it has written.
    agent.daemon.kill();
    let mut agent = scene.agent(&[])?;
    scene.host.set_kernel("3.0.0")?;
    scene.kernel("3.0.0").await?;
    let writes = scene.writes().await;
    assert!(writes <= 4, "{writes} writes");
    agent.daemon.signal(Signal::TERM);
    assert_eq!(agent.daemon.wait(TIMEOUT), Some(0), "{}", agent.daemon.tail());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_report_without_a_change_is_renewed() -> Result<()> {
    let scene = Scene::new("agent-renewal").await?;
    let agent = scene.agent(&["--renew-seconds", "3"])?;
    let first = scene.kernel("1.0.0").await?;
    let newer = |report: &GPUTopology| {
        let observed = |report: &GPUTopology| report.status.as_ref().and_then(|status| status.observed_time.clone());
        observed(report) > observed(&first)
    };
    let mut renewed = scene.report("renewed", newer).await?;
    assert_eq!(agent.metric("switchyard_agent_writes_total{what=\"facts\"}"), 1.0);
    until("counted", || agent.metric("switchyard_agent_writes_total{what=\"renewal\"}") >= 1.0).await?;
    let (Some(status), Some(before)) = (&mut renewed.status, &first.status) else { bail!("no status") };
    status.observed_time.clone_from(&before.observed_time);
    assert_eq!(status, before, "a renewal changes only the report's time");
    Ok(())
}

/// Both start at once, see the same changes, and renew.
#[tokio::test(flavor = "multi_thread")]
async fn two_agents_on_one_node_do_not_conflict() -> Result<()> {
    let scene = Scene::new("agent-two").await?;
    let started = Instant::now();
    let start = |name: &str| {
        let arguments = vec!["--renew-seconds".into(), "4".into()];
        let options = AgentOptions { arguments, log: Some(name.into()), ..AgentOptions::default() };
        Agent::start(scene.plane, scene.node, &scene.host, &options)
    };
    let agents = [start("agent-two-a")?, start("agent-two-b")?];
    for release in ["1.0.0", "2.0.0", "3.0.0"] {
        scene.host.set_kernel(release)?;
        scene.kernel(release).await?;
        for agent in &agents {
            scanned(agent).await?;
        }
        scene.kernel(release).await?;
    }
    let written = |what: &str| -> f64 {
        agents.iter().map(|agent| agent.metric(&format!("switchyard_agent_writes_total{{what=\"{what}\"}}"))).sum()
    };
    let (facts, renewals) = (written("facts"), written("renewal"));
    assert!(facts >= 3.0, "3 states, {facts} writes of facts");
    // Each agent writes each of the three states at most once, and otherwise only when a renewal is
    // due, at most every 3.2 s. A due renewal counts as facts if the other agent scanned first.
    let max = 6.0 + 2.0 * started.elapsed().as_secs_f64() / 3.2;
    assert!(facts + renewals <= max, "{facts} writes of facts, {renewals} renewals; expected at most {max}");
    let failures = |agent: &Agent| agent.page("/metrics").matches("switchyard_agent_write_failures_total{").count();
    assert_eq!(agents.iter().map(failures).sum::<usize>(), 0);
    Ok(())
}

#[test]
fn once_prints_the_topology_and_needs_no_cluster() {
    let host = Host::new().unwrap();
    let (sysfs, procfs) = (host.path("sys").display().to_string(), host.path("proc").display().to_string());
    let arguments = ["--once", "--sysfs-root", &sysfs, "--proc-root", &procfs, "--pod-resources", ""];
    let ended = Program::new(agent_program(), &host.path(""), arguments).run(TIMEOUT);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    let report: GPUTopology = serde_saphyr::from_str(&ended.stdout).unwrap();
    assert_eq!(kernel(&report), Some("1.0.0"));
    assert_eq!(condition(&report, "Reported"), "Reported=True Complete");

    let rejected = |arguments: &[&str]| Program::new(agent_program(), &host.path(""), arguments.iter()).run(TIMEOUT);
    let ended = rejected(&["--once", "--sysfs-root", "gone"]);
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    assert!(ended.stderr.contains("sysfs root gone: expected a directory"), "{}", ended.stderr);
    let ended = rejected(&["--once", "--node-name", "No_Name"]);
    assert!(ended.code == Some(2) && ended.stderr.contains("node name `No_Name`: expected"), "{}", ended.stderr);
    let ended = rejected(&[]);
    assert!(ended.code == Some(2) && ended.stderr.contains("--node-name"), "{}", ended.stderr);
    let ended = rejected(&["--node-name", "a", "--kubeconfig", "gone", "--listen", "127.0.0.1:0"]);
    assert!(ended.code == Some(2) && ended.stderr.contains("--kubeconfig gone"), "{}", ended.stderr);
}
