//! A cluster as a set of objects: read from a file, or listed from a running cluster.

mod list;
mod settings;

pub(crate) use list::take;
pub(crate) use settings::Settings;

use crate::args::ClusterArgs;
use crate::connect;
use crate::failure::Failure;
use crate::input::{self, Limit};
use crate::output::CLI_VERSION;
use jiff::Timestamp;
use kube::Client;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;
use switchyard_controller::daemon::levels;
use switchyard_crds::TrainJob;
use switchyard_fabric::profile::Profile;
use switchyard_ledger::offline::{Cluster, PlacementVerdict, PreviousPlacement};
use switchyard_plan::cluster::levels::{DomainLevel, LevelError, Levels};
use switchyard_plan::objects::Defaults;
use switchyard_service::Connection;

/// Largest snapshot file; 10,000 nodes with their reports take about 150 MB.
const MAX: Limit = (1 << 30, "1 GiB");

/// A cluster in a file.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct SnapshotFile {
    api_version: String,
    kind: String,
    /// When it was taken. kubectl's lists lack this; then no report counts as stale.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taken_at: Option<Timestamp>,
    /// Domain levels as on the command line; empty for the built-in ones.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    domains: Vec<String>,
    /// Present in kubectl's lists.
    #[serde(default, skip_serializing)]
    #[allow(dead_code)]
    metadata: Value,
    pub items: Vec<Value>,
    /// Only from the command line.
    #[serde(skip)]
    fabric_profile: Option<Profile>,
    /// Only from the command line.
    #[serde(skip)]
    queue: Vec<String>,
    /// From the context of a running cluster.
    #[serde(skip)]
    namespace: Option<String>,
}

impl SnapshotFile {
    /// Builds a snapshot from the objects of a running cluster.
    pub(crate) fn taken(items: Vec<Value>, at: Timestamp) -> SnapshotFile {
        SnapshotFile {
            api_version: CLI_VERSION.into(),
            kind: "ClusterSnapshot".into(),
            taken_at: Some(at),
            domains: Vec::new(),
            metadata: Value::Null,
            items,
            fabric_profile: None,
            queue: Vec::new(),
            namespace: None,
        }
    }
}

/// Reads a file, or lists a running cluster.
pub(crate) fn read(args: &ClusterArgs) -> Result<SnapshotFile, Failure> {
    read_for(args, None)
}

/// The same for a job that is not in the cluster yet, including the volume claims that it names.
pub(crate) fn read_for(args: &ClusterArgs, job: Option<&TrainJob>) -> Result<SnapshotFile, Failure> {
    let mut file = match &args.snapshot {
        Some(path) => read_file(path)?,
        None => {
            let (items, namespace) = objects(args, async |client| list::take(client, job).await)?;
            SnapshotFile { namespace: Some(namespace), ..SnapshotFile::taken(items, Timestamp::now()) }
        }
    };
    file.queue.clone_from(&args.queue);
    file.fabric_profile = args.fabric_profile.as_deref().map(input::fabric_profile).transpose()?;
    if !args.domains.is_empty() {
        file.domains = args.domains.iter().map(ToString::to_string).collect();
    }
    Ok(file)
}

pub(crate) fn read_file(path: &Path) -> Result<SnapshotFile, Failure> {
    let name = input::name(path);
    let text = input::read(path, "snapshot of a cluster of at most 1 GiB", MAX)?;
    // Parse JSON with its own parser, which is twenty times as fast, because snapshots can be
    // large.
    let file: SnapshotFile = if text.trim_start().starts_with('{') {
        serde_json::from_str(&text).map_err(|error| Failure::usage(format!("{name} is no snapshot: {error}")))?
    } else {
        serde_saphyr::from_str(&text).map_err(|error| Failure::usage(format!("{name} is no snapshot\n{error}")))?
    };
    match (file.kind.as_str(), file.api_version.as_str()) {
        ("List", "v1") | ("ClusterSnapshot", CLI_VERSION) => Ok(file),
        (kind, version) => Err(Failure::usage(format!(
            "{name} is no snapshot: got {version} {kind}; expected {CLI_VERSION} ClusterSnapshot of `switchyard snapshot`, or a v1 List"
        ))),
    }
}

