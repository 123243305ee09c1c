//! Convolutions through the engine's calls, compared with `f64` in all directions, formats, strides
//! and paddings, with and without accumulation; and misuse that must be caught.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)]

mod child;
mod device;
mod formats;

use child::misuse_test;
use device::{Gpu, number, places};
use formats::{download, round, upload};
use std::sync::Arc;
use switchyard_cuda::convolution::{Convolution, Direction};
use switchyard_cuda::cublaslt::Arithmetic;
use switchyard_cuda::cudnn::Cudnn;
use switchyard_cuda::driver::{Buffer, Span};
use switchyard_cuda::find::CUDNN;
use switchyard_cuda::kernels::Element;
use switchyard_cuda::operation::{Limits, Operation, Plan, Planned, Properties};

const DIRECTIONS: [Direction; 3] = [Direction::Forward, Direction::Images, Direction::Filters];
const FORMATS: [Element; 3] = [Element::F32, Element::Bf16, Element::F16];
const LIMITS: Limits = Limits { deterministic: true, workspace_bytes: 1 << 20 };

/// Height, width, channels, filters, window, stride and padding.
const SIZES: [[usize; 7]; 5] =
    [[6, 5, 3, 4, 3, 1, 1], [7, 8, 5, 3, 3, 2, 1], [6, 6, 4, 7, 1, 2, 0], [9, 7, 3, 2, 7, 2, 3], [5, 5, 2, 3, 3, 1, 0]];

fn convolution([height, width, channels, filters, window, stride, padding]: [usize; 7]) -> Convolution {
    Convolution {
        direction: Direction::Forward,
        element: Element::F32,
        adds: false,
        arithmetic: Arithmetic::Ieee,
        images: 2,
        height,
        width,
        channels,
        pitch: channels + 1,
        filters,
        result_pitch: filters + 2,
        window,
        stride,
        padding,
    }
}

fn library() -> switchyard_cuda::Library {
    places().open(&CUDNN).unwrap().library
}

fn plan(cudnn: &Cudnn, convolution: &Convolution) -> Arc<Plan> {
    Arc::new(Plan::new(cudnn, &Operation::Convolution(*convolution), LIMITS).unwrap())
}

/// A device tensor: rows of `width` values, with NaN in between.
struct Tensor {
    buffer: Buffer,
    numbers: Vec<f32>,
    width: usize,
    pitch: usize,
}

impl Tensor {
    fn new(gpu: &Gpu, seed: usize, element: Element, rows: usize, width: usize, pitch: usize) -> Tensor {
        let of = |at: usize| match (at / pitch, at % pitch) {
            (row, column) if column < width => round(element, number(seed, row * width + column)),
            _ => f32::NAN,
        };
        let numbers: Vec<f32> = (0..rows * pitch).map(of).collect();
        Tensor { buffer: upload(gpu, element, &numbers), numbers, width, pitch }
    }

    fn at(&self, row: usize, column: usize) -> f64 {
        self.numbers[row * self.pitch + column].into()
    }

    fn now(&self, element: Element) -> Vec<f32> {
        download(&self.buffer, element, self.numbers.len())
    }
}

/// Images, filters and results.
fn tensors(gpu: &Gpu, of: &Convolution) -> [Tensor; 3] {
    let [tall, wide] = of.result().unwrap();
    let taps = of.filters * of.window * of.window;
    [
        Tensor::new(gpu, 1, of.element, of.images * of.height * of.width, of.channels, of.pitch),
        Tensor::new(gpu, 2, of.element, taps, of.channels, of.channels),
        Tensor::new(gpu, 3, of.element, of.images * tall * wide, of.filters, of.result_pitch),
    ]
}

fn spans(tensors: &[Tensor; 3]) -> [Span; 3] {
    tensors.each_ref().map(|tensor| tensor.buffer.span())
}

