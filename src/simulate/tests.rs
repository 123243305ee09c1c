//! Whole traces that are small enough to verify by hand.
#![allow(clippy::unwrap_used)]

use crate::fabric::{Fabric, pods};
use crate::failures::Failures;
use crate::measure::{JobWindow, figures};
use crate::replay::{Decision, Job, Limits, ReplayOutcome, Rule, Scenario, Start, UrgentJobs, replay};
use crate::rules::{HostOrder, Order, Peer, Pool, PoolOrder, Product};
use crate::speed::Model;
use crate::trace::Row;
use proptest::prelude::*;
use std::collections::BTreeMap;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_ledger::queue::{PlacementDelay, PredictorSettings, Weights};

mod preemption;

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
        preemptible: None,
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
        ("strict", peer(Order::Strict, HostOrder::Domains)),
        ("skip", peer(Order::Skip, HostOrder::Domains)),
        ("easy", peer(Order::Easy, HostOrder::Domains)),
        ("most used", peer(Order::Skip, HostOrder::MostUsed)),
        ("least used", peer(Order::Skip, HostOrder::LeastUsed)),
        ("pool", Box::new(Pool::new(fabric, PoolOrder::BestEffort))),
    ]
}

fn run(rule: &mut dyn Rule, jobs: &[(f64, f64, u32)], limits: Limits) -> ReplayOutcome {
    let fabric = fabric();
    replay(&rows(jobs), Scenario::new(&fabric, Model::Levels, limits), rule).unwrap()
}

fn starts(outcome: &ReplayOutcome) -> Vec<f64> {
    outcome.jobs.iter().map(|job| job.start).collect()
}

/// A gang of all hosts waits behind a one-host job: which later jobs overtake it?
const BLOCKED: [(f64, f64, u32); 4] = [(0.0, 100.0, 8), (1.0, 10.0, 32), (2.0, 50.0, 8), (3.0, 500.0, 8)];

#[test]
fn rules_differ_in_what_overtakes_a_waiting_gang() {
    let fabric = fabric();
    let peer = |order, limits| starts(&run(&mut Peer::new(&fabric, order, HostOrder::Domains), &BLOCKED, limits));
    assert_eq!(peer(Order::Strict, Limits::None)[1..3], [100.0, 110.0]);
    // The gang waits for all later jobs.
    assert_eq!(peer(Order::Skip, Limits::None), [0.0, 503.0, 2.0, 3.0]);
    // The third job ends before the gang can start, the fourth does not.
    let easy = peer(Order::Easy, Limits::Exact);
    assert_eq!((easy[1], easy[2]), (100.0, 2.0));
    assert!(easy[3] > 100.0);
    // The end of the first job is unknown.
    assert!(peer(Order::Easy, Limits::None)[2] >= 100.0);
}

#[test]
fn the_product_places_by_the_reports_and_holds_nodes_for_the_head() {
    let fabric = fabric();
    let got = run(&mut product(&fabric), &BLOCKED, Limits::None);
    let gang = got.jobs[1];
    assert!(gang.start <= 503.0, "{got:?}");
    // A gang of two hosts is placed in one leaf, although each leaf had a host free earlier.
    let got = run(&mut product(&fabric), &[(0.0, 100.0, 16), (0.0, 100.0, 16)], Limits::None);
    assert_eq!(figures(&got, fabric.gpus(), JobWindow::All).slow_percent, 0.0);
}

/// A rule that places every job on the same hosts, whether or not they are free, or on none.
struct FixedHosts {
    hosts: Option<Vec<usize>>,
    starts: Vec<Start>,
}

impl FixedHosts {
    fn on(hosts: &[usize]) -> FixedHosts {
        FixedHosts { hosts: Some(hosts.to_vec()), starts: Vec::new() }
    }

    fn nowhere() -> FixedHosts {
        FixedHosts { hosts: None, starts: Vec::new() }
    }

    fn put(&mut self, job: usize) {
        self.starts.extend(self.hosts.clone().map(|hosts| Start { job, hosts, forecast: None }));
    }
}

impl Rule for FixedHosts {
    fn submitted(&mut self, job: &Job) -> Result<(), String> {
        self.put(job.number);
        Ok(())
    }

    fn ended(&mut self, _job: usize, _now: f64) {}

