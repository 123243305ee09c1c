//! Memory of a whole computation, and completion of its gradients.

use crate::TARGET;
use crate::network::{IMAGES, LANGUAGE, NETWORKS, RESIDUAL};
use switchyard_worker::lowering::{Computation, Memory, Span, Work};
use switchyard_worker::nn::{Bucket, fuse};
use switchyard_worker_contract::config::{self, Precision, SampleType};

const SGD: config::Optimizer = config::Optimizer {
    rule: config::Rule::Sgd(config::Momentum { momentum: 0.9, nesterov: false }),
    learning_rate: 0.1,
    weight_decay: 0.0,
    gradient_clip_norm: None,
    decay_exclusions: config::DecayExclusions::Vectors,
};

fn computations() -> impl Iterator<Item = (&'static str, Computation)> {
    let all = NETWORKS.into_iter().chain(LANGUAGE).chain(IMAGES).chain(RESIDUAL);
    all.map(|(name, build)| {
        (name, Computation::new(build(), &SGD, Precision::Fp32, SampleType::UInt8, TARGET).unwrap())
    })
}

/// A bucket that is still written after it counts as complete.
fn written(backward: &[Work<Span>], complete: &[usize], buckets: &[Bucket]) -> Option<usize> {
    (0..buckets.len()).find(|&bucket| {
        let own = 4 * buckets[bucket].range.start..4 * buckets[bucket].range.end;
        let spans = backward[complete[bucket]..].iter().flat_map(Work::writes);
        spans
            .filter(|span| span.memory == Memory::Gradients)
            .any(|span| span.at < own.end && own.start < span.at + span.bytes)
    })
}

#[test]
fn complete_gradients_are_not_written_again() {
    for (name, computation) in computations() {
        let buckets = fuse(computation.layout(), 64);
        let works = computation.works(|span| span).unwrap();
        for (pass, complete) in [works.first, works.later].iter().zip(computation.complete(&buckets).unwrap()) {
            assert!(buckets.len() > 1 && complete.is_sorted(), "{name}: {complete:?}");
            assert_eq!(written(&pass.backward, &complete, &buckets), None, "{name}");
            // One operation earlier, the first bucket is not complete.
            let early: Vec<usize> = complete.iter().map(|end| end - 1).collect();
            assert!(written(&pass.backward, &early, &buckets).is_some(), "{name}");
        }
    }
}

#[test]
fn operations_use_only_held_memory_or_batch_inputs() {
    for (name, computation) in computations() {
        let place = |span: Span| {
            let held = computation.contents().iter().find(|contents| contents.memory == span.memory);
            let input = computation.inputs().place(span);
            assert!(held.is_some() != input.is_some(), "{name}: {span:?}");
            assert!(held.is_none_or(|held| span.at + span.bytes <= held.bytes), "{name}: {span:?}");
            assert!(input.is_none_or(|part| part.end <= computation.inputs().bytes()), "{name}: {span:?}");
            span
        };
        computation.works(place).unwrap();
    }
}
