//! Every check finds an injected fault and its line, and accepts the same kernel without the fault.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)]

use std::sync::LazyLock;
use switchyard_cuda::kernels::Argument;
use switchyard_cuda_reference::compiler::nvrtc;
use switchyard_cuda_reference::{Counts, Device, Fault, Finding, Launch, LaunchError, Module};

const SOURCE: &str = include_str!("faults.cu");

/// The kernels of `faults.cu`.
fn module() -> &'static Module {
    static MODULE: LazyLock<Module> = LazyLock::new(|| {
        let options = ["--gpu-architecture=sm_90a", "-lineinfo"].map(str::to_owned);
        let compiled = nvrtc().compile(("faults.cu", SOURCE), &[], &options).unwrap();
        Module::parse(&compiled.ptx).unwrap()
    });
    &MODULE
}

/// Kernel, blocks, threads, and the kernel's count argument.
struct Case(&'static str, u32, u32, u32);

/// Runs a kernel on `x` with 256 values and `y` with 256 zeros.
fn run(module: &Module, Case(kernel, blocks, threads, count): &Case, seed: u64) -> Result<Counts, LaunchError> {
    let mut device = Device::default();
    let x = device.upload("x", &[1.0f32; 256]);
    let y = device.upload("y", &[0.0f32; 256]);
    let arguments = [Argument::Reads(x), Argument::Updates(y), Argument::Int(*count)];
    device.launch(
        module,
        &Launch { kernel, blocks: *blocks, threads: *threads, shared_bytes: 0, arguments: &arguments, seed },
    )
}

/// The finding of a kernel with seed 0. Under every seed, its line must be marked as faulty.
fn finding(case: &Case) -> Finding {
    let module = module();
    let found = |seed| match run(module, case, seed) {
        Err(LaunchError::Found(finding)) => *finding,
        other => panic!("{}: {other:?}", case.0),
    };
    let marker = format!("// fault: {}", case.0);
    let lines: Vec<u32> =
        (1..).zip(SOURCE.lines()).filter(|(_, line)| line.contains(&marker)).map(|(at, _)| at).collect();
    for seed in 0..4 {
        let finding = found(seed);
        assert!(lines.contains(&finding.line), "{lines:?}: {finding}");
        assert_eq!((finding.seed, finding.kernel.as_str()), (seed, case.0), "{finding}");
    }
    let first = found(0);
    println!("{first}");
    first
}

#[test]
fn an_index_past_the_end_is_reported_with_its_thread() {
    let found = finding(&Case("out_of_bounds", 5, 64, 256));
    assert_eq!((found.block, found.thread), (4, 0));
    let text = found.to_string();
    assert!(
        text.contains("block 4, thread 0: reads 4 bytes at byte 0 past the end of `x` (1024 bytes), out of bounds"),
        "{text}"
    );
}

#[test]
fn an_index_outside_a_shared_array_is_reported() {
    for (shift, thread, place) in [(1, 63, "at byte 0 past the end of"), (-1i32, 0, "4 bytes before")] {
        let found = finding(&Case("shared_out_of_bounds", 1, 64, shift as u32));
        let fault = &found.fault;
        assert!(matches!(fault, Fault::OutOfBounds { place: got, .. } if got.starts_with(place)), "{found}");
        assert_eq!(found.thread, thread, "{found}");
    }
    run(module(), &Case("shared_out_of_bounds", 1, 64, 0), 0).unwrap();
}

#[test]
fn a_misaligned_address_is_reported() {
    let found = finding(&Case("misaligned", 1, 32, 2));
    let place = "at byte 8 of `x` (1024 bytes)".to_owned();
    assert_eq!(found.fault, Fault::Misaligned { what: "reads", bytes: 16, place });
}

#[test]
fn reading_uninitialised_memory_is_reported() {
    let found = finding(&Case("never_written", 1, 128, 100));
    assert!(
        matches!(&found.fault, Fault::NeverWritten { bytes: 4, place } if place.contains("`shared memory`")),
        "{found}"
    );
    assert!((96..128).contains(&found.thread), "{found}");
    let page = include_str!("../../../docs/dev/gpu-testing.md");
    assert!(page.contains(&found.to_string()), "docs/dev/gpu-testing.md shows a finding other than {found}");
    let module = module();
    run(module, &Case("never_written", 1, 128, 128), 0).unwrap();
}

#[test]
fn a_missing_barrier_is_a_race_in_shared_memory() {
    let found = finding(&Case("shared_race", 1, 256, 256));
    assert!(matches!(found.fault, Fault::Race { block: 0, .. }), "{found}");
}

#[test]
fn lanes_of_a_warp_race_without_a_warp_barrier() {
    let found = finding(&Case("warp_race", 1, 32, 32));
    assert!(matches!(found.fault, Fault::Race { what: "reads", did: "wrote", .. }), "{found}");
    run(module(), &Case("warp_race_twin", 1, 32, 32), 0).unwrap();
}

#[test]
fn blocks_race_in_global_memory_without_atomics() {
    let found = finding(&Case("global_race", 3, 32, 256));
    assert!(matches!(found.fault, Fault::Race { did: "wrote", .. }), "{found}");
    run(module(), &Case("global_race_twin", 3, 32, 256), 0).unwrap();
}

#[test]
fn a_barrier_that_not_all_threads_reach_is_reported() {
    // Part of a warp, and whole warps.
    for (count, fault) in
        [(40, Fault::Barrier { reached: 8, threads: 32 }), (32, Fault::Barrier { reached: 32, threads: 64 })]
    {
        let found = finding(&Case("barrier_missed", 1, 64, count));
        assert_eq!(found.fault, fault);
    }
    run(module(), &Case("barrier_missed", 1, 64, 64), 0).unwrap();
}

#[test]
fn a_mask_with_inactive_lanes_is_reported() {
    let found = finding(&Case("mask", 1, 32, 16));
    assert_eq!(found.fault, Fault::Mask { mask: u32::MAX, active: 0xffff });
    run(module(), &Case("mask", 1, 32, 32), 0).unwrap();
}

#[test]
fn a_shuffle_from_an_inactive_lane_is_reported() {
    let found = finding(&Case("inactive_lane", 1, 32, 24));
    assert_eq!(found.fault, Fault::InactiveLane { lane: 24 });
    run(module(), &Case("inactive_lane", 1, 32, 23), 0).unwrap();
}

#[test]
fn a_barrier_of_part_of_a_warp_is_reported() {
    let found = finding(&Case("part_of_a_warp", 1, 32, 16));
    assert_eq!(found.fault, Fault::PartOfAWarp { mask: 0xffff });
    // A warp that has only these lanes.
    run(module(), &Case("part_of_a_warp", 1, 16, 16), 0).unwrap();
}

#[test]
fn an_undeclared_write_is_reported() {
    let found = finding(&Case("undeclared", 1, 32, 32));
    assert!(matches!(found.fault, Fault::Undeclared { what: "writes", bytes: 4, .. }), "{found}");
}

#[test]
fn an_access_outside_the_declared_part_of_an_allocation_is_reported() {
    let module = module();
    let mut device = Device::default();
    let x = device.upload("x", &[1.0f32; 256]).part(0..64).unwrap();
    let y = device.upload("y", &[0.0f32; 256]);
    let arguments = [Argument::Reads(x), Argument::Updates(y), Argument::Int(32)];
    let launch = Launch { kernel: "mask", blocks: 1, threads: 32, shared_bytes: 0, arguments: &arguments, seed: 0 };
    let Err(LaunchError::Found(found)) = device.launch(module, &launch) else { panic!("no finding") };
    assert!(
        matches!(&found.fault, Fault::Undeclared { place, .. } if place.starts_with("at byte 64 of `x`")),
        "{found}"
    );
}

#[test]
fn a_kernel_that_uses_an_absent_argument_is_reported() {
    let module = module();
    let mut device = Device::default();
    let y = device.upload("y", &[0.0f32; 256]);
    let arguments = [Argument::Absent, Argument::Updates(y), Argument::Int(32)];
    let launch = Launch { kernel: "mask", blocks: 1, threads: 32, shared_bytes: 0, arguments: &arguments, seed: 0 };
    let Err(LaunchError::Found(found)) = device.launch(module, &launch) else { panic!("no finding") };
    assert!(matches!(&found.fault, Fault::OutOfBounds { what: "reads", .. }), "{found}");
}

#[test]
fn an_endless_kernel_is_reported() {
    let found = finding(&Case("endless", 1, 32, 0));
    assert!(matches!(found.fault, Fault::Endless(_)), "{found}");
}

#[test]
fn a_fault_in_an_inlined_function_names_both_lines() {
    let found = finding(&Case("inlined", 1, 256, 256));
    let line = SOURCE.lines().position(|line| line.contains("// inlined here")).unwrap() as u32 + 1;
    assert_eq!(found.inlined_at, line, "{found}");
}

#[test]
fn sectors_and_bank_conflicts_are_counted() {
    let module = module();
    let counts = run(module, &Case("strided", 1, 32, 0), 0).unwrap();
    let [x, _] = counts.of("x");
    // Each lane has its own sector for its 4 bytes.
    assert_eq!((x.requested % 128, x.moved), (0, 8 * x.requested), "{counts:?}");
    let [_, y] = counts.of("y");
    assert_eq!((y.requested, y.moved), (128, 128));
    // Writing 32 rows has no conflicts; reading 32 columns takes 32 passes each.
    assert_eq!((counts.shared.accesses, counts.shared.conflicts), (64, 32 * 31), "{counts:?}");
}

#[test]
fn a_launch_that_does_not_fit_the_kernel_is_refused() {
    let module = module();
    let mut device = Device::default();
    let x = device.upload("x", &[1.0f32; 256]);
    let good = Launch {
        kernel: "mask",
        blocks: 1,
        threads: 32,
        shared_bytes: 0,
        arguments: &[Argument::Reads(x), Argument::Writes(x), Argument::Int(32)],
        seed: 0,
    };
    let mut refused = |launch: Launch<'_>, text: &str| {
        let Err(LaunchError::Refused { text: got, .. }) = device.launch(module, &launch) else { panic!("not refused") };
        assert!(got.contains(text), "{got}");
    };
    refused(Launch { kernel: "missing", ..good }, "not in the module, which has ");
    refused(Launch { arguments: &good.arguments[..2], ..good }, "arguments of [8, 8] bytes, expected [8, 8, 4]");
    refused(Launch { threads: 2048, ..good }, "blocks of 2048 threads, expected 1 to 1024");
    refused(Launch { blocks: 0, ..good }, "no blocks");
    refused(Launch { shared_bytes: 64, ..good }, "64 bytes of shared memory for a kernel that declares none");
}
