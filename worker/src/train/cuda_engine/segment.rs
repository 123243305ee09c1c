//! A sequence of commands that is queued as a unit.

use super::commands::{Command, Commands, Dispatcher};
use super::memories::Memories;
use super::timer::OpTimer;
use crate::lowering::Costed;
use switchyard_cuda::Error;
use switchyard_cuda::driver::{Graph, Stream};
use switchyard_cuda::nvtx::{self, Range};
use switchyard_worker_contract::prediction::Part;

/// Commands that are queued eagerly the first time, captured the second time, and replayed as one
/// graph from then on. Values that change from step to step are read from device memory, never
/// passed as arguments.
pub(super) struct Segment {
    /// For profilers.
    name: &'static str,
    commands: Commands,
    /// Costs of the operations, in order; empty for segments that are never timed.
    costs: Vec<Costed>,
    /// Layer names of the operations; empty without a profiler.
    layers: Vec<String>,
    state: State,
}

enum State {
    New,
    /// Everything has run once, so all kernels are loaded, as capture requires.
    Loaded,
    Captured(Graph),
}

/// The open NVTX ranges of an operation: the part of the step and, within it, the layer.
#[derive(Default)]
struct OpenRanges<'a> {
    // Ranges end in field order.
    layer: Option<(&'a str, Range)>,
    part: Option<(Part, Range)>,
}

impl<'a> OpenRanges<'a> {
    /// Ends the ranges that the operation is not in, and begins those that it is in.
    fn enter(&mut self, part: Part, layer: &'a str) {
        if self.part.as_ref().is_none_or(|(open, _)| *open != part) {
            self.layer = None;
            self.part = None;
            let name = match part {
                Part::Forward => "forward",
                Part::Backward => "backward",
                Part::Update => "update",
            };
            self.part = Some((part, nvtx::range(name)));
        }
        if self.layer.as_ref().map_or("", |(open, _)| open) != layer {
            self.layer = None;
            self.layer = (!layer.is_empty()).then(|| (layer, nvtx::range(layer)));
        }
    }
}

impl Segment {
    pub fn new(name: &'static str, commands: Commands, costs: Vec<Costed>) -> Segment {
        Segment { name, commands, costs, layers: Vec::new(), state: State::New }
    }

    /// Adds layer ranges for profilers to eagerly queued operations. The last operations may belong
    /// to no layer.
    pub fn with_layers(mut self, mut layers: Vec<String>) -> Segment {
        if !layers.is_empty() {
            layers.resize(self.costs.len(), String::new());
        }
        self.layers = layers;
        self
    }

    /// Yields each operation, preceded by the events recorded before it, with its cost. Its ranges
    /// stay open until the next.
    fn each(&self) -> impl Iterator<Item = (&Costed, &[Command])> {
        let mut costs = self.costs.iter();
        let mut layers = self.layers.iter();
        let (mut from, mut ranges) = (0, OpenRanges::default());
        let ends = self.commands.iter().enumerate().filter(|(_, command)| !matches!(command, Command::Record(_)));
        ends.map(move |(at, _)| {
            let queued = &self.commands[from..=at];
            from = at + 1;
            let cost = costs.next().expect("invariant: each work has its cost");
            if let Some(layer) = layers.next() {
                ranges.enter(cost.part, layer);
            }
            (cost, queued)
        })
    }

    /// The events recorded after the last operation.
    fn rest(&self) -> &[Command] {
        let last = self.commands.iter().rposition(|command| !matches!(command, Command::Record(_)));
        &self.commands[last.map_or(0, |last| last + 1)..]
    }

    /// Queues eagerly, in NVTX ranges if a profiler is attached.
    fn queue_each(&self, dispatcher: &Dispatcher, memories: &Memories, stream: &Stream) -> Result<(), Error> {
        if self.layers.is_empty() {
            return dispatcher.queue(&self.commands, memories, stream);
        }
        self.each().try_for_each(|(_, queued)| dispatcher.queue(queued, memories, stream))?;
        dispatcher.queue(self.rest(), memories, stream)
    }

    /// Queues eagerly and times each operation.
    ///
    /// # Errors
    /// A call or an earlier operation failed.
    pub fn queue_timed(
        &mut self,
        (dispatcher, memories, stream): (&Dispatcher, &Memories, &Stream),
        timer: &mut OpTimer,
    ) -> Result<(), Error> {
        let _range = nvtx::range(self.name);
        let operations = self.each().map(|(cost, queued)| (cost, move || dispatcher.queue(queued, memories, stream)));
        timer.queue_all(operations, stream)?;
        dispatcher.queue(self.rest(), memories, stream)?;
        if matches!(self.state, State::New) {
            self.state = State::Loaded;
        }
        Ok(())
    }

    /// Number of operations, without events.
    pub fn operations(&self) -> usize {
        self.commands.iter().filter(|command| !matches!(command, Command::Record(_))).count()
    }

    /// Queues the segment. Allocates nothing from the third time on, unless a profiler is attached.
    ///
    /// # Errors
    /// A call or an earlier operation failed.
    pub fn queue(&mut self, dispatcher: &Dispatcher, memories: &Memories, stream: &Stream) -> Result<(), Error> {
        let _range = nvtx::range(self.name);
        if dispatcher.has_graphs() && matches!(self.state, State::Loaded) {
            // During capture, calls run nothing.
            let _range = nvtx::range("capture");
            self.state = State::Captured(stream.capture(|| self.queue_each(dispatcher, memories, stream))?);
        }
        match &self.state {
            State::Captured(graph) => graph.launch(stream),
            State::New | State::Loaded => {
                self.queue_each(dispatcher, memories, stream)?;
                self.state = State::Loaded;
                Ok(())
            }
        }
    }
}
