//! Decides all settings of a gang from the rules, the profile and the user's own values.

use super::gang::Gang;
use super::profile::{Carrier, Profile, training_ports};
use super::rules::{self, Outcome, Rule};
use crate::variables::{self, nccl};
use std::collections::{BTreeMap, BTreeSet};
use switchyard_crds::{DecisionClass, DecisionOutcome, FabricDecision, FabricMode};

/// Maximum number of entries in `status.fabric.decisions`.
const MAX_DECISIONS: usize = 128;
/// Maximum length of reason and evidence, in characters.
const MAX_TEXT_LEN: usize = 512;

/// Why a gang must not start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub struct FabricRefusal {
    pub why: String,
    /// Ranks of the nodes without which it could start; empty if the job or the whole gang is the
    /// cause.
    pub ranks: Vec<u32>,
}

/// Decides every setting. Settings come first, and each group keeps the order of the rules.
///
/// # Errors
/// The job requires a missing transport, or a value does not fit into NCCL's file. The message is
/// one sentence with the nodes and the fix.
pub fn decide(gang: &Gang<'_>) -> Result<Vec<FabricDecision>, FabricRefusal> {
    check_required(gang)?;
    let mut decisions = Vec::new();
    let mut decided: BTreeSet<&str> = BTreeSet::new();
    for rule in rules::RULES.iter().filter(|rule| rule.applies(gang)) {
        decided.insert(rule.name);
        match gang.own.get(rule.name) {
            Some(value) => decisions.push(from_user(gang, rule, *value)),
            None => decisions.extend(from_rule(gang, rule)?),
        }
    }
    for profile in gang.profile.into_iter().filter(|_| gang.gpus > 0 && gang.has_several_nodes()) {
        let settings = profile.settings.iter().map(|setting| (setting.name.as_str(), DecisionClass::May));
        let left = profile.leave.iter().map(|left| (left.name.as_str(), DecisionClass::Never));
        for (name, class) in settings.chain(left).filter(|(name, _)| decided.insert(name)) {
            let Some(decision) = from_profile(profile, name, class) else { continue };
            let Some(value) = gang.own.get(name) else {
                decisions.push(decision);
                continue;
            };
            let what = match &decision.value {
                Some(ours) => format!("the profile says {ours}"),
                None => "the profile leaves it alone".into(),
            };
            decisions.push(keep_user_value(decision, *value, &what));
        }
    }
    for (name, value) in gang.own.iter().filter(|(name, _)| name.starts_with(nccl::PREFIX) && !decided.contains(**name))
    {
        let evidence = "the environment of the trainer".to_string();
        let decision = unset(name, DecisionClass::May, "no rule is about it", evidence, nccl::GUIDE);
        decisions.push(keep_user_value(decision, *value, "`switchyard lint` says what is known of it"));
    }
    decisions.sort_by_key(|decision| decision.outcome);
    decisions.truncate(MAX_DECISIONS);
    Ok(decisions)
}

/// Checks that a job that must not fall back to TCP has another transport on every node.
fn check_required(gang: &Gang<'_>) -> Result<(), FabricRefusal> {
    if gang.mode != FabricMode::Required || !gang.has_several_nodes() || gang.gpus == 0 {
        return Ok(());
    }
    let refuse =
        |ranks: Vec<u32>, text: String| Err(FabricRefusal { why: format!("fabric.mode is Required: {text}"), ranks });
    let silent = ranks(gang, |member| member.facts.is_none());
    if !silent.is_empty() {
        let text = format!("the fabric of {} is unknown: the node agent does not report", gang.names(&silent));
        return refuse(silent, text);
    }
    match gang.carrier() {
        None => refuse(
            Vec::new(),
            "the nodes have different fabrics, or do not say which; restrict the job to nodes of one kind".into(),
        ),
        Some(Carrier::Socket) => refuse(
            (0..gang.members.len() as u32).collect(),
            "no node has an RDMA port that is up, and data would go over TCP; choose other nodes, or mode Auto".into(),
        ),
        Some(Carrier::Plugin) => Ok(()),
        Some(Carrier::InfiniBand | Carrier::RoCE) => {
            let without =
                ranks(gang, |member| member.facts.is_some_and(|facts| training_ports(facts).next().is_none()));
            if !without.is_empty() {
                let text = format!("{}: no RDMA port is up; NCCL would use TCP there", gang.names(&without));
                return refuse(without, text);
            }
            if !gang.is_granted() {
                return refuse(
                    Vec::new(),
                    "the pods ask for no RDMA device, and data would go over TCP; no resource of the nodes gives one, or several do: \
                     name it in trainer.resourcesPerNode.limits or in the administrator's profile"
                        .into(),
                );
            }
            Ok(())
        }
    }
}

