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
    /// An MPIJob.
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
    /// Pods that train together, where the manifest says how many.
    pub nodes: Option<u64>,
}

/// Pods that are alike.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Group {
    pub host_network: bool,
    /// Processes per pod, as a field of the job says.
    pub processes: Option<Processes>,
    pub containers: Vec<Container>,
}

/// How many processes are started in a pod, and where that is said.
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
    /// `auto`, `cpu`, or what a script computes.
    Open,
}

/// A container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Container {
    pub path: Path,
    pub variables: Vec<Variable>,
    /// What its command line says about processes.
    pub processes: Option<Processes>,
    /// GPUs that it asks for; absent when that is not a whole number of whole GPUs.
    pub gpus: Option<u64>,
    /// The RDMA resource that it asks for.
    pub rdma: Option<String>,
}

/// A variable of the environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Variable {
    pub name: String,
    pub setting: Setting,
    /// Of the value, or of the entry where there is none.
    pub path: Path,
    pub origin: Origin,
}

/// The value of a variable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Setting {
    Text(String),
    /// Something that is no text, as YAML has it.
    NotText(String),
    /// A line of an `nccl.conf` without `=`.
    Absent,
    /// From a ConfigMap, a Secret, a field, or made of other variables.
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
    /// The value, where the manifest has it.
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
    /// The variable of this name that counts: Kubernetes takes the last, and a script comes after it.
    pub(super) fn variable(&self, name: &str) -> Option<&Variable> {
        self.variables.iter().rev().find(|variable| variable.name == name)
    }

    /// Its value, where the manifest has it.
    pub(super) fn value(&self, name: &str) -> Option<&str> {
        self.variable(name)?.text()
    }

    /// The variable, if it has this value, in any case.
    pub(super) fn has(&self, name: &str, value: &str) -> Option<&Variable> {
        self.variable(name)
            .filter(|variable| variable.text().is_some_and(|text| text.trim().eq_ignore_ascii_case(value)))
    }
}
