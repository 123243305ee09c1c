//! Matrix products through the engine's calls, compared with `f64` for all formats, transpositions
//! and pitches, with and without accumulation; and misuse that must be caught.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)]

mod child;
mod device;
mod formats;

use child::misuse_test;
use device::{Gpu, number, places};
use formats::{download, round, upload};
use half::bf16;
use switchyard_cuda::cublaslt::{Arithmetic, CublasLt, Epilogue, Format, KEPT_PITCH, Matrix, Product};
use switchyard_cuda::driver::Buffer;
use switchyard_cuda::find::CUBLASLT;
use switchyard_cuda::kernels::Element;
use switchyard_cuda::kernels::activation::Function;
use switchyard_cuda::kernels::fp8::Fp8;
use switchyard_cuda_reference::fp8;

const FORMATS: [(Element, Element); 5] = [
    (Element::F32, Element::F32),
    (Element::Bf16, Element::Bf16),
    (Element::Bf16, Element::F32),
    (Element::F16, Element::F16),
    (Element::F16, Element::F32),
];
const M: usize = 5;
const N: usize = 7;
const K: usize = 12;
const WORKSPACE_BYTES: usize = 1 << 20;

/// A device matrix, with NaN in the padding, and its values.
struct Side {
    buffer: Buffer,
    element: Element,
    matrix: Matrix,
    numbers: Vec<f32>,
}

impl Side {
    /// A matrix of shape `rows` x `columns` after transposition.
    fn new(gpu: &Gpu, seed: usize, element: Element, (rows, columns): (usize, usize), is_transposed: bool) -> Side {
        let (lines, width) = if is_transposed { (columns, rows) } else { (rows, columns) };
        let pitch = width + 3;
        let place = |at: usize| (at / pitch, at % pitch);
        let of = |at| match place(at) {
            (line, column) if column < width => number(seed, line * width + column),
            _ => f32::NAN,
        };
        let numbers: Vec<f32> = (0..lines * pitch).map(|at| round(element, of(at))).collect();
        let buffer = upload(gpu, element, &numbers);
        let matrix =
            Matrix { memory: buffer.span(), format: element.into(), rows: lines, columns: width, pitch, is_transposed };
        Side { buffer, element, matrix, numbers }
    }

    fn at(&self, row: usize, column: usize) -> f64 {
        let (line, column) = if self.matrix.is_transposed { (column, row) } else { (row, column) };
        self.numbers[line * self.matrix.pitch + column].into()
    }

    fn now(&self) -> Vec<f32> {
        download(&self.buffer, self.element, self.numbers.len())
    }
}

/// On the device of the current context.
fn cublaslt() -> CublasLt {
    CublasLt::start(&places().open(&CUBLASLT).unwrap().library).unwrap()
}

/// Left factor, right factor and result.
fn sides(gpu: &Gpu, (element, result): (Element, Element), transposed: [bool; 2]) -> [Side; 3] {
    let [left, right] = transposed;
    [
        Side::new(gpu, 1, element, (M, K), left),
        Side::new(gpu, 2, element, (K, N), right),
        Side::new(gpu, 3, result, (M, N), false),
    ]
}

/// The addend of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Addend {
    Nothing,
    /// The result's previous content.
    Result,
    /// A separate matrix.
    Separate,
}

fn product(sides: &[Side; 3], adds: bool, arithmetic: Arithmetic) -> Product {
    let [left, right, result] = sides.each_ref().map(|side| side.matrix);
    Product { left, right, result, addend: adds.then_some(result), epilogue: None, arithmetic, scales: None }
}

