//! With sharding, updated weights arrive during the next forward pass.

use super::altered_engine::{on_two_ranks, plain};
use crate::model::Registry;
use crate::nn::{Layout, Role};
use crate::profile::Row;
use crate::train::engine::Array;
use crate::train::{Blueprint, StepRequest, Trainer, open};
use std::path::PathBuf;
use switchyard_worker_contract::config::{
    Amp, EngineConfig, Gpt, HalfType, Length, LossScaling, Model, Precision, Sharding,
};

const STEPS: u64 = 3;

/// Large enough for several buckets.
fn config(sharding: Sharding, blocks: bool) -> EngineConfig {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/comm");
    let plain = plain::gpt(&source, &["**/*.rs"]);
    let shape =
        Gpt { layers: 4, hidden_size: 128, heads: 4, context_length: 16, vocabulary_size: 256, tied_head: true };
    let mut config = EngineConfig {
        model: Model::Gpt(shape),
        batch_size_per_process: 2,
        length: Length::Steps(STEPS),
        sharding,
        ..plain
    };
    config.overlap.sync_all_reduce = blocks;
    config
}

/// Bytes of the last step's operations with this name.
fn traced(trainer: &mut Trainer, operation: &str) -> u64 {
    let mut bytes = 0;
    trainer.engine.trace(&mut |row, name, _, _, arguments| {
        if name.starts_with(operation) {
            assert!(matches!(row, Row::Communicator(_)), "{name} in {row:?}");
            bytes += arguments["bytes"].as_u64().unwrap();
        }
    });
    bytes
}

/// Bytes of all weights as layers read them with mixed precision: vectors in f32, others in 16
/// bits.
fn mixed_bytes(layout: &Layout) -> u64 {
    let ends = layout.parameters[1..].iter().map(|next| next.offset).chain([layout.len]);
    let bytes = layout.parameters.iter().zip(ends).map(|(parameter, end)| {
        let width = if parameter.role == Role::Vector { 4 } else { 2 };
        width * (end - parameter.offset) as u64
    });
    bytes.sum()
}

/// With mixed precision, what layers read in 16 bits is gathered in 16 bits, once per step. Its f32
/// values cannot be read before they are gathered, too.
#[test]
fn weights_arrive_in_16_bits_with_mixed_precision() {
    for (sharding, compute_type, blocks) in [
        (Sharding::Optimizer, HalfType::Bf16, true),
        (Sharding::Optimizer, HalfType::Fp16, false),
        (Sharding::Gradients, HalfType::Bf16, false),
    ] {
        let precision = Precision::Amp(Amp { compute_type, loss_scaling: LossScaling::Static { scale: 1.0 } });
        let config = EngineConfig { precision, ..config(sharding, blocks) };
        on_two_ranks(|group| {
            let blueprint = Blueprint::new(&config, open(&config).unwrap(), (2, 0), None, &Registry::new()).unwrap();
            let mut trainer = Trainer::join(blueprint, &group).unwrap();
            let (whole, mixed) = (4 * trainer.layout().len as u64, mixed_bytes(trainer.layout()));
            assert!(100 * mixed <= 51 * whole, "{mixed} of {whole} bytes");
            for step in 1..=STEPS {
                trainer.step(StepRequest::default()).unwrap();
                trainer.engine.read(Array::Weights, 0, &mut [0.0]).unwrap_err();
                let expected = if blocks || step > 1 { mixed } else { 0 };
                assert_eq!(traced(&mut trainer, "all-gather"), expected, "{sharding:?}: step {step}");
            }
            trainer.engine.await_weights().unwrap();
            trainer.engine.read(Array::Weights, 0, &mut [0.0]).unwrap_err();
            trainer.agree_on_weights().unwrap();
            trainer.engine.read(Array::Weights, 0, &mut [0.0]).unwrap();
            trainer.leave().unwrap();
        });
    }
}

#[test]
fn a_step_ends_before_its_weights_arrive_unless_it_blocks() {
    for (sharding, blocks) in [(Sharding::Optimizer, false), (Sharding::Optimizer, true), (Sharding::Gradients, false)]
    {
        let config = config(sharding, blocks);
        on_two_ranks(|group| {
            let blueprint = Blueprint::new(&config, open(&config).unwrap(), (2, 0), None, &Registry::new()).unwrap();
            assert!(blueprint.training.buckets.len() >= 4);
            let mut trainer = Trainer::join(blueprint, &group).unwrap();
            for step in 1..=STEPS {
                trainer.step(StepRequest::default()).unwrap();
                let read = trainer.engine.read(Array::Weights, 0, &mut [0.0]);
                assert_eq!(read.is_ok(), blocks, "{sharding:?}: step {step}");
                // The weights of the step before arrived in this one, each once.
                let whole = 4 * trainer.layout().len as u64;
                let expected = if blocks || step > 1 { whole } else { 0 };
                assert!(traced(&mut trainer, "reduce-scatter") >= whole);
                assert_eq!(traced(&mut trainer, "all-gather"), expected, "{sharding:?}: step {step}");
            }
            trainer.engine.complete_weights().unwrap();
            trainer.engine.read(Array::Weights, 0, &mut [0.0]).unwrap();
            trainer.agree_on_weights().unwrap();
            trainer.leave().unwrap();
        });
    }
}
