//! Access control in a real cluster: an agent with another node's token, and connections from
//! outside to the workers' ports.

use crate::e2e::faults::processes_of_pod;
use crate::e2e::{Cluster, JOBS, TEAM, example, message, stage};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};
use switchyard_crds::labels;
use switchyard_tests::nodes::TOOLS;
use switchyard_tests::{Ended, SYSTEM, TIMEOUT};
use switchyard_worker_contract::env;
use switchyard_worker_contract::pod::KEY_FILE;

const REPORTS: &str = "gputopologies.training.switchyard.dev";

/// The token of the agent on a node, as an attacker who controls the node would find it.
fn token(cluster: &Cluster, node: &str) -> Result<String> {
    let list = format!(
        "kubectl --namespace {SYSTEM} get pods -l app.kubernetes.io/component=node-agent --field-selector spec.nodeName={node} \
         -o jsonpath='{{.items[*].metadata.uid}}'"
    );
    let uid = cluster.sh(&list)?;
    let path = format!("/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~projected/token/token");
    let read = cluster.nodes.run(node, "cat", &[&path])?;
    ensure!(read.code == Some(0) && read.stdout.matches('.').count() == 2, "{path}: {}", read.stderr);
    Ok(read.stdout)
}

/// Runs kubectl with this token.
fn with(cluster: &Cluster, token: &str, arguments: &str) -> Result<Ended> {
    let admin = fs::read_to_string(cluster.nodes.plane.kubeconfig("admin"))?;
    let path = cluster.folder.path().join("stranger.kubeconfig");
    fs::write(&path, admin.replace("token-admin", token.trim()))?;
    Ok(cluster.line(cluster.folder.path(), &format!("kubectl --kubeconfig {} {arguments}", path.display())))
}

/// How an agent writes a report. `kubectl patch` would read the status first, which an agent must
/// not do.
const STATUS: &str = "apply --server-side --force-conflicts --validate=false --subresource=status";

