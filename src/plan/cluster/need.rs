//! What the pods of a job ask of a node.

use super::question::Question;
use switchyard_core::quantity::Resources;
use switchyard_crds::names::GPU_RESOURCE;
use switchyard_crds::{DeviceAllocation, MinLink, TopologyMode};

#[derive(Debug)]
pub(super) struct Need<'a> {
    pub question: &'a Question<'a>,
    /// Amounts, without GPUs.
    pub amounts: Resources,
    /// `None`: it asks for no GPUs, or the way to them is undecided.
    pub allocation: Option<DeviceAllocation>,
    /// A node without a report may not be used.
    pub reported_only: bool,
}

impl<'a> Need<'a> {
    pub fn of(question: &'a Question<'a>) -> Need<'a> {
        let Question { job, valid, .. } = *question;
        let status = job.status.as_ref();
        let policy = &job.spec.topology_policy;
        Need {
            question,
            amounts: question.admitted.requests.clone().without(GPU_RESOURCE),
            allocation: status.and_then(|status| status.device_allocation).filter(|_| valid.pod.gpus > 0),
            reported_only: policy.mode == TopologyMode::Required && policy.node_topology.min_link != MinLink::System,
        }
    }

    /// GPUs of each pod.
    pub fn gpus(&self) -> u32 {
        self.question.valid.pod.gpus
    }
}
