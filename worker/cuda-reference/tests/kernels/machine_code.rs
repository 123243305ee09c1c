//! Inspects the machine code that ptxas generates for the kernels.

use super::disassembler::{Disassembler, Instruction, Kernel, sections};
use super::resources::{ARCHITECTURES, Built, built};
use std::collections::BTreeMap;
use switchyard_cuda_reference::compiler::nvrtc;

/// Memory instructions that [`row`] counts or [`faults`] rejects, and constant reads.
const KNOWN: [&str; 18] = [
    "LDG", "STG", "LDS", "STS", "LDSM", "LDC", "ULDC", "LDCU", "LDL", "STL", "LD", "ST", "ATOM", "ATOMG", "ATOMS",
    "RED", "REDG", "REDUX",
];

impl Kernel {
    fn count(&self, is: impl Fn(&Instruction) -> bool) -> usize {
        self.instructions.iter().filter(|instruction| is(instruction)).count()
    }

    fn of(&self, bases: &[&str]) -> usize {
        self.count(|instruction| bases.contains(&instruction.base()))
    }
}

/// Violations of what a kernel must and must not contain.
fn faults(kernel: &Kernel) -> Vec<String> {
    let mut faults = Vec::new();
    let mut none = |count: usize, what: &str| {
        if count > 0 {
            faults.push(format!("{}: {count} {what}, expected none", kernel.name));
        }
    };
    none(kernel.of(&["LDL", "STL"]), "accesses to local memory");
    none(kernel.count(|it| it.code.starts_with("ATOMS.CAST.SPIN")), "loops of compare-and-swap on shared memory");
    none(kernel.of(&["LD", "ST", "ATOM"]), "accesses through generic addresses");
    none(kernel.of(&["HMMA", "LDSM"]), "tensor core instructions");
    let mut refused = BTreeMap::<String, usize>::new();
    for Instruction { code, callee } in &kernel.instructions {
        match callee {
            // Slow paths of division, square root and the like, for very small or large operands.
            Some(name) if name.contains("$__cuda_sm") => {}
            Some(name) => *refused.entry(format!("calls of `{name}`")).or_default() += 1,
            None => {
                let base = code.split('.').next().unwrap_or_default();
                let is_memory = ["LD", "ST", "ATOM", "RED"].iter().any(|start| base.starts_with(start));
                if is_memory && !KNOWN.contains(&base) {
                    *refused.entry(format!("`{base}`, which no check covers")).or_default() += 1;
                }
            }
        }
    }
    refused.iter().for_each(|(what, count)| none(*count, what));
    faults
}

/// A kernel in the golden table, without zero counts.
fn row(kernel: &Kernel) -> String {
    let wide = |base: &str| kernel.count(|it| it.base() == base && it.is_wide());
    let mut parts = Vec::new();
    for (base, what) in
        [("LDG", "global loads"), ("STG", "global stores"), ("LDS", "shared loads"), ("STS", "shared stores")]
    {
        if kernel.of(&[base]) > 0 {
            parts.push(format!("{} {what} ({} of 128 bits)", kernel.of(&[base]), wide(base)));
        }
    }
    let counted: [(&[&str], &str); 2] =
        [(&["BAR"], "barriers"), (&["ATOM", "ATOMG", "ATOMS", "RED", "REDG"], "atomics")];
    for (bases, what) in counted {
        if kernel.of(bases) > 0 {
            parts.push(format!("{} {what}", kernel.of(bases)));
        }
    }
    let mut calls = BTreeMap::<&str, usize>::new();
    for callee in kernel.instructions.iter().filter_map(|it| it.callee.as_deref()) {
        // `$__internal_0_$__cuda_sm20_sqrt_rn_f32_slowpath`
        let name = callee.split("$__cuda_sm").nth(1).and_then(|rest| rest.split_once('_'));
        *calls.entry(name.map_or(callee, |(_, name)| name)).or_default() += 1;
    }
    parts.extend(calls.iter().map(|(name, count)| format!("{count} calls of {name}")));
    format!("{}: {}", kernel.name, parts.join(", "))
}

/// Kernels of a program compiled separately.
fn compiled_separately(disassembler: &Disassembler, source: &str, architecture: &str) -> Vec<Kernel> {
    let options = [format!("--gpu-architecture={architecture}")];
    let compiled = nvrtc().compile(("test.cu", source), &[], &options).unwrap();
    let mut kernels = disassembler.kernels(architecture, sections(&compiled.cubin).iter());
    kernels.sort_by(|one, other| one.name.cmp(&other.name));
    kernels
}

