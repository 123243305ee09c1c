//! Each kind of finding is reported for an injected misuse under every seed, and never for the
//! correct program. The programs call the driver's C API directly, because safe code cannot do most
//! of this.
#![allow(unsafe_code, clippy::unwrap_used, non_snake_case)]

mod child;

use child::misuse_test;
use std::ffi::{CStr, c_char, c_void};
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::ptr::null_mut;
// Also linked for its functions.
use switchyard_cuda_libraries::finding::PREFIX;

type Pointer = *mut c_void;

unsafe extern "C" {
    fn cuInit(flags: u32) -> i32;
    fn cuDevicePrimaryCtxRetain(context: *mut Pointer, device: i32) -> i32;
    fn cuCtxSetCurrent(context: Pointer) -> i32;
    fn cuCtxSynchronize() -> i32;
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> i32;
    fn cuMemFree_v2(address: u64) -> i32;
    fn cuMemHostAlloc(address: *mut Pointer, bytes: usize, flags: u32) -> i32;
    fn cuMemFreeHost(address: Pointer) -> i32;
    fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) -> i32;
    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: Pointer) -> i32;
    fn cuMemcpyDtoHAsync_v2(to: Pointer, from: u64, bytes: usize, stream: Pointer) -> i32;
    fn cuMemsetD8Async(to: u64, byte: u8, bytes: usize, stream: Pointer) -> i32;
    fn cuModuleLoadData(module: *mut Pointer, image: *const c_void) -> i32;
    fn cuModuleUnload(module: Pointer) -> i32;
    fn cuModuleGetFunction(function: *mut Pointer, module: Pointer, name: *const c_char) -> i32;
    fn cuLaunchKernel(
        function: Pointer,
        blocks: u32,
        blocks_y: u32,
        blocks_z: u32,
        threads: u32,
        threads_y: u32,
        threads_z: u32,
        shared_bytes: u32,
        stream: Pointer,
        arguments: *mut Pointer,
        extra: *mut Pointer,
    ) -> i32;
    fn cuStreamCreate(stream: *mut Pointer, flags: u32) -> i32;
    fn cuStreamSynchronize(stream: Pointer) -> i32;
    fn cuStreamWaitEvent(stream: Pointer, event: Pointer, flags: u32) -> i32;
    fn cuEventCreate(event: *mut Pointer, flags: u32) -> i32;
    fn cuEventRecord(event: Pointer, stream: Pointer) -> i32;
    fn cuEventQuery(event: Pointer) -> i32;
}

/// Makes calls that must succeed.
macro_rules! call {
    ($($function:ident($($argument:expr),* $(,)?);)*) => {$(
        // SAFETY: per the driver's header, except for injected misuse, which the library detects
        // before acting on it.
        assert_eq!(unsafe { $function($($argument),*) }, 0, stringify!($function));
    )*};
}

const BYTES: usize = 256;
const NON_BLOCKING: u32 = 1;

/// Two unordered streams.
fn streams() -> [Pointer; 2] {
    let mut context = null_mut();
    call! {
        cuInit(0);
        cuDevicePrimaryCtxRetain(&raw mut context, 0);
        cuCtxSetCurrent(context);
    }
    [(); 2].map(|()| {
        let mut stream = null_mut();
        call! { cuStreamCreate(&raw mut stream, NON_BLOCKING); }
        stream
    })
}

fn buffer() -> u64 {
    let mut address = 0;
    call! { cuMemAlloc_v2(&raw mut address, BYTES); }
    address
}

fn pinned() -> Pointer {
    let mut address = null_mut();
    call! { cuMemHostAlloc(&raw mut address, BYTES, 0); }
    address
}

fn event() -> Pointer {
    let mut event = null_mut();
    call! { cuEventCreate(&raw mut event, 2); }
    event
}

fn synchronize() {
    call! { cuCtxSynchronize(); }
}

fn set(host: Pointer, byte: u8) {
    // SAFETY: a byte of pinned memory.
    unsafe { host.cast::<u8>().write_volatile(byte) };
}

/// Kernel `store`: each thread writes a word through its first argument, starting at the second.
const MODULE: &CStr = c"\x7fELF switchyard reference: PTX
.version 9.0
.target sm_90
.address_size 64
.visible .entry store(
.param .u64 store_param_0,
.param .u32 store_param_1
)
{
.reg .b32 %r<5>;
.reg .b64 %rd<5>;
ld.param.u64 %rd1, [store_param_0];
ld.param.u32 %r1, [store_param_1];
cvta.to.global.u64 %rd2, %rd1;
mov.u32 %r2, %tid.x;
add.s32 %r3, %r2, %r1;
mul.wide.s32 %rd3, %r3, 4;
add.s64 %rd4, %rd2, %rd3;
st.global.u32 [%rd4], %r3;
ret;
}
";

