//! Watch streams, delayed or cut line by line.

use crate::Random;
use bytes::Bytes;
use futures::{Stream, StreamExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};

/// The API server's last line for a watch that fell behind its history: the client must list again.
const EXPIRED: &[u8] = b"{\"type\":\"ERROR\",\"object\":{\"kind\":\"Status\",\"apiVersion\":\"v1\",\"metadata\":{},\
\"status\":\"Failure\",\"message\":\"too old resource version\",\"reason\":\"Expired\",\"code\":410}}\n";

/// Faults of a watch's events.
#[derive(Debug, Clone, Default)]
pub(super) struct Events {
    /// Delay after arrival.
    pub delay: Duration,
    /// One in this many events is lost and its watch ends; the next watch or list must recover the
    /// event. 0 cuts none. A seed chooses the events, because with a counter two alternating
    /// watches would lose the same event every time.
    pub cut_one_in: u64,
    /// One in this many cuts ends its watch with [`EXPIRED`] instead of silently. 0: none does.
    pub expire_one_in: u64,
    /// Events about other namespaces than this one are neither delayed nor cut, because a watch
    /// that is cut at every second event could not keep up with those of all lanes.
    pub only: Option<String>,
    /// Random sequence shared by all watches.
    pub random: Arc<Random>,
    /// Number of watches cut.
    pub cut: Arc<AtomicU64>,
    /// Events wait while this is true; `None` never waits.
    pub held: Option<watch::Receiver<bool>>,
}

impl Events {
    /// Returns whether an event is about another namespace.
    fn spares(&self, line: &[u8]) -> bool {
        let Some(only) = &self.only else { return false };
        let line = String::from_utf8_lossy(line);
        line.contains("\"namespace\":\"") && !line.contains(&format!("\"namespace\":\"{only}\""))
    }

    /// Returns whether events pass unchanged.
    pub fn is_noop(&self) -> bool {
        self.cut_one_in == 0 && self.delay.is_zero() && self.held.is_none()
    }
}

/// Applies faults to the lines of a watch.
pub(super) fn perturb<S, E>(source: S, events: Events) -> impl Stream<Item = Result<Bytes, E>> + Send
where
    S: Stream<Item = Result<Bytes, E>> + Send + Unpin + 'static,
    E: Send + 'static,
{
    let (lines, received) = mpsc::unbounded_channel();
    tokio::spawn(read(source, lines));
    futures::stream::unfold((Some(received), events), |(received, mut events)| async move {
        let mut received = received?;
        let (arrived, line): (Instant, Result<Bytes, E>) = received.recv().await?;
        if !line.as_ref().is_ok_and(|line| events.spares(line)) {
            if events.cut_one_in > 0 && events.random.next().is_multiple_of(events.cut_one_in) {
                events.cut.fetch_add(1, Ordering::Relaxed);
                let expired = events.expire_one_in > 0 && events.random.next().is_multiple_of(events.expire_one_in);
                return expired.then(|| (Ok(Bytes::from_static(EXPIRED)), (None, events)));
            }
            tokio::time::sleep_until((arrived + events.delay).into()).await;
        }
        if let Some(held) = &mut events.held {
            held.wait_for(|held| !held).await.ok()?;
        }
        Some((line, (Some(received), events)))
    })
}

/// Splits a watch into lines and stamps each with its arrival time.
async fn read<S, E>(mut source: S, lines: mpsc::UnboundedSender<(Instant, Result<Bytes, E>)>)
where
    S: Stream<Item = Result<Bytes, E>> + Send + Unpin,
{
    let mut rest = Vec::<u8>::new();
    while let Some(chunk) = source.next().await {
        let sent = match chunk {
            Ok(chunk) => {
                rest.extend_from_slice(&chunk);
                let mut sent = Ok(());
                while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                    sent = lines.send((Instant::now(), Ok(Bytes::from(rest.drain(..=end).collect::<Vec<u8>>()))));
                }
                sent
            }
            Err(error) => lines.send((Instant::now(), Err(error))),
        };
        if sent.is_err() {
            return;
        }
    }
}
