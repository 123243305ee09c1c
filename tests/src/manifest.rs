//! Manifests for tests.

use serde_json::{Value, json};

/// A TrainJob manifest whose fields can be changed one by one.
#[derive(Debug, Clone)]
pub struct Manifest(Value);

impl Manifest {
    /// A GPT with about a millisecond per step: two processes, 30 steps, on the text in `data`.
    pub fn small(data: &str) -> Self {
        Manifest(json!({
            "apiVersion": "training.switchyard.dev/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": "small"},
            "spec": {
                "trainer": {"numProcPerNode": 2, "cpuThreads": 1},
                "engine": {
                    "model": {"type": "GPT", "gpt": {"layers": 1, "hiddenSize": 32, "heads": 2, "contextLength": 32}},
                    "data": {"path": data},
                    "batchSizePerProcess": 2,
                    "steps": 30,
                    "fetchEverySteps": 5,
                },
            },
        }))
    }

    /// Sets a field by its path below `spec`, such as `engine.steps`; creates missing objects on
    /// the way.
    #[must_use]
    pub fn with(mut self, field: &str, value: impl Into<Value>) -> Self {
        let mut target = &mut self.0["spec"];
        for part in field.split('.') {
            target = &mut target[part];
        }
        *target = value.into();
        self
    }

    /// Sets the job name.
    #[must_use]
    pub fn named(mut self, name: &str) -> Self {
        self.0["metadata"]["name"] = name.into();
        self
    }

    /// Adds an environment variable to every process.
    #[must_use]
    pub fn with_env(mut self, name: &str, value: &str) -> Self {
        let entry = json!({"name": name, "value": value});
        match &mut self.0["spec"]["trainer"]["env"] {
            Value::Array(list) => list.push(entry),
            other => *other = json!([entry]),
        }
        self
    }

    /// Returns the manifest as YAML.
    ///
    /// # Panics
    /// Never: JSON values can be written as YAML.
    pub fn yaml(&self) -> String {
        serde_saphyr::to_string(&self.0).expect("invariant: JSON values can be written as YAML")
    }
}
