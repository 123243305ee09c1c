use super::*;
use crate::data::batch::Row;
use crate::data::part::{Draw, EpochSize, Part, SampleError};

const READER: Reader = Reader {
    workers: 1,
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
    Prefetcher::start(dataset, order, 0, 0, &Reader { workers, ..READER }).expect("started")
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
