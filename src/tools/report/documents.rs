//! Parses the documents in a run directory leniently: only the fields that a report shows.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde::Deserialize;
use serde_json::Value;
use switchyard_core::quantity::parse_quantity;
use switchyard_crds::names::TRAINER;
use switchyard_worker_contract::config::EngineConfig;
use switchyard_worker_contract::event::Inspection;

/// A document in a run directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Document {
    /// `plan.yaml`: processes, and the reason for each setting.
    Plan,
    /// `engine.json`: the configuration that every rank reads.
    Engine,
    /// `inspection.json`: the worker's inspection of the data and the model.
    Inspection,
    /// `machine.json`: the machine's GPUTopology.
    Machine,
    /// `status.yaml`: the TrainJob with its status.
    Status,
}

impl Document {
    /// All of them.
    pub const ALL: [Document; 5] =
        [Document::Plan, Document::Engine, Document::Inspection, Document::Machine, Document::Status];

    /// File name in the run directory.
    pub fn file(self) -> &'static str {
        match self {
            Document::Plan => "plan.yaml",
            Document::Engine => "engine.json",
            Document::Inspection => "inspection.json",
            Document::Machine => "machine.json",
            Document::Status => "status.yaml",
        }
    }
}

/// The documents; unreadable ones are absent.
#[derive(Debug, Default)]
pub(super) struct Documents {
    pub plan: Option<PlanFile>,
    pub engine: Option<EngineConfig>,
    pub inspection: Option<Inspection>,
    pub machine: Option<MachineStatus>,
    pub job: Option<Job>,
    /// CPU limit of the job on each node, from `trainer.resourcesPerNode.limits`.
    pub cpu_limit: Option<f64>,
    /// The original manifest without values that can be secret.
    pub manifest: Option<Value>,
}

