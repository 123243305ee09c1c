//! Device memory.

use super::Context;
use crate::error::Error;
use crate::kernels;
use crate::library::Pointer;
use bytemuck::Pod;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Address and size of every live buffer. A [`Span`] does not keep its buffer alive, so each use of
/// a span is checked against this map.
#[derive(Default)]
pub(super) struct Live(Mutex<BTreeMap<u64, usize>>);

impl Live {
    fn insert(&self, address: u64, bytes: usize) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(address, bytes);
    }

    fn remove(&self, address: u64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&address);
    }

    /// Rejects memory whose buffer has been freed or belongs to another context.
    fn check(&self, call: &'static str, spans: impl Iterator<Item = Span>) -> Result<(), Error> {
        let live = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for Span { address, bytes } in spans {
            let holds = |(start, size): (&u64, &usize)| address + bytes as u64 <= start + *size as u64;
            if !live.range(..=address).next_back().is_some_and(holds) {
                return Err(Error::refused(call, format!("{bytes} bytes of a buffer that is gone")));
            }
        }
        Ok(())
    }

    /// The buffer that contains a span.
    fn containing_buffer(&self, span: &Span) -> Option<Span> {
        let live = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        live.range(..=span.address).next_back().map(|(address, bytes)| Span { address: *address, bytes: *bytes })
    }
}

/// A range of device memory. It does not keep its [`Buffer`] alive: operations on a span whose
/// buffer has been freed are rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    pub(super) address: u64,
    bytes: usize,
}

impl Span {
    /// A byte range of the span; `None` if out of bounds.
    pub fn part(self, range: Range<usize>) -> Option<Span> {
        let fits = range.start <= range.end && range.end <= self.bytes;
        fits.then(|| Span { address: self.address + range.start as u64, bytes: range.len() })
    }

    /// Its device address, for calls of other libraries.
    pub(crate) fn pointer(self) -> Pointer {
        std::ptr::with_exposed_provenance_mut(self.address as usize)
    }

    /// The largest power of two, up to 256, that divides its address.
    pub(crate) fn alignment(self) -> u32 {
        1 << self.address.trailing_zeros().min(8)
    }
}

impl kernels::Memory for Span {
    fn bytes(&self) -> usize {
        self.bytes
    }
}

/// A device allocation. Dropping it waits for the device before freeing.
pub struct Buffer {
    context: Context,
    span: Span,
}

impl Context {
    /// Allocates uninitialised device memory.
    ///
    /// # Errors
    /// There is not enough memory.
    pub fn allocate(&self, bytes: usize) -> Result<Buffer, Error> {
        let mut address = 0;
        // SAFETY: the pointer is to a live integer.
        self.call("cuMemAlloc", |call| unsafe { (call.cuMemAlloc_v2)(&raw mut address, bytes) })?;
        self.inner.live.insert(address, bytes);
        Ok(Buffer { context: self.clone(), span: Span { address, bytes } })
    }

    /// Allocates zeroed device memory.
    ///
    /// # Errors
    /// There is not enough memory.
    pub fn zeros(&self, bytes: usize) -> Result<Buffer, Error> {
        let (buffer, stream) = (self.allocate(bytes)?, self.default_stream());
        stream.fill(buffer.span, 0)?;
        stream.synchronize()?;
        Ok(buffer)
    }

    /// Allocates device memory with a copy of `values`.
    ///
    /// # Errors
    /// There is not enough memory.
    pub fn upload<T: Pod>(&self, values: &[T]) -> Result<Buffer, Error> {
        let buffer = self.allocate(size_of_val(values))?;
        buffer.write(0, values)?;
        Ok(buffer)
    }
}

/// Rejects spans of freed buffers.
pub(super) fn check_live(
    context: &Context,
    call: &'static str,
    spans: impl Iterator<Item = Span>,
) -> Result<(), Error> {
    context.inner.live.check(call, spans)
}

/// The buffers that contain the spans, without duplicates.
pub(super) fn containing_buffers(context: &Context, spans: &[Span]) -> Vec<Span> {
    let mut buffers: Vec<Span> = spans.iter().filter_map(|span| context.inner.live.containing_buffer(span)).collect();
    buffers.sort_unstable_by_key(|buffer| buffer.address);
    buffers.dedup();
    buffers
}

impl Buffer {
    pub fn bytes(&self) -> usize {
        self.span.bytes
    }

    /// The whole buffer.
    pub fn span(&self) -> Span {
        self.span
    }

    /// A byte range of the buffer; `None` if out of bounds.
    pub fn part(&self, range: Range<usize>) -> Option<Span> {
        self.span.part(range)
    }

    pub(crate) fn pointer(&self) -> Pointer {
        self.span.pointer()
    }

    fn within<T>(&self, call: &'static str, offset: usize, values: &[T]) -> Result<Span, Error> {
        let bytes = size_of_val(values);
        self.part(offset..offset.saturating_add(bytes)).ok_or_else(|| {
            Error::refused(call, format!("{bytes} bytes at byte {offset} of a buffer of {} bytes", self.bytes()))
        })
    }

    /// Waits for all work, then copies `values` to byte offset `offset` and waits for the copy.
    ///
    /// # Errors
    /// The range is out of bounds, or earlier work failed.
    pub fn write<T: Pod>(&self, offset: usize, values: &[T]) -> Result<(), Error> {
        let to = self.within("write", offset, values)?;
        self.context.synchronize()?;
        // SAFETY: both ranges have the same number of bytes, as just checked; when the call
        // returns, the source can be freed.
        self.context.call("cuMemcpyHtoD", |call| unsafe {
            (call.cuMemcpyHtoD_v2)(to.address, values.as_ptr().cast(), to.bytes)
        })?;
        // The call can return before the data are visible to streams.
        self.context.synchronize()
    }

    /// Waits for all work, then copies from byte offset `offset`.
    ///
    /// # Errors
    /// The range is out of bounds, or earlier work failed.
    pub fn read<T: Pod>(&self, offset: usize, values: &mut [T]) -> Result<(), Error> {
        let from = self.within("read", offset, values)?;
        self.context.synchronize()?;
        // SAFETY: both ranges have the same number of bytes, as just checked; any bytes are a valid
        // `T`.
        self.context.call("cuMemcpyDtoH", |call| unsafe {
            (call.cuMemcpyDtoH_v2)(values.as_mut_ptr().cast(), from.address, from.bytes)
        })
    }

    /// Waits for all work, then copies elements `range` to the host.
    ///
    /// # Errors
    /// The range is out of bounds, or earlier work failed.
    pub fn download<T: Pod>(&self, range: Range<usize>) -> Result<Vec<T>, Error> {
        let mut values = vec![T::zeroed(); range.len()];
        self.read(range.start.saturating_mul(size_of::<T>()), &mut values)?;
        Ok(values)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.context.inner.live.remove(self.span.address);
        // Failed work is finished, too.
        let _ = self.context.synchronize();
        // SAFETY: allocated by `allocate`, freed once, and no pending work uses it. An error could
        // not be handled here.
        let _ = self.context.call("cuMemFree", |call| unsafe { (call.cuMemFree_v2)(self.span.address) });
    }
}
