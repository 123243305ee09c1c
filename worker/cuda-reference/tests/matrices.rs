//! Tensor core products and matrix loads, compared with `f64`.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)]

use half::{bf16, f16};
use std::sync::LazyLock;
use switchyard_cuda::kernels::Argument;
use switchyard_cuda_reference::compiler::nvrtc;
use switchyard_cuda_reference::{Counts, Device, Launch, Module};

const ROWS: usize = 16;
const INNER: usize = 16;
const COLUMNS: usize = 8;

/// The kernels of `matrices.cu`.
fn module() -> &'static Module {
    static MODULE: LazyLock<Module> = LazyLock::new(|| {
        let options = ["--gpu-architecture=sm_90a", "-lineinfo"].map(str::to_owned);
        let source = ("matrices.cu", include_str!("matrices.cu"));
        Module::parse(&nvrtc().compile(source, &[], &options).unwrap().ptx).unwrap()
    });
    &MODULE
}

/// Format of the factors.
#[derive(Clone, Copy, PartialEq)]
enum Format {
    Bf16,
    F16,
}

impl Format {
    fn bits(self, value: f64) -> u16 {
        match self {
            Format::Bf16 => bf16::from_f64(value).to_bits(),
            Format::F16 => f16::from_f64(value).to_bits(),
        }
    }

    fn value(self, bits: u16) -> f64 {
        match self {
            Format::Bf16 => bf16::from_bits(bits).to_f64(),
            Format::F16 => f16::from_bits(bits).to_f64(),
        }
    }
}

/// The factors, and the values that the product is added to.
struct Case {
    format: Format,
    left: Vec<u16>,
    right: Vec<u16>,
    sums: Vec<f32>,
}

impl Case {
    /// Random values between -2 and 2.
    fn new(format: Format, seed: u64) -> Case {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
            (state >> 33) as f64 / f64::from(1 << 29) - 2.0
        };
        let mut draw = |count: usize| (0..count).map(|_| next()).collect::<Vec<f64>>();
        let mut factor = |count: usize| draw(count).into_iter().map(|value| format.bits(value)).collect();
        let (left, right) = (factor(ROWS * INNER), factor(INNER * COLUMNS));
        Case { format, left, right, sums: draw(ROWS * COLUMNS).into_iter().map(|value| value as f32).collect() }
    }

    fn exact(&self) -> Vec<f64> {
        let value = |bits: u16| self.format.value(bits);
        let number = |(row, column): (usize, usize)| {
            let products =
                (0..INNER).map(|k| value(self.left[row * INNER + k]) * value(self.right[k * COLUMNS + column]));
            f64::from(self.sums[row * COLUMNS + column]) + products.sum::<f64>()
        };
        (0..ROWS).flat_map(|row| (0..COLUMNS).map(move |column| (row, column))).map(number).collect()
    }

    fn run(&self, module: &Module, kernel: &'static str) -> (Vec<f32>, Counts) {
        let mut device = Device::default();
        let [left, right] = [("left", &self.left), ("right", &self.right)].map(|(name, all)| device.upload(name, all));
        let sums = device.upload("sums", &self.sums);
        let is_bf16 = Argument::Int((self.format == Format::Bf16).into());
        let arguments = [Argument::Reads(left), Argument::Reads(right), Argument::Updates(sums), is_bf16];
        let launch = Launch { kernel, blocks: 1, threads: 32, shared_bytes: 0, arguments: &arguments, seed: 0 };
        let counts = device.launch(module, &launch).unwrap();
        (device.download(sums), counts)
    }
}

fn cases() -> impl Iterator<Item = Case> {
    [Format::Bf16, Format::F16].into_iter().flat_map(|format| (0..5).map(move |seed| Case::new(format, seed)))
}

/// Whether all values are within one rounding.
fn is_right(got: &[f32], wanted: &[f64]) -> bool {
    got.iter().zip(wanted).all(|(got, wanted)| (f64::from(*got) - wanted).abs() <= wanted.abs() / f64::from(1 << 24))
}

#[test]
fn products_use_the_element_layout_of_the_isa() {
    let module = module();
    for case in cases() {
        let (got, counts) = case.run(module, "product");
        assert!(is_right(&got, &case.exact()), "{got:?} instead of {:?}", case.exact());
        assert_eq!(counts.products, 1);
    }
}

#[test]
fn loaded_matrices_have_the_layout_of_products() {
    let module = module();
    for case in cases() {
        let (got, counts) = case.run(module, "loaded");
        assert!(is_right(&got, &case.exact()), "{got:?} instead of {:?}", case.exact());
        // Eight rows of 32 bytes use each bank twice. Rows of 16 bytes are contiguous.
        let Counts { shared, .. } = counts;
        assert_eq!((shared.accesses, shared.conflicts), (8 + 4 + 2, 4), "{counts:?}");
    }
}

#[test]
fn swapped_registers_give_wrong_sums() {
    let module = module();
    for case in cases() {
        let (got, _) = case.run(module, "exchanged");
        assert!(!is_right(&got, &case.exact()));
        // The two halves of the left factor's first 8 columns belong to the other rows.
        let mut other = Case { left: case.left.clone(), right: case.right.clone(), sums: case.sums.clone(), ..case };
        for at in (0..ROWS / 2).flat_map(|row| (0..INNER / 2).map(move |column| row * INNER + column)) {
            other.left.swap(at, at + ROWS / 2 * INNER);
        }
        assert!(is_right(&got, &other.exact()));
    }
}
