use super::disassembler::{Section, sections};
use std::sync::LazyLock;
use switchyard_cuda::kernels::activation::{Activation, Function};
use switchyard_cuda::kernels::attention::{Attention, Shape};
use switchyard_cuda::kernels::average_pool::AveragePool;
use switchyard_cuda::kernels::batch_norm::BatchNorm;
use switchyard_cuda::kernels::cross_entropy::CrossEntropy;
use switchyard_cuda::kernels::elementwise::Elementwise;
use switchyard_cuda::kernels::embedding::Embedding;
use switchyard_cuda::kernels::fp8::{Fp8, Quantization};
use switchyard_cuda::kernels::gather::Gather;
use switchyard_cuda::kernels::input::Input;
use switchyard_cuda::kernels::layer_norm::LayerNorm;
use switchyard_cuda::kernels::max_pool::MaxPool;
use switchyard_cuda::kernels::optimizer::{Optimizer, Rule};
use switchyard_cuda::kernels::windows::Windows;
use switchyard_cuda::kernels::{Element, Program, Rows, gradients};
use switchyard_cuda_reference::compiler::{compiled, nvrtc};

/// A100, H100 and H200, B200, and consumer GPUs of the B200's family.
pub(super) const ARCHITECTURES: [&str; 4] = ["sm_80", "sm_90a", "sm_100a", "sm_120"];

/// A program compiled for an architecture.
pub(super) struct Built {
    pub name: String,
    pub architecture: &'static str,
    log: String,
    pub sections: Vec<Section>,
}

/// All programs for all architectures, compiled once for all tests that inspect them, with one
/// thread per architecture.
pub(super) fn built() -> &'static [Built] {
    static BUILT: LazyLock<Vec<Built>> = LazyLock::new(|| {
        let programs = programs();
        let of = |architecture: &'static str| {
            // An A100 cannot convert to FP8.
            let programs = programs.iter().enumerate();
            let programs = programs.filter(|(_, (name, _))| architecture != "sm_80" || !name.contains("fp8"));
            let build = |(number, (name, program)): (usize, &(String, Program))| {
                let compiled = compiled(program, architecture);
                let sections = sections(&compiled.cubin);
                (number, Built { name: name.clone(), architecture, log: compiled.log, sections })
            };
            programs.map(build).collect::<Vec<(usize, Built)>>()
        };
        std::thread::scope(|scope| {
            let threads = ARCHITECTURES.map(|architecture| scope.spawn(move || of(architecture)));
            let mut all: Vec<(usize, Built)> = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
            all.sort_by_key(|(number, _)| *number);
            all.into_iter().map(|(_, built)| built).collect()
        })
    });
    &BUILT
}

fn programs() -> Vec<(String, Program)> {
    let mut programs = vec![("gradients".to_owned(), gradients::program())];
    for rule in [Rule::Sgd, Rule::Adam, Rule::Lamb, Rule::Lars] {
        programs.push((format!("{rule:?}"), Optimizer { rule, copy: Element::Bf16 }.program()));
    }
    for to in [Fp8::E4m3, Fp8::E5m2] {
        let rows = Rows { element: Element::Bf16, width: 768, pitch: 768 };
        programs.push((format!("fp8 {to:?} 768"), Quantization::new(rows, 16, to).unwrap().program()));
    }
    for (element, name) in [(Element::F32, "f32"), (Element::Bf16, "bf16"), (Element::F16, "f16")] {
        for width in [768, 1024, 1600, 4096] {
            let norm = LayerNorm::new(Rows { element, width, pitch: width }, 1).unwrap();
            programs.push((format!("layer norm {name} {width}"), norm.program()));
        }
        for head_size in [64, 80, 128] {
            let shape = Shape { element, batch: 1, context: 1, heads: 1, head_size, causal: true };
            programs.push((format!("attention {name} {head_size}"), Attention::new(shape).unwrap().program()));
        }
        let gelu = Activation::new(Function::Gelu, Rows { element, width: 3072, pitch: 3072 }, 1).unwrap();
        programs.push((format!("activation {name} 3072"), gelu.program()));
        let from_f32 = Elementwise { from: Element::F32, to: element };
        programs.push((format!("elementwise f32 to {name}"), from_f32.program()));
        let embedding = Embedding::new(Rows { element, width: 768, pitch: 768 }, 1, 1).unwrap();
        programs.push((format!("embedding {name} 768"), embedding.program()));
        let gather = Gather::new(Rows { element, width: 768, pitch: 768 }, 1, 1).unwrap();
        programs.push((format!("gather {name} 768"), gather.program()));
        let loss = CrossEntropy::new(Rows { element, width: 50_257, pitch: 50_304 }, 1).unwrap();
        programs.push((format!("cross entropy {name} 50257"), loss.program()));
        programs.extend(images(element, name));
    }
    programs
}

