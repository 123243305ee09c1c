//! GPU events: critical errors (XID), GPUs that are lost or require a reset.

use crate::nvml::{Session, reason};
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::{Bits, NvmlError};
use nvml_wrapper::{Device, Nvml};
use std::path::Path;

/// `nvmlEventTypeGpuUnavailableError` and `nvmlEventTypeGpuRecoveryAction`, for which the wrapper
/// has no names.
const UNNAMED: u64 = 0x4000 | 0x8000;
/// Longest wait in one call, and therefore the longest delay before the thread can return.
const WAIT_MILLISECONDS: u32 = 30_000;

/// Waits for events of all GPUs and calls `on_event`, with the XID if the event is one. Returns the
/// reason if waiting is not or no longer possible: no NVML, no GPU that sends events, or the driver
/// disappeared.
///
/// NVML stays initialised meanwhile, so the driver's module cannot be unloaded.
pub fn watch(library: Option<&Path>, mut on_event: impl FnMut(Option<u64>)) -> String {
    let waited = Session::open(library).and_then(|session| match session.nvml() {
        Some(nvml) => wait(nvml, &mut on_event),
        None => Ok(()),
    });
    waited.map_or_else(|error| reason(&error), |()| "no GPU sends events".to_owned())
}

/// Returns `Ok` if there is nothing to wait for.
fn wait(nvml: &Nvml, on_event: &mut impl FnMut(Option<u64>)) -> Result<(), NvmlError> {
    let mut set = nvml.create_event_set()?;
    let mut registered = 0;
    for index in 0..nvml.device_count()? {
        // A lost GPU sends nothing; keep waiting for the others.
        let Ok(device) = nvml.device_by_index(index) else { continue };
        let events = wanted(&device);
        if !events.is_empty() {
            set = device.register_events(events, set).map_err(|error| error.error)?;
            registered += 1;
        }
    }
    if registered == 0 {
        return Ok(());
    }
    loop {
        match set.wait(WAIT_MILLISECONDS) {
            Ok(event) => on_event(event.event_data.and_then(xid)),
            Err(NvmlError::Timeout) => {}
            Err(error) => return Err(error),
        }
    }
}

/// The XID; `None` if the driver does not know it.
fn xid(error: XidError) -> Option<u64> {
    match error {
        XidError::Value(number) => Some(number),
        XidError::Unknown => None,
    }
}

/// The events that we want and the GPU supports.
fn wanted(device: &Device<'_>) -> EventTypes {
    let supported = match device.supported_event_types_strict() {
        Ok(events) => events,
        // The GPU supports events that the wrapper does not know; the error contains all of them.
        Err(NvmlError::IncorrectBits(Bits::U64(bits))) => EventTypes::from_bits_retain(bits),
        Err(_) => EventTypes::empty(),
    };
    supported & (EventTypes::CRITICAL_XID_ERROR | EventTypes::from_bits_retain(UNNAMED))
}
