//! Adds facts from the job's status to an error in its logs: where the rank was, the decisions
//! about related settings, and the finding of the preflight check for this error.

use super::Attempt;
use serde::Serialize;
use switchyard_crds::{DecisionOutcome, FabricStatus, ObservedVerdict, PlacedNode, TrainJob};

/// A job in a cluster, and its pods that still exist.
#[derive(Debug, Clone)]
pub struct Gang {
    /// The job, with its status.
    pub job: TrainJob,
    pub pods: Vec<PodFacts>,
    /// Ranks per pod, at least 1.
    pub per_node: u32,
    /// Pods whose logs could not be read, with the reason.
    pub unread: Vec<String>,
}

/// Where a pod ran.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodFacts {
    pub name: String,
    pub attempt: u32,
    /// Node rank in the job.
    pub node_rank: u32,
    pub node: Option<String>,
}

/// A fact about an error in this gang.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Fact {
    /// Its topic, in one word.
    pub about: &'static str,
    /// The fact.
    pub text: String,
}

/// Settings whose decisions are shown with an error, by error id.
pub(super) const SETTINGS: [(&str, &[&str]); 14] = [
    ("nccl-no-interface", &["NCCL_SOCKET_IFNAME"]),
    ("nccl-connect", &["NCCL_SOCKET_IFNAME"]),
    ("nccl-network-plugin", &["NCCL_NET", "NCCL_IB_DISABLE", "NCCL_IB_HCA"]),
    ("nccl-over-tcp", &["NCCL_NET", "NCCL_IB_DISABLE", "NCCL_IB_HCA"]),
    ("nccl-topology-file", &["NCCL_TOPO_FILE"]),
    ("nccl-bad-setting", &["NCCL_ALGO", "NCCL_PROTO"]),
    ("rdma-gid", &["NCCL_IB_GID_INDEX", "NCCL_IB_ADDR_FAMILY"]),
    ("rdma-retry", &["NCCL_IB_HCA", "NCCL_IB_TIMEOUT", "NCCL_IB_GID_INDEX"]),
    ("rdma-port", &["NCCL_IB_HCA"]),
    ("imex", &["NCCL_MNNVL_ENABLE", "NCCL_CUMEM_ENABLE"]),
    ("fabric-manager", &["NCCL_NVLS_ENABLE"]),
    ("gloo-address", &["GLOO_SOCKET_IFNAME"]),
    ("gloo-mesh", &["GLOO_SOCKET_IFNAME"]),
    ("mpi-interface", &["OMPI_MCA_btl_tcp_if_include"]),
];

impl Gang {
    /// Facts about the first error of an attempt.
    pub fn facts(&self, attempt: &Attempt) -> Vec<Fact> {
        let Some(first) = &attempt.first else { return Vec::new() };
        let status = self.job.status.as_ref();
        let pods = || self.pods.iter().filter(|pod| attempt.attempt.is_none_or(|number| pod.attempt == number));
        let per_node = self.per_node.max(1);
        let pod = match first.rank {
            Some(rank) => pods().find(|pod| pod.node_rank == rank / per_node),
            None => pods().find(|pod| first.log.split(['/', '.']).any(|part| part == pod.name)),
        };
        let mut facts = Vec::new();
        if let Some(pod) = pod {
            let placed = status.and_then(|status| status.placement.as_ref());
            let placed =
                placed.and_then(|placed| placed.nodes.iter().find(|node| Some(&node.node_name) == pod.node.as_ref()));
            facts.push(Fact { about: "here", text: place(pod, placed, first.rank.map(|rank| rank % per_node)) });
        }
        let Some(fabric) = status.and_then(|status| status.fabric.as_ref()) else { return facts };
        facts.extend(settings(fabric, first.error.id));
        facts.extend(numbers(first.error.told_by).into_iter().map(|check| of_check(fabric, check)));
        if first.error.id.starts_with("nccl") || first.error.id.starts_with("rdma") {
            facts.extend(fabric.summary.as_ref().map(|text| Fact { about: "planned", text: text.clone() }));
        }
        let seen = fabric.observed.as_ref().filter(|seen| seen.verdict != ObservedVerdict::Unknown);
        facts.extend(seen.map(|seen| Fact { about: "seen", text: seen.message.clone() }));
        facts
    }
}

/// Pod, node and devices; only the rank's own GPU if its local rank is known.
fn place(pod: &PodFacts, placed: Option<&PlacedNode>, local: Option<u32>) -> String {
    let node = pod.node.as_deref().unwrap_or("no node");
    let mut text = format!("pod {} on {node}", pod.name);
    let Some(placed) = placed else { return text };
    match local.and_then(|local| placed.gpus.get(local as usize)) {
        Some(gpu) => text.push_str(&format!(", GPU {gpu}")),
        None if !placed.gpus.is_empty() => text.push_str(&format!(", GPUs {}", placed.gpus.join(" "))),
        None => {}
    }
    if !placed.shape.nics.is_empty() {
        text.push_str(&format!(", NICs {}", placed.shape.nics.join(" ")));
    }
    text
}

