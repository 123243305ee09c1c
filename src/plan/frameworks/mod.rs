//! Rendezvous environment for other frameworks: the variables that their launchers read, set per
//! node and never per process. Pure.
//!
//! ```text
//! TrainJob, attempt, node rank ─> GangPod ─> environment (and for MPI a hostfile and the command of the nodes after the first)
//! ```
//!
//! All of it yields to user settings in `spec.trainer.env` or in the template; see [`Entry`].
//! Variables that a launcher sets for each process (`LOCAL_RANK`, `PADDLE_TRAINER_ENDPOINTS`, …)
//! are not set here: one value for a whole node would be wrong. docs/frameworks.md lists the
//! variables of each framework.

mod jax;
mod mpi;
mod paddle;
mod tensorflow;
#[cfg(test)]
mod tests;
mod torch;

use crate::job::{GangPod, Invalid, LAST_ATTEMPT, ValidJob, identity};
use k8s_openapi::api::core::v1::{EnvVar, EnvVarSource, ObjectFieldSelector};
use switchyard_crds::{Framework, TrainJob};

/// Longest `NAME=VALUE` that Linux passes to a program, including the final NUL (MAX_ARG_STRLEN, 32
/// pages of 4 KiB).
const MAX_VARIABLE: usize = 128 << 10;

/// A variable that a framework's launcher reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub name: &'static str,
    /// Source of its value.
    pub source: Source,
    /// Why it is set, and why to this value.
    pub reason: &'static str,
}

/// Source of a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A value derived from the job. `$(NAME)` refers to a variable that is set earlier, as in
    /// every pod.
    Value(String),
    /// A pod field that is known at run time (downward API).
    Field(&'static str),
}

impl From<Entry> for EnvVar {
    fn from(entry: Entry) -> EnvVar {
        let (value, field) = match entry.source {
            Source::Value(value) => (Some(value), None),
            Source::Field(path) => (None, Some(ObjectFieldSelector { api_version: None, field_path: path.into() })),
        };
        let value_from = field.map(|field| EnvVarSource { field_ref: Some(field), ..EnvVarSource::default() });
        EnvVar { name: entry.name.into(), value, value_from }
    }
}

/// A variable with a value derived from the job.
fn set(name: &'static str, value: impl ToString, reason: &'static str) -> Entry {
    Entry { name, source: Source::Value(value.to_string()), reason }
}

/// Variables of the framework's launcher on this node, without duplicates, in the order they are
/// set.
pub fn environment(pod: &GangPod<'_>) -> Vec<Entry> {
    // These two tell roles apart by their names.
    match pod.job.spec.trainer.framework {
        Framework::TensorFlow if pod.role().is_some() => return tensorflow::of_roles(pod),
        Framework::Paddle if paddle::has_servers(pod.valid) => return paddle::with_servers(pod),
        _ => {}
    }
    if pod.role().is_some_and(|role| !role.in_rendezvous) {
        return Vec::new();
    }
    match pod.job.spec.trainer.framework {
        Framework::Switchyard | Framework::Plain => Vec::new(),
        Framework::Torch => torch::environment(pod),
        Framework::Paddle => paddle::environment(pod),
        Framework::Horovod => mpi::horovod(pod),
        Framework::MPI => mpi::environment(pod),
        Framework::JAX => jax::environment(pod),
        Framework::TensorFlow => tensorflow::environment(pod),
    }
}

/// Command that a node runs instead of the user's, `None` for the user's command.
pub fn command(pod: &GangPod<'_>) -> Option<Vec<String>> {
    (uses_mpirun(pod.job) && pod.rendezvous_rank() > 0).then(mpi::daemon)
}

/// Hosts and slots for frameworks that are started by `mpirun`.
pub fn hostfile(job: &TrainJob, valid: &ValidJob, attempt: u32) -> Option<String> {
    uses_mpirun(job).then(|| mpi::hostfile(&GangPod::new(job, valid, attempt, 0)))
}

/// Whether `mpirun` on node 0 starts the processes of all nodes.
pub fn uses_mpirun(job: &TrainJob) -> bool {
    matches!(job.spec.trainer.framework, Framework::MPI | Framework::Horovod)
}

/// Variables that exceed Linux's limit.
pub fn faults(job: &TrainJob, valid: &ValidJob) -> Vec<Invalid> {
    // The highest attempt number, because names grow with it.
    let last = valid.request.nodes.saturating_sub(1);
    let pod = GangPod::new(job, valid, LAST_ATTEMPT, if valid.roles.is_empty() { last } else { 0 });
    let own = identity(&pod).into_iter().map(|entry| (entry.name, entry.value));
    let launchers = environment(&pod).into_iter().filter_map(|entry| match entry.source {
        Source::Value(value) => Some((entry.name.to_string(), value)),
        Source::Field(_) => None,
    });
    let too_long = |(name, value): &(String, String)| name.len() + value.len() + 2 > MAX_VARIABLE;
    let fault = |(name, _): (String, String)| Invalid {
        field: if valid.roles.is_empty() { "spec.trainer.numNodes" } else { "spec.roles" }.into(),
        got: format!("{} with the names of as many nodes in {name}", valid.request.nodes),
        expected: "fewer nodes, or shorter names of job and namespace: Linux takes 128 KiB for a variable".into(),
    };
    own.chain(launchers).filter(too_long).map(fault).collect()
}
