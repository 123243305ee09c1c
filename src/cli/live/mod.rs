//! Read-only commands on jobs in a running cluster: `status`, `logs`, `report JOB`, `doctor JOB`,
//! `support-bundle`.

mod board;
mod bundle;
mod controller;
mod doctor;
mod figures;
mod logs;
mod report;
mod status;
#[cfg(test)]
mod tests;

pub(super) use bundle::bundle;
pub(super) use controller::holder;
pub(super) use doctor::{diagnose, name_in};
pub(super) use figures::age as figures_age;
pub(super) use logs::logs;
pub(super) use report::report;
pub(super) use status::status;

use crate::args::ConnectionArgs;
use crate::connect;
use crate::failure::Failure;
use crate::snapshot::name_of;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt};
use switchyard_crds::{PlacementSlice, TrainJob, conditions, labels};
use switchyard_plan::cluster::view::PodView;
use switchyard_plan::slices;
use switchyard_service::Connection;

/// A namespace of a running cluster.
#[derive(Clone)]
struct Live {
    client: Client,
    namespace: String,
    server: String,
}

impl Live {
    async fn open(args: &ConnectionArgs) -> Result<Live, Failure> {
        let connection = Connection { kubeconfig: args.kubeconfig.clone(), context: args.context.clone() };
        let connect::Cluster { client, namespace, server, .. } = connect::open(&connection).await?;
        Ok(Live { client, namespace: args.namespace.clone().unwrap_or(namespace), server })
    }

    /// Awaits a response from the API server, and reports if it takes long.
    async fn answer<T>(&self, request: impl Future<Output = T>) -> T {
        connect::answer(&self.server, request).await
    }

    fn jobs(&self) -> Api<TrainJob> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn slices(&self) -> Api<PlacementSlice> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Gets a job by name.
    async fn job(&self, name: &str) -> Result<TrainJob, Failure> {
        if let Some(job) =
            self.answer(self.jobs().get_opt(name)).await.map_err(|error| request_error("get the TrainJob", error))?
        {
            return self.with_nodes(job).await;
        }
        let known =
            self.jobs().list(&ListParams::default()).await.map_err(|error| request_error("list TrainJobs", error))?;
        let names: Vec<String> = known.items.iter().map(name_of).collect();
        let known = if names.is_empty() { "there is none".into() } else { format!("there are {}", names.join(", ")) };
        Err(Failure::usage(format!("no TrainJob {}/{name}; {known} (--namespace)", self.namespace)))
    }

    /// Completes the job's placement from its slices. Returns the job unchanged if a slice cannot
    /// be read.
    async fn with_nodes(&self, mut job: TrainJob) -> Result<TrainJob, Failure> {
        let Some(named) = slices::of(&job) else { return Ok(job) };
        let list = self.slices().list(&ListParams::default().labels(&selector(&job))).await;
        let list = list.map_err(|error| request_error("list PlacementSlices", error))?;
        let known = list.items.into_iter().map(|slice| (slice.name_any(), slice.spec)).collect();
        let nodes = slices::join(named, &known);
        nodes.into_iter().for_each(|nodes| slices::set_nodes(&mut job, nodes));
        Ok(job)
    }

    /// A job's existing pods, sorted by attempt and node.
    async fn pods_of_job(&self, job: &TrainJob) -> Result<Vec<PodView>, Failure> {
        let list = self.pods().list(&ListParams::default().labels(&selector(job))).await;
        let list = list.map_err(|error| request_error("list pods", error))?;
        let mut pods: Vec<PodView> = list.items.iter().map(PodView::of).collect();
        pods.sort_by_key(|pod| (pod.attempt, pod.node_rank));
        Ok(pods)
    }
}

/// Stage of a job that no controller has processed yet.
const NEW: &str = "New";

/// The reason of the summary condition, as in kubectl's STAGE column.
fn stage(job: &TrainJob) -> &str {
    let summary = job.status.as_ref().and_then(|status| status.condition(conditions::SUCCEEDED));
    summary.map_or(NEW, |condition| condition.reason.as_str())
}

/// Selects the pods of a job, excluding those of an earlier job with this name.
fn selector(job: &TrainJob) -> String {
    format!("{}={}", labels::JOB_UID, job.uid().unwrap_or_default())
}

/// The API server's error about a request.
fn request_error(what: &str, error: kube::Error) -> Failure {
    let words = match error {
        kube::Error::Api(status) if status.code == 404 && status.message.contains("could not find the requested") => {
            "the cluster has no TrainJobs: Switchyard is not installed there (docs/install.md)".into()
        }
        error => connect::error_message(&error),
    };
    Failure::unexpected(format!("cannot {what}: {words}"))
}

/// The ranks of each node of a job, by node rank: lowest global rank and count. Empty if no pod has
/// been placed.
fn ranks(job: &TrainJob) -> Vec<(u32, u32)> {
    let placement = job.status.as_ref().and_then(|status| status.placement.as_ref());
    let firsts = placement.map(|placement| placement.nodes.iter().map(|node| node.first_rank.unsigned_abs()));
    let mut firsts: Vec<u32> = firsts.into_iter().flatten().collect();
    firsts.sort_unstable();
    let each = job.spec.trainer.num_proc_per_node.map(i32::unsigned_abs);
    let last = firsts.len().checked_sub(2).map(|at| firsts[at + 1] - firsts[at]);
    let count = |at: usize| match firsts.get(at + 1) {
        Some(next) => next - firsts[at],
        // The last node has as many ranks as its predecessor; a single node has as many as the
        // manifest sets.
        None => last.or(each).unwrap_or(1),
    };
    (0..firsts.len()).map(|at| (firsts[at], count(at))).collect()
}
