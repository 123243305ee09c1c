//! A manifest of any kind as the rules see it.

use super::path::Path;

/// What a document is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A TrainJob of Switchyard.
    TrainJob,
    /// A TrainJob of Kubeflow Trainer.
    KubeflowTrainJob,
    /// A PyTorchJob of the training operator.
    PyTorchJob,
    MpiJob,
    /// Another job of the training operator: TFJob, PaddleJob, …
    ReplicaJob,
    /// A Pod, or anything that has a template of one.
    Pods,
    /// A ConfigMap with an `nccl.conf`.
    NcclConf,
}

impl Kind {
    /// Whether an operator sets PyTorch's rendezvous in its pods.
    pub(super) fn wires_torch(self) -> bool {
        matches!(self, Kind::KubeflowTrainJob | Kind::PyTorchJob)
    }
}

/// A job, or pods of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Workload {
    pub kind: Kind,
    pub kind_word: String,
    pub name: String,
    pub groups: Vec<Group>,
    /// The framework whose rendezvous Switchyard sets; empty for everything but our TrainJobs.
    pub framework: String,
    /// Number of pods that train together, if the manifest has it.
    pub nodes: Option<u64>,
}

/// Equal pods.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Group {
    pub host_network: bool,
    /// What it asks of its node that policies keep from tenants: the field, and how it is written.
    pub host_access: Vec<(Path, String)>,
    /// Processes per pod, as a field of the job says.
    pub processes: Option<Processes>,
    pub containers: Vec<Container>,
}

/// How many processes start in a pod, and which field sets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Processes {
    pub count: Count,
    pub path: Path,
    /// How it is written, such as `nprocPerNode: 8`.
    pub words: String,
}

/// A number of processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Count {
    Number(u64),
    /// `gpu`: one per GPU, and there must be one.
    PerGpu,
    /// `auto`, `cpu`, or a value that a script computes.
    Open,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Container {
    pub path: Path,
    pub variables: Vec<Variable>,
    /// The processes that its command line asks for.
    pub processes: Option<Processes>,
    /// GPUs that it asks for; absent if not a whole number of whole GPUs.
    pub gpus: Option<u64>,
    /// The RDMA resource that it asks for.
    pub rdma: Option<String>,
}

/// A variable of the environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Variable {
    pub name: String,
    pub setting: Setting,
    /// Path of the value, or of the entry without one.
    pub path: Path,
    pub origin: Origin,
}

/// The value of a variable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Setting {
    Text(String),
    /// Not a string, in YAML's notation.
    NotText(String),
    /// A line of an `nccl.conf` without `=`.
    Absent,
    /// From a ConfigMap, a Secret, a field, or built from other variables.
    Computed,
}

/// Where a variable is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// The list `env` of a container.
    Env,
    /// A command line or script.
    Command,
    /// A line of an `nccl.conf`.
    Conf,
}

impl Variable {
    /// The value, if the manifest has it.
    pub(super) fn text(&self) -> Option<&str> {
        match &self.setting {
            Setting::Text(text) => Some(text),
            _ => None,
        }
    }

    /// As people write it.
    pub(super) fn words(&self) -> String {
        /// Values are shown whole up to this length.
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
    /// The effective variable of this name: Kubernetes uses the last entry, and a script overrides it.
    pub(super) fn variable(&self, name: &str) -> Option<&Variable> {
        self.variables.iter().rev().find(|variable| variable.name == name)
    }

    /// Its value, if the manifest has it.
    pub(super) fn value(&self, name: &str) -> Option<&str> {
        self.variable(name)?.text()
    }

    /// The variable, if it has this value, in any case.
    pub(super) fn has(&self, name: &str, value: &str) -> Option<&Variable> {
        self.variable(name)
            .filter(|variable| variable.text().is_some_and(|text| text.trim().eq_ignore_ascii_case(value)))
    }
}
