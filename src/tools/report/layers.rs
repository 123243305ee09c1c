//! Computation and communication by layer: convolutions compute long for few gradients, fully
//! connected layers the other way round.

use super::facts::Facts;
use super::markup::shortened;
use super::model::{LayerRow, Layers, round4};
use std::collections::BTreeMap;
use switchyard_worker_contract::layers::LayerTime;

/// Most layers with a row.
const MAX_ROWS: usize = 100;
const MAX_KINDS: usize = 50;
/// Most characters of a name.
const MAX_NAME: usize = 100;

pub(super) fn layers(facts: &Facts) -> Option<Layers> {
    let (rank, times) = facts.layers.as_ref()?;
    let micro_batches = facts.engine.as_ref().map_or(1, |engine| engine.batch_merge.max(1));
    let factor = 1e3 * f64::from(micro_batches) / times.steps.max(1) as f64;
    let ms = |layer: &LayerTime| factor * (layer.forward_seconds + layer.backward_seconds);
    let all_ms: f64 = times.layers.iter().map(ms).sum();
    let all_parameters = times.layers.iter().fold(0_u64, |sum, layer| sum.saturating_add(layer.parameters));
    let reduce = facts.reachable_reduce_ms().filter(|_| facts.world > 1 && all_parameters > 0);
    let row = |name: Option<&str>, kind: &str, layers: u64, parameters: u64, compute: f64| {
        let reduce = reduce.map(|reduce| reduce * parameters as f64 / all_parameters as f64);
        LayerRow {
            name: name.map(|name| shortened(name, MAX_NAME)),
            kind: shortened(kind, MAX_NAME),
            layers,
            parameters,
            compute_ms: round4(compute),
            percent: if all_ms > 0.0 { round4(100.0 * compute / all_ms) } else { 0.0 },
            all_reduce_ms: reduce.map(round4),
            ratio: reduce.filter(|reduce| *reduce > 0.0).map(|reduce| round4(compute / reduce)),
        }
    };
    let mut kinds: BTreeMap<&str, (u64, u64, f64)> = BTreeMap::new();
    for layer in &times.layers {
        let (layers, parameters, compute) = kinds.entry(&layer.kind).or_default();
        *layers += 1;
        *parameters = parameters.saturating_add(layer.parameters);
        *compute += ms(layer);
    }
    let sorted = |mut rows: Vec<LayerRow>, most: usize| {
        rows.sort_by(|a, b| b.compute_ms.total_cmp(&a.compute_ms));
        rows.truncate(most);
        rows
    };
    let kinds =
        kinds.into_iter().map(|(kind, (layers, parameters, compute))| row(None, kind, layers, parameters, compute));
    let rows = times.layers.iter().map(|layer| row(Some(&layer.name), &layer.kind, 1, layer.parameters, ms(layer)));
    Some(Layers {
        rank: *rank,
        profiled_steps: times.steps,
        kinds: sorted(kinds.collect(), MAX_KINDS),
        rows: sorted(rows.collect(), MAX_ROWS),
        left_out: times.layers.len().saturating_sub(MAX_ROWS) as u64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use switchyard_worker_contract::layers::LayerTimes;

    fn facts(world: u32) -> Facts {
        let layer = |name: &str, kind: &str, parameters, forward_seconds, backward_seconds| LayerTime {
            name: name.into(),
            kind: kind.into(),
            parameters,
            forward_seconds,
            backward_seconds,
        };
        // Two steps.
        let layers = vec![
            layer("conv1", "Convolution", 100, 0.020, 0.040),
            layer("conv2", "Convolution", 100, 0.010, 0.010),
            layer("relu", "ReLU", 0, 0.001, 0.001),
            layer("fc", "Linear", 800, 0.004, 0.006),
        ];
        let layers = Some((1, LayerTimes { attempt: 1, steps: 2, layers }));
        Facts { world, layers, reduce_alone_ms: Some(10.0), ..Facts::default() }
    }

    #[test]
    fn fully_connected_layers_compute_less_for_each_gradient() {
        let found = layers(&facts(2)).unwrap();
        let kinds: Vec<_> = found
            .kinds
            .iter()
            .map(|row| (&*row.kind, row.layers, row.compute_ms, row.all_reduce_ms, row.ratio))
            .collect();
        let expected = [
            ("Convolution", 2, 40.0, Some(2.0), Some(20.0)),
            ("Linear", 1, 5.0, Some(8.0), Some(0.625)),
            ("ReLU", 1, 1.0, Some(0.0), None),
        ];
        assert_eq!(kinds, expected);
        let names: Vec<_> = found.rows.iter().map(|row| row.name.as_deref().unwrap()).collect();
        assert_eq!((names, found.left_out, found.rank), (vec!["conv1", "conv2", "fc", "relu"], 0, 1));
        assert_eq!(found.rows[0].percent, 65.22);
    }

    #[test]
    fn one_rank_has_no_ratio_and_long_networks_have_a_limit() {
        let mut facts = facts(1);
        assert!(layers(&facts).unwrap().rows.iter().all(|row| row.ratio.is_none() && row.all_reduce_ms.is_none()));
        if let Some((_, times)) = &mut facts.layers {
            times.layers = vec![LayerTime::default(); 250];
        }
        let found = layers(&facts).unwrap();
        assert_eq!((found.rows.len(), found.left_out), (100, 150));
    }
}
