//! Losses of trainings on the CPU, which the GPU's are compared with. `cargo xtask gpu bundle`
//! records them, so that the GPU machine spends no time on them.

use crate::outcome::Outcome;
use crate::worker::Worker;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::ErrorKind;
use std::path::Path;
use switchyard_worker_contract::config::{Device, EngineConfig, Files, Gpu, Source};

/// Recorded runs by the digest of their configuration.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct CpuLosses(BTreeMap<String, CpuRun>);

/// A run on the CPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct CpuRun {
    /// Of every step.
    pub(crate) losses: Vec<f64>,
    /// Steps skipped because their gradients overflowed.
    pub(crate) skipped_steps: u64,
}

impl CpuLosses {
    /// Reads a file of recorded runs. Without the file, nothing is recorded.
    ///
    /// # Errors
    /// The file cannot be read, or is not one of recorded runs.
    pub(crate) fn read(path: &Path) -> Result<CpuLosses, Outcome> {
        let failed = |text: String| Outcome::failed("losses of the CPU", format!("{}: {text}", path.display()));
        match std::fs::read(path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| failed(error.to_string())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(CpuLosses::default()),
            Err(error) => Err(failed(error.to_string())),
        }
    }

    /// The recorded run of this job, or its run on this machine's CPU; and whether it was recorded.
    pub(crate) fn of(&self, worker: &Worker, name: &str, config: &EngineConfig) -> Result<(CpuRun, bool), Outcome> {
        let config = on_cpu(config);
        match self.0.get(&digest(&config)) {
            Some(run) => Ok((run.clone(), true)),
            None => Ok((train(worker, name, &config)?, false)),
        }
    }

    /// Trains this job on the CPU, unless an equal one is recorded.
    pub(crate) fn record(&mut self, worker: &Worker, name: &str, config: &EngineConfig) -> Result<(), Outcome> {
        let (run, _) = self.of(worker, name, config)?;
        self.0.insert(digest(&on_cpu(config)), run);
        Ok(())
    }
}

/// The same job without what concerns GPUs only.
fn on_cpu(config: &EngineConfig) -> EngineConfig {
    EngineConfig { device: Device::Cpu, gpu: Gpu::default(), ..config.clone() }
}

/// Identifies a job. The probe writes the same text on every machine, into another folder.
fn digest(config: &EngineConfig) -> String {
    let mut config = config.clone();
    if let Source::Text(Files { path, .. }) = &mut config.data.source {
        path.clear();
    }
    let mut hasher = DefaultHasher::new();
    serde_json::to_string(&config).unwrap_or_default().hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

fn train(worker: &Worker, name: &str, config: &EngineConfig) -> Result<CpuRun, Outcome> {
    let ran = worker.train(name, config, 1)?;
    Ok(CpuRun { losses: ran.losses(), skipped_steps: ran.skipped() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::{job, synthetic};
    use switchyard_worker_contract::config::{Activation, Length, Matmul, Mlp, Model};

    #[test]
    fn a_run_is_found_wherever_its_text_is_and_only_for_its_own_job() {
        let model = Model::Mlp(Mlp { hidden_sizes: vec![8], activation: Activation::Gelu });
        let config = job(model, synthetic(10, None), 2);
        let text = |path: &str| {
            let mut config = config.clone();
            config.data.source = Source::Text(Files { path: path.into(), include: Vec::new(), exclude: Vec::new() });
            config
        };
        let id = |config: &EngineConfig| digest(&on_cpu(config));
        assert_eq!(id(&text("/a/lines.txt")), id(&text("/b/lines.txt")));
        let mut fp8 = config.clone();
        fp8.gpu.matmul = Matmul::Fp8;
        assert_eq!(id(&config), id(&fp8), "the CPU has no FP8");
        let longer = EngineConfig { length: Length::Steps(2), ..config.clone() };
        assert_ne!(id(&config), id(&longer));
        assert_ne!(id(&config), id(&text("")));
    }

    #[test]
    fn a_damaged_file_is_named_and_a_missing_one_is_empty() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cpu-losses.json");
        assert!(CpuLosses::read(&path).unwrap().0.is_empty());
        std::fs::write(&path, "{\"a\": {\"losses\": [1]}}").unwrap();
        let Err(Outcome::Failed { text, .. }) = CpuLosses::read(&path) else { panic!("it was read") };
        assert!(text.contains("cpu-losses.json: missing field `skippedSteps`"), "{text}");
    }
}
