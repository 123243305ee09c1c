//! Small networks of layers that have GPU kernels, and their launches compared with their programs.

use crate::trial::{self, kind_of};
use crate::{TARGET, with_libraries};
use switchyard_worker::cpu::Format;
use switchyard_worker::data::Kind;
use switchyard_worker::lowering::{self, Launch, Memory, Plan, Span};
use switchyard_worker::model::Registry;
use switchyard_worker::nn::layers::{
    Activation, BatchNorm, Convolution, CrossEntropy, Embedding, LayerNorm, Linear, Target, average_pool, features,
    max_pool, pixels,
};
use switchyard_worker::nn::program::{self, Access, Program, Reductions, Step};
use switchyard_worker::nn::{Graph, Initial, Tensor, fuse};
use switchyard_worker_contract::config::{self, ResNetDepth, Stem};

pub const SAMPLES: usize = 6;
pub const KIND: Kind = Kind::Features { width: 8, classes: 4 };

/// ```text
/// x = first(features)     y = x + second(norm(x))     logits = head(norm(y))
/// ```
pub fn graph(classes: usize) -> Graph {
    let mut graph = Graph::new(SAMPLES, KIND, Format::F32).with_label_smoothing(0.1);
    let linear = |outputs: usize| Linear::new(outputs).without_bias().initial(Initial::Uniform(0.4));
    let input = features(&mut graph, "input").unwrap();
    let x = linear(20).add(&mut graph, "first", input).unwrap();
    let norm = LayerNorm.add(&mut graph, "norm", x).unwrap();
    let y = linear(20).residual(x).add(&mut graph, "second", norm).unwrap();
    let norm = LayerNorm.add(&mut graph, "last norm", y).unwrap();
    let logits = linear(classes).add(&mut graph, "head", norm).unwrap();
    CrossEntropy { target: Target::Classes, count: true }.add(&mut graph, "loss", logits).unwrap();
    graph
}

/// A norm of the input, and a tensor whose gradient sums contributions of two residuals and a norm:
///
/// ```text
/// x = first(norm(features))     y = x + second(norm(x))     logits = head(x + third(y))
/// ```
pub fn twice(width: usize) -> Graph {
    let mut graph = Graph::new(SAMPLES, KIND, Format::F32);
    let linear = |outputs: usize| Linear::new(outputs).initial(Initial::Uniform(0.4));
    let input = features(&mut graph, "input").unwrap();
    let norm = LayerNorm.add(&mut graph, "input norm", input).unwrap();
    let x = linear(width).add(&mut graph, "first", norm).unwrap();
    let norm = LayerNorm.add(&mut graph, "norm", x).unwrap();
    let y = linear(width).residual(x).add(&mut graph, "second", norm).unwrap();
    let z = linear(width).residual(x).add(&mut graph, "third", y).unwrap();
    let logits = linear(4).add(&mut graph, "head", z).unwrap();
    CrossEntropy { target: Target::Classes, count: true }.add(&mut graph, "loss", logits).unwrap();
    graph
}

fn model(model: config::Model, kind: Kind, samples: usize, format: Format) -> Graph {
    let mut graph = Graph::new(samples, kind, format);
    Registry::new().model(&model).unwrap().build(&mut graph).unwrap();
    graph
}

/// An MLP with biases and this activation.
pub fn mlp(activation: config::Activation) -> Graph {
    model(config::Model::Mlp(config::Mlp { hidden_sizes: vec![20, 12], activation }), KIND, SAMPLES, Format::F32)
}

/// The same with row sizes that are not multiples of 16 bytes.
fn odd_mlp() -> Graph {
    let mlp = config::Mlp { hidden_sizes: vec![13, 9], activation: config::Activation::Gelu };
    model(config::Model::Mlp(mlp), Kind::Features { width: 7, classes: 5 }, SAMPLES, Format::F32)
}

/// Byte images as rows, with a width that is not a multiple of 16 bytes.
fn flat() -> Graph {
    let mlp = config::Mlp { hidden_sizes: vec![20, 13], activation: config::Activation::Relu };
    model(config::Model::Mlp(mlp), trial::images(5, 3), SAMPLES, Format::F32)
}

/// ResNets with odd channel counts.
fn resnet(depth: ResNetDepth, stem: Stem, kind: Kind, format: Format) -> Graph {
    model(trial::resnet(depth, stem, 3), kind, SAMPLES, format)
}

