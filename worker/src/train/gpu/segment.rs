//! Commands that are queued together.

use super::commands::{Command, Commands, Workshop};
use super::memories::Memories;
use switchyard_cuda::Error;
use switchyard_cuda::driver::{Graph, Stream};

/// Commands that are queued one by one at first, and from the second time on as one graph. What differs from step to step they read from
/// memory of the device, never from their arguments.
pub(super) struct Segment {
    commands: Commands,
    state: State,
}

enum State {
    New,
    /// Everything has run once: the code of all kernels is on the device, as a capture wants it.
    Loaded,
    Captured(Graph),
}

impl Segment {
    pub fn new(commands: Commands) -> Segment {
        Segment { commands, state: State::New }
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
