//! The program of a GPU step: golden texts of small models, a checker that accepts all of them, and
//! mutants that it rejects.

use crate::trial::{Case, cases};
use crate::{TARGET, network, with_libraries};
use switchyard_worker::cpu::Format;
use switchyard_worker::lowering::{Action, Computation, Event, Lane, Program, Target, Unordered};
use switchyard_worker::model::Registry;
use switchyard_worker::nn::{Graph, fuse};
use switchyard_worker_contract::config::{
    self, Amp, HalfType, LossScaling, Model, Momentum, Precision, Rule, SampleType,
};

/// Bytes per bucket, so that small models have several.
const BUCKET: usize = 4096;

fn program(case: &Case, micro_batches: usize, ranks: bool) -> Program {
    program_for(case, micro_batches, ranks, |_| TARGET)
}

/// `target` gives the target for a graph.
fn program_for(case: &Case, micro_batches: usize, ranks: bool, target: impl Fn(&Graph) -> Target) -> Program {
    let mut graph = Graph::new(case.samples, case.kind, Format::Bf16);
    Registry::new().model(&case.model).unwrap().build(&mut graph).unwrap();
    program_of(graph, micro_batches, ranks, target)
}

fn program_of(graph: Graph, micro_batches: usize, ranks: bool, target: impl Fn(&Graph) -> Target) -> Program {
    let optimizer = config::Optimizer {
        rule: Rule::Sgd(Momentum { momentum: 0.9, nesterov: false }),
        learning_rate: 0.1,
        weight_decay: 0.0,
        gradient_clip_norm: None,
        decay_exclusions: config::DecayExclusions::Vectors,
    };
    let precision =
        Precision::Amp(Amp { compute_type: HalfType::Bf16, loss_scaling: LossScaling::Static { scale: 1.0 } });
    let target = target(&graph);
    let computation = Computation::new(graph, &optimizer, precision, SampleType::UInt8, target).unwrap();
    let buckets = if ranks { fuse(computation.layout(), BUCKET) } else { Vec::new() };
    Program::new(&computation, micro_batches, &buckets).unwrap()
}

fn case(name: &str) -> Case {
    cases().into_iter().find(|case| case.name == name).unwrap()
}

#[test]
fn every_program_passes_the_check() {
    for case in cases().into_iter().filter(|case| !matches!(case.model, Model::Custom(_))) {
        for (micro_batches, ranks) in [(1, false), (3, false), (1, true), (4, true)] {
            let program = program(&case, micro_batches, ranks);
            assert_eq!(program.check(), Ok(()), "{}, {micro_batches} micro-batches\n{program}", case.name);
            let program = program_for(&case, micro_batches, ranks, with_libraries);
            assert_eq!(program.check(), Ok(()), "{}, {micro_batches} micro-batches\n{program}", case.name);
        }
    }
}

#[test]
fn programs_with_fp8_products_pass_the_check() {
    for (micro_batches, ranks) in [(3, false), (4, true)] {
        let program = program_of(network::narrow(), micro_batches, ranks, |_| network::in_fp8());
        assert_eq!(program.check(), Ok(()), "{micro_batches} micro-batches\n{program}");
    }
    insta::assert_snapshot!("fp8", program_of(network::narrow(), 1, false, |_| network::in_fp8()).to_string());
}

#[test]
fn golden_texts() {
    for (name, file) in [("gpt", "gpt"), ("bert next sentence", "bert")] {
        insta::assert_snapshot!(file, program(&case(name), 1, false).to_string());
    }
    insta::assert_snapshot!("gpt-libraries", program_for(&case("gpt"), 1, false, with_libraries).to_string());
    insta::assert_snapshot!(
        "resnet-18-libraries",
        program_for(&case("resnet-18"), 1, false, with_libraries).to_string()
    );
    insta::assert_snapshot!("mlp", program(&case("mlp"), 3, true).to_string());
}

/// The fault of a program without the last step that matches.
fn without(lane: Lane, is: impl Fn(Action) -> bool) -> Unordered {
    let mut program = program(&case("resnet-18"), 4, true);
    let at = program.steps.iter().rposition(|step| step.lane == lane && is(step.action)).unwrap();
    program.steps.remove(at);
    program.check().unwrap_err()
}

#[test]
fn a_missing_wait_is_detected() {
    type Is = fn(Action) -> bool;
    let waits: [(Lane, Is, &str); 6] = [
        (Lane::Compute, |action| action == Action::Wait(Event::Arrived(0)), "input transfer"),
        (Lane::Input, |action| action == Action::Wait(Event::Backward(0)), "input transfer"),
        (Lane::Statistics, |action| action == Action::Wait(Event::Forward(0)), "statistics transfer"),
        (Lane::Reduce, |action| action == Action::Wait(Event::Ready(0)), "reduce sum"),
        (Lane::Reduce, |action| action == Action::Wait(Event::Backward(1)), "reduce sum"),
        // Reductions complete in order: waiting for the last waits for all.
        (Lane::Compute, |action| matches!(action, Action::Wait(Event::Reduced(_))), "reduce sum"),
    ];
    for (lane, is, words) in waits {
        let fault = without(lane, is);
        assert!(matches!(&fault, Unordered::Steps { .. }) && fault.to_string().contains(words), "{words}: {fault}");
    }
    // Without any wait for the copy, the next forward pass overwrites the statistics while they are
    // being copied. All waits must go, because the forward pass after it waits for the copy too.
    let mut program = program(&case("resnet-18"), 2, true);
    program.steps.retain(|step| step.action != Action::Wait(Event::Copied));
    let fault = program.check().unwrap_err().to_string();
    assert!(fault.contains("statistics transfer"), "{fault}");
}

#[test]
fn a_wait_for_an_unrecorded_event_is_detected() {
    let fault = without(Lane::Compute, |action| action == Action::Record(Event::Ready(1)));
    assert!(matches!(fault, Unordered::Event { .. }), "{fault}");
}

#[test]
fn a_bucket_sent_before_its_last_gradient_is_detected() {
    let mut program = program(&case("gpt"), 1, true);
    let is_record = |action: Action| action == Action::Record(Event::Ready(0));
    let at = program.steps.iter().position(|step| is_record(step.action)).unwrap();
    // Move the event before the operation that completes the bucket.
    program.steps.swap(at - 1, at);
    let fault = program.check().unwrap_err();
    assert!(matches!(&fault, Unordered::Steps { second, .. } if second.contains("reduce sum")), "{fault}");
}
