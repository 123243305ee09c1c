//! The executor of PTX as a GPU: memories, kernels compiled when they are needed, products by definition.

use crate::nvrtc;
use bytemuck::Pod;
use switchyard_cuda::kernels::{Call, Program};
use switchyard_cuda::nvrtc::Nvrtc;
use switchyard_cuda_reference::{Device, Launch, Module, Span};
use switchyard_worker::gpu::{self, Matrix, Memory, Product, Work};

/// The architecture of the reference GPU, an H200.
const ARCHITECTURE: &str = "sm_90a";

pub struct Gpu {
    nvrtc: Nvrtc,
    pub device: Device,
    modules: Vec<(Program, Module)>,
    memories: Vec<(Memory, Span)>,
    seed: u64,
}

impl Gpu {
    /// `None` where there is no compiler.
    pub fn new(seed: u64) -> Option<Gpu> {
        let nvrtc = nvrtc::nvrtc()?;
        Some(Gpu { nvrtc, device: Device::default(), modules: Vec::new(), memories: Vec::new(), seed })
    }

    /// Memory that nobody has written.
    pub fn allocate(&mut self, memory: Memory, bytes: usize) -> Span {
        let span = self.device.allocate(&format!("{memory:?}"), bytes);
        self.memories.push((memory, span));
        span
    }

    pub fn upload<T: Pod>(&mut self, memory: Memory, values: &[T]) -> Span {
        let span = self.allocate(memory, size_of_val(values));
        self.device.write(span, values);
        span
    }

    pub fn place(&self, span: gpu::Span) -> Span {
        let (_, memory) = self.memories.iter().find(|(memory, _)| *memory == span.memory).unwrap();
        memory.part(span.at..span.at + span.bytes).unwrap()
    }

    pub fn run(&mut self, work: &Work<Span>) {
        match work {
            Work::Kernel(call) => self.launch(call),
            Work::Product(product) => self.multiply(product),
            Work::Copy { from, to } => {
                let numbers: Vec<u8> = self.device.download(*from);
                self.device.write(*to, &numbers);
            }
        }
    }

    pub fn launch(&mut self, call: &Call<Span>) {
        if !self.modules.iter().any(|(program, _)| program == call.program()) {
            let compiled = call.program().compile(&self.nvrtc, ARCHITECTURE).unwrap();
            self.modules.push((call.program().clone(), Module::parse(&compiled.ptx).unwrap()));
        }
        let (_, module) = self.modules.iter().find(|(program, _)| program == call.program()).unwrap();
        self.device.launch(module, &Launch::new(call, self.seed)).unwrap_or_else(|error| panic!("{error}"));
    }

    /// In 32 bits only.
    fn multiply(&mut self, product: &Product<Span>) {
        let Product { left, right, result, adds, .. } = product;
        let (rows, inner) = sides(left);
        let (depth, columns) = sides(right);
        assert_eq!(inner, depth, "sides of a product");
        let [a, b] = [left, right].map(|matrix| self.device.download::<f32>(matrix.memory));
        let mut sums = if *adds { self.device.download::<f32>(*result) } else { vec![0.0; rows * columns] };
        assert_eq!(sums.len(), rows * columns, "length of a product");
        for (index, sum) in sums.iter_mut().enumerate() {
            let (row, column) = (index / columns, index % columns);
            *sum += (0..inner).map(|k| a[at(left, row, k)] * b[at(right, k, column)]).sum::<f32>();
        }
        self.device.write(*result, &sums);
    }
}

/// Rows and columns as the product takes them.
fn sides(matrix: &Matrix<Span>) -> (usize, usize) {
    let Matrix { rows, columns, is_transposed, .. } = *matrix;
    if is_transposed { (columns, rows) } else { (rows, columns) }
}

/// Where the number in a row and column of the product's operand lies.
fn at(matrix: &Matrix<Span>, row: usize, column: usize) -> usize {
    if matrix.is_transposed { column * matrix.columns + row } else { row * matrix.columns + column }
}
