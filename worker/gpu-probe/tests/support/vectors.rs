//! Records a few launches on the executor, as `cargo xtask gpu bundle` does for all kernels.

use std::fs;
use std::path::Path;
use switchyard_cuda::kernels::elementwise::Elementwise;
use switchyard_cuda::kernels::layer_norm::LayerNorm;
use switchyard_cuda::kernels::recorded::{BYTES, CASES, Case};
use switchyard_cuda::kernels::{Call, Element, Rows};
use switchyard_cuda_reference::compiler::compiled;
use switchyard_cuda_reference::{Device, Module, Recorder, Span};

/// Padded rows, and their number.
const ROWS: Rows = Rows { element: Element::Bf16, width: 33, pitch: 40 };
const COUNT: usize = 5;

/// Writes two launches, one with approximate and one with exact arithmetic.
pub fn record(folder: &Path) {
    let recorder = Recorder::new(folder).unwrap();
    let launch = |device: &mut Device, call: Call<Span>| {
        let module = Module::parse(&compiled(call.program(), "sm_90a").ptx).unwrap();
        recorder.launch(device, &module, &call).unwrap();
    };
    let mut device = Device::default();
    let numbers: Vec<f32> = (0..COUNT * ROWS.pitch as usize).map(|at| (at as f32 * 0.37).sin()).collect();
    let x = device.upload("x", &numbers.iter().map(|value| half::bf16::from_f32(*value)).collect::<Vec<_>>());
    let [gamma, beta] = ["gamma", "beta"].map(|name| device.upload(name, &numbers[..ROWS.width as usize]));
    let (y, saved) = (device.allocate("y", 2 * numbers.len()), device.allocate("saved", 8 * COUNT));
    let norm = LayerNorm::new(ROWS, COUNT as u32).unwrap();
    launch(&mut device, norm.forward(2, x, [gamma, beta], y, saved).unwrap());
    let (from, to) = (device.upload("from", &numbers), device.allocate("to", 4 * numbers.len()));
    let convert = Elementwise { from: Element::F32, to: Element::F16 };
    launch(&mut device, convert.convert(1, numbers.len() as u32, from, 0.1, to, false).unwrap());
}

/// Changes one expected byte of a buffer in the first launch.
pub fn plant(folder: &Path, buffer: &str, byte: usize) {
    let [cases, bytes] = [CASES, BYTES].map(|name| folder.join(name));
    let text = fs::read_to_string(&cases).unwrap();
    let (first, rest) = text.split_once('\n').unwrap();
    let mut case: Case = first.parse().unwrap();
    let mut content = fs::read(&bytes).unwrap();
    let kept = case.buffers.iter_mut().find(|kept| kept.name == buffer).unwrap();
    // Equal bytes are stored once, and the content before the launch of a read-only buffer must
    // stay unchanged.
    let moved = content.len();
    kept.after.drain(..).for_each(|range| content.extend_from_within(range));
    content[moved + byte] ^= 0x40;
    kept.after.push(moved..content.len());
    fs::write(cases, format!("{case}\n{rest}")).unwrap();
    fs::write(bytes, content).unwrap();
}
