//! `switchyard status`: shows jobs once, or until interrupted.

use super::board::{self, Board};
use super::{Live, request_error, selector, stage};
use crate::args::{Cli, Output, StatusArgs};
use crate::connect::{self, wait_for};
use crate::failure::Failure;
use crate::output::{emit, json_line, print, width, yaml};
use crate::snapshot::name_of;
use futures::StreamExt;
use futures::stream::{BoxStream, select};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::runtime::{WatchStreamExt, watcher};
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::time::Duration;
use switchyard_crds::{PlacementSlice, TrainJob};
use switchyard_worker_contract::exit::Exit;

/// Shortest interval between two redraws.
const REDRAW: Duration = Duration::from_millis(200);
/// Interval between reads of the controller's Lease.
const POLL: Duration = Duration::from_secs(10);
/// Interval for redrawing ages without other changes.
const TICK: Duration = Duration::from_secs(1);

/// Shows the state of jobs.
pub(crate) fn status(cli: &Cli, args: &StatusArgs) -> Result<Exit, Failure> {
    wait_for(async {
        let live = Live::open(&args.connection).await?;
        if args.watch { watch(cli, args, &live).await } else { once(cli, args, &live).await }
    })
}

async fn once(cli: &Cli, args: &StatusArgs, live: &Live) -> Result<Exit, Failure> {
    let mut board = Board { only: args.job.is_some(), all_namespaces: args.all_namespaces, ..Board::default() };
    let found = match &args.job {
        Some(name) => {
            let job = live.job(name).await?;
            let pods = live.answer(live.pods_of_job(&job)).await?;
            board.pods = pods.into_iter().map(|pod| ((pod.attempt, pod.node_rank), pod)).collect();
            vec![job]
        }
        None => {
            let (api, all) = (api(live, args), Default::default());
            let list = live.answer(api.list(&all)).await;
            list.map_err(|error| request_error("list TrainJobs", error))?.items
        }
    };
    board.jobs = found.into_iter().map(|job| (name_of(&job), job)).collect();
    board.leases = board::by_namespace(live.leases().await);
    let now = Timestamp::now();
    emit(cli.output, "JobStatus", &board::bodies(&board, now), || board::table(&board, now, width()));
    Ok(Exit::Done)
}

fn api(live: &Live, args: &StatusArgs) -> Api<TrainJob> {
    if args.all_namespaces { Api::all(live.client.clone()) } else { live.jobs() }
}

/// A watch event.
enum WatchEvent {
    Job(Box<watcher::Event<TrainJob>>),
    Pod(Box<watcher::Event<Pod>>),
    Slice(Box<watcher::Event<PlacementSlice>>),
    Leases(Vec<Lease>),
    Trouble(String),
    Tick,
}

async fn watch(cli: &Cli, args: &StatusArgs, live: &Live) -> Result<Exit, Failure> {
    let mut board = Board { only: args.job.is_some(), all_namespaces: args.all_namespaces, ..Board::default() };
    let mut jobs = watcher::Config::default();
    let mut events: BoxStream<'_, WatchEvent> = match &args.job {
        Some(name) => {
            // Report a missing job immediately. The job's UID also selects its objects.
            let job = live.job(name).await?;
            jobs = jobs.fields(&format!("metadata.name={name}"));
            let own = watcher::Config::default().labels(&selector(&job));
            let parts = select(
                stream(live.pods(), own.clone(), WatchEvent::Pod),
                stream(live.slices(), own, WatchEvent::Slice),
            );
            select(stream(api(live, args), jobs, WatchEvent::Job), parts).boxed()
        }
        None => stream(api(live, args), jobs, WatchEvent::Job),
    };
    let first = live.answer(events.next()).await;
    events = futures::stream::iter(first).chain(events).boxed();
    let polls = futures::stream::unfold(live.clone(), |live| async {
        let leases = live.leases().await;
        tokio::time::sleep(POLL).await;
        Some((WatchEvent::Leases(leases), live))
    });
    events = select(events, polls).boxed();
    let mut show = Show::new(cli);
    if show.bar.is_some() {
        let ticks = futures::stream::unfold((), |()| async {
            tokio::time::sleep(TICK).await;
            Some((WatchEvent::Tick, ()))
        });
        events = select(events, ticks).boxed();
    }
    let (mut last_error, mut was_outdated) = (None, false);
    let interrupted = tokio::signal::ctrl_c();
    tokio::pin!(interrupted);
    loop {
        let next = tokio::select! {
            next = events.next() => next,
            _ = &mut interrupted => break Ok(Exit::Interrupted),
        };
        match next {
            Some(WatchEvent::Job(event)) => {
                if let Some(gone) = board.job(*event).filter(|_| board.only) {
                    show.end();
                    break Err(Failure::usage(format!("{gone} was deleted")));
                }
            }
            Some(WatchEvent::Pod(event)) => board.pod(*event),
            Some(WatchEvent::Slice(event)) => board.slice(*event),
            Some(WatchEvent::Leases(leases)) => {
                board.leases = board::by_namespace(leases);
                let outdated = board.outdated(Timestamp::now());
                if outdated.is_some() && !was_outdated && show.bar.is_none() {
                    outdated.iter().for_each(|why| show.note(&format!("warning: {why}")));
                }
                was_outdated = outdated.is_some();
            }
            Some(WatchEvent::Trouble(trouble)) => {
                // Report an error once rather than with every retry.
                if last_error.as_ref() != Some(&trouble) {
                    show.note(&format!("warning: {trouble}; retrying"));
                    last_error = Some(trouble);
                }
            }
            Some(WatchEvent::Tick) => {}
            None => break Ok(Exit::Done),
        }
        show.show(&board);
        if board.only
            && let Some(end) = board.jobs.values().find_map(board::ended)
        {
            show.end();
            break Ok(end);
        }
    }
}

