use super::*;
use crate::data::batch::Row;
use crate::data::part::{Draw, EpochSize, Part, SampleError};

const READER: Reader = Reader {
    workers: Some(1),
    double_buffer: true,
    infinite: true,
    sample_type: switchyard_worker_contract::config::SampleType::UInt8,
    max_bad_samples: 0,
};

/// 100 samples, one of which triggers an action.
#[derive(Debug)]
struct Trap {
    at: u64,
    what: fn() -> SampleError,
}

impl Part for Trap {
    fn epoch_size(&self) -> EpochSize {
        EpochSize { samples: 100, slack: 0 }
    }

    fn write(&self, draw: &Draw, _: &mut Row<'_>, _: &mut Scratch) -> Result<(), SampleError> {
        if draw.sample == self.at { Err((self.what)()) } else { Ok(()) }
    }

    fn memory_bytes(&self) -> u64 {
        0
    }
}

/// Starts a reader with a batch size of 5.
fn start(part: Trap, workers: u32) -> Prefetcher {
    let dataset = Arc::new(Dataset::of_part(Box::new(part)));
    let order = Order::new(&dataset, StepShape { batch_size: 5, merge: 1, world: 1 }, 7).expect("100 samples");
    Prefetcher::start(dataset, order, 0, 0, &Reader { workers: Some(workers), ..READER }).expect("started")
}

#[test]
fn a_panicking_thread_is_an_error_not_a_hang() {
    for workers in [1, 4] {
        let mut prefetcher = start(Trap { at: 50, what: || panic!("a bug for a test") }, workers);
        let error = (0..20).find_map(|_| prefetcher.next().err()).expect("an error");
        assert!(matches!(&error, DataError::ReaderEnded(text) if text == "a bug for a test"), "{error}");
        assert!(prefetcher.next().is_err(), "also when asked again");
    }
}

#[test]
fn threads_follow_the_measured_times_within_the_cpus() {
    let ms = Duration::from_millis;
    for (read, train, most, expected) in
        [(8, 10, 8, 1), (9, 10, 8, 2), (40, 10, 8, 5), (40, 10, 3, 3), (40, 0, 8, 8), (0, 0, 8, 1), (400, 1, 1, 1)]
    {
        assert_eq!(enough_threads(ms(read), ms(train), most), expected, "{read} ms, {train} ms, {most}");
    }
    let on_gpu = [1, 2, 8, 64].map(|cpus| most_threads(cpus, true));
    let on_cpus = [1, 2, 8, 64].map(|cpus| most_threads(cpus, false));
    assert_eq!((on_gpu, on_cpus), ([1, 1, 7, 16], [1, 1, 4, 16]));
}

#[test]
fn an_adapting_reader_measures_once_and_gives_the_same_samples() {
    let good = || Trap { at: u64::MAX, what: || unreachable!() };
    let batches = |mut prefetcher: Prefetcher| -> Vec<Batch> {
        let take = |_| {
            let mut batch = prefetcher.next().expect("a batch").clone();
            batch.making = None;
            batch
        };
        (0..60).map(take).collect()
    };
    let expected = batches(start(good(), 1));
    let mut adapting = start(good(), 1);
    adapting.adapt(4, false);
    for _ in 0..=WARM + MEASURED {
        assert!(adapting.measurement.is_some());
        adapting.next().expect("a batch");
    }
    assert!(adapting.measurement.is_none());
    assert!((1..=4).contains(&adapting.thread_count()));
    let mut adapting = start(good(), 1);
    adapting.adapt(4, false);
    assert_eq!(batches(adapting), expected);
}

#[test]
fn errors_arrive_in_order() {
    let fault = || SampleError::Data(DataError::Zero { field: "a field" });
    let failed: Vec<usize> = [1, 2, 4]
        .into_iter()
        .map(|workers| {
            let mut prefetcher = start(Trap { at: 50, what: fault }, workers);
            let first = (0..20).find(|_| prefetcher.next().is_err()).expect("an error");
            assert!(matches!(prefetcher.next(), Err(DataError::ReaderEnded(_))), "and then none is made");
            first
        })
        .collect();
    assert!(failed[0] > 0 && failed.iter().all(|batch| *batch == failed[0]), "{failed:?}");
}
