//! Lower bounds on step time, from the rates of a GPU.

use crate::network::{self, SAMPLES};
use crate::trial;
use crate::{TARGET, with_libraries};
use switchyard_worker::cpu::Format;
use switchyard_worker::lowering::{Computation, Target};
use switchyard_worker::nn::Graph;
use switchyard_worker_contract::config::{self, Activation, Precision, SampleType};
use switchyard_worker_contract::prediction::{Bound, Gpu, Operation, Part, Rates};

const SGD: config::Optimizer = config::Optimizer {
    rule: config::Rule::Sgd(config::Momentum { momentum: 0.9, nesterov: false }),
    learning_rate: 0.1,
    weight_decay: 0.0,
    gradient_clip_norm: None,
    decay_exclusions: config::DecayExclusions::Vectors,
};

/// A GPU with unit rates: one byte or FLOP per second.
fn gpu() -> Gpu {
    Gpu {
        name: "slow".into(),
        source: "made up".into(),
        multiprocessors: 1,
        shared_bytes_per_block: TARGET.shared_bytes,
        memory_bytes: 1 << 30,
        bytes_per_second: 1.0,
        products: Rates { f32: 1.0, bf16: 1.0, f16: 1.0, fp8: None },
        flops_per_second: 1.0,
        launch_seconds: None,
    }
}

fn computation(graph: Graph) -> Computation {
    computation_for(graph, TARGET)
}

fn computation_for(graph: Graph, target: Target) -> Computation {
    Computation::new(graph, &SGD, Precision::Fp32, SampleType::UInt8, target).unwrap()
}

fn mlp() -> Computation {
    computation(network::mlp(Activation::Relu))
}

fn find<'a>(operations: &'a [Operation], part: Part, name: &str) -> &'a Operation {
    let mut found = operations.iter().filter(|operation| operation.part == part && operation.name == name);
    found.next().unwrap_or_else(|| panic!("no {name}: {operations:#?}"))
}

#[test]
fn products_count_their_matrices_once() {
    // Widths 8, 20, 12, and 4 classes.
    let operations = mlp().predict(1, &gpu()).unwrap();
    let (rows, widths) = (SAMPLES as f64, [[8.0, 20.0], [20.0, 12.0], [12.0, 4.0]]);
    let forward = find(&operations, Part::Forward, "product");
    let flops = |layers: &[[f64; 2]]| layers.iter().map(|[from, to]| 2.0 * rows * from * to).sum::<f64>();
    let bytes: f64 = widths.iter().map(|[from, to]| 4.0 * (rows * from + from * to + rows * to)).sum();
    assert_eq!((forward.launches, forward.flops, forward.bytes), (3, flops(&widths), bytes));
    // Gradients of all weights, and of all inputs but the first.
    let backward = find(&operations, Part::Backward, "product");
    assert_eq!((backward.launches, backward.flops), (5, flops(&widths) + flops(&widths[1..])));
}

#[test]
fn every_launch_of_a_step_is_counted() {
    let bottlenecks = || network::bottlenecks(Format::F32);
    let target = with_libraries(&bottlenecks());
    let by_cudnn = Computation::new(bottlenecks(), &SGD, Precision::Fp32, SampleType::UInt8, target).unwrap();
    for computation in [mlp(), computation(bottlenecks()), by_cudnn] {
        let works = computation.works(|span| span).unwrap();
        for micro_batches in [1, 2, 5] {
            let operations = computation.predict(micro_batches, &gpu()).unwrap();
            let launches = |part: Part| {
                let of = operations.iter().filter(|operation| operation.part == part);
                of.map(|operation| operation.launches as usize).sum::<usize>()
            };
            let later = micro_batches as usize - 1;
            assert_eq!(launches(Part::Forward), works.first.forward.len() + later * works.later.forward.len());
            assert_eq!(launches(Part::Backward), works.first.backward.len() + later * works.later.backward.len());
            assert_eq!(launches(Part::Update), works.update.len());
        }
    }
}

#[test]
fn convolutions_count_each_pixel_of_each_window_once() {
    let whole = computation(network::bottlenecks(Format::F32)).predict(1, &gpu()).unwrap();
    // The stem, the shortcut, and a 3 x 3 window in each block: 20 x 20, 5 x 5 and 3 x 3 pixels,
    // with aligned rows.
    let forward = find(&whole, Part::Forward, "convolution");
    assert_eq!(forward.launches, 4);
    // The stem maps 6 images of 20 x 20 with 3 channels to 10 x 10 with 4, which pooling reduces to
    // 5 x 5.
    let stem = 2.0 * (6 * 10 * 10 * 4 * 7 * 7 * 3) as f64;
    let shortcut = 2.0 * (6 * 3 * 3 * 10 * 4) as f64;
    let middle = [3 * 3, 3 * 3].map(|pixels| 2.0 * (6 * pixels * 5 * 3 * 3 * 5) as f64);
    assert_eq!(forward.flops, stem + shortcut + middle.iter().sum::<f64>());
    assert_eq!(find(&whole, Part::Backward, "convolution_filters").launches, 4);
    assert_eq!(
        find(&whole, Part::Backward, "convolution_images").launches,
        3,
        "the gradient of the pixels is not needed"
    );
}

