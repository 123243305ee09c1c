//! Admission policies of a release: whether they are in force, and probe pods that verify them with
//! a server-side dry run.

use k8s_openapi::api::admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding};
use k8s_openapi::api::core::v1::{Container, Pod, PodSchedulingGate, PodSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use serde_json::json;
use std::collections::BTreeMap;
use switchyard_crds::labels;

/// Name of probe pods that represent pods of other users. For a dry run of this name by the
/// controller, the policies act as if another user had sent it.
pub const FOREIGN_NAME: &str = "switchyard-foreign-probe";
/// Name of probe pods that represent the controller's own pods.
const OWN_NAME: &str = "switchyard-own-probe";
/// UID of their made-up job.
const UID: &str = "00000000-0000-0000-0000-000000000000";

/// A pod for a dry run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Probe {
    /// A harmless pod without any of our labels: no policy may refuse it.
    Foreign,
    /// Same as `Foreign`, with a job's label.
    Forged,
    /// A pod of the controller that no TrainJob owns.
    Ownerless,
    /// A pod of the controller without its gate.
    Ungated,
}

/// A fault in a policy that a probe found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Name of the policy.
    pub policy: String,
    /// The fault.
    pub fault: String,
    /// True if the policy refuses pods that are not ours, false if it accepts pods that it should
    /// refuse.
    pub blocks_pods: bool,
}

impl Probe {
    /// All probes. Only the controller's account can use the last two.
    pub const ALL: [Probe; 4] = [Probe::Foreign, Probe::Forged, Probe::Ownerless, Probe::Ungated];

    /// The probe's pod. It satisfies Pod Security `restricted`, so that only the policies decide.
    pub fn pod(self) -> Pod {
        let is_own = matches!(self, Probe::Ownerless | Probe::Ungated);
        let owner = OwnerReference {
            api_version: labels::API_VERSION.into(),
            kind: "TrainJob".into(),
            name: OWN_NAME.into(),
            uid: UID.into(),
            controller: Some(true),
            ..OwnerReference::default()
        };
        let gate = PodSchedulingGate { name: labels::GANG_GATE.into() };
        let restricted =
            json!({"runAsNonRoot": true, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}});
        let container = json!({"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}});
        Pod {
            metadata: ObjectMeta {
                name: Some(if is_own { OWN_NAME } else { FOREIGN_NAME }.into()),
                labels: (self != Probe::Foreign).then(|| BTreeMap::from([(labels::JOB_UID.into(), UID.into())])),
                owner_references: (self == Probe::Ungated).then(|| vec![owner]),
                ..ObjectMeta::default()
            },
            spec: Some(PodSpec {
                automount_service_account_token: Some(false),
                scheduling_gates: (self == Probe::Ownerless).then(|| vec![gate]),
                security_context: serde_json::from_value(restricted).ok(),
                containers: vec![Container {
                    name: "probe".into(),
                    image: Some("probe".into()),
                    security_context: serde_json::from_value(container).ok(),
                    ..Container::default()
                }],
                ..PodSpec::default()
            }),
            status: None,
        }
    }

    /// Name suffix of the policy that must refuse the probe, and a description of the probe.
    fn refusing_policy(self) -> Option<(&'static str, &'static str)> {
        match self {
            Probe::Foreign => None,
            Probe::Forged => Some(("-children", "a pod with a job's label from a client other than the controller")),
            Probe::Ownerless => Some(("-controller", "a pod of the controller that belongs to no TrainJob")),
            Probe::Ungated => Some(("-controller-pods", "a pod of the controller without a scheduling gate")),
        }
    }

    /// Evaluates the API server's response to a probe. `answer` is `Ok` if it would create the pod,
    /// otherwise the error message. Refusals by anything else (a quota, another policy, a webhook)
    /// prove nothing.
    pub fn evaluate(self, policies: &[String], answer: Result<(), &str>) -> Option<Finding> {
        let by = answer.err().and_then(denying_policy).filter(|name| policies.iter().any(|policy| policy == name));
        match (self.refusing_policy(), answer) {
            (None, Err(message)) => by.map(|policy| Finding {
                policy: policy.into(),
                fault: format!("refuses pods that are not ours: {message}"),
                blocks_pods: true,
            }),
            (Some((end, what)), Ok(())) => policies.iter().find(|policy| policy.ends_with(end)).map(|policy| Finding {
                policy: policy.clone(),
                fault: format!("does not refuse {what}"),
                blocks_pods: false,
            }),
            (None, Ok(())) | (Some(_), Err(_)) => None,
        }
    }
}

/// The ValidatingAdmissionPolicy that refused a request, from the API server's message.
pub fn denying_policy(message: &str) -> Option<&str> {
    let (_, rest) = message.split_once("ValidatingAdmissionPolicy '")?;
    rest.split_once('\'').map(|(name, _)| name)
}

/// Why a policy refuses nothing, or everything. `None` if it is in force.
pub fn fault(
    policy: Option<&ValidatingAdmissionPolicy>,
    binding: Option<&ValidatingAdmissionPolicyBinding>,
) -> Option<&'static str> {
    let Some(policy) = policy else { return Some("the ValidatingAdmissionPolicy does not exist") };
    let bound = binding.and_then(|binding| binding.spec.as_ref());
    let Some(bound) = bound.filter(|bound| bound.policy_name == policy.metadata.name) else {
        return Some("no ValidatingAdmissionPolicyBinding has its name");
    };
    let denies = bound.validation_actions.iter().flatten().any(|action| action == "Deny");
    (!denies).then_some("its binding does not deny")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn release() -> Vec<String> {
        ["children", "controller", "controller-pods"].map(|name| format!("switchyard-{name}")).into()
    }

