//! Tests every rule against its formula in double precision, and for bit-identical results.

use super::*;
use crate::amp::HalfWeights;
use crate::cpu::{Element, Isa, Pool, bf16, f16};
use crate::nn::{Bucket, Initial, Layout, Role, fuse};
use proptest::prelude::*;
use switchyard_worker_contract::config::{self, DecayExclusions, Lars, Momentum, Rule};

/// Longer than two pieces, much shorter than one, and in between.
const LENS: [usize; 4] = [40_000, 77, 5_003, 33];

fn layout(lens: &[usize]) -> Layout {
    let mut layout = Layout::default();
    let roles = [Role::Matrix, Role::Vector, Role::Embedding];
    for (i, &len) in lens.iter().enumerate() {
        layout.push(format!("p{i}"), &[len], roles[i % roles.len()], Initial::Constant(0.0));
    }
    layout
}

/// Values in -1..1, with zeros in the gaps of the layout.
fn noise(layout: &Layout, salt: u32) -> Vec<f32> {
    let mut flat = vec![0.0; layout.len];
    for parameter in &layout.parameters {
        for i in parameter.range() {
            flat[i] = ((i as u32 ^ salt).wrapping_mul(2_654_435_761) >> 8) as f32 / 8_388_608.0 - 1.0;
        }
    }
    flat
}

const ADAM: config::Adam = config::Adam { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 };

fn rules() -> [Rule; 9] {
    let sgd = |momentum, nesterov| Rule::Sgd(Momentum { momentum, nesterov });
    let lars = |momentum| Rule::Lars(Lars { momentum, trust_coefficient: 0.01 });
    [
        sgd(0.0, false),
        sgd(0.9, false),
        sgd(0.9, true),
        Rule::Adam(ADAM),
        Rule::AdamW(ADAM),
        Rule::Lamb(ADAM),
        Rule::Lamb(config::Adam { beta1: 0.8, beta2: 0.999, epsilon: 1e-6 }),
        lars(0.0),
        lars(0.9),
    ]
}

