//! Whole traces, small enough to follow by hand.
#![allow(clippy::unwrap_used)]

use crate::fabric::{Fabric, pods};
use crate::measure::{Counted, figures};
use crate::play::{Job, Limits, Played, Rule, Setting, Start, play};
use crate::rules::{Order, Peer, Places, Pool, PoolOrder, Product};
use crate::speed::Model;
use crate::trace::Row;
use proptest::prelude::*;
use std::collections::BTreeMap;
use switchyard_crds::gpu_topology::GPUTopology;

/// Two leaves of two hosts.
fn fabric() -> Fabric {
    Fabric::regular(2, 2)
}

fn rows(jobs: &[(f64, f64, u32)]) -> Vec<Row> {
    let row = |(at, (submit, duration, gpus)): (usize, &(f64, f64, u32))| Row {
        line: at as u64 + 2,
        submit: *submit,
        duration: *duration,
        gpus: *gpus,
        queue: String::new(),
        limit: None,
    };
    jobs.iter().enumerate().map(row).collect()
}

fn product(fabric: &Fabric) -> Product {
    let text = include_str!("../../examples/clusters/two-racks.json");
    let cluster: serde_json::Value = serde_json::from_str(text).unwrap();
    let report = cluster["items"].as_array().unwrap().iter().find(|item| item["kind"] == "GPUTopology").unwrap();
    let machine: GPUTopology = serde_json::from_value(report.clone()).unwrap();
    Product::new(fabric, &machine).unwrap()
}

fn all(fabric: &Fabric) -> Vec<(&'static str, Box<dyn Rule>)> {
    let peer = |order, places| Box::new(Peer::new(fabric, order, places));
    vec![
        ("product", Box::new(product(fabric))),
        ("strict", peer(Order::Strict, Places::Domains)),
        ("skip", peer(Order::Skip, Places::Domains)),
        ("easy", peer(Order::Easy, Places::Domains)),
        ("most used", peer(Order::Skip, Places::MostUsed)),
        ("least used", peer(Order::Skip, Places::LeastUsed)),
        ("pool", Box::new(Pool::new(fabric, PoolOrder::BestEffort))),
    ]
}

fn played(rule: &mut dyn Rule, jobs: &[(f64, f64, u32)], limits: Limits) -> Played {
    let fabric = fabric();
    play(&rows(jobs), Setting { fabric: &fabric, model: Model::Levels, limits }, rule).unwrap()
}

fn starts(played: &Played) -> Vec<f64> {
    played.jobs.iter().map(|job| job.start).collect()
}

/// A gang of all hosts behind a job of one: who goes before it afterwards?
const BLOCKED: [(f64, f64, u32); 4] = [(0.0, 100.0, 8), (1.0, 10.0, 32), (2.0, 50.0, 8), (3.0, 500.0, 8)];

#[test]
fn what_happens_behind_a_gang_that_waits_is_the_rule() {
    let fabric = fabric();
    let peer = |order, limits| starts(&played(&mut Peer::new(&fabric, order, Places::Domains), &BLOCKED, limits));
    assert_eq!(peer(Order::Strict, Limits::None)[1..3], [100.0, 110.0]);
    // The gang waits for all that came later.
    assert_eq!(peer(Order::Skip, Limits::None), [0.0, 503.0, 2.0, 3.0]);
    // The third ends before the gang can start, the fourth does not.
    let easy = peer(Order::Easy, Limits::Exact);
    assert_eq!((easy[1], easy[2]), (100.0, 2.0));
    assert!(easy[3] > 100.0);
    // Nobody knows when the first ends.
    assert!(peer(Order::Easy, Limits::None)[2] >= 100.0);
}

#[test]
fn the_product_places_by_the_reports_and_holds_nodes_for_the_head() {
    let fabric = fabric();
    let got = played(&mut product(&fabric), &BLOCKED, Limits::None);
    let gang = got.jobs[1];
    assert!(gang.start <= 503.0, "{got:?}");
    // A gang of two hosts is put into one leaf, although a host of each was free first.
    let got = played(&mut product(&fabric), &[(0.0, 100.0, 16), (0.0, 100.0, 16)], Limits::None);
    assert_eq!(figures(&got, fabric.gpus(), Counted::All).slow_percent, 0.0);
}

