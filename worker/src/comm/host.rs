//! Properties of this host: identity, name, CPUs.

use std::fs;

/// Identity of this host. Ranks with equal identity can share memory: same boot of the same kernel,
/// same network namespace (abstract sockets are per namespace, and each pod has its own), same
/// user.
pub(super) fn identity() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let netns = fs::read_link("/proc/self/ns/net").map(|p| p.display().to_string());
    // If the namespace is unknown, no other rank counts as local.
    let netns = netns.unwrap_or_else(|_| format!("process {}", std::process::id()));
    let uid = rustix::process::getuid().as_raw();
    format!("{}/{netns}/{uid}", boot.trim())
}

/// Host name, for messages.
pub(super) fn name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// CPUs this process can run on, one bit each.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_a_cpu_and_an_identity() {
        assert!(allowed_cpus().iter().any(|word| *word != 0));
        assert_eq!(identity().matches('/').count(), 2, "{}", identity());
        assert!(identity().contains("/net:["), "two pods of one machine would pass for one host: {}", identity());
    }
}
