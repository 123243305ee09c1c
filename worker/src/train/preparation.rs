//! From the configuration to a rank's plan.
//!
//! Most data are opened, and the rank is planned, before it joins its group. Files whose content
//! decides the split are read by rank 0 alone, once the ranks have met.

use super::{Blueprint, TrainError};
use crate::comm::{CommError, Group, format_ranks};
use crate::data::{DataError, Dataset, Scan, Source, Task, Unscanned};
use crate::model::Registry;
use crate::recorder::Recorder;
use std::sync::{Arc, OnceLock};
use switchyard_worker_contract::config::EngineConfig;
use switchyard_worker_contract::recorder::Operation;

/// The data of a process, which its ranks share.
pub enum SharedData {
    Opened(Arc<Dataset>),
    Unscanned {
        files: Box<Unscanned>,
        /// Set by the first rank that knows the split.
        dataset: OnceLock<Arc<Dataset>>,
    },
}

impl SharedData {
    /// Opens the data. A rank on its own also reads what several ranks would divide.
    ///
    /// # Errors
    /// The data cannot be used.
    pub fn open(config: &EngineConfig, world: u32) -> Result<SharedData, TrainError> {
        if world == 1 {
            return Ok(SharedData::Opened(super::open(config)?));
        }
        let task = Task::of(&config.model);
        Ok(match Source::open(&config.data, &config.reader, &task, config.seed)? {
            Source::Opened(dataset) => SharedData::Opened(Arc::from(dataset)),
            Source::Unscanned(files) => SharedData::Unscanned { files, dataset: OnceLock::new() },
        })
    }
}

/// A rank that is ready to join its group.
pub enum Preparation<'a> {
    Planned(Box<Blueprint>),
    /// The plan depends on what rank 0 finds in the files.
    Unscanned {
        config: &'a EngineConfig,
        data: Arc<SharedData>,
        local_rank: u32,
        kernel: Option<String>,
        registry: &'a Registry,
    },
}

impl From<Blueprint> for Preparation<'_> {
    fn from(blueprint: Blueprint) -> Self {
        Preparation::Planned(Box::new(blueprint))
    }
}

impl<'a> Preparation<'a> {
    /// Plans a rank as far as possible without the others. `local_rank`, `kernel`: see
    /// [`Blueprint::new`].
    ///
    /// # Errors
    /// See [`Blueprint::new`].
    pub fn new(
        config: &'a EngineConfig,
        data: &Arc<SharedData>,
        (world, local_rank): (u32, u32),
        kernel: Option<String>,
        registry: &'a Registry,
    ) -> Result<Preparation<'a>, TrainError> {
        Ok(match &**data {
            SharedData::Opened(dataset) => {
                Blueprint::new(config, Arc::clone(dataset), (world, local_rank), kernel.as_deref(), registry)?.into()
            }
            SharedData::Unscanned { .. } => {
                Preparation::Unscanned { config, data: Arc::clone(data), local_rank, kernel, registry }
            }
        })
    }

    pub(super) fn config(&self) -> &EngineConfig {
        match self {
            Preparation::Planned(blueprint) => &blueprint.training.config,
            Preparation::Unscanned { config, .. } => config,
        }
    }

    /// Plans the rank, together with all others.
    ///
    /// # Errors
    /// The data cannot be used, or are not the same on all ranks; see also [`Blueprint::new`].
    pub(super) fn plan(self, group: &mut Group, recorder: &Recorder) -> Result<Blueprint, TrainError> {
        match self {
            Preparation::Planned(blueprint) => Ok(*blueprint),
            Preparation::Unscanned { config, data, local_rank, kernel, registry } => {
                let dataset = match &*data {
                    SharedData::Opened(dataset) => Arc::clone(dataset),
                    SharedData::Unscanned { files, dataset } => {
                        let scan = scan(files, group, recorder)?;
                        let opened = Arc::new(files.dataset(&scan)?);
                        Arc::clone(dataset.get_or_init(|| opened))
                    }
                };
                Blueprint::new(config, dataset, (group.world(), local_rank), kernel.as_deref(), registry)
            }
        }
    }
}

/// Rank 0 reads all blocks, while every other rank reads its share and rank 0 compares it.
fn scan(files: &Unscanned, group: &mut Group, recorder: &Recorder) -> Result<Scan, TrainError> {
    const WHAT: &str = "the training data";
    group.agree(WHAT, files.files().as_bytes())?;
    let (rank, world) = (group.rank(), group.world());
    recorder.begin(Operation::Open, 0);
    recorder.add_counter({
        let read = files.blocks_read();
        move || read.load(std::sync::atomic::Ordering::Relaxed)
    });
    if rank == 0 {
        let scan = files.scan()?;
        group.broadcast(WHAT, &scan.encode())?;
        let shares = group.gather(WHAT, &[])?;
        let differs = |(rank, share): (u32, Vec<u8>)| {
            (rank > 0 && share != scan.share(rank, world).to_le_bytes()).then_some(rank)
        };
        let others: Vec<u32> = (0..).zip(shares).filter_map(differs).collect();
        let verdict = match others.as_slice() {
            [] => String::new(),
            others => DataError::Differs { ranks: format_ranks(others) }.to_string(),
        };
        group.broadcast(WHAT, verdict.as_bytes())?;
        return if verdict.is_empty() { Ok(scan) } else { Err(CommError::Disagreement(verdict).into()) };
    }
    let share = files.share(rank, world);
    let bytes = group.broadcast(WHAT, &[])?;
    let scan = files.decode(&bytes).ok_or_else(|| {
        let text = format!("{WHAT}: got {} bytes; expected the split of these files", bytes.len());
        CommError::Protocol { with: "rank 0".to_owned(), text }
    })?;
    // After rank 0's result: of two ranks that read the same bad file, rank 0 reports it.
    group.gather(WHAT, &share?.to_le_bytes())?;
    let verdict = group.broadcast(WHAT, &[])?;
    if verdict.is_empty() {
        return Ok(scan);
    }
    Err(CommError::Disagreement(String::from_utf8_lossy(&verdict).into_owned()).into())
}