#[test]
fn a_rule_that_forgets_what_is_taken_is_found_out() {
    struct Forgets(Vec<Start>);
    impl Rule for Forgets {
        fn submitted(&mut self, job: &Job) -> Result<(), String> {
            self.0.push(Start { job: job.number, hosts: vec![0; job.pods as usize], forecast: None });
            Ok(())
        }
        fn ended(&mut self, _job: usize, _now: f64) {}
        fn starts(&mut self, _now: f64) -> Result<Vec<Start>, String> {
            Ok(std::mem::take(&mut self.0))
        }
    }
    let fabric = fabric();
    let setting = Setting { fabric: &fabric, model: Model::Levels, limits: Limits::None };
    let error = play(&rows(&[(0.0, 9.0, 8), (1.0, 9.0, 8)]), setting, &mut Forgets(Vec::new())).unwrap_err();
    assert_eq!(error, "job 1: host 0 has not 8 GPUs free");
    struct Sleeps;
    impl Rule for Sleeps {
        fn submitted(&mut self, _job: &Job) -> Result<(), String> {
            Ok(())
        }
        fn ended(&mut self, _job: usize, _now: f64) {}
        fn starts(&mut self, _now: f64) -> Result<Vec<Start>, String> {
            Ok(Vec::new())
        }
    }
    let error = play(&rows(&[(0.0, 9.0, 8)]), setting, &mut Sleeps).unwrap_err();
    assert!(error.starts_with("1 jobs wait for ever"), "{error}");
}

/// An evaluator without communication would not show what places are worth.
#[test]
fn a_gang_over_two_leaves_is_slower_and_by_how_much_is_told() {
    let fabric = fabric();
    struct Across(Vec<Start>);
    impl Rule for Across {
        fn submitted(&mut self, job: &Job) -> Result<(), String> {
            self.0.push(Start { job: job.number, hosts: vec![0, 2], forecast: None });
            Ok(())
        }
        fn ended(&mut self, _job: usize, _now: f64) {}
        fn starts(&mut self, _now: f64) -> Result<Vec<Start>, String> {
            Ok(std::mem::take(&mut self.0))
        }
    }
    let slow = |model| {
        let setting = Setting { fabric: &fabric, model, limits: Limits::None };
        let played = play(&rows(&[(0.0, 1000.0, 16)]), setting, &mut Across(Vec::new())).unwrap();
        played.jobs[0].end
    };
    let communication = crate::speed::communication(2);
    assert!((slow(Model::Levels) - 1000.0 * (1.0 + communication)).abs() < 1e-6);
    // One ring crosses a leaf once each way, which its link carries.
    assert_eq!(slow(Model::Flows), 1000.0);
}

