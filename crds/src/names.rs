//! Names in pods that several parts of Switchyard must agree on.

/// The training container, in a job's pods and in Kubeflow templates.
pub const TRAINER: &str = "trainer";
/// Annotation with kubectl's copy of the last applied manifest.
pub const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// Extended resource of NVIDIA's device plugin: whole GPUs.
pub const GPU_RESOURCE: &str = "nvidia.com/gpu";