fn module() -> Pointer {
    let mut module = null_mut();
    call! { cuModuleLoadData(&raw mut module, MODULE.as_ptr().cast()); }
    module
}

/// Launches `store` with 32 threads.
fn store(module: Pointer, stream: Pointer, to: u64, first: u32) {
    let (mut function, mut to, mut first) = (null_mut(), to, first);
    let mut arguments = [(&raw mut to).cast(), (&raw mut first).cast()];
    call! {
        cuModuleGetFunction(&raw mut function, module, c"store".as_ptr());
        cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, arguments.as_mut_ptr(), null_mut());
    }
}

misuse_test! {
    two_streams_using_the_same_bytes_need_an_event: "with no order between", |is_right| {
        let ([a, b], x, event, module) = (streams(), buffer(), event(), module());
        store(module, a, x, 0);
        call! { cuEventRecord(event, a); }
        if is_right {
            call! { cuStreamWaitEvent(b, event, 0); }
        }
        // The last byte of the 32 words.
        call! { cuMemsetD8Async(x + 127, 1, 1, b); }
        synchronize();
    }

    an_event_recorded_too_early_orders_nothing: "with no order between", |is_right| {
        let ([a, b], x, event) = (streams(), buffer(), event());
        if !is_right {
            call! { cuEventRecord(event, a); }
        }
        call! { cuMemsetD8Async(x, 1, BYTES, a); }
        if is_right {
            call! { cuEventRecord(event, a); }
        }
        call! { cuStreamWaitEvent(b, event, 0); cuMemsetD8Async(x, 2, BYTES, b); }
        synchronize();
    }

    pinned_memory_must_not_change_until_its_copy_has_run: "the host changed byte 0 of 256 bytes of pinned memory", |is_right| {
        let ([a, _], x, host) = (streams(), buffer(), pinned());
        call! { cuMemcpyHtoDAsync_v2(x, host, BYTES, a); }
        if is_right {
            synchronize();
        }
        set(host, 1);
        synchronize();
    }

    the_target_of_a_queued_copy_must_not_be_written: "the host changed byte 0 of 256 bytes of pinned memory", |is_right| {
        let ([a, _], x, host) = (streams(), buffer(), pinned());
        call! { cuMemsetD8Async(x, 1, BYTES, a); cuMemcpyDtoHAsync_v2(host, x, BYTES, a); }
        if is_right {
            synchronize();
        }
        set(host, 2);
        synchronize();
    }

    two_copies_of_the_same_pinned_memory_must_be_ordered: "with no order between", |is_right| {
        let ([a, b], x, y, host) = (streams(), buffer(), buffer(), pinned());
        call! {
            cuMemsetD8Async(x, 1, BYTES, a);
            cuMemcpyDtoHAsync_v2(host, x, BYTES, a);
        }
        if is_right {
            synchronize();
        }
        call! { cuMemcpyHtoDAsync_v2(y, host, BYTES, b); }
        synchronize();
    }

    an_async_copy_needs_pinned_memory: "expected pinned memory of the host", |is_right| {
        let ([a, _], x, host, pageable) = (streams(), buffer(), pinned(), [0u8; BYTES]);
        let from = if is_right { host } else { pageable.as_ptr().cast_mut().cast() };
        call! { cuMemcpyHtoDAsync_v2(x, from, BYTES, a); }
        synchronize();
    }

    a_synchronous_copy_returns_once_its_bytes_are_staged: "with no order between", |is_right| {
        let ([a, _], x, pageable) = (streams(), buffer(), [0u8; BYTES]);
        call! { cuMemcpyHtoD_v2(x, pageable.as_ptr().cast(), BYTES); }
        if is_right {
            synchronize();
        }
        call! { cuMemsetD8Async(x, 1, BYTES, a); }
        synchronize();
    }

    memory_must_be_freed_once: "a free of 1 bytes at byte 0 of `buffer 1`, which was freed", |is_right| {
        let (_, x) = (streams(), buffer());
        call! { cuMemFree_v2(x); }
        if !is_right {
            call! { cuMemFree_v2(x); }
        }
    }

    memory_in_use_must_not_be_freed: "which a fill of 256 bytes in stream 1 uses; nobody has waited for that", |is_right| {
        let ([a, b], x) = (streams(), buffer());
        call! {
            cuMemsetD8Async(x, 1, BYTES, a);
            // The wrong stream.
            cuStreamSynchronize(b);
        }
        if is_right {
            call! { cuStreamSynchronize(a); }
        }
        call! { cuMemFree_v2(x); }
    }

    pinned_memory_in_use_must_not_be_freed: "bytes of pinned memory`, which a copy of 256 bytes to the device", |is_right| {
        let ([a, _], x, host) = (streams(), buffer(), pinned());
        call! { cuMemcpyHtoDAsync_v2(x, host, BYTES, a); }
        if is_right {
            synchronize();
        }
        call! { cuMemFreeHost(host); }
    }

    freed_memory_must_not_be_used: "at byte 16 of `buffer 1`, which was freed", |is_right| {
        let ([a, _], x, y, module) = (streams(), buffer(), buffer(), module());
        call! { cuMemFree_v2(x); }
        store(module, a, if is_right { y } else { x + 16 }, 0);
        synchronize();
    }

    an_out_of_bounds_kernel_is_found: "out of bounds; seed", |is_right| {
        let ([a, _], x, module) = (streams(), buffer(), module());
        store(module, a, x, if is_right { 32 } else { 33 });
        synchronize();
    }

    a_module_with_queued_launches_must_not_be_unloaded: "a module is unloaded while launch 1 (`store`) is queued", |is_right| {
        let ([a, _], x, module) = (streams(), buffer(), module());
        store(module, a, x, 0);
        if is_right {
            synchronize();
        }
        call! { cuModuleUnload(module); }
        synchronize();
    }
}

