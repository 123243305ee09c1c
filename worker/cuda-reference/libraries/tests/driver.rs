//! The engine's calls on the reference driver: streams, events, pinned memory, kernels. Errors
//! reach the caller.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)]

mod child;
mod device;

use child::misuse_test;
use device::{Gpu, number, on_a_device, places};
use switchyard_cuda::Error;
use switchyard_cuda::driver::{Driver, Lines, Loaded, Span};
use switchyard_cuda::find::{DRIVER, NVRTC};
use switchyard_cuda::kernels::Element;
use switchyard_cuda::kernels::elementwise::Elementwise;
use switchyard_cuda::nvrtc::Nvrtc;

const COUNT: usize = 1000;
const BYTES: usize = 4 * COUNT;
const KERNELS: Elementwise = Elementwise { from: Element::F32, to: Element::F32 };

fn kernels(gpu: &Gpu) -> Loaded {
    let nvrtc = Nvrtc::new(&places().open(&NVRTC).unwrap().library).unwrap();
    gpu.context.load(KERNELS.program(), &nvrtc).unwrap()
}

fn double(kernels: &Loaded, gpu: &Gpu, from: Span, to: Span) -> Result<(), Error> {
    kernels.launch(&KERNELS.convert(8, COUNT as u32, from, 2.0, to, false)?, &gpu.stream)
}

fn numbers() -> Vec<f32> {
    (0..COUNT).map(|index| number(1, index)).collect()
}

fn code(error: &Error) -> Option<(&str, i32)> {
    match error {
        Error::Call { call, code, .. } => Some((call, *code)),
        _ => None,
    }
}

misuse_test! {
    work_must_wait_for_the_copy_of_its_input: "with no order between", |is_right| {
        let gpu = Gpu::new();
        let (copies, arrived) = (gpu.context.stream().unwrap(), gpu.context.event().unwrap());
        let [x, y] = [(); 2].map(|()| gpu.context.allocate(BYTES).unwrap());
        let mut host = gpu.context.pinned::<f32>(COUNT).unwrap();
        host.values_mut().unwrap().copy_from_slice(&numbers());
        copies.upload(&host, 0..COUNT, x.span()).unwrap();
        copies.record(&arrived).unwrap();
        if is_right {
            gpu.stream.wait(&arrived).unwrap();
        }
        gpu.stream.copy(x.span(), y.span()).unwrap();
        let mut result = gpu.context.pinned::<f32>(COUNT).unwrap();
        gpu.stream.download(y.span(), &mut result, 0..COUNT).unwrap();
        assert!(!result.is_idle().unwrap());
        assert_eq!(result.values().unwrap(), numbers());
        assert!(result.is_idle().unwrap() && host.is_idle().unwrap());
    }
}

#[test]
fn pinned_memory_can_be_rewritten_once_its_copy_has_run() {
    on_a_device("pinned_memory_can_be_rewritten_once_its_copy_has_run", &[], || {
        let gpu = Gpu::new();
        let x = gpu.context.allocate(3 * BYTES).unwrap();
        let mut host = gpu.context.pinned::<f32>(COUNT).unwrap();
        for (index, stream) in [gpu.context.stream().unwrap(), gpu.context.stream().unwrap()].iter().enumerate() {
            // Waits for the previous copy.
            host.values_mut().unwrap().fill(index as f32);
            stream.upload(&host, 0..COUNT, x.part(index * BYTES..(index + 1) * BYTES).unwrap()).unwrap();
        }
        // Also on another stream, and to the same location.
        gpu.stream.download(x.part(0..4).unwrap(), &mut host, 7..8).unwrap();
        drop(x);
        assert_eq!(host.values().unwrap()[6..9], [1.0, 0.0, 1.0]);
    });
}

#[test]
fn strided_copies_leave_the_gaps_unchanged() {
    on_a_device("strided_copies_leave_the_gaps_unchanged", &[], || {
        let gpu = Gpu::new();
        let from = gpu.context.upload(&numbers()).unwrap();
        let to = gpu.context.zeros(BYTES).unwrap();
        let [source, target] = [(&from, 16), (&to, 20)].map(|(buffer, pitch)| Lines { span: buffer.span(), pitch });
        gpu.stream.copy_lines(12, 50, source, target).unwrap();
        let (got, numbers) = (to.download::<f32>(0..250).unwrap(), numbers());
        for (at, got) in got.into_iter().enumerate() {
            let (line, column) = (at / 5, at % 5);
            assert_eq!(got, if column < 3 { numbers[line * 4 + column] } else { 0.0 }, "{at}");
        }
        gpu.stream.copy(from.part(0..8).unwrap(), to.part(16..24).unwrap()).unwrap();
        assert_eq!(to.download::<f32>(4..6).unwrap(), numbers[..2]);
        let refused = gpu.stream.copy_lines(12, 500, source, target).unwrap_err();
        assert!(refused.to_string().contains("500 lines of 12 bytes"), "{refused}");
    });
}

