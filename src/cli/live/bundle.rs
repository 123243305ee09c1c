//! `switchyard support-bundle`: collects everything needed to diagnose a problem remotely in one
//! archive.
//!
//! Objects that the user cannot read are skipped and listed in the archive. Secrets are never
//! requested, and objects are stripped as in `switchyard snapshot`: no environments, commands or
//! annotations. The bundled cluster works with `--snapshot` of all other commands.

use super::board::ended;
use super::{Live, request_error, selector, stage};
use crate::args::{BundleArgs, Cli};
use crate::connect::wait_for;
use crate::failure::Failure;
use crate::output::print;
use crate::snapshot::{self, SnapshotFile, name_of};
use flate2::Compression;
use flate2::write::GzEncoder;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Event, Pod};
use kube::api::{ListParams, LogParams};
use kube::{Api, ResourceExt};
use serde_json::json;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use switchyard_core::units::{binary, counted};
use switchyard_crds::TrainJob;
use switchyard_worker_contract::exit::Exit;

/// Most lines of each log, from its end.
const LINES: i64 = 20_000;
/// Most bytes of each log.
const BYTES: i64 = 8 << 20;
/// Label of our chart's pods.
const OURS: &str = "app.kubernetes.io/name=switchyard";

pub(crate) fn bundle(cli: &Cli, args: &BundleArgs) -> Result<Exit, Failure> {
    let now = Timestamp::now();
    let stem = format!("switchyard-bundle-{}", now.strftime("%Y%m%dT%H%M%SZ"));
    let path = args.out.clone().unwrap_or_else(|| PathBuf::from(format!("{stem}.tar.gz")));
    let result = wait_for(async {
        let live = Live::open(&args.connection).await?;
        let cannot = |error: io::Error| Failure::unexpected(format!("cannot write {}: {error}", path.display()));
        let mut archive = Archive::new(&path, stem.clone(), now, cli).map_err(cannot)?;
        collect(&live, args, &mut archive, now).await?;
        archive.finish().map_err(cannot)
    });
    let (files, bytes, missing) = result.inspect_err(|_| drop(std::fs::remove_file(partial(&path))))?;
    let missing = if missing == 0 { String::new() } else { format!("; {missing} could not be collected (README.txt)") };
    print(&format!("{}: {}, {}{missing}", path.display(), counted(files, "file"), binary(bytes)));
    Ok(Exit::Done)
}

async fn collect(live: &Live, args: &BundleArgs, archive: &mut Archive, now: Timestamp) -> Result<(), Failure> {
    let server =
        live.client.apiserver_version().await.map_err(|error| request_error("ask for the server's version", error))?;
    let versions = json!({"switchyard": archive.version, "server": server.git_version, "taken": now});
    archive.json("versions.json", &versions)?;
    match snapshot::take(&live.client, None).await {
        Ok(items) => archive.json("cluster.json", &json!(SnapshotFile::taken(items, now)))?,
        Err(error) => archive.missing("cluster.json", &error),
    }
    for job in &jobs(live, args).await? {
        of_job(live, args, archive, job).await?;
    }
    let system: Api<Pod> = Api::namespaced(live.client.clone(), &args.system_namespace);
    match system.list(&ListParams::default().labels(OURS)).await {
        Ok(pods) if pods.items.is_empty() => {
            let text = format!("no pod with {OURS} in {} (--system-namespace)", args.system_namespace);
            archive.missing("system", &text);
        }
        Ok(pods) => {
            for pod in &pods.items {
                logs(&system, pod, "system", archive).await?;
            }
        }
        Err(error) => archive.missing("system", &request_error("list pods", error).message),
    }
    events(live, &args.system_namespace, None, "system", archive).await
}

