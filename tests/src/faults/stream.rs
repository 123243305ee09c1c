//! Watch streams, line by line: late, or with events missing.

use bytes::Bytes;
use futures::{Stream, StreamExt};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What happens to the events of a watch.
#[derive(Debug, Clone, Default)]
pub(super) struct Events {
    /// Shown this much later.
    pub delay: Duration,
    /// Every n-th event ends the watch instead of being shown: the next list has to bring it. 0: none.
    pub cut_every: u64,
    /// Events so far, over all watches.
    pub seen: Arc<AtomicU64>,
    /// Watches that were cut.
    pub cut: Arc<AtomicU64>,
}

/// The lines of a watch, treated.
pub(super) fn treat<S, E>(source: S, events: Events) -> impl Stream<Item = Result<Bytes, E>> + Send
where
    S: Stream<Item = Result<Bytes, E>> + Send + Unpin + 'static,
    E: Send + 'static,
{
    let state = (source, Vec::<u8>::new(), VecDeque::<Bytes>::new(), events, false);
    futures::stream::unfold(state, |(mut source, mut rest, mut lines, events, mut ended)| async move {
        loop {
            if ended {
                return None;
            }
            if let Some(line) = lines.pop_front() {
                let number = events.seen.fetch_add(1, Ordering::Relaxed) + 1;
                if events.cut_every > 0 && number.is_multiple_of(events.cut_every) {
                    events.cut.fetch_add(1, Ordering::Relaxed);
                    return None;
                }
                if !events.delay.is_zero() {
                    tokio::time::sleep(events.delay).await;
                }
                return Some((Ok(line), (source, rest, lines, events, ended)));
            }
            match source.next().await {
                Some(Ok(chunk)) => {
                    rest.extend_from_slice(&chunk);
                    while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                        lines.push_back(Bytes::from(rest.drain(..=end).collect::<Vec<u8>>()));
                    }
                }
                Some(Err(error)) => {
                    ended = true;
                    return Some((Err(error), (source, rest, lines, events, ended)));
                }
                None => return None,
            }
        }
    })
}
