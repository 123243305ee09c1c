//! Whether the admission policies are in force. Without them a TrainJob may ask for what its author may not have, and nothing else shows it.
//!
//! The chart names them (`--admission-policy`), and they are read from time to time: for that the right to get these names is enough,
//! and a watch would need that to list everybody's.

use super::Context;
use k8s_openapi::api::admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding};
use kube::Api;
use std::time::Duration;
use tokio::sync::watch::Receiver;
use tracing::{info, warn};

/// Pause between two looks while one is missing, at first and at most: Helm makes policies after the Deployment.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Pause while all are in force.
const PAUSE: Duration = Duration::from_secs(120);

/// Looks until `stop` becomes true; says each change in the log, and what holds in the metrics.
pub(super) async fn run(context: Context, mut stop: Receiver<bool>) {
    if context.settings.admission_policies.is_empty() {
        return;
    }
    let mut told: Option<Vec<String>> = None;
    let mut pause = FIRST_PAUSE;
    while !*stop.borrow() {
        let faults = context.policies_missing().await;
        if told.as_ref() != Some(&faults) {
            match faults.as_slice() {
                [] => info!("the admission policies are in force"),
                faults => {
                    warn!(reason = "PolicyMissing", policies = faults.join("; "), "admission policies are not in force")
                }
            }
        }
        let next = if faults.is_empty() { PAUSE } else { pause };
        pause = if faults.is_empty() { FIRST_PAUSE } else { (2 * pause).min(LONGEST_PAUSE) };
        told = Some(faults);
        let _ = tokio::time::timeout(next, stop.wait_for(|stop| *stop)).await;
    }
}

impl Context {
    /// The policies that are not in force, each with the reason.
    async fn policies_missing(&self) -> Vec<String> {
        let policies = Api::<ValidatingAdmissionPolicy>::all(self.client.clone());
        let bindings = Api::<ValidatingAdmissionPolicyBinding>::all(self.client.clone());
        let mut faults = Vec::new();
        for name in &self.settings.admission_policies {
            let found = async { Ok::<_, kube::Error>((policies.get_opt(name).await?, bindings.get_opt(name).await?)) };
            match found.await {
                Ok((policy, binding)) => {
                    let fault = fault(policy.as_ref(), binding.as_ref());
                    self.metrics.policy(name, fault.is_some());
                    faults.extend(fault.map(|fault| format!("{name}: {fault}")));
                }
                // What keeps one from being read keeps the others, too.
                Err(error) => {
                    faults.push(format!("{name}: cannot be read: {error}"));
                    break;
                }
            }
        }
        faults
    }
}

/// Why a policy refuses nothing; `None`: it is in force.
fn fault(
    policy: Option<&ValidatingAdmissionPolicy>,
    binding: Option<&ValidatingAdmissionPolicyBinding>,
) -> Option<&'static str> {
    let Some(policy) = policy else { return Some("there is no such ValidatingAdmissionPolicy") };
    let bound = binding.and_then(|binding| binding.spec.as_ref());
    let Some(bound) = bound.filter(|bound| bound.policy_name == policy.metadata.name) else {
        return Some("it has no ValidatingAdmissionPolicyBinding of its name");
    };
    let denies = bound.validation_actions.iter().flatten().any(|action| action == "Deny");
    (!denies).then_some("its binding does not deny")
}

#[cfg(test)]
mod tests {
    use super::fault;
    use serde_json::{Value, json};

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
            assert_eq!(found(policy(), other), Some("it has no ValidatingAdmissionPolicyBinding of its name"));
        }
        assert_eq!(found(None, binding("a", "Deny")), Some("there is no such ValidatingAdmissionPolicy"));
    }
}