/// The largest error of a product, and the largest that rounding explains.
fn error(
    gpu: &Gpu,
    formats: (Element, Element),
    transposed: [bool; 2],
    adds: Addend,
    arithmetic: Arithmetic,
) -> [f64; 2] {
    let sides = sides(gpu, formats, transposed);
    let another = Side::new(gpu, 4, formats.1, (M, N), false);
    let mut product = product(&sides, adds == Addend::Result, arithmetic);
    if adds == Addend::Separate {
        product.addend = Some(another.matrix);
    }
    let planned = cublaslt().plan(product, WORKSPACE_BYTES, 4).unwrap();
    let workspace = gpu.context.allocate(WORKSPACE_BYTES).unwrap();
    planned.run(0, workspace.span(), &gpu.stream).unwrap();
    let [left, right, result] = &sides;
    let got = result.now();
    let mut worst = 0.0f64;
    for (at, got) in got.into_iter().enumerate() {
        let (row, column) = (at / result.matrix.pitch, at % result.matrix.pitch);
        if column >= N {
            assert!(got.is_nan(), "the product writes between rows");
            continue;
        }
        let sum: f64 = (0..K).map(|i| left.at(row, i) * right.at(i, column)).sum();
        let added = match adds {
            Addend::Nothing => 0.0,
            Addend::Result => result.at(row, column),
            Addend::Separate => another.at(row, column),
        };
        let wanted = sum + added;
        worst = worst.max((f64::from(got) - wanted).abs());
    }
    // Half an ulp of sums below 8.
    let allowed = match formats.1 {
        Element::F32 => 4e-6,
        Element::Bf16 => 8.0 / 512.0,
        Element::F16 => 8.0 / 4096.0,
    };
    [worst, allowed]
}

#[test]
fn products_of_all_formats_and_sides_are_right() {
    device::on_a_device("products_of_all_formats_and_sides_are_right", &[], || {
        let gpu = Gpu::new();
        for formats in FORMATS {
            for sides in [[false, false], [false, true], [true, false], [true, true]] {
                for adds in [Addend::Nothing, Addend::Result, Addend::Separate] {
                    let [worst, allowed] = error(&gpu, formats, sides, adds, Arithmetic::Ieee);
                    assert!(worst < allowed, "{formats:?}, transposed {sides:?}, adds {adds:?}: {worst} > {allowed}");
                }
            }
        }
    });
}

/// A product with an epilogue: errors of the result and of the auxiliary output, and the largest
/// that rounding explains.
fn epilogue_error(gpu: &Gpu, element: Element, function: Function, adds: bool) -> [f64; 3] {
    let sides = sides(gpu, (element, element), [false, true]);
    let another = Side::new(gpu, 4, element, (M, N), false);
    let biases: Vec<f32> = (0..N).map(|column| round(element, number(6, column))).collect();
    let bias = upload(gpu, element, &biases);
    let is_gelu = function == Function::Gelu;
    let pitch = N.next_multiple_of(KEPT_PITCH);
    let room = gpu.context.zeros(M * pitch * element.bytes()).unwrap();
    let kept = Matrix { memory: room.span(), pitch, ..sides[2].matrix };
    let epilogue = Epilogue { bias: bias.span(), function, kept: is_gelu.then_some(kept) };
    let mut product = product(&sides, false, Arithmetic::Ieee);
    (product.epilogue, product.addend) = (Some(epilogue), adds.then_some(another.matrix));
    let workspace = gpu.context.allocate(WORKSPACE_BYTES).unwrap();
    cublaslt().plan(product, WORKSPACE_BYTES, 1).unwrap().run(0, workspace.span(), &gpu.stream).unwrap();
    gpu.stream.synchronize().unwrap();
    let [left, right, result] = &sides;
    let (got, in_room, mut worst) = (result.now(), download(&room, element, M * pitch), [0.0f64; 2]);
    for (row, column) in (0..M).flat_map(|row| (0..N).map(move |column| (row, column))) {
        let sum: f64 = (0..K).map(|i| left.at(row, i) * right.at(i, column)).sum();
        let x = sum + f64::from(biases[column]) + if adds { another.at(row, column) } else { 0.0 };
        let wanted = match function {
            Function::Relu => x.max(0.0),
            Function::Gelu => {
                0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
            }
            Function::Identity | Function::Tanh => x,
        };
        let error = |got: f32, wanted: f64| (f64::from(got) - wanted).abs();
        worst[0] = worst[0].max(error(got[row * result.matrix.pitch + column], wanted));
        if is_gelu {
            worst[1] = worst[1].max(error(in_room[row * pitch + column], x));
        }
    }
    let allowed = match element {
        Element::F32 => 8e-6,
        Element::Bf16 => 16.0 / 512.0,
        Element::F16 => 16.0 / 4096.0,
    };
    [worst[0], worst[1], allowed]
}

