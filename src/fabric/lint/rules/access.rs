//! Access to the node that a pod requests and that policies reject.

use super::{Findings, Message, Severity};
use crate::lint::view::{Group, Kind, Workload};

/// `host-access`.
pub(super) fn check(workload: &Workload, group: &Group, found: &mut Findings) {
    let when = match workload.kind {
        Kind::TrainJob => "",
        Kind::PyTorchJob | Kind::MpiJob | Kind::ReplicaJob | Kind::KubeflowTrainJob => "once this is a TrainJob, ",
        Kind::Pods | Kind::NcclConf => return,
    };
    for (path, words) in &group.host_access {
        let why = format!(
            "{when}the admission policies of Switchyard refuse it when the job is created, unless admissionPolicy.allow names the namespace, \
             and Pod Security refuses it in namespaces of level baseline and restricted"
        );
        let fix = "do without it, or ask an administrator to allow it for the namespace";
        found.add("host-access", Severity::Warning, path, Message::new(words, why, fix));
    }
}
