//! The settings that are tuned, and the values worth a trial. None of them changes the loss.

use serde::Serialize;
use serde_json::{Value, json};
use switchyard_crds::TrainJob;
use switchyard_plan::local::LocalPlan;
use switchyard_worker_contract::CpuList;
use switchyard_worker_contract::config::{Device, SyncPolicy};

/// Communicators to try.
const COMMUNICATORS: [i32; 3] = [1, 2, 4];
/// Bucket limits to try, MiB; `None`: the worker chooses.
const BUCKETS: [Option<i32>; 3] = [None, Some(4), Some(25)];

/// A field of the manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Field {
    CpuThreads,
    Communicators,
    BucketSize,
}

impl Field {
    pub(super) const ALL: [Field; 3] = [Field::CpuThreads, Field::Communicators, Field::BucketSize];

    /// Names below `spec`.
    fn path(self) -> [&'static str; 3] {
        match self {
            Field::CpuThreads => ["", "trainer", "cpuThreads"],
            Field::Communicators => ["engine", "overlap", "communicators"],
            Field::BucketSize => ["engine", "overlap", "bucketSizeMiB"],
        }
    }

    pub(super) fn name(self) -> String {
        self.path().into_iter().filter(|name| !name.is_empty()).collect::<Vec<_>>().join(".")
    }

    /// Puts a value into a merge patch.
    pub(super) fn put(self, patch: &mut Value, value: Option<i32>) {
        let names = self.path().into_iter().filter(|name| !name.is_empty());
        *names.fold(&mut patch["spec"], |place, name| &mut place[name]) = json!(value);
    }
}

/// Values of the fields, as in a manifest: `None` is the default.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Settings {
    cpu_threads: Option<i32>,
    communicators: Option<i32>,
    #[serde(rename = "bucketSizeMiB")]
    bucket_size_mib: Option<i32>,
}

impl Settings {
    pub(super) fn of(job: &TrainJob) -> Settings {
        let overlap = job.spec.engine.as_ref().map(|engine| &engine.overlap);
        Settings {
            cpu_threads: job.spec.trainer.cpu_threads,
            communicators: overlap.and_then(|overlap| overlap.communicators),
            bucket_size_mib: overlap.and_then(|overlap| overlap.bucket_size_mib),
        }
    }

    pub(super) fn get(&self, field: Field) -> Option<i32> {
        match field {
            Field::CpuThreads => self.cpu_threads,
            Field::Communicators => self.communicators,
            Field::BucketSize => self.bucket_size_mib,
        }
    }

    pub(super) fn with(mut self, field: Field, value: Option<i32>) -> Settings {
        match field {
            Field::CpuThreads => self.cpu_threads = value,
            Field::Communicators => self.communicators = value,
            Field::BucketSize => self.bucket_size_mib = value,
        }
        self
    }

    pub(super) fn apply(&self, job: &mut TrainJob) {
        job.spec.trainer.cpu_threads = self.cpu_threads;
        if let Some(engine) = &mut job.spec.engine {
            engine.overlap.communicators = self.communicators;
            engine.overlap.bucket_size_mib = self.bucket_size_mib;
        }
    }

    /// For display, in the order of [`Field::ALL`].
    pub(super) fn words(&self) -> [String; 3] {
        Field::ALL.map(|field| self.get(field).map_or_else(|| "default".to_owned(), |value| value.to_string()))
    }
}

/// What limits the values of a job on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Scope {
    /// Compute threads of a rank as planned.
    threads: i32,
    /// CPUs of a rank; 0 if it computes on a GPU.
    most_threads: i32,
    /// All-reduces in flight as planned; `None` if ranks reduce nothing during the backward pass.
    communicators: Option<i32>,
}

impl Scope {
    pub(super) fn of(plan: &LocalPlan) -> Scope {
        let engine = &plan.engine;
        let per_process = engine.devices_per_process.max(1);
        let cpus = |list: &String| list.parse().map_or(0, |cpus: CpuList| cpus.len());
        let pinned = plan.processes().filter_map(|process| process.cpus.as_ref().map(cpus)).min();
        let cpus = pinned.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
        // Servers have buckets and connections of their own; local steps and top-k start after the
        // backward pass.
        let is_overlapped = plan.world() > 1
            && engine.overlap.enabled
            && engine.sync == SyncPolicy::EveryStep
            && engine.parameter_server.is_none()
            && engine.compression.is_none();
        Scope {
            threads: (engine.cpu_threads / per_process) as i32,
            most_threads: if engine.device == Device::Cpu { (cpus as u32 / per_process) as i32 } else { 0 },
            communicators: is_overlapped.then_some(engine.overlap.communicators as i32),
        }
    }

    #[cfg(test)]
    pub(super) fn new(threads: i32, most_threads: i32, communicators: Option<i32>) -> Scope {
        Scope { threads, most_threads, communicators }
    }

    /// The values to try of each field, without the manifest's own.
    pub(super) fn fields(&self, own: &Settings) -> Vec<(Field, Vec<Option<i32>>)> {
        let doubled = std::iter::successors(Some(1), |threads| Some(threads * 2));
        let mut threads: Vec<i32> = doubled.take_while(|threads| *threads < self.most_threads).collect();
        threads.extend((self.most_threads > 0).then_some(self.most_threads));
        threads.retain(|threads| *threads != self.threads);
        let (mut communicators, mut buckets) = (Vec::new(), Vec::new());
        if let Some(planned) = self.communicators {
            communicators = COMMUNICATORS.into_iter().filter(|count| *count != planned).collect();
            buckets = BUCKETS.into_iter().filter(|size| *size != own.bucket_size_mib).collect();
        }
        let some = |values: Vec<i32>| values.into_iter().map(Some).collect();
        let values = [some(threads), some(communicators), buckets];
        Field::ALL.into_iter().zip(values).filter(|(_, values)| !values.is_empty()).collect()
    }

    /// The planned value of a field that has none in the manifest.
    pub(super) fn planned(&self, field: Field) -> Option<i32> {
        match field {
            Field::CpuThreads => Some(self.threads),
            Field::Communicators => self.communicators,
            Field::BucketSize => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Settings = Settings { cpu_threads: None, communicators: None, bucket_size_mib: None };

    #[test]
    fn every_value_is_tried_but_the_own() {
        let scope = Scope::new(2, 6, Some(1));
        let expected = [
            (Field::CpuThreads, vec![Some(1), Some(4), Some(6)]),
            (Field::Communicators, vec![Some(2), Some(4)]),
            (Field::BucketSize, vec![Some(4), Some(25)]),
        ];
        assert_eq!(scope.fields(&NONE), expected);
        let own = Settings { bucket_size_mib: Some(4), ..NONE };
        assert_eq!(scope.fields(&own)[2].1, [None, Some(25)]);
    }

    #[test]
    fn a_rank_alone_has_only_threads_and_a_gpu_only_reductions() {
        let alone = Scope::new(1, 2, None);
        assert_eq!(alone.fields(&NONE), [(Field::CpuThreads, vec![Some(2)])]);
        let gpu = Scope::new(1, 0, Some(2));
        assert_eq!(
            gpu.fields(&NONE).iter().map(|(field, _)| *field).collect::<Vec<_>>(),
            [Field::Communicators, Field::BucketSize]
        );
        assert_eq!(Scope::new(1, 1, None).fields(&NONE), []);
    }
}
