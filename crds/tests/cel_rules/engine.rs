//! Cases of the block `engine`, mostly as a single change to a small engine.

use super::{Case, base, with};
use serde_json::{Value, json};

/// The base manifest with these engine blocks replaced.
fn engine(blocks: Value) -> Value {
    let mut job = base();
    for (name, block) in blocks.as_object().unwrap() {
        job["spec"]["engine"][name] = block.clone();
    }
    job
}

fn mlp() -> Value {
    json!({"type": "MLP", "mlp": {"hiddenSizes": [8]}})
}

fn resnet() -> Value {
    json!({"type": "ResNet", "resnet": {"depth": 18}})
}

/// An MLP with this data.
fn data(data: Value) -> Value {
    engine(json!({"model": mlp(), "data": data}))
}

/// This model with this data.
fn pair(model: Value, data: Value) -> Value {
    engine(json!({"model": model, "data": data}))
}

fn optimizer(block: Value) -> Value {
    engine(json!({"optimizer": block}))
}

fn resnet_with(optimizer: Value) -> Value {
    engine(json!({"model": resnet(), "data": {"format": "CIFAR10", "path": "c"}, "optimizer": optimizer}))
}

fn schedule(block: Value) -> Value {
    engine(json!({"schedule": block}))
}

fn scaling(block: Value) -> Value {
    engine(json!({"precision": {"mode": "AMP", "lossScaling": block}}))
}

fn gpt(key: &str, value: Value) -> Value {
    with(&[(&format!("/spec/engine/model/gpt/{key}"), value)])
}

fn bert(more: Value) -> Value {
    let mut block = json!({"layers": 1, "hiddenSize": 8, "heads": 2, "contextLength": 8});
    block.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    json!({"type": "BERT", "bert": block})
}

pub(crate) fn cases() -> Vec<Case> {
    [run(), exchanges(), models(), sources(), optimizers(), precision()].concat()
}

fn run() -> Vec<Case> {
    vec![
        (
            "set exactly one of steps and epochs",
            with(&[("/spec/engine/steps", Value::Null), ("/spec/engine/epochs", json!(1))]),
            engine(json!({"epochs": 1})),
        ),
        ("schedule.warmupSteps must not", schedule(json!({"warmupSteps": 10})), schedule(json!({"warmupSteps": 11}))),
        (
            "the profiled steps must lie within steps",
            engine(json!({"profile": {"fromStep": 6, "steps": 5}})),
            engine(json!({"profile": {"fromStep": 7, "steps": 5}})),
        ),
        (
            "labelSmoothing must be less than 1",
            engine(json!({"labelSmoothing": "0.1"})),
            engine(json!({"labelSmoothing": "1"})),
        ),
        (
            "fraction must be greater than 0",
            engine(json!({"memory": {"fraction": "1"}})),
            engine(json!({"memory": {"fraction": "1.01"}})),
        ),
    ]
}

fn sync(block: Value) -> Value {
    engine(json!({"sync": block}))
}

fn compression(block: Value) -> Value {
    engine(json!({"communication": {"compression": block}}))
}

