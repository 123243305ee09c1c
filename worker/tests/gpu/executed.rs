//! The PTX executor as a GPU: memories, kernels compiled on demand, matrix products and
//! convolutions by definition.

use bytemuck::Pod;
use std::sync::{Arc, Mutex};
use switchyard_cuda::convolution::{Convolution, Direction};
use switchyard_cuda::cublaslt::{Format, Matrix, Product};
use switchyard_cuda::kernels::{Call, Program};
use switchyard_cuda::operation::Operation;
use switchyard_cuda_reference::compiler::compiled;
use switchyard_cuda_reference::{Device, Launch, Module, Span, fp8};
use switchyard_worker::cpu::{bf16, f16};
use switchyard_worker::lowering::{self, Contents, Cudnn, Initial, Memory, Work};

/// Architecture of the reference GPU, an H200.
const ARCHITECTURE: &str = "sm_90a";

/// Compiled modules, shared by all tests.
static MODULES: Mutex<Vec<(Program, Arc<Module>)>> = Mutex::new(Vec::new());

pub struct Gpu {
    pub device: Device,
    memories: Vec<(Memory, Span)>,
    seed: u64,
}

impl Gpu {
    pub fn new(seed: u64) -> Gpu {
        Gpu { device: Device::default(), memories: Vec::new(), seed }
    }

    /// Allocates uninitialised memory.
    pub fn allocate(&mut self, memory: Memory, bytes: usize) -> Span {
        let span = self.device.allocate(&format!("{memory:?}"), bytes);
        self.memories.push((memory, span));
        span
    }

    pub fn hold(&mut self, contents: &Contents) {
        match &contents.initial {
            Initial::Unwritten => self.allocate(contents.memory, contents.bytes),
            Initial::Zeros => self.upload(contents.memory, &vec![0u8; contents.bytes]),
            Initial::Bytes(bytes) => self.upload(contents.memory, bytes),
        };
    }

    pub fn upload<T: Pod>(&mut self, memory: Memory, values: &[T]) -> Span {
        let span = self.allocate(memory, size_of_val(values));
        self.device.write(span, values);
        span
    }

    pub fn place(&self, span: lowering::Span) -> Span {
        self.at(span.memory).part(span.at..span.at + span.bytes).unwrap()
    }

    /// The span of a memory.
    pub fn at(&self, memory: Memory) -> Span {
        self.memories.iter().find(|(known, _)| *known == memory).unwrap().1
    }

    pub fn run(&mut self, work: &Work<Span>) {
        match work {
            Work::Kernel(call) => self.launch(call),
            Work::Product(product) => self.multiply(product),
            Work::Cudnn(Cudnn { operation: Operation::Convolution(of), memory, .. }) => self.convolve(of, memory),
            Work::Cudnn(_) => unreachable!("cuDNN's attention is tested by `gpu_engine`"),
            Work::Copy { from, to } => {
                for row in 0..from.rows {
                    let numbers: Vec<u8> = self.device.download(part(from, row));
                    self.device.write(part(to, row), &numbers);
                }
            }
        }
    }

    pub fn launch(&mut self, call: &Call<Span>) {
        let module = self.compiled(call.program());
        self.device.launch(&module, &Launch::new(call, self.seed)).unwrap_or_else(|error| panic!("{error}"));
    }

    fn compiled(&self, program: &Program) -> Arc<Module> {
        let mut modules = MODULES.lock().unwrap();
        if let Some((_, module)) = modules.iter().find(|(known, _)| known == program) {
            return Arc::clone(module);
        }
        let module = Arc::new(Module::parse(&compiled(program, ARCHITECTURE).ptx).unwrap());
        modules.push((program.clone(), Arc::clone(&module)));
        module
    }

    /// Accumulates in f32.
    fn multiply(&mut self, product: &Product<Span>) {
        let Product { left, right, result, addend, epilogue, scales, .. } = product;
        assert!(epilogue.is_none(), "cuBLASLt epilogues are tested by `gpu_engine`");
        let [left, right] = [left, right].map(|matrix| self.rows_of(matrix));
        let scale: f32 = scales.iter().flatten().map(|scale| self.device.download::<f32>(*scale)[0]).product();
        assert_eq!((left.len(), right[0].len()), (result.rows, result.columns), "sides of a product");
        for (row, left) in left.iter().enumerate() {
            assert_eq!(left.len(), right.len(), "inner side of a product");
            let mut sums = vec![0.0f32; result.columns];
            for (factor, right) in left.iter().zip(&right) {
                sums.iter_mut().zip(right).for_each(|(sum, x)| *sum += factor * x);
            }
            sums.iter_mut().for_each(|sum| *sum *= scale);
            if let Some(addend) = addend {
                let old = self.row_of(addend, row);
                sums.iter_mut().zip(old).for_each(|(sum, old)| *sum += old);
            }
            self.write_row(result, row, &sums);
        }
    }