#[test]
fn epilogues_are_right() {
    device::on_a_device("epilogues_are_right", &[], || {
        let gpu = Gpu::new();
        for element in [Element::F32, Element::Bf16, Element::F16] {
            for function in [Function::Identity, Function::Relu, Function::Gelu] {
                for adds in [false, true] {
                    let [result, kept, allowed] = epilogue_error(&gpu, element, function, adds);
                    let is_right = result < allowed && kept < allowed;
                    assert!(is_right, "{element:?}, {function:?}, adds {adds}: {result}, {kept} > {allowed}");
                }
            }
        }
    });
}

#[test]
fn unsupported_epilogues_are_refused() {
    let bare = [("SWITCHYARD_REFERENCE_FAULT", "cublaslt-bare")];
    device::on_a_device("unsupported_epilogues_are_refused", &bare, || {
        let gpu = Gpu::new();
        let sides = sides(&gpu, (Element::Bf16, Element::Bf16), [false, false]);
        let good = product(&sides, false, Arithmetic::Ieee);
        let bias = gpu.context.zeros(2 * N).unwrap().span();
        let refusal = |product| cublaslt().plan(product, 0, 1).map(|_| ()).unwrap_err().to_string();
        let with = |epilogue| refusal(Product { epilogue: Some(epilogue), ..good });
        let epilogue = Epilogue { bias, function: Function::Relu, kept: None };
        let mismatch = "sides or formats that do not fit";
        assert!(with(Epilogue { bias: bias.part(0..2 * N - 2).unwrap(), ..epilogue }).contains(mismatch));
        assert!(with(Epilogue { function: Function::Tanh, ..epilogue }).contains(mismatch));
        assert!(with(Epilogue { function: Function::Gelu, ..epilogue }).contains(mismatch), "no auxiliary output");
        assert!(
            with(Epilogue { kept: Some(good.result), ..epilogue }).contains(mismatch),
            "ReLU has no auxiliary output"
        );
        // The injected fault.
        assert!(with(epilogue).contains("no algorithm for"), "{}", with(epilogue));
        assert!(cublaslt().plan(good, 0, 1).is_ok());
    });
}

/// FP8 factors in the only supported layout, with a bf16 result.
fn in_fp8(gpu: &Gpu, formats: [Fp8; 2], scales: [f32; 2]) -> (Product, Vec<Buffer>, Vec<f64>) {
    let [m, n, k] = [16, 32, 48];
    let bits = |seed: usize, at: usize| number(seed, at).to_bits().to_le_bytes()[2] & 0xb7;
    let bytes = |seed, len| (0..len).map(|at| bits(seed, at)).collect::<Vec<u8>>();
    let (left, right) = (bytes(1, m * k), bytes(2, n * k));
    let old: Vec<bf16> = (0..m * n).map(|at| bf16::from_f32(number(3, at))).collect();
    let decoded = |format: Fp8, bits: u8| fp8::Fp8::from(format).decoded(bits);
    let wanted = (0..m * n).map(|at| {
        let (row, column) = (at / n, at % n);
        let term = |i| {
            let (left, right) = (left[row * k + i], right[column * k + i]);
            f64::from(decoded(formats[0], left)) * f64::from(decoded(formats[1], right))
        };
        (0..k).map(term).sum::<f64>() * f64::from(scales[0] * scales[1]) + f64::from(old[at].to_f32())
    });
    let wanted = wanted.collect();
    let buffers = vec![
        gpu.context.upload(&left).unwrap(),
        gpu.context.upload(&right).unwrap(),
        gpu.context.upload(&old).unwrap(),
        gpu.context.upload(&scales[..1]).unwrap(),
        gpu.context.upload(&scales[1..]).unwrap(),
    ];
    let matrix = |buffer: &Buffer, format, [rows, columns]: [usize; 2], is_transposed| Matrix {
        memory: buffer.span(),
        format,
        rows,
        columns,
        pitch: columns,
        is_transposed,
    };
    let product = Product {
        left: matrix(&buffers[0], Format::Fp8(formats[0]), [m, k], false),
        right: matrix(&buffers[1], Format::Fp8(formats[1]), [n, k], true),
        result: matrix(&buffers[2], Format::Bf16, [m, n], false),
        addend: Some(matrix(&buffers[2], Format::Bf16, [m, n], false)),
        epilogue: None,
        arithmetic: Arithmetic::Ieee,
        scales: Some([buffers[3].span(), buffers[4].span()]),
    };
    (product, buffers, wanted)
}