fn exchanges() -> Vec<Case> {
    let local = || json!({"type": "Local", "everySteps": 4});
    let outer = |block: Value| sync(json!({"type": "Local", "everySteps": 4, "outerOptimizer": block}));
    let nesterov = |field: &str, value: &str| outer(json!({"type": "Nesterov", (field): value}));
    let top_k = || json!({"type": "TopK", "ratio": "0.01"});
    let servers = || json!({"mode": "ParameterServer", "parameterServer": {"servers": 2}});
    let updates = |settings: Value| {
        let mut block = servers();
        for (name, value) in settings.as_object().unwrap() {
            block["parameterServer"][name] = value.clone();
        }
        engine(json!({"communication": block}))
    };
    let precise = |kind: &str, compute: &str| {
        let mut job = updates(json!({"updates": kind}));
        job["spec"]["engine"]["precision"] = json!({"mode": "AMP", "computeType": compute});
        job
    };
    let stages = |stages: u32| json!({"pipelineStages": stages});
    let servers_with = |field: &str, value: Value| {
        let mut block = servers();
        block[field] = value;
        block
    };
    let wired = |blocks: Value, wire: &str| {
        let mut job = engine(blocks);
        job["spec"]["engine"]["overlap"] = json!({"wireType": wire});
        job
    };
    vec![
        ("everySteps must be set with type Local", sync(local()), sync(json!({"type": "Local"}))),
        (
            "outerOptimizer is for type Local",
            outer(json!({"type": "Average"})),
            sync(json!({"type": "EveryStep", "outerOptimizer": {"type": "Average"}})),
        ),
        (
            "learningRate and momentum are for type Nesterov",
            outer(json!({"type": "Nesterov", "learningRate": "0.7", "momentum": "0"})),
            outer(json!({"type": "Average", "momentum": "0.9"})),
        ),
        ("learningRate must be greater than 0", nesterov("learningRate", "1.5"), nesterov("learningRate", "0")),
        ("momentum must be less than 1", nesterov("momentum", "0.99"), nesterov("momentum", "1")),
        (
            "with sync.type Local, overlap.wireType must be FP32 or BF16",
            wired(json!({"sync": local()}), "BF16"),
            wired(json!({"sync": local()}), "FP16"),
        ),
        ("ratio must be set with type TopK", compression(top_k()), compression(json!({"type": "TopK"}))),
        (
            "ratio must be greater than 0 and at most 1",
            compression(json!({"type": "TopK", "ratio": "1"})),
            compression(json!({"type": "TopK", "ratio": "0"})),
        ),
        (
            "communication.compression needs sync.type EveryStep",
            engine(json!({"communication": {"compression": top_k()}, "sync": {"type": "EveryStep"}})),
            engine(json!({"communication": {"compression": top_k()}, "sync": local()})),
        ),
        (
            "with communication.compression, overlap.wireType must be FP32",
            wired(json!({"communication": {"compression": {"type": "None"}}}), "BF16"),
            wired(json!({"communication": {"compression": top_k()}}), "BF16"),
        ),
        (
            "sharding needs sync.type EveryStep",
            engine(json!({"sharding": "Optimizer", "sync": {"type": "EveryStep"}})),
            engine(json!({"sharding": "Optimizer", "sync": local()})),
        ),
        (
            "sharding Gradients needs batchMerge 1",
            engine(json!({"sharding": "Gradients"})),
            engine(json!({"sharding": "Gradients", "batchMerge": 2})),
        ),
        (
            "sharding Gradients needs overlap.mode Enabled",
            engine(json!({"sharding": "Gradients", "overlap": {"syncAllReduce": "Enabled"}})),
            engine(json!({"sharding": "Gradients", "overlap": {"mode": "Disabled"}})),
        ),
        (
            "recomputation needs a model with blocks",
            engine(json!({"recomputation": "Blocks"})),
            engine(json!({"recomputation": "Blocks", "model": mlp(), "data": {"format": "CIFAR10", "path": "c"}})),
        ),
        (
            "sharding needs communication.compression.type None",
            engine(json!({"sharding": "Optimizer", "communication": {"algorithm": "Ring"}})),
            engine(json!({"sharding": "Optimizer", "communication": {"compression": top_k()}})),
        ),
        (
            "parameterServer must be set with mode ParameterServer",
            engine(json!({"communication": servers()})),
            engine(json!({"communication": {"mode": "ParameterServer"}})),
        ),
        (
            "algorithm is for mode Collective",
            engine(json!({"communication": {"mode": "Collective", "algorithm": "Ring"}})),
            engine(json!({"communication": servers_with("algorithm", json!("Ring"))})),
        ),
        (
            "compression is for mode Collective",
            engine(json!({"communication": servers_with("compression", json!({"type": "None"}))})),
            engine(json!({"communication": servers_with("compression", top_k())})),
        ),
        (
            "maxStaleness is for updates Asynchronous and Geo",
            updates(json!({"updates": "Asynchronous", "maxStaleness": 0})),
            updates(json!({"maxStaleness": 2})),
        ),
        (
            "everySteps must be set with updates Geo",
            updates(json!({"updates": "Geo", "everySteps": 16, "maxStaleness": 1})),
            updates(json!({"updates": "Geo"})),
        ),
        (
            "asynchronous parameter servers need precision FP32, or BF16 without lossScaling",
            precise("Asynchronous", "BF16"),
            precise("Asynchronous", "FP16"),
        ),
        (
            "parallelism.pipelineStages needs sharding None",
            engine(json!({"parallelism": stages(2), "sharding": "None"})),
            engine(json!({"parallelism": stages(2), "sharding": "Optimizer"})),
        ),
        (
            "parallelism.pipelineStages needs sync.type EveryStep",
            engine(json!({"parallelism": stages(1), "sync": local()})),
            engine(json!({"parallelism": stages(2), "sync": local()})),
        ),
        (
            "parallelism.pipelineStages needs communication.mode Collective",
            engine(json!({"parallelism": stages(2), "communication": {"algorithm": "Ring"}})),
            engine(json!({"parallelism": stages(2), "communication": servers()})),
        ),
        (
            "sharding needs communication.mode Collective",
            engine(json!({"communication": servers(), "sharding": "None"})),
            engine(json!({"communication": servers(), "sharding": "Optimizer"})),
        ),
        (
            "sync.type Local needs communication.mode Collective",
            engine(json!({"communication": {"mode": "Collective"}, "sync": local()})),
            engine(json!({"communication": servers(), "sync": local()})),
        ),
        (
            "with communication.mode ParameterServer, overlap.wireType must be FP32",
            wired(json!({"communication": servers()}), "FP32"),
            wired(json!({"communication": servers()}), "BF16"),
        ),
        (
            "with communication.algorithm RecursiveDoubling, overlap.wireType must be FP32",
            wired(json!({"communication": {"algorithm": "HalvingDoubling"}}), "BF16"),
            wired(json!({"communication": {"algorithm": "RecursiveDoubling"}}), "BF16"),
        ),
    ]
}

