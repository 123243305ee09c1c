//! Checks that the admission policies are in force. Without them, a TrainJob may request resources
//! that its author has no right to, and nothing else would reveal it. A faulty policy, on the other
//! hand, may refuse everybody's pods.
//!
//! The chart names the policies (`--admission-policy`), and the controller polls them. This
//! requires only the right to get these names, whereas a watch would require the right to list all
//! policies. The leader also tests them with server dry runs that create pods which the API server
//! must refuse or accept. It reports the findings in the log, in the metrics, and in an annotation
//! of its Lease.

use super::Context;
use k8s_openapi::api::admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use std::collections::BTreeSet;
use std::time::Duration;
use switchyard_plan::policies::{Finding, Probe, fault};
use switchyard_service::trial;
use tokio::sync::watch::{Receiver, Sender};
use tracing::{debug, info, warn};

/// First and longest pause between two checks while a policy is missing. Helm creates policies
/// after the Deployment.
const INITIAL_PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// Pause while all policies are in force.
const PERIOD: Duration = Duration::from_secs(120);

/// Checks the policies until `stop` becomes true, and whenever this controller becomes the leader.
/// Reports changes in the log, and the state in the metrics and to `report`.
pub(super) async fn run(context: Context, report: Sender<Option<String>>, mut stop: Receiver<bool>) {
    if context.settings.admission_policies.is_empty() {
        return;
    }
    let mut logged: Option<Vec<String>> = None;
    let mut pause = INITIAL_PAUSE;
    let mut leadership = context.leadership.clone();
    while !*stop.borrow() {
        let is_leader = leadership.is_held();
        let faults = context.policy_faults(is_leader).await;
        let is_new = logged.as_ref() != Some(&faults);
        if is_new {
            match faults.as_slice() {
                [] => info!("the admission policies are in force"),
                faults => {
                    warn!(reason = "PolicyMissing", policies = faults.join("; "), "admission policies are not in force")
                }
            }
        }
        report.send_replace(is_leader.then(|| if faults.is_empty() { "ok".into() } else { faults.join("; ") }));
        pause = if is_new { INITIAL_PAUSE } else { (2 * pause).min(MAX_PAUSE) };
        let next = if faults.is_empty() { PERIOD } else { pause };
        logged = Some(faults);
        tokio::select! {
            () = tokio::time::sleep(next) => {}
            () = leadership.changed() => {}
            _ = stop.wait_for(|stop| *stop) => {}
        }
    }
}

impl Context {
    /// Faults of the policies, each prefixed with the policy name. Also updates the metrics.
    async fn policy_faults(&self, is_leader: bool) -> Vec<String> {
        let (mut missing, mut faults) = self.policies_missing().await;
        let findings = if is_leader { self.probe_policies().await } else { Vec::new() };
        missing.extend(findings.iter().filter(|finding| !finding.blocks_pods).map(|finding| finding.policy.clone()));
        for name in &self.settings.admission_policies {
            let rejects = findings.iter().any(|finding| finding.blocks_pods && finding.policy == *name);
            self.metrics.policy(name, missing.contains(name), rejects);
        }
        // Skip findings about policies that are already reported: an absent one refuses nothing.
        for Finding { policy, fault, .. } in findings {
            let prefix = format!("{policy}: ");
            if !faults.iter().any(|reported| reported.starts_with(&prefix)) {
                faults.push(prefix + &fault);
            }
        }
        faults
    }

    /// Names of the policies that are not in force, and the faults of all policies.
    async fn policies_missing(&self) -> (BTreeSet<String>, Vec<String>) {
        let policies = Api::<ValidatingAdmissionPolicy>::all(self.client.clone());
        let bindings = Api::<ValidatingAdmissionPolicyBinding>::all(self.client.clone());
        let (mut missing, mut faults) = (BTreeSet::new(), Vec::new());
        for name in &self.settings.admission_policies {
            let found = async { Ok::<_, kube::Error>((policies.get_opt(name).await?, bindings.get_opt(name).await?)) };
            match found.await {
                Ok((policy, binding)) => {
                    if let Some(fault) = fault(policy.as_ref(), binding.as_ref()) {
                        missing.insert(name.clone());
                        faults.push(format!("{name}: {fault}"));
                    }
                }
                // An error for one policy applies to the others, too.
                Err(error) => {
                    faults.push(format!("{name}: cannot be read: {error}"));
                    break;
                }
            }
        }
        (missing, faults)
    }

    /// Creates the probe pods in dry runs.
    async fn probe_policies(&self) -> Vec<Finding> {
        let namespace = self.settings.watch_namespaces.first().unwrap_or(&self.settings.namespace);
        let pods = Api::<Pod>::namespaced(self.client.clone(), namespace);
        let mut findings = Vec::new();
        for probe in Probe::ALL {
            let response = trial(&pods, &probe.pod()).await;
            debug!(?probe, answer = ?response, "created a probe pod in a dry run");
            findings.extend(
                probe.evaluate(&self.settings.admission_policies, response.as_ref().copied().map_err(String::as_str)),
            );
        }
        findings
    }
}
