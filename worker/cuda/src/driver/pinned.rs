//! Memory of the host that the device reads and writes by itself.

use super::{Context, Event, Span, Stream};
use crate::error::Error;
use crate::kernels::Memory;
use crate::library::Pointer;
use bytemuck::Pod;
use std::marker::PhantomData;
use std::ops::Range;

/// Numbers in pinned memory of the host, which copies of a stream use while the host goes on. Whoever looks at them waits for the copies
/// that are queued.
pub struct Pinned<T> {
    context: Context,
    raw: Pointer,
    len: usize,
    /// Recorded behind every copy; a copy of another stream waits for it.
    last: Event,
    numbers: PhantomData<T>,
}

// SAFETY: it owns its memory, and the driver takes calls of any thread.
unsafe impl<T: Send> Send for Pinned<T> {}

impl Context {
    /// Allocates pinned memory of the host for `len` numbers, which are zero.
    ///
    /// # Errors
    /// There is not enough memory.
    pub fn pinned<T: Pod>(&self, len: usize) -> Result<Pinned<T>, Error> {
        let bytes = len
            .checked_mul(size_of::<T>())
            .ok_or_else(|| Error::refused("pinned", format!("{len} numbers of {} bytes each", size_of::<T>())))?;
        let last = self.event()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer is to a live pointer; no flags.
        self.call("cuMemHostAlloc", |call| unsafe { (call.cuMemHostAlloc)(&raw mut raw, bytes, 0) })?;
        // SAFETY: just allocated, with as many bytes.
        unsafe { raw.cast::<u8>().write_bytes(0, bytes) };
        Ok(Pinned { context: self.clone(), raw, len, last, numbers: PhantomData })
    }
}

impl<T: Pod> Pinned<T> {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether no copy is queued.
    ///
    /// # Errors
    /// The device's work failed.
    pub fn is_idle(&self) -> Result<bool, Error> {
        self.last.is_done()
    }

    /// The numbers, once all copies are done.
    ///
    /// # Errors
    /// The device's work failed.
    pub fn values(&self) -> Result<&[T], Error> {
        self.last.synchronize()?;
        // SAFETY: allocated with this size, page-aligned, any bytes are a `T`; the copies that write it are done, and a new one needs
        // a mutable reference.
        Ok(unsafe { std::slice::from_raw_parts(self.raw.cast(), self.len) })
    }

    /// The numbers to change, once all copies are done.
    ///
    /// # Errors
    /// The device's work failed.
    pub fn values_mut(&mut self) -> Result<&mut [T], Error> {
        self.last.synchronize()?;
        // SAFETY: as above; a copy that reads it is done, and a new one needs a reference.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.raw.cast(), self.len) })
    }

    /// Where the numbers of a range are, which must have as many bytes as the memory of the device that they are copied from or to.
    fn place(&self, call: &'static str, range: &Range<usize>, device: Span) -> Result<Pointer, Error> {
        let fits = range.start <= range.end && range.end <= self.len;
        if !fits || range.len() * size_of::<T>() != device.bytes() {
            let text = format!(
                "numbers {range:?} of {}, {} bytes each, and {} bytes of the device",
                self.len,
                size_of::<T>(),
                device.bytes()
            );
            return Err(Error::refused(call, text));
        }
        Ok(self.raw.wrapping_byte_add(range.start * size_of::<T>()))
    }
}

impl<T> Drop for Pinned<T> {
    fn drop(&mut self) {
        // Also a copy that failed is over.
        let _ = self.last.synchronize();
        // SAFETY: allocated by `pinned`, freed once, and no copy uses it. The result could not be used.
        let _ = self.context.call("cuMemFreeHost", |call| unsafe { (call.cuMemFreeHost)(self.raw) });
    }
}

impl Stream {
    /// Queues a copy of `range` of the numbers to the device.
    ///
    /// # Errors
    /// The sizes differ, the buffer is gone, or the call fails.
    pub fn upload<T: Pod>(&self, from: &Pinned<T>, range: Range<usize>, to: Span) -> Result<(), Error> {
        let host = from.place("upload", &range, to)?;
        self.uses("upload", [to].into_iter())?;
        self.wait(&from.last)?;
        // SAFETY: both have as many bytes, as just checked; the numbers stay, unchanged, until the event behind the copy, see `Pinned`.
        self.context().call("cuMemcpyHtoDAsync", |call| unsafe {
            (call.cuMemcpyHtoDAsync_v2)(to.address, host, to.bytes(), self.raw())
        })?;
        self.record(&from.last)
    }

    /// Queues a copy from the device to `range` of the numbers.
    ///
    /// # Errors
    /// The sizes differ, the buffer is gone, or the call fails.
    pub fn download<T: Pod>(&self, from: Span, to: &mut Pinned<T>, range: Range<usize>) -> Result<(), Error> {
        let host = to.place("download", &range, from)?;
        self.uses("download", [from].into_iter())?;
        self.wait(&to.last)?;
        // SAFETY: both have as many bytes, as just checked; nobody looks at the numbers until the event behind the copy, see `Pinned`.
        self.context().call("cuMemcpyDtoHAsync", |call| unsafe {
            (call.cuMemcpyDtoHAsync_v2)(host, from.address, from.bytes(), self.raw())
        })?;
        self.record(&to.last)
    }
}