#[test]
fn invalid_ranges_and_dropped_buffers_are_refused() {
    on_a_device("invalid_ranges_and_dropped_buffers_are_refused", &[], || {
        let gpu = Gpu::new();
        let kernels = kernels(&gpu);
        let [x, y] = [(); 2].map(|()| gpu.context.zeros(BYTES).unwrap());
        let text = |error: Error| error.to_string();
        let mut two = [0.0f32; 2];
        assert!(
            text(x.read(BYTES - 4, &mut two).unwrap_err()).contains("8 bytes at byte 3996 of a buffer of 4000 bytes")
        );
        assert!(text(x.write(usize::MAX, &two).unwrap_err()).contains("of a buffer of 4000 bytes"));
        assert_eq!((x.part(8..4001), x.span().part(4001..4001)), (None, None));
        let too_many = gpu.context.pinned::<f32>(usize::MAX / 2).map(|_| ()).unwrap_err();
        assert!(text(too_many).contains("numbers of 4 bytes each"));
        let host = gpu.context.pinned::<f32>(COUNT).unwrap();
        assert!(
            text(gpu.stream.upload(&host, 0..3, x.span()).unwrap_err()).contains("numbers 0..3 of 1000, 4 bytes each")
        );
        let gone = x.span();
        drop(x);
        for error in [
            double(&kernels, &gpu, gone, y.span()),
            gpu.stream.fill(gone, 0),
            gpu.stream.copy(y.span(), gone),
            gpu.stream.upload(&host, 0..COUNT, gone),
        ] {
            assert!(text(error.unwrap_err()).contains("4000 bytes of a buffer that is gone"));
        }
        let other = Elementwise { to: Element::Bf16, ..KERNELS };
        let call = other.fill(1, 4, 0.0, y.span()).unwrap();
        assert!(text(kernels.launch(&call, &gpu.stream).unwrap_err()).contains("a call for Program"));
    });
}

#[test]
fn arguments_that_do_not_match_the_machine_code_are_refused() {
    const NAME: &str = "arguments_that_do_not_match_the_machine_code_are_refused";
    let folder = tempfile::tempdir().unwrap();
    let cache = [("SWITCHYARD_REFERENCE_CACHE", folder.path().to_str().unwrap())];
    let launch = || {
        let gpu = Gpu::new();
        let kernels = kernels(&gpu);
        let buffer = gpu.context.zeros(BYTES).unwrap();
        let call = KERNELS.fill(1, COUNT as u32, 1.0, buffer.span()).unwrap();
        // The child with the damaged cache prints it for the test.
        eprintln!("{:?}", kernels.launch(&call, &gpu.stream).map_err(|error| error.to_string()));
    };
    // Fills the cache.
    on_a_device(NAME, &cache, launch);
    if child::role().is_some() {
        return;
    }
    let file = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
    // The machine code after the PTX is not used here.
    let text = String::from_utf8_lossy(&std::fs::read(&file).unwrap()).into_owned();
    let damaged = text.replace(".param .u32 fill_param_2", ".param .u64 fill_param_2");
    assert_ne!(damaged, text);
    std::fs::write(&file, damaged).unwrap();
    let output = child::start(NAME, true, &cache);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("arguments of [8, 4, 4] bytes, expected [8, 4, 8]"), "{errors}");
}

#[test]
fn out_of_memory_is_an_error_and_existing_buffers_keep_working() {
    let memory = [("SWITCHYARD_REFERENCE_MEMORY", "10000")];
    on_a_device("out_of_memory_is_an_error_and_existing_buffers_keep_working", &memory, || {
        let gpu = Gpu::new();
        let x = gpu.context.upload(&numbers()).unwrap();
        assert_eq!((gpu.context.device().memory_bytes, gpu.context.free_bytes().unwrap()), (10_000, 6000));
        let error = gpu.context.allocate(6001).map(|_| ()).unwrap_err();
        assert_eq!(code(&error), Some(("cuMemAlloc", 2)));
        assert_eq!(x.download::<f32>(0..COUNT).unwrap(), numbers());
        drop(x);
        assert_eq!(gpu.context.allocate(10_000).unwrap().bytes(), 10_000);
    });
}

