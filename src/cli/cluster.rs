//! Commands that look at a cluster, running or in a file: `plan --cluster`, `explain JOB`, `snapshot`. They change nothing.

use super::args::{Cli, ClusterArgs, ExplainArgs, Output, PlanArgs, SnapshotArgs};
use super::controller::levels;
use super::run::{CLI_VERSION, json_line};
use super::{fabric, live, manifest, print, print_yaml, refuse, topo, verdict};
use crate::snapshot;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::path::Path;
use switchyard_crds::TrainJob;
use switchyard_fabric::profile::Profile;
use switchyard_ledger::offline::{Cluster, Earlier, Verdict};
use switchyard_plan::cluster::fabric::Decided;
use switchyard_plan::cluster::levels::{DomainLevel, Levels};
use switchyard_plan::objects::Defaults;
use switchyard_service::Connection;
use switchyard_worker_contract::exit::Exit;

/// Largest file that is read as a snapshot: 10,000 nodes with their reports have about 150 MB.
const MOST: (u64, &str) = (1 << 30, "1 GiB");

/// A cluster in a file.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct SnapshotFile {
    api_version: String,
    kind: String,
    /// When it was taken. Lists of kubectl do not say; then reports are not old.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taken_at: Option<Timestamp>,
    /// Levels of domains, as on the command line; empty: those that the controller knows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    domains: Vec<String>,
    /// Lists of kubectl have it.
    #[serde(default, skip_serializing)]
    #[allow(dead_code)]
    metadata: Value,
    pub items: Vec<Value>,
    /// Of the command line only.
    #[serde(skip)]
    fabric_profile: Option<Profile>,
    /// Of the context of a running cluster.
    #[serde(skip)]
    namespace: Option<String>,
}

impl SnapshotFile {
    /// Objects of a running cluster.
    pub(super) fn taken(items: Vec<Value>, at: Timestamp) -> SnapshotFile {
        SnapshotFile {
            api_version: CLI_VERSION.into(),
            kind: "ClusterSnapshot".into(),
            taken_at: Some(at),
            domains: Vec::new(),
            metadata: Value::Null,
            items,
            fabric_profile: None,
            namespace: None,
        }
    }
}

/// Reads a file, or lists a running cluster.
pub(super) fn read(args: &ClusterArgs) -> Result<SnapshotFile, (String, Exit)> {
    let mut file = match &args.snapshot {
        Some(path) => read_file(path).map_err(|error| (error, Exit::Usage))?,
        None => {
            let (items, namespace) = list(args, None)?;
            SnapshotFile { namespace: Some(namespace), ..SnapshotFile::taken(items, Timestamp::now()) }
        }
    };
    let profile = args.fabric_profile.as_deref().map(fabric::profile).transpose();
    file.fabric_profile = profile.map_err(|error| (error, Exit::Usage))?;
    if !args.domains.is_empty() {
        file.domains = args.domains.iter().map(ToString::to_string).collect();
    }
    Ok(file)
}

pub(super) fn read_file(path: &Path) -> Result<SnapshotFile, String> {
    let name = path.display().to_string();
    let text = manifest::read_at_most(path, &name, "snapshot of a cluster of at most 1 GiB", MOST)?;
    // JSON is read by its own reader: it is twenty times as fast, and a snapshot may be large.
    let file: SnapshotFile = if text.trim_start().starts_with('{') {
        serde_json::from_str(&text).map_err(|error| format!("{name} is no snapshot: {error}"))?
    } else {
        serde_saphyr::from_str(&text).map_err(|error| format!("{name} is no snapshot\n{error}"))?
    };
    match (file.kind.as_str(), file.api_version.as_str()) {
        ("List", "v1") | ("ClusterSnapshot", CLI_VERSION) => Ok(file),
        (kind, version) => Err(format!(
            "{name} is no snapshot: got {version} {kind}; expected {CLI_VERSION} ClusterSnapshot of `switchyard snapshot`, or a v1 List"
        )),
    }
}

/// Lists the running cluster of the kubeconfig; of one node only its report, where there is one. Also says the namespace of the context.
pub(super) fn list(args: &ClusterArgs, node: Option<&str>) -> Result<(Vec<Value>, String), (String, Exit)> {
    live::wait_for(async {
        let connection = Connection { kubeconfig: args.kubeconfig.clone(), context: args.context.clone() };
        let (client, namespace) = live::open(&connection).await?;
        let items = match node {
            Some(node) => snapshot::report(&client, node).await,
            None => snapshot::take(&client).await,
        };
        items.map(|items| (items, namespace)).map_err(|error| (error, Exit::Unexpected))
    })
}

/// The cluster of these objects.
pub(super) fn cluster(file: &SnapshotFile) -> Result<Cluster, String> {
    let domains =
        file.domains.iter().map(|text| text.parse::<DomainLevel>().map_err(|error| format!("domains: {error}")));
    let domains: Vec<DomainLevel> = domains.collect::<Result<_, _>>()?;
    let levels: Levels = levels(&domains).map_err(|error| format!("domains: {error}"))?;
    let defaults = Defaults { fabric_profile: file.fabric_profile.clone(), ..Defaults::default() };
    let cluster = Cluster::of(&file.items, defaults, levels, file.taken_at.unwrap_or(Timestamp::MIN))?;
    Ok(match &file.namespace {
        Some(namespace) => cluster.from_namespace(namespace.clone()),
        None => cluster,
    })
}

pub(super) fn open(args: &ClusterArgs) -> Result<Cluster, (String, Exit)> {
    let file = read(args)?;
    cluster(&file).map_err(|error| (error, Exit::Usage))
}

