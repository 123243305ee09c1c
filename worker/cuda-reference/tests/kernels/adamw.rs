use super::{Device, Module, Number, at_the_floor, close, compile, line, numbers, run};
use half::{bf16, f16};
use switchyard_cuda::kernels::Element;
use switchyard_cuda::kernels::adamw::{ALIGNMENT, AdamW, Arrays, Chunk, Numbers, Scaling, Tables};
use switchyard_cuda_reference::Counts;

const NUMBERS: Numbers = Numbers {
    beta1: 0.9,
    one_minus_beta1: 0.1,
    beta2: 0.999,
    one_minus_beta2: 0.001,
    step_size: 1e-3 / 0.271,
    root: 0.054_744,
    epsilon: 1e-8,
    keep: 0.999_99,
};

#[derive(Debug, Clone, PartialEq)]
struct State {
    weight: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
    gradient: Vec<f32>,
}

impl State {
    fn new(count: usize) -> State {
        let second = numbers(3, count, 1e-2).into_iter().map(|value| value * value).collect();
        let mut first = numbers(2, count, 1e-2);
        // So small that they become zero.
        first[0] = 1e-37;
        let mut gradient = numbers(4, count, 0.3);
        gradient[0] = 0.0;
        State { weight: numbers(1, count, 1.0), first, second, gradient }
    }

    /// The same step on the CPU.
    fn step(&mut self, decays: &[bool], scale: f32) {
        let moments = self.first.iter_mut().zip(&mut self.second);
        let all = self.weight.iter_mut().zip(moments).zip(self.gradient.iter().zip(decays));
        for ((weight, (first, second)), (gradient, decays)) in all {
            NUMBERS.apply(gradient * scale, *decays, [weight, first, second]);
        }
    }

    /// The same weights in `f64`.
    fn weights(&self, decays: &[bool], scale: f32) -> Vec<f64> {
        let n = NUMBERS;
        let weight = |index: usize| {
            let g = f64::from(self.gradient[index]) * f64::from(scale);
            let m = f64::from(self.first[index]) * f64::from(n.beta1) + g * f64::from(n.one_minus_beta1);
            let v = f64::from(self.second[index]) * f64::from(n.beta2) + g * g * f64::from(n.one_minus_beta2);
            let keep = if decays[index] { f64::from(n.keep) } else { 1.0 };
            let step = f64::from(n.step_size) * (m / (v.sqrt() / f64::from(n.root) + f64::from(n.epsilon)));
            f64::from(self.weight[index]) * keep - step
        };
        (0..decays.len()).map(weight).collect()
    }
}

/// One step over parameters of these sizes, every second without weight decay; returns what is on the device.
fn step<T: Number>(module: &Module, sizes: &[u32], scaling: Scaling, seed: u64) -> (State, Vec<T>, Counts) {
    let (chunks, decays) = layout(sizes);
    let state = State::new(decays.len());
    let mut device = Device::default();
    let weight = device.upload("weight", &state.weight);
    let first = device.upload("first", &state.first);
    let second = device.upload("second", &state.second);
    let gradient = device.upload("gradient", &state.gradient);
    let copy = device.allocate("copy", 2 * decays.len());
    let tables = Tables {
        chunks: device.upload("chunks", &chunks),
        numbers: device.upload("numbers", &[NUMBERS]),
        scaling: device.upload("scaling", &[scaling]),
    };
    let adamw = AdamW::new(T::ELEMENT).unwrap();
    let call = adamw.step(4, &chunks, Arrays { weight, first, second, gradient, copy }, tables).unwrap();
    let counts = run(&mut device, module, &call, seed);
    let state = State {
        weight: device.download(weight),
        first: device.download(first),
        second: device.download(second),
        gradient: device.download(gradient),
    };
    (state, device.download(copy), counts)
}

/// Chunks of at most 2048 numbers, and whether each number decays; the padding between parameters is in no chunk.
fn layout(sizes: &[u32]) -> (Vec<Chunk>, Vec<bool>) {
    let (mut chunks, mut all) = (Vec::new(), Vec::new());
    for (index, size) in sizes.iter().enumerate() {
        let decays = index % 2 == 0;
        let start = all.len() as u32;
        for at in (0..*size).step_by(2048) {
            chunks.push(Chunk::new(start + at, (size - at).min(2048), decays).unwrap());
        }
        all.resize((start + size).next_multiple_of(ALIGNMENT) as usize, decays);
    }
    (chunks, all)
}

