//! NCCL's variables.
//!
//! NCCL ignores unknown variables, and uses its default for a value that it cannot parse. A
//! mistyped name or value is therefore silent.

mod documented;
mod list;
mod undocumented;

pub use list::List;

use std::fmt;
use std::str::FromStr;

/// Prefix of all NCCL variables.
pub const PREFIX: &str = "NCCL_";
/// Newest release that the tables cover.
pub const NEWEST: Version = v(2, 30, 7);
/// Oldest release whose source was read. Its variables can be older.
pub const OLDEST: Version = v(2, 3, 5);
/// Maximum length of a value in `nccl.conf`, in characters: `char envValue[1024]`
/// (`src/misc/param.cc` of 2.30.7).
pub const MAX_VALUE_LEN: usize = 1023;
/// Maximum product of threads and sockets of the socket transport (user guide,
/// `NCCL_SOCKET_NTHREADS`).
pub const MAX_SOCKETS: i64 = 64;
pub const GUIDE: &str = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html";

/// An NCCL release.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// 2 since 2017.
    pub major: u16,
    /// Feature release.
    pub minor: u16,
    /// Bug-fix release.
    pub patch: u16,
}

const fn v(major: u16, minor: u16, patch: u16) -> Version {
    Version { major, minor, patch }
}

impl fmt::Display for Version {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.patch {
            0 => write!(out, "{}.{}", self.major, self.minor),
            patch => write!(out, "{}.{}.{patch}", self.major, self.minor),
        }
    }
}

impl FromStr for Version {
    type Err = String;

    /// Parses `2.21`, `2.21.5` or, as packages write it, `2.21.5-1`.
    fn from_str(text: &str) -> Result<Version, String> {
        let wrong = || format!("got `{text}`; expected a version of NCCL, such as 2.21 or 2.21.5");
        let release = text.split_once(['-', '+']).map_or(text, |(release, _)| release);
        let parts: Vec<u16> = release.split('.').map(str::parse).collect::<Result<_, _>>().map_err(|_| wrong())?;
        match parts[..] {
            [major, minor] => Ok(v(major, minor, 0)),
            [major, minor, patch] => Ok(v(major, minor, patch)),
            _ => Err(wrong()),
        }
    }
}

/// Section of the user guide that lists a variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Section {
    /// "System configuration": may stay in scripts.
    System,
    /// "Debugging": "should not be used in production nor retained in scripts".
    Debugging,
    /// Not in the guide; only in the code.
    Undocumented,
}

/// Valid values of a variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// 0 or 1.
    Switch,
    /// An integer, decimal or hexadecimal.
    Whole,
    /// An integer of at least this.
    AtLeast(i64),
    /// An integer in this inclusive range.
    Between(i64, i64),
    /// One of these numbers.
    OneOf(&'static [i64]),
    /// One of these words, case-insensitive.
    Words(&'static [&'static str]),
    /// A distance: `LOC`, `NVL`, `PIX`, `PXB`, `PHB`, `SYS`, or a number as in older releases.
    Level,
    /// Interfaces by prefix, `=` for exact names, `^` for all others.
    Interfaces,
    /// RDMA devices in the same syntax, each with an optional port, rail and plane.
    Adapters,
    /// Anything.
    Text,
}

/// Names of distances.
const LEVELS: [&str; 9] = ["LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PHB", "SYS"];

impl Form {
    /// Checks whether NCCL can use the value.
    ///
    /// # Errors
    /// A description of the valid values.
    pub fn check(self, value: &str) -> Result<(), String> {
        let number = || number(value);
        let within = |low: i64, high: i64| number().is_some_and(|number| (low..=high).contains(&number));
        let listed = |words: &[&str]| words.iter().any(|word| word.eq_ignore_ascii_case(value));
        let (is_good, expected) = match self {
            Form::Switch => (within(0, 1), "0 or 1".to_string()),
            Form::Whole => (number().is_some(), "a whole number".to_string()),
            Form::AtLeast(low) => (within(low, i64::MAX), format!("a whole number of at least {low}")),
            Form::Between(low, high) => (within(low, high), format!("a whole number from {low} to {high}")),
            Form::OneOf(numbers) => {
                let words: Vec<String> = numbers.iter().map(i64::to_string).collect();
                (number().is_some_and(|number| numbers.contains(&number)), format!("one of {}", words.join(", ")))
            }
            Form::Words(words) => (listed(words), format!("one of {}", words.join(", "))),
            Form::Level => {
                let is_good = listed(&LEVELS) || within(0, i64::MAX);
                (is_good, "one of LOC, NVL, PIX, PXB, PHB, SYS".to_string())
            }
            Form::Interfaces | Form::Adapters => {
                let is_good = !value.trim().is_empty() && !value.contains(char::is_whitespace);
                (is_good, "names separated by commas, without spaces".to_string())
            }
            Form::Text => (true, String::new()),
        };
        if is_good { Ok(()) } else { Err(expected) }
    }
}