/// The sums by definition, one per row of the result.
fn expected(of: &Convolution, [images, filters, results]: &[Tensor; 3]) -> Vec<f64> {
    let [tall, wide] = of.result().unwrap();
    let [rows, width] = match of.direction {
        Direction::Forward => [of.images * tall * wide, of.filters],
        Direction::Images => [of.images * of.height * of.width, of.channels],
        Direction::Filters => [of.filters * of.window * of.window, of.channels],
    };
    let mut sums = vec![0.0; rows * width];
    let all = |counts: [usize; 7]| {
        (0..counts.iter().product()).map(move |mut at| {
            let mut place = [0; 7];
            for (count, to) in counts.iter().zip(&mut place).rev() {
                (at, *to) = (at / count, at % count);
            }
            place
        })
    };
    for [n, p, q, k, r, s, c] in all([of.images, tall, wide, of.filters, of.window, of.window, of.channels]) {
        let pixel = |result: usize, tap: usize, side: usize| {
            (result * of.stride + tap).checked_sub(of.padding).filter(|place| *place < side)
        };
        let (Some(h), Some(w)) = (pixel(p, r, of.height), pixel(q, s, of.width)) else { continue };
        let image = (n * of.height + h) * of.width + w;
        let (tap, result) = ((k * of.window + r) * of.window + s, (n * tall + p) * wide + q);
        match of.direction {
            Direction::Forward => sums[result * width + k] += images.at(image, c) * filters.at(tap, c),
            Direction::Images => sums[image * width + c] += results.at(result, k) * filters.at(tap, c),
            Direction::Filters => sums[tap * width + c] += results.at(result, k) * images.at(image, c),
        }
    }
    sums
}

/// The largest error, and the largest that rounding explains.
fn error(gpu: &Gpu, cudnn: &Cudnn, of: &Convolution) -> [f64; 2] {
    let tensors = tensors(gpu, of);
    let plan = plan(cudnn, of);
    let workspace = gpu.context.allocate(plan.workspace_bytes().max(1)).unwrap();
    let planned = Planned::new(&plan, &spans(&tensors), Some(workspace.span())).unwrap();
    planned.run(&gpu.stream).unwrap();
    gpu.stream.synchronize().unwrap();
    let written = &tensors[of.direction.written()];
    let (mut worst, sums) = (0.0f64, expected(of, &tensors));
    for (at, got) in written.now(of.element).into_iter().enumerate() {
        let (row, column) = (at / written.pitch, at % written.pitch);
        if column >= written.width {
            assert!(got.is_nan(), "it writes between pixels");
            continue;
        }
        let wanted = sums[row * written.width + column] + if of.adds { written.at(row, column) } else { 0.0 };
        worst = worst.max((f64::from(got) - wanted).abs());
    }
    // Half an ulp of sums below 32.
    let allowed = match of.element {
        Element::F32 => 2e-5,
        Element::Bf16 => 32.0 / 512.0,
        Element::F16 => 32.0 / 4096.0,
    };
    [worst, allowed]
}

#[test]
fn convolutions_of_all_directions_and_formats_are_right() {
    device::on_a_device("convolutions_of_all_directions_and_formats_are_right", &[], || {
        let gpu = Gpu::new();
        let cudnn = Cudnn::start(&library()).unwrap();
        for size in SIZES {
            for (direction, element, adds) in DIRECTIONS.iter().flat_map(|direction| {
                FORMATS.iter().flat_map(move |element| [false, true].map(|adds| (*direction, *element, adds)))
            }) {
                let of = Convolution { direction, element, adds, ..convolution(size) };
                let [worst, allowed] = error(&gpu, &cudnn, &of);
                assert!(worst < allowed, "{of:?}: {worst} > {allowed}");
            }
        }
    });
}

#[test]
fn tf32_loses_only_the_expected_precision() {
    device::on_a_device("tf32_loses_only_the_expected_precision", &[], || {
        let of = Convolution { arithmetic: Arithmetic::Tf32, ..convolution(SIZES[0]) };
        let [worst, allowed] = error(&Gpu::new(), &Cudnn::start(&library()).unwrap(), &of);
        assert!(worst > 10.0 * allowed && worst < 32.0 / 1024.0, "{worst}");
    });
}