fn config(rule: Rule, weight_decay: f64, decay_exclusions: DecayExclusions) -> config::Optimizer {
    config::Optimizer { rule, learning_rate: 0.1, weight_decay, gradient_clip_norm: None, decay_exclusions }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Double-precision reference implementation of a rule, parameter by parameter.
struct Naive {
    config: config::Optimizer,
    /// Momentum, or first and second moments.
    state: [Vec<f64>; 2],
    step: i32,
}

impl Naive {
    fn step(&mut self, layout: &Layout, weights: &mut [f64], gradients: &[f32], rate: f64, scale: f32) {
        self.step += 1;
        for parameter in &layout.parameters {
            let decays = match (parameter.role, self.config.decay_exclusions) {
                (_, DecayExclusions::Nothing) | (Role::Matrix, _) => true,
                (Role::Embedding, exclusions) => exclusions == DecayExclusions::Vectors,
                (Role::Vector, _) => false,
            };
            let range = parameter.range();
            let g: Vec<f64> = gradients[range.clone()].iter().map(|&g| f64::from(g) * f64::from(scale)).collect();
            let [a, b] = &mut self.state;
            let state = (&mut a[range.clone()], &mut b[range.clone()]);
            let decay = if decays { self.config.weight_decay } else { 0.0 };
            reference_step(self.config.rule, self.step, &mut weights[range], &g, state, (rate, decay, decays));
        }
    }
}

fn norm(x: impl Iterator<Item = f64>) -> f64 {
    x.map(|x| x * x).sum::<f64>().sqrt()
}

fn ratio(above: f64, below: f64, decays: bool) -> f64 {
    if decays && above > 0.0 && below > 0.0 { above / below } else { 1.0 }
}

/// One step of one parameter.
fn reference_step(
    rule: Rule,
    t: i32,
    w: &mut [f64],
    g: &[f64],
    (a, b): (&mut [f64], &mut [f64]),
    (rate, decay, decays): (f64, f64, bool),
) {
    let mut moments = |i: usize, g: f64, n: config::Adam| {
        a[i] = n.beta1 * a[i] + (1.0 - n.beta1) * g;
        b[i] = n.beta2 * b[i] + (1.0 - n.beta2) * g * g;
        let (m, v) = (a[i] / (1.0 - n.beta1.powi(t)), b[i] / (1.0 - n.beta2.powi(t)));
        m / (v.sqrt() + n.epsilon)
    };
    match rule {
        Rule::Sgd(n) => {
            for i in 0..w.len() {
                let g = g[i] + decay * w[i];
                a[i] = n.momentum * a[i] + g;
                w[i] -= rate * if n.nesterov { g + n.momentum * a[i] } else { a[i] };
            }
        }
        Rule::Adam(n) => (0..w.len()).for_each(|i| w[i] -= rate * moments(i, g[i] + decay * w[i], n)),
        Rule::AdamW(n) => {
            (0..w.len()).for_each(|i| w[i] = w[i] - rate * decay * w[i] - rate * moments(i, g[i], n));
        }
        Rule::Lamb(n) => {
            let r: Vec<f64> = (0..w.len()).map(|i| moments(i, g[i], n) + decay * w[i]).collect();
            let trust = ratio(norm(w.iter().copied()), norm(r.iter().copied()), decays);
            w.iter_mut().zip(&r).for_each(|(w, r)| *w -= rate * trust * r);
        }
        Rule::Lars(n) => {
            let (weights, gradients) = (norm(w.iter().copied()), norm(g.iter().copied()));
            let adapts = weights > 0.0 && gradients > 0.0;
            let local = n.trust_coefficient * weights / (gradients + decay * weights);
            let local = if decays && adapts { local } else { 1.0 };
            for i in 0..w.len() {
                a[i] = n.momentum * a[i] + rate * local * (g[i] + decay * w[i]);
                w[i] -= a[i];
            }
        }
    }
}

fn exclusions() -> impl Strategy<Value = DecayExclusions> {
    use DecayExclusions::{Nothing, Vectors, VectorsAndEmbeddings};
    prop::sample::select(vec![Vectors, VectorsAndEmbeddings, Nothing])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn every_rule_matches_its_formula(
        rule in prop::sample::select(rules().to_vec()),
        // Include sums over several pieces.
        lens in prop::collection::vec(prop_oneof![15 => 1usize..200, 1 => Just(20_000usize)], 1..7),
        weight_decay in prop::sample::select(vec![0.0, 0.01, 0.3]),
        exclusions in exclusions(),
        scale in 0.01f32..2.0,
        salt in any::<u32>(),
        zeros in any::<bool>(),
    ) {
        let layout = layout(&lens);
        let config = config(rule, weight_decay, exclusions);
        let mut optimizer = Optimizer::new(&layout, &config, Isa::detect(None).unwrap());
        let state = [vec![0.0; layout.len], vec![0.0; layout.len]];
        let mut naive = Naive { config, state, step: 0 };
        let mut weights = noise(&layout, salt);
        if zeros {
            weights[layout.parameters[0].range()].fill(0.0);
        }
        let mut want: Vec<f64> = weights.iter().map(|&w| f64::from(w)).collect();
        let pool = Pool::new(1);
        for step in 0..20 {
            let gradients = noise(&layout, salt.wrapping_add(step + 1));
            let rate = 0.05 / f64::from(step + 1);
            optimizer.begin_step(rate, scale);
            optimizer.apply(0..layout.len, &mut weights, &gradients, None, &pool);
            naive.step(&layout, &mut want, &gradients, rate, scale);
        }
        for parameter in &layout.parameters {
            for i in parameter.range() {
                let error = (f64::from(weights[i]) - want[i]).abs();
                prop_assert!(error <= 2e-5 * want[i].abs().max(0.1), "{rule:?} at {i}: {} {}", weights[i], want[i]);
            }
        }
        prop_assert_eq!(optimizer.steps(), 20);
    }
}

/// Weights and state after three steps, bucket by bucket in the given order.
fn trained(layout: &Layout, config: &config::Optimizer, isa: Isa, threads: usize, buckets: &[Bucket]) -> Vec<Vec<u32>> {
    let pool = Pool::new(threads);
    let mut optimizer = Optimizer::new(layout, config, isa);
    let mut weights = noise(layout, 1);
    for step in 0..3 {
        let gradients = noise(layout, 2 + step);
        optimizer.begin_step(1e-3, 0.7);
        for bucket in buckets {
            let range = bucket.range.clone();
            optimizer.apply(range.clone(), &mut weights, &gradients[range], None, &pool);
        }
    }
    let mut all: Vec<Vec<u32>> = optimizer.state().map(|(_, array)| bits(array)).collect();
    all.push(bits(&weights));
    all
}

#[test]
fn same_bits_on_every_isa_for_any_threads_and_buckets() {
    let layout = layout(&LENS);
    for rule in rules() {
        let config = config(rule, 0.1, DecayExclusions::Vectors);
        let want = trained(&layout, &config, Isa::Portable, 1, &fuse(&layout, usize::MAX));
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            for (threads, bytes) in [(1, usize::MAX), (2, 4), (3, 25_000), (3, usize::MAX)] {
                let mut buckets = fuse(&layout, bytes);
                // Reductions can complete in any order.
                buckets.reverse();
                assert!(
                    want == trained(&layout, &config, isa, threads, &buckets),
                    "{rule:?} {isa:?} {threads} {bytes}"
                );
            }
        }
    }
}

