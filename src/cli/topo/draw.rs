use switchyard_crds::gpu_topology::GPUTopology;
pub fn dot(_: &GPUTopology) -> String {
    String::new()
}
pub fn svg(_: &GPUTopology) -> String {
    String::new()
}