    fn failed(&mut self, _host: usize, jobs: &[usize], _now: f64) {
        jobs.iter().for_each(|job| self.put(*job));
    }

    fn repaired(&mut self, _host: usize, _now: f64) {}

    fn decide(&mut self, _now: f64) -> Result<Vec<Decision>, String> {
        Ok(std::mem::take(&mut self.starts).into_iter().map(Decision::Start).collect())
    }
}

#[test]
fn a_rule_that_reuses_allocated_gpus_is_detected() {
    let fabric = fabric();
    let scenario = Scenario::new(&fabric, Model::Levels, Limits::None);
    let error = replay(&rows(&[(0.0, 9.0, 8), (1.0, 9.0, 8)]), scenario, &mut FixedHosts::on(&[0])).unwrap_err();
    assert_eq!(error, "job 1: host 0 does not have 8 GPUs free");
    let error = replay(&rows(&[(0.0, 9.0, 8)]), scenario, &mut FixedHosts::nowhere()).unwrap_err();
    assert!(error.starts_with("1 jobs wait forever"), "{error}");
}

/// Four hosts with a failure every quarter of an hour on average.
const FAIL_OFTEN: Failures = Failures { every: 3600.0, repair: 600.0, checkpoint: 100.0, seed: 3 };

#[test]
fn under_every_rule_a_stopped_job_repeats_work_after_its_checkpoint() {
    let fabric = Fabric { oversubscription: [1.0, 1.0], ..fabric() };
    let jobs = rows(&[(0.0, 5000.0, 16), (1.0, 900.0, 8), (2.0, 50.0, 3), (9.0, 2000.0, 24), (10.0, 700.0, 8)]);
    for (name, mut rule) in all(&fabric).into_iter().filter(|(name, _)| *name != "pool") {
        let scenario = Scenario { failures: Some(FAIL_OFTEN), ..Scenario::new(&fabric, Model::Levels, Limits::Coarse) };
        let outcome = replay(&jobs, scenario, rule.as_mut()).unwrap();
        for job in &outcome.jobs {
            assert!((job.ran() - job.duration - job.lost).abs() < 1e-6, "{name}: {job:?}");
            assert!(job.lost <= 100.0 * f64::from(job.restarts) && job.waited_again >= 0.0, "{name}: {job:?}");
        }
        assert!(outcome.jobs.iter().map(|job| job.restarts).sum::<u32>() > 0, "{name}");
    }
}

#[test]
fn a_rule_that_uses_a_failed_host_is_detected() {
    let fabric = fabric();
    let scenario = Scenario { failures: Some(FAIL_OFTEN), ..Scenario::new(&fabric, Model::Levels, Limits::None) };
    let error = replay(&rows(&[(0.0, 90_000.0, 8)]), scenario, &mut FixedHosts::on(&[0])).unwrap_err();
    assert_eq!(error, "job 0: host 0 does not have 8 GPUs free");
    let error = replay(&rows(&[(0.0, 9.0, 8)]), scenario, &mut Pool::new(&fabric, PoolOrder::BestEffort)).unwrap_err();
    assert_eq!(error, "with host failures, a rule must place jobs on hosts");
}

#[test]
fn a_restarting_gang_keeps_its_remaining_hosts_while_it_waits() {
    // One leaf, because another leaf would be a better placement.
    let mut product = product(&Fabric::regular(1, 4));
    product.submitted(&job(0, 2, 0, None)).unwrap();
    let hosts = started(&mut product, 0.0)[0].1.clone();
    product.failed(hosts[0], &[0], 10.0);
    let again = started(&mut product, 10.0)[0].1.clone();
    assert!(again.contains(&hosts[1]) && !again.contains(&hosts[0]), "{hosts:?}, {again:?}");
    product.repaired(hosts[0], 15.0);
    product.ended(0, 20.0);
    // A gang of three, and a job on the fourth host.
    product.submitted(&job(1, 3, 0, None)).unwrap();
    product.submitted(&job(2, 1, 0, None)).unwrap();
    let placed = started(&mut product, 20.0);
    let (hosts, fourth) = (placed[0].1.clone(), placed[1].1[0]);
    product.failed(hosts[0], &[1], 30.0);
    // No other job takes the gang's hosts while it waits for the fourth.
    product.submitted(&job(3, 1, 0, None)).unwrap();
    assert_eq!(started(&mut product, 30.0), []);
    product.ended(2, 40.0);
    let again = started(&mut product, 40.0);
    assert_eq!(again.len(), 1);
    assert!(again[0].0 == 1 && [hosts[1], hosts[2], fourth].iter().all(|host| again[0].1.contains(host)), "{again:?}");
    product.repaired(hosts[0], 50.0);
    assert_eq!(started(&mut product, 50.0), [(3, vec![hosts[0]])]);
}