fn models() -> Vec<Case> {
    let synthetic = || json!({"format": "Synthetic"});
    let image = json!({"height": 8, "width": 8, "channels": 1});
    let both = || json!({"type": "MLP", "mlp": {"hiddenSizes": [8]}, "resnet": {"depth": 18}});
    vec![
        ("the block named by type must be set", data(synthetic()), pair(both(), synthetic())),
        ("heads must divide hiddenSize", gpt("heads", json!(4)), gpt("heads", json!(3))),
        (
            "heads of a BERT must divide",
            engine(json!({"model": bert(json!({"heads": 4}))})),
            engine(json!({"model": bert(json!({"heads": 3}))})),
        ),
        (
            "maskedFraction must be",
            engine(json!({"model": bert(json!({"maskedFraction": "0.5", "nextSentence": "Enabled"}))})),
            engine(json!({"model": bert(json!({"maskedFraction": "0"}))})),
        ),
        (
            "depth must be 18 or 50",
            pair(json!({"type": "ResNet", "resnet": {"depth": 50}}), json!({"format": "CIFAR10", "path": "c"})),
            pair(json!({"type": "ResNet", "resnet": {"depth": 34}}), json!({"format": "CIFAR10", "path": "c"})),
        ),
        (
            "GPT and BERT take tokens",
            pair(bert(json!({})), json!({"format": "Synthetic", "samples": 10})),
            pair(bert(json!({})), json!({"format": "Synthetic", "classes": 10})),
        ),
        (
            "ResNet takes images",
            pair(resnet(), json!({"format": "CSV", "path": "c", "image": image})),
            pair(resnet(), json!({"format": "CSV", "path": "c"})),
        ),
        (
            "MLP takes images or features",
            pair(mlp(), json!({"format": "CSV", "path": "c"})),
            pair(mlp(), json!({"format": "Tokens", "path": "c"})),
        ),
        (
            "vocabulary GPT2 needs",
            with(&[
                ("/spec/engine/model/gpt/vocabulary", json!("GPT2")),
                ("/spec/engine/data/format", json!("Tokens")),
            ]),
            gpt("vocabulary", json!("GPT2")),
        ),
    ]
}

