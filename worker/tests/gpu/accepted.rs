//! cuDNN itself accepts the convolutions of ResNets and the attention of GPT and BERT, for a GPU
//! that is not present. Only `cargo xtask test --gpu-libraries` fetches cuDNN.

use crate::trial;
use std::path::{Path, PathBuf};
use std::process::Command;
use switchyard_cuda::cublaslt::Arithmetic;
use switchyard_cuda::cudnn::Cudnn;
use switchyard_cuda::find::{CUBLASLT, CUDNN, DRIVER, NVRTC, Places, VARIABLE};
use switchyard_cuda::operation::{Limits, Operation, Plan, Properties};
use switchyard_worker::cpu::Format;
use switchyard_worker::data::Kind;
use switchyard_worker::lowering::CudnnKinds;
use switchyard_worker::model::Registry;
use switchyard_worker::nn::Graph;
use switchyard_worker_contract::config::{Bert, Gpt, Model, ResNet, ResNetDepth, Stem};

/// cuDNN's description of an H200, written from public figures and not taken from a real device.
const H200: &str = r#"{"deviceName":"NVIDIA H200","deviceVer":900,"cudaDeviceId":0,"driverVer":13000,"totalGlobalMem":150109814784,
"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],"regsPerBlock":65536,"multiProcessorCount":132,"warpSize":32,
"maxSharedMemoryPerBlock":49152,"maxSharedMemoryPerBlockOptin":232448,"reservedSharedMemoryPerBlock":1024,"maxRegistersPerSM":65536,
"maxCtasPerSM":32,"maxThreadsPerBlock":1024,"maxThreadsPerSM":2048,"pciDeviceId":0,"isTccDriver":0,"supportCoopLaunch":1,
"smClockRateKHz":1980000,"memClockRateKHz":3201000,"l2CacheSize":62914560}"#;

const IMAGES: usize = 64;
/// The engine's limit for convolutions.
const MAX_WORKSPACE: usize = 256 << 20;

/// Driver functions that cuDNN looks up before it compiles a kernel for a graph, which is all that
/// it does with them here.
const DRIVER_NAMES: &str = "cuInit cuGetErrorString cuCtxGetCurrent cuCtxSetCurrent cuCtxGetLimit cuCtxPopCurrent cuCtxPushCurrent \
    cuCtxSynchronize cuDeviceGet cuDeviceGetAttribute cuDeviceGetCount cuDeviceGetName cuDevicePrimaryCtxRetain cuFuncSetAttribute \
    cuGetErrorName cuKernelGetAttribute cuKernelSetAttribute cuLaunchCooperativeKernel cuLaunchKernel cuLaunchKernelEx \
    cuLibraryLoadFromFile cuLibraryUnload cuLinkAddData cuLinkComplete cuLinkCreate cuLinkDestroy cuMemcpyDtoHAsync_v2 \
    cuMemcpyHtoDAsync_v2 cuModuleGetFunction cuModuleLoadData cuModuleUnload cuOccupancyMaxPotentialClusterSize cuStreamGetCtx \
    cuStreamSynchronize";

/// Builds a driver without devices that can only load machine code.
fn driver(folder: &Path) {
    let mut source = String::from(
        "static int taken;\nint cuLibraryLoadData(void **to) { *to = &taken; return 0; }\nint cuLibraryGetKernel(void **to) { *to = &taken; return 0; }\n\
         int cuDriverGetVersion(int *to) { *to = 13000; return 0; }\n",
    );
    source.extend(DRIVER_NAMES.split_whitespace().map(|name| format!("int {name}(void) {{ return 100; }}\n")));
    let file = folder.join("driver.c");
    std::fs::write(&file, source).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"]).arg(folder.join("libcuda.so.1")).arg(&file);
    assert!(compiler.status().unwrap().success());
}

fn cudnn() -> Cudnn {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/data");
    let stub = tempfile::tempdir().unwrap();
    driver(stub.path());
    let folders: Vec<PathBuf> = [stub.path().to_owned()]
        .into_iter()
        .chain(["gpu-cublas", "gpu-cudnn", "nvrtc"].map(|name| data.join(name)))
        .collect();
    let variable = std::env::join_paths(folders).unwrap();
    let places = Places::new(|name| (name == VARIABLE).then(|| variable.clone()), Path::new("/nowhere"), None);
    // Without cuBLASLt, cuDNN aborts the process. NVRTC compiles graphs for the driver.
    for needed in [DRIVER, NVRTC, CUBLASLT] {
        places.open(&needed).unwrap_or_else(|error| panic!("{error}"));
    }
    let found = places.open(&CUDNN).unwrap_or_else(|error| panic!("{error}"));
    Cudnn::new(&found.library).unwrap()
}