fn job(number: usize, pods: u32, team: usize, limit: Option<f64>) -> Job {
    let (is_urgent, saves) = (false, false);
    Job { number, submit: number as f64, pods, gpus: 8, limit, team, is_urgent, saves, checkpoint: None }
}

fn started(product: &mut Product, now: f64) -> Vec<(usize, Vec<usize>)> {
    let start = |decision| match decision {
        Decision::Start(start) => (start.job, start.hosts),
        Decision::Preempt(job) => panic!("job {job} is stopped"),
    };
    product.decide(now).unwrap().into_iter().map(start).collect()
}

#[test]
fn with_weights_the_team_with_the_least_usage_goes_first() {
    for (weights, first) in [(None, 1), (Some(Weights::new(BTreeMap::new())), 2)] {
        let mut product = product(&Fabric::regular(1, 4));
        if let Some(weights) = weights {
            product = product.with_queue(|queue| queue.weights = Some(weights));
        }
        product.submitted(&job(0, 4, 0, None)).unwrap();
        assert_eq!(started(&mut product, 0.0).len(), 1);
        for (number, team) in [(1, 0), (2, 1)] {
            product.submitted(&job(number, 3, team, None)).unwrap();
            assert_eq!(started(&mut product, 3600.0), []);
        }
        product.ended(0, 36_000.0);
        let got = started(&mut product, 36_000.0);
        assert_eq!(got.iter().map(|(job, _)| *job).collect::<Vec<_>>(), [first]);
    }
}

#[test]
fn a_gang_waits_for_a_better_placement_for_a_share_of_its_limit() {
    for (limit, waits) in [(20_000.0, true), (5000.0, false)] {
        let mut product =
            product(&fabric()).with_queue(|queue| queue.placement_delay = Some(PlacementDelay::default()));
        for (number, limit) in [(0, Some(1000.0)), (1, None), (2, None)] {
            product.submitted(&job(number, 1, 0, limit)).unwrap();
        }
        let hosts: Vec<usize> = started(&mut product, 0.0).into_iter().flat_map(|(_, hosts)| hosts).collect();
        let leaves = |hosts: &[usize]| hosts.iter().map(|host| host / 2).collect::<Vec<_>>();
        assert!(leaves(&hosts)[0] == leaves(&hosts)[1] && hosts.len() == 3, "{hosts:?}");
        // One host in each leaf is free.
        product.ended(1, 1.0);
        product.submitted(&job(3, 2, 0, Some(limit))).unwrap();
        let placed = started(&mut product, 2.0);
        assert_eq!(placed.is_empty(), waits, "{limit}");
        if waits {
            // A job without a limit takes the host that is not reserved.
            product.submitted(&job(4, 1, 0, None)).unwrap();
            assert_eq!(leaves(&started(&mut product, 3.0)[0].1), [1 - leaves(&hosts)[0]]);
            product.ended(4, 4.0);
            assert_eq!(started(&mut product, 4.0), [], "the better placement is reserved for the gang itself");
            product.ended(0, 900.0);
            let placed = started(&mut product, 900.0);
            assert_eq!(leaves(&placed[0].1), [leaves(&hosts)[0]; 2]);
        }
    }
}

#[test]
fn an_urgent_job_preempts_the_job_that_loses_least() {
    let mut product = product(&Fabric::regular(1, 2));
    for number in 0..2 {
        let saves = number == 0;
        product.submitted(&Job { saves, ..job(number, 1, 0, None) }).unwrap();
    }
    let hosts: Vec<usize> = started(&mut product, 0.0).into_iter().flat_map(|(_, hosts)| hosts).collect();
    product.submitted(&Job { is_urgent: true, ..job(2, 1, 0, None) }).unwrap();
    let decided = product.decide(100.0).unwrap();
    assert_eq!(decided[0], Decision::Preempt(0), "the other one is younger, but would lose what it has done");
    let Decision::Start(start) = &decided[1] else { panic!("{decided:?}") };
    assert_eq!((start.job, &start.hosts), (2, &vec![hosts[0]]));
    product.ended(2, 200.0);
    assert_eq!(started(&mut product, 200.0), [(0, vec![hosts[0]])]);
}

