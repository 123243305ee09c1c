//! Modules and launches.

use super::{Kind, Pointer, done, handle, index, store, stream, with};
use crate::code::{CallResult, INVALID_HANDLE, INVALID_IMAGE, INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED};
use crate::finding::explain;
use crate::gpu::work::{Launch, Work};
use crate::gpu::{Function, Gpu};
use crate::nvrtc::CONTAINER;
use std::ffi::{CStr, c_char, c_void};
use std::sync::Arc;
use switchyard_cuda_reference::Module;

const MAX_DYNAMIC_SHARED_SIZE_BYTES: i32 = 8;
/// Dynamic shared memory that a kernel can use without opting in to more.
const SHARED_BYTES: u32 = 49_152;
const MAX_SHARED_BYTES: i32 = 232_448;

/// Accepts the container that this library's NVRTC returns as a CUBIN.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(module: *mut Pointer, image: *const c_void) -> i32 {
    done(with(|gpu| {
        if image.is_null() {
            return Err(INVALID_VALUE);
        }
        gpu.graphs.refuse("cuModuleLoadData")?;
        let starts = |at: usize| {
            // SAFETY: an image is longer than its header, and the comparison stops at the first
            // difference.
            unsafe { image.cast::<u8>().add(at).read() == CONTAINER[at] }
        };
        if !(0..CONTAINER.len()).all(starts) {
            explain("cuModuleLoadData", "not machine code of the reference NVRTC");
            return Err(INVALID_IMAGE);
        }
        // SAFETY: the container's header is followed by zero-terminated PTX.
        let text = unsafe { CStr::from_ptr(image.cast::<c_char>().add(CONTAINER.len())) };
        let parsed = Module::parse(&text.to_string_lossy()).map_err(|error| {
            explain("cuModuleLoadData", &error.to_string());
            INVALID_IMAGE
        })?;
        gpu.modules.push(Some(Arc::new(parsed)));
        // SAFETY: per the header's contract.
        unsafe { store(module, handle(Kind::Module, gpu.modules.len() - 1)) }
    }))
}

