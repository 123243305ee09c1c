//! Networks that a GPU cannot run are refused before anything starts, with layer and reason.

use crate::TARGET;
use crate::network::{KIND, SAMPLES};
use crate::trial::{self, cases};
use switchyard_worker::cpu::attention::AttentionShape;
use switchyard_worker::cpu::{Cpu, Format};
use switchyard_worker::data::Kind;
use switchyard_worker::lowering::{self, Plan, Refused};
use switchyard_worker::model::Registry;
use switchyard_worker::nn::layers::{CrossEntropy, Linear, Target, features};
use switchyard_worker::nn::{Backward, Form, Forward, Graph, Layer, Needs};
use switchyard_worker_contract::config::{self, ResNetDepth, Stem};

/// A layer of a user's program.
struct CustomLayer(Form);

impl Layer for CustomLayer {
    fn kind(&self) -> &'static str {
        "Mine"
    }

    fn form(&self) -> Form {
        self.0.clone()
    }

    fn needs(&self, _: &Cpu) -> Needs {
        Needs::default()
    }

    fn forward(&mut self, _: &mut Forward<'_>) {}

    fn backward(&mut self, _: &mut Backward<'_>) {}
}

fn refused(graph: Graph) -> Refused {
    Plan::new(graph, TARGET).err().unwrap()
}

/// A network with a user's layer in the middle, which maps rows of one width to rows of another.
fn own([inputs, outputs]: [usize; 2], form: Form) -> Graph {
    let mut graph = Graph::new(SAMPLES, KIND, Format::F32);
    let x = features(&mut graph, "input").unwrap();
    let x = Linear::new(inputs).without_bias().add(&mut graph, "first", x).unwrap();
    let x = graph.add("middle", CustomLayer(form), &[x], &[], &[], &[SAMPLES, outputs]).unwrap();
    let x = Linear::new(4).without_bias().add(&mut graph, "last", x).unwrap();
    CrossEntropy { target: Target::Classes, count: true }.add(&mut graph, "loss", x).unwrap();
    graph
}

#[test]
fn a_layer_without_a_form() {
    let error = refused(own([4, 4], Form::Opaque));
    assert_eq!(error.to_string(), "layer `middle` (Mine) comes from a user's program and runs on CPUs only");
}

#[test]
fn a_form_that_does_not_match_the_tensors() {
    let shape = AttentionShape { batch: SAMPLES, context: 1, heads: 1, head_size: 4, causal: false };
    let error = refused(own([4, 4], Form::Attention(shape)));
    let expected = "layer `middle` (Mine): got the form `attention 6 x 1 x 4, 1 heads`, expected one that agrees with its tensors and \
                    parameters";
    assert_eq!(error.to_string(), expected);
    // The same number of elements, in rows of twice the width.
    let wide = AttentionShape { batch: 3, head_size: 8, ..shape };
    assert!(matches!(refused(own([12, 4], Form::Attention(wide))), Refused::Form { .. }));
    assert_eq!(Plan::new(own([12, 4], Form::Attention(shape)), TARGET).err(), None);
}

#[test]
fn sizes_without_a_kernel() {
    let shape = AttentionShape { batch: SAMPLES, context: 1, heads: 1, head_size: 6, causal: false };
    let error = refused(own([18, 6], Form::Attention(shape)));
    let expected = "layer `middle` (Mine) does not fit a kernel: attention: 6 x 1 tokens, 1 heads of 6, expected heads of a multiple of 4, \
                    at most 128, and fewer than 2^32 numbers";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn no_built_in_model_is_refused() {
    for case in cases() {
        for format in [Format::F32, Format::Bf16, Format::F16] {
            let mut graph = Graph::new(case.samples, case.kind, format);
            Registry::new().model(&case.model).unwrap().build(&mut graph).unwrap();
            assert_eq!(Plan::new(graph, TARGET).err(), None, "{} {format:?}", case.name);
        }
    }
}

#[test]
fn models_of_real_size_are_planned() {
    let gpt = config::Gpt {
        layers: 12,
        hidden_size: 768,
        heads: 12,
        context_length: 1024,
        vocabulary_size: 50_257,
        tied_head: true,
    };
    let bert = config::Bert {
        layers: 24,
        hidden_size: 1024,
        heads: 16,
        context_length: 512,
        vocabulary_size: 30_522,
        masked_fraction: 0.15,
        next_sentence: true,
    };
    let images = Kind::Images { height: 224, width: 224, channels: 3, classes: 1000 };
    let resnet = trial::resnet(ResNetDepth::D50, Stem::ImageNet, 64);
    let text = |model: config::Model| (trial::kind_of(&model), model);
    let cases = [(text(config::Model::Gpt(gpt)), 16), (text(config::Model::Bert(bert)), 32), ((images, resnet), 256)];
    for ((kind, model), samples) in cases {
        let mut graph = Graph::new(samples, kind, Format::Bf16);
        Registry::new().model(&model).unwrap().build(&mut graph).unwrap();
        let plan = Plan::new(graph, lowering::Target { blocks: 528, ..TARGET }).unwrap();
        // Fits into an H100.
        assert!(plan.arena_bytes() < 80 << 30, "{model:?}: {} bytes", plan.arena_bytes());
    }
}