/// Operations with the token of node-1's agent, and the expected refusal; empty if allowed.
const TRIES: [(&str, &str); 18] = [
    ("annotate REPORTS node-1 example.com/seen=yes", ""),
    ("STATUS -f node-1.json", ""),
    ("get REPORTS node-1", ""),
    ("annotate REPORTS node-2 example.com/seen=yes", "expected node-1, the node of this agent"),
    ("STATUS -f node-2.json", "expected node-1, the node of this agent"),
    ("create -f node-3.json", "expected node-1, the node of this agent"),
    ("delete REPORTS node-2", r#"cannot delete resource "gputopologies""#),
    ("delete REPORTS node-1", r#"cannot delete resource "gputopologies""#),
    ("get REPORTS", r#"cannot list resource "gputopologies""#),
    ("get secrets --all-namespaces", r#"cannot list resource "secrets""#),
    ("get secret some --namespace team", r#"cannot get resource "secrets""#),
    ("create configmap some --namespace switchyard-system", r#"cannot create resource "configmaps""#),
    ("run some --image some --namespace switchyard-system", r#"cannot create resource "pods""#),
    (
        "create token switchyard-controller --namespace switchyard-system",
        r#"cannot create resource "serviceaccounts/token""#,
    ),
    ("label node node-1 some=label", r#"cannot patch resource "nodes""#),
    ("get trainjobs.training.switchyard.dev --namespace team", r#"cannot list resource "trainjobs""#),
    ("get pods --all-namespaces", r#"cannot list resource "pods""#),
    ("get resourceclaims --namespace team", r#"cannot list resource "resourceclaims""#),
];

/// An agent with a real token can write only about its own node.
pub(crate) fn a_running_agent_can_write_only_its_own_report(cluster: &Cluster) -> Result<()> {
    for (node, status) in [("node-1", json!({})), ("node-2", json!({"agentVersion": "9.9.9"})), ("node-3", json!({}))] {
        let report = json!({
            "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "GPUTopology", "metadata": {"name": node},
            "spec": {}, "status": status,
        });
        fs::write(cluster.folder.path().join(format!("{node}.json")), report.to_string())?;
    }
    let mine = token(cluster, "node-1")?;
    for (line, words) in TRIES {
        let ended = with(cluster, &mine, &line.replace("REPORTS", REPORTS).replace("STATUS", STATUS))?;
        let is_expected = match words {
            "" => ended.code == Some(0),
            _ => ended.code != Some(0) && ended.stderr.contains(words),
        };
        ensure!(is_expected, "{line}: exit {:?}; expected {words:?}\n{}{}", ended.code, ended.stdout, ended.stderr);
    }
    let foreign_report = cluster.get("", REPORTS, "node-2")?.context("the report of node-2 is gone")?;
    ensure!(
        foreign_report["metadata"]["annotations"].is_null() && foreign_report["status"]["agentVersion"] != "9.9.9",
        "{foreign_report:#}"
    );
    // A token of this account that is not bound to a pod names no node.
    let unbound = cluster.sh(&format!("kubectl --namespace {SYSTEM} create token switchyard-node-agent"))?;
    let ended = with(cluster, &unbound, &format!("annotate {REPORTS} node-1 example.com/seen=again --overwrite"))?;
    ensure!(ended.stderr.contains("expected a token that names a node"), "{}{}", ended.stdout, ended.stderr);
    println!("         {} attempts with the agent pod's token", TRIES.len());
    Ok(())
}

/// The job under attack.
const JOB: &str = "victim";
/// Another tenant's namespace.
const OTHERS: &str = "strangers";
/// Concurrent connections that send nothing.
const SILENT: usize = 200;

/// A job that trains on two nodes until it is stopped.
fn victim() -> Result<Value> {
    let mut job = example("gpt-cluster.yaml")?;
    job["metadata"]["name"] = JOB.into();
    job["spec"]["engine"]["steps"] = 100_000_000.into();
    Ok(job)
}

/// Waits until the job has trained some more steps, still in its first attempt.
fn trains_on(cluster: &Cluster, what: &str) -> Result<()> {
    let step = |job: &Value| job["status"]["trainerStatus"]["step"].as_u64().unwrap_or(0);
    let before = step(&cluster.job(TEAM, JOB)?);
    let job = cluster.wait_job(TEAM, JOB, &format!("training after {what}"), |job| {
        // A job that was just created has no attempt yet.
        job["status"]["attempt"].as_u64() > Some(1) || step(job) > before + 20
    })?;
    let status = &job["status"];
    ensure!(status["attempt"] == 1 && stage(&job) == "Running", "{what}: {}: {status:#}", message(&job));
    println!("         {what}: step {before} -> {}", step(&job));
    Ok(())
}

/// Listening ports in a pod's network namespace, with their addresses.
fn listening(pod: &Value) -> Result<BTreeSet<(String, u16)>> {
    let process = processes_of_pod(pod["metadata"]["uid"].as_str().context("no UID")?)?;
    let process = process.first().with_context(|| format!("no process: {:#}", pod["status"]))?;
    let mut found = BTreeSet::new();
    for table in ["net/tcp", "net/tcp6"] {
        for line in fs::read_to_string(process.join(table))?.lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            // State 0A in the kernel's table is LISTEN. Addresses are in host byte order.
            if let [_, local, _, "0A", ..] = fields[..] {
                let (address, port) = local.split_once(':').context("an address without a port")?;
                let address = match u32::from_str_radix(address, 16) {
                    Ok(number) => Ipv4Addr::from(number.to_ne_bytes()).to_string(),
                    Err(_) => address.to_string(),
                };
                found.insert((address, u16::from_str_radix(port, 16)?));
            }
        }
    }
    Ok(found)
}

/// The job's NetworkPolicy admits only its own pods. Enforcing it is up to the network plugin, and
/// the one used here does not, so only the workers themselves stop the following attacks.
fn fenced(cluster: &Cluster, zero: &Value, one: &Value) -> Result<()> {
    let policy = cluster.get(TEAM, "networkpolicy", JOB)?.context("no NetworkPolicy")?;
    let uid = cluster.job(TEAM, JOB)?["metadata"]["uid"].clone();
    let own = json!({"matchLabels": {labels::JOB_UID: uid}});
    let expected =
        json!({"podSelector": own, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": own}]}]});
    ensure!(policy["spec"] == expected, "{:#}", policy["spec"]);
    let is_meant = |pod: &Value| pod["metadata"]["labels"][labels::JOB_UID] == uid;
    ensure!(is_meant(zero) && is_meant(one), "the policy does not select the job's pods");
    Ok(())
}

/// Payloads of unauthenticated clients.
fn garbage() -> [(&'static str, Vec<u8>); 4] {
    let noise = (0..3000_u32).map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    [
        ("noise", noise),
        ("a request of HTTP", b"GET / HTTP/1.1\r\n\r\n".to_vec()),
        // Magic number, version and kind of a first message.
        ("the beginning of a frame", vec![0x53, 0x77, 0x79, 0x64, 2, 1]),
        ("silence", Vec::new()),
    ]
}

/// A worker closes an unauthenticated connection without sending a byte, both from the host and
/// from another tenant's pod.
fn cut_off(cluster: &Cluster, (address, port): (&str, u16), what: &str, bytes: &[u8]) -> Result<()> {
    let (received, time) = sent_from_here(address, port, bytes)?;
    ensure!(received == 0, "{what}: got {received} bytes in reply");
    let octal: String = bytes.iter().map(|byte| format!("\\{byte:03o}")).collect();
    let script = format!("printf '{octal}' | nc {address} {port} | wc -c");
    let line = ["--namespace", OTHERS, "exec", "stranger", "--", "timeout", "60", "sh", "-c", &script];
    let ended = cluster.nodes.plane.kubectl(&line);
    ensure!(ended.code == Some(0) && ended.stdout.trim() == "0", "{what}: {}{}", ended.stdout, ended.stderr);
    ensure!(!ended.stderr.contains("can't connect"), "{what}: {}", ended.stderr);
    println!("{:5.1} s  until the connection is closed: {what}", time.as_secs_f64());
    Ok(())
}

/// Sends these bytes from the host; returns the number of bytes received and the time until the
/// connection was closed.
fn sent_from_here(address: &str, port: u16, bytes: &[u8]) -> Result<(usize, Duration)> {
    let begin = Instant::now();
    let mut stream = TcpStream::connect((address, port))?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.write_all(bytes)?;
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Err(error) if error.kind() != ErrorKind::ConnectionReset => Err(error).context("the connection stays open"),
        _ => Ok((answer.len(), begin.elapsed())),
    }
}

/// Another tenant's pod that satisfies Pod Security.
fn foreign_pod() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "stranger"},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "securityContext": {"runAsNonRoot": true, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{
                "name": "main", "image": TOOLS,
                "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}},
            }],
        },
    })
}

/// A worker that knows everything about a pod of the job except the key: program, configuration,
/// names, ranks and address.
fn impostor(cluster: &Cluster, pod: &Value) -> Result<()> {
    let config = cluster.get(TEAM, "configmap", &format!("{JOB}-1"))?.context("no configuration")?;
    let mut objects = vec![json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": config["metadata"]["name"]}, "data": config["data"],
    })];
    let mut spec = pod["spec"].clone();
    let fields = spec.as_object_mut().context("no spec")?;
    fields.retain(|field, _| ["containers", "nodeName", "securityContext", "volumes"].contains(&field.as_str()));
    spec["restartPolicy"] = "Never".into();
    let container = &mut spec["containers"][0];
    container["resources"] = json!({});
    container["env"]
        .as_array_mut()
        .context("no environment")?
        .push(json!({"name": env::CONNECT_TIMEOUT_SECONDS, "value": "3"}));
    for volume in spec["volumes"].as_array().into_iter().flatten().filter(|volume| !volume["secret"].is_null()) {
        objects.push(json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": volume["secret"]["secretName"]},
            "stringData": {KEY_FILE: "0123456789abcdef0123456789abcdef"},
        }));
    }
    ensure!(objects.len() == 2, "the pod has one key: {:#}", spec["volumes"]);
    objects.push(json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "impostor"}, "spec": spec}));
    cluster.apply(OTHERS, &json!({"apiVersion": "v1", "kind": "List", "items": objects}))?;
    let over = || Ok(cluster.get(OTHERS, "pod", "impostor")?.is_some_and(|pod| pod["status"]["phase"] == "Failed"));
    cluster.until("the impostor has given up", over)?;
    let log = cluster.sh(&format!("kubectl --namespace {OTHERS} logs impostor"))?;
    ensure!(log.contains("must have the same job token"), "{log}");
    Ok(())
}

