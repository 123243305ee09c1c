//! Ranks advice so that no millisecond is promised twice.

use super::{Advice, Basis, Change, Chart, Finding, RULES, Rule};
use crate::report::facts::Facts;
use crate::report::sample::{Part, Parts};

/// Advice with a gain below this share of the step is folded, percent.
const FOLDED: f64 = 1.0;

/// Advice with its rule and its remaining gain.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::report) struct Item {
    pub rule: &'static str,
    pub advice: Advice,
    /// Minimum saving if all earlier advice is followed too, ms.
    pub gain_ms: Option<f64>,
    pub basis: Basis,
    /// Other advice about the same time.
    pub also: Vec<Change>,
}

/// The results of all rules.
#[derive(Debug, Default)]
pub(in crate::report) struct Ranked {
    /// Best first.
    pub items: Vec<Item>,
    /// Advice that gains less than 1 % of the step.
    pub folded: Vec<Item>,
    pub notes: Vec<(&'static str, String, Chart)>,
    pub fine: Vec<(&'static str, String)>,
    pub unknown: Vec<(&'static str, &'static str)>,
}

/// Runs every rule in diagnosis order and ranks the results.
pub(in crate::report) fn rank(facts: &Facts) -> Ranked {
    let mut ranked = Ranked::default();
    let mut advice: Vec<(&Rule, Advice)> = Vec::new();
    for rule in &RULES {
        match (rule.check)(facts) {
            Finding::Advice(found) => advice.push((rule, found)),
            Finding::Note(text, chart) => ranked.notes.push((rule.id, text, chart)),
            Finding::Fine(text) => ranked.fine.push((rule.id, text)),
            Finding::Unknown(what) => ranked.unknown.push((rule.id, what)),
            Finding::NotApplicable => {}
        }
    }
    // Measured gains claim time before computed ones, then larger gains before smaller ones. The
    // sort is stable, so equal advice stays in diagnosis order.
    let claim = |advice: &Advice| {
        advice.changes.first().map_or((Basis::Guess, 0.0), |first| (first.basis, first.gain_ms.unwrap_or(0.0)))
    };
    advice.sort_by(|(_, a), (_, b)| {
        let ((basis_a, gain_a), (basis_b, gain_b)) = (claim(a), claim(b));
        basis_a.cmp(&basis_b).then(gain_b.total_cmp(&gain_a))
    });
    let mut left = facts.step;
    for (rule, found) in advice {
        ranked.take(rule, found, facts, &mut left);
    }
    let order = |item: &Item| (!item.advice.urgent, item.gain_ms.is_none());
    ranked.items.sort_by(|a, b| {
        order(a).cmp(&order(b)).then(b.gain_ms.unwrap_or_default().total_cmp(&a.gain_ms.unwrap_or_default()))
    });
    ranked
}

impl Ranked {
    /// Grants advice the remaining time that it targets, or joins it with the advice that has
    /// claimed that time.
    fn take(&mut self, rule: &'static Rule, advice: Advice, facts: &Facts, left: &mut Parts) {
        let first = advice.changes.first();
        let basis = first.map_or(Basis::Guess, |change| change.basis);
        let Some(wanted) = first.and_then(|change| change.gain_ms).filter(|gain| gain.is_finite()) else {
            return self.items.push(Item { rule: rule.id, advice, gain_ms: None, basis, also: Vec::new() });
        };
        let gain = draw(left, advice.parts, wanted);
        let too_little = |gain: f64| facts.percent(gain) < FOLDED;
        // Most of it is already claimed, so this is an alternative.
        if gain < wanted / 2.0 && !too_little(wanted) {
            let same = |item: &&mut Item| {
                item.advice.parts.iter().any(|part| advice.parts.contains(part)) && item.gain_ms.is_some()
            };
            if let Some(item) = self.items.iter_mut().find(same) {
                item.also.extend(advice.changes);
                return;
            }
        }
        let item = Item { rule: rule.id, advice, gain_ms: Some(gain), basis, also: Vec::new() };
        if too_little(gain) { &mut self.folded } else { &mut self.items }.push(item);
    }
}

/// Takes up to `wanted` from the parts; returns the amount that was left.
fn draw(left: &mut Parts, parts: &[Part], wanted: f64) -> f64 {
    let mut open = wanted.max(0.0);
    for part in parts {
        let taken = open.min(left[*part]).max(0.0);
        left[*part] -= taken;
        open -= taken;
    }
    wanted.max(0.0) - open
}