    /// Accumulates in f64: naive f32 sums over all pixels lose more than the CPU's do.
    fn convolve(&mut self, operation: &Convolution, memory: &[Span]) {
        let Convolution { height, width, channels, filters: outputs, window, stride, padding, .. } = *operation;
        let [images, filters, results] = *memory else { panic!("{} memories of a convolution", memory.len()) };
        let [tall, wide] = operation.result().unwrap();
        let format = Format::from(operation.element);
        let matrix =
            |memory, rows, columns, pitch| Matrix { memory, rows, columns, pitch, format, is_transposed: false };
        let matrices = [
            matrix(images, operation.images * height * width, channels, operation.pitch),
            matrix(filters, outputs * window * window, channels, channels),
            matrix(results, operation.images * tall * wide, outputs, operation.result_pitch),
        ];
        let written = operation.direction.written();
        let mut numbers: [Vec<Vec<f64>>; 3] = std::array::from_fn(|at| match at == written && !operation.adds {
            true => vec![vec![0.0; matrices[at].columns]; matrices[at].rows],
            false => {
                let rows = self.rows_of(&matrices[at]).into_iter();
                rows.map(|row| row.into_iter().map(f64::from).collect()).collect()
            }
        });
        let [images, filters, results] = &mut numbers;
        let add =
            |to: &mut Vec<f64>, factor: f64, x: &[f64]| to.iter_mut().zip(x).for_each(|(to, x)| *to += factor * x);
        let place = |result: usize, tap: usize, side: usize| {
            (result * stride + tap).checked_sub(padding).filter(|place| *place < side)
        };
        for (result, y) in results.iter_mut().enumerate() {
            for tap in 0..window * window {
                let (p, q, r, s) = (result / wide % tall, result % wide, tap / window, tap % window);
                let (Some(h), Some(w)) = (place(p, r, height), place(q, s, width)) else { continue };
                let x = &mut images[(result / wide / tall * height + h) * width + w];
                for (k, y) in y.iter_mut().enumerate() {
                    let filter = &mut filters[k * window * window + tap];
                    match operation.direction {
                        Direction::Forward => *y += x.iter().zip(&*filter).map(|(x, w)| x * w).sum::<f64>(),
                        Direction::Images => add(x, *y, filter),
                        Direction::Filters => add(filter, *y, x),
                    }
                }
            }
        }
        for (row, values) in numbers[written].iter().enumerate() {
            let values: Vec<f32> = values.iter().map(|value| *value as f32).collect();
            self.write_row(&matrices[written], row, &values);
        }
    }

    fn write_row(&mut self, matrix: &Matrix<Span>, row: usize, values: &[f32]) {
        let to = part(matrix, row);
        match matrix.format {
            Format::F32 => self.device.write(to, values),
            Format::Bf16 => self.device.write(to, &values.iter().copied().map(bf16::from_f32).collect::<Vec<_>>()),
            Format::F16 => self.device.write(to, &values.iter().copied().map(f16::from_f32).collect::<Vec<_>>()),
            Format::Fp8(_) => unreachable!("results are never FP8"),
        }
    }

    /// The rows after transposition.
    fn rows_of(&self, matrix: &Matrix<Span>) -> Vec<Vec<f32>> {
        let rows: Vec<Vec<f32>> = (0..matrix.rows).map(|row| self.row_of(matrix, row)).collect();
        if !matrix.is_transposed {
            return rows;
        }
        (0..matrix.columns).map(|column| rows.iter().map(|row| row[column]).collect()).collect()
    }

    fn row_of(&self, matrix: &Matrix<Span>, row: usize) -> Vec<f32> {
        let from = part(matrix, row);
        match matrix.format {
            Format::F32 => self.device.download(from),
            Format::Bf16 => self.device.download::<bf16>(from).into_iter().map(bf16::to_f32).collect(),
            Format::F16 => self.device.download::<f16>(from).into_iter().map(f16::to_f32).collect(),
            Format::Fp8(format) => {
                let format = fp8::Fp8::from(format);
                self.device.download::<u8>(from).into_iter().map(|bits| format.decoded(bits)).collect()
            }
        }
    }
}

/// A row of a matrix.
fn part(matrix: &Matrix<Span>, row: usize) -> Span {
    let (start, size) = (row * matrix.pitch, matrix.format.bytes());
    matrix.memory.part(size * start..size * (start + matrix.columns)).unwrap()
}