/// Ranks of the nodes for which a predicate holds.
pub(super) fn ranks(gang: &Gang<'_>, is: impl Fn(&super::Member<'_>) -> bool) -> Vec<u32> {
    (0..).zip(&gang.members).filter(|(_, member)| is(member)).map(|(rank, _)| rank).collect()
}

/// The profile's decision about a variable.
fn from_profile(profile: &Profile, name: &str, class: DecisionClass) -> Option<FabricDecision> {
    let evidence = format!("{}: the profile of this fabric", profile.name);
    if let Some(setting) = profile.settings.iter().find(|setting| setting.name == name) {
        let decision = unset(name, class, &setting.reason, evidence, &setting.link);
        return Some(FabricDecision { outcome: DecisionOutcome::Set, value: Some(setting.value.clone()), ..decision });
    }
    let left = profile.leave.iter().find(|left| left.name == name)?;
    Some(unset(name, class, &left.reason, evidence, &left.link))
}

fn from_rule(gang: &Gang<'_>, rule: &Rule) -> Result<Vec<FabricDecision>, FabricRefusal> {
    let profile = gang.profile.filter(|_| gang.gpus > 0);
    if let Some(decision) = profile.and_then(|profile| from_profile(profile, rule.name, rule.class)) {
        return Ok(vec![decision]);
    }
    // Equal outcomes on several nodes are folded into one decision.
    let mut folded: BTreeMap<Outcome, Vec<u32>> = BTreeMap::new();
    let members = 0..gang.members.len() as u32;
    if rule.is_per_node() {
        for rank in members {
            folded.entry(rule.outcome(gang, rank)).or_default().push(rank);
        }
    } else {
        folded.insert(rule.outcome(gang, 0), members.collect());
    }
    let mut decisions = Vec::new();
    for (outcome, ranks) in folded {
        let nodes = gang.list(&ranks);
        let Outcome { value, reason, evidence } = outcome;
        if let Some(value) = &value
            && value.len() > nccl::MAX_VALUE_LEN
        {
            let (name, length) = (rule.name, value.len());
            let why = format!(
                "{name} of {}: got a value of {length} bytes; expected at most {}, since NCCL cuts longer lines of its file",
                gang.names(&ranks),
                nccl::MAX_VALUE_LEN
            );
            return Err(FabricRefusal { why, ranks: if rule.is_per_node() { ranks } else { Vec::new() } });
        }
        let decision = unset(rule.name, rule.class, &reason, evidence, rule.link);
        let outcome = if value.is_some() { DecisionOutcome::Set } else { DecisionOutcome::NotSet };
        decisions.push(FabricDecision { outcome, value, nodes, ..decision });
    }
    decisions.sort_by(|a, b| a.outcome.cmp(&b.outcome).then(a.nodes.cmp(&b.nodes)));
    Ok(decisions)
}

fn from_user(gang: &Gang<'_>, rule: &Rule, value: Option<&str>) -> FabricDecision {
    let Outcome { value: ours, reason, evidence } = rule.outcome(gang, 0);
    let what = match ours {
        Some(ours) if Some(ours.as_str()) == value => format!("Switchyard would set the same: {reason}"),
        Some(ours) => format!("Switchyard would set {ours}: {reason}"),
        None => format!("Switchyard would leave it alone: {reason}"),
    };
    keep_user_value(unset(rule.name, rule.class, "", evidence, rule.link), value, &what)
}

/// Keeps the user's value.
fn keep_user_value(decision: FabricDecision, value: Option<&str>, what: &str) -> FabricDecision {
    let cut = |text: String| text.chars().take(MAX_TEXT_LEN).collect();
    FabricDecision {
        outcome: DecisionOutcome::User,
        // A value can be longer than a status allows.
        value: Some(value.map_or("(from a reference)".into(), |value| value.chars().take(256).collect())),
        reason: cut(format!("the user's own value stays. {what}")),
        ..decision
    }
}

fn unset(name: &str, class: DecisionClass, reason: &str, evidence: String, link: &str) -> FabricDecision {
    let releases = nccl::find(name).filter(|key| key.since > nccl::OLDEST || key.gone.is_some());
    let releases = releases.map(|key| {
        let until = key.gone.map(|gone| format!("before {gone}")).unwrap_or_default();
        format!("{}-{until}", key.since)
    });
    debug_assert!(variables::is_name(name));
    FabricDecision {
        name: name.to_string(),
        outcome: DecisionOutcome::NotSet,
        value: None,
        class,
        reason: reason.chars().take(MAX_TEXT_LEN).collect(),
        evidence: evidence.chars().take(MAX_TEXT_LEN).collect(),
        nodes: None,
        releases,
        link: link.to_string(),
    }
}