/// A large stem and two bottlenecks, of which the first halves the image:
///
/// ```text
/// x = max pool(ReLU(norm(7x7(pixels))))
/// x = ReLU(norm(1x1(ReLU(norm(3x3(ReLU(norm(1x1(x)))))))) + norm(1x1(x)))
/// x = ReLU(norm(1x1(ReLU(norm(3x3(ReLU(norm(1x1(x)))))))) + x)     logits = head(average pool(x))
/// ```
pub fn bottlenecks(format: Format) -> Graph {
    let mut graph = Graph::new(SAMPLES, trial::images(20, 3), format);
    let part = |graph: &mut Graph, name: &str, x: Tensor, [outputs, kernel, stride]: [usize; 3], norm: BatchNorm| {
        let convolution = Convolution { outputs, kernel, stride, padding: kernel / 2 };
        let x = convolution.add(graph, name, x).unwrap();
        norm.add(graph, &format!("{name} norm"), x).unwrap()
    };
    let (plain, relu) = (BatchNorm::default(), BatchNorm::default().relu());
    let input = pixels(&mut graph, "input", false).unwrap();
    let x = part(&mut graph, "stem", input, [4, 7, 2], relu);
    let mut x = max_pool(&mut graph, "max pool", x, 3, 2, 1).unwrap();
    for (block, stride) in [("first", 2), ("second", 1)] {
        let name = |part: &str| format!("{block} {part}");
        let shortcut = if stride == 1 { x } else { part(&mut graph, &name("shortcut"), x, [10, 1, stride], plain) };
        let y = part(&mut graph, &name("reduce"), x, [5, 1, 1], relu);
        let y = part(&mut graph, &name("middle"), y, [5, 3, stride], relu);
        x = part(&mut graph, &name("expand"), y, [10, 1, 1], relu.residual(shortcut));
    }
    let x = average_pool(&mut graph, "average", x).unwrap();
    let logits = Linear::new(5).initial(Initial::Uniform(0.3)).add(&mut graph, "head", x).unwrap();
    CrossEntropy { target: Target::Classes, count: true }.add(&mut graph, "loss", logits).unwrap();
    graph
}

/// Pools over images with few channels, whose pixels have gaps between them:
///
/// ```text
/// x = ReLU(first(pixels))     y = second(max pool(x))     logits = head(average pool(y) + average pool(x))
/// ```
fn pools() -> Graph {
    let mut graph = Graph::new(SAMPLES, trial::images(5, 3), Format::F32).with_normalisation(&[0.45], &[0.1]);
    let linear = |outputs: usize| Linear::new(outputs).initial(Initial::Uniform(0.4));
    let input = pixels(&mut graph, "input", false).unwrap();
    let x = linear(5).activation(Activation::Relu).add(&mut graph, "first", input).unwrap();
    let pooled = max_pool(&mut graph, "max pool", x, 3, 2, 1).unwrap();
    let y = linear(6).add(&mut graph, "second", pooled).unwrap();
    let y = average_pool(&mut graph, "average of y", y).unwrap();
    let x = average_pool(&mut graph, "average of x", x).unwrap();
    let x = linear(6).residual(y).add(&mut graph, "third", x).unwrap();
    let logits = linear(5).add(&mut graph, "head", x).unwrap();
    CrossEntropy { target: Target::Classes, count: true }.add(&mut graph, "loss", logits).unwrap();
    graph
}

/// Sums of embedding rows, and a head that shares the token table:
///
/// ```text
/// x = embedding(tokens)     logits = head(norm(x))
/// ```
pub fn tokens(vocabulary: u32) -> Graph {
    let context = 11;
    let mut graph = Graph::new(SAMPLES, Kind::Tokens { context, vocabulary }, Format::F32);
    let (context, vocabulary) = (context as usize, vocabulary as usize);
    let (tokens, positions) = (("tokens", vocabulary), "positions");
    let embedding = Embedding { context, width: 24, tokens, positions, segments: None, deviation: 0.1 };
    let (x, tokens) = embedding.add(&mut graph, "embedding").unwrap();
    let norm = LayerNorm.add(&mut graph, "norm", x).unwrap();
    let logits = Linear::new(vocabulary).without_bias().shared(tokens).add(&mut graph, "head", norm).unwrap();
    CrossEntropy { target: Target::Classes, count: true }.add(&mut graph, "loss", logits).unwrap();
    graph
}

