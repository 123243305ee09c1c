//! Work that was captured, and is put into a stream whenever its graph is launched.

use crate::code::{Answer, CAPTURE_INVALIDATED, CAPTURE_UNSUPPORTED, INVALID_VALUE};
use crate::finding::explain;
use crate::gpu::Gpu;
use crate::gpu::work::Work;
use std::ops::Range;
use std::sync::Arc;
use switchyard_cuda_reference::Module;

/// What a launch of a graph puts into a stream.
#[derive(Clone)]
pub(crate) enum Node {
    /// Work that uses ranges of memory.
    Work { name: String, uses: Vec<Range<u64>>, work: Work },
    /// The record of an event that others may wait for.
    Record(usize),
}

/// Nodes in the order in which they run.
pub(crate) type Graph = Arc<Vec<Node>>;

/// A stream that is captured.
struct Capture {
    stream: usize,
    nodes: Vec<Node>,
    /// A call was made that a capture does not allow.
    is_invalid: bool,
}

#[derive(Default)]
pub(crate) struct Graphs {
    captures: Vec<Capture>,
    pub(crate) captured: Vec<Option<Graph>>,
    pub(crate) executables: Vec<Option<Graph>>,
}

impl Graphs {
    pub(crate) fn begin(&mut self, stream: usize) -> Answer<()> {
        if self.is_captured(stream) {
            return Err(INVALID_VALUE);
        }
        self.captures.push(Capture { stream, nodes: Vec::new(), is_invalid: false });
        Ok(())
    }

    /// Ends a capture; returns the number of its graph.
    pub(crate) fn end(&mut self, stream: usize) -> Answer<usize> {
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

    /// Takes work into the graph of a stream that is captured; gives it back for one that is not.
    pub(crate) fn take(&mut self, stream: usize, name: String, uses: &[Range<u64>], work: Work) -> Option<Work> {
        match self.captures.iter_mut().find(|capture| capture.stream == stream) {
            Some(capture) => {
                capture.nodes.push(Node::Work { name, uses: uses.to_vec(), work });
                None
            }
            None => Some(work),
        }
    }

    /// Takes the record of an event into the graph of a stream.
    pub(crate) fn take_record(&mut self, stream: usize, event: usize) -> Answer<()> {
        let capture = self.captures.iter_mut().find(|capture| capture.stream == stream).ok_or(INVALID_VALUE)?;
        capture.nodes.push(Node::Record(event));
        Ok(())
    }

    /// Refuses a call that no stream may be captured for.
    pub(crate) fn refuse(&mut self, call: &str) -> Answer<()> {
        if self.captures.is_empty() {
            return Ok(());
        }
        self.captures.iter_mut().for_each(|capture| capture.is_invalid = true);
        explain(call, "a stream is captured");
        Err(CAPTURE_UNSUPPORTED)
    }

    /// Refuses a call about one stream, if that is captured.
    pub(crate) fn refuse_for(&mut self, stream: usize, call: &str) -> Answer<()> {
        if self.is_captured(stream) { self.refuse(call) } else { Ok(()) }
    }

    /// Whether a graph that can be launched has a kernel of a module.
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
                Node::Work { name, uses, work } => self.put_again(stream, name.clone(), uses, work.clone()),
                Node::Record(event) => self.record(*event, stream),
            }
        }
    }

    fn put_again(&mut self, stream: usize, mut name: String, uses: &[Range<u64>], mut work: Work) {
        if let Work::Launch(launch) = &mut work {
            launch.number = self.next_launch();
            name = launch.name();
        }
        self.put(stream, name, uses, work);
    }

    /// An event is done when all is that is in the stream now. One that is gone is recorded by nobody.
    pub(crate) fn record(&mut self, event: usize, stream: usize) {
        let now = self.queue.now(stream);
        if let Some(Some(event)) = self.events.get_mut(event) {
            event.clock = Some(now);
        }
    }
}
