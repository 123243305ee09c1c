//! The convolutions of ResNets, which cuDNN itself accepts for a GPU that is not there. Only `cargo xtask test --gpu-libraries` fetches it.

use crate::trial;
use std::path::{Path, PathBuf};
use switchyard_cuda::convolution::{Accepted, Properties, ask};
use switchyard_cuda::cublaslt::Arithmetic;
use switchyard_cuda::cudnn::Cudnn;
use switchyard_cuda::find::{CUBLASLT, CUDNN, Places, VARIABLE};
use switchyard_worker::cpu::Format;
use switchyard_worker::gpu::{ConvolutionKind, Convolutions};
use switchyard_worker::model::Registry;
use switchyard_worker::nn::Graph;
use switchyard_worker_contract::config::{Model, ResNet, ResNetDepth, Stem};

/// An H200 in the words of cuDNN, written by hand from public figures: no GPU has told its own.
const H200: &str = r#"{"deviceName":"NVIDIA H200","deviceVer":900,"cudaDeviceId":0,"driverVer":13000,"totalGlobalMem":150109814784,
"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],"regsPerBlock":65536,"multiProcessorCount":132,"warpSize":32,
"maxSharedMemoryPerBlock":49152,"maxSharedMemoryPerBlockOptin":232448,"reservedSharedMemoryPerBlock":1024,"maxRegistersPerSM":65536,
"maxCtasPerSM":32,"maxThreadsPerBlock":1024,"maxThreadsPerSM":2048,"pciDeviceId":0,"isTccDriver":0,"supportCoopLaunch":1,
"smClockRateKHz":1980000,"memClockRateKHz":3201000,"l2CacheSize":62914560}"#;

const IMAGES: usize = 64;
/// What the engine allows.
const MOST_WORKSPACE: usize = 256 << 20;

/// cuDNN; `None` where nobody has fetched it.
fn cudnn() -> Option<Cudnn> {
    let above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let data = above.map(|folder| folder.join("target/data")).find(|folder| folder.join("gpu-cudnn").is_dir());
    let is_required = std::env::var_os("SWITCHYARD_TEST_GPU_LIBRARIES").is_some();
    assert!(data.is_some() || !is_required, "cuDNN is missing, but cargo xtask asked for it");
    let folders: Vec<PathBuf> = ["gpu-cublas", "gpu-cudnn", "nvrtc"]
        .map(|name| data.as_ref().map(|data| data.join(name)))
        .into_iter()
        .collect::<Option<_>>()?;
    let variable = std::env::join_paths(folders).unwrap();
    let places = Places::new(|name| (name == VARIABLE).then(|| variable.clone()), Path::new("/nowhere"), None);
    // Without it cuDNN ends the process.
    places.open(&CUBLASLT).unwrap_or_else(|error| panic!("{error}"));
    let found = places.open(&CUDNN).unwrap_or_else(|error| panic!("{error}"));
    Some(Cudnn::new(&found.library).unwrap())
}

fn kinds(depth: ResNetDepth, format: Format) -> Vec<ConvolutionKind> {
    let mut graph = Graph::new(IMAGES, trial::images(224, 3), format);
    let model = Model::ResNet(ResNet { depth, stem: Stem::ImageNet, width: 64 });
    Registry::new().model(&model).unwrap().build(&mut graph).unwrap();
    Convolutions::of(&graph)
}

#[test]
fn all_convolutions_of_resnets_are_accepted_by_cudnn() {
    let Some(cudnn) = cudnn() else { return };
    let device = Properties::described(&cudnn, H200).unwrap();
    for depth in [ResNetDepth::D18, ResNetDepth::D50] {
        for format in [Format::Bf16, Format::F16, Format::F32] {
            let kinds = kinds(depth, format);
            assert!(kinds.len() > 20, "{kinds:?}");
            let mut most = 0;
            for kind in &kinds {
                let asked = ask(&cudnn, &device, &kind.described(Arithmetic::Ieee), MOST_WORKSPACE);
                let Accepted { workspace_bytes, plan } = asked.unwrap_or_else(|error| panic!("{kind:?}: {error}"));
                assert!(plan.contains("91900"), "{plan}");
                most = most.max(workspace_bytes);
            }
            println!("{depth:?} in {format:?}: {} kinds, at most {most} bytes of workspace", kinds.len());
        }
    }
}
