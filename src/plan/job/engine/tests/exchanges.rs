//! What the ranks exchange.

use super::*;
use crate::job::Traffic;
use std::collections::BTreeSet;

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
    let placement = ServerPlacement::Ranks;
    let expected = |updates| Some(ParameterServers { servers: 2, placement, updates });
    let dedicated = updates(json!({"placement": "Dedicated"})).unwrap();
    assert_eq!((dedicated.placement, dedicated.dedicated()), (ServerPlacement::Dedicated, 2));
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

/// Whether nodes send less than `limit` bytes with any assignment of ranks to them. Ranks are
/// assigned stage by stage, and what is assigned never sends less later.
fn can_send_less(traffic: Traffic, (stages, replicas): (u32, u32), processes: u32, limit: u64) -> bool {
    fn search(
        placed: &mut Vec<u32>,
        used: &mut [u32],
        cells: usize,
        processes: u32,
        is_less: &dyn Fn(&[u32]) -> bool,
    ) -> bool {
        if !is_less(placed) {
            return false;
        }
        if placed.len() == cells {
            return true;
        }
        for node in 0..used.len() {
            if used[node] < processes {
                used[node] += 1;
                placed.push(node as u32);
                if search(placed, used, cells, processes, is_less) {
                    return true;
                }
                placed.pop();
                used[node] -= 1;
                // Nodes are alike: trying one empty node is enough.
                if used[node] == 0 {
                    break;
                }
            }
        }
        false
    }
    let is_less = |placed: &[u32]| {
        let by_stage: Vec<&[u32]> = placed.chunks(replicas as usize).collect();
        let crossing = |pair: &[&[u32]]| pair[0].iter().zip(pair[1]).filter(|(from, to)| from != to).count();
        let crossing: usize = by_stage.windows(2).map(crossing).sum();
        let others: usize = by_stage.iter().map(|nodes| nodes.iter().collect::<BTreeSet<_>>().len() - 1).sum();
        2 * (crossing as u64 * traffic.micro_batches * traffic.activations + others as u64 * traffic.gradients) < limit
    };
    let ranks = stages * replicas;
    search(&mut Vec::new(), &mut vec![0; (ranks / processes) as usize], ranks as usize, processes, &is_less)
}

proptest! {
    /// If whole stages, whole pipelines or blocks of both fit the nodes.
    #[test]
    fn no_other_assignment_of_ranks_sends_less(
        shape in prop::sample::select(vec![
            (2, 2, 2), (4, 2, 2), (2, 4, 2), (4, 2, 4), (2, 4, 4), (2, 2, 1), (4, 2, 1), (8, 1, 2), (8, 1, 4), (2, 4, 8), (3, 2, 6), (3, 1, 1),
        ]),
        activations in 1_u64..20,
        micro_batches in 1_u64..4,
        gradients in 1_u64..60,
    ) {
        let (stages, replicas, processes) = shape;
        let traffic = Traffic { activations, micro_batches, gradients };
        let nodes = (stages * replicas / processes, processes);
        let order = traffic.best_order(stages, nodes);
        let sent = traffic.between_nodes(Pipeline { stages, order }, nodes);
        prop_assert!(!can_send_less(traffic, (stages, replicas), processes, sent), "{sent} {order:?}");
        let pairs: u64 = traffic.of_pairs(Pipeline { stages, order }, nodes).values().sum();
        // Bytes of a ring are divided over its links.
        prop_assert!(pairs <= sent && sent < pairs + u64::from(stages * replicas), "{pairs} {sent}");
    }
}

#[test]
fn a_node_has_a_block_if_activations_and_gradients_are_alike() {
    let order = |activations, gradients| Traffic { activations, micro_batches: 1, gradients }.best_order(4, (4, 4));
    assert_eq!(order(1, 1), RankOrder::Blocks { stages: 2, pipelines: 2 });
    assert_eq!(order(20, 1), RankOrder::ByPipeline);
    assert_eq!(order(1, 20), RankOrder::ByStage);
}

#[test]
fn traffic_has_the_widths_of_what_is_sent() {
    let traffic = |extra: serde_json::Value| {
        let gpt = json!({"layers": 4, "hiddenSize": 64, "heads": 4, "contextLength": 32, "vocabulary": "Bytes", "head": "Untied"});
        let mut engine = json!({
            "model": {"type": "GPT", "gpt": gpt}, "data": {"path": "t"}, "batchSizePerProcess": 2, "batchMerge": 8,
            "parallelism": {"pipelineStages": 2},
        });
        engine.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        Traffic::of(&with_trainer(json!({"numProcPerNode": 2}), engine).unwrap())
    };
    let weights = 12 * 4 * 64 * 64 + (2 * 256 + 32) * 64;
    let full = Traffic { activations: 4 * 2 * 32 * 64, micro_batches: 8, gradients: 4 * weights / 2 };
    assert_eq!(traffic(json!({})), Some(full));
    let half = Traffic { activations: full.activations / 2, ..full };
    assert_eq!(traffic(json!({"precision": {"mode": "AMP"}})), Some(half));
    let half = Traffic { gradients: full.gradients / 2, ..full };
    assert_eq!(traffic(json!({"overlap": {"wireType": "BF16"}})), Some(half));
    assert_eq!(traffic(json!({"parallelism": {"pipelineStages": 1}})), None);
}
