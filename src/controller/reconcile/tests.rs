//! Reconciles of a controller without an API server.
#![allow(clippy::unwrap_used)]

mod outages;
mod simulation;
mod waiting;

use super::*;
use crate::election::{self, boot_time};
use crate::endpoints::Health;
use crate::metrics::Metrics;
use crate::queue::Queue;
use crate::{Executor, QueueSettings, Settings, watch};
use http::{Request, Response};
use jiff::SignedDuration;
use kube::Client;
use kube::client::Body;
use kube::runtime::events::{Recorder, Reporter};
use serde_json::json;
use switchyard_plan::cluster::levels::Levels;
use switchyard_plan::objects::Defaults;

/// A controller whose API server refuses all requests.
fn context(leadership: election::Leadership) -> Context {
    let service = tower::service_fn(|_: Request<Body>| async {
        Ok::<_, std::io::Error>(Response::builder().status(500).body(Body::empty()).unwrap())
    });
    let client = Client::new(service, "default");
    let settings = Settings {
        namespace: "s".into(),
        identity: "me".into(),
        listen: ([127, 0, 0, 1], 0).into(),
        secure_metrics: None,
        election: None,
        watch_namespaces: Vec::new(),
        concurrent_reconciles: 1,
        defaults: Defaults::default(),
        levels: Levels::default(),
        node_grace: SignedDuration::from_secs(60),
        queue: QueueSettings { longest_reservation: Some(SignedDuration::from_hours(24)), ..QueueSettings::default() },
        longest_schedule_timeout: SignedDuration::from_secs(600),
        mass_outage_percent: 20,
        provisioning_class: None,
        admission_policies: Vec::new(),
    };
    let reporter = Reporter { controller: "c".into(), instance: None };
    Context {
        executor: Executor::new(client.clone()),
        recorder: Recorder::new(client.clone(), reporter),
        client,
        index: Arc::default(),
        queue: Queue::default(),
        metrics: Arc::new(Metrics::new()),
        health: Arc::new(Health::new(watch::KINDS.map(String::from))),
        leadership,
        clock: Arc::default(),
        events_failing: Arc::default(),
        settings: Arc::new(settings),
    }
}

/// Regression test: a leader lost the Lease for 0.9 s and dropped the jobs that were due at that
/// moment. They waited for the next resync, ten minutes later.
#[tokio::test]
async fn jobs_due_while_the_lease_is_lost_stay_queued() {
    let (leader, leadership) = election::channel(boot_time);
    let context = context(leadership);
    let job = json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob",
        "metadata": {"name": "a", "namespace": "t", "uid": "u", "resourceVersion": "1"},
        "spec": {"trainer": {"framework": "Plain", "image": "i"}},
    });
    context.index().apply_job(serde_json::from_value(job).unwrap());
    let key = Key { namespace: "t".into(), name: "a".into() };
    assert_eq!(context.reconcile(&key, Pass::Required).await, Outcome::Behind);
    assert_eq!(context.queue.depth().0, 1, "it is due again");
    leader.lead_forever();
    let guard = context.queue.next().await;
    assert_eq!(*guard, key);
    assert_eq!(
        context.reconcile(&key, Pass::Required).await,
        Outcome::Refused,
        "retried as soon as this process leads"
    );
}
