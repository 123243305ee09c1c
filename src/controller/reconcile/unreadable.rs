//! Invalid TrainJobs: validation was switched off, or another version of this program wrote them.

use super::{Context, Outcome};
use switchyard_ledger::index::Unreadable;
use switchyard_ledger::job::Key;
use switchyard_plan::cluster::events::{self, EventDraft};
use tracing::warn;

impl Context {
    /// Reports an invalid job in the log and, unless the server refuses that write, in its status.
    pub(super) async fn report_unreadable(&self, key: &Key, job: Unreadable) -> Outcome {
        if job.reported {
            return Outcome::Quiet;
        }
        warn!(job = %key, error = job.why, "the job is invalid");
        let why = format!("invalid TrainJob: {}", job.why);
        let written = self.executor.report_unreadable(&key.namespace, &key.name, &job.version, &why).await;
        if let Ok(Some(reference)) = &written {
            let note = format!(
                "{why}; another version of Switchyard started it: its pods keep running, but this version does not manage them"
            );
            self.publish_events(reference, vec![EventDraft::warning(events::UNREADABLE, note)]).await;
        }
        if written.is_ok()
            && let Some(now) = self.index().unreadable.get_mut(key).filter(|now| now.why == job.why)
        {
            now.reported = true;
        }
        self.finish(key, None, written.err())
    }
}