/// A watch that continues after errors.
fn stream<K>(
    api: Api<K>,
    config: watcher::Config,
    wrap: fn(Box<watcher::Event<K>>) -> WatchEvent,
) -> BoxStream<'static, WatchEvent>
where
    K: kube::Resource<DynamicType = ()> + Clone + std::fmt::Debug + DeserializeOwned + Send + 'static,
{
    let events = watcher(api, config).default_backoff();
    events
        .map(move |event| event.map_or_else(|error| WatchEvent::Trouble(words(&error)), |event| wrap(Box::new(event))))
        .boxed()
}

fn words(error: &watcher::Error) -> String {
    match error {
        watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchStartFailed(error)
        | watcher::Error::WatchFailed(error) => connect::error_message(error),
        watcher::Error::WatchError(status) => status.message.clone(),
        error => error.to_string(),
    }
}

/// Output of a watch.
struct Show {
    output: Output,
    bar: Option<ProgressBar>,
    /// The last printed state of each job.
    printed: BTreeMap<String, String>,
}

impl Show {
    fn new(cli: &Cli) -> Show {
        let is_drawn = cli.output == Output::Table && std::io::stdout().is_terminal();
        let bar = is_drawn.then(|| {
            let hertz = (1000 / REDRAW.as_millis()) as u8;
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stdout_with_hz(hertz));
            bar.set_style(ProgressStyle::with_template("{msg}").unwrap_or_else(|_| ProgressStyle::default_spinner()));
            bar
        });
        Show { output: cli.output, bar, printed: BTreeMap::new() }
    }

    fn show(&mut self, board: &Board) {
        if let Some(bar) = &self.bar {
            bar.set_message(board::table(board, Timestamp::now(), width()).trim_end().to_owned());
            return;
        }
        for (name, job) in &board.jobs {
            let (line, state) = match self.output {
                Output::Json | Output::Yaml => (None, board::body(job).to_string()),
                Output::Table | Output::Dot => {
                    let state = board::state(job);
                    let before = self.printed.get(name).and_then(|state| state.split(' ').next());
                    let stage = match before {
                        Some(before) if before != stage(job) => format!("{before}->"),
                        _ => String::new(),
                    };
                    let now = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
                    (Some(format!("{now} {name} {stage}{state}")), state)
                }
            };
            if self.printed.get(name) == Some(&state) {
                continue;
            }
            match line {
                Some(line) => print(&line),
                None if self.output == Output::Json => json_line("JobStatus", board::body(job)),
                None => print(&format!("---\n{}", yaml(&board::body(job)))),
            }
            self.printed.insert(name.clone(), state);
        }
        self.printed.retain(|name, _| board.jobs.contains_key(name));
    }

    fn note(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None => anstream::eprintln!("{text}"),
        }
    }

    /// Keeps the last screen on the terminal.
    fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.abandon();
        }
    }
}