/// Additional programs of image networks.
fn images(element: Element, name: &str) -> Vec<(String, Program)> {
    let rows = |width: u32| Rows { element, width, pitch: width.next_multiple_of(8) };
    let pool = Windows { height: 112, width: 112, kernel: 3, stride: 2, padding: 1 };
    vec![
        (format!("input {name} pixels"), Input::new(rows(3), 1, Some(3)).unwrap().program()),
        (format!("input {name} 784"), Input::new(rows(784), 1, None).unwrap().program()),
        (format!("max pool {name} 64"), MaxPool::new(rows(64), 1, pool).unwrap().program()),
        (format!("batch norm {name} 64"), BatchNorm::new(rows(64), 2).unwrap().program()),
        (format!("batch norm {name} 2048"), BatchNorm::new(rows(2048), 2).unwrap().program()),
        (format!("average pool {name} 2048"), AveragePool::new(rows(2048), 1, 49).unwrap().program()),
    ]
}

/// Registers and shared memory of each kernel, from the compiler's log.
///
/// # Errors
/// A kernel spills.
fn resources(log: &str) -> Result<Vec<String>, String> {
    let mut kernels = Vec::new();
    for line in log.lines() {
        if let Some(name) = line.split("Compiling entry function '").nth(1) {
            kernels.push(name.split('\'').next().unwrap().to_owned());
        } else if line.contains("spill stores") {
            if !line.contains(" 0 bytes spill stores, 0 bytes spill loads") {
                return Err(format!("{}: {}", kernels.last().unwrap(), line.trim()));
            }
        } else if let Some(used) = line.split(": Used ").nth(1) {
            let words: Vec<&str> = used
                .split(", ")
                .filter(|part| !["barriers", "cmem"].iter().any(|other| part.contains(other)))
                .collect();
            *kernels.last_mut().unwrap() += &format!(": {}", words.join(", "));
        }
    }
    // The compiler's order is arbitrary.
    kernels.sort();
    Ok(kernels)
}

#[test]
fn no_kernel_spills_on_any_architecture() {
    let built = built();
    let mut table = String::new();
    for Built { name, architecture, log, .. } in built {
        let kernels = resources(log).unwrap_or_else(|text| panic!("{name}, {architecture}: {text}"));
        assert!(kernels.iter().all(|kernel| kernel.contains("registers")), "{log}");
        table += &format!("{name}, {architecture}\n  {}\n", kernels.join("\n  "));
    }
    insta::assert_snapshot!("resources", table);
}

#[test]
fn a_spilling_kernel_is_detected() {
    // Keeps 64 values alive across a barrier, in at most 32 registers.
    const SOURCE: &str = "extern \"C\" __global__ void __launch_bounds__(1024, 2) spilling(const float* x, float* y) {
        float held[64];
        for (int i = 0; i < 64; i++) held[i] = x[i * 1024 + threadIdx.x];
        __syncthreads();
        for (int i = 0; i < 64; i++) y[i * 1024 + threadIdx.x] = held[i] * held[63 - i];
    }";
    let nvrtc = nvrtc();
    let options = ["--gpu-architecture=sm_90a", "--ptxas-options=-v"].map(str::to_owned);
    let compiled = nvrtc.compile(("spilling.cu", SOURCE), &[], &options).unwrap();
    let text = resources(&compiled.log).unwrap_err();
    assert!(text.starts_with("spilling: ") && text.contains("bytes spill stores"), "{text}");
}
