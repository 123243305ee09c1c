//! Defaults that depend on other fields, checks that CEL cannot express, and translation of every
//! valid block.

use crate::{Invalid, validate};
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};
use switchyard_crds as api;
use switchyard_worker_contract::config::{
    Adam, Algorithm, Amp, Column, Compression, Device, EngineConfig, Features, Gpu, HalfType, Header, Lars, LocalSteps,
    LossScaling, Matmul, Momentum, Nesterov, OnHang, OuterOptimizer, ParameterServers, Pipeline, Precision, RankOrder,
    Recomputation, ResNet, ResNetDepth, Rule, ServerPlacement, Sharding, Source, Stem, SyncPolicy, Synthetic, TopK,
    Updates, Watchdog,
};

mod exchanges;

/// A small job with these engine blocks.
fn document(blocks: Value) -> Value {
    let mut engine = json!({
        "model": {"type": "MLP", "mlp": {"hiddenSizes": [8]}},
        "data": {"format": "Synthetic"},
        "steps": 600,
    });
    for (name, block) in blocks.as_object().unwrap() {
        engine[name] = block.clone();
    }
    json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "job"},
        "spec": {"trainer": {"numProcPerNode": 4}, "engine": engine},
    })
}

fn translated(blocks: Value) -> Result<EngineConfig, Vec<Invalid>> {
    let job = api::validate::train_job(&document(blocks)).unwrap_or_else(|faults| panic!("{faults:?}"));
    Ok(validate(&job)?.engine.unwrap())
}

fn config(blocks: Value) -> EngineConfig {
    translated(blocks).unwrap_or_else(|faults| panic!("{faults:?}"))
}

