use super::{Device, Module, Number, assert_close, assert_minimal_traffic, compile, line, numbers, run};
use half::{bf16, f16};
use switchyard_cuda::kernels::Element;
use switchyard_cuda::kernels::optimizer::{ALIGNMENT, Arrays, Chunk, Numbers, Optimizer, Rule, Scaling, Tables};
use switchyard_cuda_reference::{Counts, Span};

/// Step 3 with a learning rate of 1e-3 and a weight decay of 0.01.
const ADAMW: Numbers = Numbers {
    learning_rate: 1e-3,
    weight_decay: 0.01,
    trust: 0.02,
    beta1: 0.9,
    one_minus_beta1: 0.1,
    beta2: 0.999,
    one_minus_beta2: 0.001,
    step_size: 1e-3 / 0.271,
    root: 0.054_744,
    epsilon: 1e-8,
    keep: 0.999_99,
    decay: 0.0,
    momentum: 0.9,
    rate: 1e-3,
    nesterov: 0,
};
const SCALE: f32 = 0.5;
const SCALING: Scaling = Scaling { gradient_scale: SCALE, skip: 0 };

/// A rule with its parameters, and the number of its state arrays.
#[derive(Debug, Clone, Copy)]
struct Case {
    rule: Rule,
    state: usize,
    numbers: Numbers,
}

const CASES: [Case; 8] = [
    Case { rule: Rule::Sgd, state: 0, numbers: Numbers { decay: 0.01, ..ADAMW } },
    Case { rule: Rule::Sgd, state: 1, numbers: Numbers { decay: 0.01, ..ADAMW } },
    Case { rule: Rule::Sgd, state: 1, numbers: Numbers { decay: 0.01, nesterov: 1, ..ADAMW } },
    Case { rule: Rule::Adam, state: 2, numbers: Numbers { decay: 0.01, keep: 1.0, ..ADAMW } },
    Case { rule: Rule::Adam, state: 2, numbers: ADAMW },
    Case { rule: Rule::Lamb, state: 2, numbers: Numbers { decay: 0.01, step_size: 1.0 / 0.271, ..ADAMW } },
    Case { rule: Rule::Lars, state: 0, numbers: Numbers { rate: 1.0, ..ADAMW } },
    Case { rule: Rule::Lars, state: 1, numbers: Numbers { rate: 1.0, ..ADAMW } },
];

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
        // So small that they underflow to zero.
        first[0] = 1e-37;
        let mut gradient = numbers(4, count, 0.3);
        gradient[0] = 0.0;
        State { weight: numbers(1, count, 1.0), first, second, gradient }
    }

    /// The same step on the CPU, with the trust ratios of the parameters.
    fn step(&mut self, case: Case, layout: &Layout, ratios: &[f64]) {
        let moments = self.first.iter_mut().zip(&mut self.second);
        let all = self.weight.iter_mut().zip(moments).zip(self.gradient.iter().zip(&layout.parameters));
        for ((weight, (first, second)), (gradient, parameter)) in all {
            let state = [(case.state > 0).then_some(first), (case.state > 1).then_some(second)];
            let of = (decays(*parameter), ratios[*parameter]);
            case.numbers.apply(case.rule, (*gradient, SCALE), of, weight, state);
        }
    }
}

/// One element's step in `f64`: the value subtracted from the weight before LAMB's trust ratio, and
/// the new weight.
fn exact(case: Case, state: &State, at: usize, decays: bool, ratio: f64) -> [f64; 2] {
    let n = case.numbers;
    let [w, g] = [state.weight[at], state.gradient[at] * SCALE].map(f64::from);
    let decay = if decays { f64::from(n.decay) } else { 0.0 };
    if case.state == 2 {
        let g = if case.rule == Rule::Adam { g + decay * w } else { g };
        let m = f64::from(state.first[at]) * f64::from(n.beta1) + g * f64::from(n.one_minus_beta1);
        let v = f64::from(state.second[at]) * f64::from(n.beta2) + g * g * f64::from(n.one_minus_beta2);
        let step = f64::from(n.step_size) * (m / (v.sqrt() / f64::from(n.root) + f64::from(n.epsilon)));
        return match case.rule {
            Rule::Lamb => [step + decay * w, w - n.learning_rate * ratio * (step + decay * w)],
            _ => [step, w * if decays { f64::from(n.keep) } else { 1.0 } - step],
        };
    }
    let g = match case.rule {
        Rule::Lars => n.learning_rate * ratio * (g + if decays { n.weight_decay * w } else { 0.0 }),
        _ => g + decay * w,
    };
    let momentum = if case.state == 1 { f64::from(state.first[at]) * f64::from(n.momentum) + g } else { g };
    let step = if n.nesterov == 1 { g + f64::from(n.momentum) * momentum } else { momentum };
    [step, w - f64::from(n.rate) * step]
}