    #[test]
    fn a_policy_is_in_force_with_a_binding_that_denies() {
        let found = |policy: Option<Value>, binding: Option<Value>| {
            let policy = policy.map(|metadata| serde_json::from_value(json!({"metadata": metadata})).unwrap());
            let binding = binding.map(|spec| serde_json::from_value(json!({"metadata": {}, "spec": spec})).unwrap());
            fault(policy.as_ref(), binding.as_ref())
        };
        let policy = || Some(json!({"name": "a"}));
        let binding = |name: &str, action: &str| Some(json!({"policyName": name, "validationActions": [action]}));
        assert_eq!(found(policy(), binding("a", "Deny")), None);
        assert_eq!(found(policy(), binding("a", "Audit")), Some("its binding does not deny"));
        for other in [None, binding("b", "Deny")] {
            assert_eq!(found(policy(), other), Some("no ValidatingAdmissionPolicyBinding has its name"));
        }
        assert_eq!(found(None, binding("a", "Deny")), Some("the ValidatingAdmissionPolicy does not exist"));
    }

    #[test]
    fn a_probe_blames_only_the_policy_that_blocks_or_admits_it() {
        let refusal = |name: &str| {
            format!("pods \"a\" is forbidden: ValidatingAdmissionPolicy '{name}' with binding 'b' denied request: no")
        };
        let found = |probe: Probe, answer: Result<(), &str>| {
            probe.evaluate(&release(), answer).map(|finding| (finding.policy, finding.blocks_pods))
        };
        let ours = refusal("switchyard-controller-pods");
        assert_eq!(found(Probe::Foreign, Ok(())), None);
        assert_eq!(found(Probe::Foreign, Err(&ours)), Some(("switchyard-controller-pods".into(), true)));
        for (probe, policy) in [
            (Probe::Forged, "switchyard-children"),
            (Probe::Ownerless, "switchyard-controller"),
            (Probe::Ungated, "switchyard-controller-pods"),
        ] {
            assert_eq!(found(probe, Ok(())), Some((policy.into(), false)));
            assert_eq!(found(probe, Err(&refusal(policy))), None);
        }
        for others in [&refusal("theirs"), "exceeded quota: small", "pods is forbidden: User cannot create resource"] {
            assert!(Probe::ALL.iter().all(|probe| found(*probe, Err(others)).is_none()), "{others}");
        }
    }

    #[test]
    fn a_disabled_policy_is_not_reported() {
        assert_eq!(Probe::Forged.evaluate(&["switchyard-controller".into()], Ok(())), None);
    }
}
