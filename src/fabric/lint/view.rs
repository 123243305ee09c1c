//! The common view of a manifest of any kind.

use super::path::Path;

/// Kind of a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A Switchyard TrainJob.
    TrainJob,
    /// A Kubeflow Trainer TrainJob.
    KubeflowTrainJob,
    /// A PyTorchJob of the training operator.
    PyTorchJob,
    MpiJob,
    /// Another job of the training operator: TFJob, PaddleJob, …
    ReplicaJob,
    /// A Pod, or anything with a pod template.
    Pods,
    /// A ConfigMap with an `nccl.conf`.
    NcclConf,
}

impl Kind {
    /// Whether an operator sets PyTorch's rendezvous in its pods.
    pub(super) fn sets_torch_rendezvous(self) -> bool {
        matches!(self, Kind::KubeflowTrainJob | Kind::PyTorchJob)
    }
}

/// A job or its pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Workload {
    pub kind: Kind,
    pub kind_word: String,
    pub name: String,
    pub groups: Vec<Group>,
    /// Framework whose rendezvous Switchyard sets; empty except for our TrainJobs.
    pub framework: String,
    /// Number of pods that train together, if the manifest says.
    pub nodes: Option<u64>,
}

/// Equal pods.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Group {
    pub host_network: bool,
    /// Node access that policies deny to tenants: the field, and how it is written.
    pub host_access: Vec<(Path, String)>,
    /// Processes per pod, from a field of the job.
    pub processes: Option<Processes>,
    pub containers: Vec<Container>,
}

/// Number of processes in a pod, and the field that sets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Processes {
    pub count: Count,
    pub path: Path,
    /// As written, such as `nprocPerNode: 8`.
    pub words: String,
}

/// A process count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Count {
    Number(u64),
    /// `gpu`: one per GPU, and there must be one.
    PerGpu,
    /// `auto`, `cpu`, or a value computed by a script.
    Open,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Container {
    pub path: Path,
    pub variables: Vec<Variable>,
    /// Processes that its command line requests.
    pub processes: Option<Processes>,
    /// GPUs that it requests; `None` unless it is a whole number of whole GPUs.
    pub gpus: Option<u64>,
    /// RDMA resource that it requests.
    pub rdma: Option<String>,
}

/// An environment variable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Variable {
    pub name: String,
    pub setting: Setting,
    /// Path of the value, or of the entry if it has no value.
    pub path: Path,
    pub origin: Origin,
}

/// Value of a variable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Setting {
    Text(String),
    /// Not a string, in YAML notation.
    NotText(String),
    /// A line of an `nccl.conf` without `=`.
    Absent,
    /// From a ConfigMap, a Secret or a field, or built from other variables.
    Computed,
}

/// Where a variable is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// The `env` list of a container.
    Env,
    /// A command line or script.
    Command,
    /// A line of an `nccl.conf`.
    Conf,
}

impl Variable {
    /// The value, if the manifest contains it.
    pub(super) fn text(&self) -> Option<&str> {
        match &self.setting {
            Setting::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The assignment as users write it.
    pub(super) fn words(&self) -> String {
        /// Longer values are truncated to this length.
        const SHOWN: usize = 80;
        match &self.setting {
            Setting::Text(text) if text.chars().count() > SHOWN => {
                let head: String = text.chars().take(SHOWN).collect();
                format!("{}={head}… ({} characters)", self.name, text.chars().count())
            }
            Setting::Text(text) => format!("{}={text}", self.name),
            Setting::NotText(value) => format!("{}: {value}", self.name),
            Setting::Absent => self.name.clone(),
            Setting::Computed => format!("{} from elsewhere", self.name),
        }
    }
}

impl Container {
    /// The effective variable of this name: Kubernetes uses the last entry, and a script overrides
    /// it.
    pub(super) fn variable(&self, name: &str) -> Option<&Variable> {
        self.variables.iter().rev().find(|variable| variable.name == name)
    }

    /// Its value, if the manifest contains it.
    pub(super) fn value(&self, name: &str) -> Option<&str> {
        self.variable(name)?.text()
    }

    /// The variable, if it has this value (case-insensitive).
    pub(super) fn has(&self, name: &str, value: &str) -> Option<&Variable> {
        self.variable(name)
            .filter(|variable| variable.text().is_some_and(|text| text.trim().eq_ignore_ascii_case(value)))
    }
}
