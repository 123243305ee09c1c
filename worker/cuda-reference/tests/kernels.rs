//! Compiles every kernel with NVRTC and executes it: compares values with an `f64` reference,
//! applies all checks of the executor under several orders of blocks and warps, and compares the
//! cost with the minimum.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)]

#[path = "kernels/activation.rs"]
mod activation;
#[path = "kernels/attention.rs"]
mod attention;
#[path = "kernels/batch_norm.rs"]
mod batch_norm;
#[path = "kernels/cross_entropy.rs"]
mod cross_entropy;
#[path = "kernels/disassembler.rs"]
mod disassembler;
#[path = "kernels/elementwise.rs"]
mod elementwise;
#[path = "kernels/embedding.rs"]
mod embedding;
#[path = "kernels/fp8.rs"]
mod fp8;
#[path = "kernels/gather.rs"]
mod gather;
#[path = "kernels/gradients.rs"]
mod gradients;
#[path = "kernels/input.rs"]
mod input;
#[path = "kernels/layer_norm.rs"]
mod layer_norm;
#[path = "kernels/machine_code.rs"]
mod machine_code;
#[path = "kernels/optimizer.rs"]
mod optimizer;
#[path = "kernels/pooling.rs"]
mod pooling;
#[path = "kernels/resources.rs"]
mod resources;

use bytemuck::Pod;
use half::{bf16, f16};
use std::path::Path;
use std::sync::LazyLock;
use switchyard_cuda::kernels::{Call, Element, Program, Rows};
use switchyard_cuda_reference::compiler::compiled;
use switchyard_cuda_reference::{Counts, Device, Launch, Module, Recorder, Span, Traffic};

/// Architecture of the reference GPU, an H200.
const ARCHITECTURE: &str = "sm_90a";
const SEEDS: u64 = 3;

/// Compiles a program to PTX.
fn compile(program: &Program) -> Module {
    Module::parse(&compiled(program, ARCHITECTURE).ptx).unwrap()
}

/// Names a folder in which to record launches for replay on a device.
const RECORD: &str = "SWITCHYARD_RECORD_VECTORS";

static RECORDER: LazyLock<Option<Recorder>> =
    LazyLock::new(|| std::env::var_os(RECORD).map(|folder| Recorder::new(Path::new(&folder)).unwrap()));

fn run(device: &mut Device, module: &Module, call: &Call<Span>, seed: u64) -> Counts {
    let counts = match &*RECORDER {
        Some(recorder) if seed == 0 => recorder.launch(device, module, call),
        _ => device.launch(module, &Launch::new(call, seed)),
    };
    counts.unwrap_or_else(|error| panic!("{error}"))
}

