//! One GPU by itself.

use crate::memory::{Answer, Code, INVALID_ARGUMENT, NOT_SUPPORTED, Out, SUCCESS, VERSION_MISMATCH, characters};
use crate::session::{Handle, INSTANCES_PER_GPU, with, with_gpu};
use nvml_wrapper_sys::bindings::{nvmlGpuFabricInfo_v3_t, nvmlMemory_v2_t, nvmlPciInfo_t};
use std::ffi::{c_char, c_uint, c_ulong};
use switchyard_scenes::FabricFailure;

/// Sizes of the versions of `nvmlGpuFabricInfo_t`, with the number of the version above.
const FABRIC_VERSIONS: [(c_uint, u32); 2] = [(36 | 2 << 24, 2), (40 | 3 << 24, 3)];

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetUUID(device: Handle, to: Out<c_char>, room: c_uint) -> Code {
    to.text(
        room,
        with(|session| {
            if let Some((gpu, number, _)) = session.instance(device) {
                return Ok(format!("MIG-{}-{number}", gpu.uuid.trim_start_matches("GPU-")));
            }
            session.gpu(device).map(|gpu| gpu.uuid.clone())
        }),
    )
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetName(device: Handle, to: Out<c_char>, room: c_uint) -> Code {
    to.text(
        room,
        with(|session| {
            if let Some((gpu, _, profile)) = session.instance(device) {
                return Ok(format!("{} MIG {profile}", gpu.kind.model));
            }
            session.gpu(device).map(|gpu| gpu.kind.model.clone())
        }),
    )
}

/// The address of a device in the driver's form.
pub(crate) fn pci_info(path: &[String]) -> Option<nvmlPciInfo_t> {
    let mut parts = path.last()?.split([':', '.']).map(|part| u32::from_str_radix(part, 16).ok());
    let mut next = || parts.next().flatten();
    let (domain, bus, slot, function) = (next()?, next()?, next()?, next()?);
    let mut info = nvmlPciInfo_t {
        busIdLegacy: [0; 16],
        domain,
        bus,
        device: slot,
        pciDeviceId: 0,
        pciSubSystemId: 0,
        busId: [0; 32],
    };
    let text = characters(&format!("{domain:08X}:{bus:02X}:{slot:02X}.{function:X}"));
    info.busId[..text.len()].copy_from_slice(&text);
    Some(info)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetPciInfo_v3(device: Handle, to: Out<nvmlPciInfo_t>) -> Code {
    to.put(with_gpu(device, |_, gpu| pci_info(&gpu.path).ok_or(NOT_SUPPORTED)))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: Handle, to: Out<nvmlMemory_v2_t>) -> Code {
    to.put(with_gpu(device, |_, gpu| {
        let total = gpu.kind.gib << 30;
        Ok(nvmlMemory_v2_t { version: 0, total, reserved: 0, free: total, used: 0 })
    }))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMigMode(device: Handle, now: Out<c_uint>, later: Out<c_uint>) -> Code {
    let mode = with_gpu(device, |session, gpu| Ok(c_uint::from(session.machine.scene.mig.contains_key(&gpu.index))));
    later.put(mode).max(now.put(mode))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMaxMigDeviceCount(device: Handle, to: Out<c_uint>) -> Code {
    to.put(with_gpu(device, |_, _| Ok(INSTANCES_PER_GPU)))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMaxPcieLinkGeneration(device: Handle, to: Out<c_uint>) -> Code {
    to.put(with_gpu(device, |_, gpu| Ok(gpu.kind.pcie[0])))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCurrPcieLinkGeneration(device: Handle, to: Out<c_uint>) -> Code {
    to.put(with_gpu(device, |_, gpu| Ok(gpu.kind.idle_generation.unwrap_or(gpu.kind.pcie[0]))))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMaxPcieLinkWidth(device: Handle, to: Out<c_uint>) -> Code {
    to.put(with_gpu(device, |_, gpu| Ok(gpu.kind.pcie[1])))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCurrPcieLinkWidth(device: Handle, to: Out<c_uint>) -> Code {
    to.put(with_gpu(device, |session, gpu| {
        Ok(*session.failures.gpu_width.get(&gpu.index).unwrap_or(&gpu.kind.pcie[1]))
    }))
}

/// `P8` for a GPU that saves power, else `P0`.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetPerformanceState(device: Handle, to: Out<c_uint>) -> Code {
    to.put(with_gpu(device, |_, gpu| Ok(if gpu.kind.idle_generation.is_some() { 8 } else { 0 })))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetEccMode(device: Handle, now: Out<c_uint>, later: Out<c_uint>) -> Code {
    let mode = with_gpu(device, |_, _| Ok(1));
    later.put(mode).max(now.put(mode))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetRemappedRows(
    device: Handle,
    correctable: Out<c_uint>,
    uncorrectable: Out<c_uint>,
    pending: Out<c_uint>,
    failed: Out<c_uint>,
) -> Code {
    let find = |list: fn(&switchyard_scenes::Failures) -> &Vec<u32>| {
        with_gpu(device, |session, gpu| Ok(c_uint::from(list(&session.failures).contains(&gpu.index))))
    };
    let none: Answer<c_uint> = Ok(0);
    correctable.put(none);
    uncorrectable.put(none);
    failed.put(find(|failures| &failures.rows_failed)).max(pending.put(find(|failures| &failures.rows_pending)))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMemoryAffinity(device: Handle, words: c_uint, to: Out<c_ulong>, _scope: c_uint) -> Code {
    to.put_all(with_gpu(device, |session, gpu| {
        let mut set = vec![0; words as usize];
        let known = gpu.affinity.filter(|_| !session.failures.numa_unknown.contains(&gpu.index));
        // Who does not know says all of them.
        for node in session.machine.nodes.keys().filter(|node| known.is_none_or(|known| known == **node)) {
            *set.get_mut(*node as usize / 64).ok_or(INVALID_ARGUMENT)? |= 1 << (node % 64);
        }
        Ok(set)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNumaNodeId(device: Handle, to: Out<c_uint>) -> Code {
    to.put(with_gpu(device, |_, gpu| gpu.memory_node.ok_or(NOT_SUPPORTED)))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGpuFabricInfoV(device: Handle, info: Out<nvmlGpuFabricInfo_v3_t>) -> Code {
    let found = with_gpu(device, |session, gpu| {
        let failure = session.failures.fabric.get(&gpu.index).cloned().unwrap_or_default();
        let Some(fabric) = &session.machine.scene.fabric else { return Ok(None) };
        let mut cluster = [0; 16];
        for (position, byte) in cluster.iter_mut().enumerate() {
            let digits = fabric.cluster.get(2 * position..2 * position + 2);
            *byte = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()).ok_or(INVALID_ARGUMENT)?;
        }
        Ok(Some((fabric.clone(), cluster, failure)))
    });
    info.update(|info| {
        let Some((_, version)) = FABRIC_VERSIONS.into_iter().find(|(size, _)| *size == info.version) else {
            return VERSION_MISMATCH;
        };
        match found {
            Err(code) => return code,
            Ok(None) => info.state = 0,
            Ok(Some((fabric, cluster, FabricFailure { state, clique, mask, summary }))) => {
                info.state = state.unwrap_or(3);
                info.status = 0;
                info.clusterUuid = cluster;
                info.cliqueId = clique.unwrap_or(fabric.clique);
                info.healthMask = mask.unwrap_or(fabric.mask);
                // Behind the end of version 2.
                if version == 3 {
                    info.healthSummary = summary.unwrap_or(fabric.summary);
                }
            }
        }
        SUCCESS
    })
}
