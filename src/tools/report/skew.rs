//! How much longer each rank computes than the others, over time.

use super::fold::Fold;
use super::windows::Windows;
use std::collections::BTreeMap;

/// A rank is slow in a window if its compute time exceeds the median by this share.
pub(super) const SLOW: f64 = 0.05;

/// Fewest windows needed to judge a rank.
const LEAST_WINDOWS: usize = 5;

/// Compute time over the median of the ranks by rank and window, ms.
#[derive(Debug, Default)]
pub(super) struct Skew {
    pub ranks: Vec<u32>,
    /// Steps per window.
    pub width: u64,
    /// First step of each window.
    pub steps: Vec<u64>,
    /// For each rank and window, the time over the median and whether it is slow; `None` if
    /// unknown.
    pub cells: Vec<Vec<Option<(f64, bool)>>>,
}

impl Skew {
    /// Computes the skew of a job. Uses compute time, because fast ranks wait for slow ones in the
    /// all-reduce and all wall times are equal.
    pub(super) fn of_ranks(folds: &BTreeMap<u32, Fold>) -> Skew {
        let width = folds.values().map(|fold| fold.windows.width()).max().unwrap_or(1);
        let ranks: Vec<u32> = folds.keys().copied().collect();
        let compute: Vec<Vec<Option<f64>>> = folds
            .values()
            .map(|fold| {
                let mut windows: Windows<_> = fold.windows.clone();
                windows.widen_to(width);
                windows.iter().map(|(_, sums)| sums.mean().map(|mean| mean.compute())).collect()
            })
            .collect();
        let count = compute.iter().map(Vec::len).max().unwrap_or(0);
        let mut cells = vec![vec![None; count]; ranks.len()];
        for window in 0..count {
            let of = |rank: usize| compute[rank].get(window).copied().flatten();
            let mut times: Vec<f64> = (0..ranks.len()).filter_map(of).collect();
            // With fewer than two there is nothing to compare.
            let Some(median) = median(&mut times).filter(|_| times.len() > 1) else { continue };
            for (rank, row) in cells.iter_mut().enumerate() {
                row[window] = of(rank).map(|time| (time - median, time > median * (1.0 + SLOW)));
            }
        }
        let steps = (0..count as u64).map(|index| index * width + 1).collect();
        Skew { ranks, width, steps, cells }
    }

    /// Share of the windows in which a rank is slow, and its mean time over the median, ms.
    pub(super) fn of(&self, rank: u32) -> Option<(f64, f64)> {
        let row = &self.cells[self.ranks.binary_search(&rank).ok()?];
        let known: Vec<(f64, bool)> = row.iter().flatten().copied().collect();
        let count = known.len() as f64;
        (!known.is_empty()).then(|| {
            let slow = known.iter().filter(|(_, slow)| *slow).count() as f64;
            // A few slow windows can be chance.
            let share = if known.len() < LEAST_WINDOWS { 0.0 } else { slow / count };
            (share, known.iter().map(|(over, _)| over).sum::<f64>() / count)
        })
    }
}

/// The lower median: with two ranks, the faster one shows what the other could reach.
fn median(times: &mut [f64]) -> Option<f64> {
    times.sort_by(f64::total_cmp);
    times.get(times.len().checked_sub(1)? / 2).copied()
}
