//! The program of a training step: golden texts of small models, a checker that accepts all of
//! them, and mutants that it rejects.

use crate::trial::{Case, Trial, cases, cpu};
use std::ops::Range;
use switchyard_worker::cpu::{Format, Isa};
use switchyard_worker::nn::program::{Access, Content, Event, Fault, Lane, Memory, Program, Reductions, Step, Work};
use switchyard_worker::nn::{Form, Lengths, fuse};

/// Bytes per bucket, so that small models have several.
const BUCKET: usize = 4096;

fn program(case: &Case, format: Format, lanes: usize, micro_batches: usize) -> Program {
    program_of(&Trial::new(case, cpu(1, Isa::Portable), format), lanes, micro_batches)
}

fn program_of(trial: &Trial, lanes: usize, micro_batches: usize) -> Program {
    let buckets = fuse(trial.network.layout(), BUCKET);
    // The first and the last bucket alone, the others in pairs, as fusion for a measured link could
    // choose.
    let mut runs: Vec<Range<usize>> = Vec::new();
    let mut next = 0;
    while next < buckets.len() {
        let several = next > 0 && next + 2 < buckets.len();
        let end = next + if several { 2 } else { 1 };
        runs.push(next..end);
        next = end;
    }
    trial.network.program(&Reductions { buckets: &buckets, runs: &runs, lanes, micro_batches })
}

fn case(name: &str) -> Case {
    cases().into_iter().find(|case| case.name == name).unwrap()
}

#[test]
fn every_program_passes_the_check() {
    for case in cases() {
        for (format, lanes, micro_batches) in [(Format::F32, 1, 1), (Format::Bf16, 2, 3), (Format::F16, 3, 2)] {
            for trial in [Trial::new, Trial::recomputing] {
                let program = program_of(&trial(&case, cpu(1, Isa::Portable), format), lanes, micro_batches);
                assert_eq!(program.check(), Ok(()), "{} {format:?}\n{program}", case.name);
            }
        }
    }
}

#[test]
fn golden_texts() {
    for (name, file) in [("gpt", "gpt"), ("bert next sentence", "bert"), ("resnet-18", "resnet-18"), ("mlp", "mlp")] {
        insta::assert_snapshot!(file, program(&case(name), Format::Bf16, 2, 1).to_string());
    }
}

/// How a layer's form in the forward pass differs from the memory that the plan gives the layer.
fn disagreement(step: &Step, format: Format) -> Option<String> {
    let Work::Forward(layer, form) = &step.work else { return None };
    let Some(said) = form.lengths() else { return Some(format!("{layer} has no form")) };
    let numbers = |access: &Access| match access.memory {
        Memory::Arena => access.range.len() / format.size(),
        Memory::Weights | Memory::Gradients => access.range.len() / 4,
    };
    let is_value = |access: &&Access| matches!(access.content, Content::Value(_));
    let is_weight = |access: &&Access| matches!(access.content, Content::Weight(_));
    let inputs: Vec<usize> = step.reads.iter().filter(is_value).map(numbers).collect();
    let parameters: Vec<usize> = step.reads.iter().filter(is_weight).map(numbers).collect();
    let output: usize = step.writes.iter().filter(is_value).map(numbers).sum();
    let planned = Lengths { inputs, parameters, output };
    (said != planned).then(|| format!("{layer}: {form} has {said:?}, the plan {planned:?}"))
}

#[test]
fn every_layers_form_matches_the_plan() {
    for case in cases() {
        for format in [Format::F32, Format::Bf16] {
            for step in program(&case, format, 1, 1).steps {
                assert_eq!(disagreement(&step, format), None, "{}", case.name);
            }
        }
    }
}

#[test]
fn a_form_that_does_not_match_the_plan_is_detected() {
    for name in ["mlp", "gpt", "bert next sentence", "resnet-18"] {
        let mut steps = program(&case(name), Format::F32, 1, 1).steps;
        // Each layer gets a form with different lengths, and none.
        let forms: Vec<Form> = steps
            .iter()
            .filter_map(|step| match &step.work {
                Work::Forward(_, form) => Some(form.clone()),
                _ => None,
            })
            .collect();
        for (index, step) in steps.iter_mut().enumerate().take(forms.len()) {
            let Some(other) = forms.iter().find(|form| form.lengths() != forms[index].lengths()) else {
                panic!("one form")
            };
            let Work::Forward(_, form) = &mut step.work else { panic!("forward comes first") };
            *form = other.clone();
            assert!(disagreement(step, Format::F32).is_some(), "{step}");
            let Work::Forward(_, form) = &mut step.work else { panic!("forward comes first") };
            *form = Form::Opaque;
            assert!(disagreement(step, Format::F32).is_some(), "{step}");
        }
    }
}

/// Index of the first matching step.
fn find(program: &Program, is: impl Fn(&Step) -> bool) -> usize {
    program.steps.iter().position(is).unwrap()
}