/// Every second job is urgent.
#[test]
fn a_preempted_job_repeats_work_after_its_checkpoint() {
    let fabric = Fabric { oversubscription: [1.0, 1.0], ..fabric() };
    let jobs: Vec<(f64, f64, u32)> = (0..40)
        .map(|at| (f64::from(at) * 30.0, 500.0 + f64::from(at % 7) * 100.0, [8, 8, 32][at as usize % 3]))
        .collect();
    let urgent = Some(UrgentJobs { one_in: 2, checkpoint: 100.0 });
    let scenario = Scenario { urgent, ..Scenario::new(&fabric, Model::Levels, Limits::Coarse) };
    let outcome = replay(&rows(&jobs), scenario, &mut product(&fabric)).unwrap();
    for job in &outcome.jobs {
        assert!((job.ran() - job.duration - job.lost).abs() < 1e-6, "{job:?}");
        assert!(job.lost <= 100.0 * f64::from(job.restarts), "{job:?}");
        assert!(!job.is_urgent || job.restarts == 0, "no job is more urgent: {job:?}");
    }
    assert!(outcome.jobs.iter().any(|job| job.restarts > 0));
}

/// Without communication, the simulation could not show the value of a placement.
#[test]
fn a_gang_over_two_leaves_is_slower_by_the_modelled_factor() {
    let fabric = fabric();
    let slow = |model| {
        let scenario = Scenario::new(&fabric, model, Limits::None);
        let outcome = replay(&rows(&[(0.0, 1000.0, 16)]), scenario, &mut FixedHosts::on(&[0, 2])).unwrap();
        outcome.jobs[0].end
    };
    let communication = crate::speed::communication(2);
    assert!((slow(Model::Levels) - 1000.0 * (1.0 + communication)).abs() < 1e-6);
    // One ring crosses a leaf once in each direction, which its link can carry.
    assert_eq!(slow(Model::Flows), 1000.0);
}

