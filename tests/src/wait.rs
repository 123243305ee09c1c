//! Waiting for events: watches objects, or polls until a condition holds; with an error at the
//! deadline.

use anyhow::{Context, Result, ensure};
use futures::{Stream, StreamExt};
use kube::runtime::reflector::{self, reflector};
use kube::runtime::watcher::{self, watch_object, watcher};
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use std::fmt::Debug;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest wait for any one event or program. Only a hang reaches it, even at a load of 60 on two
/// cores.
pub const TIMEOUT: Duration = Duration::from_secs(600);

/// Shortest and longest time between two polls.
const POLL: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(250));
/// Longest time between two polls that are themselves slow, such as kubectl.
const SLOW_POLL: Duration = Duration::from_secs(1);

/// Time until the next poll, because polls slow the event down: short against the time that the
/// event has taken so far, and long against the time that the last poll took.
fn pause(begin: Instant, poll: Instant) -> Duration {
    (begin.elapsed() / 20).clamp(POLL.0, POLL.1).max((4 * poll.elapsed()).min(SLOW_POLL))
}

/// Waits until `condition` holds. Returns the elapsed time.
///
/// # Errors
/// `condition` failed, or did not hold within `timeout`.
pub fn until(what: &str, timeout: Duration, mut condition: impl FnMut() -> Result<bool>) -> Result<Duration> {
    let begin = Instant::now();
    loop {
        let poll = Instant::now();
        if condition()? {
            return Ok(begin.elapsed());
        }
        ensure!(begin.elapsed() < timeout, "not {what} after {} s", timeout.as_secs());
        std::thread::sleep(pause(begin, poll));
    }
}

/// Waits until `look` finds something, and returns it.
///
/// # Errors
/// `look` failed, or found nothing within `timeout`.
pub fn found<T>(what: &str, timeout: Duration, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let mut found = None;
    until(what, timeout, || {
        found = look()?;
        Ok(found.is_some())
    })?;
    found.with_context(|| format!("not {what}"))
}

/// [`until`] for asynchronous conditions.
///
/// # Errors
/// Those of [`until`].
pub async fn until_async(
    what: &str,
    timeout: Duration,
    mut condition: impl AsyncFnMut() -> Result<bool>,
) -> Result<Duration> {
    let begin = Instant::now();
    loop {
        let poll = Instant::now();
        if condition().await? {
            return Ok(begin.elapsed());
        }
        ensure!(begin.elapsed() < timeout, "not {what} after {} s", timeout.as_secs());
        tokio::time::sleep(pause(begin, poll)).await;
    }
}

/// [`found`] for asynchronous looks.
///
/// # Errors
/// Those of [`found`].
pub async fn found_async<T>(
    what: &str,
    timeout: Duration,
    mut look: impl AsyncFnMut() -> Result<Option<T>>,
) -> Result<T> {
    let mut found = None;
    let is_found = async || {
        found = look().await?;
        Ok(found.is_some())
    };
    until_async(what, timeout, is_found).await?;
    found.with_context(|| format!("not {what}"))
}

/// Waits until an object, `None` while it does not exist, satisfies a condition. On failure returns
/// what was seen last.
pub(crate) async fn until_object<K>(
    api: Api<K>,
    name: &str,
    timeout: Duration,
    condition: impl Fn(Option<&K>) -> bool,
) -> Result<Option<K>, Seen<Option<K>>>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    // On the heap, because a test waits many times and its stack is small.
    Box::pin(until_event(watch_object(api, name).boxed(), timeout, |object| condition(object.as_ref()))).await
}

/// [`until_object`] for all objects of an API, sorted by name.
pub(crate) async fn until_objects<K>(
    api: Api<K>,
    timeout: Duration,
    condition: impl Fn(&[K]) -> bool,
) -> Result<Vec<K>, Seen<Vec<K>>>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    let (objects, writer) = reflector::store();
    let mut is_listed = false;
    let events = reflector(writer, watcher(api, watcher::Config::default())).filter_map(|event| {
        is_listed |= matches!(event, Ok(watcher::Event::InitDone));
        let now = event.map(|_| {
            let mut now: Vec<K> = objects.state().into_iter().map(Arc::unwrap_or_clone).collect();
            now.sort_by_key(ResourceExt::name_any);
            now
        });
        std::future::ready(Some(now).filter(|now| is_listed || now.is_err()))
    });
    Box::pin(until_event(events.boxed(), timeout, |objects| condition(objects))).await
}

/// What a wait has seen last: a value, and the error of the watch.
#[derive(Debug)]
pub(crate) struct Seen<T> {
    pub value: Option<T>,
    pub error: Option<watcher::Error>,
}

async fn until_event<T>(
    events: impl Stream<Item = watcher::Result<T>>,
    timeout: Duration,
    condition: impl Fn(&T) -> bool,
) -> Result<T, Seen<T>> {
    let deadline = tokio::time::Instant::now() + timeout;
    let (mut events, mut seen) = (pin!(events), Seen { value: None, error: None });
    while let Ok(Some(event)) = tokio::time::timeout_at(deadline, events.next()).await {
        match event {
            Ok(value) if condition(&value) => return Ok(value),
            Ok(value) => seen.value = Some(value),
            Err(error) => {
                // The watch resumes: an API server may be restarting.
                seen.error = Some(error);
                tokio::time::sleep(POLL.1).await;
            }
        }
    }
    Err(seen)
}