#[test]
fn unsupported_convolutions_are_refused() {
    device::on_a_device(
        "unsupported_convolutions_are_refused",
        &[("SWITCHYARD_REFERENCE_FAULT", "cudnn-refused:11")],
        || {
            let gpu = Gpu::new();
            let cudnn = Cudnn::start(&library()).unwrap();
            let of = Convolution { element: Element::Bf16, ..convolution(SIZES[0]) };
            let tensors = tensors(&gpu, &of);
            let plan = plan(&cudnn, &of);
            let refusal =
                |spans: [Span; 3], workspace| Planned::new(&plan, &spans, workspace).map(drop).unwrap_err().to_string();
            let [images, filters, results] = spans(&tensors);
            assert_eq!(plan.workspace_bytes(), 4096);
            let small = refusal([images, filters, results], None);
            assert!(small.contains("a workspace of 0 bytes, expected at least 4096"), "{small}");
            let workspace = gpu.context.allocate(4096).unwrap();
            let short = refusal([images, filters.part(0..16).unwrap(), results], Some(workspace.span()));
            assert!(short.contains("16 bytes at a multiple of"), "{short}");
            let large = gpu.context.allocate(4096).unwrap();
            let odd = large.span().part(8..4096).unwrap();
            let unaligned = refusal([images, odd, results], Some(workspace.span()));
            assert!(unaligned.contains("at a multiple of 8"), "{unaligned}");
            // A plan for a described device does not run.
            let device = Properties::described(&Cudnn::new(&library()).unwrap(), r#"{"deviceVer":900}"#).unwrap();
            let bare = Cudnn::new(&library()).unwrap();
            let described = Plan::described(&bare, &device, &Operation::Convolution(of), LIMITS).unwrap();
            assert_eq!(described.workspace_bytes(), 4096);
            let spans = [images, filters, results];
            let described = Planned::new(&Arc::new(described), &spans, Some(workspace.span())).unwrap();
            let text = described.run(&gpu.stream).unwrap_err().to_string();
            assert!(text.contains("cuDNN was not started"), "{text}");
            // A heuristic without an engine, and a limit that its engines exceed.
            let backward = Convolution { direction: Direction::Filters, ..of };
            let none = Plan::new(&cudnn, &Operation::Convolution(backward), LIMITS).map(drop).unwrap_err().to_string();
            assert!(none.contains("3000: CUDNN_STATUS_NOT_SUPPORTED: injected fault"), "{none}");
            let limits = Limits { workspace_bytes: 4095, ..LIMITS };
            assert_eq!(Plan::new(&cudnn, &Operation::Convolution(of), limits).unwrap().workspace_bytes(), 0);
            assert!(Properties::of(&cudnn, 1).is_err());
            assert!(Properties::described(&cudnn, "no device").is_err());
        },
    );
}

/// A bf16 convolution's plan and tensors.
fn prepared(gpu: &Gpu) -> (Arc<Plan>, [Tensor; 3]) {
    let of = Convolution { element: Element::Bf16, ..convolution(SIZES[0]) };
    (plan(&Cudnn::start(&library()).unwrap(), &of), tensors(gpu, &of))
}

misuse_test! {
    two_streams_must_not_share_a_workspace: "with no order between", |is_right| {
        let gpu = Gpu::new();
        let all = [(); 2].map(|()| prepared(&gpu));
        let workspaces = [(); 2].map(|()| gpu.context.allocate(4096).unwrap());
        let streams = [(); 2].map(|()| gpu.context.stream().unwrap());
        for (index, ((plan, tensors), stream)) in all.iter().zip(&streams).enumerate() {
            let workspace = if is_right { &workspaces[index] } else { &workspaces[0] };
            Planned::new(plan, &spans(tensors), Some(workspace.span())).unwrap().run(stream).unwrap();
        }
        gpu.context.synchronize().unwrap();
    }

    a_convolution_must_read_initialised_memory: "that nobody has written", |is_right| {
        let gpu = Gpu::new();
        let (plan, tensors) = prepared(&gpu);
        let (workspace, fresh) = (gpu.context.allocate(4096).unwrap(), gpu.context.allocate(4096).unwrap());
        let [images, filters, results] = spans(&tensors);
        let filters = if is_right { filters } else { fresh.span() };
        Planned::new(&plan, &[images, filters, results], Some(workspace.span())).unwrap().run(&gpu.stream).unwrap();
        gpu.context.synchronize().unwrap();
    }

    a_convolution_must_not_overwrite_its_inputs: "writes what it reads", |is_right| {
        let gpu = Gpu::new();
        let (plan, tensors) = prepared(&gpu);
        let workspace = gpu.context.allocate(4096).unwrap();
        let [images, filters, results] = spans(&tensors);
        let one = gpu.context.zeros(8192).unwrap();
        let images = if is_right { images } else { one.span() };
        let results = if is_right { results } else { one.span() };
        Planned::new(&plan, &[images, filters, results], Some(workspace.span())).unwrap().run(&gpu.stream).unwrap();
        gpu.context.synchronize().unwrap();
    }
}
