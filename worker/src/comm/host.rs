//! What this process can learn about its host: identity, name, CPUs.

use std::{fs, path::Path};

/// Ranks with equal identity can share memory: same boot of the same kernel, same network namespace (abstract sockets
/// belong to one, and two pods have two), same user.
pub(super) fn identity() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let netns = fs::read_link("/proc/self/ns/net").map(|p| p.display().to_string());
    // If the kernel does not say, no other rank counts as local.
    let netns = netns.unwrap_or_else(|_| format!("process {}", std::process::id()));
    let uid = rustix::process::getuid().as_raw();
    format!("{}/{netns}/{uid}", boot.trim())
}

/// The host name, for people.
pub(super) fn name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// CPUs this process may run on, one bit each.
pub(super) fn allowed_cpus() -> Vec<u64> {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else {
        return vec![1];
    };
    let mut words = vec![0u64; rustix::thread::CpuSet::MAX_CPU.div_ceil(64)];
    for cpu in (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)) {
        words[cpu / 64] |= 1 << (cpu % 64);
    }
    while words.len() > 1 && words.last() == Some(&0) {
        words.pop();
    }
    words
}

/// The CPU limit of the control group (version 2) and its parents, rounded up; 0 without limit.
pub(crate) fn cpu_quota() -> u32 {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let path = own.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or("/").trim_start_matches('/').to_owned();
    let mut at = Path::new("/sys/fs/cgroup").join(path);
    let mut least = 0;
    while at.starts_with("/sys/fs/cgroup") {
        if let Some(cpus) = fs::read_to_string(at.join("cpu.max")).ok().and_then(|text| parse_cpu_max(&text)) {
            least = if least == 0 { cpus } else { least.min(cpus) };
        }
        if !at.pop() {
            break;
        }
    }
    least
}

fn parse_cpu_max(text: &str) -> Option<u32> {
    let (quota, period) = text.trim().split_once(' ')?;
    let (quota, period): (u64, u64) = (quota.parse().ok()?, period.parse().ok()?);
    (period > 0).then(|| quota.div_ceil(period).clamp(1, 1 << 20) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_limits_are_rounded_up() {
        assert_eq!(parse_cpu_max("max 100000\n"), None);
        assert_eq!(parse_cpu_max("150000 100000\n"), Some(2));
        assert_eq!(parse_cpu_max("1000 100000"), Some(1));
        assert_eq!(parse_cpu_max("nonsense"), None);
    }

    #[test]
    fn this_process_has_a_cpu_and_an_identity() {
        assert!(allowed_cpus().iter().any(|word| *word != 0));
        assert_eq!(identity().matches('/').count(), 2, "{}", identity());
        assert!(identity().contains("/net:["), "two pods of one machine would pass for one host: {}", identity());
    }
}