/// The trust ratios of the parameters, from norms in `f64`.
fn exact_ratios(case: Case, state: &State, layout: &Layout) -> Vec<f64> {
    let mut squares = vec![[0.0; 2]; layout.sizes.len()];
    for &(start, end, parameter) in &layout.sizes {
        for at in start..end {
            let other = match case.rule {
                Rule::Lamb => exact(case, state, at, decays(parameter), 1.0)[0],
                _ => f64::from(state.gradient[at]) * f64::from(SCALE),
            };
            squares[parameter][0] += f64::from(state.weight[at]) * f64::from(state.weight[at]);
            squares[parameter][1] += other * other;
        }
    }
    let ratio = |(parameter, [weights, others]): (usize, &[f64; 2])| {
        let (weights, others) = (weights.sqrt(), others.sqrt());
        let n = case.numbers;
        match case.rule {
            _ if !decays(parameter) || weights == 0.0 || others == 0.0 => 1.0,
            Rule::Lamb => weights / others,
            _ => n.trust * weights / (others + n.weight_decay * weights),
        }
    };
    squares.iter().enumerate().map(|(parameter, [a, b])| ratio((parameter, &[*a, *b]))).collect()
}

fn decays(parameter: usize) -> bool {
    parameter.is_multiple_of(2)
}

/// Parameters in chunks of at most 2048 elements; the padding between them is in no chunk.
struct Layout {
    chunks: Vec<Chunk>,
    /// Start, end and ordinal of each parameter.
    sizes: Vec<(usize, usize, usize)>,
    /// The parameter of each element, including the padding after it.
    parameters: Vec<usize>,
}

fn layout(sizes: &[u32]) -> Layout {
    let mut layout = Layout { chunks: Vec::new(), sizes: Vec::new(), parameters: Vec::new() };
    for (index, size) in sizes.iter().enumerate() {
        let start = layout.parameters.len() as u32;
        for at in (0..*size).step_by(2048) {
            let chunk = Chunk::new(start + at, (size - at).min(2048), decays(index), index as u32);
            layout.chunks.push(chunk.unwrap());
        }
        layout.sizes.push((start as usize, (start + size) as usize, index));
        layout.parameters.resize((start + size).next_multiple_of(ALIGNMENT) as usize, index);
    }
    layout
}

/// Device state after a step.
struct Output<T> {
    state: State,
    copy: Vec<T>,
    ratios: Vec<f64>,
    counts: Vec<Counts>,
}

fn run_case<T: Number>(module: &Module, case: Case, layout: &Layout, scaling: Scaling, seed: u64) -> Output<T> {
    let state = State::new(layout.parameters.len());
    let mut device = Device::default();
    let arrays = Arrays {
        weight: device.upload("weight", &state.weight),
        first: (case.state > 0).then(|| device.upload("first", &state.first)),
        second: (case.state > 1).then(|| device.upload("second", &state.second)),
        gradient: device.upload("gradient", &state.gradient),
        copy: (T::ELEMENT != Element::F32).then(|| device.allocate("copy", 2 * layout.parameters.len())),
    };
    let is_layer_wise = matches!(case.rule, Rule::Lamb | Rule::Lars);
    let tables = Tables {
        chunks: device.upload("chunks", &layout.chunks),
        numbers: device.upload("numbers", &[case.numbers]),
        scaling: device.upload("scaling", &[scaling]),
        squares: is_layer_wise.then(|| device.allocate("squares", 16 * layout.chunks.len())),
        ratios: is_layer_wise.then(|| device.allocate("ratios", 8 * layout.sizes.len())),
    };
    let calls = optimizer::<T>(case).step(4, &layout.chunks, arrays, tables).unwrap();
    let counts = calls.iter().map(|call| run(&mut device, module, call, seed)).collect();
    let read = |span: Option<Span>, old: &[f32]| span.map_or_else(|| old.to_vec(), |span| device.download(span));
    Output {
        state: State {
            weight: device.download(arrays.weight),
            first: read(arrays.first, &state.first),
            second: read(arrays.second, &state.second),
            gradient: device.download(arrays.gradient),
        },
        copy: arrays.copy.map(|copy| device.download(copy)).unwrap_or_default(),
        ratios: tables.ratios.map_or_else(|| vec![1.0; layout.sizes.len()], |ratios| device.download(ratios)),
        counts,
    }
}