fn module(gpu: &Gpu, index: usize) -> CallResult<Arc<Module>> {
    gpu.modules.get(index).cloned().flatten().ok_or(INVALID_HANDLE)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleUnload(raw: Pointer) -> i32 {
    done(with(|gpu| {
        let index = index(Kind::Module, raw)?;
        let module = module(gpu, index)?;
        let uses = |work: &Work| matches!(work, Work::Launch(launch) if Arc::ptr_eq(&launch.module, &module));
        let user = gpu.queue.pending().find(|operation| uses(&operation.work)).map(|operation| operation.name.clone());
        if let Some(user) = user {
            gpu.report(&format!("a module is unloaded while {user} is queued"));
        }
        if gpu.graphs.use_module(&module) {
            gpu.report("a module is unloaded that a graph has a kernel of");
        }
        gpu.modules[index] = None;
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(function: *mut Pointer, raw: Pointer, name: *const c_char) -> i32 {
    done(with(|gpu| {
        let index = index(Kind::Module, raw)?;
        let module = module(gpu, index)?;
        // SAFETY: the header's contract makes it a C string.
        let name = unsafe { CStr::from_ptr(name) };
        if module.parameters(&name.to_string_lossy()).is_none() {
            return Err(NOT_FOUND);
        }
        let function_index = gpu.functions.len();
        gpu.functions.push(Function {
            module: index,
            name: name.to_string_lossy().into_owned(),
            most_dynamic_bytes: SHARED_BYTES,
        });
        // SAFETY: per the header's contract.
        unsafe { store(function, handle(Kind::Function, function_index)) }
    }))
}

fn function(gpu: &mut Gpu, raw: Pointer) -> CallResult<&mut Function> {
    let index = index(Kind::Function, raw)?;
    gpu.functions.get_mut(index).ok_or(INVALID_HANDLE)
}

/// Byte sizes of a kernel's parameters.
fn parameters(gpu: &mut Gpu, raw: Pointer) -> CallResult<Vec<usize>> {
    let Function { module: index, name, .. } = function(gpu, raw)?;
    let (index, name) = (*index, name.clone());
    module(gpu, index)?.parameters(&name).map(<[usize]>::to_vec).ok_or(NOT_FOUND)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetParamInfo(
    raw: Pointer,
    parameter: usize,
    offset: *mut usize,
    bytes: *mut usize,
) -> i32 {
    done(with(|gpu| {
        let sizes = parameters(gpu, raw)?;
        let size = *sizes.get(parameter).ok_or(INVALID_VALUE)?;
        let place = |at: usize, size: &usize| at.next_multiple_of(*size) + size;
        let at = sizes[..parameter].iter().fold(0, place).next_multiple_of(size);
        // SAFETY: per the header's contract.
        unsafe { store(offset, at).and(store(bytes, size)) }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncSetAttribute(raw: Pointer, attribute: i32, value: i32) -> i32 {
    done(with(|gpu| {
        let function = function(gpu, raw)?;
        if attribute != MAX_DYNAMIC_SHARED_SIZE_BYTES {
            return Err(NOT_SUPPORTED);
        }
        if !(0..=MAX_SHARED_BYTES).contains(&value) {
            return Err(INVALID_VALUE);
        }
        function.most_dynamic_bytes = (value as u32).max(SHARED_BYTES);
        Ok(())
    }))
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // As many as the header has.
pub unsafe extern "C" fn cuLaunchKernel(
    raw: Pointer,
    blocks: u32,
    blocks_y: u32,
    blocks_z: u32,
    threads: u32,
    threads_y: u32,
    threads_z: u32,
    shared_bytes: u32,
    stream_of: Pointer,
    arguments: *mut Pointer,
    extra: *mut Pointer,
) -> i32 {
    done(with(|gpu| {
        let stream = stream(gpu, stream_of)?;
        if [blocks_y, blocks_z, threads_y, threads_z] != [1; 4] || !extra.is_null() {
            return Err(NOT_SUPPORTED);
        }
        let sizes = parameters(gpu, raw)?;
        let Function { module: index, name, most_dynamic_bytes } = function(gpu, raw)?;
        let (index, kernel, most) = (*index, name.clone(), *most_dynamic_bytes);
        // SAFETY: the header's contract gives one pointer per parameter, to as many bytes as the
        // kernel declares.
        let value = |(at, size): (usize, &usize)| unsafe {
            let from = arguments.add(at).read().cast::<u8>();
            std::slice::from_raw_parts(from, *size).to_vec()
        };
        let arguments: Vec<Vec<u8>> = sizes.iter().enumerate().map(value).collect();
        let module = module(gpu, index)?;
        // A captured launch is numbered when its graph is launched.
        let number = if gpu.graphs.is_captured(stream) { 0 } else { gpu.next_launch() };
        let launch = Launch { module, kernel, blocks, threads, shared_bytes, arguments, number };
        enqueue(gpu, stream, launch, (index, most))
    }))
}

/// Takes the module's number, and the shared memory that the kernel is allowed.
fn enqueue(gpu: &mut Gpu, stream: usize, launch: Launch, (module, most_shared_bytes): (usize, u32)) -> CallResult<()> {
    let refused = |text: &str| {
        explain("cuLaunchKernel", text);
        INVALID_VALUE
    };
    if launch.shared_bytes > most_shared_bytes {
        let text = format!("{} bytes of shared memory, allowed are {most_shared_bytes}", launch.shared_bytes);
        return Err(refused(&text));
    }
    launch.module.check(&launch.raw(0)).map_err(|error| refused(&error.to_string()))?;
    // Any 8-byte argument could be an address; zero is none.
    let address = |bytes: &Vec<u8>| Some(u64::from_le_bytes(bytes.as_slice().try_into().ok()?)).filter(|at| *at != 0);
    let uses: Vec<_> = launch.arguments.iter().filter_map(address).map(|at| at..at + 1).collect();
    let is_first = gpu.launched_kernels.insert((module, launch.kernel.clone()));
    if is_first && gpu.graphs.is_captured(stream) {
        // The first launch loads its code.
        return gpu.graphs.refuse("the first cuLaunchKernel of a kernel");
    }
    crate::nvtx::queued(&launch.kernel);
    let name = launch.name();
    gpu.enqueue(stream, name, &uses, Work::Launch(launch));
    Ok(())
}
