//! Maps steps and values to coordinates of a plot.

use super::WIDTH;

/// Height of the plot area.
pub(super) const HEIGHT: f64 = 170.0;
/// Space for the labels on the left.
pub(super) const LEFT: f64 = 54.0;
/// Space on the right.
pub(super) const RIGHT: f64 = 18.0;
/// Space for the name of the value axis above.
pub(super) const ABOVE: f64 = 20.0;
/// Space for the labels below.
pub(super) const BELOW: f64 = 36.0;

/// Coordinates of steps and values.
pub(super) struct Scale {
    pub(super) x: (f64, f64),
    pub(super) y: (f64, f64),
    pub(super) top: f64,
}

impl Scale {
    pub(super) fn x(&self, step: f64) -> f64 {
        let share = (step - self.x.0) / (self.x.1 - self.x.0).max(1e-12);
        LEFT + share.clamp(0.0, 1.0) * (WIDTH - LEFT - RIGHT)
    }

    pub(super) fn y(&self, value: f64) -> f64 {
        let share = (value - self.y.0) / (self.y.1 - self.y.0).max(1e-300);
        self.top + HEIGHT - share.clamp(0.0, 1.0) * HEIGHT
    }
}