#[test]
fn pods_are_the_fewest_equal_ones() {
    assert_eq!(
        [1, 8, 12, 118, 7, 9, 744].map(|gpus| pods(gpus, 8)),
        [(1, 1), (1, 8), (2, 6), (59, 2), (1, 7), (3, 3), (93, 8)]
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Every rule plays every trace to its end on GPUs that are free, and the same twice.
    #[test]
    fn every_rule_ends_every_job(jobs in prop::collection::vec((0_u32..500, 1_u32..300, 1_u32..33), 1..20), model in 0u8..2) {
        let fabric = fabric();
        let mut jobs: Vec<(f64, f64, u32)> =
            jobs.into_iter().map(|(submit, duration, gpus)| (f64::from(submit), f64::from(duration), gpus)).collect();
        // One pod of a job on a host: 31 GPUs would be as many pods of one.
        jobs.retain(|(_, _, gpus)| pods(*gpus, fabric.gpus_per_host).0 as usize <= fabric.hosts.len());
        jobs.sort_by(|a, b| a.0.total_cmp(&b.0));
        let model = [Model::Levels, Model::Flows][usize::from(model)];
        for ((name, mut rule), (_, mut again)) in all(&fabric).into_iter().zip(all(&fabric)) {
            let setting = Setting { fabric: &fabric, model, limits: Limits::Coarse };
            let played = play(&rows(&jobs), setting, rule.as_mut()).map_err(|error| TestCaseError::fail(format!("{name}: {error}")))?;
            let twice = play(&rows(&jobs), setting, again.as_mut()).map_err(TestCaseError::fail)?;
            prop_assert_eq!(&played.jobs, &twice.jobs);
            for job in &played.jobs {
                prop_assert!(job.start >= job.submit && job.end - job.start >= job.duration * (1.0 - 1e-9), "{}: {:?}", name, job);
            }
        }
    }
}

/// The product, and what it promises, looked at after each of its answers.
struct Watched {
    product: Product,
    /// Earliest start that was forecast for a job, by its number.
    forecasts: BTreeMap<usize, f64>,
    wrong: Vec<String>,
}

impl Rule for Watched {
    fn submitted(&mut self, job: &Job) -> Result<(), String> {
        self.product.submitted(job)
    }

    fn ended(&mut self, job: usize, now: f64) {
        self.product.ended(job, now);
    }

    fn starts(&mut self, now: f64) -> Result<Vec<Start>, String> {
        let starts = self.product.starts(now)?;
        for Start { job, .. } in &starts {
            // Limits are whole seconds.
            let forecast = self.forecasts.get(job).map_or(f64::INFINITY, |forecast| forecast + 1.0);
            if now > forecast {
                self.wrong.push(format!("job {job} starts at {now} and was to start by {forecast}"));
            }
        }
        let asleep = self.product.asleep(now)?;
        self.wrong
            .extend(asleep.into_iter().map(|job| format!("job {job} could start at {now}, and nobody looks at it")));
        if let Some((job, start)) = self.product.forecast() {
            let earliest = self.forecasts.entry(job).or_insert(start);
            *earliest = earliest.min(start);
        }
        Ok(starts)
    }
}

/// What the product did wrong with these jobs (submitted, seconds, GPUs).
fn wrong(mut jobs: Vec<(f64, f64, u32)>, limits: Limits, predicts: bool) -> Result<Vec<String>, String> {
    jobs.sort_by(|a, b| a.0.total_cmp(&b.0));
    // At full speed everywhere, or jobs would run longer than their limits.
    let fabric = Fabric { oversubscription: [1.0, 1.0], ..fabric() };
    let product = if predicts { product(&fabric).predicting() } else { product(&fabric) };
    let mut rule = Watched { product, forecasts: BTreeMap::new(), wrong: Vec::new() };
    play(&rows(&jobs), Setting { fabric: &fabric, model: Model::Levels, limits }, &mut rule)?;
    Ok(rule.wrong)
}

/// A counterexample of the property below: a node that is held for the head of the queue, and that a job which ends before the head may use,
/// was forgotten when another node became free.
#[test]
fn a_node_that_is_held_counts_for_a_short_job_also_when_another_one_becomes_free() {
    const JOBS: [(u32, u32, u32); 30] = [
        (199, 3815, 24),
        (233, 19634, 1),
        (560, 9942, 2),
        (775, 14895, 16),
        (1077, 3045, 2),
        (1668, 16920, 1),
        (2086, 9719, 16),
        (2453, 7174, 8),
        (3106, 5316, 4),
        (3803, 11358, 8),
        (4500, 13203, 2),
        (4758, 8022, 24),
        (6818, 14560, 8),
        (8650, 11733, 8),
        (8820, 13249, 16),
        (9857, 6275, 16),
        (9992, 6395, 8),
        (10482, 10678, 1),
        (10936, 7168, 4),
        (11736, 15024, 4),
        (12701, 11575, 24),
        (13857, 6102, 2),
        (14072, 11027, 8),
        (14175, 11978, 16),
        (14868, 2727, 24),
        (15706, 2694, 16),
        (15879, 6197, 8),
        (16018, 10220, 24),
        (16273, 14640, 1),
        (18124, 18857, 2),
    ];
    let jobs = JOBS.map(|(submit, seconds, gpus)| (f64::from(submit), f64::from(seconds), gpus)).to_vec();
    assert_eq!(wrong(jobs, Limits::Coarse, false), Ok(Vec::new()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Jobs behind the head of the queue never delay it where all have limits that hold, and whoever could start is looked at.
    #[test]
    fn nobody_delays_the_head_and_nobody_is_forgotten(
        jobs in prop::collection::vec((0_u32..20_000, 1_u32..20_000, 0_usize..7), 1..40),
        has_limits in any::<bool>(),
        predicts in any::<bool>(),
    ) {
        let size = |size: usize| [1, 2, 4, 8, 16, 24, 32][size];
        let jobs = jobs.into_iter().map(|(submit, seconds, of)| (f64::from(submit), f64::from(seconds), size(of))).collect();
        let limits = if has_limits { Limits::Coarse } else { Limits::Half };
        let wrong = wrong(jobs, limits, predicts).map_err(TestCaseError::fail)?;
        prop_assert!(wrong.is_empty(), "{:#?}", wrong);
    }
}