#[test]
fn jobs_are_split_into_the_fewest_equal_pods() {
    assert_eq!(
        [1, 8, 12, 118, 7, 9, 744].map(|gpus| pods(gpus, 8)),
        [(1, 1), (1, 8), (2, 6), (59, 2), (1, 7), (3, 3), (93, 8)]
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Every rule completes every trace using free GPUs only, and reproducibly.
    #[test]
    fn every_rule_ends_every_job(jobs in prop::collection::vec((0_u32..500, 1_u32..300, 1_u32..33), 1..20), model in 0u8..2) {
        let fabric = fabric();
        let mut jobs: Vec<(f64, f64, u32)> =
            jobs.into_iter().map(|(submit, duration, gpus)| (f64::from(submit), f64::from(duration), gpus)).collect();
        // A host takes one pod per job, so 31 GPUs would need 31 hosts.
        jobs.retain(|(_, _, gpus)| pods(*gpus, fabric.gpus_per_host).0 as usize <= fabric.hosts.len());
        jobs.sort_by(|a, b| a.0.total_cmp(&b.0));
        let model = [Model::Levels, Model::Flows][usize::from(model)];
        for ((name, mut rule), (_, mut again)) in all(&fabric).into_iter().zip(all(&fabric)) {
            let scenario = Scenario::new(&fabric, model, Limits::Coarse);
            let outcome = replay(&rows(&jobs), scenario, rule.as_mut()).map_err(|error| TestCaseError::fail(format!("{name}: {error}")))?;
            let twice = replay(&rows(&jobs), scenario, again.as_mut()).map_err(TestCaseError::fail)?;
            prop_assert_eq!(&outcome.jobs, &twice.jobs);
            for job in &outcome.jobs {
                prop_assert!(job.start >= job.submit && job.end - job.start >= job.duration * (1.0 - 1e-9), "{}: {:?}", name, job);
            }
        }
    }
}

/// The product, with its promises checked after each decision.
struct Checked {
    product: Product,
    /// Earliest forecast start by job number; `None` if forecasts need not hold.
    forecasts: Option<BTreeMap<usize, f64>>,
    wrong: Vec<String>,
}

impl Rule for Checked {
    fn submitted(&mut self, job: &Job) -> Result<(), String> {
        self.product.submitted(job)
    }

    fn ended(&mut self, job: usize, now: f64) {
        self.product.ended(job, now);
    }

    fn failed(&mut self, host: usize, jobs: &[usize], now: f64) {
        self.product.failed(host, jobs, now);
    }

    fn repaired(&mut self, host: usize, now: f64) {
        self.product.repaired(host, now);
    }

    fn decide(&mut self, now: f64) -> Result<Vec<Decision>, String> {
        let decisions = self.product.decide(now)?;
        let starts = decisions.iter().filter_map(|decision| match decision {
            Decision::Start(start) => Some(start.job),
            Decision::Preempt(_) => None,
        });
        for job in starts {
            // Limits are whole seconds.
            let forecast = self.forecasts.as_ref().and_then(|forecasts| forecasts.get(&job));
            let forecast = forecast.map_or(f64::INFINITY, |forecast| forecast + 1.0);
            if now > forecast {
                self.wrong.push(format!("job {job} starts at {now} and was to start by {forecast}"));
            }
        }
        let asleep = self.product.startable(now)?;
        self.wrong
            .extend(asleep.into_iter().map(|job| format!("job {job} could start at {now}, but was not reconciled")));
        if let (Some(forecasts), Some((job, start))) = (&mut self.forecasts, self.product.forecast()) {
            let earliest = forecasts.entry(job).or_insert(start);
            *earliest = earliest.min(start);
        }
        Ok(decisions)
    }
}

/// The product's first broken promise for these jobs (submitted, seconds, GPUs). With host
/// failures, forecasts need not hold.
fn wrong(
    mut jobs: Vec<(f64, f64, u32)>,
    limits: Limits,
    predicts: bool,
    failures: Option<Failures>,
) -> Result<Vec<String>, String> {
    jobs.sort_by(|a, b| a.0.total_cmp(&b.0));
    // At full speed everywhere, because slower jobs would exceed their limits.
    let fabric = Fabric { oversubscription: [1.0, 1.0], ..fabric() };
    let product = if predicts {
        product(&fabric).with_queue(|queue| queue.predictor = Some(PredictorSettings::default()))
    } else {
        product(&fabric)
    };
    let forecasts = failures.is_none().then(BTreeMap::new);
    let mut rule = Checked { product, forecasts, wrong: Vec::new() };
    replay(&rows(&jobs), Scenario { failures, ..Scenario::new(&fabric, Model::Levels, limits) }, &mut rule)?;
    Ok(rule.wrong)
}

/// A counterexample found by the property test below: when another node became free, a node
/// reserved for the head was no longer offered to a job that would end before the head starts.
#[test]
fn a_reserved_node_is_offered_to_a_short_job_when_another_becomes_free() {
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
    assert_eq!(wrong(jobs, Limits::Coarse, false, None), Ok(Vec::new()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Jobs behind the head never delay it if all have correct limits, and every job that could
    /// start is reconciled.
    #[test]
    fn no_job_delays_the_head_and_every_startable_job_is_reconciled(
        jobs in prop::collection::vec((0_u32..20_000, 1_u32..20_000, 0_usize..7), 1..40),
        has_limits in any::<bool>(),
        predicts in any::<bool>(),
        fail in any::<bool>(),
    ) {
        let size = |size: usize| [1, 2, 4, 8, 16, 24, 32][size];
        let jobs = jobs.into_iter().map(|(submit, seconds, of)| (f64::from(submit), f64::from(seconds), size(of))).collect();
        let limits = if has_limits { Limits::Coarse } else { Limits::Half };
        let failures = fail.then_some(Failures { every: 50_000.0, repair: 5000.0, checkpoint: 1000.0, seed: 1 });
        let wrong = wrong(jobs, limits, predicts, failures).map_err(TestCaseError::fail)?;
        prop_assert!(wrong.is_empty(), "{:#?}", wrong);
    }
}
