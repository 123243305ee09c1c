//! Commands that are queued together.

use super::commands::{Command, Commands, Workshop};
use super::memories::Memories;
use super::times::Times;
use crate::gpu::Costed;
use switchyard_cuda::Error;
use switchyard_cuda::driver::{Graph, Stream};
use switchyard_cuda::nvtx::{self, Range};
use switchyard_worker_contract::prediction::Part;

/// Commands that are queued one by one at first, and from the second time on as one graph. What differs from step to step they read from
/// memory of the device, never from their arguments.
pub(super) struct Segment {
    /// For profilers.
    name: &'static str,
    commands: Commands,
    /// Of those that the device computes, in order; none for what is never timed.
    costs: Vec<Costed>,
    /// Of the same, what layer they are for, if it has a name; none if no profiler wants to know.
    layers: Vec<String>,
    state: State,
}

enum State {
    New,
    /// Everything has run once: the code of all kernels is on the device, as a capture wants it.
    Loaded,
    Captured(Graph),
}

/// The ranges of a work: part of the step and, within it, the layer.
#[derive(Default)]
struct Place<'a> {
    // Ranges end in the order of these fields.
    layer: Option<(&'a str, Range)>,
    part: Option<(Part, Range)>,
}

impl<'a> Place<'a> {
    /// Ends the ranges that a work is not in, and begins those that it is in.
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

    /// Has profilers see the layers of works that are queued one by one. The last works may be of none.
    pub fn with_layers(mut self, mut layers: Vec<String>) -> Segment {
        if !layers.is_empty() {
            layers.resize(self.costs.len(), String::new());
        }
        self.layers = layers;
        self
    }

    /// Each work with what is recorded for others before it, and its cost. Its ranges are open until the next.
    fn each(&self) -> impl Iterator<Item = (&Costed, &[Command])> {
        let mut costs = self.costs.iter();
        let mut layers = self.layers.iter();
        let (mut from, mut place) = (0, Place::default());
        let ends = self.commands.iter().enumerate().filter(|(_, command)| !matches!(command, Command::Record(_)));
        ends.map(move |(at, _)| {
            let queued = &self.commands[from..=at];
            from = at + 1;
            let cost = costs.next().expect("invariant: each work has its cost");
            if let Some(layer) = layers.next() {
                place.enter(cost.part, layer);
            }
            (cost, queued)
        })
    }

    /// What is recorded behind the last work.
    fn rest(&self) -> &[Command] {
        let last = self.commands.iter().rposition(|command| !matches!(command, Command::Record(_)));
        &self.commands[last.map_or(0, |last| last + 1)..]
    }

    /// Queues one by one, in ranges if a profiler wants to know.
    fn queue_each(&self, workshop: &Workshop, memories: &Memories, stream: &Stream) -> Result<(), Error> {
        if self.layers.is_empty() {
            return workshop.queue(&self.commands, memories, stream);
        }
        self.each().try_for_each(|(_, queued)| workshop.queue(queued, memories, stream))?;
        workshop.queue(self.rest(), memories, stream)
    }

    /// Queues one by one, and has each work timed.
    ///
    /// # Errors
    /// A call fails, or work failed earlier.
    pub fn queue_timed(
        &mut self,
        (workshop, memories, stream): (&Workshop, &Memories, &Stream),
        times: &mut Times,
    ) -> Result<(), Error> {
        let _range = nvtx::range(self.name);
        let works = self.each().map(|(cost, queued)| (cost, move || workshop.queue(queued, memories, stream)));
        times.works(works, stream)?;
        workshop.queue(self.rest(), memories, stream)?;
        if matches!(self.state, State::New) {
            self.state = State::Loaded;
        }
        Ok(())
    }

    /// How many of its commands the device computes.
    pub fn works(&self) -> usize {
        self.commands.iter().filter(|command| !matches!(command, Command::Record(_))).count()
    }

    /// Queues all of it. Allocates nothing from the third time on, unless a profiler is attached.
    ///
    /// # Errors
    /// A call fails, or work failed earlier.
    pub fn queue(&mut self, workshop: &Workshop, memories: &Memories, stream: &Stream) -> Result<(), Error> {
        let _range = nvtx::range(self.name);
        if workshop.has_graphs() && matches!(self.state, State::Loaded) {
            // Calls that run nothing.
            let _range = nvtx::range("capture");
            self.state = State::Captured(stream.capture(|| self.queue_each(workshop, memories, stream))?);
        }
        match &self.state {
            State::Captured(graph) => graph.launch(stream),
            State::New | State::Loaded => {
                self.queue_each(workshop, memories, stream)?;
                self.state = State::Loaded;
                Ok(())
            }
        }
    }
}
