//! Streams, and events that order them.

use super::graph::Uses;
use super::{Context, Functions, Object, Span};
use crate::error::Error;
use crate::kernels::Memory;
use crate::library::Pointer;
use std::sync::{Arc, Mutex};

pub(super) const NON_BLOCKING: u32 = 1;
pub(super) const DISABLE_TIMING: u32 = 2;
pub(super) const NOT_READY: i32 = 600;
/// `CU_EVENT_RECORD_EXTERNAL`: streams outside a graph can wait for the event.
pub(super) const EXTERNAL: u32 = 1;

/// A queue: its operations run in order, concurrently with other streams.
pub struct Stream {
    context: Context,
    /// `None` for the default stream.
    object: Option<Object>,
    /// During a capture: what the graph uses.
    pub(super) captured: Mutex<Option<Uses>>,
}

/// A point in a stream that others can wait for. An event that was never recorded counts as done.
/// Clones are the same event.
#[derive(Clone)]
pub struct Event(Arc<Object>);

/// Lines of `bytes` bytes with a pitch of `pitch` bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lines {
    pub span: Span,
    pub pitch: usize,
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Copy2D {
    pub(super) from: Side2D,
    pub(super) to: Side2D,
    pub(super) width_bytes: usize,
    pub(super) height: usize,
}

#[repr(C)]
#[derive(Debug)]
pub(super) struct Side2D {
    pub(super) x_bytes: usize,
    pub(super) y: usize,
    pub(super) kind: u32,
    pub(super) host: Pointer,
    pub(super) device: u64,
    pub(super) array: Pointer,
    pub(super) pitch: usize,
}

/// `CU_MEMORYTYPE_DEVICE`.
pub(super) const DEVICE_MEMORY: u32 = 2;

impl Side2D {
    fn new(Lines { span, pitch }: Lines) -> Side2D {
        let nothing = std::ptr::null_mut();
        Side2D { x_bytes: 0, y: 0, kind: DEVICE_MEMORY, host: nothing, device: span.address, array: nothing, pitch }
    }
}

impl Context {
    /// Creates a stream that is not ordered with others, including the default stream.
    ///
    /// # Errors
    /// The call fails.
    pub fn stream(&self) -> Result<Stream, Error> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer is to a live handle.
        self.call("cuStreamCreate", |call| unsafe { (call.cuStreamCreate)(&raw mut raw, NON_BLOCKING) })?;
        let object = Object { context: self.clone(), raw, destroy: self.inner.driver.functions.cuStreamDestroy_v2 };
        Ok(Stream { context: self.clone(), object: Some(object), captured: Mutex::default() })
    }

    /// The stream that libraries use by default.
    pub fn default_stream(&self) -> Stream {
        Stream { context: self.clone(), object: None, captured: Mutex::default() }
    }

    /// An event without timing.
    ///
    /// # Errors
    /// The call fails.
    pub fn event(&self) -> Result<Event, Error> {
        self.event_with(DISABLE_TIMING)
    }

    /// An event with timing.
    ///
    /// # Errors
    /// The call fails.
    pub fn timed_event(&self) -> Result<Event, Error> {
        self.event_with(0)
    }

    fn event_with(&self, flags: u32) -> Result<Event, Error> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer is to a live handle.
        self.call("cuEventCreate", |call| unsafe { (call.cuEventCreate)(&raw mut raw, flags) })?;
        let object = Object { context: self.clone(), raw, destroy: self.inner.driver.functions.cuEventDestroy_v2 };
        Ok(Event(Arc::new(object)))
    }
}

impl Stream {
    pub fn context(&self) -> &Context {
        &self.context
    }

    pub(crate) fn raw(&self) -> Pointer {
        self.object.as_ref().map_or(std::ptr::null_mut(), |object| object.raw)
    }

    /// Waits for all its operations.
    ///
    /// # Errors
    /// An operation failed.
    pub fn synchronize(&self) -> Result<(), Error> {
        // SAFETY: the stream is alive.
        self.context.call_and_wait("cuStreamSynchronize", |call| unsafe { (call.cuStreamSynchronize)(self.raw()) })
    }

    /// Records the event after all operations now in the stream. In a captured graph, it is
    /// recorded at this position on every launch.
    ///
    /// # Errors
    /// The call fails.
    pub fn record(&self, event: &Event) -> Result<(), Error> {
        let raw = event.0.raw;
        if self.record_object(&event.0) {
            // SAFETY: both are alive.
            let record = |call: &Functions| unsafe { (call.cuEventRecordWithFlags)(raw, self.raw(), EXTERNAL) };
            return self.context.call("cuEventRecordWithFlags", record);
        }
        // SAFETY: both are alive.
        self.context.call("cuEventRecord", |call| unsafe { (call.cuEventRecord)(raw, self.raw()) })
    }

