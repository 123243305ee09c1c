//! Component failures in a real cluster: a training job resumes from its checkpoint or fails with
//! the right reason, and leaves nothing behind.

use crate::e2e::memory::out_of_memory;
use crate::e2e::{Cluster, JOBS, TEAM, example, message, stage};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Far more steps than a test waits for, so the job runs until it is stopped.
pub(crate) const ENDLESS: u64 = 100_000_000;
/// Steps between checkpoints.
const EVERY: u64 = 50;
/// The job that must survive the faults.
const JOB: &str = "long";

#[test]
fn jobs_survive_infrastructure_faults() -> Result<()> {
    let mut cluster = Cluster::start(2)?;
    cluster.install()?;
    cluster.team(TEAM)?;
    cluster.sh(&format!("kubectl --namespace {TEAM} create configmap text --from-file=docs"))?;
    volume(&cluster)?;
    cluster.apply(TEAM, &checkpointed(JOB)?)?;
    let mut state = State::new(JOB);
    state.next(&cluster, "it starts", Expectation::Restarts)?;

    kill_rank(&cluster, TEAM, &state.pod(1))?;
    state.next(&cluster, "a rank is killed", Expectation::Restarts)?;

    // Early, because the backoff grows with each attempt.
    kill_rank(&cluster, TEAM, &state.pod(1))?;
    cluster.sh("kubectl --namespace switchyard-system delete pod -l app.kubernetes.io/component=controller --force --grace-period=0 2>&1")?;
    state.next(
        &cluster,
        "a rank is killed, and the controllers in the middle of the restart",
        Expectation::Restarts,
    )?;

    cluster.sh(&format!("kubectl --namespace {TEAM} delete pod {} --wait=false", state.pod(0)))?;
    state.next(&cluster, "a pod is deleted", Expectation::Restarts)?;

    let node = node_name(&cluster, &state.pod(1))?;
    drained(&cluster, &node)?;
    state.next(&cluster, "a node is drained by force", Expectation::Restarts)?;

    cluster.nodes.restart_containerd(&node)?;
    state.next(&cluster, "containerd is restarted", Expectation::Continues)?;

    cluster.nodes.kill_kubelet(&node)?;
    std::thread::sleep(Duration::from_secs(5));
    cluster.nodes.start_kubelet(&node)?;
    state.next(&cluster, "the kubelet is away for some seconds", Expectation::Continues)?;

    cluster.sh("kubectl --namespace switchyard-system delete pod --all --force --grace-period=0 2>&1")?;
    state.next(&cluster, "controllers and agents are killed", Expectation::Continues)?;

    cluster.nodes.plane.kill_api_server();
    cluster.nodes.plane.start_api_server()?;
    state.next(&cluster, "the API server is killed", Expectation::Continues)?;

    // Longer than the ranks' heartbeat timeout.
    cluster.nodes.set_link(&node, false)?;
    std::thread::sleep(Duration::from_secs(25));
    cluster.nodes.set_link(&node, true)?;
    state.next(&cluster, "a node is unplugged for 25 s", Expectation::Restarts)?;

    // Only our controllers wrote this message.
    let job = cluster.job(TEAM, JOB)?;
    ensure!(message(&job) == "2 of 2 nodes train", "{}", message(&job));

    // A suspended job holds no nodes, so the following tests have the capacity.
    ensure!(cluster.suspend(JOB, true)?, "{JOB} was deleted");
    cluster.no_pods()?;
    gated(&cluster)?;
    permanent_failures(&cluster)?;
    out_of_memory(&cluster)?;
    job_leaves_cordoned_nodes(&cluster)?;
    ensure!(cluster.suspend(JOB, false)?, "{JOB} was deleted");
    state.next(&cluster, "it was suspended", Expectation::Restarts)?;
    // Two killed ranks plus the unplugged link, because from inside, a lost network is
    // indistinguishable from a hang.
    let restarts = cluster.job(TEAM, JOB)?["status"]["restarts"].clone();
    ensure!(restarts["application"] == 3 && restarts["infrastructure"] == 2, "charged to the wrong budget: {restarts}");
    ensure_nothing_left(&cluster)
}

/// Creates a host folder in place of a file system that all nodes mount.
pub(crate) fn volume(cluster: &Cluster) -> Result<()> {
    let folder = cluster.folder.path().join("checkpoints");
    fs::create_dir(&folder)?;
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o777))?;
    fs::set_permissions(cluster.folder.path(), fs::Permissions::from_mode(0o755))?;
    let (size, modes) = (json!({"storage": "1Gi"}), json!(["ReadWriteMany"]));
    cluster.apply(
        TEAM,
        &json!({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "shared"},
            "spec": {"capacity": size, "accessModes": modes, "storageClassName": "", "hostPath": {"path": folder},
                "claimRef": {"namespace": TEAM, "name": "checkpoints"}},
        }),
    )?;
    cluster.apply(TEAM, &json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "checkpoints"},
        "spec": {"accessModes": modes, "resources": {"requests": size}, "storageClassName": "", "volumeName": "shared"},
    }))?;
    // Until then the scheduler refuses pods, and a job's first attempt may be rolled back.
    let bound = "kubectl wait persistentvolumeclaim/checkpoints --for=jsonpath={.status.phase}=Bound --timeout=300s";
    cluster.sh(&format!("{bound} --namespace {TEAM}")).map(drop)
}

