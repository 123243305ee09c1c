//! Work of a stream as one object, which is launched with one call.

use super::memory::{check_live, holding};
use super::{Functions, Object, Span, Stream};
use crate::error::Error;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

/// Calls of this thread that a capture does not allow fail, those of others do not.
pub(super) const THREAD_LOCAL: u32 = 1;

/// What a graph needs whenever it runs.
#[derive(Default)]
pub(super) struct Uses {
    pub(super) spans: Vec<Span>,
    /// Code of kernels, and events.
    objects: Vec<Arc<Object>>,
}

/// Work that was captured. It runs in the order in which it was queued.
pub struct Graph {
    executable: Object,
    uses: Uses,
}

impl Stream {
    /// Captures what `work` puts into this stream: kernels, products, fills, copies between memories of the device, and events. Nothing of
    /// it runs. Each kernel must have been launched before, since its code is loaded at its first launch.
    ///
    /// # Errors
    /// Those of `work`, or a call was made that a capture does not allow.
    pub fn capture(&self, work: impl FnOnce() -> Result<(), Error>) -> Result<Graph, Error> {
        let (context, raw) = (self.context(), self.raw());
        // SAFETY: the stream lives.
        let begin = |call: &Functions| unsafe { (call.cuStreamBeginCapture_v2)(raw, THREAD_LOCAL) };
        context.call("cuStreamBeginCapture", begin)?;
        *self.captured.lock().unwrap_or_else(PoisonError::into_inner) = Some(Uses::default());
        let result = work();
        let mut uses = self.captured.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default();
        // A launch looks at each of them: a few buffers, and not the thousands of parts that kernels use.
        uses.spans = holding(context, &uses.spans);
        let mut raw = std::ptr::null_mut();
        // SAFETY: the stream lives; the pointer is to a live handle.
        let ended =
            context.call("cuStreamEndCapture", |call| unsafe { (call.cuStreamEndCapture)(self.raw(), &raw mut raw) });
        let functions = &context.inner.driver.functions;
        let object = |raw, destroy| Object { context: context.clone(), raw, destroy };
        let graph = (!raw.is_null()).then(|| object(raw, functions.cuGraphDestroy));
        result.and(ended)?;
        let Some(graph) = graph else { return Err(Error::refused("cuStreamEndCapture", "no graph")) };
        let mut raw = std::ptr::null_mut();
        // SAFETY: the graph lives; the pointer is to a live handle; no flags.
        context.call("cuGraphInstantiate", |call| unsafe {
            (call.cuGraphInstantiateWithFlags)(&raw mut raw, graph.raw, 0)
        })?;
        Ok(Graph { executable: object(raw, functions.cuGraphExecDestroy), uses })
    }

    /// For work that is queued now. Refuses memory whose buffer is gone; a graph that is captured checks it again whenever it runs.
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

    /// A graph that is captured keeps what it uses. Returns whether one is.
    pub(super) fn keeps(&self, object: &Arc<Object>) -> bool {
        match &mut *self.captured.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(uses) if uses.objects.iter().any(|known| Arc::ptr_eq(known, object)) => true,
            Some(uses) => {
                uses.objects.push(Arc::clone(object));
                true
            }
            None => false,
        }
    }

    /// Refuses what a graph cannot have: memory of the host would have to stay as it is for as long as the graph exists.
    pub(super) fn refuse_in_capture(&self, call: &'static str) -> Result<(), Error> {
        match *self.captured.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(_) => Err(Error::refused(call, "the stream is captured, and a graph has work of the device only")),
            None => Ok(()),
        }
    }
}

impl Graph {
    /// Queues all of it.
    ///
    /// # Errors
    /// A buffer is gone, or the call fails.
    pub fn launch(&self, stream: &Stream) -> Result<(), Error> {
        let context = stream.context();
        check_live(context, "graph", self.uses.spans.iter().copied())?;
        stream.refuse_in_capture("graph")?;
        stream.count_launch();
        // SAFETY: the graph lives; its buffers live, as just checked, and it holds its modules.
        context.call("cuGraphLaunch", |call| unsafe { (call.cuGraphLaunch)(self.executable.raw, stream.raw()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // Also work that failed is over.
        let _ = self.executable.context.synchronize();
    }
}