#[test]
fn reading_before_the_copy_has_run_sees_no_result() {
    if child::role().is_none() {
        let output = child::start("reading_before_the_copy_has_run_sees_no_result", true, &[]);
        assert!(output.status.success(), "{output:?}");
        return;
    }
    let ([a, _], x, host, event) = (streams(), buffer(), pinned(), event());
    call! {
        cuMemsetD8Async(x, 1, BYTES, a);
        cuMemcpyDtoHAsync_v2(host, x, BYTES, a);
        cuEventRecord(event, a);
    }
    // SAFETY: four bytes of pinned memory.
    let number = || unsafe { host.cast::<f32>().read_volatile() };
    assert!(number().is_nan());
    // SAFETY: the event exists.
    let queries = (0..5).take_while(|_| unsafe { cuEventQuery(event) } == 600).count();
    // Each premature query runs one operation.
    assert_eq!((queries, number().to_bits()), (2, 0x0101_0101));
}

#[test]
fn the_host_cannot_read_memory_of_the_device() {
    const SEGMENTATION_FAULT: i32 = 11;
    if child::role().is_none() {
        let output = child::start("the_host_cannot_read_memory_of_the_device", false, &[]);
        assert_eq!(output.status.signal(), Some(SEGMENTATION_FAULT), "{output:?}");
        return;
    }
    let (_, x) = (streams(), buffer());
    // SAFETY: none. Nothing is mapped there, so it ends the process.
    let byte = unsafe { std::ptr::with_exposed_provenance::<u8>(x as usize).read_volatile() };
    println!("{byte}");
}

#[test]
fn waiting_for_a_hung_launch_never_returns() {
    const TEST: &str = "waiting_for_a_hung_launch_never_returns";
    if child::role().is_none() {
        let mut child = child::command(TEST, true)
            .env("SWITCHYARD_REFERENCE_FAULT", "hang:2")
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        assert!(lines.any(|line| line.contains("launch 2 never ends")));
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().code(), None, "it had exited");
        return;
    }
    let ([a, _], x, module) = (streams(), buffer(), module());
    for _ in 0..2 {
        store(module, a, x, 0);
    }
    synchronize();
}

#[test]
fn the_docs_show_a_real_finding() {
    let output = child::start("two_streams_using_the_same_bytes_need_an_event", false, &[]);
    let errors = String::from_utf8_lossy(&output.stderr);
    let line = errors.lines().find(|line| line.starts_with(PREFIX)).unwrap();
    let page = include_str!("../../../../docs/dev/gpu-testing.md");
    assert!(page.contains(line), "docs/dev/gpu-testing.md shows a finding other than {line}");
}
