//! Forward passes that begin before all weights have arrived.

use crate::trial::{Trial, cases, cpu};
use switchyard_worker::cpu::{Format, Isa, Values, bf16};
use switchyard_worker::nn::{Layout, WeightSource, Weights};

/// Holds NaN for parameters that no layer has waited for.
struct Late<'a> {
    all: Weights<'a>,
    layout: Layout,
    master: Vec<f32>,
    half: Vec<bf16>,
    /// Parameters for which layers have waited, in order.
    order: Vec<usize>,
}

impl WeightSource for Late<'_> {
    fn weights(&mut self, ordinals: &[usize]) -> Weights<'_> {
        for &ordinal in ordinals {
            let range = self.layout.parameters[ordinal].range();
            self.master[range.clone()].copy_from_slice(&self.all.master[range.clone()]);
            if let Some(Values::Bf16(half)) = self.all.half {
                self.half[range.clone()].copy_from_slice(&half[range]);
            }
            self.order.extend((!self.order.contains(&ordinal)).then_some(ordinal));
        }
        let half = self.all.half.map(|_| Values::Bf16(&self.half));
        Weights { master: &self.master, half, statistics: self.all.statistics }
    }
}

#[test]
fn a_layer_waits_for_all_of_its_parameters_and_no_others() {
    for case in cases() {
        for format in [Format::F32, Format::Bf16] {
            let mut trial = Trial::new(&case, cpu(1, Isa::Portable), format);
            let expected = trial.forward();
            let (network, all, batch) = trial.parts();
            let layout = network.layout().clone();
            let (master, half) = (vec![f32::NAN; layout.len], vec![bf16::NAN; layout.len]);
            let mut late = Late { all, layout, master, half, order: Vec::new() };
            assert_eq!(network.forward_from(&mut late, batch), expected, "{} {format:?}", case.name);
            // Backward completes gradients in layout order, so forward needs the last ones first.
            let backward: Vec<usize> = (0..late.layout.parameters.len()).collect();
            let mut forward = late.order.clone();
            forward.sort_unstable();
            assert_eq!(forward, backward, "{} {format:?}: every parameter is waited for", case.name);
            assert!(late.order[0] > late.order[late.order.len() - 1], "{}: {:?}", case.name, late.order);
        }
    }
}
