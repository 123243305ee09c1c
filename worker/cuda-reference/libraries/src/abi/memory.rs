//! Memory and copies.

use super::{Pointer, done, store, stream, with};
use crate::code::{CallResult, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY};
use crate::gpu::Gpu;
use crate::gpu::queue::DEFAULT;
use crate::gpu::work::{Source, Work};
use crate::host::{self, HostRange};
use std::alloc::Layout;
use std::ffi::c_void;
use std::ops::Range;

/// The kernel's page alignment.
const PAGE: usize = 4096;

fn range(start: u64, bytes: usize) -> Range<u64> {
    start..start.saturating_add(bytes as u64)
}

fn host_range(address: *const c_void, bytes: usize) -> Range<u64> {
    range(address.expose_provenance() as u64, bytes)
}

fn is_pinned(gpu: &Gpu, range: &Range<u64>) -> bool {
    gpu.find_allocation(range).is_some_and(|(_, one)| one.is_pinned)
}

/// Pageable memory is legal for an async copy, but makes it synchronous.
fn check_pinned(gpu: &Gpu, call: &str, range: &Range<u64>) {
    if !is_pinned(gpu, range) {
        gpu.report(&format!("{call} with {}: expected pinned memory of the host", gpu.describe(range)));
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> i32 {
    done(with(|gpu| {
        let (left, all) = gpu.memory();
        // SAFETY: per the header's contract.
        unsafe { store(free, left as usize).and(store(total, all as usize)) }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> i32 {
    // SAFETY: per the header's contract.
    done(with(|gpu| gpu.allocate(bytes as u64).and_then(|found| unsafe { store(address, found) })))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFree_v2(address: u64) -> i32 {
    done(with(|gpu| {
        gpu.graphs.refuse("cuMemFree")?;
        gpu.free(address, false);
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(address: *mut Pointer, bytes: usize, flags: u32) -> i32 {
    done(with(|gpu| {
        if flags != 0 {
            return Err(NOT_SUPPORTED);
        }
        gpu.graphs.refuse("cuMemHostAlloc")?;
        let layout = Layout::from_size_align(bytes, PAGE).map_err(|_| INVALID_VALUE)?;
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the size is not zero.
        let memory = unsafe { std::alloc::alloc(layout) };
        if memory.is_null() {
            return Err(OUT_OF_MEMORY);
        }
        let start = memory.expose_provenance() as u64;
        // SAFETY: just allocated with this size. Filled so that no program relies on zeros.
        unsafe { host::write(start, &vec![0xff; bytes]) };
        gpu.register(start, format!("{bytes} bytes of pinned memory"), bytes as u64, true);
        // SAFETY: per the header's contract.
        unsafe { store(address, memory.cast()) }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeHost(address: Pointer) -> i32 {
    done(with(|gpu| {
        gpu.graphs.refuse("cuMemFreeHost")?;
        let bytes = gpu.free(address.addr() as u64, true);
        let layout = Layout::from_size_align(bytes as usize, PAGE).map_err(|_| INVALID_VALUE)?;
        // SAFETY: allocated by `cuMemHostAlloc` with this layout, as checked by `free`.
        unsafe { std::alloc::dealloc(address.cast(), layout) };
        Ok(())
    }))
}

/// Unless the memory is pinned, returns once the bytes are staged, before they reach the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) -> i32 {
    done(with(|gpu| {
        gpu.graphs.refuse("cuMemcpyHtoD")?;
        let from = host_range(from, bytes);
        let is_pinned = is_pinned(gpu, &from);
        // SAFETY: the header's contract makes it readable.
        let source = unsafe {
            if is_pinned { Source::Pinned(HostRange::source(from)) } else { Source::Staged(host::read(&from)) }
        };
        gpu.upload(DEFAULT, source, range(to, bytes));
        if is_pinned { wait(gpu) } else { Ok(()) }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(to: Pointer, from: u64, bytes: usize) -> i32 {
    done(with(|gpu| {
        gpu.graphs.refuse("cuMemcpyDtoH")?;
        let to = host_range(to, bytes);
        let is_pinned = is_pinned(gpu, &to);
        gpu.download(DEFAULT, range(from, bytes), HostRange { range: to, seen: None }, is_pinned);
        wait(gpu)
    }))
}

fn wait(gpu: &mut Gpu) -> CallResult<()> {
    let now = gpu.queue.now(DEFAULT);
    gpu.synchronize(&now)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, raw: Pointer) -> i32 {
    done(with(|gpu| {
        let (stream, from) = (stream(gpu, raw)?, host_range(from, bytes));
        gpu.graphs.refuse_for(stream, "cuMemcpyHtoDAsync")?;
        check_pinned(gpu, "cuMemcpyHtoDAsync", &from);
        // SAFETY: inside our own allocation.
        let source = unsafe { HostRange::source(from) };
        gpu.upload(stream, Source::Pinned(source), range(to, bytes));
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(to: Pointer, from: u64, bytes: usize, raw: Pointer) -> i32 {
    done(with(|gpu| {
        let (stream, to) = (stream(gpu, raw)?, host_range(to, bytes));
        gpu.graphs.refuse_for(stream, "cuMemcpyDtoHAsync")?;
        check_pinned(gpu, "cuMemcpyDtoHAsync", &to);
        let is_used = gpu.host_is_used(&to);
        // SAFETY: inside our own allocation.
        let target = unsafe { HostRange::target(to, is_used) };
        gpu.download(stream, range(from, bytes), target, true);
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD8Async(to: u64, byte: u8, bytes: usize, raw: Pointer) -> i32 {
    done(with(|gpu| {
        let (stream, to) = (stream(gpu, raw)?, range(to, bytes));
        let name = format!("a fill of {bytes} bytes");
        gpu.enqueue(stream, name, std::slice::from_ref(&to), Work::Fill { to: to.clone(), byte });
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, raw: Pointer) -> i32 {
    done(with(|gpu| {
        let stream = stream(gpu, raw)?;
        let bytes = bytes as u64;
        let work = Work::Copy { from: (from, bytes), to: (to, bytes), bytes, count: 1 };
        gpu.enqueue(stream, format!("a copy of {bytes} bytes"), &[from..from + bytes, to..to + bytes], work);
        Ok(())
    }))
}

/// `CU_DEVICE_ATTRIBUTE_MAX_PITCH`.
const MAX_PITCH: usize = 0x7fff_ffff;

/// One side of `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Debug)]
pub struct Side2D {
    x_bytes: usize,
    y: usize,
    kind: u32,
    host: Pointer,
    device: u64,
    array: Pointer,
    pitch: usize,
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Debug)]
pub struct Copy2D {
    from: Side2D,
    to: Side2D,
    width_bytes: usize,
    height: usize,
}

/// `CU_MEMORYTYPE_DEVICE`.
const DEVICE_MEMORY: u32 = 2;

/// Device-to-device only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpy2DAsync_v2(copy: *const Copy2D, raw: Pointer) -> i32 {
    done(with(|gpu| {
        let stream = stream(gpu, raw)?;
        // SAFETY: the header's contract makes it readable.
        let Some(Copy2D { from, to, width_bytes, height }) = (unsafe { copy.as_ref() }) else {
            return Err(INVALID_VALUE);
        };
        if from.kind != DEVICE_MEMORY || to.kind != DEVICE_MEMORY {
            return Err(NOT_SUPPORTED);
        }
        let fits = |pitch| (*width_bytes..=MAX_PITCH).contains(&pitch);
        if !fits(from.pitch) || !fits(to.pitch) || *width_bytes == 0 || *height == 0 {
            return Err(INVALID_VALUE);
        }
        let [source, target] = [from, to].map(|side| {
            let start = side.device + (side.y * side.pitch + side.x_bytes) as u64;
            range(start, (height - 1) * side.pitch + width_bytes)
        });
        let work = Work::Copy {
            from: (source.start, from.pitch as u64),
            to: (target.start, to.pitch as u64),
            bytes: *width_bytes as u64,
            count: *height as u64,
        };
        let name = format!("a copy of {height} lines of {width_bytes} bytes");
        gpu.enqueue(stream, name, &[source, target], work);
        Ok(())
    }))
}