/// The endless job of examples/gpt-cluster.yaml, with a checkpoint every [`EVERY`] steps.
///
/// Its model is tiny and its pods get a fraction of a core, because an endless training at full
/// speed would starve all other tests of CPU.
pub(crate) fn checkpointed(name: &str) -> Result<Value> {
    let mut job = example("gpt-cluster.yaml")?;
    job["metadata"]["name"] = name.into();
    job["spec"]["trainer"]["resourcesPerNode"]["limits"]["cpu"] = "300m".into();
    job["spec"]["engine"]["steps"] = ENDLESS.into();
    job["spec"]["engine"]["batchSizePerProcess"] = 1.into();
    job["spec"]["engine"]["model"]["gpt"] = json!({"layers": 1, "hiddenSize": 32, "heads": 1, "contextLength": 32});
    job["spec"]["failurePolicy"] = json!({"maxRestarts": 20, "maxInfrastructureRestarts": 20});
    // `volumeName` would give the whole volume to one job, but several jobs share this one.
    job["spec"]["checkpoint"] = json!({"path": format!("/checkpoints/{name}"), "everySteps": EVERY});
    let pod = &mut job["spec"]["template"]["spec"];
    let mounts = pod["containers"][0]["volumeMounts"].as_array_mut().context("the example mounts volumes")?;
    mounts.push(json!({"name": "checkpoints", "mountPath": "/checkpoints"}));
    let volumes = pod["volumes"].as_array_mut().context("the example has volumes")?;
    volumes.push(json!({"name": "checkpoints", "persistentVolumeClaim": {"claimName": "checkpoints"}}));
    Ok(job)
}

/// Expected effect of a fault on the job.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Expectation {
    /// The job starts another attempt from a checkpoint.
    Restarts,
    /// The attempt continues.
    Continues,
}

/// Last observed progress of a job.
pub(crate) struct State {
    job: &'static str,
    attempt: u64,
    step: u64,
    /// Checkpoint step from which the latest restart resumed.
    resumed: u64,
}

impl State {
    /// A job that has not started.
    pub fn new(job: &'static str) -> State {
        State { job, attempt: 0, step: 0, resumed: 0 }
    }

    /// Pod name of a node in the current attempt.
    pub fn pod(&self, node: u32) -> String {
        format!("{}-{}-{node}", self.job, self.attempt)
    }

    /// Waits until the job trains again after a fault and has passed its previous step.
    pub fn next(&mut self, cluster: &Cluster, what: &str, expectation: Expectation) -> Result<()> {
        let begin = Instant::now();
        let job = cluster.wait_job(TEAM, self.job, &format!("training after `{what}`"), |job| {
            let (attempt, step) = (attempt(job), step(job));
            let is_new = match expectation {
                Expectation::Restarts => attempt > self.attempt,
                Expectation::Continues => attempt == self.attempt,
            };
            // The figures may still belong to the previous attempt.
            stage(job) == "Running" && is_new && step > self.step + EVERY
        })?;
        let (attempt, step) = (attempt(&job), step(&job));
        println!(
            "{:5.1} s  {what}: attempt {} -> {attempt}, step {} -> {step}",
            begin.elapsed().as_secs_f64(),
            self.attempt,
            self.step
        );
        if expectation == Expectation::Restarts && self.attempt > 0 {
            let ready = || -> Result<Option<String>> {
                let log = cluster.sh(&format!("switchyard logs {} --namespace {TEAM} --rank 0", self.job))?;
                Ok(log.lines().find(|line| line.contains("\"event\":\"ready\"")).map(str::to_owned))
            };
            cluster.until("rank 0 is ready", || Ok(ready()?.is_some()))?;
            let ready = ready()?.context("rank 0 was ready")?;
            let from = serde_json::from_str::<Value>(&ready)?["resumedStep"].as_u64();
            let from = from.filter(|from| *from > 0);
            self.resumed =
                from.with_context(|| format!("attempt {attempt} did not resume from a checkpoint: {ready}"))?;
        }
        (self.attempt, self.step) = (attempt, step);
        Ok(())
    }
}

fn attempt(job: &Value) -> u64 {
    job["status"]["attempt"].as_u64().unwrap_or(0)
}

