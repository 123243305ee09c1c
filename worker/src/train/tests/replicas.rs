//! Replicas are compared at every checkpoint.

use super::altered_engine::{on_two_ranks, plain};
use crate::model::Registry;
use crate::train::engine::Array;
use crate::train::{Blueprint, StepRequest, TrainError, Trainer, open};
use std::path::{Path, PathBuf};
use switchyard_checkpoint::Store;
use switchyard_checkpoint::disk::Disk;
use switchyard_worker_contract::config::{Checkpoint, EngineConfig, Length};
use switchyard_worker_contract::exit::Exit;

fn config(directory: &Path) -> EngineConfig {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/comm");
    let path = directory.display().to_string();
    EngineConfig {
        batch_size_per_process: 2,
        length: Length::Steps(12),
        checkpoint: Some(Checkpoint { path, every_steps: 3, period_seconds: 0, keep: 9, on_suspend: true }),
        ..plain::gpt(&source, &["**/*.rs"])
    }
}

/// Flips a bit of a number of an array on rank 1 before step 5; returns the error of each
/// rank.
fn flipped(directory: &Path, array: Array) -> Vec<TrainError> {
    let config = config(directory);
    let train = |trainer: &mut Trainer, rank: u32| loop {
        if trainer.steps_done() == 4 && rank == 1 {
            let mut number = [0.0_f32];
            trainer.engine.read(array, 7, &mut number)?;
            trainer.engine.write(array, 7, &[f32::from_bits(number[0].to_bits() ^ (1 << 20))])?;
        }
        trainer.step(StepRequest::default())?;
    };
    on_two_ranks(|group| {
        let blueprint = Blueprint::new(&config, open(&config).unwrap(), (2, 0), None, &Registry::new()).unwrap();
        let mut trainer = Trainer::join(blueprint, &group).unwrap();
        let Err::<(), TrainError>(error) = train(&mut trainer, group.rank()) else { unreachable!() };
        trainer.leave().unwrap();
        error
    })
}

#[test]
fn a_flipped_bit_on_one_rank_ends_the_run_before_the_next_checkpoint() {
    for array in [Array::Weights, Array::Moments(1)] {
        let folder = tempfile::tempdir().unwrap();
        for error in flipped(folder.path(), array) {
            assert_eq!(error.exit(0), Exit::OwnFailure, "restartable");
            let text = error.to_string();
            for words in ["after step 6 the ranks are no longer equal", "rank 0 has ", "rank 1 has "] {
                assert!(text.contains(words), "{words}: {text}");
            }
        }
        let store = Store::new(&Disk, folder.path());
        let steps: Vec<u64> = store.list().unwrap().into_iter().map(|found| found.id.step).collect();
        assert_eq!(steps, [3], "{array:?}");
    }
}