/// Test value at `index` of stream `seed`, between -1 and 1.
fn number(seed: u64, index: usize) -> f32 {
    let mut bits = (index as u64).wrapping_add(seed << 40).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    bits = (bits ^ (bits >> 32)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    ((bits >> 40) as f32 / 8_388_608.0) - 1.0
}

fn numbers(seed: u64, count: usize, scale: f32) -> Vec<f32> {
    (0..count).map(|index| number(seed, index) * scale).collect()
}

/// An element type.
trait Number: Pod {
    const ELEMENT: Element;
    const NAME: &'static str;
    /// Largest relative error of one rounding.
    const ROUNDING: f64;
    /// Largest absolute rounding error near zero.
    const NEAR_ZERO: f64 = 0.0;
    fn of(value: f32) -> Self;
    fn get(self) -> f64;
}

impl Number for f32 {
    const ELEMENT: Element = Element::F32;
    const NAME: &'static str = "f32";
    const ROUNDING: f64 = 1.0 / (1 << 24) as f64;

    fn of(value: f32) -> f32 {
        value
    }

    fn get(self) -> f64 {
        self.into()
    }
}

impl Number for bf16 {
    const ELEMENT: Element = Element::Bf16;
    const NAME: &'static str = "bf16";
    const ROUNDING: f64 = 1.0 / (1 << 8) as f64;

    fn of(value: f32) -> bf16 {
        bf16::from_f32(value)
    }

    fn get(self) -> f64 {
        self.into()
    }
}

impl Number for f16 {
    const ELEMENT: Element = Element::F16;
    const NAME: &'static str = "f16";
    const ROUNDING: f64 = 1.0 / (1 << 11) as f64;
    const NEAR_ZERO: f64 = 1.0 / (1 << 25) as f64;

    fn of(value: f32) -> f16 {
        f16::from_f32(value)
    }

    fn get(self) -> f64 {
        self.into()
    }
}

/// Rows of this width with the smallest pitch.
fn rows<T: Number>(width: u32) -> Rows {
    let vector = 16 / size_of::<T>() as u32;
    Rows { element: T::ELEMENT, width, pitch: width.next_multiple_of(vector) }
}

/// A matrix with NaN in the padding, which must not be used.
fn matrix<T: Number>(rows: Rows, count: usize, value: impl Fn(usize) -> f32) -> Vec<T> {
    let (width, pitch) = (rows.width as usize, rows.pitch as usize);
    let place = |at: usize| (at / pitch, at % pitch);
    let of = |at: usize| match place(at) {
        (row, column) if column < width => value(row * width + column),
        _ => f32::NAN,
    };
    (0..count * pitch).map(|at| T::of(of(at))).collect()
}

/// The rows of a matrix without padding.
fn values<T: Number>(rows: Rows, matrix: &[T]) -> Vec<Vec<f64>> {
    matrix.chunks(rows.pitch as usize).map(|row| row[..rows.width as usize].iter().map(|x| x.get()).collect()).collect()
}

/// Asserts that all values are within `relative` of the expected value, or within `absolute`.
fn assert_close(what: &str, got: &[f64], wanted: &[f64], relative: f64, absolute: f64) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    for (index, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        let allowed = relative * wanted.abs() + absolute;
        // Written so that a NaN fails.
        let within = (got - wanted).abs() <= allowed;
        assert!(within, "{what}, number {index}: {got} instead of {wanted}, allowed {allowed:e}");
    }
}

/// A line of the golden tables: instructions, and for each array the bytes read and written, as
/// requested > moved.
fn line(what: &str, counts: &Counts) -> String {
    let traffic = |[read, written]: [Traffic; 2]| {
        let part = |name: &str, Traffic { requested, moved }| match requested {
            0 => String::new(),
            _ => format!(" {name} {requested}>{moved}"),
        };
        format!("{}{}", part("read", read), part("written", written))
    };
    let memory: Vec<String> = counts.memory.iter().map(|(name, both)| format!("  {name}:{}", traffic(*both))).collect();
    let Counts { instructions, accesses, wide_accesses, shared, .. } = counts;
    format!(
        "{what}: {instructions} instructions, {wide_accesses} of {accesses} accesses with 16 bytes a lane, shared memory {} accesses, {} conflicts\n{}\n",
        shared.accesses,
        shared.conflicts,
        memory.join("\n")
    )
}

/// Asserts that the arrays which dominate the time are moved only once, to within a tenth.
fn assert_minimal_traffic(what: &str, counts: &Counts, floors: &[(&str, [usize; 2])]) {
    for (name, floor) in floors {
        for (Traffic { moved, .. }, floor) in counts.of(name).into_iter().zip(floor) {
            assert!(moved as f64 <= 1.1 * *floor as f64, "{what}: {moved} bytes of {name} moved, at least {floor}");
        }
    }
}

#[test]
#[should_panic(expected = "columns: 8192 bytes of x moved, at least 1024")]
fn bytes_moved_more_than_once_are_detected() {
    let counts = |requested, moved| Counts {
        memory: [("x".to_owned(), [Traffic { requested, moved }, Traffic::default()])].into(),
        ..Counts::default()
    };
    assert_minimal_traffic("rows", &counts(1024, 1120), &[("x", [1024, 0])]);
    assert_minimal_traffic("columns", &counts(1024, 8192), &[("x", [1024, 0])]);
}
