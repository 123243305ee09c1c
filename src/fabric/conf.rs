//! The settings file that NCCL reads, one per node. It is the only channel for node-specific
//! settings, because the environment of a pod is fixed before its node is known. It cannot override
//! a user's value.

use super::rules::{Rule, is_for};
use switchyard_crds::{DecisionOutcome, FabricDecision};

/// Directory of the merged file in the trainer.
pub const CONF_DIR: &str = "/etc/switchyard/fabric";
/// Directory of our part, before the merge.
pub const STAGING_DIR: &str = "/etc/switchyard/fabric-plan";

/// Script of the init container, run in the trainer's image. NCCL uses the first line that it reads
/// for a variable (`setEnvFile` with `overwrite` 0, `src/misc/param.cc`), so the image's own files
/// come first and win. The comment terminates a last line without a line feed; it must start in the
/// first column. The reasons go to the log, where they can be read later.
pub const MERGE_SCRIPT: &str = "set -eu
for own in \"${HOME:-/root}/.nccl.conf\" /etc/nccl.conf /etc/switchyard/fabric-plan/nccl.conf; do
  if [ -r \"$own\" ]; then
    cat \"$own\"
    printf '\\n# end of %s\\n' \"$own\"
  fi
done > /etc/switchyard/fabric/nccl.conf
cat /etc/switchyard/fabric-plan/reasons.txt
";

/// The file for one node.
pub fn conf(decisions: &[FabricDecision], rank: u32) -> String {
    let mut text =
        String::from("# Settings that Switchyard derived from this node. Reasons: switchyard explain JOB --fabric\n");
    for decision in decisions.iter().filter(|decision| is_in_file(decision) && is_for(decision, rank)) {
        // Everything after the first `=` is the value, including blanks.
        text.push_str(&format!("{}={}\n", decision.name, decision.value.as_deref().unwrap_or_default()));
    }
    text
}

/// The settings of all nodes with their reasons, one per line, for the init container's log.
pub fn reasons(decisions: &[FabricDecision]) -> String {
    let mut text = String::new();
    for FabricDecision { name, outcome, value, reason, nodes, .. } in decisions {
        let value = value.as_ref().map(|value| format!("={value}")).unwrap_or_default();
        let on = nodes.as_ref().map(|nodes| format!(" (nodes {nodes})")).unwrap_or_default();
        let how = match outcome {
            DecisionOutcome::Set => "set",
            DecisionOutcome::User => "your own, which stays",
            DecisionOutcome::NotSet => "left alone",
            DecisionOutcome::Unknown => "decided by another version",
        };
        text.push_str(&format!("{name}{value}{on}: {how}: {reason}\n"));
    }
    text
}

fn is_in_file(decision: &FabricDecision) -> bool {
    decision.outcome == DecisionOutcome::Set && !Rule::is_env(&decision.name)
}
