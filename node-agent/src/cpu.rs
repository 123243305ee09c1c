//! Processors: model, sockets, cores, simultaneous multithreading, caches, and which of them may be
//! used.

use crate::read::{self, Notes};
use crate::{Roots, cgroup};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use switchyard_crds::gpu_topology::{Cache, CacheKind, Cpus};
use switchyard_worker_contract::CpuList;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CpuInfo {
    /// Marketing name of the first processor.
    pub model: Option<String>,
    /// Vendor of the first processor.
    pub vendor: Option<String>,
    /// Number of `processor` entries.
    pub processors: u32,
}

/// Parses `/proc/cpuinfo` of x86 and, as far as possible, of ARM.
pub fn parse_cpuinfo(text: &str) -> CpuInfo {
    let mut info = CpuInfo::default();
    for line in text.lines() {
        let Some((key, value)) = line.split_once(':') else { continue };
        let value = value.trim();
        let keep = || (!value.is_empty()).then(|| value.to_owned());
        match key.trim() {
            "processor" => info.processors += 1,
            "model name" if info.model.is_none() => info.model = keep(),
            "vendor_id" if info.vendor.is_none() => info.vendor = keep(),
            _ => {}
        }
    }
    info
}

/// Parses a cache size in the format of sysfs (`48K`, `260M`, `512`): bytes.
pub fn parse_cache_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let (digits, unit) = match text.as_bytes().last()? {
        b'K' => (&text[..text.len() - 1], 1 << 10),
        b'M' => (&text[..text.len() - 1], 1 << 20),
        b'G' => (&text[..text.len() - 1], 1 << 30),
        _ => (text, 1),
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

/// The CPUs this thread may run on, from the `Cpus_allowed_list` line of a procfs `status` file.
pub fn parse_allowed(status: &str) -> Option<CpuList> {
    status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?.parse().ok()
}

/// Properties by which caches are grouped.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct CacheKey {
    level: u32,
    kind: CacheKind,
    size_bytes: Option<u64>,
}

pub(crate) fn read_cpus(roots: &Roots, notes: &mut Notes) -> Option<Cpus> {
    let directory = roots.sysfs.join("devices/system/cpu");
    let info = notes.text(&roots.procfs.join("cpuinfo")).map(|text| parse_cpuinfo(&text)).unwrap_or_default();
    let online = notes.parsed(&directory.join("online"), str::parse::<CpuList>);
    let mut cpus = Cpus {
        model: info.model.map(|model| read::clip(&model, 256)),
        vendor: info.vendor.map(|vendor| read::clip(&vendor, 64)),
        architecture: Some(architecture(&roots.procfs)),
        threads: online.as_ref().map(|list| list.len() as u32).or((info.processors > 0).then_some(info.processors)),
        online: online.as_ref().map(CpuList::to_string),
        usable: usable(&roots.procfs, online.as_ref(), notes).map(|list| list.to_string()),
        quota_millicores: cgroup::quota_millicores(&roots.sysfs, &roots.procfs),
        ..Cpus::default()
    };
    if let Some(online) = &online {
        read_cores(&directory, online, &mut cpus, notes);
        read_caches(&directory, online, &mut cpus, notes);
    }
    (cpus.threads.is_some() || cpus.model.is_some()).then_some(cpus)
}

/// `uname -m`. On Linux before 6.1, which lacks the file, falls back to the architecture of this
/// build.
fn architecture(procfs: &Path) -> String {
    read::text(&procfs.join("sys/kernel/arch")).map_or(std::env::consts::ARCH.to_owned(), |text| read::clip(&text, 32))
}

/// The mask that `sched_getaffinity` returns, read from procfs because that has no upper limit of
/// CPUs.
fn usable(procfs: &Path, online: Option<&CpuList>, notes: &mut Notes) -> Option<CpuList> {
    let path = procfs.join("thread-self/status");
    let path = if path.exists() { path } else { procfs.join("self/status") };
    let allowed = notes.parsed(&path, |text| parse_allowed(text).ok_or("no CPU list in a line Cpus_allowed_list"))?;
    Some(online.map_or_else(|| allowed.clone(), |online| allowed.intersection(online)))
}