#[test]
fn adamw_bits_are_pinned() {
    let mut layout = Layout::default();
    for (len, role) in [(50_000, Role::Matrix), (77, Role::Vector), (5_003, Role::Matrix)] {
        layout.push(format!("p{len}"), &[len], role, Initial::Constant(0.0));
    }
    let config = config(Rule::AdamW(ADAM), 0.1, DecayExclusions::Vectors);
    let weights = trained(&layout, &config, Isa::Portable, 1, &fuse(&layout, usize::MAX)).pop().unwrap();
    assert_eq!(xxhash_rust::xxh3::xxh3_64(bytemuck::cast_slice(&weights)), PINNED);
}

/// Changing this changes every training run with AdamW.
const PINNED: u64 = 0xbf167ef547feb9de;

#[test]
fn half_weights_are_the_rounded_weights() {
    let layout = layout(&LENS);
    let pool = Pool::new(2);
    for rule in rules() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            let mut optimizer = Optimizer::new(&layout, &config(rule, 0.1, DecayExclusions::Vectors), isa);
            let mut weights = noise(&layout, 1);
            let mut b = vec![bf16::ZERO; layout.len];
            let mut h = vec![f16::ZERO; layout.len];
            let whole = |weights: &[f32], b: &[bf16], h: &[f16], range: std::ops::Range<usize>| {
                range.into_iter().all(|i| {
                    let (b_want, h_want) = (<bf16 as Element>::of(weights[i]), <f16 as Element>::of(weights[i]));
                    (b[i].to_bits(), h[i].to_bits()) == (b_want.to_bits(), h_want.to_bits())
                })
            };
            HalfWeights::Bf16(&mut b).copy_from(0..layout.len, &weights, isa, &pool);
            HalfWeights::F16(&mut h).copy_from(0..layout.len, &weights, isa, &pool);
            assert!(whole(&weights, &b, &h, 0..layout.len), "copied");
            let (before_b, before_h) = (b.clone(), h.clone());
            let gradients = noise(&layout, 2);
            optimizer.begin_step(0.1, 1.0);
            let second = layout.parameters[1].offset;
            let range = 0..second;
            optimizer.apply(range.clone(), &mut weights, &gradients[range], Some(HalfWeights::Bf16(&mut b)), &pool);
            HalfWeights::F16(&mut h[..]).copy_from(0..layout.len, &weights, isa, &pool);
            assert!(whole(&weights, &b, &h, 0..layout.len), "{rule:?}: stepped range, and the rest as it was");
            assert!(b[..second] != before_b[..second] && h[..second] != before_h[..second]);
            let range = second..layout.len;
            optimizer.apply(range.clone(), &mut weights, &gradients[range], Some(HalfWeights::F16(&mut h)), &pool);
            HalfWeights::Bf16(&mut b).copy_from(0..layout.len, &weights, isa, &pool);
            assert!(whole(&weights, &b, &h, 0..layout.len), "{rule:?}");
        }
    }
}

