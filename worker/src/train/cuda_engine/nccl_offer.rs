//! Decides whether the ranks of a group use NCCL: either all do, or none.

use crate::comm::Group;
use crate::process::variable;
use crate::train::TrainError;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use switchyard_cuda::Error;
use switchyard_cuda::driver::Context;
use switchyard_cuda::find::{NCCL, Places};
use switchyard_cuda::nccl::{Nccl, version_text};

/// Overrides the host name in NCCL.
const HOST_ID: &str = "NCCL_HOSTID";
/// Maximum characters of a reason sent to all ranks.
const MAX_REASON: usize = 512;

/// What a rank offers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Offer {
    /// Its NCCL version, or why it has none.
    version: Result<i32, String>,
    host: String,
    /// Bus address of its GPU.
    gpu: String,
}

/// What all ranks agreed on.
pub(super) struct NcclGroup {
    pub nccl: Nccl,
    pub version: String,
    /// Number of hosts.
    pub hosts: usize,
}

/// Collects the offers of all ranks. Collective. The inner error is the reason for not using NCCL.
///
/// # Errors
/// The group failed.
pub(super) fn agree(context: &Context, group: &mut Group) -> Result<Result<NcclGroup, String>, TrainError> {
    let own = find();
    let offer = Offer {
        version: own.as_ref().map(|(_, version)| *version).map_err(|text| text.chars().take(MAX_REASON).collect()),
        host: variable(HOST_ID).unwrap_or_else(|| group.host().to_owned()),
        gpu: context.device().bus.clone(),
    };
    let gathered = group.all_gather("NCCL", &serde_json::to_vec(&offer).unwrap_or_default())?;
    let offers: Result<Vec<Offer>, _> = gathered.iter().map(|bytes| serde_json::from_slice(bytes)).collect();
    let offers = offers.map_err(|error| TrainError::Nccl(format!("malformed offer from another rank: {error}")))?;
    Ok(choose(&offers).and_then(|(version, hosts)| {
        let (nccl, _) = own?;
        Ok(NcclGroup { nccl, version: version_text(version), hosts })
    }))
}

/// The library and its version.
fn find() -> Result<(Nccl, i32), String> {
    let open = || -> Result<_, Error> {
        let found = Places::new(|name| std::env::var_os(name), Path::new("/"), None).open(&NCCL)?;
        let nccl = Nccl::new(&found.library)?;
        let version = nccl.version()?;
        Ok((nccl, version))
    };
    open().map_err(|error| error.to_string())
}

/// Returns the version and the number of hosts if all ranks can take part, else the obstacle.
fn choose(offers: &[Offer]) -> Result<(i32, usize), String> {
    let mut common: Option<i32> = None;
    let mut gpus: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for (rank, Offer { version, host, gpu }) in offers.iter().enumerate() {
        let version = *version.as_ref().map_err(|text| format!("rank {rank}: {text}"))?;
        let first = *common.get_or_insert(version);
        if first != version {
            let [first, version] = [first, version].map(version_text);
            return Err(format!("rank 0 has version {first}, rank {rank} {version}; expected the same on all ranks"));
        }
        if let Some(other) = gpus.insert((host, gpu), rank) {
            return Err(format!("ranks {other} and {rank} share GPU {gpu} of {host}; expected one for each rank"));
        }
    }
    let hosts = gpus.keys().map(|(host, _)| *host).collect::<std::collections::BTreeSet<_>>().len();
    common.map(|version| (version, hosts)).ok_or_else(|| "no rank".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(version: i32, host: &str, gpu: &str) -> Offer {
        Offer { version: Ok(version), host: host.to_owned(), gpu: gpu.to_owned() }
    }

    #[test]
    fn ranks_with_separate_gpus_and_the_same_version_use_nccl() {
        let offers = [offer(22_809, "a", "0"), offer(22_809, "a", "1"), offer(22_809, "b", "0")];
        assert_eq!(choose(&offers), Ok((22_809, 2)));
    }

    #[test]
    fn obstacles_name_the_rank() {
        let missing = Offer { version: Err("NCCL is not on this machine".to_owned()), ..offer(0, "a", "1") };
        for (other, words) in [
            (missing, "rank 1: NCCL is not on this machine"),
            (offer(22_703, "a", "1"), "rank 0 has version 2.28.9, rank 1 2.27.3; expected the same on all ranks"),
            (offer(22_809, "a", "0"), "ranks 0 and 1 share GPU 0 of a; expected one for each rank"),
        ] {
            assert_eq!(choose(&[offer(22_809, "a", "0"), other]), Err(words.to_owned()));
        }
    }
}