/// The language models of the engine's tests: three heads, odd sequence lengths and vocabularies,
/// two BERT losses.
pub fn language(config: config::Model, format: Format) -> Graph {
    let kind = kind_of(&config);
    model(config, kind, 2, format)
}

pub type Build = fn() -> Graph;

/// Small networks on features, by name.
pub const NETWORKS: [(&str, Build); 6] = [
    ("residual", || graph(4)),
    ("two residuals", || twice(20)),
    ("two residuals with gaps", || twice(21)),
    ("mlp with ReLU", || mlp(config::Activation::Relu)),
    ("mlp with GELU", || mlp(config::Activation::Gelu)),
    ("mlp of odd widths", odd_mlp),
];

/// On images.
pub const IMAGES: [(&str, Build); 2] = [("mlp on images", flat), ("pools", pools)];

/// With convolutions and batch norms.
pub const RESIDUAL: [(&str, Build); 2] = [
    ("resnet-18", || resnet(ResNetDepth::D18, Stem::Small, trial::images(9, 3), Format::F32)),
    ("bottlenecks", || bottlenecks(Format::F32)),
];

/// So deep or large that a different summation order eventually flips a ReLU, so that training
/// diverges from the CPU's.
pub const DEEP: [(&str, Build); 2] = [
    ("deep resnet-18", || resnet(ResNetDepth::D18, Stem::ImageNet, trial::images(40, 1), Format::F32)),
    ("deep resnet-50", || resnet(ResNetDepth::D50, Stem::ImageNet, trial::images(40, 1), Format::F32)),
];

/// On tokens.
pub const LANGUAGE: [(&str, Build); 4] = [
    ("embedding", || tokens(40)),
    ("gpt", || language(trial::gpt(true), Format::F32)),
    ("gpt untied", || language(trial::gpt(false), Format::F32)),
    ("bert", || language(trial::bert(true), Format::F32)),
];

/// FP8 products, and one whose outputs are not a multiple of 16: accumulated gradients, a residual,
/// GELU.
///
/// ```text
/// x = first(features)     y = x + down(GELU(up(norm(x))))     logits = head(y)
/// ```
pub fn narrow() -> Graph {
    let mut graph = Graph::new(16, Kind::Features { width: 32, classes: 4 }, Format::Bf16);
    let linear = |outputs: usize| Linear::new(outputs).initial(Initial::Uniform(0.3));
    let input = features(&mut graph, "input").unwrap();
    let x = linear(48).add(&mut graph, "first", input).unwrap();
    let norm = LayerNorm.add(&mut graph, "norm", x).unwrap();
    let wide = linear(64).activation(Activation::Gelu).add(&mut graph, "up", norm).unwrap();
    let y = linear(48).residual(x).add(&mut graph, "down", wide).unwrap();
    let logits = linear(4).add(&mut graph, "head", y).unwrap();
    CrossEntropy { target: Target::Classes, count: true }.add(&mut graph, "loss", logits).unwrap();
    graph
}

pub fn in_fp8() -> lowering::Target {
    lowering::Target { fp8: true, ..TARGET }
}

/// The first memory use of a launch that the program's operation does not declare.
fn undeclared(launch: &Launch<Span>, program: &Program) -> Option<Span> {
    let is_of = |step: &&Step| match &step.work {
        program::Work::Forward(layer, _) => *layer == launch.layer && !launch.backward,
        program::Work::Backward(layer, _) | program::Work::Pass(layer) => *layer == launch.layer && launch.backward,
        _ => false,
    };
    let steps: Vec<&Step> = program.steps.iter().filter(is_of).collect();
    let declares = |span: &Span, writes: bool| {
        let memory = match span.memory {
            Memory::Arena => program::Memory::Arena,
            Memory::Weights => program::Memory::Weights,
            Memory::Gradients => program::Memory::Gradients,
            // Programs do not describe batch inputs.
            _ => return true,
        };
        let within = |access: &Access| {
            access.memory == memory && access.range.start <= span.at && span.at + span.bytes <= access.range.end
        };
        steps.iter().any(|step| {
            let reads = step.reads.iter().filter(|_| !writes);
            step.writes.iter().chain(reads).any(within)
        })
    };
    let (reads, writes) = (launch.work.reads(), launch.work.writes());
    let read = reads.iter().find(|span| !declares(span, false));
    read.or_else(|| writes.iter().find(|span| !declares(span, true))).copied()
}

