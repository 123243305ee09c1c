//! Lists of interfaces and RDMA devices as NCCL parses them (`src/misc/utils.cc`, `parseStringList`
//! and `matchIfList`).

/// A list: `mlx5_0,mlx5_3:1` by prefix, `=` for exact names, `^` for all others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct List<'a> {
    /// Whether the listed names are excluded.
    pub is_excluding: bool,
    /// Whether names are exact.
    pub is_exact: bool,
    /// Names, each with an optional port.
    entries: Vec<(&'a str, Option<u32>)>,
}

impl<'a> List<'a> {
    /// Parses a list, skipping empty names.
    pub fn parse(value: &'a str) -> List<'a> {
        let rest = value.strip_prefix('^');
        let is_excluding = rest.is_some();
        let rest = rest.unwrap_or(value);
        let exact = rest.strip_prefix('=');
        let entry = |entry: &'a str| {
            let mut parts = entry.split(':');
            let name = parts.next().unwrap_or(entry).trim();
            (name, parts.next().and_then(|port| port.parse().ok()))
        };
        let entries = exact.unwrap_or(rest).split(',').map(entry).filter(|(name, _)| !name.is_empty());
        List { is_excluding, is_exact: exact.is_some(), entries: entries.collect() }
    }

    /// A list of full interface names without signs, as Gloo and others expect.
    pub fn of_names(value: &'a str) -> List<'a> {
        let entries = value.split(',').map(|name| (name.trim(), None)).filter(|(name, _)| !name.is_empty());
        List { is_excluding: false, is_exact: true, entries: entries.collect() }
    }

    /// The names, without ports.
    pub fn names(&self) -> impl Iterator<Item = &'a str> {
        self.entries.iter().map(|(name, _)| *name)
    }

    /// Whether NCCL uses the device. Interfaces have no port.
    pub fn matches(&self, name: &str, port: Option<u32>) -> bool {
        let is_name = |listed: &str| if self.is_exact { name == listed } else { name.starts_with(listed) };
        let is_port = |listed: Option<u32>| listed.is_none() || port.is_none() || listed == port;
        self.entries.iter().any(|(listed, at)| is_name(listed) && is_port(*at)) != self.is_excluding
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_prefixes_unless_exact() {
        let matches = |list: &str, name: &str, port| List::parse(list).matches(name, port);
        assert!(matches("mlx5_1", "mlx5_10", Some(1)) && !matches("=mlx5_1", "mlx5_10", Some(1)));
        assert!(matches("=mlx5_1:1", "mlx5_1", Some(1)) && !matches("=mlx5_1:1", "mlx5_1", Some(2)));
        assert!(matches("^docker,lo", "eth0", None) && !matches("^docker,lo", "docker0", None));
        assert!(matches("^=lo", "lo1", None) && !matches("^=lo", "lo", None));
        assert!(!matches("", "eth0", None), "an empty list names nothing");
        assert_eq!(List::parse("=a:1:rail, b").names().collect::<Vec<_>>(), ["a", "b"]);
        assert!(List::of_names("eth0").matches("eth0", None) && !List::of_names("=eth0").matches("eth0", None));
    }
}
