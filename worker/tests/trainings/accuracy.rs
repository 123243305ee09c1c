//! Final results on real data: handwritten digits, and the text of this repository; and equally
//! good results in 16 bits.

use std::path::{Path, PathBuf};
use std::time::Instant;
use switchyard_worker::model::Registry;
use switchyard_worker::train::{Blueprint, StepRequest, Trainer, ValidationResult, open};
use switchyard_worker_contract::config::*;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Results of a run.
struct Trained {
    /// Mean training loss of the last tenth of the steps, nats.
    loss: f64,
    judgement: ValidationResult,
    bigram_nats: Option<f64>,
}

/// Trains one rank to the end.
fn train(what: &str, config: &EngineConfig) -> Trained {
    let start = Instant::now();
    let dataset = open(config).unwrap();
    let bigram_nats = dataset.entropies().unwrap().and_then(|entropies| entropies.bigram);
    let blueprint = Blueprint::new(config, dataset, (1, 0), None, &Registry::new()).unwrap();
    let steps = blueprint.training.total_steps;
    let group = crate::ranks::group(1, 0, crate::ranks::free_port());
    let mut trainer = Trainer::join(blueprint, &group).unwrap();
    let losses: Vec<f64> = (0..steps).map(|_| trainer.step(StepRequest::default()).unwrap().0.loss).collect();
    let judgement = trainer.evaluate().unwrap().unwrap();
    let last = &losses[losses.len() - losses.len().div_ceil(10)..];
    let loss = last.iter().sum::<f64>() / last.len() as f64;
    let skipped = trainer.skipped_steps().unwrap_or_default();
    println!("{what}: {steps} steps, {skipped} skipped, in {:.1?}, loss {loss:.4}, {judgement:?}", start.elapsed());
    Trained { loss, judgement, bigram_nats }
}

fn digits() -> Data {
    let path = repository().join("target/data/digits.csv");
    assert!(path.is_file(), "target/data/digits.csv is missing: `cargo xtask data digits` fetches it");
    Data {
        source: Source::Csv(Csv {
            path: path.display().to_string(),
            image: Some(ImageShape { height: 8, width: 8, channels: 1 }),
            largest: 16.0,
            label: None,
            header: Header::Auto,
        }),
        validation_fraction: 0.2,
        images: Images { size: 0, crop_padding: 1, flip: false, mean: vec![0.3], deviation: vec![0.38] },
        features: Features::Raw,
    }
}

/// The training run of `examples/resnet-digits.yaml`.
fn resnet(data: Data, epochs: u64) -> EngineConfig {
    EngineConfig {
        model: Model::ResNet(ResNet { depth: ResNetDepth::D18, stem: Stem::Small, width: 16 }),
        data,
        label_smoothing: 0.1,
        batch_size_per_process: 64,
        length: Length::Epochs(epochs),
        optimizer: Optimizer {
            rule: Rule::Sgd(Momentum { momentum: 0.9, nesterov: true }),
            learning_rate: 0.1,
            weight_decay: 0.0005,
            gradient_clip_norm: None,
            decay_exclusions: DecayExclusions::Vectors,
        },
        schedule: Schedule {
            kind: ScheduleKind::Step { every: 150, factor: 0.1 },
            warmup_steps: Some(20),
            final_learning_rate: 0.0,
        },
        evaluation: Evaluation { every_steps: 0, batches: Some(6) },
        ..crate::plain::resnet()
    }
}

/// The repository's directories, by name: other content, for example a package registry that a CI
/// machine keeps there, must not be part of the data.
const SOURCES: [&str; 6] =
    ["crds/**/*.rs", "node-agent/**/*.rs", "src/**/*.rs", "tests/**/*.rs", "worker/**/*.rs", "xtask/**/*.rs"];

/// A GPT for the Rust sources of the repository.
fn gpt(layers: u32, width: u32, context: u32, batch: u32, steps: u64) -> EngineConfig {
    EngineConfig {
        model: Model::Gpt(Gpt {
            layers,
            hidden_size: width,
            heads: 4,
            context_length: context,
            vocabulary_size: 256,
            tied_head: true,
        }),
        batch_size_per_process: batch,
        length: Length::Steps(steps),
        schedule: Schedule { kind: ScheduleKind::Cosine, warmup_steps: Some(steps / 10), final_learning_rate: 0.0003 },
        evaluation: Evaluation { every_steps: 0, batches: Some(40) },
        ..crate::plain::gpt(&repository(), &SOURCES)
    }
}

#[test]
fn resnet_classifies_97_percent_of_unseen_digits() {
    let data = digits();
    let accuracy = train("ResNet-18", &resnet(data, 20)).judgement.accuracy.unwrap();
    assert!(accuracy >= 0.97, "accuracy {accuracy}");
}

#[test]
fn gpt_beats_the_bigram_entropy_by_0_4_nats() {
    let trained = train("GPT on sources", &gpt(2, 128, 64, 16, 600));
    let (loss, bigram) = (trained.judgement.loss, trained.bigram_nats.unwrap());
    println!("{:.4} nats below the bigram entropy {bigram:.4}", bigram - loss);
    assert!(loss <= bigram - 0.4, "validation loss {loss}, bigram entropy {bigram}");
}

/// BF16, and FP16 with dynamic loss scaling: the loss of the last steps is within 1 % of FP32's, by
/// the median over several seeds. A single run is chaotic: while the loss falls steeply, a
/// different summation order occasionally moves it by 2 %, on some CPUs and not on others.
fn assert_16_bits_learn_the_same<const SEEDS: usize>(what: &str, config: &EngineConfig) {
    let dynamic = LossScaling::Dynamic {
        initial_scale: 65536.0,
        growth_factor: 2.0,
        backoff_factor: 0.5,
        growth_interval_steps: 50,
    };
    let narrow = [(HalfType::Bf16, LossScaling::Static { scale: 1.0 }), (HalfType::Fp16, dynamic)];
    let mut differences = [[0.0; SEEDS]; 2];
    for seed in 0..SEEDS {
        let config = EngineConfig { seed: 7 + seed as u64, ..config.clone() };
        let wide = train(&format!("{what} in FP32"), &config).loss;
        for ((compute_type, loss_scaling), differences) in narrow.into_iter().zip(&mut differences) {
            let precision = Precision::Amp(Amp { compute_type, loss_scaling });
            let trained = train(&format!("{what} in {compute_type:?}"), &EngineConfig { precision, ..config.clone() });
            differences[seed] = trained.loss / wide - 1.0;
        }
    }
    for ((compute_type, _), mut differences) in narrow.into_iter().zip(differences) {
        differences.sort_by(f64::total_cmp);
        println!("{what} in {compute_type:?}: loss against FP32 {differences:.4?}");
        let median = differences[SEEDS / 2];
        assert!(median.abs() <= 0.01, "{what} in {compute_type:?}: loss against FP32, by seed: {differences:.4?}");
    }
}

#[test]
fn sixteen_bits_train_a_gpt_as_well() {
    assert_16_bits_learn_the_same::<3>("GPT", &gpt(2, 64, 64, 8, 300));
}

#[test]
fn sixteen_bits_train_a_resnet_as_well() {
    let mut data = digits();
    // Random crops, and a validation set of 360 images, move the loss by more than the tested
    // difference.
    data.images.crop_padding = 0;
    // The last tenth of the 132 steps follows the fall of the rate.
    let mut config = resnet(data, 6);
    config.schedule.kind = ScheduleKind::Step { every: 90, factor: 0.1 };
    assert_16_bits_learn_the_same::<3>("ResNet-18", &config);
}
