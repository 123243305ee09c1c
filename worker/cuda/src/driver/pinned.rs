//! Page-locked host memory with direct device access.

use super::{Context, Event, Span, Stream};
use crate::error::Error;
use crate::kernels::Memory;
use crate::library::Pointer;
use bytemuck::Pod;
use std::marker::PhantomData;
use std::ops::Range;

/// Elements in pinned host memory, for asynchronous copies. Accessing the elements waits for queued
/// copies.
pub struct Pinned<T> {
    context: Context,
    raw: Pointer,
    len: usize,
    /// Recorded after every copy; a copy in another stream waits for it.
    last: Event,
    numbers: PhantomData<T>,
}

// SAFETY: it owns its memory, and the driver accepts calls from any thread.
unsafe impl<T: Send> Send for Pinned<T> {}

impl Context {
    /// Allocates zeroed pinned host memory for `len` elements.
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
        // SAFETY: just allocated with this size.
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

    /// The elements, once all copies are done.
    ///
    /// # Errors
    /// The device's work failed.
    pub fn values(&self) -> Result<&[T], Error> {
        self.last.synchronize()?;
        // SAFETY: allocated with this size, page-aligned, any bytes are a valid `T`; the copies
        // that write it are done, and a new one needs a mutable reference.
        Ok(unsafe { std::slice::from_raw_parts(self.raw.cast(), self.len) })
    }

    /// Mutable access to the elements, once all copies are done.
    ///
    /// # Errors
    /// The device's work failed.
    pub fn values_mut(&mut self) -> Result<&mut [T], Error> {
        self.last.synchronize()?;
        // SAFETY: as above; copies that read it are done, and a new one needs a reference.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.raw.cast(), self.len) })
    }

    /// The address of a range, which must have as many bytes as the device memory it is copied from
    /// or to.
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
        // A failed copy is finished, too.
        let _ = self.last.synchronize();
        // SAFETY: allocated by `pinned`, freed once, and no pending copy uses it. An error could
        // not be handled here.
        let _ = self.context.call("cuMemFreeHost", |call| unsafe { (call.cuMemFreeHost)(self.raw) });
    }
}

impl Stream {
    /// Queues a copy of elements `range` to the device.
    ///
    /// # Errors
    /// The sizes differ, the buffer has been freed, or the call fails.
    pub fn upload<T: Pod>(&self, from: &Pinned<T>, range: Range<usize>, to: Span) -> Result<(), Error> {
        let host = from.place("upload", &range, to)?;
        self.uses("upload", [to].into_iter())?;
        self.wait(&from.last)?;
        // SAFETY: both have the same size, as just checked; the elements stay unchanged until the
        // event after the copy, see `Pinned`.
        self.context().call("cuMemcpyHtoDAsync", |call| unsafe {
            (call.cuMemcpyHtoDAsync_v2)(to.address, host, to.bytes(), self.raw())
        })?;
        self.record(&from.last)
    }

    /// Queues a copy from the device to elements `range`.
    ///
    /// # Errors
    /// The sizes differ, the buffer has been freed, or the call fails.
    pub fn download<T: Pod>(&self, from: Span, to: &mut Pinned<T>, range: Range<usize>) -> Result<(), Error> {
        let host = to.place("download", &range, from)?;
        self.uses("download", [from].into_iter())?;
        self.wait(&to.last)?;
        // SAFETY: both have the same size, as just checked; nothing reads the elements before the
        // event after the copy, see `Pinned`.
        self.context().call("cuMemcpyDtoHAsync", |call| unsafe {
            (call.cuMemcpyDtoHAsync_v2)(host, from.address, from.bytes(), self.raw())
        })?;
        self.record(&to.last)
    }
}