/// The fault of a mutated program with two communicators.
fn fault_of_mutant(mutate: impl FnOnce(&mut Program)) -> Fault {
    let mut program = program(&case("gpt"), Format::F32, 2, 2);
    mutate(&mut program);
    program.check().unwrap_err()
}

#[test]
fn a_read_before_its_write_is_detected() {
    // A forward layer moves to the end of forward, after the layers that need it.
    let fault = fault_of_mutant(|program| {
        let first = find(program, |step| matches!(step.work, Work::Forward(..)));
        let end = find(program, |step| matches!(step.work, Work::Backward(..)));
        let moved = program.steps.remove(first);
        program.steps.insert(end - 1, moved);
    });
    assert!(matches!(fault, Fault::Unwritten { .. }), "{fault}");
}

#[test]
fn memory_reused_too_early_is_detected() {
    // A tensor saved for backward overlaps memory that the next layer writes.
    let fault = fault_of_mutant(|program| {
        let is_saved = |access: &Access| matches!(access.content, Content::Saved(_));
        let at = find(program, |step| step.writes.iter().any(is_saved));
        let saved = program.steps[at].writes.iter().find(|access| is_saved(access)).unwrap().clone();
        let start = program.steps[at + 1].writes[0].range.start;
        for access in program.steps.iter_mut().flat_map(|step| step.reads.iter_mut().chain(&mut step.writes)) {
            if access.content == saved.content {
                access.range = start..start + saved.range.len();
            }
        }
    });
    assert!(matches!(&fault, Fault::Overwritten { .. }), "{fault}");
}

#[test]
fn a_missing_wait_between_lanes_is_detected() {
    let last = |program: &Program| {
        let reduced = |step: &Step| matches!(step.work, Work::Wait(Event::Reduced(_)));
        program.steps.iter().rposition(reduced).unwrap()
    };
    let first = |program: &Program| find(program, |step| step.work == Work::Wait(Event::Ready(0)));
    type Find<'a> = &'a dyn Fn(&Program) -> usize;
    let waits: [(Find<'_>, &str); 2] = [(&first, "reduce bucket 0"), (&last, "norm of the gradients")];
    for (wait, reader) in waits {
        let fault = fault_of_mutant(|program| drop(program.steps.remove(wait(program))));
        assert!(matches!(&fault, Fault::Unordered { second, .. } if second.contains(reader)), "{fault}");
    }
}

#[test]
fn a_wait_for_an_unrecorded_event_is_detected() {
    let fault = fault_of_mutant(|program| {
        let at = find(program, |step| step.work == Work::Record(Event::Ready(1)));
        program.steps.remove(at);
    });
    assert!(matches!(fault, Fault::NoEvent { .. }), "{fault}");
}

#[test]
fn a_bucket_started_before_its_last_gradient_is_detected() {
    let fault = fault_of_mutant(|program| {
        // The whole all-reduce, with its event, moves before the layer that completes its
        // gradients.
        let record = find(program, |step| step.work == Work::Record(Event::Ready(0)));
        let last = (0..record).rev().find(|&at| matches!(program.steps[at].work, Work::Backward(..))).unwrap();
        let end = find(program, |step| step.work == Work::Record(Event::Reduced(0)));
        program.steps[last..=end].rotate_left(record - last);
    });
    let expected = |first: &str| first.contains("reduce bucket 0");
    assert!(
        matches!(&fault, Fault::Unordered { first, .. } if expected(first))
            || matches!(&fault, Fault::Late { reader, .. } if expected(reader)),
        "{fault}"
    );
}

#[test]
fn a_gradient_written_after_its_use_is_detected() {
    // A block's residual gradient is added to once more after its layer has used it.
    let fault = fault_of_mutant(|program| {
        let adds = |step: &Step| {
            step.writes.iter().any(|write| {
                matches!(write.content, Content::Gradient(_)) && step.reads.iter().any(|read| read == write)
            })
        };
        let at = find(program, adds);
        let again = program.steps[at].clone();
        let Content::Gradient(layer) =
            again.writes.iter().find(|write| again.reads.contains(write)).unwrap().content.clone()
        else {
            panic!("a gradient")
        };
        let taker = find(program, |step| matches!(&step.work, Work::Backward(name, _) if *name == layer));
        let sum: Vec<Access> = again.writes.into_iter().filter(|write| again.reads.contains(write)).collect();
        program.steps.insert(
            taker + 1,
            Step { lane: Lane::Compute, work: Work::Pass("again".into()), reads: sum.clone(), writes: sum },
        );
    });
    assert!(matches!(fault, Fault::Late { .. } | Fault::Overwritten { .. }), "{fault}");
}

#[test]
fn an_operation_outside_the_memory_is_detected() {
    let fault = fault_of_mutant(|program| {
        let arena = program.arena;
        let write = program.steps[0].writes.iter_mut().find(|access| access.memory == Memory::Arena).unwrap();
        write.range = arena - 4..arena + 4;
    });
    assert!(matches!(fault, Fault::Outside { .. }), "{fault}");
}
