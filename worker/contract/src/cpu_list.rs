//! CPU lists as the kernel writes them: `0-3,8`.

use std::fmt;
use std::str::FromStr;

/// More CPUs than any kernel supports. Bounds memory use for a corrupt file with a range up to
/// 4294967295.
const MAX_CPU: u32 = 65_535;

/// A set of CPU numbers, printed as the kernel does: ascending, ranges merged.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CpuList(Vec<u32>);

/// Why a string is not a CPU list.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CpuListError {
    /// A part is neither a number nor a range.
    #[error("`{part}` in the CPU list `{list}` is neither a number nor a range: expected for example `0-3,8`")]
    Part {
        /// The invalid part.
        part: String,
        /// The whole list.
        list: String,
    },
    /// A range ends before it starts.
    #[error("the range `{part}` in a CPU list ends before it starts")]
    Backwards {
        /// The range as written.
        part: String,
    },
    /// Larger than any CPU number of a kernel.
    #[error("CPU {cpu} in a CPU list is too large: expected at most {MAX_CPU}")]
    TooLarge {
        /// The CPU number.
        cpu: u32,
    },
}

impl CpuList {
    /// Builds the set from numbers in any order, with or without repetitions.
    pub fn new(cpus: impl IntoIterator<Item = u32>) -> Self {
        let mut cpus: Vec<u32> = cpus.into_iter().collect();
        cpus.sort_unstable();
        cpus.dedup();
        Self(cpus)
    }

    /// The numbers, ascending.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    /// Number of CPUs in the set.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The lowest number.
    pub fn first(&self) -> Option<u32> {
        self.0.first().copied()
    }

    /// Whether a CPU is in the set.
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.binary_search(&cpu).is_ok()
    }

    /// The CPUs that are in both sets.
    pub fn intersection(&self, other: &CpuList) -> CpuList {
        CpuList(self.iter().filter(|cpu| other.contains(*cpu)).collect())
    }
}

impl FromStr for CpuList {
    type Err = CpuListError;

    /// Accepts any order, overlaps and surrounding white space; the empty string is the empty set.
    fn from_str(list: &str) -> Result<Self, CpuListError> {
        let mut cpus = Vec::new();
        let list = list.trim();
        if list.is_empty() {
            return Ok(Self::default());
        }
        for part in list.split(',') {
            let wrong = || CpuListError::Part { part: part.to_owned(), list: list.chars().take(80).collect() };
            let number = |text: &str| text.parse::<u32>().map_err(|_| wrong());
            let (start, end) = match part.split_once('-') {
                Some((start, end)) => (number(start)?, number(end)?),
                None => (number(part)?, number(part)?),
            };
            if end < start {
                return Err(CpuListError::Backwards { part: part.to_owned() });
            }
            if end > MAX_CPU {
                return Err(CpuListError::TooLarge { cpu: end });
            }
            cpus.extend(start..=end);
        }
        Ok(Self::new(cpus))
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0.as_slice();
        let mut separator = "";
        while let Some(&start) = rest.first() {
            let length = rest.iter().zip(start..).take_while(|(cpu, expected)| **cpu == *expected).count();
            let end = rest[length - 1];
            if length == 1 {
                write!(formatter, "{separator}{start}")?;
            } else {
                write!(formatter, "{separator}{start}-{end}")?;
            }
            separator = ",";
            rest = &rest[length..];
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn canonical(text: &str) -> String {
        text.parse::<CpuList>().expect("a CPU list").to_string()
    }

    #[test]
    fn prints_like_the_kernel() {
        assert_eq!(canonical("0-3,8"), "0-3,8");
        assert_eq!(canonical("8,2,1,0-1,3\n"), "0-3,8");
        assert_eq!(canonical("0,1"), "0-1");
        assert_eq!(canonical(""), "");
        assert_eq!(canonical("0-55,112-167"), "0-55,112-167");
    }

    #[test]
    fn errors_name_the_invalid_part() {
        let error = |text: &str| text.parse::<CpuList>().expect_err("no CPU list").to_string();
        assert!(error("0-3,x").contains("`x`"), "{}", error("0-3,x"));
        assert!(error("3-1").contains("`3-1`"));
        assert!(error("0-4294967295").contains("too large"));
        assert!(error("-1").contains("`-1`"));
        assert!(error("0,,1").contains("neither"));
    }

    #[test]
    fn set_operations() {
        let a: CpuList = "0-7".parse().expect("a CPU list");
        let b: CpuList = "4-11".parse().expect("a CPU list");
        assert_eq!(a.intersection(&b).to_string(), "4-7");
        assert_eq!((a.len(), a.first(), a.contains(7), a.contains(8)), (8, Some(0), true, false));
    }

    proptest! {
        #[test]
        fn round_trip(cpus in prop::collection::vec(0u32..600, 0..200)) {
            let list = CpuList::new(cpus.clone());
            let text = list.to_string();
            prop_assert_eq!(&text.parse::<CpuList>().expect("own output"), &list);
            for cpu in cpus {
                prop_assert!(list.contains(cpu));
            }
            // Canonical: no two adjacent ranges.
            let bounds: Vec<(u32, u32)> = text.split(',').filter(|part| !part.is_empty()).map(|part| {
                let (a, b) = part.split_once('-').unwrap_or((part, part));
                (a.parse().expect("a number"), b.parse().expect("a number"))
            }).collect();
            for pair in bounds.windows(2) {
                prop_assert!(pair[0].1 + 1 < pair[1].0);
            }
        }

        #[test]
        fn never_panics(text in "[0-9,\\- x]{0,20}") {
            let _ = text.parse::<CpuList>();
        }
    }
}
