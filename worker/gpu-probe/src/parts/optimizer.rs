//! A fused optimizer kernel: compiled at run time, and compared with the same arithmetic on the CPU.

use super::Probe;
use crate::numbers::{pattern, relative_error, short};
use crate::outcome::Outcome;
use half::bf16;
use serde_json::{Value, json};
use std::time::Instant;
use switchyard_cuda::adamw::{AdamW, Cubin};
use switchyard_cuda::find::NVRTC;
use switchyard_cuda::nvrtc::Nvrtc;

const PARAMETERS: usize = 1 << 24;
/// `f32` weight, two moments and gradient read; weight and moments written; the 16-bit weight written.
const BYTES_PER_PARAMETER: usize = 4 * 4 + 3 * 4 + 2;
/// Learning rate, beta1, beta2, epsilon, weight decay, factor of the gradient, and the corrections of the moments in
/// step 3, `1 / (1 - beta^3)`.
const SETTINGS: [f32; 8] = [1e-3, 0.9, 0.999, 1e-8, 0.01, 0.5, 1.0 / 0.271, 333.667];

struct Compiled {
    cubin: Cubin,
    architecture: String,
    milliseconds: f64,
    headers: String,
}

pub(super) fn compile(probe: &Probe) -> Result<Value, Outcome> {
    // Without a GPU the compiler still works; a driver that fails is reported in its own part.
    let device = probe.driver().map_err(Outcome::from).and_then(|driver| probe.chosen(&driver));
    let capability = device.map_or(probe.capability, |device| number(device.capability));
    let compiled = cubin(probe, capability)?;
    Ok(json!({
        "architecture": compiled.architecture,
        "cubinBytes": compiled.cubin.bytes(),
        "milliseconds": short(compiled.milliseconds),
        "headers": compiled.headers,
    }))
}

fn number((major, minor): (i32, i32)) -> u32 {
    u32::try_from(major * 10 + minor).unwrap_or(0)
}

/// Compiles to machine code rather than PTX: a driver refuses the PTX of a compiler that is newer than itself.
fn cubin(probe: &Probe, capability: u32) -> Result<Compiled, Outcome> {
    let library = probe.places.open(&NVRTC)?.library;
    let headers = probe.places.headers(&library.path);
    let Some(with_bf16) = headers.iter().find(|folder| folder.join("cuda_bf16.h").is_file()) else {
        let looked_for = headers.iter().map(|folder| folder.join("cuda_bf16.h").display().to_string()).collect();
        return Err(Outcome::Absent {
            reason: "the header cuda_bf16.h is not on this machine".to_string(),
            looked_for,
        });
    };
    let architecture = format!("sm_{capability}");
    let mut options = vec![format!("--gpu-architecture={architecture}"), "--fmad=false".to_string()];
    options.extend(headers.iter().map(|folder| format!("--include-path={}", folder.display())));
    let start = Instant::now();
    let cubin = Cubin::compile(&Nvrtc::new(&library)?, &options)?;
    let milliseconds = start.elapsed().as_secs_f64() * 1e3;
    Ok(Compiled { cubin, architecture, milliseconds, headers: with_bf16.display().to_string() })
}

pub(super) fn run(probe: &Probe) -> Result<Value, Outcome> {
    let (context, device) = probe.start()?;
    let compiled = cubin(probe, number(device.capability))?;
    let kernel = AdamW::load(&context, &compiled.cubin)?;
    let mut state = State::new(PARAMETERS);
    let [weight, first, second, gradient] =
        [&state.weight, &state.first, &state.second, &state.gradient].map(|values| context.upload(values));
    let (weight, first, second, gradient) = (weight?, first?, second?, gradient?);
    let narrow = context.zeros(2 * PARAMETERS)?;
    let buffers = [&weight, &first, &second, &gradient, &narrow];
    let launch = || kernel.launch(device.multiprocessors as u32 * 8, buffers, SETTINGS, PARAMETERS);
    launch()?;
    let got: [Vec<f32>; 3] =
        [weight.download(0..PARAMETERS)?, first.download(0..PARAMETERS)?, second.download(0..PARAMETERS)?];
    let got_narrow: Vec<bf16> = narrow.download(0..PARAMETERS)?;
    let seconds = context.time(20, launch)?;
    state.step();
    let wanted = [&state.weight, &state.first, &state.second];
    let worst = got.iter().zip(wanted).map(|(got, wanted)| relative_error(got, wanted)).fold(0.0, f64::max);
    let same = got
        .iter()
        .zip(wanted)
        .all(|(got, wanted)| got.iter().zip(wanted).all(|(got, wanted)| got.to_bits() == wanted.to_bits()));
    let same_narrow = got_narrow.iter().zip(&state.weight).all(|(got, wanted)| *got == bf16::from_f32(*wanted));
    if worst > 1e-6 {
        return Err(Outcome::failed(
            "adamw",
            format!("relative error {worst:e} against the CPU, expected at most 1e-6"),
        ));
    }
    Ok(json!({
        "parameters": PARAMETERS,
        "relativeError": worst,
        "sameBitsAsCpu": same,
        "bf16SameBitsAsCpu": same_narrow,
        "microseconds": short(seconds * 1e6),
        "GBs": short((PARAMETERS * BYTES_PER_PARAMETER) as f64 / seconds / 1e9),
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

    /// The arithmetic of the kernel, operation by operation.
    fn step(&mut self) {
        let [rate, beta1, beta2, epsilon, decay, unscale, correction1, correction2] = SETTINGS;
        let moments = self.first.iter_mut().zip(&mut self.second);
        for ((weight, gradient), (first, second)) in self.weight.iter_mut().zip(&self.gradient).zip(moments) {
            let g = gradient * unscale;
            let m = beta1 * *first + (1.0 - beta1) * g;
            let v = beta2 * *second + (1.0 - beta2) * (g * g);
            let step = (m * correction1) / ((v * correction2).sqrt() + epsilon) + decay * *weight;
            (*first, *second) = (m, v);
            *weight -= rate * step;
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
        // By hand, with g = 2: m = 0.2, v = 0.004; 1 - 0.001 * (0.2 / 0.271 / sqrt(0.004 * 333.667) + 0.01).
        let wanted = 1.0 - 1e-3 * (0.2 / 0.271 / (0.004f64 * 333.667).sqrt() + 0.01);
        assert!((f64::from(state.weight[0]) - wanted).abs() < 1e-7, "{} instead of {wanted}", state.weight[0]);
        assert!((state.first[0] - 0.2).abs() < 1e-6 && (state.second[0] - 0.004).abs() < 1e-6);
    }
}
