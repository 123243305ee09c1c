//! Represents long runs in little memory: growing windows of steps, and a histogram of times.

use std::collections::BTreeMap;

/// Most windows; beyond that, pairs are merged.
pub(super) const LIMIT: usize = 240;

/// Values that can be merged when windows are joined.
pub(super) trait Merge: Default + Clone {
    /// Adds a later window.
    fn merge(&mut self, later: &Self);
}

/// Consecutive windows with the same number of steps, starting at step 1. The width is a power of
/// two, so that the windows of two ranks can be widened to match.
#[derive(Debug, Clone)]
pub(super) struct Windows<T> {
    width: u64,
    cells: Vec<T>,
}

impl<T: Merge> Default for Windows<T> {
    fn default() -> Self {
        Windows { width: 1, cells: Vec::new() }
    }
}

impl<T: Merge> Windows<T> {
    /// The window of a step; steps count from 1.
    pub(super) fn at(&mut self, step: u64) -> &mut T {
        let position = step.saturating_sub(1);
        while position / self.width >= LIMIT as u64 {
            self.widen_to(self.width * 2);
        }
        let index = (position / self.width) as usize;
        if index >= self.cells.len() {
            self.cells.resize_with(index + 1, T::default);
        }
        &mut self.cells[index]
    }

    /// Discards the windows after the one of `step`, because the following steps are repeated.
    pub(super) fn forget_after(&mut self, step: u64) {
        self.cells.truncate(step.div_ceil(self.width) as usize);
    }

    /// Joins windows until they have at least this width.
    pub(super) fn widen_to(&mut self, width: u64) {
        while self.width < width {
            let joined = self.cells.chunks(2).map(|pair| {
                let mut cell = pair[0].clone();
                pair.get(1).into_iter().for_each(|later| cell.merge(later));
                cell
            });
            self.cells = joined.collect();
            self.width *= 2;
        }
    }

    /// Steps in a window.
    pub(super) fn width(&self) -> u64 {
        self.width
    }

    /// First step of each window, with its value.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        self.cells.iter().enumerate().map(|(index, cell)| (index as u64 * self.width + 1, cell))
    }
}

/// Counts of times in buckets that are 2 % wide, which is the accuracy of quantiles.
#[derive(Debug, Clone, Default)]
pub(super) struct Histogram {
    classes: BTreeMap<u16, u64>,
    count: u64,
}

/// Ratio of a bucket's bounds.
const CLASS: f64 = 1.02;
/// The smallest time distinguished from 0, ms.
const LEAST: f64 = 1e-3;

impl Histogram {
    /// Counts a time, ms, `times` times.
    pub(super) fn add(&mut self, milliseconds: f64, times: u64) {
        let class = if milliseconds > LEAST { 1.0 + ((milliseconds / LEAST).ln() / CLASS.ln()).floor() } else { 0.0 };
        *self.classes.entry(class as u16).or_default() += times;
        self.count += times;
    }

    /// The quantile of the times, ms; `None` if empty.
    pub(super) fn quantile(&self, share: f64) -> Option<f64> {
        let rank = ((self.count as f64 * share).ceil() as u64).max(1);
        let mut counted = 0;
        let class = self.classes.iter().find_map(|(class, count)| {
            counted += count;
            (counted >= rank).then_some(*class)
        })?;
        // The centre of the bucket.
        Some(if class == 0 { 0.0 } else { LEAST * CLASS.powf(f64::from(class) - 0.5) })
    }
}

impl Merge for Histogram {
    fn merge(&mut self, later: &Self) {
        for (class, count) in &later.classes {
            *self.classes.entry(*class).or_default() += count;
        }
        self.count += later.count;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Merge for Vec<u64> {
        fn merge(&mut self, later: &Self) {
            self.extend(later);
        }
    }

    #[test]
    fn windows_widen_and_lose_nothing() {
        let mut windows: Windows<Vec<u64>> = Windows::default();
        (1..=1000).for_each(|step| windows.at(step).push(step));
        assert_eq!(windows.width(), 8);
        let all: Vec<u64> = windows.iter().flat_map(|(_, cell)| cell.clone()).collect();
        assert_eq!(all, (1..=1000).collect::<Vec<_>>());
        assert!(windows.iter().all(|(first, cell)| cell[0] == first));
        windows.at(u64::MAX).push(0);
        assert!(windows.iter().count() <= LIMIT);
    }

    #[test]
    fn repeated_steps_are_discarded() {
        let mut windows: Windows<Vec<u64>> = Windows::default();
        (1..=100).for_each(|step| windows.at(step).push(step));
        windows.forget_after(40);
        assert_eq!(windows.iter().last().map(|(first, cell)| (first, cell.len())), Some((40, 1)));
        windows.forget_after(0);
        assert_eq!(windows.iter().count(), 0);
    }

    #[test]
    fn quantiles_are_exact_to_the_width_of_a_class() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.quantile(0.5), None);
        (1..=1000).for_each(|time| histogram.add(f64::from(time), 1));
        for (share, expected) in [(0.5, 500.0), (0.99, 990.0), (1.0, 1000.0), (0.0, 1.0)] {
            let found = histogram.quantile(share).unwrap();
            assert!((found / expected - 1.0).abs() < 0.02, "{share}: {found}");
        }
        let mut none = Histogram::default();
        none.add(0.0, 10);
        assert_eq!(none.quantile(0.5), Some(0.0));
    }
}
