//! Messages of the kubelet's PodResources API v1, with the field numbers of its `api.proto`. Only
//! the fields that we read are declared; decoding skips the others.

/// Response to `List`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ListResponse {
    #[prost(message, repeated, tag = "1")]
    pub pods: Vec<Pod>,
}

/// Response to `GetAllocatableResources`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct AllocatableResponse {
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<Devices>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Pod {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub namespace: String,
    #[prost(message, repeated, tag = "3")]
    pub containers: Vec<Container>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Container {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(message, repeated, tag = "2")]
    pub devices: Vec<Devices>,
    #[prost(message, repeated, tag = "5")]
    pub claims: Vec<Claim>,
}

/// Devices of one resource on the same NUMA nodes.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Devices {
    #[prost(string, tag = "1")]
    pub resource: String,
    #[prost(string, repeated, tag = "2")]
    pub ids: Vec<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Claim {
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(message, repeated, tag = "4")]
    pub devices: Vec<ClaimDevice>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ClaimDevice {
    #[prost(message, repeated, tag = "1")]
    pub cdi: Vec<CdiDevice>,
    #[prost(string, tag = "2")]
    pub driver: String,
    #[prost(string, tag = "3")]
    pub pool: String,
    #[prost(string, tag = "4")]
    pub device: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct CdiDevice {
    #[prost(string, tag = "1")]
    pub name: String,
}
