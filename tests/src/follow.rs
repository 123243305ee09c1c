//! Follows the objects of an API through errors of the watch.

use futures::StreamExt;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::fmt::Debug;
use std::pin::pin;

/// A change of a followed object.
pub enum Update<'a, K> {
    /// It appeared, changed, or is in a new list.
    Applied(&'a K),
    /// It was deleted.
    Deleted(&'a K),
}

/// Reports every change of an API's objects until the runtime ends. After an error the watch
/// continues, and reports what was deleted meanwhile.
pub fn follow<K>(api: Api<K>, mut report: impl FnMut(Update<'_, K>) + Send + 'static)
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    tokio::spawn(async move {
        let mut events = pin!(watcher(api, watcher::Config::default()).default_backoff());
        let (mut known, mut listed) = (HashMap::<String, K>::new(), HashMap::<String, K>::new());
        while let Some(event) = events.next().await {
            match event {
                Ok(watcher::Event::Init) => listed.clear(),
                Ok(watcher::Event::InitApply(object)) => {
                    report(Update::Applied(&object));
                    listed.insert(object.name_any(), object);
                }
                Ok(watcher::Event::InitDone) => {
                    let before = std::mem::replace(&mut known, std::mem::take(&mut listed));
                    let gone = before.iter().filter(|(name, _)| !known.contains_key(*name));
                    gone.for_each(|(_, object)| report(Update::Deleted(object)));
                }
                Ok(watcher::Event::Apply(object)) => {
                    report(Update::Applied(&object));
                    known.insert(object.name_any(), object);
                }
                Ok(watcher::Event::Delete(object)) => {
                    known.remove(&object.name_any());
                    report(Update::Deleted(&object));
                }
                Err(_) => {}
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TIMEOUT;
    use http::{Request, Response};
    use k8s_openapi::api::core::v1::Pod;
    use kube::Client;
    use kube::client::Body;
    use serde_json::json;

    /// A server that lists pods a and b, fails the watch, and then lists only b.
    fn client() -> Client {
        let mut lists = 0;
        let service = tower::service_fn(move |request: Request<Body>| {
            let is_watch = request.uri().query().is_some_and(|query| query.contains("watch"));
            let pods = if lists == 0 { &["a", "b"][..] } else { &["b"] };
            lists += usize::from(!is_watch);
            let items: Vec<_> = pods.iter().map(|name| json!({"metadata": {"name": name}})).collect();
            let list = json!({"kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": items});
            let gone = json!({"kind": "Status", "status": "Failure", "reason": "Expired", "code": 410, "message": ""});
            let error = json!({"type": "ERROR", "object": gone});
            let body = format!("{}\n", if is_watch { error } else { list });
            std::future::ready(Response::builder().body(Body::from(body.into_bytes())))
        });
        Client::new(service, "default")
    }

    #[tokio::test]
    async fn a_failed_watch_continues_and_reports_deletions() {
        let (report, mut reports) = tokio::sync::mpsc::unbounded_channel();
        follow(Api::<Pod>::all(client()), move |change| {
            let line = match change {
                Update::Applied(pod) => format!("+{}", pod.name_any()),
                Update::Deleted(pod) => format!("-{}", pod.name_any()),
            };
            let _ = report.send(line);
        });
        for expected in ["+a", "+b", "+b", "-a"] {
            let report = tokio::time::timeout(TIMEOUT, reports.recv()).await;
            assert_eq!(report.unwrap().as_deref(), Some(expected));
        }
    }
}