fn refused(blocks: Value) -> String {
    translated(blocks).unwrap_err().iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

#[test]
fn every_optimizer_has_its_defaults() {
    let adam = |beta2, epsilon| Adam { beta1: 0.9, beta2, epsilon };
    let expected = [
        (json!({"type": "SGD"}), Rule::Sgd(Momentum { momentum: 0.9, nesterov: false }), 0.1, 1e-4, None),
        (json!({"type": "Adam"}), Rule::Adam(adam(0.999, 1e-8)), 0.001, 0.0, Some(1.0)),
        (json!({}), Rule::AdamW(adam(0.999, 1e-8)), 0.001, 0.01, Some(1.0)),
        (json!({"type": "LAMB", "learningRate": "2"}), Rule::Lamb(adam(0.999, 1e-6)), 2.0, 0.01, Some(1.0)),
        (
            json!({"type": "LARS", "learningRate": "2"}),
            Rule::Lars(Lars { momentum: 0.9, trust_coefficient: 0.001 }),
            2.0,
            1e-4,
            None,
        ),
    ];
    for (block, rule, learning_rate, weight_decay, clip) in expected {
        let found = config(json!({"optimizer": block})).optimizer;
        assert_eq!((found.rule, found.learning_rate), (rule, learning_rate));
        assert_eq!((found.weight_decay, found.gradient_clip_norm), (weight_decay, clip), "{rule:?}");
    }
}

#[test]
fn adamw_has_the_recipe_of_each_model() {
    let images = json!({"format": "IDX", "path": "m"});
    for (model, data, beta2, weight_decay, clip) in [
        (
            json!({"type": "GPT", "gpt": {"layers": 1, "hiddenSize": 8, "heads": 1, "contextLength": 8}}),
            json!({"path": "t"}),
            0.95,
            0.1,
            Some(1.0),
        ),
        (json!({"type": "ResNet", "resnet": {"depth": 18}}), images.clone(), 0.999, 0.05, None),
        (json!({"type": "MLP", "mlp": {"hiddenSizes": [8]}}), images, 0.999, 0.01, Some(1.0)),
    ] {
        let found = config(json!({"model": model, "data": data, "optimizer": {"type": "AdamW"}})).optimizer;
        assert_eq!(found.rule, Rule::AdamW(Adam { beta1: 0.9, beta2, epsilon: 1e-8 }), "{model}");
        assert_eq!((found.weight_decay, found.gradient_clip_norm), (weight_decay, clip), "{model}");
    }
}

#[test]
fn a_resnet_without_an_optimizer_is_trained_with_sgd() {
    let of = |blocks: Value| {
        let mut job = json!({
            "model": {"type": "ResNet", "resnet": {"depth": 18}}, "data": {"format": "IDX", "path": "m"},
        });
        job.as_object_mut().unwrap().extend(blocks.as_object().unwrap().clone());
        config(job).optimizer
    };
    let sgd = Rule::Sgd(Momentum { momentum: 0.9, nesterov: false });
    let found = of(json!({}));
    assert_eq!((found.rule, found.learning_rate, found.weight_decay), (sgd, 0.1, 1e-4));
    let found = of(json!({"optimizer": {"learningRate": "0.05"}}));
    assert_eq!((found.rule, found.learning_rate, found.gradient_clip_norm), (sgd, 0.05, None));
}

#[test]
fn several_nodes_have_two_communicators_unless_the_job_sets_another_number() {
    let of = |nodes: u32, overlap: Value| {
        let mut job = document(json!({"overlap": overlap}));
        job["spec"]["trainer"]["numNodes"] = json!(nodes);
        let job = api::validate::train_job(&job).unwrap_or_else(|faults| panic!("{faults:?}"));
        validate(&job).unwrap().engine.unwrap().overlap.communicators
    };
    assert_eq!([of(1, json!({})), of(2, json!({})), of(2, json!({"communicators": 1}))], [1, 2, 1]);
}

#[test]
fn the_watchdog_follows_the_failure_policy() {
    let with = |policy: Value| {
        let mut job = document(json!({}));
        job["spec"]["failurePolicy"] = policy;
        let job = api::validate::train_job(&job).unwrap_or_else(|faults| panic!("{faults:?}"));
        validate(&job).unwrap().engine.unwrap().watchdog
    };
    assert_eq!(with(json!({"maxRestarts": 3})), Watchdog::default());
    let short = with(json!({"progressTimeoutSeconds": 90, "onHang": "Report"}));
    assert_eq!(short, Watchdog { timeout_seconds: Some(90), on_hang: OnHang::Report });
    assert_eq!(with(json!({"onHang": "Restart"})), Watchdog::default());
}

#[test]
fn pinned_memory_has_no_effect_as_documented() {
    let with = |mode: &str| config(json!({"reader": {"pinnedMemory": mode}}));
    assert_eq!(with("Auto"), with("Disabled"));
}

#[test]
fn loss_scaling_follows_the_format() {
    let dynamic = LossScaling::Dynamic {
        initial_scale: 65_536.0,
        growth_factor: 2.0,
        backoff_factor: 0.5,
        growth_interval_steps: 2000,
    };
    let one = LossScaling::Static { scale: 1.0 };
    for (block, compute_type, loss_scaling) in [
        (json!({"mode": "AMP"}), HalfType::Bf16, one),
        (json!({"mode": "AMP", "computeType": "FP16"}), HalfType::Fp16, dynamic),
        (json!({"mode": "AMP", "lossScaling": {"type": "Dynamic"}}), HalfType::Bf16, dynamic),
        (
            json!({"mode": "AMP", "computeType": "FP16", "lossScaling": {"type": "Static", "scale": "128"}}),
            HalfType::Fp16,
            LossScaling::Static { scale: 128.0 },
        ),
    ] {
        let found = config(json!({"precision": block})).precision;
        assert_eq!(found, Precision::Amp(Amp { compute_type, loss_scaling }));
    }
    assert_eq!(config(json!({})).precision, Precision::Fp32);
}

#[test]
fn images_are_normalised_by_their_dataset_statistics() {
    let of = |data: Value| config(json!({"data": data})).data.images;
    assert_eq!(of(json!({"format": "IDX", "path": "m"})).mean, [0.1307]);
    assert_eq!(of(json!({"format": "CIFAR10", "path": "c"})).deviation, [0.2470, 0.2435, 0.2616]);
    let folder = of(json!({"format": "ImageFolder", "path": "i", "imageSize": 224}));
    assert_eq!((folder.mean, folder.size), (vec![0.485, 0.456, 0.406], 224));
    let own = of(json!({"format": "SafeTensors", "path": "s", "normalisation": {"mean": ["0.3"], "deviation": ["2"]}}));
    assert_eq!((own.mean, own.deviation), (vec![0.3], vec![2.0]));
    assert_eq!(of(json!({"format": "Synthetic"})).deviation, [1.0]);
}

#[test]
fn the_first_layers_of_a_resnet_follow_the_size_of_the_images() {
    let stem = |more: Value, data: Value| {
        let mut shape = json!({"depth": 50});
        shape.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config(json!({"model": {"type": "ResNet", "resnet": shape}, "data": data})).model
    };
    let expected =
        |stem| switchyard_worker_contract::config::Model::ResNet(ResNet { depth: ResNetDepth::D50, stem, width: 64 });
    let folder = |size: u32| json!({"format": "ImageFolder", "path": "i", "imageSize": size});
    assert_eq!(stem(json!({}), folder(224)), expected(Stem::ImageNet));
    assert_eq!(stem(json!({}), folder(64)), expected(Stem::Small));
    assert_eq!(stem(json!({}), json!({"format": "SafeTensors", "path": "s"})), expected(Stem::Small));
    assert_eq!(stem(json!({"stem": "Small"}), folder(224)), expected(Stem::Small));
}

/// The device for this trainer and these blocks.
fn on(trainer: Value, blocks: Value) -> Result<Device, String> {
    with_trainer(trainer, blocks).map(|config| config.device)
}

fn with_trainer(trainer: Value, blocks: Value) -> Result<EngineConfig, String> {
    let mut document = document(blocks);
    document["spec"]["trainer"] = trainer;
    let job = api::validate::train_job(&document).unwrap_or_else(|faults| panic!("{faults:?}"));
    let valid =
        validate(&job).map_err(|faults| faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))?;
    Ok(valid.engine.unwrap())
}

