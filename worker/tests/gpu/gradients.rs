//! Compares the gradient of every parameter after one micro-batch with the CPU engine's.

use crate::TARGET;
use crate::flat_gradients::FlatGradients;
use crate::loaded::Loaded;
use crate::network::{Build, RESIDUAL, all};
use crate::training::{batch, weights};
use crate::trial::cpu;
use switchyard_cuda_reference::Span;
use switchyard_worker::cpu::Isa;
use switchyard_worker::lowering::{Launch, Memory, Plan, Work};
use switchyard_worker::nn::{Layout, Network, ParameterSlot, Weights};

/// For each parameter, the norm of the difference of two gradients relative to the norm of the
/// second.
fn distances(layout: &Layout, got: &[f32], expected: &[f32]) -> Vec<(String, f64)> {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let parameter = |slot: &ParameterSlot| {
        let pairs = || got[slot.range()].iter().zip(&expected[slot.range()]);
        let difference = norm(&mut pairs().map(|(a, b)| f64::from(a - b)));
        (slot.name.clone(), difference / norm(&mut pairs().map(|(_, b)| f64::from(*b))))
    };
    layout.parameters.iter().map(parameter).collect()
}

/// Gradients on the GPU and on the CPU. `mutate` can inject a mistake into the launches.
fn gradients(build: Build, mutate: impl FnOnce(&mut Vec<Launch<Span>>)) -> (Layout, Vec<f32>, Vec<f32>) {
    let (kind, samples) = (*build().kind(), build().batch());
    let batch = batch(&kind, samples, 0);
    let mut network = Network::new(build(), cpu(1, Isa::Portable)).unwrap();
    let layout = network.layout().clone();
    let weights = weights(&layout);
    let mut sink = FlatGradients::new(&layout);
    let parameters = Weights { master: &weights, half: None, statistics: &[] };
    network.forward(parameters, &batch);
    network.backward(parameters, &batch, 1.0, &mut sink);
    let plan = Plan::new(build(), TARGET).unwrap();
    let mut loaded = Loaded::new(&plan, &batch, &weights, false, 1, 0);
    let mut launches = plan.launches(false, |span| loaded.gpu.place(span)).unwrap();
    mutate(&mut launches);
    loaded.run(&batch, &launches);
    let got = loaded.gpu.device.download(loaded.gpu.at(Memory::Gradients));
    (layout, got, sink.gradients)
}

#[test]
fn gradients_of_all_parameters_match_the_cpu() {
    for (name, build) in all() {
        let (layout, got, expected) = gradients(build, |_| ());
        for (parameter, distance) in distances(&layout, &got, &expected) {
            let allowed = match name {
                // A different summation order can flip the sign of a ReLU's input, and with it
                // whether there is a gradient.
                "deep resnet-50" => 0.1,
                // Norms over few pixels amplify rounding.
                "bottlenecks" => 5e-5,
                _ => 1e-5,
            };
            assert!(distance < allowed, "{name}: gradient of {parameter} off by {distance:e} of its norm");
        }
    }
}

#[test]
fn a_product_added_twice_shows_in_its_layers_gradient() {
    let twice = |launches: &mut Vec<Launch<Span>>| {
        let is_of = |launch: &Launch<Span>| launch.backward && launch.layer == "fc";
        let is_of_weights = |work: &Work<Span>| matches!(work, Work::Product(product) if product.left.is_transposed);
        let first = launches.iter().position(|launch| is_of(launch) && is_of_weights(&launch.work)).unwrap();
        let Work::Product(mut product) = launches[first].work.clone() else { unreachable!() };
        product.addend = Some(product.result);
        launches.insert(first + 1, Launch { work: Work::Product(product), ..launches[first].clone() });
    };
    let (layout, got, expected) = gradients(RESIDUAL[0].1, twice);
    let distances = distances(&layout, &got, &expected);
    let off: Vec<&str> = distances.iter().filter(|(_, far)| *far > 1e-5).map(|(name, _)| name.as_str()).collect();
    assert_eq!(off, ["fc.weight"]);
}
