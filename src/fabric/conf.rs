//! The settings that NCCL reads from a file, one file for each node: the only channel for what depends on the node, since the environment
//! of a pod is fixed before its node is known, and one by which no user's value can be overridden.

use super::rules::{Rule, is_for};
use switchyard_crds::{DecisionOutcome, FabricDecision};

/// Directory of the file in the trainer.
pub const FOLDER: &str = "/etc/switchyard/fabric";
/// Where our part is while the two are put together.
pub const PLAN: &str = "/etc/switchyard/fabric-plan";

/// What the init container runs, in the trainer's image: of one variable NCCL takes the first line that it reads
/// (`setEnvFile` with `overwrite` 0, `src/misc/param.cc`), so the image's own files come first and win. A comment ends a last line without
/// its end; it has to stand in the first column. The reasons go to the log, where whoever looks at a run later finds them.
pub const MERGE: &str = "set -eu
for own in \"${HOME:-/root}/.nccl.conf\" /etc/nccl.conf /etc/switchyard/fabric-plan/nccl.conf; do
  if [ -r \"$own\" ]; then
    cat \"$own\"
    printf '\\n# end of %s\\n' \"$own\"
  fi
done > /etc/switchyard/fabric/nccl.conf
cat /etc/switchyard/fabric-plan/reasons.txt
";

/// The file of a node.
pub fn conf(decisions: &[FabricDecision], rank: u32) -> String {
    let mut text =
        String::from("# Settings that Switchyard derived from this node. Reasons: switchyard explain JOB --fabric\n");
    for decision in decisions.iter().filter(|decision| is_in_file(decision) && is_for(decision, rank)) {
        // Everything behind the first `=` is the value, blanks too.
        text.push_str(&format!("{}={}\n", decision.name, decision.value.as_deref().unwrap_or_default()));
    }
    text
}

/// The settings of all nodes with their reasons, one in a line: what the init container writes to its log.
pub fn reasons(decisions: &[FabricDecision]) -> String {
    let mut text = String::new();
    for FabricDecision { name, outcome, value, reason, nodes, .. } in decisions {
        let value = value.as_ref().map(|value| format!("={value}")).unwrap_or_default();
        let on = nodes.as_ref().map(|nodes| format!(" (nodes {nodes})")).unwrap_or_default();
        let how = match outcome {
            DecisionOutcome::Set => "set",
            DecisionOutcome::User => "your own, which stays",
            DecisionOutcome::NotSet => "left alone",
        };
        text.push_str(&format!("{name}{value}{on}: {how}: {reason}\n"));
    }
    text
}

fn is_in_file(decision: &FabricDecision) -> bool {
    decision.outcome == DecisionOutcome::Set && !Rule::is_env(&decision.name)
}