#[test]
fn ranks_use_gpus_if_requested_or_configured() {
    let gpus = |count: u32| json!({"resourcesPerNode": {"limits": {"nvidia.com/gpu": count}}});
    assert_eq!(on(json!({}), json!({})), Ok(Device::Cpu));
    assert_eq!(on(gpus(2), json!({})), Ok(Device::Cuda));
    assert_eq!(on(json!({"numProcPerNode": 4}), json!({"device": "Cuda"})), Ok(Device::Cuda), "the user's own machine");
    let mut fewer = gpus(2);
    fewer["numProcPerNode"] = json!(3);
    assert_eq!(
        on(fewer, json!({})).unwrap_err(),
        "spec.engine.device: got 3 processes on a node with 2 GPUs; expected a GPU for each: trainer.numProcPerNode 2, or nvidia.com/gpu 3"
    );
    assert_eq!(
        on(gpus(1), json!({"reader": {"pinnedMemory": "Disabled"}})).unwrap_err(),
        "spec.engine.reader.pinnedMemory: got Disabled on GPUs; expected Auto: GPUs take batches from pinned memory"
    );
}

#[test]
fn gpu_only_options_are_rejected_on_cpus_unless_they_have_no_effect() {
    let tf32 = json!({"precision": {"matmul": "TF32"}});
    assert_eq!(
        on(json!({}), tf32.clone()).unwrap_err(),
        "spec.engine.precision.matmul: got TF32 on CPUs; expected IEEE: CPUs multiply in full FP32; or mode AMP, which is faster"
    );
    assert_eq!(on(json!({}), json!({"device": "Cuda", "precision": {"matmul": "TF32"}})), Ok(Device::Cuda));
    let fp8 = json!({"device": "Cuda", "precision": {"matmul": "FP8", "mode": "AMP"}});
    assert_eq!(config(fp8.clone()).gpu, Gpu { matmul: Matmul::Fp8, ..Gpu::default() });
    assert_eq!(
        on(json!({}), json!({"precision": fp8["precision"]})).unwrap_err(),
        "spec.engine.precision.matmul: got FP8 on CPUs; expected IEEE: only GPUs multiply in FP8"
    );
    for (field, value, got) in [("mode", "FP32", "mode FP32"), ("computeType", "FP16", "computeType FP16")] {
        let mut other = fp8.clone();
        other["precision"][field] = json!(value);
        assert_eq!(
            on(json!({}), other).unwrap_err(),
            format!(
                "spec.engine.precision.matmul: got FP8 with {got}; expected mode AMP with computeType BF16, the default: FP8 is rounded from BF16"
            )
        );
    }
    let mut blocks = tf32;
    (blocks["device"], blocks["cudaGraphs"]) = (json!("Cuda"), json!("Disabled"));
    blocks["deterministic"] = json!("Disabled");
    assert_eq!(config(blocks).gpu, Gpu { graphs: false, matmul: Matmul::Tf32, deterministic: false });
    assert_eq!(config(json!({})).gpu, Gpu::default());
}