/// Only rank 0 listens, on its pod's address. It rejects connections without the key, and the
/// training continues.
pub(crate) fn workers_reject_foreign_connections(cluster: &Cluster) -> Result<()> {
    let text = "create configmap text --from-file=docs";
    cluster.sh(&format!("kubectl --namespace {TEAM} {text}"))?;
    cluster.apply(TEAM, &victim()?)?;
    trains_on(cluster, "it starts")?;
    let pods = [0, 1].map(|rank| cluster.get(TEAM, "pod", &format!("{JOB}-1-{rank}")));
    let [Some(zero), Some(one)] = pods.map(|pod| pod.ok().flatten()) else { anyhow::bail!("no pods of {JOB}") };
    let address = zero["status"]["podIP"].as_str().context("no address")?;
    let (open, none) = (listening(&zero)?, listening(&one)?);
    println!("         who listens: {open:?} and {none:?}");
    ensure!(none.is_empty() && open.len() == 1 && open.iter().all(|(at, _)| at == address), "{open:?} and {none:?}");
    let port = open.first().context("no port is open")?.1;
    fenced(cluster, &zero, &one)?;

    cluster.team(OTHERS)?;
    cluster.sh(&format!("kubectl --namespace {OTHERS} {text}"))?;
    cluster.apply(OTHERS, &foreign_pod())?;
    cluster.sh(&format!("kubectl --namespace {OTHERS} wait --for=condition=Ready pod/stranger --timeout=600s"))?;
    let garbage = garbage();
    thread::scope(|scope| {
        let tries =
            garbage.each_ref().map(|(what, bytes)| scope.spawn(|| cut_off(cluster, (address, port), what, bytes)));
        tries.into_iter().try_for_each(|one| one.join().unwrap_or_else(|_| anyhow::bail!("a thread panicked")))
    })?;
    let silent: Vec<TcpStream> = (0..SILENT).map(|_| TcpStream::connect((address, port))).collect::<Result<_, _>>()?;
    trains_on(cluster, "garbage, and many silent connections")?;
    drop(silent);
    impostor(cluster, &one)?;
    trains_on(cluster, "a worker with another key")?;
    cluster.sh(&format!("kubectl --namespace {TEAM} delete {JOBS} {JOB}")).map(drop)
}
