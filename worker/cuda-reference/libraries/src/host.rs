//! Memory of the host, by the addresses that programs give.

use std::ops::Range;

/// What a program must not see: it reads the result of a copy that has not run.
const POISON: u8 = 0xff;

/// A copy of memory of the host.
///
/// # Safety
/// All of the range is readable, which is for the caller of the driver to know.
pub(crate) unsafe fn read(range: &Range<u64>) -> Vec<u8> {
    let from = std::ptr::with_exposed_provenance::<u8>(range.start as usize);
    // SAFETY: as the caller promises.
    unsafe { std::slice::from_raw_parts(from, (range.end - range.start) as usize) }.to_vec()
}

/// # Safety
/// As many bytes are writable from `address` on.
pub(crate) unsafe fn write(address: u64, bytes: &[u8]) {
    let to = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
    // SAFETY: as the caller promises; `bytes` is ours.
    unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
}

/// Memory of the host that a queued copy uses.
#[derive(Debug, Clone)]
pub(crate) struct Queued {
    pub(crate) range: Range<u64>,
    /// What was there when the copy was queued, unless another copy of the device writes there before.
    pub(crate) seen: Option<Vec<u8>>,
}

impl Queued {
    /// # Safety
    /// All of the range is readable.
    pub(crate) unsafe fn source(range: Range<u64>) -> Queued {
        // SAFETY: as the caller promises.
        let seen = Some(unsafe { read(&range) });
        Queued { range, seen }
    }

    /// The target of a copy. If nobody else uses it meanwhile it holds what looks like no result.
    ///
    /// # Safety
    /// All of the range is readable and writable.
    pub(crate) unsafe fn target(range: Range<u64>, is_used: bool) -> Queued {
        if !is_used {
            // SAFETY: as the caller promises.
            unsafe { write(range.start, &vec![POISON; (range.end - range.start) as usize]) };
        }
        // SAFETY: as the caller promises.
        unsafe { Queued::source(range) }
    }

    /// What is there now, and the first byte that the host has changed.
    ///
    /// # Safety
    /// All of the range is still readable.
    pub(crate) unsafe fn now(&self) -> (Vec<u8>, Option<usize>) {
        // SAFETY: as the caller promises.
        let now = unsafe { read(&self.range) };
        let changed = self.seen.as_ref().and_then(|seen| seen.iter().zip(&now).position(|(seen, now)| seen != now));
        (now, changed)
    }
}