#[test]
fn a_restored_state_continues_bit_for_bit() {
    let layout = layout(&[300, 20]);
    let pool = Pool::new(1);
    for rule in rules() {
        let config = config(rule, 0.1, DecayExclusions::Vectors);
        let isa = Isa::detect(None).unwrap();
        let mut optimizer = Optimizer::new(&layout, &config, isa);
        let mut weights = noise(&layout, 1);
        let step = |optimizer: &mut Optimizer, weights: &mut [f32], salt| {
            optimizer.begin_step(1e-2, 1.0);
            optimizer.apply(0..layout.len, weights, &noise(&layout, salt), None, &pool);
        };
        (0..5).for_each(|salt| step(&mut optimizer, &mut weights, salt));
        let mut restored = Optimizer::new(&layout, &config, isa);
        restored.restore(optimizer.steps());
        for (array, (_, from)) in optimizer.state().enumerate() {
            restored.write(array, 0, from);
        }
        let mut other = weights.clone();
        step(&mut optimizer, &mut weights, 9);
        step(&mut restored, &mut other, 9);
        assert_eq!((bits(&weights), restored.steps()), (bits(&other), 6), "{rule:?}");
        let bytes: usize = optimizer.state().map(|(_, array)| size_of_val(array)).sum();
        assert_eq!(bytes, Optimizer::memory_bytes(layout.len, &rule));
    }
}

#[test]
fn state_has_the_names_of_the_rule() {
    let layout = layout(&[3]);
    let names = rules().map(|rule| {
        let config = config(rule, 0.0, DecayExclusions::Vectors);
        Optimizer::new(&layout, &config, Isa::Portable).state().map(|(name, _)| name).collect::<Vec<_>>().join(" ")
    });
    assert_eq!(names, ["", "momentum", "momentum", "m v", "m v", "m v", "m v", "", "momentum"]);
}

#[test]
fn powers_of_long_runs_are_restored_quickly() {
    let config = config(Rule::AdamW(ADAM), 0.0, DecayExclusions::Vectors);
    Optimizer::new(&layout(&[1]), &config, Isa::Portable).restore(u64::MAX);
}

#[test]
fn state_without_gradient_does_not_become_denormal() {
    let layout = layout(&[32]);
    for rule in rules() {
        let mut optimizer = Optimizer::new(&layout, &config(rule, 0.0, DecayExclusions::Vectors), Isa::Portable);
        let mut weights = vec![1.0; layout.len];
        for step in 0..4000 {
            optimizer.begin_step(1e-3, 1.0);
            let gradients = vec![if step == 0 { 1e-3 } else { 0.0 }; layout.len];
            optimizer.apply(0..layout.len, &mut weights, &gradients, None, &Pool::new(1));
        }
        assert!(optimizer.state().all(|(_, array)| array.iter().all(|x| *x == 0.0 || x.is_normal())), "{rule:?}");
    }
}

