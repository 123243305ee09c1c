//! CPU and memory limits of this process's cgroups: version 2, and version 1, which some nodes
//! still run.

use std::fs;
use std::path::{Path, PathBuf};

/// Memory limits from here on mean "no limit": version 1 writes a number near 2^63.
const NO_LIMIT: u64 = 1 << 60;

/// CPU limit in CPUs, rounded up; `None` without a limit.
pub(crate) fn cpus() -> Option<u32> {
    Cgroups::of_this_process().cpus()
}

/// Memory limit in bytes; `None` without a limit.
pub(crate) fn memory() -> Option<u64> {
    Cgroups::of_this_process().memory()
}

struct Cgroups {
    mount: PathBuf,
    /// Lines of the form `HIERARCHY:CONTROLLERS:PATH`; for version 2, CONTROLLERS is empty.
    lines: String,
}

impl Cgroups {
    fn of_this_process() -> Cgroups {
        let lines = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        Cgroups { mount: PathBuf::from("/sys/fs/cgroup"), lines }
    }

    fn cpus(&self) -> Option<u32> {
        let v2 = |folder: &Path| {
            let text = fs::read_to_string(folder.join("cpu.max")).ok()?;
            let (quota, period) = text.trim().split_once(' ')?;
            whole_cpus(quota, period)
        };
        let v1 = |folder: &Path| {
            let read = |file: &str| fs::read_to_string(folder.join(file)).ok();
            whole_cpus(read("cpu.cfs_quota_us")?.trim(), read("cpu.cfs_period_us")?.trim())
        };
        self.lowest("cpu", v2, v1)
    }

    fn memory(&self) -> Option<u64> {
        let bytes =
            |file: &'static str| move |folder: &Path| fs::read_to_string(folder.join(file)).ok()?.trim().parse().ok();
        self.lowest("memory", bytes("memory.max"), bytes("memory.limit_in_bytes")).filter(|bytes| *bytes < NO_LIMIT)
    }

    /// The lowest limit of the group and its parents, in both versions. A container may see its own
    /// group as the root.
    fn lowest<T: Ord>(
        &self,
        controller: &str,
        v2: impl Fn(&Path) -> Option<T>,
        v1: impl Fn(&Path) -> Option<T>,
    ) -> Option<T> {
        let limits = self.lines.lines().filter_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            let is_v2 = controllers.is_empty();
            if !is_v2 && !controllers.split(',').any(|name| name == controller) {
                return None;
            }
            let root = self.mount.join(controllers);
            let own = root.join(path.trim_start_matches('/'));
            let groups = own.ancestors().take_while(|folder| folder.starts_with(&root));
            groups.filter_map(|folder| if is_v2 { v2(folder) } else { v1(folder) }).min()
        });
        limits.min()
    }
}

/// Returns the quota in CPUs, rounded up. `max` and negative quotas mean no limit.
fn whole_cpus(quota: &str, period: &str) -> Option<u32> {
    let (quota, period): (u64, u64) = (quota.parse().ok()?, period.parse().ok()?);
    (period > 0).then(|| quota.div_ceil(period).clamp(1, 1 << 20) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates files below a mount point; `lines`: content of `/proc/self/cgroup`.
    fn groups(folder: &Path, files: &[(&str, &str)], lines: &str) -> Cgroups {
        for (file, text) in files {
            let file = folder.join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        Cgroups { mount: folder.to_owned(), lines: lines.to_owned() }
    }

    #[test]
    fn version_1_limits_are_found_on_the_host_and_inside_a_container() {
        const NONE: &str = "9223372036854771712\n";
        let lines = "9:memory:/kubepods/pod1\n5:cpu,cpuacct:/kubepods/pod1\n1:name=systemd:/\n0::/\n";
        for group in ["kubepods/pod1/", ""] {
            let folder = tempfile::tempdir().unwrap();
            let at = |file: &str| file.replace("GROUP/", group);
            let files = [
                (at("memory/GROUP/memory.limit_in_bytes"), "2147483648\n"),
                (at("cpu,cpuacct/GROUP/cpu.cfs_quota_us"), "250000\n"),
                (at("cpu,cpuacct/GROUP/cpu.cfs_period_us"), "100000\n"),
                ("memory/kubepods/memory.limit_in_bytes".into(), NONE),
            ];
            let files: Vec<(&str, &str)> = files.iter().map(|(file, text)| (file.as_str(), *text)).collect();
            let found = groups(folder.path(), &files, lines);
            assert_eq!((found.cpus(), found.memory()), (Some(3), Some(2 << 30)), "in `{group}`");
        }
        let folder = tempfile::tempdir().unwrap();
        let files = [
            ("memory/memory.limit_in_bytes", NONE),
            ("cpu,cpuacct/cpu.cfs_quota_us", "-1\n"),
            ("cpu,cpuacct/cpu.cfs_period_us", "100000\n"),
        ];
        let unlimited = groups(folder.path(), &files, lines);
        assert_eq!((unlimited.cpus(), unlimited.memory()), (None, None));
    }

    #[test]
    fn the_lowest_limit_of_a_version_2_group_and_its_parents_applies() {
        let folder = tempfile::tempdir().unwrap();
        let files = [
            ("a/cpu.max", "150000 100000\n"),
            ("a/b/cpu.max", "max 100000\n"),
            ("a/memory.max", "4096\n"),
            ("a/b/memory.max", "max\n"),
        ];
        let found = groups(folder.path(), &files, "0::/a/b\n");
        assert_eq!((found.cpus(), found.memory()), (Some(2), Some(4096)));
        assert_eq!((whole_cpus("1000", "100000"), whole_cpus("nonsense", "1")), (Some(1), None));
    }
}
