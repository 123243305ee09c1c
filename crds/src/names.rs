//! Names in pods that several parts of Switchyard must agree on.

/// The container that trains, in a job's pods and in templates of Kubeflow.
pub const TRAINER: &str = "trainer";
/// Extended resource of NVIDIA's device plugin: whole GPUs.
pub const GPU_RESOURCE: &str = "nvidia.com/gpu";