/// The named jobs, or the unfinished ones and the one that failed last.
async fn jobs(live: &Live, args: &BundleArgs) -> Result<Vec<TrainJob>, Failure> {
    let mut jobs = Vec::new();
    for name in &args.jobs {
        jobs.push(live.job(name).await?);
    }
    if args.jobs.is_empty() {
        let list =
            live.jobs().list(&ListParams::default()).await.map_err(|error| request_error("list TrainJobs", error))?;
        let end = |job: &TrainJob| job.status.as_ref().and_then(|status| status.completion_time.clone());
        let (over, others): (Vec<TrainJob>, Vec<TrainJob>) =
            list.items.into_iter().partition(|job| ended(job).is_some());
        let failed = over.into_iter().filter(|job| ended(job) == Some(Exit::OwnFailure));
        jobs.extend(failed.max_by_key(|job| end(job).map(|time| time.0)));
        jobs.extend(others);
    }
    Ok(jobs)
}

async fn of_job(live: &Live, args: &BundleArgs, archive: &mut Archive, job: &TrainJob) -> Result<(), Failure> {
    let folder = format!("jobs/{}", name_of(job));
    archive.log(&format!("{} ({})", name_of(job), stage(job)));
    let ours = ListParams::default().labels(&selector(job));
    let maps: Api<ConfigMap> = Api::namespaced(live.client.clone(), &live.namespace);
    match maps.list(&ours).await {
        // These are our own: the engine configuration and fabric settings, which contain no
        // secrets.
        Ok(maps) => {
            for map in &maps.items {
                archive.json(&format!("{folder}/{}.json", map.name_any()), &json!(map.data))?;
            }
        }
        Err(error) => archive.missing(&folder, &request_error("list ConfigMaps", error).message),
    }
    events(live, &live.namespace, Some(&job.name_any()), &folder, archive).await?;
    if args.no_job_logs {
        return Ok(());
    }
    match live.pods().list(&ours).await {
        Ok(pods) => {
            for pod in &pods.items {
                logs(&live.pods(), pod, &folder, archive).await?;
            }
        }
        Err(error) => archive.missing(&folder, &request_error("list pods", error).message),
    }
    Ok(())
}

/// The events of a namespace; with a job, only of objects whose names start with the job's.
async fn events(
    live: &Live,
    namespace: &str,
    job: Option<&str>,
    folder: &str,
    archive: &mut Archive,
) -> Result<(), Failure> {
    let path = format!("{folder}/events.txt");
    let list = match Api::<Event>::namespaced(live.client.clone(), namespace).list(&ListParams::default()).await {
        Ok(list) => list.items,
        Err(error) => {
            archive.missing(&path, &request_error("list events", error).message);
            return Ok(());
        }
    };
    let is_meant = |event: &&Event| {
        let object = event.involved_object.name.as_deref().unwrap_or_default();
        job.is_none_or(|job| object == job || object.strip_prefix(job).is_some_and(|rest| rest.starts_with('-')))
    };
    let time = |event: &Event| {
        let series = event.series.as_ref().and_then(|series| series.last_observed_time.as_ref()).map(|time| time.0);
        series.or(event.last_timestamp.as_ref().map(|time| time.0)).or(event.event_time.as_ref().map(|time| time.0))
    };
    let mut chosen: Vec<&Event> = list.iter().filter(is_meant).collect();
    chosen.sort_by_key(|event| time(event));
    let line = |event: &&Event| {
        let object = &event.involved_object;
        let text = |part: &Option<String>| part.clone().unwrap_or_else(|| "-".into());
        format!(
            "{} {} {}/{} {}: {}\n",
            time(event).map_or_else(|| "-".into(), |time| time.to_string()),
            text(&event.type_),
            text(&object.kind),
            text(&object.name),
            text(&event.reason),
            text(&event.message)
        )
    };
    archive.file(&path, chosen.iter().map(line).collect::<String>().as_bytes())
}

