//! Commands that are queued together.

use super::commands::{Command, Commands, Workshop};
use super::memories::Memories;
use super::times::Times;
use crate::gpu::Costed;
use switchyard_cuda::Error;
use switchyard_cuda::driver::{Graph, Stream};

/// Commands that are queued one by one at first, and from the second time on as one graph. What differs from step to step they read from
/// memory of the device, never from their arguments.
pub(super) struct Segment {
    commands: Commands,
    /// Of those that the device computes, in order; none for what is never timed.
    costs: Vec<Costed>,
    state: State,
}

enum State {
    New,
    /// Everything has run once: the code of all kernels is on the device, as a capture wants it.
    Loaded,
    Captured(Graph),
}

impl Segment {
    pub fn new(commands: Commands, costs: Vec<Costed>) -> Segment {
        Segment { commands, costs, state: State::New }
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
        let mut costs = self.costs.iter();
        // What is recorded for others between two works is queued with the work behind it.
        let ends = self.commands.iter().enumerate().filter(|(_, command)| !matches!(command, Command::Record(_)));
        let mut from = 0;
        let works = ends.map(|(at, _)| {
            let queued = &self.commands[from..=at];
            from = at + 1;
            let cost = costs.next().expect("invariant: each work has its cost");
            (cost, move || workshop.queue(queued, memories, stream))
        });
        times.works(works, stream)?;
        let last = self.commands.iter().rposition(|command| !matches!(command, Command::Record(_)));
        workshop.queue(&self.commands[last.map_or(0, |last| last + 1)..], memories, stream)?;
        if matches!(self.state, State::New) {
            self.state = State::Loaded;
        }
        Ok(())
    }

    /// How many of its commands the device computes.
    pub fn works(&self) -> usize {
        self.commands.iter().filter(|command| !matches!(command, Command::Record(_))).count()
    }

    /// Queues all of it. Allocates nothing from the third time on.
    ///
    /// # Errors
    /// A call fails, or work failed earlier.
    pub fn queue(&mut self, workshop: &Workshop, memories: &Memories, stream: &Stream) -> Result<(), Error> {
        let each = || workshop.queue(&self.commands, memories, stream);
        if workshop.has_graphs() && matches!(self.state, State::Loaded) {
            self.state = State::Captured(stream.capture(each)?);
        }
        match &self.state {
            State::Captured(graph) => graph.launch(stream),
            State::New | State::Loaded => {
                each()?;
                self.state = State::Loaded;
                Ok(())
            }
        }
    }
}