#[test]
#[should_panic(expected = "not a range of whole parameters")]
fn a_range_that_splits_a_parameter_is_rejected() {
    let layout = layout(&[40_000]);
    let mut optimizer = Optimizer::new(&layout, &config(rules()[1], 0.0, DecayExclusions::Vectors), Isa::Portable);
    optimizer.begin_step(0.1, 1.0);
    optimizer.apply(0..16_384, &mut noise(&layout, 1), &[0.0; 16_384], None, &Pool::new(1));
}

/// Two ranks own alternate parts, which cut parameters and pieces. Each measures and updates its
/// own; sums and weights are exchanged as in a run.
#[test]
fn shards_give_the_bits_of_the_whole() {
    let layout = layout(&[40_000, 5, 20_000]);
    let cuts: Vec<usize> = (16..layout.len).step_by(6_000).collect();
    let bounds: Vec<usize> = [0].into_iter().chain(cuts.iter().copied()).chain([layout.len]).collect();
    let own = |rank: usize| bounds.windows(2).map(|part| part[0]..part[1]).skip(rank).step_by(2).collect::<Vec<_>>();
    let pool = Pool::new(2);
    for rule in rules() {
        let (config, isa) = (config(rule, 0.1, DecayExclusions::Vectors), Isa::detect(None).unwrap());
        let all = Ownership { own: Ownership::whole(layout.len).own, cuts: cuts.clone() };
        let mut whole = Optimizer::sharded(&layout, &config, isa, &all);
        let mut ranks = [0, 1]
            .map(|rank| Optimizer::sharded(&layout, &config, isa, &Ownership { own: own(rank), cuts: cuts.clone() }));
        let mut expected = noise(&layout, 1);
        let mut weights = [expected.clone(), expected.clone()];
        for step in 0..3 {
            let gradients = noise(&layout, 2 + step);
            // From the rank's own first part on.
            let slice = |rank: usize| {
                let from = own(rank)[0].start;
                GradientSlice { from, values: &gradients[from..] }
            };
            whole.begin_step(1e-2, 0.7);
            whole.apply(0..layout.len, &mut expected, &gradients, None, &pool);
            for (number, (rank, weights)) in ranks.iter_mut().zip(&mut weights).enumerate() {
                rank.begin_step(1e-2, 0.7);
                rank.measure(0..layout.len, weights, slice(number), &pool);
            }
            let [first, second] = &mut ranks;
            for ((is_first, a), (is_second, b)) in first.sums().zip(second.sums()) {
                assert_ne!(is_first, is_second, "every piece has one owner");
                if is_first { *b = *a } else { *a = *b }
            }
            for (number, (rank, weights)) in ranks.iter_mut().zip(&mut weights).enumerate() {
                rank.update(0..layout.len, weights, slice(number), None, &pool);
            }
            for (from, to) in [(0, 1), (1, 0)] {
                for range in own(from) {
                    let new = weights[from][range.clone()].to_vec();
                    weights[to][range].copy_from_slice(&new);
                }
            }
            assert_eq!(bits(&weights[0]), bits(&expected), "{rule:?}, step {step}");
            assert_eq!(bits(&weights[1]), bits(&expected), "{rule:?}, step {step}");
        }
        let bytes = |optimizer: &Optimizer| optimizer.state().map(|(_, array)| size_of_val(array)).sum::<usize>();
        for (rank, optimizer) in ranks.iter().enumerate() {
            let len = own(rank).iter().map(ExactSizeIterator::len).sum();
            assert_eq!(bytes(optimizer), Optimizer::memory_bytes(len, &rule), "{rule:?}");
        }
        for (array, (_, saved)) in whole.state().enumerate() {
            let mut parts = [vec![0.0; layout.len], vec![0.0; layout.len]];
            ranks.iter().zip(&mut parts).for_each(|(rank, part)| rank.read(array, 0, part));
            let sum: Vec<f32> = parts[0].iter().zip(&parts[1]).map(|(a, b)| a + b).collect();
            assert_eq!(bits(&sum), bits(saved), "{rule:?}");
        }
    }
}
