//! `switchyard logs`: prints the output of a job's ranks, each line with its node.

use super::{Live, ranks, request_error};
use crate::args::{Cli, LogsArgs};
use crate::connect::wait_for;
use crate::failure::Failure;
use crate::output::print;
use futures::stream::{BoxStream, select_all};
use futures::{AsyncBufReadExt, StreamExt};
use kube::api::LogParams;
use switchyard_core::units::rank_list;
use switchyard_crds::names::TRAINER;
use switchyard_crds::{Framework, TrainJob};
use switchyard_plan::cluster::view::PodView;
use switchyard_worker_contract::event::Event;
use switchyard_worker_contract::exit::Exit;

pub(crate) fn logs(cli: &Cli, args: &LogsArgs) -> Result<Exit, Failure> {
    wait_for(async {
        let live = Live::open(&args.connection).await?;
        let job = live.job(&args.job).await?;
        let pods = chosen(args, &job, live.pods_of_job(&job).await?)?;
        let of_one =
            args.rank.filter(|_| args.container.is_none() && job.spec.trainer.framework == Framework::Switchyard);
        if args.rank.is_some() && of_one.is_none() && !cli.quiet {
            let what =
                "the programs of other frameworks do not say which rank writes a line: this is the log of its node";
            anstream::eprintln!("note: {what}");
        }
        if let Some(what) = instead_of_trainers(args, &pods).filter(|_| !cli.quiet) {
            anstream::eprintln!("note: {what}");
        }
        let is_alone = pods.len() == 1;
        let mut lines = select_all(open(&live, args, &pods).await?);
        while let Some((node_rank, line)) = lines.next().await {
            let line =
                line.map_err(|error| Failure::unexpected(format!("the log of node {node_rank} ends: {error}")))?;
            if of_one.is_some_and(|rank| !is_from_rank(rank, &line)) {
                continue;
            }
            print(&if is_alone { line } else { format!("[node {node_rank}] {line}") });
        }
        Ok(Exit::Done)
    })
}

type Lines = BoxStream<'static, (u32, std::io::Result<String>)>;

/// The logs of pods, one after another or, with `follow`, interleaved.
async fn open(live: &Live, args: &LogsArgs, pods: &[PodView]) -> Result<Vec<Lines>, Failure> {
    let mut logs: Vec<Lines> = Vec::new();
    for pod in pods {
        let node_rank = pod.node_rank;
        let params = LogParams {
            container: container(args, pod).map(str::to_owned),
            follow: args.follow,
            tail_lines: args.tail,
            ..LogParams::default()
        };
        let log = live.pods().log_stream(&pod.name, &params).await;
        let log = log.map_err(|error| request_error(&format!("read the log of {}", pod.name), error))?;
        logs.push(log.lines().map(move |line| (node_rank, line)).boxed());
    }
    if args.follow {
        return Ok(logs);
    }
    Ok(vec![futures::stream::iter(logs).flatten().boxed()])
}

/// The requested pods, if they have started.
pub(super) fn chosen(args: &LogsArgs, job: &TrainJob, mut pods: Vec<PodView>) -> Result<Vec<PodView>, Failure> {
    let attempts: Vec<u32> = pods.iter().map(|pod| pod.attempt).collect();
    let attempt = args.attempt.or(attempts.iter().copied().max());
    let Some(attempt) = attempt.filter(|attempt| attempts.contains(attempt)) else {
        let have = match (attempts.first(), args.attempt) {
            (Some(_), Some(requested)) => {
                format!("attempt {requested} has no pods any more; pods exist of attempt {}", list(&attempts))
            }
            _ => "it has no pods now (switchyard status)".into(),
        };
        return Err(Failure::usage(format!("no log of {}: {have}", args.job)));
    };
    pods.retain(|pod| pod.attempt == attempt);
    let node_rank = match args.rank {
        None => args.node_rank,
        Some(rank) => Some(node_of(rank, job, pods.len() as u32).map_err(Failure::usage)?),
    };
    if let Some(node_rank) = node_rank {
        let nodes: Vec<u32> = pods.iter().map(|pod| pod.node_rank).collect();
        pods.retain(|pod| pod.node_rank == node_rank);
        if pods.is_empty() {
            let text = format!("no log of node {node_rank}: attempt {attempt} has pods of nodes {}", list(&nodes));
            return Err(Failure::usage(text));
        }
    }
    let waiting: Vec<&str> =
        pods.iter().filter(|pod| container(args, pod).is_none()).map(|pod| pod.name.as_str()).collect();
    if waiting.len() == pods.len() {
        let text = format!("no log yet: {} not started (switchyard status {})", waiting.join(", "), args.job);
        return Err(Failure::unexpected(text));
    }
    pods.retain(|pod| container(args, pod).is_some());
    Ok(pods)
}

/// The container whose log is read: the named one, otherwise the trainer or the init container that
/// blocks it. `None` if none has started.
fn container<'a>(args: &'a LogsArgs, pod: &'a PodView) -> Option<&'a str> {
    args.container.as_deref().filter(|_| pod.node.is_some()).or_else(|| pod.logs())
}

/// Names the logs shown in place of the trainer's when no container was named.
pub(super) fn instead_of_trainers(args: &LogsArgs, pods: &[PodView]) -> Option<String> {
    let mut others = pods.iter().filter_map(|pod| Some((pod, container(args, pod)?)));
    let (pod, name) = others.find(|(_, name)| args.container.is_none() && *name != TRAINER)?;
    Some(format!("the trainer of {} has not started: this is the log of its init container {name}", pod.name))
}

fn list(numbers: &[u32]) -> String {
    rank_list(numbers.iter().copied())
}

fn node_of(rank: u32, job: &TrainJob, nodes: u32) -> Result<u32, String> {
    let mut ranks = ranks(job);
    if ranks.is_empty() {
        let each = job.spec.trainer.num_proc_per_node.map_or(1, i32::unsigned_abs);
        ranks = (0..nodes).map(|node| (node * each, each)).collect();
    }
    let found = ranks.iter().position(|(first, count)| (*first..first + count).contains(&rank));
    found.map(|node| node as u32).ok_or_else(|| {
        let last = ranks.last().map_or(0, |(first, count)| (first + count).saturating_sub(1));
        format!("--rank {rank}: the job has ranks 0 to {last}")
    })
}

/// Whether a line of a pod comes from this rank. Our worker marks each line with its rank, and
/// events contain it.
pub(super) fn is_from_rank(rank: u32, line: &str) -> bool {
    if let Some(rest) = line.strip_prefix("[rank ") {
        return rest.split_once(']').is_some_and(|(number, _)| number.parse() == Ok(rank));
    }
    match serde_json::from_str::<Event>(line) {
        // Rank 0 reports for the whole job.
        Ok(event) => event.rank().unwrap_or(0) == rank,
        Err(_) => false,
    }
}