fn optimizer<T: Number>(case: Case) -> Optimizer {
    Optimizer { rule: case.rule, copy: T::ELEMENT }
}

fn check<T: Number>(case: Case) {
    let module = compile(&optimizer::<T>(case).program());
    for sizes in [&[1][..], &[7, 3], &[4096, 1000], &[2049, 5, 6143]] {
        let layout = layout(sizes);
        let old = State::new(layout.parameters.len());
        let mut bits = None;
        for seed in 0..super::SEEDS {
            let what = format!("{case:?} {}, {sizes:?}, seed {seed}", T::NAME);
            let got = run_case::<T>(&module, case, &layout, SCALING, seed);
            if matches!(case.rule, Rule::Lamb | Rule::Lars) {
                assert_close(&format!("{what}: ratio"), &got.ratios, &exact_ratios(case, &old, &layout), 1e-6, 0.0);
                // The order of blocks and warps must not change any bit of the norms.
                assert_eq!(*bits.get_or_insert_with(|| got.ratios.clone()), got.ratios, "{what}");
            }
            let mut wanted = old.clone();
            wanted.step(case, &layout, &got.ratios);
            for (start, end, parameter) in layout.sizes.clone() {
                let both = [
                    (&got.state.weight, &wanted.weight),
                    (&got.state.first, &wanted.first),
                    (&got.state.second, &wanted.second),
                ];
                for (got, wanted) in both {
                    let bits =
                        |values: &[f32]| values[start..end].iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(got), bits(wanted), "{what}");
                }
                let weights: Vec<f64> = got.state.weight[start..end].iter().map(|value| f64::from(*value)).collect();
                let ratio = got.ratios[parameter];
                let exact: Vec<f64> =
                    (start..end).map(|at| exact(case, &old, at, decays(parameter), ratio)[1]).collect();
                assert_close(&what, &weights, &exact, 1e-6, 1e-7);
                if T::ELEMENT != Element::F32 {
                    let narrow = |values: &[T]| values.iter().map(|value| value.get()).collect::<Vec<_>>();
                    let rounded: Vec<T> = wanted.weight[start..end].iter().map(|value| T::of(*value)).collect();
                    assert_eq!(narrow(&got.copy[start..end]), narrow(&rounded), "{what}");
                }
                // The padding must be unchanged.
                let padding = end..(end as u32).next_multiple_of(ALIGNMENT) as usize;
                assert_eq!(got.state.weight[padding.clone()], old.weight[padding]);
            }
        }
    }
}

#[test]
fn a_step_of_every_rule_matches_the_cpu_bit_for_bit() {
    for case in CASES {
        check::<bf16>(case);
    }
}

#[test]
fn copies_can_have_any_type_or_be_absent() {
    check::<f16>(CASES[4]);
    check::<f32>(CASES[1]);
}

#[test]
fn a_skipped_step_changes_nothing() {
    for case in CASES {
        let module = compile(&optimizer::<bf16>(case).program());
        let layout = layout(&[1000]);
        let got = run_case::<bf16>(&module, case, &layout, Scaling { gradient_scale: f32::NAN, skip: 1 }, 0);
        assert_eq!(got.state, State::new(1000), "{case:?}");
        assert!(got.copy.iter().all(|value| value.is_nan()));
        assert!(got.counts.iter().all(|counts| !counts.memory.contains_key("weight")), "{case:?}");
    }
}

#[test]
fn zero_norms_give_a_trust_ratio_of_one() {
    for case in CASES.into_iter().filter(|case| matches!(case.rule, Rule::Lamb | Rule::Lars)) {
        let module = compile(&optimizer::<f32>(case).program());
        let chunks = [Chunk::new(0, 8, true, 0).unwrap(), Chunk::new(8, 8, true, 1).unwrap()];
        let mut device = Device::default();
        // The first parameter has zero weights, the second a zero update. LAMB has no decay here.
        let halves = |first: f32, second: f32| [[first; 8], [second; 8]].concat();
        let zeros = |device: &mut Device, name| device.upload(name, &[0.0f32; 16]);
        let arrays = Arrays {
            weight: device.upload("weight", &halves(0.0, 1.0)),
            first: (case.state > 0).then(|| zeros(&mut device, "first")),
            second: (case.state > 1).then(|| zeros(&mut device, "second")),
            gradient: device.upload("gradient", &halves(1.0, 0.0)),
            copy: None,
        };
        let numbers = Numbers { decay: 0.0, ..case.numbers };
        let tables = Tables {
            chunks: device.upload("chunks", &chunks),
            numbers: device.upload("numbers", &[numbers]),
            scaling: device.upload("scaling", &[SCALING]),
            squares: Some(device.allocate("squares", 32)),
            ratios: Some(device.allocate("ratios", 16)),
        };
        for call in optimizer::<f32>(case).step(1, &chunks, arrays, tables).unwrap() {
            run(&mut device, &module, &call, 0);
        }
        assert_eq!(device.download::<f64>(tables.ratios.unwrap()), [1.0, 1.0], "{case:?}");
    }
}