#[test]
fn one_process_has_all_ranks_of_a_node() {
    assert_eq!(config(json!({"executionMode": "SingleProcess"})).devices_per_process, 4);
    assert_eq!(config(json!({})).devices_per_process, 1);
}

#[test]
fn without_a_schedule_the_worker_finds_the_warm_up_from_the_steps() {
    for length in [json!({"epochs": 1, "steps": null}), json!({"steps": 600})] {
        assert_eq!(config(length.clone()).schedule.warmup_steps, None, "{length}");
    }
    assert_eq!(config(json!({"schedule": {"type": "Linear"}})).schedule.warmup_steps, Some(0));
}

#[test]
fn synthetic_data_has_classes_and_samples() {
    let source = config(json!({})).data.source;
    assert_eq!(source, Source::Synthetic(Synthetic { samples: 10_000, image: None, classes: 10 }));
}

#[test]
fn values_that_cel_cannot_check_are_rejected_by_field() {
    let optimizer = json!({"learningRate": "0.001"});
    let schedule = json!({"type": "Linear", "finalLearningRate": "0.01"});
    let text = refused(json!({"optimizer": optimizer, "schedule": schedule}));
    assert_eq!(
        text,
        "spec.engine.schedule.finalLearningRate: got 0.01; expected at most optimizer.learningRate, 0.001"
    );
    let text = refused(json!({"optimizer": {"epsilon": "1e-99"}}));
    assert!(
        text.starts_with("spec.engine.optimizer.epsilon: got `1e-99`; expected a decimal number that is 0"),
        "{text}"
    );
    let data = json!({
        "format": "IDX", "path": "m", "augmentation": {"cropPadding": 28},
        "normalisation": {"mean": ["0", "0", "0"], "deviation": ["1", "1", "1e60"]},
    });
    let text = refused(json!({"data": data}));
    for words in [
        "spec.engine.data.augmentation.cropPadding: got 28; expected less than the 28 pixels",
        "spec.engine.data.normalisation.mean: got 3 numbers; expected 1 for all channels",
        "spec.engine.data.normalisation.deviation[2]: got `1e60`",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
}

#[test]
fn columns_and_normalisation_of_features() {
    let csv = |blocks: Value| {
        let mut data = json!({"format": "CSV", "path": "c"});
        data.as_object_mut().unwrap().extend(blocks.as_object().unwrap().clone());
        let data = config(json!({"data": data})).data;
        let Source::Csv(csv) = data.source else { panic!("{:?}", data.source) };
        (csv.label, csv.header, data.features)
    };
    assert_eq!(csv(json!({})), (None, Header::Auto, Features::Raw));
    let named = csv(json!({"labelColumn": "kind", "header": "Present", "normalisation": {"source": "TrainingSplit"}}));
    assert_eq!(named, (Some(Column::Name("kind".into())), Header::Present, Features::TrainingSplit));
    let given = csv(json!({"labelColumn": -1, "normalisation": {"mean": ["-1.5", "2"], "deviation": ["1", "0.5"]}}));
    let features = Features::Given { mean: vec![-1.5, 2.0], deviation: vec![1.0, 0.5] };
    assert_eq!(given, (Some(Column::Position(-1)), Header::Auto, features));
}

#[test]
fn an_evaluation_has_a_number_of_batches_or_all() {
    let batches = |batches: Value| json!({"evaluation": {"batches": batches}});
    assert_eq!(config(batches(json!(3))).evaluation.batches, Some(3));
    assert_eq!(config(batches(json!("All"))).evaluation.batches, None);
    assert_eq!(config(json!({})).evaluation.batches, Some(20));
    for (wrong, words) in [
        (json!("all"), "wrong form; got \"all\"; expected text that matches ^All$"),
        (json!(0), "out of range; got 0; expected an integer from 1 to 100000"),
        (json!(true), "wrong type; got boolean true; expected an integer or a string"),
    ] {
        let faults = api::validate::train_job(&document(batches(wrong))).unwrap_err();
        assert_eq!(faults[0].to_string(), format!("spec.engine.evaluation.batches: {words}"));
    }
}

/// A decimal between 0 and 1.
fn share() -> impl Strategy<Value = Value> {
    select(vec!["0.001", "0.25", "5e-1", "0.9", "1e-8"]).prop_map(Value::from)
}

/// A subset of these fields.
fn some(fields: Vec<(&'static str, BoxedStrategy<Value>)>) -> BoxedStrategy<Value> {
    let fields: Vec<_> = fields.into_iter().map(|(name, value)| (Just(name), prop::option::of(value))).collect();
    let object = |fields: Vec<(&str, Option<Value>)>| {
        Value::Object(fields.into_iter().filter_map(|(name, value)| Some((name.to_string(), value?))).collect())
    };
    fields.prop_map(object).boxed()
}

/// An object that always has the fields of `base`, plus `more`.
fn and(base: Value, more: BoxedStrategy<Value>) -> BoxedStrategy<Value> {
    more.prop_map(move |more| {
        let mut all = base.clone();
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        all
    })
    .boxed()
}

fn words(words: &'static [&'static str]) -> BoxedStrategy<Value> {
    select(words).prop_map(Value::from).boxed()
}

fn count(most: i64) -> BoxedStrategy<Value> {
    (1..=most).prop_map(Value::from).boxed()
}

/// A model with compatible data.
fn pair() -> impl Strategy<Value = (Value, Value)> {
    let shape = json!({"layers": 2, "hiddenSize": 12, "heads": 3, "contextLength": 16});
    let gpt = and(shape.clone(), some(vec![("head", words(&["Tied", "Untied"]))]))
        .prop_map(|block| json!({"type": "GPT", "gpt": block}));
    let switches: &'static [&'static str] = &["Enabled", "Disabled"];
    let bert = some(vec![("nextSentence", words(switches)), ("maskedFraction", words(&["0.15", "0.5"]))]);
    let bert = and(shape, bert).prop_map(|block| json!({"type": "BERT", "bert": block}));
    let text = some(vec![("include", Just(json!(["**/*.rs"])).boxed()), ("validationFraction", words(&["0", "0.5"]))]);
    let tokens = prop_oneof![
        and(json!({"path": "."}), text),
        and(json!({"format": "Tokens", "path": "t"}), some(vec![("tokenType", words(&["UInt16", "UInt32"]))])),
        and(json!({"format": "Synthetic"}), some(vec![("samples", count(1000))])),
    ];
    let resnet = some(vec![("stem", words(&["Small", "ImageNet"]))]);
    let resnet = (select(vec![18, 50]), resnet).prop_map(|(depth, more)| {
        let mut block = more;
        block["depth"] = depth.into();
        json!({"type": "ResNet", "resnet": block})
    });
    let mlp =
        prop::collection::vec(1..99, 1..4).prop_map(|sizes| json!({"type": "MLP", "mlp": {"hiddenSizes": sizes}}));
    let custom = Just(json!({"type": "Custom", "custom": {"name": "mine", "parameters": {"depth": "3"}}}));
    let augmentation = some(vec![("cropPadding", count(7)), ("flip", words(switches))]);
    let normalisation = Just(json!({"mean": ["0.5"], "deviation": ["0.25"]})).boxed();
    let size = (8..300).prop_map(Value::from).boxed();
    let of_images = some(vec![("augmentation", augmentation), ("normalisation", normalisation), ("imageSize", size)]);
    let image = json!({"height": 9, "width": 8, "channels": 3});
    let source = select(vec![
        json!({"format": "ImageFolder", "path": "i", "imageSize": 32}),
        json!({"format": "CIFAR10", "path": "c"}),
        json!({"format": "IDX", "path": "m"}),
        json!({"format": "SafeTensors", "path": "s"}),
        json!({"format": "CSV", "path": "v", "image": image.clone(), "largestValue": "16"}),
        json!({"format": "Synthetic", "image": image, "classes": 3}),
    ]);
    let images = (source, of_images).prop_map(|(mut data, more)| {
        data.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        data
    });
    prop_oneof![(prop_oneof![gpt, bert], tokens), (prop_oneof![resnet, mlp, custom], images),]
}