#[test]
fn after_a_failed_launch_every_call_fails() {
    let fault = [("SWITCHYARD_REFERENCE_FAULT", "launch:2")];
    on_a_device("after_a_failed_launch_every_call_fails", &fault, || {
        let gpu = Gpu::new();
        let kernels = kernels(&gpu);
        let [x, y] = [(); 2].map(|()| gpu.context.upload(&numbers()).unwrap());
        let mut host = gpu.context.pinned::<f32>(COUNT).unwrap();
        double(&kernels, &gpu, x.span(), y.span()).unwrap();
        gpu.stream.synchronize().unwrap();
        // The launch fails when it runs, not when it is queued.
        double(&kernels, &gpu, x.span(), y.span()).unwrap();
        gpu.stream.download(y.span(), &mut host, 0..COUNT).unwrap();
        for error in [
            host.values().map(|_| ()).unwrap_err(),
            gpu.stream.synchronize().unwrap_err(),
            y.download::<f32>(0..1).map(|_| ()).unwrap_err(),
            double(&kernels, &gpu, x.span(), y.span()).unwrap_err(),
        ] {
            assert_eq!(code(&error).unwrap().1, 719, "{error}");
        }
    });
}

#[test]
fn hidden_gpus_are_not_listed() {
    let visible = [("SWITCHYARD_REFERENCE_DEVICES", "3"), ("CUDA_VISIBLE_DEVICES", "2,0,9,1")];
    on_a_device("hidden_gpus_are_not_listed", &visible, || {
        let driver = || Driver::new(&places().open(&DRIVER).unwrap().library);
        let devices = driver().unwrap().devices().unwrap();
        // Everything after an invalid number is hidden.
        assert_eq!(devices.len(), 2);
        // Each device has its own memory.
        let contexts = [0, 1].map(|index| driver().unwrap().context(&devices[index]).unwrap());
        let buffers: Vec<_> = contexts.iter().map(|context| context.upload(&numbers()).unwrap()).collect();
        assert_eq!(buffers[1].download::<f32>(0..COUNT).unwrap(), numbers());
        assert_eq!(contexts[0].free_bytes().unwrap(), devices[0].memory_bytes - BYTES);
    });
}

#[test]
fn hiding_all_gpus_leaves_none() {
    on_a_device("hiding_all_gpus_leaves_none", &[("CUDA_VISIBLE_DEVICES", "")], || {
        let error = Driver::new(&places().open(&DRIVER).unwrap().library).map(|_| ()).unwrap_err();
        assert_eq!(error, Error::NoDevice);
    });
}

#[test]
fn compiler_messages_reach_the_caller() {
    on_a_device("compiler_messages_reach_the_caller", &[], || {
        let Some(_) = std::env::var_os("SWITCHYARD_REFERENCE_NVRTC") else { return };
        let nvrtc = Nvrtc::new(&places().open(&NVRTC).unwrap().library).unwrap();
        let options = ["--gpu-architecture=sm_90".to_owned()];
        let compile = |source| nvrtc.compile(("faulty.cu", source), &[], &options);
        let error = compile("__global__ void k() { nowhere(); }").map(|_| ()).unwrap_err();
        assert_eq!(code(&error), Some(("nvrtcCompileProgram", 6)));
        assert!(error.to_string().contains("faulty.cu(1): error: identifier \"nowhere\" is undefined"), "{error}");
        let good = compile("extern \"C\" __global__ void k() {}").unwrap();
        assert!(good.ptx.contains(".entry k"), "{}", good.ptx);
        // PTX, in this driver's container.
        assert!(String::from_utf8_lossy(&good.cubin).contains(&good.ptx));
    });
}