    /// Makes later operations in this stream wait for the event's last recording.
    ///
    /// # Errors
    /// The call fails.
    pub fn wait(&self, event: &Event) -> Result<(), Error> {
        self.reject_in_capture("wait")?;
        // SAFETY: both are alive; no flags.
        self.context.call("cuStreamWaitEvent", |call| unsafe { (call.cuStreamWaitEvent)(self.raw(), event.0.raw, 0) })
    }

    /// Queues a fill with a byte value.
    ///
    /// # Errors
    /// The buffer has been freed, or the call fails.
    pub fn fill(&self, to: Span, byte: u8) -> Result<(), Error> {
        self.uses("fill", [to].into_iter())?;
        // SAFETY: the range is within a live buffer, as just checked; freeing it waits for the
        // operation.
        self.context
            .call("cuMemsetD8Async", |call| unsafe { (call.cuMemsetD8Async)(to.address, byte, to.bytes(), self.raw()) })
    }

    /// Queues a copy between equally large, disjoint device ranges.
    ///
    /// # Errors
    /// The sizes differ, a buffer has been freed, or the call fails.
    pub fn copy(&self, from: Span, to: Span) -> Result<(), Error> {
        if from.bytes() != to.bytes() {
            return Err(Error::refused("copy", format!("{} bytes to {} bytes", from.bytes(), to.bytes())));
        }
        self.uses("copy", [from, to].into_iter())?;
        // SAFETY: both have the same size and are within live buffers, as just checked; freeing
        // them waits for the operation.
        self.context.call("cuMemcpyDtoDAsync", |call| unsafe {
            (call.cuMemcpyDtoDAsync_v2)(to.address, from.address, to.bytes(), self.raw())
        })
    }

    /// Queues a copy of `count` lines of `bytes` bytes between disjoint device memories.
    ///
    /// # Errors
    /// The lines are not within their memory, a buffer has been freed, or the call fails.
    pub fn copy_lines(&self, bytes: usize, count: usize, from: Lines, to: Lines) -> Result<(), Error> {
        let fits = |lines: Lines| {
            let end = count.checked_sub(1).and_then(|last| last.checked_mul(lines.pitch)?.checked_add(bytes));
            lines.pitch >= bytes && end.is_some_and(|end| end <= lines.span.bytes())
        };
        if !fits(from) || !fits(to) {
            let text = format!("{count} lines of {bytes} bytes from {from:?} to {to:?}");
            return Err(Error::refused("copy", text));
        }
        // The driver limits the pitch of 2D copies; a contiguous copy has no limit.
        if count == 1 || (from.pitch, to.pitch) == (bytes, bytes) {
            let whole = |lines: Lines| lines.span.part(0..count * bytes);
            let [from, to] = [from, to].map(|lines| whole(lines).expect("invariant: the lines fit"));
            return self.copy(from, to);
        }
        self.uses("copy", [from.span, to.span].into_iter())?;
        let copy = Copy2D { from: Side2D::new(from), to: Side2D::new(to), width_bytes: bytes, height: count };
        // SAFETY: the lines are within live buffers, as just checked; freeing them waits for the
        // operation; the struct is read before the call returns.
        self.context.call("cuMemcpy2DAsync", |call| unsafe { (call.cuMemcpy2DAsync_v2)(&raw const copy, self.raw()) })
    }
}

impl Event {
    /// Waits for the event.
    ///
    /// # Errors
    /// An operation before it failed.
    pub fn synchronize(&self) -> Result<(), Error> {
        // SAFETY: the event is alive.
        self.0.context.call_and_wait("cuEventSynchronize", |call| unsafe { (call.cuEventSynchronize)(self.0.raw) })
    }

    /// Whether all operations before it are done.
    ///
    /// # Errors
    /// An operation before it failed.
    pub fn is_done(&self) -> Result<bool, Error> {
        let mut done = true;
        self.0.context.call("cuEventQuery", |call| {
            // SAFETY: the event is alive.
            let code = unsafe { (call.cuEventQuery)(self.0.raw) };
            done = code != NOT_READY;
            if done { code } else { 0 }
        })?;
        Ok(done)
    }

    /// Seconds between two completed timed events.
    ///
    /// # Errors
    /// The events have no timing, or are not done.
    pub fn seconds_since(&self, start: &Event) -> Result<f64, Error> {
        let mut milliseconds = 0.0;
        // SAFETY: both are alive; the pointer is to a live float.
        self.0.context.call("cuEventElapsedTime", |call| unsafe {
            (call.cuEventElapsedTime)(&raw mut milliseconds, start.0.raw, self.0.raw)
        })?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}
