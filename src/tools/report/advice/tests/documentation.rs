//! The page about the rules.

use super::*;

/// The table in docs/dev/advice.md is generated from the rules.
#[test]
fn the_documentation_lists_every_rule() {
    let page = include_str!("../../../../../docs/dev/advice.md");
    let mut table = String::from("| rule | speaks when | gain | threshold from |\n|---|---|---|---|\n");
    for rule in &RULES {
        let (threshold, gain, source) = (rule.threshold, rule.gain, rule.source);
        table.push_str(&format!("| `{}` ({}) | {threshold} | {gain} | {source} |\n", rule.id, rule.question));
    }
    assert!(page.contains(&table), "docs/dev/advice.md differs from the rules; expected:\n{table}");
    let mut questions: Vec<u8> = RULES.iter().map(|rule| rule.question).collect();
    questions.dedup();
    assert!(questions.windows(2).all(|pair| pair[0] < pair[1]), "not in the order of diagnosis: {questions:?}");
}

/// Regression: "with 1 thread and has 2 cores. Try cpuThreads 1 -> 2" in a pod limited to one CPU.
#[test]
fn advised_threads_stay_within_the_pods_limit() {
    let is_advised = |limit: Option<f64>| {
        let mut facts = healthy();
        facts.ranks[1].threads = Some(1);
        facts.cpu_limit = limit;
        matches!(finding_of("too-few-threads", &facts), Finding::Advice(_))
    };
    assert_eq!([None, Some(4.0), Some(2.0), Some(1.0), Some(0.3)].map(is_advised), [true, true, false, false, false]);
}