fn optimizer() -> impl Strategy<Value = Value> {
    fn with(names: &[&'static str]) -> BoxedStrategy<Value> {
        let names = ["weightDecay", "gradientClipNorm"].iter().chain(names);
        some(names.map(|name| (*name, share().boxed())).collect())
    }
    prop_oneof![
        select(vec!["Adam", "AdamW", "LAMB"]).prop_flat_map(|kind| {
            and(json!({"type": kind, "learningRate": "0.01"}), with(&["beta1", "beta2", "epsilon"]))
        }),
        select(vec!["SGD", "LARS"])
            .prop_flat_map(|kind| and(json!({"type": kind, "learningRate": "0.5"}), with(&["momentum"]))),
    ]
}

fn precision() -> impl Strategy<Value = Value> {
    let dynamic = some(vec![
        ("initialScale", share().boxed()),
        ("backoffFactor", share().boxed()),
        ("growthIntervalSteps", count(99)),
    ]);
    let scaling = prop_oneof![
        share().prop_map(|scale| json!({"type": "Static", "scale": scale})),
        and(json!({"type": "Dynamic"}), dynamic),
    ];
    let amp = some(vec![("computeType", words(&["BF16", "FP16"])), ("lossScaling", scaling.boxed())]);
    prop_oneof![Just(json!({})), and(json!({"mode": "AMP"}), amp)]
}

fn valid_job() -> impl Strategy<Value = Value> {
    let schedule = prop_oneof![
        Just(json!({"type": "Constant"})),
        share().prop_map(|factor| json!({"type": "Step", "everySteps": 7, "factor": factor})),
        Just(json!({"type": "Linear", "warmupSteps": 3, "finalLearningRate": "0.0001"})),
    ];
    let rest = some(vec![
        ("schedule", schedule.boxed()),
        ("device", words(&["Auto", "Cpu", "Cuda"])),
        ("executionMode", words(&["MultiProcess", "SingleProcess"])),
        ("labelSmoothing", share().boxed()),
        ("batchMerge", count(9)),
        ("profile", count(500).prop_map(|from| json!({"fromStep": from})).boxed()),
        ("memory", share().prop_map(|fraction| json!({"fraction": fraction})).boxed()),
        ("overlap", count(8).prop_map(|count| json!({"communicators": count, "wireType": "BF16"})).boxed()),
    ]);
    (pair(), optimizer(), precision(), rest).prop_map(|((model, data), optimizer, precision, rest)| {
        let mut blocks = json!({"model": model, "data": data, "optimizer": optimizer, "precision": precision});
        blocks.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
        document(blocks)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Rules and translation agree on validity, and the worker reads the same configuration that
    /// was written.
    #[test]
    fn every_valid_block_translates_and_survives_json(document in valid_job()) {
        let job = api::validate::train_job(&document).unwrap_or_else(|faults| panic!("{faults:?}: {document}"));
        let valid = validate(&job).unwrap_or_else(|faults| panic!("{faults:?}: {document}"));
        let config = valid.engine.unwrap();
        let text = serde_json::to_string(&config).unwrap();
        prop_assert_eq!(&serde_json::from_str::<EngineConfig>(&text).unwrap(), &config);
    }
}