fn sources() -> Vec<Case> {
    let image = || json!({"height": 8, "width": 8, "channels": 1});
    let normalised = |mean: Value, deviation: Value| {
        data(json!({"format": "IDX", "path": "m", "normalisation": {"mean": mean, "deviation": deviation}}))
    };
    let grey =
        |channels: i32| data(json!({"format": "Synthetic", "image": {"height": 8, "width": 8, "channels": channels}}));
    let fraction = |value: &str| engine(json!({"data": {"path": ".", "validationFraction": value}}));
    vec![
        ("path must be set", data(json!({"format": "Synthetic"})), data(json!({"format": "Synthetic", "path": "."}))),
        (
            "include and exclude are for",
            data(json!({"format": "ImageFolder", "path": "i", "imageSize": 32, "include": ["*/a*"]})),
            data(json!({"format": "IDX", "path": "i", "exclude": ["*/a*"]})),
        ),
        (
            "tokenType is for",
            engine(json!({"data": {"format": "Tokens", "path": "t", "tokenType": "UInt32"}})),
            engine(json!({"data": {"path": "t", "tokenType": "UInt32"}})),
        ),
        (
            "imageSize must be set",
            data(json!({"format": "ImageFolder", "path": "i", "imageSize": 32})),
            data(json!({"format": "ImageFolder", "path": "i"})),
        ),
        (
            "image is for the formats",
            data(json!({"format": "Synthetic", "image": image()})),
            data(json!({"format": "CIFAR10", "path": "c", "image": image()})),
        ),
        (
            "imageSize and augmentation are",
            data(json!({"format": "CSV", "path": "c", "image": image(), "augmentation": {"flip": "Enabled"}})),
            data(json!({"format": "CSV", "path": "c", "augmentation": {"flip": "Enabled"}})),
        ),
        (
            "classes and samples are for",
            data(json!({"format": "Synthetic", "classes": 5, "samples": 100})),
            data(json!({"format": "IDX", "path": "i", "samples": 100})),
        ),
        (
            "largestValue must be",
            data(json!({"format": "CSV", "path": "c", "image": image(), "largestValue": "16"})),
            data(json!({"format": "CSV", "path": "c", "largestValue": "16"})),
        ),
        ("validationFraction must be", fraction("0.5"), fraction("0.51")),
        ("channels must be 1", grey(3), grey(2)),
        (
            "either source must be set",
            normalised(json!(["-0.1"]), json!(["0.3"])),
            normalised(json!(["0"]), json!(["1", "1", "1"])),
        ),
        (
            "for images, normalisation must have",
            data(json!({"format": "CSV", "path": "c", "normalisation": {"mean": ["0", "1"], "deviation": ["1", "2"]}})),
            normalised(json!(["0", "1"]), json!(["1", "2"])),
        ),
        (
            "normalisation is for images, and",
            data(json!({"format": "SafeTensors", "path": "c", "normalisation": {"source": "TrainingSplit"}})),
            data(json!({"format": "Synthetic", "normalisation": {"mean": ["0"], "deviation": ["1"]}})),
        ),
        (
            "normalisation.source is for features",
            data(json!({"format": "CSV", "path": "c", "normalisation": {"source": "TrainingSplit"}})),
            data(json!({"format": "IDX", "path": "m", "normalisation": {"source": "TrainingSplit"}})),
        ),
        (
            "labelColumn and header are for format CSV",
            data(json!({"format": "CSV", "path": "c", "labelColumn": "kind", "header": "Present"})),
            data(json!({"format": "IDX", "path": "m", "labelColumn": 1})),
        ),
        ("every deviation must be", normalised(json!(["0"]), json!(["0.5"])), normalised(json!(["0"]), json!(["0.0"]))),
    ]
}

