//! Captured work, which is enqueued on a stream whenever its graph is launched.

use crate::code::{CAPTURE_INVALIDATED, CAPTURE_UNSUPPORTED, CallResult, INVALID_VALUE};
use crate::finding::explain;
use crate::gpu::Gpu;
use crate::gpu::work::Work;
use std::ops::Range;
use std::sync::Arc;
use switchyard_cuda_reference::Module;

/// An item that a graph launch enqueues.
#[derive(Clone)]
pub(crate) enum Node {
    /// Work, with the memory that it uses.
    Work { name: String, uses: Vec<Range<u64>>, work: Work },
    /// The record of an external event.
    Record(usize),
}

/// Nodes in execution order.
pub(crate) type Graph = Arc<Vec<Node>>;

/// A stream being captured.
struct Capture {
    stream: usize,
    nodes: Vec<Node>,
    /// A call that is illegal during capture was made.
    is_invalid: bool,
}

#[derive(Default)]
pub(crate) struct Graphs {
    captures: Vec<Capture>,
    pub(crate) captured: Vec<Option<Graph>>,
    pub(crate) executables: Vec<Option<Graph>>,
}

impl Graphs {
    pub(crate) fn begin(&mut self, stream: usize) -> CallResult<()> {
        if self.is_captured(stream) {
            return Err(INVALID_VALUE);
        }
        self.captures.push(Capture { stream, nodes: Vec::new(), is_invalid: false });
        Ok(())
    }

    /// Ends a capture; returns the number of its graph.
    pub(crate) fn end(&mut self, stream: usize) -> CallResult<usize> {
        let at = self.captures.iter().position(|capture| capture.stream == stream).ok_or(INVALID_VALUE)?;
        let Capture { nodes, is_invalid, .. } = self.captures.remove(at);
        if is_invalid {
            return Err(CAPTURE_INVALIDATED);
        }
        self.captured.push(Some(Arc::new(nodes)));
        Ok(self.captured.len() - 1)
    }

    pub(crate) fn is_captured(&self, stream: usize) -> bool {
        self.captures.iter().any(|capture| capture.stream == stream)
    }

    /// Adds work to the graph of a captured stream; returns it if the stream is not captured.
    pub(crate) fn take(&mut self, stream: usize, name: String, uses: &[Range<u64>], work: Work) -> Option<Work> {
        match self.captures.iter_mut().find(|capture| capture.stream == stream) {
            Some(capture) => {
                capture.nodes.push(Node::Work { name, uses: uses.to_vec(), work });
                None
            }
            None => Some(work),
        }
    }

    /// Adds an event record to the graph of a stream.
    pub(crate) fn take_record(&mut self, stream: usize, event: usize) -> CallResult<()> {
        let capture = self.captures.iter_mut().find(|capture| capture.stream == stream).ok_or(INVALID_VALUE)?;
        capture.nodes.push(Node::Record(event));
        Ok(())
    }

    /// Rejects a call that is illegal while any stream is being captured.
    pub(crate) fn refuse(&mut self, call: &str) -> CallResult<()> {
        if self.captures.is_empty() {
            return Ok(());
        }
        self.captures.iter_mut().for_each(|capture| capture.is_invalid = true);
        explain(call, "a stream is captured");
        Err(CAPTURE_UNSUPPORTED)
    }

    /// Rejects a call on a stream that is being captured.
    pub(crate) fn refuse_for(&mut self, stream: usize, call: &str) -> CallResult<()> {
        if self.is_captured(stream) { self.refuse(call) } else { Ok(()) }
    }

    /// Whether a launchable graph has a kernel of a module.
    pub(crate) fn use_module(&self, module: &Arc<Module>) -> bool {
        let mut nodes = self.executables.iter().flatten().flat_map(|graph| graph.iter());
        let has = |work: &Work| matches!(work, Work::Launch(launch) if Arc::ptr_eq(&launch.module, module));
        nodes.any(|node| matches!(node, Node::Work { work, .. } if has(work)))
    }
}

impl Gpu {
    pub(crate) fn launch_graph(&mut self, graph: &Graph, stream: usize) {
        for node in graph.iter() {
            match node {
                Node::Work { name, uses, work } => self.enqueue_replayed(stream, name.clone(), uses, work.clone()),
                Node::Record(event) => self.record(*event, stream),
            }
        }
    }

    fn enqueue_replayed(&mut self, stream: usize, mut name: String, uses: &[Range<u64>], mut work: Work) {
        if let Work::Launch(launch) = &mut work {
            launch.number = self.next_launch();
            name = launch.name();
        }
        self.enqueue(stream, name, uses, work);
    }

    /// Records an event: it completes after everything now in the stream. Ignores destroyed events.
    pub(crate) fn record(&mut self, event: usize, stream: usize) {
        let now = self.queue.now(stream);
        if let Some(Some(event)) = self.events.get_mut(event) {
            event.clock = Some(now);
        }
    }
}
