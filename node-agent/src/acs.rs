//! Access Control Services (ACS) of PCIe bridges: whether they force peer-to-peer traffic up to the
//! root complex.

use crate::Roots;
use crate::read::{self, Notes};
use std::collections::BTreeSet;
use switchyard_crds::gpu_topology::{Acs, Gpu, Nic};

/// Extended capabilities follow the 256 bytes of standard configuration space.
const FIRST_CAPABILITY: usize = 0x100;
const ACS_CAPABILITY: u16 = 0x000d;
/// Offset of the control register in the capability.
const CONTROL: usize = 6;
/// Request redirect, completion redirect and upstream forwarding (PCIe base specification, ACS
/// control register).
const REDIRECT: u16 = 1 << 2 | 1 << 3 | 1 << 4;

/// The ACS control register in the configuration space of a bridge; `Ok(None)` if the bridge has
/// none.
///
/// # Errors
/// Only the part readable without privileges is available.
pub fn control(config: &[u8]) -> Result<Option<u16>, &'static str> {
    if config.len() <= FIRST_CAPABILITY {
        return Err("configuration space cut off: reading it needs CAP_SYS_ADMIN");
    }
    let word = |at: usize| config.get(at..at + 2).map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]));
    let mut at = FIRST_CAPABILITY;
    // Each capability has at least 4 bytes, so more iterations than this mean a cycle.
    for _ in 0..(config.len() - FIRST_CAPABILITY) / 4 {
        let (Some(id), Some(next)) = (word(at), word(at + 2)) else { return Ok(None) };
        if id == ACS_CAPABILITY {
            return Ok(word(at + CONTROL));
        }
        at = usize::from(next >> 4);
        if at < FIRST_CAPABILITY {
            break;
        }
    }
    Ok(None)
}

/// Bridges above GPUs and RDMA devices that share a root complex with a GPU or an RDMA device.
/// `None`, with a note, if one of them cannot be read.
pub(crate) fn read(roots: &Roots, gpus: &[Gpu], nics: &[Nic], notes: &mut Notes) -> Option<Acs> {
    let rdma = nics.iter().filter(|nic| nic.rdma_device.is_some()).map(|nic| &nic.pcie_path);
    let paths: Vec<&Vec<String>> = gpus.iter().map(|gpu| &gpu.pcie_path).chain(rdma).collect();
    let mut bridges = BTreeSet::new();
    for (at, path) in paths.iter().enumerate() {
        let has_peer = paths.iter().enumerate().any(|(other, peer)| other != at && peer.first() == path.first());
        if has_peer && path.len() > 2 {
            bridges.extend(&path[1..path.len() - 1]);
        }
    }
    let mut acs = Acs::default();
    for bridge in bridges {
        let path = roots.sysfs.join("bus/pci/devices").join(bridge).join("config");
        let found = read::bytes(&path).map_err(|error| error.to_string());
        match found.and_then(|config| control(&config).map_err(str::to_owned)) {
            Ok(Some(control)) if control & REDIRECT != 0 => acs.redirecting.push(bridge.clone()),
            Ok(_) => {}
            Err(error) => {
                notes.add(format!("ACS of {bridge} unknown: {error}"));
                return None;
            }
        }
    }
    acs.redirecting.truncate(256);
    Some(acs)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Configuration space with an advanced error capability, then ACS with this control register.
    fn space(value: u16) -> Vec<u8> {
        let mut config = vec![0; 4096];
        config[0x100..0x104].copy_from_slice(&[0x01, 0x00, 0x02, 0x15]);
        config[0x150..0x154].copy_from_slice(&[0x0d, 0x00, 0x01, 0x00]);
        config[0x156..0x158].copy_from_slice(&value.to_le_bytes());
        config
    }

    #[test]
    fn the_register_is_found_behind_other_capabilities() {
        assert_eq!(control(&space(0x1d)), Ok(Some(0x1d)));
        assert_eq!(control(&vec![0; 4096]), Ok(None));
        assert!(control(&space(0)[..64]).is_err_and(|error| error.contains("CAP_SYS_ADMIN")));
        let mut ring = space(0);
        ring[0x150..0x154].copy_from_slice(&[0x02, 0x00, 0x02, 0x10]);
        assert_eq!(control(&ring), Ok(None), "a capability whose next is an earlier one");
        assert_eq!(control(&space(0)[..0x152]), Ok(None));
    }
}