#[test]
fn a_graph_replays_its_work_and_is_refused_once_its_memory_is_freed() {
    on_a_device("a_graph_replays_its_work_and_is_refused_once_its_memory_is_freed", &[], || {
        let gpu = Gpu::new();
        let kernels = kernels(&gpu);
        let [x, y] = [(); 2].map(|()| gpu.context.upload(&numbers()).unwrap());
        let step = || {
            double(&kernels, &gpu, x.span(), y.span())?;
            gpu.stream.copy(y.span(), x.span())
        };
        let first = gpu.stream.capture(step).map(|_| ()).unwrap_err();
        assert_eq!(code(&first), Some(("cuLaunchKernel", 900)), "its code is not loaded");
        step().unwrap();
        let graph = gpu.stream.capture(step).unwrap();
        assert_eq!(x.download::<f32>(0..1).unwrap(), [2.0 * number(1, 0)], "nothing of a capture runs");
        for _ in 0..2 {
            graph.launch(&gpu.stream).unwrap();
        }
        drop(kernels);
        graph.launch(&gpu.stream).unwrap();
        assert_eq!(x.download::<f32>(0..1).unwrap(), [16.0 * number(1, 0)]);
        drop(y);
        let refused = graph.launch(&gpu.stream).unwrap_err().to_string();
        assert!(refused.contains("4000 bytes of a buffer that is gone"), "{refused}");
    });
}

misuse_test! {
    work_outside_a_graph_must_wait_for_an_event_inside: "with no order between", |is_right| {
        let gpu = Gpu::new();
        let [x, y] = [(); 2].map(|()| gpu.context.upload(&numbers()).unwrap());
        let (copies, filled) = (gpu.context.stream().unwrap(), gpu.context.event().unwrap());
        let graph = gpu.stream.capture(|| {
            gpu.stream.fill(x.span(), 1)?;
            gpu.stream.record(&filled)?;
            gpu.stream.fill(y.span(), 2)
        });
        let graph = graph.unwrap();
        let before = gpu.context.counts();
        let mut host = gpu.context.pinned::<u32>(COUNT).unwrap();
        for _ in 0..2 {
            graph.launch(&gpu.stream).unwrap();
            if is_right {
                copies.wait(&filled).unwrap();
            }
            copies.download(x.span(), &mut host, 0..COUNT).unwrap();
            assert_eq!(host.values().unwrap()[0], 0x0101_0101);
        }
        drop(filled);
        graph.launch(&gpu.stream).unwrap();
        assert_eq!(y.download::<u32>(0..1).unwrap(), [0x0202_0202]);
        let after = gpu.context.counts();
        assert_eq!((after.launches - before.launches, after.waits > before.waits), (5, true));
    }
}

#[test]
fn a_blocking_call_invalidates_a_capture() {
    on_a_device("a_blocking_call_invalidates_a_capture", &[], || {
        let gpu = Gpu::new();
        let x = gpu.context.zeros(BYTES).unwrap();
        let host = gpu.context.pinned::<f32>(COUNT).unwrap();
        let fill = || gpu.stream.fill(x.span(), 1);
        for (broken, expected) in [
            (gpu.stream.capture(|| fill().and_then(|()| gpu.stream.synchronize())), 900),
            // Continuing despite the error yields no graph.
            (gpu.stream.capture(|| fill().map(|()| drop(gpu.stream.synchronize()))), 901),
        ] {
            assert_eq!(code(&broken.map(|_| ()).unwrap_err()).unwrap().1, expected);
        }
        let refused = gpu.stream.capture(|| gpu.stream.upload(&host, 0..COUNT, x.span())).map(|_| ()).unwrap_err();
        assert!(refused.to_string().contains("the stream is captured"), "{refused}");
        gpu.stream.capture(fill).unwrap().launch(&gpu.stream).unwrap();
        assert_eq!(x.download::<u32>(0..1).unwrap(), [0x0101_0101]);
    });
}

#[test]
fn objects_can_move_between_threads_and_be_dropped_in_any_order() {
    on_a_device("objects_can_move_between_threads_and_be_dropped_in_any_order", &[], || {
        let gpu = Gpu::new();
        let kernels = kernels(&gpu);
        let [x, y] = [(); 2].map(|()| gpu.context.upload(&numbers()).unwrap());
        std::thread::scope(|scope| {
            scope.spawn(move || {
                double(&kernels, &gpu, x.span(), y.span()).unwrap();
                let stream = gpu.stream;
                drop(gpu.context);
                assert_eq!(y.download::<f32>(3..4).unwrap(), [2.0 * number(1, 3)]);
                drop((x, kernels, stream));
            });
        });
    });
}