#[test]
fn machine_code_is_free_of_slow_instructions_on_every_architecture() {
    let (disassembler, built) = (Disassembler::new(), built());
    let mut table = String::new();
    let mut all = Vec::new();
    for architecture in ARCHITECTURES {
        let built: Vec<&Built> = built.iter().filter(|built| built.architecture == architecture).collect();
        let mut kernels =
            disassembler.kernels(architecture, built.iter().flat_map(|built| &built.sections)).into_iter();
        for Built { name, sections, .. } in built {
            let mut kernels: Vec<Kernel> = kernels.by_ref().take(sections.len()).collect();
            // The compiler's order is arbitrary.
            kernels.sort_by(|one, other| one.name.cmp(&other.name));
            let found = kernels.iter().flat_map(faults);
            all.extend(found.map(|fault| format!("{name}, {architecture}: {fault}")));
            if architecture == super::ARCHITECTURE {
                table += &format!("{name}\n  {}\n", kernels.iter().map(row).collect::<Vec<_>>().join("\n  "));
            }
        }
    }
    assert!(all.is_empty(), "{} fault(s):\n{}", all.len(), all.join("\n"));
    insta::assert_snapshot!("machine_code", table);
}

#[test]
fn every_kind_of_violation_in_machine_code_is_detected() {
    const SOURCE: &str = "extern \"C\" {
        __global__ void calling(float* x);
        __device__ __noinline__ float helper(float x) { return x * x + 1; }
        __global__ void calling(float* x) { *x = helper(*x) + helper(x[1]); }
        __global__ void generic(float* x, int n) {
            __shared__ float own[32];
            own[threadIdx.x] = n;
            __syncthreads();
            float* place = n > threadIdx.x ? own : x;
            *x = place[n];
        }
        __global__ void local(float* x, const int* at) {
            float held[16];
            for (int i = 0; i < 16; i++) held[i] = x[i];
            held[*at] = 0;
            for (int i = 0; i < 16; i++) x[i] = held[at[i]];
        }
        __global__ void spinning(float* x) {
            __shared__ float sum;
            if (threadIdx.x == 0) sum = 0;
            __syncthreads();
            atomicAdd(&sum, x[threadIdx.x]);
            __syncthreads();
            *x = sum;
        }
        __global__ void tensor(float* x) {
            asm volatile(\"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, \"
                         \"{%0, %1, %2, %3};\" : \"+f\"(x[0]), \"+f\"(x[1]), \"+f\"(x[2]), \"+f\"(x[3])
                         : \"r\"(1), \"r\"(2), \"r\"(3), \"r\"(4), \"r\"(5), \"r\"(6));
        }
    }";
    let disassembler = Disassembler::new();
    for architecture in ARCHITECTURES {
        let kernels = compiled_separately(&disassembler, SOURCE, architecture);
        let found: Vec<String> = kernels.iter().flat_map(faults).collect();
        let words = [
            "2 calls of `$calling$helper`",
            "generic addresses",
            "local memory",
            "compare-and-swap",
            "tensor core instructions",
        ];
        assert_eq!(found.len(), words.len(), "{architecture}: {found:#?}");
        for ((fault, word), kernel) in found.iter().zip(words).zip(&kernels) {
            assert!(
                fault.starts_with(&format!("{}: ", kernel.name)) && fault.contains(word),
                "{architecture}: {fault}"
            );
        }
    }
    let unknown = Instruction { code: "LDGSTS.E.BYPASS.128".to_owned(), callee: None };
    let kernel = Kernel { name: "copying".to_owned(), instructions: vec![unknown] };
    assert_eq!(faults(&kernel), ["copying: 1 `LDGSTS`, which no check covers, expected none"]);
}

#[test]
fn accesses_of_128_bits_are_counted_separately() {
    const SOURCE: &str = "extern \"C\" {
        __global__ void narrow(float* x, const float* y) { x[threadIdx.x] = y[threadIdx.x] / y[threadIdx.x + 1]; }
        struct alignas(16) Four { float x, y, z, w; };
        __global__ void wide(Four* x, const Four* y, int* count) {
            __shared__ Four held[32];
            held[threadIdx.x] = y[threadIdx.x];
            __syncthreads();
            x[threadIdx.x] = held[31 - threadIdx.x];
            atomicAdd(count, 1);
        }
    }";
    let disassembler = Disassembler::new();
    let kernels = compiled_separately(&disassembler, SOURCE, super::ARCHITECTURE);
    let rows: Vec<String> = kernels.iter().map(row).collect();
    let expected = [
        "narrow: 2 global loads (0 of 128 bits), 1 global stores (0 of 128 bits), 1 calls of div_rn_noftz_f32_slowpath",
        "wide: 1 global loads (1 of 128 bits), 1 global stores (1 of 128 bits), 1 shared loads (1 of 128 bits), 1 shared stores \
         (1 of 128 bits), 1 barriers, 1 atomics",
    ];
    assert_eq!(rows, expected);
}