/// The plan of the last attempt.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PlanFile {
    pub job: String,
    #[serde(default)]
    pub reason: String,
    #[serde(default)]
    pub warnings: Vec<String>,
    #[serde(default)]
    pub nodes: Vec<Node>,
    pub memory_limit_bytes: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Node {
    #[serde(default)]
    pub node_name: String,
    #[serde(default)]
    pub processes: Vec<Process>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Process {
    pub rank: u32,
    pub cpus: Option<String>,
    #[serde(default)]
    pub numa_nodes: Vec<u32>,
    pub threads: Option<u32>,
    #[serde(default)]
    pub devices: Vec<String>,
    #[serde(default)]
    pub env: Vec<Variable>,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct Variable {
    pub name: String,
    #[serde(default)]
    pub value: String,
    #[serde(default)]
    pub reason: String,
}

#[derive(Debug, Default, Deserialize)]
struct MachineFile {
    #[serde(default)]
    status: MachineStatus,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct MachineStatus {
    pub memory_bytes: Option<u64>,
    #[serde(default)]
    pub cpus: Cpus,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Cpus {
    pub model: Option<String>,
    pub cores: Option<u32>,
    pub threads: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
struct Manifest {
    #[serde(default)]
    status: Job,
}

/// The status of a TrainJob.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Job {
    #[serde(default)]
    pub conditions: Vec<Condition>,
    pub placement: Option<Placement>,
    #[serde(default)]
    pub restarts: Restarts,
}

/// Restarts by cause.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Restarts {
    #[serde(default)]
    pub preemption: u32,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct Condition {
    #[serde(rename = "type")]
    pub kind: String,
    pub status: String,
    #[serde(default)]
    pub reason: String,
    #[serde(default)]
    pub message: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Placement {
    #[serde(default)]
    pub reason: String,
    /// Bytes per second.
    pub predicted_bus_bandwidth: Option<Quantity>,
    pub best_possible: Option<Quantity>,
    pub limited_by: Option<String>,
}

impl Documents {
    /// Parses a document; the error describes why it is unreadable.
    pub(super) fn read(&mut self, document: Document, text: &str) -> Result<(), String> {
        let fault = |error: String| format!("{} cannot be read: {error}", document.file());
        let json = |error: serde_json::Error| fault(error.to_string());
        let yaml = |error: serde_saphyr::Error| fault(error.to_string().lines().next().unwrap_or_default().to_owned());
        match document {
            Document::Plan => {
                self.plan = Some(serde_saphyr::from_str(text).map_err(yaml)?);
            }
            Document::Engine => self.engine = Some(serde_json::from_str(text).map_err(json)?),
            Document::Inspection => self.inspection = Some(serde_json::from_str(text).map_err(json)?),
            Document::Machine => self.machine = Some(serde_json::from_str::<MachineFile>(text).map_err(json)?.status),
            Document::Status => {
                self.job = Some(serde_saphyr::from_str::<Manifest>(text).map_err(yaml)?.status);
                let mut manifest: Value = serde_saphyr::from_str(text).map_err(yaml)?;
                if let Some(fields) = manifest.as_object_mut() {
                    fields.remove("status");
                }
                self.cpu_limit = cpu_limit(&manifest);
                hide(&mut manifest);
                self.manifest = Some(manifest);
            }
        }
        Ok(())
    }
}

/// Variables with these substrings in their names are not shown.
const SECRET: [&str; 6] = ["SECRET", "TOKEN", "PASSWORD", "PASSWD", "CREDENTIAL", "KEY"];

/// The displayed value of an environment variable, safe for a report that is passed on.
pub(super) fn shown(name: &str, value: &str) -> String {
    let name = name.to_uppercase();
    // The path of a key file is not a secret.
    let secret = SECRET.iter().any(|word| name.contains(word)) && !name.ends_with("_FILE");
    if secret { "(not shown)".to_owned() } else { value.to_owned() }
}

/// CPU limit of a pod's trainer in cores. As in its pod, the template's own limit wins.
fn cpu_limit(manifest: &Value) -> Option<f64> {
    let containers = manifest.pointer("/spec/template/spec/containers").and_then(Value::as_array);
    let trainer = containers.into_iter().flatten().find(|container| container["name"] == TRAINER);
    let own = trainer.and_then(|trainer| trainer.pointer("/resources/limits/cpu"));
    let limit = own.or_else(|| manifest.pointer("/spec/trainer/resourcesPerNode/limits/cpu"))?;
    let text = limit.as_str().map_or_else(|| limit.to_string(), str::to_owned);
    parse_quantity(&text).filter(|cpus| *cpus > 0.0)
}

/// Hides the values of variables in a manifest, which are objects with a name and a value.
fn hide(value: &mut Value) {
    match value {
        Value::Array(list) => list.iter_mut().for_each(hide),
        Value::Object(fields) => {
            if let (Some(Value::String(name)), Some(Value::String(value))) = (fields.get("name"), fields.get("value")) {
                let shown = shown(name, value);
                fields.insert("value".into(), shown.into());
            }
            fields.values_mut().for_each(hide);
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_limit_is_the_templates_or_else_that_of_the_trainer() {
        let limit = |template: &str, trainer: &str| {
            let mut documents = Documents::default();
            let text = format!("spec: {{trainer: {trainer}, template: {template}}}\nstatus: {{}}\n");
            documents.read(Document::Status, &text).unwrap();
            documents.cpu_limit
        };
        let template =
            |name: &str| format!("{{spec: {{containers: [{{name: {name}, resources: {{limits: {{cpu: 500m}}}}}}]}}}}");
        let trainer = "{resourcesPerNode: {limits: {cpu: 2}}}";
        assert_eq!(limit("{}", "{}"), None);
        assert_eq!(limit("{}", trainer), Some(2.0));
        assert_eq!(limit(&template("sidecar"), trainer), Some(2.0));
        assert_eq!(limit(&template("trainer"), trainer), Some(0.5));
        assert_eq!(limit(&template("trainer"), "{}"), Some(0.5));
    }

    #[test]
    fn secrets_of_a_manifest_are_not_shown() {
        let text = "spec:\n  trainer:\n    env:\n    - {name: API_TOKEN, value: abc}\n    - {name: SWITCHYARD_KEY_FILE, value: /x}\n\
                    status:\n  conditions:\n  - {type: Complete, status: 'True', reason: Complete, message: 9 steps done}\n  \
                    restarts: {application: 1, preemption: 2, total: 3}\n";
        let mut documents = Documents::default();
        documents.read(Document::Status, text).unwrap();
        let manifest = documents.manifest.unwrap().to_string();
        assert!(!manifest.contains("abc") && manifest.contains("/x") && !manifest.contains("conditions"), "{manifest}");
        let job = documents.job.unwrap();
        assert_eq!((job.conditions[0].message.as_str(), job.restarts.preemption), ("9 steps done", 2));
    }

    #[test]
    fn unreadable_documents_are_named_and_absent() {
        let mut documents = Documents::default();
        for document in Document::ALL {
            let fault = documents.read(document, "[1,").unwrap_err();
            assert!(fault.starts_with(document.file()), "{fault}");
        }
        assert!(documents.plan.is_none() && documents.engine.is_none() && documents.job.is_none());
    }
}
