//! Errors as events.

use crate::memory::{Code, INVALID_ARGUMENT, Out, SUCCESS, TIMEOUT};
use crate::session::{Handle, with, with_gpu};
use std::collections::BTreeSet;
use std::ffi::{c_uint, c_ulonglong};
use std::time::{Duration, Instant};

/// `nvmlEventTypeXidCriticalError`.
const XID: c_ulonglong = 8;
/// How often the file of failures is read.
const PAUSE: Duration = Duration::from_millis(5);

/// Who waits for what.
#[derive(Debug, Default)]
pub(crate) struct EventSet {
    gpus: BTreeSet<u32>,
    /// Errors that are past.
    seen: usize,
}

/// `nvmlEventData_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct EventData {
    device: Handle,
    kind: c_ulonglong,
    data: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetCreate(to: Out<usize>) -> Code {
    to.put(with(|session| {
        let id = session.event_sets.keys().next_back().map_or(1, |last| last + 1);
        session.event_sets.insert(id, EventSet { seen: session.failures.xids.len(), ..EventSet::default() });
        Ok(id)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetFree(set: usize) -> Code {
    with(|session| session.event_sets.remove(&set).map(drop).ok_or(INVALID_ARGUMENT)).err().unwrap_or(SUCCESS)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetSupportedEventTypes(device: Handle, to: Out<c_ulonglong>) -> Code {
    to.put(with_gpu(device, |_, _| Ok(XID)))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceRegisterEvents(device: Handle, _kinds: c_ulonglong, set: usize) -> Code {
    let answer = with(|session| {
        let gpu = session.gpu(device)?.index;
        session.event_sets.get_mut(&set).ok_or(INVALID_ARGUMENT)?.gpus.insert(gpu);
        Ok(())
    });
    answer.err().unwrap_or(SUCCESS)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetWait_v2(set: usize, to: Out<EventData>, milliseconds: c_uint) -> Code {
    let end = Instant::now() + Duration::from_millis(milliseconds.into());
    loop {
        // Other calls go on meanwhile.
        match next(set) {
            Ok(None) if Instant::now() < end => std::thread::sleep(PAUSE),
            Ok(None) => return TIMEOUT,
            Ok(Some(event)) => return to.put(Ok(event)),
            Err(code) => return code,
        }
    }
}

fn next(set: usize) -> Result<Option<EventData>, Code> {
    with(|session| {
        let waiting = session.event_sets.get_mut(&set).ok_or(INVALID_ARGUMENT)?;
        while let Some(xid) = session.failures.xids.get(waiting.seen) {
            waiting.seen += 1;
            if waiting.gpus.contains(&xid.gpu) {
                let (gpu_instance, compute_instance) = (c_uint::MAX, c_uint::MAX);
                return Ok(Some(EventData {
                    device: Handle::of(xid.gpu),
                    kind: XID,
                    data: xid.xid,
                    gpu_instance,
                    compute_instance,
                }));
            }
        }
        Ok(None)
    })
}