/// The decisions about the settings related to an error.
fn settings<'a>(fabric: &'a FabricStatus, id: &str) -> impl Iterator<Item = Fact> + 'a {
    let names = SETTINGS.iter().find(|(known, _)| *known == id).map_or(&[][..], |(_, names)| names);
    let decisions = fabric.decisions.iter().filter(move |decision| names.contains(&decision.name.as_str()));
    decisions.map(|decision| {
        let value = decision.value.as_deref().unwrap_or_default();
        let nodes = decision.nodes.as_ref().map_or(String::new(), |nodes| format!(" on nodes {nodes}"));
        let text = match decision.outcome {
            DecisionOutcome::Set => format!("{}={value} was set{nodes}: {}", decision.name, decision.reason),
            DecisionOutcome::User => format!("{}={value} is your own: {}", decision.name, decision.reason),
            DecisionOutcome::NotSet => format!("{} was left alone: {}", decision.name, decision.reason),
            DecisionOutcome::Unknown => {
                format!("{} was decided by another version: {}", decision.name, decision.reason)
            }
        };
        Fact { about: "setting", text }
    })
}

/// The finding for this gang of the preflight check for an error.
fn of_check(fabric: &FabricStatus, check: i32) -> Fact {
    let about = "check";
    let Some(preflight) = &fabric.preflight else {
        return Fact {
            about,
            text: format!("the job started without preflight check {check} (docs/placement-and-fabric.md#preflight)"),
        };
    };
    let found = preflight.findings.iter().find(|finding| finding.check == check);
    let skipped = preflight.skipped.iter().find(|skip| skip.check == check);
    let text = match (found, skipped) {
        (Some(finding), _) => {
            format!("preflight check {check} had found it: {}; fix: {}", finding.message, finding.fix)
        }
        (None, Some(skip)) => format!("preflight check {check} ({}) could not run: {}", skip.title, skip.reason),
        (None, None) => format!("preflight check {check} found nothing wrong when the gang was placed"),
    };
    Fact { about, text }
}

/// Numbers of the preflight checks named in a text.
fn numbers(told_by: &str) -> Vec<i32> {
    let part = told_by.split(';').find(|part| part.contains("preflight check")).unwrap_or_default();
    part.split(|letter: char| !letter.is_ascii_digit()).filter_map(|number| number.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::{Doctor, known};
    use serde_json::json;

    fn gang(fabric: serde_json::Value) -> Gang {
        let job = json!({
            "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "gpt"},
            "spec": {"trainer": {"framework": "Torch", "numNodes": 2, "numProcPerNode": 2}},
            "status": {"fabric": fabric, "placement": {"reason": "r", "score": 1, "nodes": [
                {"firstRank": 0, "nodeName": "gpu-1", "gpus": ["GPU-a", "GPU-b"]},
                {"firstRank": 2, "nodeName": "gpu-2", "gpus": ["GPU-c", "GPU-d"], "nics": ["mlx5_0"]},
            ]}},
        });
        let pod = |node_rank: u32| PodFacts {
            name: format!("gpt-1-{node_rank}"),
            attempt: 1,
            node_rank,
            node: Some(format!("gpu-{}", node_rank + 1)),
        };
        Gang { job: serde_json::from_value(job).unwrap(), pods: vec![pod(0), pod(1)], per_node: 2, unread: Vec::new() }
    }

    fn facts(gang: &Gang, line: &str) -> Vec<String> {
        let mut doctor = Doctor::new().unwrap();
        let mut log = doctor.open("attempt-1/gpt-1-1.log", 2026);
        doctor.line(&mut log, line.as_bytes());
        let facts = gang.facts(&doctor.diagnosis().attempts[0]);
        facts.into_iter().map(|fact| format!("{}: {}", fact.about, fact.text)).collect()
    }

    #[test]
    fn an_error_is_shown_with_its_rank_devices_and_check() {
        let finding = json!({"check": 7, "title": "/dev/shm", "severity": "Block", "message": "64 MiB", "evidence": "e", "fix": "leave it"});
        let preflight = json!({"passed": 20, "notApplicable": 1, "findings": [finding],
            "skipped": [{"check": 8, "title": "locked memory", "reason": "no report of gpu-2"}]});
        let gang = gang(json!({"summary": "RDMA over 1 NIC", "preflight": preflight, "decisions": [
            {"name": "NCCL_SOCKET_IFNAME", "outcome": "User", "value": "eth9", "class": "Must", "reason": "it is yours", "evidence": "e", "link": "l"},
        ]}));
        assert_eq!(
            facts(&gang, "[rank3]: Bus error (failed to extend /dev/shm)"),
            [
                "here: pod gpt-1-1 on gpu-2, GPU GPU-d, NICs mlx5_0",
                "check: preflight check 7 had found it: 64 MiB; fix: leave it"
            ]
        );
        let of_log = facts(&gang, "NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory");
        assert_eq!(of_log[0], "here: pod gpt-1-1 on gpu-2, GPUs GPU-c GPU-d, NICs mlx5_0");
        assert!(of_log[1].contains("check 8 (locked memory) could not run: no report of gpu-2"), "{of_log:?}");
        let of_setting = facts(&gang, "NCCL WARN Bootstrap : no socket interface found");
        assert_eq!(of_setting[1], "setting: NCCL_SOCKET_IFNAME=eth9 is your own: it is yours");
        assert!(of_setting[2].contains("check 2 found nothing wrong"), "{of_setting:?}");
        assert_eq!(of_setting[3], "planned: RDMA over 1 NIC");
    }

    #[test]
    fn settings_are_shown_for_known_errors_with_decisions() {
        for (id, names) in SETTINGS {
            assert!(known().any(|known| known.id == id) && !names.is_empty(), "{id}");
        }
        assert_eq!(numbers("lint rule gid-index; preflight checks 3 and 6"), [3, 6]);
        assert_eq!(numbers("lint rule process-count"), [] as [i32; 0]);
    }
}