#[test]
fn fp8_products_are_right() {
    device::on_a_device("fp8_products_are_right", &[], || {
        let gpu = Gpu::new();
        for formats in [[Fp8::E4m3; 2], [Fp8::E5m2, Fp8::E4m3], [Fp8::E4m3, Fp8::E5m2]] {
            let (product, buffers, wanted) = in_fp8(&gpu, formats, [0.25, 2.0]);
            let workspace = gpu.context.allocate(WORKSPACE_BYTES).unwrap();
            cublaslt().plan(product, WORKSPACE_BYTES, 1).unwrap().run(0, workspace.span(), &gpu.stream).unwrap();
            let got = download(&buffers[2], Element::Bf16, wanted.len());
            for (at, (got, wanted)) in got.into_iter().zip(wanted).enumerate() {
                let error = (f64::from(got) - wanted).abs();
                assert!(error <= wanted.abs() / 250.0 + 1e-5, "{formats:?}, {at}: {got}, {wanted}");
            }
        }
    });
}

#[test]
fn unsupported_fp8_products_are_refused() {
    device::on_a_device("unsupported_fp8_products_are_refused", &[], || {
        let (good, ..) = in_fp8(&Gpu::new(), [Fp8::E4m3; 2], [1.0; 2]);
        let refusal = |product| cublaslt().plan(product, 0, 1).map(|_| ()).unwrap_err().to_string();
        let both = Format::Fp8(Fp8::E5m2);
        let Product { left, right, result, .. } = good;
        let bad = [
            Product { left: Matrix { format: both, ..left }, right: Matrix { format: both, ..right }, ..good },
            Product { result: Matrix { rows: 8, ..result }, left: Matrix { rows: 8, ..left }, ..good },
            Product { right: Matrix { rows: 48, columns: 32, pitch: 32, is_transposed: false, ..right }, ..good },
            Product { left: Matrix { format: Format::Bf16, pitch: 24, columns: 24, ..left }, ..good },
        ];
        for product in bad {
            assert!(refusal(product).contains("sides or formats that do not fit"), "{product:?}");
        }
    });
}

#[test]
fn tf32_loses_only_the_expected_precision() {
    device::on_a_device("tf32_loses_only_the_expected_precision", &[], || {
        let [worst, allowed] =
            error(&Gpu::new(), (Element::F32, Element::F32), [false, false], Addend::Nothing, Arithmetic::Tf32);
        assert!(worst > 10.0 * allowed && worst < 12.0 / 1024.0, "{worst}");
    });
}