fn optimizers() -> Vec<Case> {
    vec![
        (
            "learningRate must be greater",
            optimizer(json!({"learningRate": "1e-4"})),
            optimizer(json!({"learningRate": "0.0"})),
        ),
        (
            "learningRate must be set with",
            optimizer(json!({"type": "LARS", "learningRate": "2"})),
            optimizer(json!({"type": "LAMB"})),
        ),
        (
            "momentum is for type SGD",
            optimizer(json!({"type": "SGD", "momentum": "0"})),
            optimizer(json!({"type": "Adam", "momentum": "0.9"})),
        ),
        (
            "momentum must be less than 1",
            optimizer(json!({"type": "SGD", "momentum": "0.99"})),
            optimizer(json!({"type": "SGD", "momentum": "1"})),
        ),
        (
            "nesterov is for type SGD",
            optimizer(json!({"type": "SGD", "nesterov": "Enabled"})),
            optimizer(json!({"type": "LARS", "learningRate": "1", "nesterov": "Enabled"})),
        ),
        (
            "nesterov needs a momentum",
            optimizer(json!({"type": "SGD", "nesterov": "Disabled", "momentum": "0"})),
            optimizer(json!({"type": "SGD", "nesterov": "Enabled", "momentum": "0"})),
        ),
        (
            "beta1, beta2 and epsilon are for",
            optimizer(json!({"type": "LAMB", "learningRate": "1", "beta1": "0.8"})),
            optimizer(json!({"type": "SGD", "beta1": "0.8"})),
        ),
        (
            "beta1, beta2 and epsilon need optimizer.type",
            resnet_with(json!({"type": "AdamW", "beta1": "0.8"})),
            resnet_with(json!({"beta1": "0.8"})),
        ),
        ("beta1 must be less than 1", optimizer(json!({"beta1": "0.99"})), optimizer(json!({"beta1": "1"}))),
        ("beta2 must be less than 1", optimizer(json!({"beta2": "0.999"})), optimizer(json!({"beta2": "1.5"}))),
        ("epsilon must be greater than 0", optimizer(json!({"epsilon": "1e-10"})), optimizer(json!({"epsilon": "0"}))),
        (
            "trustCoefficient must be",
            optimizer(json!({"type": "LARS", "learningRate": "1", "trustCoefficient": "0.01"})),
            optimizer(json!({"type": "LAMB", "learningRate": "1", "trustCoefficient": "0.01"})),
        ),
        (
            "everySteps must be set",
            schedule(json!({"type": "Step", "everySteps": 3})),
            schedule(json!({"type": "Cosine", "everySteps": 3})),
        ),
        (
            "factor must be",
            schedule(json!({"type": "Step", "everySteps": 3, "factor": "0.5"})),
            schedule(json!({"type": "Step", "everySteps": 3, "factor": "1"})),
        ),
        (
            "finalLearningRate is for",
            schedule(json!({"type": "Linear", "finalLearningRate": "0.0001"})),
            schedule(json!({"type": "Constant", "finalLearningRate": "0.0001"})),
        ),
    ]
}

fn precision() -> Vec<Case> {
    let dynamic = |key: &str, value: &str| scaling(json!({"type": "Dynamic", key: value}));
    let of = |scale: &str| scaling(json!({"type": "Static", "scale": scale}));
    vec![
        (
            "computeType and lossScaling are for",
            engine(json!({"precision": {"mode": "AMP", "computeType": "FP16"}})),
            engine(json!({"precision": {"computeType": "FP16"}})),
        ),
        ("scale must be set with", of("1024"), scaling(json!({"type": "Static"}))),
        (
            "initialScale, growthFactor",
            scaling(json!({"type": "Dynamic", "growthIntervalSteps": 100})),
            scaling(json!({"type": "Static", "scale": "8", "growthIntervalSteps": 100})),
        ),
        ("scale must be greater than 0", of("0.5"), of("0")),
        ("initialScale must be greater", dynamic("initialScale", "1e4"), dynamic("initialScale", "0")),
        ("growthFactor must be greater", dynamic("growthFactor", "1.5"), dynamic("growthFactor", "1")),
        ("backoffFactor must be", dynamic("backoffFactor", "0.25"), dynamic("backoffFactor", "1")),
    ]
}
