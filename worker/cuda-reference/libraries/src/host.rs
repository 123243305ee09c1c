//! Access to host memory by address.

use std::ops::Range;

/// Fill for the target of a pending copy, so that reading it early is noticeable.
const POISON: u8 = 0xff;

/// Copies host memory.
///
/// # Safety
/// All of the range must be readable, which the driver's caller ensures.
pub(crate) unsafe fn read(range: &Range<u64>) -> Vec<u8> {
    let from = std::ptr::with_exposed_provenance::<u8>(range.start as usize);
    // SAFETY: upheld by the caller.
    unsafe { std::slice::from_raw_parts(from, (range.end - range.start) as usize) }.to_vec()
}

/// # Safety
/// `bytes.len()` bytes at `address` must be writable.
pub(crate) unsafe fn write(address: u64, bytes: &[u8]) {
    let to = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
    // SAFETY: upheld by the caller; `bytes` does not overlap.
    unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
}

/// Host memory that a queued copy uses.
#[derive(Debug, Clone)]
pub(crate) struct HostRange {
    pub(crate) range: Range<u64>,
    /// Content when the copy was queued, unless an earlier copy from the device writes there.
    pub(crate) seen: Option<Vec<u8>>,
}

impl HostRange {
    /// # Safety
    /// All of the range must be readable.
    pub(crate) unsafe fn source(range: Range<u64>) -> HostRange {
        // SAFETY: upheld by the caller.
        let seen = Some(unsafe { read(&range) });
        HostRange { range, seen }
    }

    /// The target of a copy. Poisons it unless another queued copy uses it.
    ///
    /// # Safety
    /// All of the range must be readable and writable.
    pub(crate) unsafe fn target(range: Range<u64>, is_used: bool) -> HostRange {
        if !is_used {
            // SAFETY: upheld by the caller.
            unsafe { write(range.start, &vec![POISON; (range.end - range.start) as usize]) };
        }
        // SAFETY: upheld by the caller.
        unsafe { HostRange::source(range) }
    }

    /// The current content, and the first byte that the host has changed.
    ///
    /// # Safety
    /// All of the range must still be readable.
    pub(crate) unsafe fn now(&self) -> (Vec<u8>, Option<usize>) {
        // SAFETY: upheld by the caller.
        let now = unsafe { read(&self.range) };
        let changed = self.seen.as_ref().and_then(|seen| seen.iter().zip(&now).position(|(seen, now)| seen != now));
        (now, changed)
    }
}