/// The report of one node in the running cluster, if it exists.
pub(crate) fn report(args: &ClusterArgs, node: &str) -> Result<Vec<Value>, Failure> {
    Ok(objects(args, async |client| list::report(client, node).await)?.0)
}

/// Lists objects of the kubeconfig's cluster. Also returns the namespace of the context.
fn objects(
    args: &ClusterArgs,
    list: impl AsyncFnOnce(&Client) -> Result<Vec<Value>, String>,
) -> Result<(Vec<Value>, String), Failure> {
    connect::wait_for(async {
        let connection = Connection { kubeconfig: args.kubeconfig.clone(), context: args.context.clone() };
        let connected = connect::open(&connection).await;
        let connect::Cluster { client, namespace, server, .. } =
            connected.map_err(|failure| Failure::usage(format!("{failure}; without a cluster: --snapshot FILE")))?;
        let items = connect::answer(&server, list(&client)).await;
        items.map(|items| (items, namespace)).map_err(Failure::unexpected)
    })
}

/// Builds the cluster from the objects, with the settings of its controller.
pub(crate) fn cluster(file: &SnapshotFile) -> Result<Cluster, Failure> {
    Ok(with_settings(file)?.0)
}

/// Also returns the settings.
pub(crate) fn with_settings(file: &SnapshotFile) -> Result<(Cluster, Settings), Failure> {
    let settings = Settings::of(&file.items, &file.queue)?;
    let wrong = |error: LevelError| Failure::usage(format!("domains: {error}"));
    let domains = file.domains.iter().map(|text| text.parse::<DomainLevel>().map_err(wrong));
    let domains: Vec<DomainLevel> = domains.collect::<Result<_, _>>()?;
    let levels: Levels = levels(if domains.is_empty() { &settings.domains } else { &domains }).map_err(wrong)?;
    let defaults = Defaults { fabric_profile: file.fabric_profile.clone(), ..settings.defaults.clone() };
    let now = file.taken_at.unwrap_or(Timestamp::MIN);
    let cluster = Cluster::of(&file.items, defaults, levels, settings.queue.clone(), now).map_err(Failure::usage)?;
    let cluster = match &file.namespace {
        Some(namespace) => cluster.from_namespace(namespace.clone()),
        None => cluster,
    };
    Ok((cluster, settings))
}

/// Builds the cluster of a command that shows what the controller decides.
pub(crate) fn open(file: &SnapshotFile) -> Result<Cluster, Failure> {
    let (cluster, settings) = with_settings(file)?;
    if let Some(assumption) = settings.assumption().filter(|_| !cluster.jobs().is_empty()) {
        anstream::eprintln!("warning: {assumption}");
    }
    Ok(cluster)
}

/// A job from a manifest, in the namespace to which kubectl would apply it.
pub(crate) fn in_namespace(mut job: TrainJob, cluster: &Cluster) -> TrainJob {
    job.metadata.namespace.get_or_insert_with(|| cluster.namespace().to_string());
    job
}

/// The controller's decision about the job if it were new.
pub(crate) fn decide(cluster: &mut Cluster, job: &TrainJob) -> Result<PlacementVerdict, Failure> {
    cluster.explain(job, PreviousPlacement::Ignored).map_err(|faults| {
        let faults: Vec<String> = faults.iter().map(ToString::to_string).collect();
        Failure::usage(faults.join("\n"))
    })
}

/// Namespace and name.
pub(crate) fn name_of(job: &TrainJob) -> String {
    let part = |part: &Option<String>| part.clone().unwrap_or_else(|| "default".into());
    format!("{}/{}", part(&job.metadata.namespace), part(&job.metadata.name))
}
