//! A fused optimizer kernel: compiled at run time and compared with the same arithmetic on the CPU.

use super::Probe;
use crate::numbers::{pattern, relative_error, short};
use crate::outcome::Outcome;
use half::bf16;
use serde_json::{Value, json};
use std::time::Instant;
use switchyard_cuda::kernels::Element;
use switchyard_cuda::kernels::optimizer::{Arrays, Chunk, Numbers, Optimizer, Rule, Scaling, Tables};

/// Number of parameters, and how many a block processes at a time.
const SIZES: (usize, u32) = (1 << 24, 1 << 14);
const REHEARSED: (usize, u32) = (1 << 13, 1 << 12);
/// f32 weight, two moments and gradient read; weight and moments written; 16-bit weight written.
const BYTES_PER_PARAMETER: usize = 4 * 4 + 3 * 4 + 2;
/// Step 3 with a learning rate of 1e-3 and a weight decay of 0.01.
const NUMBERS: Numbers = Numbers {
    beta1: 0.9,
    one_minus_beta1: 0.1,
    beta2: 0.999,
    one_minus_beta2: 0.001,
    step_size: 1e-3 / 0.271,
    root: 0.054_744,
    epsilon: 1e-8,
    keep: 0.99999,
    learning_rate: 0.0,
    weight_decay: 0.0,
    trust: 0.0,
    decay: 0.0,
    momentum: 0.0,
    rate: 0.0,
    nesterov: 0,
};
const ADAMW: Optimizer = Optimizer { rule: Rule::Adam, copy: Element::Bf16 };
const SCALING: Scaling = Scaling { gradient_scale: 0.5, skip: 0 };

pub(super) fn compile(probe: &Probe) -> Result<Value, Outcome> {
    // Without a GPU the compiler still works; a failing driver is reported by its own part.
    let device = probe.driver().map_err(Outcome::from).and_then(|driver| probe.selected(&driver));
    let capability = device.map_or(probe.capability, |device| number(device.capability));
    let architecture = format!("sm_{capability}");
    let nvrtc = probe.nvrtc()?;
    let start = Instant::now();
    let compiled = ADAMW.program().compile(&nvrtc, &architecture)?;
    let milliseconds = start.elapsed().as_secs_f64() * 1e3;
    Ok(json!({
        "architecture": architecture,
        "cubinBytes": compiled.cubin.len(),
        "milliseconds": short(milliseconds),
    }))
}

fn number((major, minor): (i32, i32)) -> u32 {
    u32::try_from(major * 10 + minor).unwrap_or(0)
}

pub(super) fn run(probe: &Probe) -> Result<Value, Outcome> {
    let (context, device) = probe.start()?;
    let (parameters, chunk) = if probe.rehearse { REHEARSED } else { SIZES };
    let stream = context.stream()?;
    let loaded = context.load(ADAMW.program(), &probe.nvrtc()?)?;
    let mut state = State::new(parameters);
    let [weight, first, second, gradient] =
        [&state.weight, &state.first, &state.second, &state.gradient].map(|values| context.upload(values));
    let (weight, first, second, gradient) = (weight?, first?, second?, gradient?);
    let copy = context.allocate(2 * parameters)?;
    let chunks: Vec<Chunk> = (0..parameters as u32 / chunk)
        .map(|index| Chunk::new(index * chunk, chunk, true, 0))
        .collect::<Result<_, _>>()?;
    let (table, numbers, scaling) =
        (context.upload(&chunks)?, context.upload(&[NUMBERS])?, context.upload(&[SCALING])?);
    let arrays = Arrays {
        weight: weight.span(),
        first: Some(first.span()),
        second: Some(second.span()),
        gradient: gradient.span(),
        copy: Some(copy.span()),
    };
    let tables =
        Tables { chunks: table.span(), numbers: numbers.span(), scaling: scaling.span(), squares: None, ratios: None };
    let steps = ADAMW.step(device.multiprocessors as u32 * 8, &chunks, arrays, tables)?;
    let launch = || steps.iter().try_for_each(|step| loaded.launch(step, &stream));
    launch()?;
    let got: [Vec<f32>; 3] =
        [weight.download(0..parameters)?, first.download(0..parameters)?, second.download(0..parameters)?];
    let got_copy: Vec<bf16> = copy.download(0..parameters)?;
    let seconds = context.time(&stream, 20, launch)?;
    state.step();
    let wanted = [&state.weight, &state.first, &state.second];
    let worst = got.iter().zip(wanted).map(|(got, wanted)| relative_error(got, wanted)).fold(0.0, f64::max);
    let same = got
        .iter()
        .zip(wanted)
        .all(|(got, wanted)| got.iter().zip(wanted).all(|(got, wanted)| got.to_bits() == wanted.to_bits()));
    let same_copy = got_copy.iter().zip(&state.weight).all(|(got, wanted)| *got == bf16::from_f32(*wanted));
    if worst > 1e-6 {
        return Err(Outcome::failed(
            "adamw",
            format!("relative error {worst:e} against the CPU, expected at most 1e-6"),
        ));
    }
    Ok(json!({
        "parameters": parameters,
        "relativeError": worst,
        "sameBitsAsCpu": same,
        "bf16SameBitsAsCpu": same_copy,
        "microseconds": short(seconds * 1e6),
        "GBs": short((parameters * BYTES_PER_PARAMETER) as f64 / seconds / 1e9),
    }))
}

/// Parameters on the CPU.
struct State {
    weight: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
    gradient: Vec<f32>,
}

impl State {
    fn new(len: usize) -> State {
        let stream = |seed, scale: f32| (0..len).map(|index| pattern(seed, index) * scale).collect::<Vec<f32>>();
        let second = stream(3, 1e-2).into_iter().map(|value| value * value).collect();
        State { weight: stream(1, 1.0), first: stream(2, 1e-2), second, gradient: stream(4, 0.3) }
    }

    fn step(&mut self) {
        let moments = self.first.iter_mut().zip(&mut self.second);
        for ((weight, gradient), (first, second)) in self.weight.iter_mut().zip(&self.gradient).zip(moments) {
            NUMBERS.apply(
                Rule::Adam,
                (*gradient, SCALING.gradient_scale),
                (true, 1.0),
                weight,
                [Some(first), Some(second)],
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_is_adamw() {
        let mut state = State { weight: vec![1.0], first: vec![0.0], second: vec![0.0], gradient: vec![4.0] };
        state.step();
        // By hand, with g = 2: m = 0.2, v = 0.004; 1 - 0.001 * (0.2 / 0.271 / sqrt(0.004 / (1 -
        // 0.999^3)) + 0.01).
        let wanted = 1.0 - 1e-3 * (0.2 / 0.271 / (0.004f64 / (1.0 - 0.999f64.powi(3))).sqrt() + 0.01);
        assert!((f64::from(state.weight[0]) - wanted).abs() < 1e-7, "{} instead of {wanted}", state.weight[0]);
        assert!((state.first[0] - 0.2).abs() < 1e-6 && (state.second[0] - 0.004).abs() < 1e-6);
    }
}
