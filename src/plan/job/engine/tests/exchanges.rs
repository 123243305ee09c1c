//! What the ranks exchange.

use super::*;

#[test]
fn local_steps_have_the_defaults_of_their_paper_and_need_cpus() {
    let local = |outer: Value| json!({"type": "Local", "everySteps": 16, "outerOptimizer": outer});
    let of = |outer| config(json!({"sync": local(outer)})).sync;
    let expected = |outer_optimizer| SyncPolicy::Local(LocalSteps { every_steps: 16, outer_optimizer });
    let nesterov = |learning_rate, momentum| expected(OuterOptimizer::Nesterov(Nesterov { learning_rate, momentum }));
    assert_eq!(config(json!({})).sync, SyncPolicy::EveryStep);
    assert_eq!(of(json!({})), expected(OuterOptimizer::Average));
    assert_eq!(of(json!({"type": "Nesterov"})), nesterov(0.7, 0.9));
    assert_eq!(of(json!({"type": "Nesterov", "learningRate": "1", "momentum": "0.5"})), nesterov(1.0, 0.5));
    assert_eq!(
        on(json!({}), json!({"device": "Cuda", "sync": local(json!({}))})).unwrap_err(),
        "spec.engine.sync.type: got Local on GPUs; expected EveryStep: only ranks on CPUs take local steps yet"
    );
}

#[test]
fn an_algorithm_can_be_chosen_on_cpus_only() {
    let block = |algorithm: &str| json!({"communication": {"algorithm": algorithm}});
    assert_eq!(config(json!({})).algorithm, None);
    assert_eq!(config(block("Auto")).algorithm, None);
    assert_eq!(config(block("HalvingDoubling")).algorithm, Some(Algorithm::HalvingDoubling));
    let mut engine = block("Tree");
    engine["device"] = json!("Cuda");
    assert_eq!(
        on(json!({}), engine).unwrap_err(),
        "spec.engine.communication.algorithm: got Tree on GPUs; expected Auto: on GPUs, NCCL chooses"
    );
}

#[test]
fn sharding_needs_cpus() {
    assert_eq!(config(json!({})).sharding, Sharding::None);
    assert_eq!(config(json!({"sharding": "Optimizer"})).sharding, Sharding::Optimizer);
    assert_eq!(config(json!({"sharding": "Gradients"})).sharding, Sharding::Gradients);
    assert_eq!(
        on(json!({}), json!({"device": "Cuda", "sharding": "Optimizer"})).unwrap_err(),
        "spec.engine.sharding: got Optimizer on GPUs; expected None: only ranks on CPUs share the state yet"
    );
}

#[test]
fn recomputation_needs_cpus() {
    assert_eq!(config(json!({})).recomputation, Recomputation::None);
    let block = |device: &str| {
        let data = json!({"path": "text", "format": "Text"});
        let gpt = json!({"layers": 1, "hiddenSize": 8, "heads": 1, "contextLength": 8});
        json!({"device": device, "model": {"type": "GPT", "gpt": gpt}, "data": data, "recomputation": "Blocks"})
    };
    assert_eq!(config(block("Cpu")).recomputation, Recomputation::Blocks);
    assert_eq!(
        on(json!({}), block("Cuda")).unwrap_err(),
        "spec.engine.recomputation: got Blocks on GPUs; expected None: only ranks on CPUs recompute blocks yet"
    );
}

#[test]
fn parameter_servers_need_cpus() {
    let block = json!({"communication": {"mode": "ParameterServer", "parameterServer": {"servers": 2}}});
    assert_eq!(config(json!({})).parameter_server, None);
    let updates = |settings: Value| {
        let mut block = block.clone();
        for (name, value) in settings.as_object().unwrap() {
            block["communication"]["parameterServer"][name] = value.clone();
        }
        config(block).parameter_server
    };
    let expected = |updates| Some(ParameterServers { servers: 2, updates });
    assert_eq!(config(block.clone()).parameter_server, expected(Updates::Synchronous));
    assert_eq!(updates(json!({"updates": "Asynchronous"})), expected(Updates::Asynchronous { max_staleness: 4 }));
    assert_eq!(
        updates(json!({"updates": "Geo", "everySteps": 16, "maxStaleness": 1})),
        expected(Updates::Geo { every_steps: 16, max_staleness: 1 })
    );
    let mut engine = block;
    engine["device"] = json!("Cuda");
    assert_eq!(
        on(json!({}), engine).unwrap_err(),
        "spec.engine.communication.mode: got ParameterServer on GPUs; expected Collective: only ranks on CPUs send gradients to servers yet"
    );
}

#[test]
fn compression_has_a_ratio_and_needs_cpus() {
    let block = json!({"compression": {"type": "TopK", "ratio": "0.01"}});
    let found = config(json!({"communication": block})).compression;
    assert_eq!(found, Some(Compression::TopK(TopK { ratio: 0.01 })));
    assert_eq!(config(json!({"communication": {}})).compression, None);
    assert_eq!(
        on(json!({}), json!({"device": "Cuda", "communication": block})).unwrap_err(),
        "spec.engine.communication.compression.type: got TopK on GPUs; expected None: only ranks on CPUs select gradients yet"
    );
}

#[test]
fn pipelines_divide_the_ranks_and_need_cpus() {
    let stages = |stages: u32| json!({"parallelism": {"pipelineStages": stages}});
    assert_eq!(config(json!({})).pipeline, None);
    assert_eq!(config(stages(1)).pipeline, None);
    let mut on_gpus = stages(2);
    on_gpus["device"] = json!("Cuda");
    let error = with_trainer(json!({"numProcPerNode": 2}), on_gpus).unwrap_err();
    assert!(error.contains("spec.engine.parallelism.pipelineStages: got 2 on GPUs; expected 1"), "{error}");
    let error = with_trainer(json!({"numNodes": 3}), stages(2)).unwrap_err();
    assert!(error.starts_with("spec.engine.parallelism.pipelineStages: got 2 with 3 x 1 ranks; expected"), "{error}");
}

/// Many micro-batches of a small network stay within nodes; few of a large one leave them, so that
/// its gradients need not.
#[test]
fn ranks_are_ordered_so_that_nodes_send_the_least() {
    let order = |hidden: u32, merge: u32| {
        let gpt = json!({"layers": 4, "hiddenSize": hidden, "heads": 4, "contextLength": 64});
        let engine = json!({
            "model": {"type": "GPT", "gpt": gpt}, "data": {"path": "t"}, "batchMerge": merge,
            "parallelism": {"pipelineStages": 2},
        });
        with_trainer(json!({"numNodes": 2, "numProcPerNode": 2}), engine).unwrap().pipeline
    };
    assert_eq!(order(64, 64), Some(Pipeline { stages: 2, order: RankOrder::ByPipeline }));
    assert_eq!(order(1024, 2), Some(Pipeline { stages: 2, order: RankOrder::ByStage }));
}