#[test]
fn the_slowest_of_memory_arithmetic_and_launch_determines_the_time() {
    let mlp = mlp();
    let slow = mlp.predict(1, &gpu()).unwrap();
    assert!(slow.is_sorted_by(|a, b| a.seconds >= b.seconds), "{slow:?}");
    let forward = find(&slow, Part::Forward, "product");
    assert!(forward.seconds >= forward.bytes.max(forward.flops) && forward.seconds < forward.bytes + forward.flops);
    let fast = mlp.predict(1, &Gpu { products: Rates { f32: 1e9, ..gpu().products }, ..gpu() }).unwrap();
    assert!(fast.iter().all(|operation| operation.bound == Bound::Memory && operation.seconds == operation.bytes));
    let wide = mlp.predict(1, &Gpu { bytes_per_second: 1e9, ..gpu() }).unwrap();
    let forward = find(&wide, Part::Forward, "product");
    assert_eq!((forward.bound, forward.seconds), (Bound::Arithmetic, forward.flops));
    let late = mlp.predict(1, &Gpu { launch_seconds: Some(1e9), ..gpu() }).unwrap();
    let launches = |operation: &Operation| operation.seconds == 1e9 * operation.launches as f64;
    assert!(late.iter().all(|operation| operation.bound == Bound::Launch && launches(operation)));
}

#[test]
fn causal_attention_counts_half_of_its_scores() {
    // Two layers, two sequences of 11 or 12 tokens, hidden size 24.
    for (model, context, part) in [(trial::gpt(true), 11.0, 0.5), (trial::bert(true), 12.0, 1.0)] {
        let operations = computation(network::language(model, Format::F32)).predict(1, &gpu()).unwrap();
        // The product of all scores in all layers.
        let product = 2.0 * 2.0 * part * 2.0 * context * context * 24.0;
        let flops = |part, name| find(&operations, part, name).flops;
        assert_eq!(flops(Part::Forward, "attention"), 2.0 * product);
        assert_eq!(flops(Part::Backward, "attention_queries"), 3.0 * product);
        assert_eq!(flops(Part::Backward, "attention_keys"), 4.0 * product);
    }
}

#[test]
fn cudnn_attention_uses_the_rate_of_matrix_products_and_our_kernels_that_of_f32() {
    // All rates differ, so that the time reveals which one was used.
    let rates = Rates { f32: 1e3, bf16: 1e2, f16: 10.0, fp8: None };
    let gpu = Gpu { bytes_per_second: 1e9, products: rates, ..gpu() };
    let graph = |format| network::language(trial::gpt(true), format);
    let check = |computation: Computation, rate: f64, names: &[(Part, &str)]| {
        let operations = computation.predict(1, &gpu).unwrap();
        for (part, name) in names {
            let found = find(&operations, *part, name);
            assert_eq!((found.bound, found.seconds), (Bound::Arithmetic, found.flops / rate), "{name}");
        }
    };
    let kernels =
        [(Part::Forward, "attention"), (Part::Backward, "attention_queries"), (Part::Backward, "attention_keys")];
    let fused = [(Part::Forward, "fused_attention"), (Part::Backward, "fused_attention_backward")];
    for (format, rate) in [(Format::Bf16, 1e2), (Format::F16, 10.0)] {
        check(computation(graph(format)), 1.0, &kernels);
        check(computation_for(graph(format), with_libraries(&graph(format))), rate, &fused);
    }
    check(computation(graph(Format::F32)), 1.0, &kernels);
}

#[test]
fn cudnn_attention_computes_scores_once_less_and_moves_no_more() {
    let half = || network::language(trial::gpt(true), Format::Bf16);
    let fused = computation_for(half(), with_libraries(&half()));
    let [fused, kernels] = [fused, computation(half())].map(|one| one.predict(1, &gpu()).unwrap());
    let forward = [find(&fused, Part::Forward, "fused_attention"), find(&kernels, Part::Forward, "attention")];
    assert_eq!(forward[0].flops, forward[1].flops);
    // The reference device's cuDNN uses a workspace.
    assert_eq!(forward[0].bytes - forward[1].bytes, 2.0 * 4096.0);
    let names = ["attention_queries", "attention_keys"];
    let ours: f64 = names.iter().map(|name| find(&kernels, Part::Backward, name).flops).sum();
    assert_eq!(find(&fused, Part::Backward, "fused_attention_backward").flops, ours * 5.0 / 7.0);
}

#[test]
fn fp8_products_use_their_own_rate_and_move_fewer_bytes() {
    let predicted = |target, fp8| {
        let rates = Rates { f32: 1e9, bf16: 1e2, f16: 1e9, fp8 };
        let gpu = Gpu { bytes_per_second: 1e9, products: rates, ..gpu() };
        let operations = computation_for(network::narrow(), target).predict(1, &gpu).unwrap();
        let product = find(&operations, Part::Forward, "product");
        (product.seconds, product.flops, product.bytes, operations.iter().any(|of| of.name == "quantize_transposed"))
    };
    let (half, flops, bytes, none) = predicted(TARGET, None);
    assert_eq!((half, none), (flops / 1e2, false));
    // All but the head.
    let head = 2.0 * 16.0 * 48.0 * 4.0;
    for (rate, of) in [(None, 2e2), (Some(1e3), 1e3)] {
        let (seconds, same, fewer, some) = predicted(network::in_fp8(), rate);
        assert!((seconds - (head / 1e2 + (flops - head) / of)).abs() < 1e-9 * seconds, "{seconds}");
        assert!(same == flops && fewer < bytes && some);
    }
}

#[test]
fn only_the_gathered_rows_of_a_table_are_counted() {
    let [small, large] = [5_000, 50_000].map(|vocabulary| {
        let operations = computation(network::tokens(vocabulary)).predict(1, &gpu()).unwrap();
        let bytes = |part, name| find(&operations, part, name).bytes;
        [bytes(Part::Forward, "embedding"), bytes(Part::Backward, "embedding_gradient")]
    });
    assert_eq!(small, large);
}
