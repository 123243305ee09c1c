//! `switchyard doctor JOB`: the logs of the pods of a job in a running cluster, and what its status knows about the first error.

use super::super::args::DoctorArgs;
use super::super::units::counted;
use crate::doctor::gang::{Gang, PodFacts};
use crate::doctor::{Diagnosis, Doctor, LONGEST_LINE};
use crate::plan::cluster::view::position;
use crate::plan::objects::TRAINER;
use futures::{AsyncBufRead, AsyncBufReadExt};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStateTerminated, Pod};
use kube::api::{ListParams, LogParams};
use kube::{Api, Client, ResourceExt};
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use switchyard_crds::{TrainJob, labels};
use switchyard_service::{Connection, client, connect};
use switchyard_worker_contract::exit::Exit;

/// Whether the only argument may be the name of a job: it is no file, and could be one of an object.
pub(super) fn name(args: &DoctorArgs) -> Option<&str> {
    let [only] = args.logs.as_slice() else { return None };
    let name = only.to_str().filter(|_| !Path::new(only).exists())?;
    let fits = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (!name.starts_with('-') && !name.is_empty() && name.len() <= 63 && name.bytes().all(fits)).then_some(name)
}

/// Reads the logs of all pods of a job that are still there.
///
/// # Errors
/// There is no such job or no cluster, or its logs cannot be read.
pub(super) fn read(args: &DoctorArgs, name: &str) -> Result<(Diagnosis, Gang), (String, Exit)> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| (format!("cannot start: {error}"), Exit::Unexpected))?;
    runtime.block_on(async {
        let usage = |error: String| {
            let no_file = format!("cannot read {name}: there is no such file or folder, and no such TrainJob either");
            (format!("{no_file}: {error}"), Exit::Usage)
        };
        let connection = Connection { kubeconfig: args.kubeconfig.clone(), context: args.context.clone() };
        let config = connect(&connection).await.map_err(usage)?;
        let client = client(config, "switchyard", Arc::new(|_, _, _| {})).map_err(usage)?;
        let namespace = args.namespace.as_str();
        let found = Api::<TrainJob>::namespaced(client.clone(), namespace).get_opt(name).await;
        let job = found.map_err(|error| usage(error.to_string()))?;
        let job = job.ok_or_else(|| usage(format!("none of this name in namespace {namespace} (--namespace)")))?;
        let unexpected = |error: String| (format!("{namespace}/{name}: {error}"), Exit::Unexpected);
        let pods = pods(&client, namespace, &job).await.map_err(unexpected)?;
        if pods.is_empty() {
            return Err(unexpected("there are no pods any more, and so no logs".into()));
        }
        let mut doctor = Doctor::new().map_err(|error| unexpected(format!("the table of errors: {error}")))?;
        let mut unread = Vec::new();
        for pod in &pods {
            if let Err(error) = of_pod(&client, namespace, &job, pod, &mut doctor).await {
                unread.push(format!("{}: {error}", pod.name_any()));
            }
        }
        if unread.len() == pods.len() {
            return Err(unexpected(format!("no log can be read: {}", unread.join("; "))));
        }
        let facts = pods.iter().map(|pod| {
            let (attempt, node_rank) = position(&pod.name_any());
            let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
            PodFacts { name: pod.name_any(), attempt, node_rank, node }
        });
        let gang = Gang { facts: facts.collect(), unread, job };
        Ok((doctor.diagnosis(), gang))
    })
}

/// The pods of a job that have begun, in the order of attempts and nodes.
async fn pods(client: &Client, namespace: &str, job: &TrainJob) -> Result<Vec<Pod>, String> {
    let uid = job.uid().unwrap_or_default();
    let params = ListParams::default().labels(&format!("{}={uid}", labels::JOB_UID));
    let list = Api::<Pod>::namespaced(client.clone(), namespace).list(&params).await;
    let list = list.map_err(|error| format!("cannot list its pods: {error}"))?;
    let has_begun = |pod: &Pod| pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
    let mut pods: Vec<Pod> = list.items.into_iter().filter(has_begun).collect();
    pods.sort_by_key(|pod| position(&pod.name_any()));
    Ok(pods)
}

