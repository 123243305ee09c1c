//! What the pods of a gang ask for as they were admitted. Admission adds to the template: tolerations, selectors of namespaces and queues,
//! defaults of a LimitRange, the overhead of a runtime, sidecars.

use super::view::PodView;
use crate::ValidJob;
use crate::eligible::NodeRules;
use std::sync::Arc;
use switchyard_core::quantity::Resources;
use switchyard_crds::TrainJobStatus;

#[derive(Debug, Clone, PartialEq)]
pub struct Admitted {
    /// Of the pod that asks for most.
    pub requests: Resources,
    /// What the pods say of their nodes, each rule once.
    pub rules: Vec<Arc<NodeRules>>,
}

impl Admitted {
    /// As the template says, for pods that have not been made.
    pub fn of_template(valid: &ValidJob, status: Option<&TrainJobStatus>) -> Admitted {
        Admitted { requests: valid.pod.requests(status), rules: vec![Arc::new(NodeRules::of(&valid.pod.spec))] }
    }

    /// As the gated pods say; as the template says where there are none.
    pub fn of<'a>(
        valid: &ValidJob,
        status: Option<&TrainJobStatus>,
        pods: impl IntoIterator<Item = &'a PodView>,
    ) -> Admitted {
        let mut requests = Resources::default();
        let mut rules: Vec<Arc<NodeRules>> = Vec::new();
        for pod in pods {
            let Some(own) = &pod.rules else { continue };
            requests = requests.max(&pod.requests);
            if !rules.contains(own) {
                rules.push(own.clone());
            }
        }
        if rules.is_empty() { Admitted::of_template(valid, status) } else { Admitted { requests, rules } }
    }
}