fn step(job: &Value) -> u64 {
    job["status"]["trainerStatus"]["step"].as_u64().unwrap_or(0)
}

fn node_name(cluster: &Cluster, pod: &str) -> Result<String> {
    let pod = cluster.get(TEAM, "pod", pod)?.with_context(|| format!("no pod {pod}"))?;
    Ok(pod["spec"]["nodeName"].as_str().context("the pod has no node")?.to_owned())
}

/// Process ids of our engine in a pod. The supervisor has the lowest, because it started first.
pub(crate) fn engine_pids(cluster: &Cluster, namespace: &str, pod: &str) -> Result<Vec<i32>> {
    let object = cluster.get(namespace, "pod", pod)?.with_context(|| format!("no pod {pod}"))?;
    let uid = object["metadata"]["uid"].as_str().context("it has no UID")?;
    let is_ours = |process: &PathBuf| {
        fs::read_to_string(process.join("comm")).is_ok_and(|name| name.starts_with("switchyard-work"))
    };
    let processes = processes_of_pod(uid)?.into_iter().filter(is_ours);
    Ok(processes.filter_map(|path| path.file_name()?.to_str()?.parse().ok()).collect())
}

/// Kills the youngest engine process in a pod.
pub(crate) fn kill_rank(cluster: &Cluster, namespace: &str, pod: &str) -> Result<()> {
    let last = engine_pids(cluster, namespace, pod)?.into_iter().max();
    let pid = last.with_context(|| format!("{pod} has no process of ours"))?;
    let pid = rustix::process::Pid::from_raw(pid).context("no process id")?;
    rustix::process::kill_process(pid, rustix::process::Signal::KILL)?;
    Ok(())
}

/// Processes of a pod, as `/proc` folders.
pub(crate) fn processes_of_pod(uid: &str) -> Result<Vec<PathBuf>> {
    let is_in = |process: &PathBuf| {
        let cgroup = fs::read_to_string(process.join("cgroup")).unwrap_or_default();
        cgroup.contains(uid) || cgroup.contains(&uid.replace('-', "_"))
    };
    Ok(fs::read_dir("/proc")?.flatten().map(|entry| entry.path()).filter(is_in).collect())
}

/// A drain respects the job's PodDisruptionBudget. A forced drain evicts the pods, and the job
/// waits for the node to return.
fn drained(cluster: &Cluster, node: &str) -> Result<()> {
    let drain = format!("kubectl drain {node} --ignore-daemonsets --delete-emptydir-data --force 2>&1");
    let output = cluster.sh(&format!("{drain} --timeout=8s || true"))?;
    ensure!(output.contains("would violate the pod's disruption budget"), "{output}");
    ensure!(stage(&cluster.job(TEAM, JOB)?) == "Running", "a drain that is refused disturbs the job");
    cluster.sh(&format!("{drain} --disable-eviction --timeout=600s"))?;
    cluster.wait_job(TEAM, JOB, "waiting for a node", |job| stage(job) == "Queued")?;
    cluster.sh(&format!("kubectl uncordon {node}")).map(drop)
}

/// A job that leaves cordoned nodes lets the drain complete, and resumes elsewhere at most one
/// checkpoint interval behind.
fn job_leaves_cordoned_nodes(cluster: &Cluster) -> Result<()> {
    const NAME: &str = "leaves";
    let mut job = checkpointed(NAME)?;
    job["spec"]["trainer"]["numNodes"] = 1.into();
    job["spec"]["gangPolicy"] = json!({"disruption": "Checkpoint"});
    let interval = job["spec"]["checkpoint"]["everySteps"].as_u64().context("an interval")?;
    cluster.apply(TEAM, &job)?;
    let mut state = State::new(NAME);
    state.next(cluster, "a job that leaves cordoned nodes starts", Expectation::Restarts)?;
    let (node, before) = (node_name(cluster, &state.pod(0))?, state.step);

    let begin = Instant::now();
    cluster.sh(&format!("kubectl drain {node} --ignore-daemonsets --delete-emptydir-data --timeout=600s 2>&1"))?;
    println!("{:5.1} s  kubectl drain", begin.elapsed().as_secs_f64());
    state.next(cluster, "its node is drained", Expectation::Restarts)?;
    let after = node_name(cluster, &state.pod(0))?;
    ensure!(after != node, "it resumed on the drained node {node}");
    ensure!(state.resumed + interval >= before, "it resumed after step {} of {before}", state.resumed);
    let restarts = cluster.job(TEAM, NAME)?["status"]["restarts"].clone();
    ensure!(restarts["preemption"] == 1 && restarts["total"] == 1, "charged to the wrong budget: {restarts}");
    cluster.sh(&format!("kubectl uncordon {node}"))?;
    cluster.sh(&format!("kubectl --namespace {TEAM} delete {JOBS} {NAME}")).map(drop)
}