fn read_cores(directory: &Path, online: &CpuList, cpus: &mut Cpus, notes: &mut Notes) {
    let (mut sockets, mut cores) = (BTreeSet::new(), BTreeSet::new());
    let (mut without_socket, mut without_core) = (Vec::new(), Vec::new());
    for cpu in online.iter() {
        let topology = directory.join(format!("cpu{cpu}/topology"));
        match read::number_in::<u32>(&topology.join("physical_package_id")) {
            Some(socket) => drop(sockets.insert(socket)),
            None => without_socket.push(cpu),
        }
        // Linux before 5.3 calls it `thread_siblings_list`.
        let siblings = ["core_cpus_list", "thread_siblings_list"]
            .iter()
            .find_map(|name| read::text(&topology.join(name)).ok()?.parse::<CpuList>().ok())
            .map(|list| list.intersection(online))
            .filter(|list| list.contains(cpu));
        match siblings {
            Some(list) => drop(cores.insert(list)),
            None => without_core.push(cpu),
        }
    }
    if without_socket.is_empty() {
        cpus.sockets = Some(sockets.len() as u32);
    } else {
        notes.add(format!("socket of CPU {} unknown", CpuList::new(without_socket)));
    }
    if without_core.is_empty() {
        cpus.cores = Some(cores.len() as u32);
        cpus.siblings = cores.iter().map(CpuList::to_string).collect();
    } else {
        notes.add(format!("core of CPU {} unknown", CpuList::new(without_core)));
    }
}

fn read_caches(directory: &Path, online: &CpuList, cpus: &mut Cpus, notes: &mut Notes) {
    // One cache per set of CPUs that share it.
    let mut caches: BTreeMap<CacheKey, BTreeSet<CpuList>> = BTreeMap::new();
    let mut unknown = Vec::new();
    for cpu in online.iter() {
        let Ok(entries) = read::entries(&directory.join(format!("cpu{cpu}/cache"))) else {
            unknown.push(cpu);
            continue;
        };
        for (_, cache) in entries.iter().filter(|(name, _)| name.starts_with("index")) {
            match read_cache(cache, online) {
                Some((key, shared_by)) => drop(caches.entry(key).or_default().insert(shared_by)),
                None => unknown.push(cpu),
            }
        }
    }
    if !unknown.is_empty() {
        notes.add(format!("caches of CPU {} unknown", CpuList::new(unknown)));
    }
    cpus.caches = caches
        .into_iter()
        .map(|(CacheKey { level, kind, size_bytes }, shared_by)| Cache {
            level,
            kind,
            size_bytes,
            shared_by: shared_by.iter().map(CpuList::to_string).collect(),
        })
        .collect();
}

fn read_cache(cache: &Path, online: &CpuList) -> Option<(CacheKey, CpuList)> {
    let kind = match read::text(&cache.join("type")).ok()?.as_str() {
        "Data" => CacheKind::Data,
        "Instruction" => CacheKind::Instruction,
        "Unified" => CacheKind::Unified,
        _ => return None,
    };
    let shared_by: CpuList = read::text(&cache.join("shared_cpu_list")).ok()?.parse().ok()?;
    let size = read::text(&cache.join("size")).ok().and_then(|text| parse_cache_size(&text));
    let size_bytes = size.filter(|size| *size > 0);
    let level = read::number_in(&cache.join("level"))?;
    Some((CacheKey { level, kind, size_bytes }, shared_by.intersection(online)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpuinfo_of_two_kinds() {
        let x86 =
            "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Xeon 8480+\n\nprocessor\t: 1\nmodel name\t: B\n";
        let info = parse_cpuinfo(x86);
        assert_eq!((info.model.as_deref(), info.vendor.as_deref()), (Some("Xeon 8480+"), Some("GenuineIntel")));
        assert_eq!(info.processors, 2);
        let arm = parse_cpuinfo("processor\t: 0\nBogoMIPS\t: 50.00\nCPU implementer\t: 0x41\n");
        assert_eq!(arm, CpuInfo { model: None, vendor: None, processors: 1 });
        assert_eq!(parse_cpuinfo("rubbish"), CpuInfo::default());
    }

    #[test]
    fn cache_sizes() {
        assert_eq!(parse_cache_size("48K\n"), Some(49_152));
        assert_eq!(parse_cache_size("260M"), Some(272_629_760));
        assert_eq!(parse_cache_size("512"), Some(512));
        assert_eq!(parse_cache_size("K"), None);
        assert_eq!(parse_cache_size(""), None);
        assert_eq!(parse_cache_size("99999999999999999999G"), None);
        assert_eq!(parse_cache_size("18446744073709551615K"), None);
    }

    #[test]
    fn affinity() {
        let status = "Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t0-3,8\nMems_allowed_list:\t0\n";
        assert_eq!(parse_allowed(status).map(|list| list.to_string()).as_deref(), Some("0-3,8"));
        assert_eq!(parse_allowed("Name:\tx\n"), None);
    }
}