/// A job of a manifest, in the namespace to which kubectl would apply it.
pub(super) fn in_namespace(mut job: TrainJob, cluster: &Cluster) -> TrainJob {
    job.metadata.namespace.get_or_insert_with(|| cluster.namespace().to_string());
    job
}

/// What the controller would do with a job if it were new.
pub(super) fn look(cluster: &mut Cluster, job: &TrainJob) -> Result<Verdict, String> {
    cluster.look(job, Earlier::Forgotten).map_err(|faults| {
        let faults: Vec<String> = faults.iter().map(ToString::to_string).collect();
        faults.join("\n")
    })
}

/// Prints what decides about places.
pub(super) fn snapshot(cli: &Cli, args: &SnapshotArgs) -> Exit {
    match read(&args.place) {
        Ok(file) => {
            match cli.output {
                Output::Json => print(&json!(file).to_string()),
                Output::Table | Output::Yaml | Output::Dot => print_yaml(&file),
            }
            Exit::Done
        }
        Err((error, exit)) => refuse(&error, exit),
    }
}

/// Shows where a job would go.
pub(super) fn plan(cli: &Cli, args: &PlanArgs) -> Exit {
    let job = match manifest::read(&args.file) {
        Ok(job) => job,
        Err(error) => return refuse(&error.0, Exit::Usage),
    };
    let read = || {
        let file = read(&args.place)?;
        let cluster = cluster(&file).map_err(|error| (error, Exit::Usage))?;
        Ok((file, cluster))
    };
    let (file, mut cluster) = match read() {
        Ok(read) => read,
        Err((error, exit)) => return refuse(&error, exit),
    };
    let job = in_namespace(job, &cluster);
    let found = match look(&mut cluster, &job) {
        Ok(found) => found,
        Err(error) => return refuse(&error, Exit::Usage),
    };
    let is_refused = matches!(found.fabric, Some(Err(_)));
    let exit = if found.place.is_ok() && !is_refused { Exit::Done } else { Exit::NotPlaceable };
    if args.fabric && found.place.is_ok() {
        return show_fabric(cli, &job, found.fabric).unwrap_or(exit);
    }
    if let (true, Ok(placed)) = (args.svg, &found.place) {
        print(&topo::cluster::drawing(&file, &cluster, &name_of(&job), &placed.status));
        return exit;
    }
    match cli.output {
        Output::Json => json_line("PlacementVerdict", verdict::json(&job, &found)),
        Output::Yaml => print_yaml(&verdict::json(&job, &found)),
        Output::Table | Output::Dot => print(&verdict::table(&job, &found, &cluster, cli.verbose)),
    }
    exit
}

/// Says why a job is where it is, or why it waits.
pub(super) fn explain(cli: &Cli, args: &ExplainArgs) -> Exit {
    let mut cluster = match open(&args.place) {
        Ok(cluster) => cluster,
        Err((error, exit)) => return refuse(&error, exit),
    };
    let namespace = args.namespace.as_deref().unwrap_or(cluster.namespace());
    let Some(job) = cluster.job(namespace, &args.subject).cloned() else {
        let jobs: Vec<String> = cluster.jobs().iter().map(|job| name_of(job)).collect();
        let known =
            if jobs.is_empty() { "there is none".to_string() } else { format!("there are {}", jobs.join(", ")) };
        let text = format!("no TrainJob {namespace}/{}; {known} (--namespace)", args.subject);
        return refuse(&text, Exit::Usage);
    };
    let found = match look(&mut cluster, &job) {
        Ok(found) => found,
        Err(error) => return refuse(&error, Exit::Usage),
    };
    if args.fabric {
        // What was decided counts; before that, what would be.
        let decided = job.status.as_ref().and_then(|status| status.fabric.clone()).filter(|f| !f.decisions.is_empty());
        let forecast = found.fabric.as_ref().and_then(|found| found.as_ref().ok()?.forecast.clone());
        let decided = decided.map(|status| Ok(Decided { status, forecast }));
        return show_fabric(cli, &job, decided.or(found.fabric)).unwrap_or(Exit::Done);
    }
    match cli.output {
        Output::Json => json_line("Explanation", verdict::explanation_json(&job, &found)),
        Output::Yaml => print_yaml(&verdict::explanation_json(&job, &found)),
        Output::Table | Output::Dot => print(&verdict::explanation(&job, &found, &cluster, cli.verbose)),
    }
    Exit::Done
}

/// Prints every setting of the fabric. `None`: it is printed.
fn show_fabric(cli: &Cli, job: &TrainJob, fabric: Option<Result<Decided, String>>) -> Option<Exit> {
    match (fabric, cli.output) {
        (Some(Err(why)), _) => return Some(refuse(&why, Exit::NotPlaceable)),
        (None, _) => {
            let what = "data stays inside a node, or our own engine carries it and reads no such settings";
            return Some(refuse(&format!("{} has no use for settings of a fabric: {what}", name_of(job)), Exit::Usage));
        }
        (Some(Ok(found)), Output::Json) => json_line("Fabric", fabric::json(job, &found.status)),
        (Some(Ok(found)), Output::Yaml) => print_yaml(&fabric::json(job, &found.status)),
        (Some(Ok(found)), Output::Table | Output::Dot) => {
            print(&fabric::table(job, &found.status, found.forecast.as_ref(), cli.verbose))
        }
    }
    None
}

/// Namespace and name.
pub(super) fn name_of(job: &TrainJob) -> String {
    let part = |part: &Option<String>| part.clone().unwrap_or_else(|| "default".into());
    format!("{}/{}", part(&job.metadata.namespace), part(&job.metadata.name))
}