fn compiled<T: Number>() -> Option<Module> {
    compile(&AdamW::new(T::ELEMENT).unwrap().program())
}

#[test]
fn a_step_has_the_bits_of_the_cpu() {
    check::<bf16>();
    check::<f16>();
}

fn check<T: Number>() {
    let Some(module) = compiled::<T>() else { return };
    for sizes in [&[1][..], &[7, 3], &[4096, 1000], &[2049, 5, 6143]] {
        let (_, decays) = layout(sizes);
        for seed in 0..super::SEEDS {
            let (got, copy, _) = step::<T>(&module, sizes, Scaling { gradient_scale: 0.5, skip: 0 }, seed);
            let old = State::new(decays.len());
            let mut wanted = old.clone();
            wanted.step(&decays, 0.5);
            let exact = old.weights(&decays, 0.5);
            let mut start = 0;
            for size in sizes {
                let end = start + *size as usize;
                for (got, wanted) in
                    [(&got.weight, &wanted.weight), (&got.first, &wanted.first), (&got.second, &wanted.second)]
                {
                    let bits =
                        |values: &[f32]| values[start..end].iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(got), bits(wanted), "{sizes:?}, seed {seed}");
                }
                let weights: Vec<f64> = got.weight[start..end].iter().map(|value| f64::from(*value)).collect();
                close("weight", &weights, &exact[start..end], 1e-6, 1e-8);
                let narrow = |values: &[T]| values.iter().map(|value| value.get()).collect::<Vec<_>>();
                let rounded: Vec<T> = wanted.weight[start..end].iter().map(|value| T::of(*value)).collect();
                assert_eq!(narrow(&copy[start..end]), narrow(&rounded), "{sizes:?}, seed {seed}");
                // The padding stays as it was.
                let padding = end..(end as u32).next_multiple_of(ALIGNMENT) as usize;
                assert_eq!(got.weight[padding.clone()], old.weight[padding.clone()]);
                start = padding.end;
            }
        }
    }
}

#[test]
fn a_step_that_the_scaler_leaves_out_changes_nothing() {
    let Some(module) = compiled::<bf16>() else { return };
    let (got, copy, counts) = step::<bf16>(&module, &[1000], Scaling { gradient_scale: f32::NAN, skip: 1 }, 0);
    assert_eq!(got, State::new(1000));
    assert!(copy.iter().all(|value| value.is_nan()));
    assert!(!counts.memory.contains_key("weight"), "{counts:?}");
}

#[test]
fn every_number_is_moved_once() {
    let Some(module) = compiled::<bf16>() else { return };
    let mut table = String::new();
    for sizes in [&[8192][..], &[2049, 5, 6143]] {
        let (_, _, counts) = step::<bf16>(&module, sizes, Scaling { gradient_scale: 0.5, skip: 0 }, 0);
        let count = sizes.iter().sum::<u32>() as usize;
        let what = format!("adamw {sizes:?}");
        let floors =
            [("weight", [4, 4]), ("first", [4, 4]), ("second", [4, 4]), ("gradient", [4, 0]), ("copy", [0, 2])];
        at_the_floor(&what, &counts, &floors.map(|(name, bytes)| (name, bytes.map(|bytes| bytes * count))));
        table += &line(&what, &counts);
    }
    insta::assert_snapshot!("adamw", table);
}

#[test]
fn a_call_that_does_not_fit_its_memory_is_refused() {
    let mut device = Device::default();
    let (small, large) = (device.allocate("small", 31), device.allocate("large", 4096));
    let chunks = [Chunk::new(8, 8, true).unwrap()];
    let arrays = Arrays { weight: large, first: small, second: large, gradient: large, copy: large };
    let tables = Tables { chunks: large, numbers: large, scaling: large };
    let adamw = AdamW::new(Element::Bf16).unwrap();
    let refused = |chunks: &[Chunk]| adamw.step(1, chunks, arrays, tables).unwrap_err().to_string();
    assert_eq!(refused(&chunks), "adamw: first moment of 31 bytes, expected at least 64");
    assert_eq!(refused(&[]), "adamw: 0 chunks, expected 1 to 2^32");
    let copy = AdamW::new(Element::F32).unwrap_err().to_string();
    assert_eq!(copy, "adamw: a copy in F32, expected Bf16 or F16");
    let chunk = Chunk::new(4, 8, true).unwrap_err().to_string();
    assert_eq!(chunk, "adamw: chunk of 8 numbers from 4, expected a multiple of 8 and an end below 2^32");
}
