//! Vector clocks over streams.

/// For each stream, the number of its operations that happened before. Clocks alone determine which
/// operations are ordered.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Clock(Vec<u64>);

impl Clock {
    pub(crate) fn get(&self, stream: usize) -> u64 {
        self.0.get(stream).copied().unwrap_or(0)
    }

    pub(crate) fn set(&mut self, stream: usize, count: u64) {
        if self.0.len() <= stream {
            self.0.resize(stream + 1, 0);
        }
        self.0[stream] = count;
    }

    /// Also orders this after `other`.
    pub(crate) fn join(&mut self, other: &Clock) {
        for (stream, count) in other.0.iter().enumerate() {
            self.set(stream, self.get(stream).max(*count));
        }
    }

    /// Whether `other` happened before this.
    pub(crate) fn covers(&self, other: &Clock) -> bool {
        other.0.iter().enumerate().all(|(stream, count)| self.get(stream) >= *count)
    }

    /// Total operations over all streams.
    pub(crate) fn sum(&self) -> u64 {
        self.0.iter().sum()
    }
}
