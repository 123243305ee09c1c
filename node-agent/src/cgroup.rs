//! The CPU limit of a control group, version 1 and 2.

use crate::read;
use std::path::{Path, PathBuf};

/// Position of a process in the trees of control groups.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Membership {
    /// Path in the unified tree (version 2).
    pub unified: Option<String>,
    /// Path in the tree of the `cpu` controller (version 1), and the directory name of that tree,
    /// for example `cpu,cpuacct`.
    pub cpu: Option<(String, String)>,
}

/// Parses `/proc/self/cgroup`.
pub fn parse_membership(text: &str) -> Membership {
    let mut membership = Membership::default();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(id), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        if id == "0" && controllers.is_empty() {
            membership.unified = Some(path.to_owned());
        } else if controllers.split(',').any(|controller| controller == "cpu") {
            membership.cpu = Some((path.to_owned(), controllers.to_owned()));
        }
    }
    membership
}

/// Parses `cpu.max` of version 2 (`max 100000` or `150000 100000`) to millicores. `None` if there
/// is no limit or the text is malformed.
pub fn parse_cpu_max(text: &str) -> Option<u64> {
    let mut fields = text.split_whitespace();
    let quota = fields.next()?.parse().ok()?;
    millicores(quota, fields.next()?.parse().ok()?)
}

/// Millicores from a quota and a period in microseconds, rounded down. `None` without a limit,
/// which version 1 writes as -1.
pub fn millicores(quota: i64, period: i64) -> Option<u64> {
    let (quota, period) = (u64::try_from(quota).ok()?, u64::try_from(period).ok()?);
    quota.checked_mul(1000)?.checked_div(period)
}

/// The lowest limit on the path from this process's group up to the root of the mount.
///
/// In a container, the group's path can name directories outside the mount. Then only the root of
/// the mount counts, which is the container's own group.
pub(crate) fn quota_millicores(sysfs: &Path, procfs: &Path) -> Option<u64> {
    let membership = parse_membership(&read::text(&procfs.join("self/cgroup")).ok()?);
    let mount = sysfs.join("fs/cgroup");
    let unified = membership.unified.as_deref().and_then(|path| {
        // Hybrid hosts mount version 2 next to the trees of version 1.
        let root = if mount.join("unified").is_dir() { mount.join("unified") } else { mount.clone() };
        lowest(&root, path, |group| parse_cpu_max(&read::text(&group.join("cpu.max")).ok()?))
    });
    let legacy = membership.cpu.and_then(|(path, controllers)| {
        let names = [controllers.as_str(), "cpu", "cpu,cpuacct"];
        let root = names.iter().map(|name| mount.join(name)).find(|root| root.is_dir())?;
        lowest(&root, &path, |group| {
            let quota = read::number_in(&group.join("cpu.cfs_quota_us"))?;
            millicores(quota, read::number_in(&group.join("cpu.cfs_period_us"))?)
        })
    });
    unified.into_iter().chain(legacy).min()
}

/// The lowest limit of the directories from `root` down to `root/path`.
fn lowest(root: &Path, path: &str, limit: impl Fn(&Path) -> Option<u64>) -> Option<u64> {
    let mut groups: Vec<PathBuf> = vec![root.to_owned()];
    for name in path.split('/').filter(|name| !name.is_empty()) {
        let next = groups.last()?.join(name);
        if name == ".." || !next.is_dir() {
            break;
        }
        groups.push(next);
    }
    groups.iter().filter_map(|group| limit(group)).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn membership_of_both_versions() {
        let unified = parse_membership("0::/kubepods.slice/pod1\n");
        assert_eq!(unified, Membership { unified: Some("/kubepods.slice/pod1".to_owned()), cpu: None });
        let legacy = parse_membership("9:name=systemd:/\n4:cpu,cpuacct:/docker/ab:c\n3:cpuset:/\n0::/\nrubbish\n");
        assert_eq!(legacy.cpu, Some(("/docker/ab:c".to_owned(), "cpu,cpuacct".to_owned())));
        assert_eq!(legacy.unified.as_deref(), Some("/"));
    }

    #[test]
    fn limits() {
        assert_eq!(parse_cpu_max("150000 100000"), Some(1500));
        assert_eq!(parse_cpu_max("max 100000"), None);
        assert_eq!(parse_cpu_max("150000"), None);
        assert_eq!(parse_cpu_max("150000 0"), None);
        assert_eq!(millicores(-1, 100_000), None);
        assert_eq!(millicores(250_000, 100_000), Some(2500));
        assert_eq!(millicores(i64::MAX, 1), None);
    }
}
