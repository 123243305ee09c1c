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
