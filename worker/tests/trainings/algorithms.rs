//! The algorithm between hosts, as the job chooses it.

use crate::ranks::{History, train_over};
use std::collections::BTreeSet;
use switchyard_worker::comm::Force;
use switchyard_worker::train::TrainError;
use switchyard_worker_contract::config::{Algorithm, EngineConfig, Length, WireType};

const STEPS: u64 = 6;
const ALL: [Algorithm; 4] =
    [Algorithm::Ring, Algorithm::RecursiveDoubling, Algorithm::HalvingDoubling, Algorithm::Tree];

fn over_tcp(algorithm: Option<Algorithm>, wire_type: WireType) -> Result<History, TrainError> {
    let mut config = EngineConfig { algorithm, length: Length::Steps(STEPS), ..crate::plain::resnet() };
    (config.batch_size_per_process, config.overlap.wire_type) = (4, wire_type);
    // Ranks are compared bit by bit after every step.
    train_over(Force::Tcp, &config, 3, STEPS, true).map(|(_, history)| history)
}

#[test]
fn an_algorithm_changes_the_order_of_sums_and_nothing_else() {
    let own = over_tcp(None, WireType::Fp32).unwrap();
    let chosen = ALL.map(|algorithm| over_tcp(Some(algorithm), WireType::Fp32).unwrap());
    assert_eq!(chosen[0], over_tcp(Some(Algorithm::Ring), WireType::Fp32).unwrap(), "two runs");
    let digests: BTreeSet<&String> = chosen.iter().map(|history| &history.steps[0].1).collect();
    assert!(digests.len() > 1, "three values have different sums in different orders");
    for (algorithm, history) in ALL.iter().zip(&chosen) {
        // Later, other bits lead elsewhere.
        for ((got, _), (expected, _)) in history.steps.iter().zip(&own.steps).take(2) {
            assert!((got - expected).abs() <= 1e-4 * expected, "{algorithm:?}: {got}, not {expected}");
        }
    }
}

#[test]
fn an_algorithm_that_cannot_round_is_refused_with_a_reason() {
    for algorithm in ALL {
        match (algorithm, over_tcp(Some(algorithm), WireType::Bf16)) {
            (Algorithm::RecursiveDoubling, Err(error)) => {
                let text = error.to_string();
                assert!(text.contains("got recursive-doubling") && text.contains("ring, halving-doubling"), "{text}");
            }
            (Algorithm::RecursiveDoubling, Ok(_)) => panic!("each rank would round its own sum"),
            (_, outcome) => drop(outcome.unwrap()),
        }
    }
}