pub fn all() -> impl Iterator<Item = (&'static str, Build)> {
    NETWORKS.into_iter().chain(IMAGES).chain(RESIDUAL).chain(DEEP).chain(LANGUAGE)
}

/// In 16 bits, so that cuDNN can compute attention.
const HALF: [(&str, Build); 2] = [
    ("gpt in bf16", || language(trial::gpt(true), Format::Bf16)),
    ("bert in f16", || language(trial::bert(true), Format::F16)),
];

#[test]
fn eligible_linear_layers_use_fp8_and_declare_their_memory() {
    let (plan, program) = planned(narrow(), in_fp8());
    assert_eq!((plan.linear_layers(), program.check()), ([4, 3], Ok(())));
    let launches = plan.launches(false, |span| span).unwrap();
    assert_eq!(launches.iter().find_map(|launch| undeclared(launch, &program)), None);
    let layers = |backward: bool| -> Vec<&str> {
        let is = |launch: &&Launch<Span>| {
            let has_scales = matches!(&launch.work, lowering::Work::Product(product) if product.scales.is_some());
            launch.backward == backward && has_scales
        };
        launches.iter().filter(is).map(|launch| launch.layer.as_str()).collect()
    };
    assert_eq!(layers(false), ["first", "up", "down"]);
    // The gradient of the features is not needed.
    assert_eq!(layers(true), ["down", "up"]);
    let (without, _) = planned(narrow(), TARGET);
    assert_eq!(without.linear_layers(), [4, 0]);
    assert!(without.arena_bytes() < plan.arena_bytes());
}

/// With and without cuDNN.
fn both(build: Build) -> [(Plan, Program); 2] {
    let target = with_libraries(&build());
    [planned(build(), TARGET), planned(build(), target)]
}

fn planned(graph: Graph, target: lowering::Target) -> (Plan, Program) {
    let plan = Plan::new(graph, target).unwrap();
    let buckets = fuse(plan.layout(), 1024);
    let runs: Vec<_> = (0..buckets.len()).map(|bucket| bucket..bucket + 1).collect();
    let program = plan.program(&Reductions { buckets: &buckets, runs: &runs, lanes: 1, micro_batches: 1 });
    (plan, program)
}

#[test]
fn launches_use_only_memory_declared_by_the_checked_program() {
    for (name, (plan, program)) in
        all().chain(HALF).flat_map(|(name, build)| both(build).map(|planned| (name, planned)))
    {
        assert_eq!(program.check(), Ok(()), "{name}\n{program}");
        for launch in plan.launches(false, |span| span).unwrap() {
            assert_eq!(undeclared(&launch, &program), None, "{name}: {launch:?}");
        }
    }
}

#[test]
fn evaluation_writes_only_its_results() {
    for (name, (plan, program)) in
        all().chain(HALF).flat_map(|(name, build)| both(build).map(|planned| (name, planned)))
    {
        let launches = plan.evaluation(|span| span).unwrap();
        for launch in &launches {
            assert_eq!(undeclared(launch, &program), None, "{name}: {launch:?}");
            let allowed = [Memory::Arena, Memory::Workspace, Memory::Losses, Memory::Correct];
            let writes = launch.work.writes();
            assert!(writes.iter().all(|span| allowed.contains(&span.memory)), "{name}: {launch:?}");
        }
        let losses = launches.iter().filter(|launch| launch.work.writes().iter().any(|s| s.memory == Memory::Losses));
        assert_eq!(losses.count(), plan.losses().len(), "{name}");
    }
}

#[test]
fn a_launch_in_the_wrong_memory_is_detected() {
    let (plan, program) = planned(graph(4), TARGET);
    for memory in [Memory::Arena, Memory::Gradients] {
        let moved = |span: Span| if span.memory == memory { Span { at: span.at + 4, ..span } } else { span };
        let launches = plan.launches(false, moved).unwrap();
        assert!(launches.iter().any(|launch| undeclared(launch, &program).is_some()), "{memory:?}");
    }
}