/// The tails of a pod's container logs, including those from before a restart.
async fn logs(api: &Api<Pod>, pod: &Pod, folder: &str, archive: &mut Archive) -> Result<(), Failure> {
    let status = pod.status.as_ref();
    let containers = status.and_then(|status| status.container_statuses.as_deref()).unwrap_or_default();
    let before = status.and_then(|status| status.init_container_statuses.as_deref()).unwrap_or_default();
    for container in before.iter().chain(containers) {
        for previous in [false, true] {
            if previous && container.restart_count == 0 {
                continue;
            }
            let end = if previous { "previous.log" } else { "log" };
            let path = format!("{folder}/{}.{}.{end}", pod.name_any(), container.name);
            let params = LogParams {
                container: Some(container.name.clone()),
                previous,
                timestamps: true,
                tail_lines: Some(LINES),
                limit_bytes: Some(BYTES),
                ..LogParams::default()
            };
            match api.logs(&pod.name_any(), &params).await {
                Ok(log) => archive.file(&path, log.as_bytes())?,
                Err(error) => archive.missing(&path, &request_error("read the log", error).message),
            }
        }
    }
    Ok(())
}

fn partial(path: &Path) -> PathBuf {
    path.with_added_extension("partial")
}

/// An archive that gets its final name once it is complete.
struct Archive {
    tar: tar::Builder<GzEncoder<File>>,
    path: PathBuf,
    stem: String,
    time: Timestamp,
    quiet: bool,
    version: &'static str,
    files: u64,
    missing: Vec<String>,
}

impl Archive {
    fn new(path: &Path, stem: String, time: Timestamp, cli: &Cli) -> io::Result<Archive> {
        let file = File::create(partial(path))?;
        let tar = tar::Builder::new(GzEncoder::new(file, Compression::default()));
        Ok(Archive {
            tar,
            path: path.to_owned(),
            stem,
            time,
            quiet: cli.quiet,
            version: cli.version,
            files: 0,
            missing: Vec::new(),
        })
    }

    fn log(&self, text: &str) {
        if !self.quiet {
            anstream::eprintln!("{text}");
        }
    }

    /// Records an item that could not be collected.
    fn missing(&mut self, path: &str, why: &str) {
        self.log(&format!("warning: {path}: {why}"));
        self.missing.push(format!("{path}: {why}"));
    }

    fn json(&mut self, path: &str, value: &serde_json::Value) -> Result<(), Failure> {
        self.file(path, format!("{value:#}\n").as_bytes())
    }

    fn file(&mut self, path: &str, content: &[u8]) -> Result<(), Failure> {
        let added = self.add(path, content);
        added.map_err(|error| Failure::unexpected(format!("cannot write {}: {error}", self.path.display())))
    }

    fn add(&mut self, path: &str, content: &[u8]) -> io::Result<()> {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        header.set_mtime(self.time.as_second().unsigned_abs());
        self.files += 1;
        self.tar.append_data(&mut header, format!("{}/{path}", self.stem), content)
    }

    /// Completes the archive; returns the numbers of files, bytes and missing items.
    fn finish(mut self) -> io::Result<(u64, u64, usize)> {
        let missing = std::mem::take(&mut self.missing);
        let mut text = String::from(
            "cluster.json   what decides about places: `switchyard explain JOB --snapshot cluster.json`, and other commands\n\
             jobs/          events, configuration and the end of the logs of TrainJobs\n\
             system/        the same of the controller and the agents\n\
             Not in here: Secrets, environments, commands and annotations of pods and jobs. Logs of jobs are as the programs wrote them.\n",
        );
        for line in &missing {
            text.push_str(&format!("missing: {line}\n"));
        }
        self.add("README.txt", text.as_bytes())?;
        let files = self.files;
        let mut file = self.tar.into_inner()?.finish()?;
        file.flush()?;
        file.sync_all()?;
        let bytes = file.metadata()?.len();
        std::fs::rename(partial(&self.path), &self.path)?;
        Ok((files, bytes, missing.len()))
    }
}