fn kinds(model: &Model, (batch, kind): (usize, Kind), format: Format) -> Vec<Operation> {
    let mut graph = Graph::new(batch, kind, format);
    Registry::new().model(model).unwrap().build(&mut graph).unwrap();
    CudnnKinds::of(&graph, Arithmetic::Ieee)
}

/// Checks that cuDNN has a plan for each kind, and that there are at least `least`; returns the
/// largest workspace.
fn assert_all_accepted(cudnn: &Cudnn, kinds: &[Operation], least: usize) -> usize {
    let device = Properties::described(cudnn, H200).unwrap();
    assert!(kinds.len() >= least, "{kinds:?}");
    let bytes = |operation: &Operation| {
        let most = match operation {
            Operation::Convolution(_) => MAX_WORKSPACE,
            Operation::Attention(attention) => attention.workspace_bytes(),
        };
        let limits = Limits { deterministic: true, workspace_bytes: most };
        let plan = Plan::described(cudnn, &device, operation, limits);
        plan.unwrap_or_else(|error| panic!("{operation}: {error}")).workspace_bytes()
    };
    kinds.iter().map(bytes).max().unwrap()
}

#[test]
#[ignore = "needs NVIDIA's libraries: cargo xtask test --gpu-libraries"]
fn all_convolutions_of_resnets_are_accepted_by_cudnn() {
    let cudnn = cudnn();
    assert_eq!(cudnn.version(), 91_900);
    for depth in [ResNetDepth::D18, ResNetDepth::D50] {
        for format in [Format::Bf16, Format::F16, Format::F32] {
            let model = Model::ResNet(ResNet { depth, stem: Stem::ImageNet, width: 64 });
            let kinds = kinds(&model, (IMAGES, trial::images(224, 3)), format);
            let most = assert_all_accepted(&cudnn, &kinds, 20);
            println!("{depth:?} in {format:?}: {} kinds, at most {most} bytes of workspace", kinds.len());
        }
    }
}

/// GPT-124M, BERT base, a GPT with a head size of 128, and small models with odd token counts.
#[test]
#[ignore = "needs NVIDIA's libraries: cargo xtask test --gpu-libraries"]
fn all_16_bit_attention_is_accepted_by_cudnn() {
    let cudnn = cudnn();
    let gpt = |layers, hidden_size, heads, context_length| {
        let vocabulary_size = 512;
        let model = Gpt { layers, hidden_size, heads, context_length, vocabulary_size, tied_head: true };
        Model::Gpt(model)
    };
    let bert = Bert {
        layers: 1,
        hidden_size: 768,
        heads: 12,
        context_length: 128,
        vocabulary_size: 512,
        masked_fraction: 0.15,
        next_sentence: false,
    };
    let models =
        [gpt(1, 768, 12, 1024), gpt(1, 2048, 16, 2048), gpt(1, 24, 3, 65), gpt(1, 16, 2, 8), Model::Bert(bert)];
    for model in models {
        for format in [Format::Bf16, Format::F16] {
            let kinds = kinds(&model, (8, trial::kind_of(&model)), format);
            let most = assert_all_accepted(&cudnn, &kinds, 2);
            println!("{model:?} in {format:?}: {} kinds, at most {most} bytes of workspace", kinds.len());
        }
        assert_eq!(kinds(&model, (8, trial::kind_of(&model)), Format::F32), []);
    }
}

#[test]
#[ignore = "needs NVIDIA's libraries: cargo xtask test --gpu-libraries"]
fn device_properties_round_trip_through_json() {
    let cudnn = cudnn();
    let json = Properties::described(&cudnn, H200).unwrap().json(&cudnn).unwrap();
    assert!(json.contains("NVIDIA H200"), "{json}");
    let round_tripped = Properties::described(&cudnn, json.trim_end_matches('\0')).unwrap().json(&cudnn).unwrap();
    assert_eq!(round_tripped, json);
}
