//! The order in which a stage computes and communicates: one forward, one backward
//! (PipeDream-Flush: Narayanan et al. 2021, arXiv:2006.09503).
//!
//! ```text
//! stage 0   F0 F1 F2 .. B0 F3 B1 .. B2 .. B3
//! stage 1      F0 F1 B0 F2 B1 F3 B2 .. B3
//! stage 2         F0 B0 F1 B1 F2 B2 F3 B3
//! ```
//!
//! A stage has at most as many micro-batches in flight as there are stages from it to the last one.
//! Neighbours swap an output and a gradient in one operation, so that neither waits to send while
//! the other does.

/// An action of a stage, with the numbers of the micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// From the stage before.
    ReceiveInput(u32),
    Forward(u32),
    /// To the stage after.
    SendOutput(u32),
    /// From the stage after.
    ReceiveGradient(u32),
    /// With the stage after.
    SwapOutput {
        output: u32,
        gradient: u32,
    },
    Backward(u32),
    /// To the stage before.
    SendGradient(u32),
    /// With the stage before.
    SwapGradient {
        gradient: u32,
        input: u32,
    },
}

/// The actions of a stage in a step of `merge` micro-batches.
pub(super) fn one_forward_one_backward(stage: u32, stages: u32, merge: u32) -> Vec<Action> {
    use Action::{
        Backward, Forward, ReceiveGradient, ReceiveInput, SendGradient, SendOutput, SwapGradient, SwapOutput,
    };
    let (is_first, is_last) = (stage == 0, stage + 1 == stages);
    let ahead = (stages - stage - 1).min(merge);
    let mut actions = Vec::new();
    for micro_batch in 0..ahead {
        actions.extend((!is_first).then_some(ReceiveInput(micro_batch)));
        actions.extend([Forward(micro_batch), SendOutput(micro_batch)]);
    }
    if ahead < merge && !is_first {
        actions.push(ReceiveInput(ahead));
    }
    for (gradient, output) in (0..).zip(ahead..merge) {
        actions.push(Forward(output));
        actions.extend((!is_last).then_some(SwapOutput { output, gradient }));
        actions.push(Backward(gradient));
        if !is_first {
            let input = output + 1;
            actions.push(if input < merge { SwapGradient { gradient, input } } else { SendGradient(gradient) });
        }
    }
    for micro_batch in merge - ahead..merge {
        actions.extend([ReceiveGradient(micro_batch), Backward(micro_batch)]);
        actions.extend((!is_first).then_some(SendGradient(micro_batch)));
    }
    actions
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use switchyard_worker_contract::config::idle_share;

    /// The partner of a stage in an action, and what it does meanwhile; `None` if it computes.
    fn partner(stage: u32, action: Action) -> Option<(u32, Action)> {
        Some(match action {
            Action::Forward(_) | Action::Backward(_) => return None,
            Action::ReceiveInput(micro_batch) => (stage - 1, Action::SendOutput(micro_batch)),
            Action::SendOutput(micro_batch) => (stage + 1, Action::ReceiveInput(micro_batch)),
            Action::ReceiveGradient(micro_batch) => (stage + 1, Action::SendGradient(micro_batch)),
            Action::SendGradient(micro_batch) => (stage - 1, Action::ReceiveGradient(micro_batch)),
            Action::SwapOutput { output, gradient } => (stage + 1, Action::SwapGradient { gradient, input: output }),
            Action::SwapGradient { gradient, input } => (stage - 1, Action::SwapOutput { output: input, gradient }),
        })
    }

    /// Runs all stages; both partners of a message wait for each other. Forward takes 1 and
    /// backward 2. Returns the end, and the most micro-batches in flight of each stage.
    fn simulate(stages: u32, merge: u32) -> (u32, Vec<usize>) {
        let all: Vec<Vec<Action>> = (0..stages).map(|stage| one_forward_one_backward(stage, stages, merge)).collect();
        let mut next = vec![0; all.len()];
        let mut clocks = vec![0; all.len()];
        let mut most = vec![0; all.len()];
        let mut in_flight: Vec<Vec<u32>> = vec![Vec::new(); all.len()];
        while let Some(stage) = (0..all.len()).find(|&stage| {
            let Some(&action) = all[stage].get(next[stage]) else { return false };
            partner(stage as u32, action)
                .is_none_or(|(other, expected)| all[other as usize].get(next[other as usize]) == Some(&expected))
        }) {
            let action = all[stage][next[stage]];
            match action {
                Action::Forward(micro_batch) => {
                    clocks[stage] += 1;
                    in_flight[stage].push(micro_batch);
                    most[stage] = most[stage].max(in_flight[stage].len());
                }
                Action::Backward(micro_batch) => {
                    clocks[stage] += 2;
                    // In order, so that gradients are added as in a run without stages.
                    assert_eq!(in_flight[stage].remove(0), micro_batch);
                }
                _ => {}
            }
            next[stage] += 1;
            if let Some((other, _)) = partner(stage as u32, action) {
                let other = other as usize;
                next[other] += 1;
                (clocks[stage], clocks[other]) = [(clocks[stage].max(clocks[other])); 2].into();
            }
        }
        for (stage, actions) in all.iter().enumerate() {
            assert_eq!(next[stage], actions.len(), "stage {stage} waits for {:?}", actions.get(next[stage]));
            assert!(in_flight[stage].is_empty(), "stage {stage}");
        }
        (clocks.into_iter().max().unwrap_or(0), most)
    }

    proptest! {
        #[test]
        fn all_stages_complete_within_the_bounds(stages in 1u32..9, merge in 1u32..40) {
            let (end, most) = simulate(stages, merge);
            for (stage, most) in (0..stages).zip(most) {
                prop_assert_eq!(most as u32, (stages - stage).min(merge));
            }
            // As short as a pipeline of these stages can be.
            let idle = f64::from(end - 3 * merge) / f64::from(end);
            prop_assert!((idle - idle_share(stages, merge)).abs() < 1e-9, "{}", idle);
        }
    }

    #[test]
    fn the_schedule_of_a_middle_stage() {
        use Action::*;
        assert_eq!(
            one_forward_one_backward(1, 3, 3),
            [
                ReceiveInput(0),
                Forward(0),
                SendOutput(0),
                ReceiveInput(1),
                Forward(1),
                SwapOutput { output: 1, gradient: 0 },
                Backward(0),
                SwapGradient { gradient: 0, input: 2 },
                Forward(2),
                SwapOutput { output: 2, gradient: 1 },
                Backward(1),
                SendGradient(1),
                ReceiveGradient(2),
                Backward(2),
                SendGradient(2),
            ]
        );
    }
}