/// Parses a number like `strtoll` with base 0, but rejects trailing text: NCCL would read `1,5` as
/// 1.
pub fn number(text: &str) -> Option<i64> {
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => (-1, digits),
        None => (1, text.strip_prefix('+').unwrap_or(text)),
    };
    let value = match digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
        Some(digits) if !digits.starts_with(['+', '-']) => i64::from_str_radix(digits, 16).ok()?,
        Some(_) => return None,
        None if digits.starts_with(|c: char| c.is_ascii_digit()) => digits.parse().ok()?,
        None => return None,
    };
    Some(sign * value)
}

/// An NCCL variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key {
    pub name: &'static str,
    /// Section of the user guide that lists it.
    pub section: Section,
    /// First release that reads it. For [`OLDEST`], an earlier release can be the first.
    pub since: Version,
    /// First release that no longer reads it.
    pub gone: Option<Version>,
    /// Release since which the user guide advises against it.
    pub deprecated: Option<Version>,
    /// Variable to set instead.
    pub instead: Option<&'static str>,
    /// Valid values.
    pub form: Form,
}

impl Key {
    const fn new(name: &'static str, section: Section, since: Version, form: Form) -> Key {
        Key { name, section, since, gone: None, deprecated: None, instead: None, form }
    }

    const fn gone(self, major: u16, minor: u16, patch: u16) -> Key {
        Key { gone: Some(v(major, minor, patch)), ..self }
    }

    const fn instead(self, name: &'static str) -> Key {
        Key { instead: Some(name), ..self }
    }

    const fn deprecated(self, major: u16, minor: u16, instead: &'static str) -> Key {
        Key { deprecated: Some(v(major, minor, 0)), instead: Some(instead), ..self }
    }
}

const fn system(name: &'static str, since: Version, form: Form) -> Key {
    Key::new(name, Section::System, since, form)
}

const fn debugging(name: &'static str, since: Version, form: Form) -> Key {
    Key::new(name, Section::Debugging, since, form)
}

const fn undocumented(name: &'static str, since: Version, form: Form) -> Key {
    Key::new(name, Section::Undocumented, since, form)
}

/// All variables, those of the user guide first.
pub fn keys() -> impl Iterator<Item = &'static Key> {
    documented::KEYS.iter().chain(&undocumented::KEYS)
}

/// The variable of this name.
pub fn find(name: &str) -> Option<&'static Key> {
    keys().find(|key| key.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_parse_as_packages_write_them() {
        assert_eq!("2.21.5-1+cuda12.4".parse(), Ok(v(2, 21, 5)));
        assert_eq!("2.21".parse::<Version>().unwrap().to_string(), "2.21");
        assert!(v(2, 9, 9) < v(2, 21, 0));
        for bad in ["", "2", "2.x", "2.1.1.1", "v2.1", "2.99999"] {
            assert!(bad.parse::<Version>().unwrap_err().contains("such as 2.21"), "{bad}");
        }
    }

    #[test]
    fn keys_are_unique_and_their_versions_consistent() {
        let mut names: Vec<&str> = keys().map(|key| key.name).collect();
        assert!(names.len() >= 250, "{}", names.len());
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]));
        for key in keys() {
            assert!(key.name.starts_with(PREFIX) && key.since >= OLDEST && key.since <= NEWEST, "{key:?}");
            assert!(key.gone.is_none_or(|gone| gone <= NEWEST), "{key:?}");
            let instead = key.instead.map(|instead| instead.split('=').next().unwrap());
            assert!(instead.is_none_or(|name| find(name).is_some_and(|other| other.gone.is_none())), "{key:?}");
        }
    }

    #[test]
    fn values_are_checked_by_form() {
        let takes = |name: &str, value: &str| find(name).unwrap().form.check(value).is_ok();
        for (name, good, bad) in [
            ("NCCL_NTHREADS", "256", "100"),
            ("NCCL_IB_DISABLE", "1", "true"),
            ("NCCL_IB_TIMEOUT", "22", "32"),
            ("NCCL_BUFFSIZE", "0x400000", "4M"),
            ("NCCL_NET_GDR_LEVEL", "pxb", "PXX"),
            ("NCCL_DEBUG", "warn", "WARNING"),
            ("NCCL_IB_HCA", "=mlx5_0:1,mlx5_3:1", "mlx5_0, mlx5_3"),
            ("NCCL_CUMEM_ENABLE", "-2", "off"),
            ("NCCL_SOCKET_IFNAME", "^lo,docker", ""),
        ] {
            assert!(takes(name, good) && !takes(name, bad), "{name}");
        }
        for bad in ["", "-", "+", "0x", "0x-1", "1.5", " 1", "1 ", "99999999999999999999", "--1"] {
            assert_eq!(number(bad), None, "{bad:?}");
        }
    }
}
