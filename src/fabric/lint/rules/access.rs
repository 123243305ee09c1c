//! What a pod asks of its node, and what refuses it.

use super::{Found, Severity, Text};
use crate::lint::view::{Group, Kind, Workload};

/// `host-access`.
pub(super) fn check(workload: &Workload, group: &Group, found: &mut Found) {
    let will_be = match workload.kind {
        Kind::TrainJob => "",
        Kind::PyTorchJob | Kind::MpiJob | Kind::ReplicaJob | Kind::KubeflowTrainJob => "once this is a TrainJob, ",
        Kind::Pods | Kind::NcclConf => return,
    };
    for (path, words) in &group.host_access {
        let why = format!(
            "{will_be}the admission policies of Switchyard refuse it when the job is created, unless admissionPolicy.allow names the namespace, \
             and Pod Security refuses it in namespaces of level baseline and restricted"
        );
        let fix = "do without it, or ask an administrator to allow it for the namespace";
        found.add("host-access", Severity::Warning, path, Text::new(words, why, fix));
    }
}
