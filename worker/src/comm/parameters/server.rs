//! A parameter server: a thread that passes each message to its handler and sends the replies.

use super::super::{
    error::{Cause, CommError},
    join::spawn,
    state::Shared,
};
use super::connect::ParameterLinks;
use super::link::{self, Link};
use super::message::Message;
use std::{
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
};

/// What a server does with messages.
pub trait Handler: Send {
    /// Most words of the next message.
    fn most_words(&self) -> u64;

    /// Handles a message of a rank; returns messages and the ranks that receive them.
    ///
    /// # Errors
    /// The rank broke the protocol. The group fails with this text.
    fn handle(&mut self, rank: u32, message: Message) -> Result<Vec<(u32, Message)>, String>;
}

/// A running server.
pub struct ParameterServer {
    stop: Arc<AtomicBool>,
    wake: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl ParameterServer {
    /// Starts the servers of this process. `handler`: creates a server's handler.
    ///
    /// # Errors
    /// The system has no more threads or files.
    pub fn start_all(
        links: &ParameterLinks,
        mut handler: impl FnMut(usize) -> Box<dyn Handler>,
    ) -> Result<Vec<ParameterServer>, CommError> {
        let start = |(server, sockets): &(usize, Vec<Arc<OwnedFd>>)| {
            let wake = link::wake_fd().map_err(|e| CommError::system("create an eventfd", e))?;
            let stop = Arc::new(AtomicBool::new(false));
            let links_of = sockets.iter().map(|socket| Link::new(Arc::clone(socket))).collect();
            let serving = Serving {
                server: *server,
                links: links_of,
                handler: handler(*server),
                shared: Arc::clone(&links.shared),
                stop: Arc::clone(&stop),
                wake: Arc::clone(&wake),
            };
            let thread = Some(spawn(&format!("server-{server}"), move || serving.run())?);
            Ok(ParameterServer { stop, wake, thread })
        };
        links.hosted.iter().map(start).collect()
    }
}

impl Drop for ParameterServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        link::wake(&self.wake);
        if let Some(thread) = self.thread.take() {
            // That thread has already reported a panic.
            let _ = thread.join();
        }
    }
}

struct Serving {
    server: usize,
    /// By rank.
    links: Vec<Link>,
    handler: Box<dyn Handler>,
    shared: Arc<Shared>,
    stop: Arc<AtomicBool>,
    wake: Arc<OwnedFd>,
}

impl Serving {
    fn run(mut self) {
        let _guard = FailOnPanic(Arc::clone(&self.shared));
        while !self.stop.load(Ordering::SeqCst) && !self.shared.failed() {
            for rank in 0..self.links.len() {
                self.serve(rank);
            }
            for (rank, link) in self.links.iter_mut().enumerate() {
                if link.write().is_err() {
                    // The group learns from the rank's control connection if it has failed.
                    link.closed = true;
                    eprintln!("warning: parameter server {} lost rank {rank}", self.server);
                }
            }
            if link::wait(&self.links, &self.wake).is_err() {
                return;
            }
        }
    }

    /// Handles what has arrived from a rank.
    fn serve(&mut self, rank: usize) {
        loop {
            let message = match self.links[rank].read(self.handler.most_words()) {
                Ok(Some(message)) => message,
                Ok(None) => return,
                Err(_) => {
                    self.links[rank].closed = true;
                    return;
                }
            };
            match self.handler.handle(rank as u32, message) {
                Ok(replies) => {
                    for (to, reply) in replies {
                        self.links[to as usize].queue(reply);
                    }
                }
                Err(text) => {
                    let text = format!("parameter server {}: {text}", self.server);
                    self.shared.abort(Cause::failed(rank as u32, text));
                    return;
                }
            }
        }
    }
}

/// A panic in a server is a bug, but the group must still end.
struct FailOnPanic(Arc<Shared>);

impl Drop for FailOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.abort(Cause::failed(self.0.rank, "internal error: a parameter server panicked"));
        }
    }
}
