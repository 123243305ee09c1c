//! Builds the section about GPU kernels.

use super::facts::Facts;
use super::kernels::{Sum, word};
use super::model::{KernelRow, Kernels, round4};
use switchyard_worker_contract::kernels::KernelTimes;
use switchyard_worker_contract::prediction::{Bound, Part as Phase};

pub(super) fn kernels(facts: &Facts) -> Option<Kernels> {
    let kernels = facts.kernels.as_ref()?;
    let KernelTimes { steps, gpu, gaps, copies, .. } = &kernels.times;
    let (all, sums) = (kernels.kernel_ms(), kernels.sums());
    let percent = |part: f64, whole: f64| (whole > 0.0).then(|| round4(100.0 * part / whole));
    let total = |of: fn(&Sum) -> f64| sums.iter().map(|(_, sum)| of(sum)).sum::<f64>();
    let floor = kernels.gpu.as_ref().map(|_| total(|sum| sum.floor_ms.unwrap_or_default()));
    Some(Kernels {
        gpu: gpu.clone(),
        rank: kernels.rank,
        profiled_steps: *steps,
        launches: round4(total(|sum| sum.launches)),
        kernel_ms: round4(all),
        idle_ms: round4(kernels.idle_ms(&facts.step)),
        gaps: round4(kernels.per_step(gaps.count as f64)),
        gap_ms: round4(1e3 * kernels.per_step(gaps.seconds)),
        longest_gap_ms: round4(1e3 * gaps.longest_seconds),
        copies: round4(kernels.per_step(copies.count as f64)),
        copied_bytes: round4(kernels.per_step(copies.bytes as f64)),
        copy_ms: round4(1e3 * kernels.per_step(copies.seconds)),
        flops: round4(total(|sum| sum.flops)),
        tensor_percent: percent(total(|sum| sum.tensor_flops), total(|sum| sum.flops)),
        half_percent: percent(kernels.ms_of(|kernel| kernel.half), all),
        device: kernels.gpu.as_ref().map(|gpu| gpu.name.clone()),
        floor_ms: floor.map(round4),
        floor_percent: floor.and_then(|floor| percent(floor, all)),
        utilization_percent: kernels.utilization(facts.step_ms()).map(|share| round4(100.0 * share)),
        rows: sums.iter().map(|((part, name), sum)| row(*part, name, sum, all)).collect(),
    })
}

fn row(part: Phase, name: &str, sum: &Sum, all: f64) -> KernelRow {
    let percent = |part: f64, whole: f64| (whole > 0.0).then(|| round4(100.0 * part / whole));
    let bound = [Bound::Memory, Bound::Arithmetic, Bound::Launch].into_iter().zip(sum.bounds);
    let bound = bound.max_by(|a, b| a.1.total_cmp(&b.1)).filter(|(_, seconds)| *seconds > 0.0);
    KernelRow {
        part: word(part).into(),
        name: name.into(),
        launches: round4(sum.launches),
        ms: round4(sum.ms),
        percent: percent(sum.ms, all).unwrap_or_default(),
        bytes: round4(sum.bytes),
        flops: round4(sum.flops),
        tensor_percent: percent(sum.tensor_flops, sum.flops),
        floor_ms: sum.floor_ms.map(round4),
        floor_percent: sum.floor_ms.and_then(|floor| percent(floor, sum.ms)),
        bound: bound.map(|(bound, _)| {
            match bound {
                Bound::Memory => "memory",
                Bound::Arithmetic => "arithmetic",
                Bound::Launch => "launch",
            }
            .into()
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::kernels::example;
    use crate::report::sample::Part;
    use switchyard_worker_contract::prediction::Arithmetic;

    #[test]
    fn launches_are_summed_by_part_and_name_and_compared_with_the_floor() {
        let mut run = Facts { kernels: Some(example(true)), ..Facts::default() };
        run.step[Part::Forward] = 60.0;
        run.step[Part::Input] = 4.0;
        let found = kernels(&run).unwrap();
        let names: Vec<(&str, &str, f64, f64)> =
            found.rows.iter().map(|row| (&*row.part, &*row.name, row.launches, row.ms)).collect();
        let expected = [
            ("forward", "product", 3.0, 25.0),
            ("backward", "layer_norm_backward", 1.0, 20.0),
            ("update", "optimizer_step", 1.0, 5.0),
        ];
        assert_eq!(names, expected);
        let floors: Vec<_> =
            found.rows.iter().map(|row| (row.floor_ms, row.floor_percent, row.bound.as_deref())).collect();
        let expected = [
            (Some(3.0), Some(12.0), Some("memory")),
            (Some(4.0), Some(20.0), Some("memory")),
            (Some(8.0), Some(160.0), Some("memory")),
        ];
        assert_eq!(floors, expected);
        assert_eq!((found.launches, found.kernel_ms, found.idle_ms, found.floor_ms), (5.0, 50.0, 10.0, Some(15.0)));
        assert_eq!((found.gaps, found.gap_ms, found.longest_gap_ms), (4.0, 2.0, 1.0));
        assert_eq!((found.copies, found.copied_bytes, found.copy_ms), (1.0, 1000.0, 1.0));
        // Two of three products are aligned; everything but the optimizer uses 16-bit formats.
        assert_eq!((found.rows[0].tensor_percent, found.tensor_percent), (Some(66.67), Some(66.67)));
        assert_eq!((found.half_percent, found.rows[1].tensor_percent), (Some(90.0), None));
        // Half of 3e9 FLOP are needed, in 64 ms, at 1e12 FLOP/s.
        assert_eq!(found.utilization_percent, Some(2.344));
    }

    #[test]
    fn without_a_device_file_floors_and_utilization_are_unknown() {
        let found = kernels(&Facts { kernels: Some(example(false)), ..Facts::default() }).unwrap();
        assert_eq!((found.floor_ms, found.floor_percent, found.utilization_percent), (None, None, None));
        assert!(found.rows.iter().all(|row| row.floor_ms.is_none() && row.bound.is_none()));
        assert_eq!((found.kernel_ms, found.device), (50.0, None));
    }

    #[test]
    fn tf32_products_are_bound_by_their_bytes_only() {
        let mut run = example(true);
        run.times.tf32 = true;
        run.times.kernels[0].cost.arithmetic = Arithmetic::F32;
        run.times.kernels[1].cost.arithmetic = Arithmetic::F32;
        let found = kernels(&Facts { kernels: Some(run.clone()), ..Facts::default() }).unwrap();
        assert_eq!((found.rows[0].floor_ms, found.rows[0].tensor_percent), (Some(3.0), Some(66.67)));
        assert_eq!(found.utilization_percent, None);
        run.times.tf32 = false;
        let found = kernels(&Facts { kernels: Some(run), ..Facts::default() }).unwrap();
        // 1e9 FLOP at 1e9 FLOP/s, three times.
        assert_eq!((found.rows[0].floor_ms, found.rows[0].tensor_percent), (Some(3000.0), Some(0.0)));
    }
}
