//! `switchyard doctor JOB`: diagnoses a job in a running cluster from its pods' logs and its
//! status.

use super::{Live, ranks};
use crate::args::DoctorArgs;
use crate::connect::{error_message, wait_for};
use crate::failure::Failure;
use futures::{AsyncBufRead, AsyncBufReadExt};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use kube::api::LogParams;
use std::path::Path;
use std::pin::pin;
use switchyard_crds::names::TRAINER;
use switchyard_plan::cluster::view::PodView;
use switchyard_tools::doctor::gang::{Gang, PodFacts};
use switchyard_tools::doctor::{Diagnosis, Doctor, LONGEST_LINE};

/// The only argument if it can be a job's name: it has the form of a name and is not a file.
pub(crate) fn name_in(args: &DoctorArgs) -> Option<&str> {
    let [only] = args.logs.as_slice() else { return None };
    let name = only.to_str().filter(|_| !Path::new(only).exists())?;
    let fits = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (!name.starts_with('-') && !name.is_empty() && name.len() <= 63 && name.bytes().all(fits)).then_some(name)
}

/// Reads the logs of a job's existing pods.
///
/// # Errors
/// There is no such job, no cluster, or the logs cannot be read.
pub(crate) fn diagnose(args: &DoctorArgs, name: &str) -> Result<(Diagnosis, Gang), Failure> {
    wait_for(async {
        let no_file = |failure: Failure| {
            let both = "there is no such file, folder or TrainJob";
            Failure::usage(format!("cannot read {name}: {both}: {failure}"))
        };
        let live = Live::open(&args.connection).await.map_err(no_file)?;
        let job = live.job(name).await.map_err(no_file)?;
        let mut pods = live.pods_of_job(&job).await?;
        pods.retain(|pod| pod.node.is_some());
        let unexpected = |error: String| Failure::unexpected(format!("{name}: {error}"));
        if pods.is_empty() {
            return Err(unexpected("no pod has begun, or all are gone, and so there are no logs".into()));
        }
        let per_node = ranks(&job).first().map_or(1, |(_, count)| *count);
        let mut doctor = Doctor::new().map_err(|error| unexpected(format!("the table of errors: {error}")))?;
        let mut unread = Vec::new();
        for pod in &pods {
            if let Err(error) = of_pod(&live, pod, per_node, &mut doctor).await {
                unread.push(format!("{}: {error}", pod.name));
            }
        }
        if unread.len() == pods.len() {
            return Err(unexpected(format!("no log can be read: {}", unread.join("; "))));
        }
        let facts = |pod: PodView| {
            let PodView { name, attempt, node_rank, node, .. } = pod;
            PodFacts { name, attempt, node_rank, node }
        };
        let pods = pods.into_iter().map(facts).collect();
        Ok((doctor.diagnosis(), Gang { pods, per_node, unread, job }))
    })
}

async fn of_pod(live: &Live, pod: &PodView, per_node: u32, doctor: &mut Doctor) -> Result<(), String> {
    // The log's name contains the rank; in a log of several ranks, each line does.
    let rank = if per_node == 1 { format!("/rank-{}", pod.node_rank) } else { String::new() };
    let log_name = |end: &str| format!("attempt-{}/{}{rank}.{end}", pod.attempt, pod.name);
    let year = Timestamp::now().to_zoned(TimeZone::UTC).year();
    // Append what the kubelet knows about the end, since the log lacks it.
    if let Some(line) = ended(pod) {
        let mut log = doctor.open(&log_name("status"), year);
        doctor.stamped_line(&mut log, line.as_bytes());
    }
    let container = pod.logs().unwrap_or(TRAINER).to_owned();
    let params = LogParams { container: Some(container), timestamps: true, ..LogParams::default() };
    let stream = live.pods().log_stream(&pod.name, &params).await.map_err(|error| error_message(&error))?;
    lines(doctor, &log_name("log"), year, stream).await.map_err(|error| error.to_string())
}

/// Passes every line of a stream to `doctor`, holding one line in memory at a time.
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
            doctor.skip_bytes(std::mem::take(&mut passed));
            line.clear();
        }
    }
    if !line.is_empty() {
        doctor.stamped_line(&mut log, &line);
    }
    Ok(())
}

/// The kubelet's message about a failed pod, prefixed with its time.
fn ended(pod: &PodView) -> Option<String> {
    if let Some((reason, message)) = pod.reason.as_ref().filter(|(reason, _)| !reason.is_empty()) {
        return Some(format!("Pod status: {reason}: {message}"));
    }
    let (container, ended) = pod.end().filter(|(_, ended)| ended.code != 0)?;
    let at = ended.at.map(|time| format!("{time} ")).unwrap_or_default();
    let signal = if ended.code == 137 { ", killed by signal 9 (SIGKILL)" } else { "" };
    Some(format!("{at}container {container} ended: {}, exit code {}{signal}", ended.reason, ended.code))
}