#[test]
fn invalid_products_are_refused_before_calling_the_library() {
    device::on_a_device("invalid_products_are_refused_before_calling_the_library", &[], || {
        let gpu = Gpu::new();
        let sides = sides(&gpu, (Element::F32, Element::F32), [false, false]);
        let good = product(&sides, false, Arithmetic::Ieee);
        let refusal = |product| cublaslt().plan(product, 0, 1).map(|_| ()).unwrap_err().to_string();
        let mismatch = "sides or formats that do not fit";
        assert!(refusal(Product { left: good.right, ..good }).contains(mismatch));
        let bf16 = Matrix { format: Format::Bf16, ..good.right };
        assert!(refusal(Product { right: bf16, ..good }).contains(mismatch));
        let narrow = Matrix { columns: N - 1, ..good.result };
        assert!(refusal(Product { addend: Some(narrow), ..good }).contains(mismatch));
        let longer = Matrix { rows: M + 1, ..good.left };
        assert!(refusal(Product { left: longer, ..good }).contains("not within its memory"));
        let planned = cublaslt().plan(good, WORKSPACE_BYTES, 4).unwrap();
        let small = gpu.context.allocate(16).unwrap();
        let refusal = planned.run(0, small.span(), &gpu.stream).unwrap_err().to_string();
        assert!(refusal.contains("a workspace of 16 bytes, expected at least 65536"), "{refusal}");
        // The algorithm without a workspace.
        planned.run(1, small.span(), &gpu.stream).unwrap();
    });
}

misuse_test! {
    two_streams_must_not_share_a_workspace: "with no order between", |is_right| {
        let gpu = Gpu::new();
        let sides = [(); 2].map(|()| sides(&gpu, FORMATS[0], [false, false]));
        let workspaces = [(); 2].map(|()| gpu.context.allocate(WORKSPACE_BYTES).unwrap());
        let streams = [(); 2].map(|()| gpu.context.stream().unwrap());
        for (index, (sides, stream)) in sides.iter().zip(&streams).enumerate() {
            let planned = cublaslt().plan(product(sides, false, Arithmetic::Ieee), WORKSPACE_BYTES, 1).unwrap();
            let workspace = if is_right { &workspaces[index] } else { &workspaces[0] };
            planned.run(0, workspace.span(), stream).unwrap();
        }
        gpu.context.synchronize().unwrap();
    }

    a_product_must_not_overwrite_its_factors: "writes what it reads", |is_right| {
        let gpu = Gpu::new();
        let sides = sides(&gpu, FORMATS[0], [false, false]);
        let mut product = product(&sides, false, Arithmetic::Ieee);
        if !is_right {
            // The result has fewer elements than the right factor.
            product.result.memory = product.right.memory;
        }
        let workspace = gpu.context.allocate(16).unwrap();
        cublaslt().plan(product, 0, 1).unwrap().run(0, workspace.span(), &gpu.stream).unwrap();
        gpu.context.synchronize().unwrap();
    }

    a_scale_must_be_written_before_the_product: "that nobody has written", |is_right| {
        let gpu = Gpu::new();
        let (mut product, buffers, _) = in_fp8(&gpu, [Fp8::E4m3; 2], [1.0; 2]);
        let fresh = gpu.context.allocate(4).unwrap();
        if !is_right {
            product.scales = Some([buffers[3].span(), fresh.span()]);
        }
        let workspace = gpu.context.allocate(16).unwrap();
        cublaslt().plan(product, 0, 1).unwrap().run(0, workspace.span(), &gpu.stream).unwrap();
        gpu.context.synchronize().unwrap();
    }

    a_product_must_read_initialised_memory: "that nobody has written", |is_right| {
        let gpu = Gpu::new();
        let sides = sides(&gpu, FORMATS[0], [false, false]);
        let mut product = product(&sides, false, Arithmetic::Ieee);
        let fresh = gpu.context.allocate(4 * K * 100).unwrap();
        if !is_right {
            product.right.memory = fresh.span();
        }
        cublaslt().plan(product, 0, 1).unwrap().run(0, fresh.span(), &gpu.stream).unwrap();
        gpu.context.synchronize().unwrap();
    }
}