async fn of_pod(
    client: &Client,
    namespace: &str,
    job: &TrainJob,
    pod: &Pod,
    doctor: &mut Doctor,
) -> Result<(), String> {
    let name = pod.name_any();
    let (attempt, node_rank) = position(&name);
    let per_node = crate::plan::objects::gpus(job).max(1);
    let per_node = job.spec.trainer.num_proc_per_node.map_or(per_node, i32::unsigned_abs);
    let folder = format!("attempt-{attempt}/{name}");
    let now = Timestamp::now().to_zoned(jiff::tz::TimeZone::UTC).year();
    // What the kubelet knows of the end is in no log.
    if let Some(words) = ended(pod) {
        let log_name =
            if per_node == 1 { format!("{folder}/rank-{node_rank}.status") } else { format!("{folder}.status") };
        let mut log = doctor.open(&log_name, now);
        doctor.stamped_line(&mut log, words.as_bytes());
    }
    let params = LogParams { container: Some(TRAINER.into()), timestamps: true, ..LogParams::default() };
    let stream = Api::<Pod>::namespaced(client.clone(), namespace).log_stream(&name, &params).await;
    let stream = stream.map_err(|error| error.to_string())?;
    let log_name = if per_node == 1 { format!("{folder}/rank-{node_rank}.log") } else { format!("{folder}.log") };
    lines(doctor, &log_name, now, stream).await.map_err(|error| error.to_string())
}

/// Hands every line of a stream over, keeping no more than one.
async fn lines(doctor: &mut Doctor, name: &str, year: i16, from: impl AsyncBufRead) -> std::io::Result<()> {
    let mut from = pin!(from);
    let mut log = doctor.open(name, year);
    let (mut line, mut passed) = (Vec::new(), 0);
    loop {
        let buffer = from.fill_buf().await?;
        if buffer.is_empty() {
            break;
        }
        let end = buffer.iter().position(|byte| *byte == b'\n');
        let part = &buffer[..end.unwrap_or(buffer.len())];
        let kept = part.len().min(LONGEST_LINE - line.len());
        line.extend_from_slice(&part[..kept]);
        passed += (part.len() - kept) as u64;
        let used = end.map_or(buffer.len(), |end| end + 1);
        from.as_mut().consume(used);
        if end.is_some() {
            doctor.stamped_line(&mut log, &line);
            doctor.passed_over(std::mem::take(&mut passed));
            line.clear();
        }
    }
    if !line.is_empty() {
        doctor.stamped_line(&mut log, &line);
    }
    Ok(())
}

/// How the kubelet says that a pod ended badly, with the time before it.
fn ended(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?;
    let containers = status.container_statuses.as_deref().unwrap_or_default();
    let trainer = containers.iter().find(|container| container.name == TRAINER);
    let terminated = trainer.and_then(|trainer| trainer.state.as_ref()?.terminated.as_ref());
    let bad = terminated.filter(|ended| ended.exit_code != 0);
    let words = |ended: &ContainerStateTerminated| {
        let at = ended.finished_at.as_ref().map(|time| format!("{} ", time.0)).unwrap_or_default();
        let reason = ended.reason.as_deref().unwrap_or_default();
        let signal = if ended.exit_code == 137 { ", killed by signal 9 (SIGKILL)" } else { "" };
        format!("{at}container {TRAINER} ended: {reason}, exit code {}{signal}", ended.exit_code)
    };
    let of_pod = status
        .reason
        .as_ref()
        .map(|reason| format!("Pod status: {reason}: {}", status.message.as_deref().unwrap_or_default()));
    of_pod.or_else(|| bad.map(words))
}

/// What could not be read, for the end of the screen.
pub(super) fn unread(gang: &Gang) -> Option<String> {
    let first = gang.unread.first()?;
    Some(format!("{} not read; {first}", counted(gang.unread.len() as u64, "log")))
}