#[test]
fn every_element_is_moved_once() {
    let mut table = String::new();
    for case in CASES {
        let module = compile(&optimizer::<bf16>(case).program());
        for sizes in [&[8192][..], &[2049, 5, 6143]] {
            let got = run_case::<bf16>(&module, case, &layout(sizes), SCALING, 0);
            let bytes = 4 * sizes.iter().sum::<u32>() as usize;
            // LAMB's moments are written with the norms, and read again.
            let is_lamb = case.rule == Rule::Lamb;
            let written = if is_lamb { 0 } else { bytes };
            let state = |read, written, array| if case.state > array { [read, written] } else { [0, 0] };
            let step = [
                ("weight", [bytes, bytes]),
                ("first", state(bytes, written, 0)),
                ("second", state(bytes, written, 1)),
                ("gradient", [written, 0]),
                ("copy", [0, bytes / 2]),
            ];
            let norms = [
                ("weight", [bytes, 0]),
                ("first", if is_lamb { [bytes, bytes] } else { [0, 0] }),
                ("second", if is_lamb { [bytes, bytes] } else { [0, 0] }),
                ("gradient", [bytes, 0]),
            ];
            let mut floors = vec![("step", &step[..])];
            if got.counts.len() == 3 {
                floors.splice(..0, [("norms", &norms[..]), ("ratios", &[])]);
            }
            for (counts, (name, floors)) in got.counts.iter().zip(floors) {
                let nesterov = if case.numbers.nesterov != 0 { ", Nesterov" } else { "" };
                let decoupled = if case.rule == Rule::Adam && case.numbers.decay == 0.0 { ", decoupled" } else { "" };
                let what = format!("{:?} {name}, {} arrays{nesterov}{decoupled}, {sizes:?}", case.rule, case.state);
                assert_minimal_traffic(&what, counts, floors);
                table += &line(&what, counts);
            }
        }
    }
    insta::assert_snapshot!("optimizer", table);
}

#[test]
fn calls_with_too_little_memory_are_refused() {
    let mut device = Device::default();
    let (small, large) = (device.allocate("small", 31), device.allocate("large", 4096));
    let chunks = [Chunk::new(8, 8, true, 0).unwrap()];
    let arrays = Arrays { weight: large, first: Some(small), second: Some(large), gradient: large, copy: Some(large) };
    let tables = Tables { chunks: large, numbers: large, scaling: large, squares: None, ratios: None };
    let refused = |rule, copy, chunks: &[Chunk], arrays| {
        Optimizer { rule, copy }.step(1, chunks, arrays, tables).unwrap_err().to_string()
    };
    let adam = |chunks: &[Chunk]| refused(Rule::Adam, Element::Bf16, chunks, arrays);
    assert_eq!(adam(&chunks), "optimizer: first moment of 31 bytes, expected at least 64");
    assert_eq!(adam(&[]), "optimizer: 0 chunks, expected 1 to 2^32");
    assert_eq!(
        refused(Rule::Sgd, Element::Bf16, &chunks, arrays),
        "optimizer: second moment is given for Sgd with copies in Bf16"
    );
    assert_eq!(
        refused(Rule::Adam, Element::F32, &chunks, arrays),
        "optimizer: copy is given for Adam with copies in F32"
    );
    assert_eq!(
        refused(Rule::Lamb, Element::Bf16, &chunks, arrays),
        "optimizer: squares is missing for Lamb with copies in Bf16"
    );
    let chunk = Chunk::new(4, 8, true, 0).unwrap_err().to_string();
    assert_eq!(chunk, "optimizer: chunk of 8 numbers from 4, expected a multiple of 8 and an end below 2^32");
}