/// Our controller leaves a foreign gate alone, and the job runs once its owner lifts it.
fn gated(cluster: &Cluster) -> Result<()> {
    let mut job = example("gpt-cluster.yaml")?;
    job["metadata"]["name"] = "gated".into();
    job["spec"]["trainer"]["numNodes"] = 1.into();
    job["spec"]["engine"]["steps"] = 5.into();
    job["spec"]["template"]["spec"]["schedulingGates"] = json!([{"name": "example.com/quota"}]);
    cluster.apply(TEAM, &job)?;
    cluster.wait_job(TEAM, "gated", "waiting for the owner of a gate", |job| {
        stage(job) == "Queued" && message(job).contains("another scheduling gate holds pod gated-1-0")
    })?;
    let output = cluster.sh(&format!("switchyard status gated --namespace {TEAM}"))?;
    ensure!(output.contains("Gated by others"), "{output}");
    let gates = cluster.get(TEAM, "pod", "gated-1-0")?.context("a pod")?["spec"]["schedulingGates"].clone();
    let others = gates.as_array().and_then(|gates| gates.iter().position(|gate| gate["name"] == "example.com/quota"));
    let path = format!("/spec/schedulingGates/{}", others.context("the foreign gate was removed")?);
    let patch = json!([{"op": "remove", "path": path}]).to_string();
    cluster.sh(&format!("kubectl --namespace {TEAM} patch pod gated-1-0 --type json --patch '{patch}'"))?;
    cluster.wait_job(TEAM, "gated", "complete", |job| stage(job) == "Complete")?;
    Ok(())
}

/// Jobs that cannot run report the reason.
fn permanent_failures(cluster: &Cluster) -> Result<()> {
    let little = |memory: &str| json!({"limits": {"cpu": "100m", "memory": memory}});
    let cases: [(&str, Value, &str); 3] = [
        ("no-image", json!({"image": "registry.invalid/nothing:1", "resourcesPerNode": little("1Gi")}), "Pending: "),
        // The engine checks its memory needs before it allocates, so that the kernel never has to
        // kill a process. Two ranks need 321 MiB each; the programs alone would fit.
        ("no-memory", json!({"resourcesPerNode": little("256Mi")}), "not placeable: a rank needs"),
        (
            "no-program",
            json!({"framework": "Plain", "command": ["/no/such/program"], "resourcesPerNode": little("1Gi")}),
            "/no/such/program",
        ),
    ];
    for (name, trainer, _) in &cases {
        let mut job = example("gpt-cluster.yaml")?;
        job["metadata"]["name"] = (*name).into();
        job["spec"]["failurePolicy"] = json!({"maxRestarts": 0, "maxInfrastructureRestarts": 0});
        for (key, value) in trainer.as_object().into_iter().flatten() {
            job["spec"]["trainer"][key] = value.clone();
        }
        if *name == "no-memory" {
            job["spec"]["engine"]["batchSizePerProcess"] = 512.into();
        }
        if trainer["framework"] == "Plain" {
            job["spec"]["trainer"]["image"] = "switchyard-worker:0.1.0".into();
            job["spec"].as_object_mut().context("a spec")?.remove("engine");
        }
        cluster.apply(TEAM, &job)?;
    }
    for (name, _, words) in cases {
        let status = || -> Result<String> {
            let output = cluster.sh(&format!("switchyard status {name} --namespace {TEAM}"))?;
            Ok(output.split_whitespace().collect::<Vec<_>>().join(" "))
        };
        if name == "no-image" {
            // The image could still appear, so the job waits for minutes and names the missing
            // image.
            cluster.until("no-image reports its cause", || {
                let output = status()?;
                Ok(output.contains(words) && (output.contains("ErrImagePull") || output.contains("ImagePullBackOff")))
            })?;
        } else {
            cluster.wait_job(TEAM, name, "given up", |job| stage(job) == "Failed")?;
            let output = status()?;
            ensure!(output.contains(words), "{name}: {output}");
        }
        cluster.sh(&format!("kubectl --namespace {TEAM} delete {JOBS} {name}"))?;
    }
    Ok(())
}

/// Deleting the jobs deletes all of their objects.
fn ensure_nothing_left(cluster: &Cluster) -> Result<()> {
    cluster.sh(&format!("kubectl --namespace {TEAM} delete {JOBS} --all"))?;
    let kinds = "pods,services,configmaps,secrets,networkpolicies,poddisruptionbudgets,resourceclaims";
    let command = format!("kubectl --namespace {TEAM} get {kinds} -l training.switchyard.dev/job-uid -o name");
    cluster.until("the jobs have left nothing", || Ok(cluster.sh(&command)?.is_empty()))?;
    Ok(())
}
