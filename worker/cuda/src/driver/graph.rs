//! CUDA graphs: a stream's captured operations, launched with one call.

use super::memory::{check_live, containing_buffers};
use super::{Functions, Object, Span, Stream};
use crate::error::Error;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

/// During a capture, forbidden calls fail on this thread only, not on others.
pub(super) const THREAD_LOCAL: u32 = 1;

/// What a graph uses each time it runs.
#[derive(Default)]
pub(super) struct Uses {
    pub(super) spans: Vec<Span>,
    /// Kernel code, and events.
    objects: Vec<Arc<Object>>,
}

/// Captured operations. They run in the order in which they were queued.
pub struct Graph {
    executable: Object,
    uses: Uses,
}

impl Stream {
    /// Captures the operations that `work` queues in this stream: kernels, GEMMs, fills,
    /// device-to-device copies, and events. Nothing is executed. Each kernel must have been
    /// launched before, because its code is loaded at its first launch.
    ///
    /// # Errors
    /// The errors of `work`, or a call that a capture does not allow.
    pub fn capture(&self, work: impl FnOnce() -> Result<(), Error>) -> Result<Graph, Error> {
        let (context, raw) = (self.context(), self.raw());
        // SAFETY: the stream is alive.
        let begin = |call: &Functions| unsafe { (call.cuStreamBeginCapture_v2)(raw, THREAD_LOCAL) };
        context.call("cuStreamBeginCapture", begin)?;
        *self.captured.lock().unwrap_or_else(PoisonError::into_inner) = Some(Uses::default());
        let result = work();
        let mut uses = self.captured.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default();
        // Every launch checks this list, so it holds a few buffers instead of the thousands of
        // ranges that kernels use.
        uses.spans = containing_buffers(context, &uses.spans);
        let mut raw = std::ptr::null_mut();
        // SAFETY: the stream is alive; the pointer is to a live handle.
        let ended =
            context.call("cuStreamEndCapture", |call| unsafe { (call.cuStreamEndCapture)(self.raw(), &raw mut raw) });
        let functions = &context.inner.driver.functions;
        let object = |raw, destroy| Object { context: context.clone(), raw, destroy };
        let graph = (!raw.is_null()).then(|| object(raw, functions.cuGraphDestroy));
        result.and(ended)?;
        let Some(graph) = graph else { return Err(Error::refused("cuStreamEndCapture", "no graph")) };
        let mut raw = std::ptr::null_mut();
        // SAFETY: the graph is alive; the pointer is to a live handle; no flags.
        context.call("cuGraphInstantiate", |call| unsafe {
            (call.cuGraphInstantiateWithFlags)(&raw mut raw, graph.raw, 0)
        })?;
        Ok(Graph { executable: object(raw, functions.cuGraphExecDestroy), uses })
    }

    /// Rejects memory whose buffer has been freed, for operations queued now. During a capture, the
    /// spans are recorded so that the graph checks them on every launch.
    pub(crate) fn uses(&self, call: &'static str, spans: impl Iterator<Item = Span> + Clone) -> Result<(), Error> {
        check_live(self.context(), call, spans.clone())?;
        match &mut *self.captured.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(uses) => spans.for_each(|span| uses.spans.push(span)),
            None => self.count_launch(),
        }
        Ok(())
    }

    fn count_launch(&self) {
        self.context().inner.launches.fetch_add(1, Ordering::Relaxed);
    }

    /// Records an object in the graph being captured, if any. Returns whether there is one.
    pub(super) fn record_object(&self, object: &Arc<Object>) -> bool {
        match &mut *self.captured.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(uses) if uses.objects.iter().any(|known| Arc::ptr_eq(known, object)) => true,
            Some(uses) => {
                uses.objects.push(Arc::clone(object));
                true
            }
            None => false,
        }
    }

    /// Rejects operations that a graph cannot contain: host memory would have to stay unchanged for
    /// as long as the graph exists.
    pub(super) fn reject_in_capture(&self, call: &'static str) -> Result<(), Error> {
        match *self.captured.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(_) => Err(Error::refused(call, "the stream is captured, and a graph has work of the device only")),
            None => Ok(()),
        }
    }
}

impl Graph {
    /// Queues the whole graph.
    ///
    /// # Errors
    /// A buffer has been freed, or the call fails.
    pub fn launch(&self, stream: &Stream) -> Result<(), Error> {
        let context = stream.context();
        check_live(context, "graph", self.uses.spans.iter().copied())?;
        stream.reject_in_capture("graph")?;
        stream.count_launch();
        // SAFETY: the graph is alive; its buffers are alive, as just checked, and it holds its
        // modules.
        context.call("cuGraphLaunch", |call| unsafe { (call.cuGraphLaunch)(self.executable.raw, stream.raw()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // Failed work is finished, too.
        let _ = self.executable.context.synchronize();
    }
}
