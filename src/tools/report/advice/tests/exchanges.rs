//! What ranks send, and advice about it.

use super::*;

#[test]
fn the_report_compares_what_is_sent_with_every_gradient_in_32_bits() {
    let mut facts = Facts { transport: Some(Transport::Tcp), reduce_alone_ms: Some(38.0), ..healthy() };
    set(&mut facts, Part::Communication, 36.0);
    let sent = |facts: &Facts| {
        let reduce = crate::report::curves::all_reduce(facts).unwrap();
        let is_advised = format!("{:?}", finding_of("communication-bound", facts)).contains("wireType");
        (reduce.sent_bytes.unwrap(), reduce.sent_bytes_in_full.unwrap(), is_advised)
    };
    assert_eq!(sent(&facts), (24e6, 24e6, true));
    facts.reduce = Some(Reduce { busy_ms: 8.0, bytes: 1.5e6, left_bytes: None });
    engine_of(&mut facts).sync =
        serde_json::from_value(json!({"local": {"everySteps": 16, "outerOptimizer": "average"}})).unwrap();
    assert_eq!(sent(&facts), (1.5e6, 24e6, false), "FP16 would be refused");
    engine_of(&mut facts).overlap.wire_type = WireType::Bf16;
    assert_eq!(sent(&facts).0, 0.75e6);
    facts.transport = Some(Transport::Shm);
    assert_eq!(sent(&facts).0, 1.5e6, "within a host values have 32 bits");
    // Gradients, then weights.
    facts.transport = Some(Transport::Tcp);
    let engine = engine_of(&mut facts);
    (engine.sync, engine.sharding) = (SyncPolicy::EveryStep, Sharding::Optimizer);
    assert_eq!(sent(&facts).0, 0.75 * 1.5e6);
    engine_of(&mut facts).precision = amp();
    assert_eq!(sent(&facts).0, 0.75e6);
    engine_of(&mut facts).overlap.wire_type = WireType::Fp32;
    assert_eq!(sent(&facts).0, 0.75 * 1.5e6);
}

#[test]
fn parameter_servers_get_no_advice_that_they_refuse() {
    let mut facts = Facts { transport: Some(Transport::Tcp), reduce_alone_ms: Some(38.0), ..healthy() };
    set(&mut facts, Part::Communication, 36.0);
    let advised = |facts: &Facts| {
        let finding = format!("{:?}", finding_of("communication-bound", facts));
        ["wireType", "communicators", "batchMerge"].map(|field| finding.contains(field))
    };
    assert_eq!(advised(&facts), [true; 3]);
    engine_of(&mut facts).parameter_server = serde_json::from_value(json!({"servers": 2})).unwrap();
    assert_eq!(advised(&facts), [false, false, true]);
    let reduce = crate::report::curves::all_reduce(&facts).unwrap();
    assert_eq!(reduce.transport.as_deref(), Some("tcp, to 2 synchronous parameter servers"));
}

/// Regression: the stages of a single pipeline, which reduce nothing, waited for "exposed
/// all-reduce. It reduces 0 bytes", and the advice was for networks.
#[test]
fn waiting_for_another_stage_is_no_all_reduce() {
    let mut facts = healthy();
    engine_of(&mut facts).pipeline = Some(Pipeline { stages: 2, order: RankOrder::ByPipeline });
    set(&mut facts, Part::Communication, 0.0);
    set(&mut facts, Part::Pipeline, 30.0);
    for rule in ["communication-bound", "one-big-all-reduce", "many-small-all-reduces", "placement", "straggler"] {
        assert_eq!(finding_of(rule, &facts), Finding::NotApplicable, "{rule}");
    }
    assert_eq!(crate::report::curves::all_reduce(&facts), None);
    let Finding::Advice(advice) = finding_of("idle-stages", &facts) else { panic!() };
    assert_eq!(advice.parts, [Part::Pipeline]);
    // Two ranks of each stage reduce its gradients.
    facts.world = 4;
    assert!(matches!(finding_of("communication-bound", &facts), Finding::Fine(_)));
    let reduce = crate::report::curves::all_reduce(&facts).unwrap();
    assert_eq!(reduce.sent_bytes, Some(24e6));
    set(&mut facts, Part::Communication, 36.0);
    facts.transport = Some(Transport::Tcp);
    facts.reduce_alone_ms = Some(38.0);
    let advised = |facts: &Facts| format!("{:?}", finding_of("communication-bound", facts)).contains("sync.type");
    assert!(!advised(&facts), "stages take the same steps");
    engine_of(&mut facts).pipeline = None;
    assert!(advised(&facts));
}

#[test]
fn the_report_has_the_idle_share_of_each_stage() {
    let mut facts = healthy();
    assert_eq!(crate::report::curves::pipeline(&facts), None);
    engine_of(&mut facts).pipeline = Some(Pipeline { stages: 2, order: RankOrder::ByPipeline });
    engine_of(&mut facts).batch_merge = 3;
    // Of 98 ms without the checkpoint and what is between two steps.
    set(&mut facts, Part::Pipeline, 0.0);
    facts.ranks[0].step[Part::Pipeline] = 24.5;
    facts.ranks[0].step[Part::Backward] -= 24.5;
    let found = crate::report::curves::pipeline(&facts).unwrap();
    assert_eq!((found.stages, found.pipelines, found.micro_batches), (2, 1, 3));
    assert_eq!((found.idle_percent, found.least_idle_percent), (12.5, 25.0));
    let waits: Vec<_> = found.waits.iter().map(|wait| (wait.stage, wait.wait_ms, wait.idle_percent)).collect();
    assert_eq!(waits, [(0, 24.5, 25.0), (1, 0.0, 0.0)]);
}
