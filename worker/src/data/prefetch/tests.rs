use super::*;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use switchyard_worker_contract::config::TextData;

fn corpus(bytes: usize) -> Arc<Corpus> {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let text: Vec<u8> = (0..bytes).map(|index| (index * 31 % 251) as u8).collect();
    std::fs::write(file.path(), text).expect("written");
    let data = TextData {
        path: file.path().to_str().expect("a path").to_owned(),
        include: vec![],
        exclude: vec![],
        validation_fraction: 0.0,
    };
    Arc::new(Corpus::load(&data, 16).expect("a corpus"))
}

fn sampler(corpus: &Corpus, merge: u32, world: u32) -> Sampler {
    let shape = Shape { context_length: 16, batch_size: 3, merge, world };
    Sampler::new(corpus.train().len() as u64, shape, 7).expect("enough text")
}

/// (step, micro-batch, inputs, targets) of the next `count` micro-batches.
fn take(prefetcher: &mut Prefetcher, count: usize) -> Vec<(u64, u32, Vec<u16>, Vec<u16>)> {
    (0..count)
        .map(|_| {
            let batch = prefetcher.next().expect("a batch");
            (batch.step, batch.micro_batch, batch.inputs.to_vec(), batch.targets.to_vec())
        })
        .collect()
}

#[test]
fn gives_what_the_sampler_says() {
    let corpus = corpus(5_000);
    let sampler = sampler(&corpus, 2, 2);
    let mut prefetcher = Prefetcher::start(Arc::clone(&corpus), sampler, 1, 0).expect("started");
    for (number, (step, micro_batch, inputs, targets)) in take(&mut prefetcher, 200).into_iter().enumerate() {
        assert_eq!((step, micro_batch), (number as u64 / 2, number as u32 % 2));
        for (row, start) in sampler.micro_batch(step, 1, micro_batch).enumerate() {
            for token in 0..16 {
                assert_eq!(inputs[row * 16 + token], u16::from(corpus.train()[start + token]));
                assert_eq!(targets[row * 16 + token], u16::from(corpus.train()[start + token + 1]));
            }
        }
    }
}

#[test]
fn continues_at_any_step() {
    let corpus = corpus(5_000);
    let sampler = sampler(&corpus, 2, 1);
    assert!(sampler.steps_per_epoch() < 60, "the steps below cross an epoch");
    let mut whole = Prefetcher::start(Arc::clone(&corpus), sampler, 0, 0).expect("started");
    let all = take(&mut whole, 2 * 80);
    for first in [1, 13, 59, 60] {
        let mut late = Prefetcher::start(Arc::clone(&corpus), sampler, 0, first).expect("started");
        assert_eq!(take(&mut late, 20), all[2 * first as usize..][..20]);
    }
}

#[test]
fn buffers_are_used_again() {
    let corpus = corpus(5_000);
    let sampler = sampler(&corpus, 1, 1);
    let mut prefetcher = Prefetcher::start(corpus, sampler, 0, 0).expect("started");
    let mut places = std::collections::BTreeSet::new();
    for _ in 0..100 {
        places.insert(prefetcher.next().expect("a batch").inputs.as_ptr() as usize);
    }
    assert!(places.len() <= BUFFERS, "{} buffers", places.len());
}

/// CPU time of each of this process's threads named `reader`, in ticks of the kernel.
fn reader_ticks() -> BTreeMap<String, u64> {
    let mut ticks = BTreeMap::new();
    for task in std::fs::read_dir("/proc/self/task").expect("procfs").flatten() {
        let Ok(stat) = std::fs::read_to_string(task.path().join("stat")) else { continue };
        if let Some((id, rest)) = stat.split_once(" (reader) ") {
            let field = |index: usize| rest.split_whitespace().nth(index).and_then(|field| field.parse::<u64>().ok());
            ticks.insert(id.to_owned(), field(11).expect("utime") + field(12).expect("stime"));
        }
    }
    ticks
}

#[test]
fn an_idle_reader_waits_without_work() {
    let corpus = corpus(5_000);
    let sampler = sampler(&corpus, 1, 1);
    let mut prefetcher = Prefetcher::start(corpus, sampler, 0, 0).expect("started");
    prefetcher.next().expect("a batch");
    std::thread::sleep(Duration::from_millis(20));
    let before = reader_ticks();
    std::thread::sleep(Duration::from_millis(300));
    let after = reader_ticks();
    assert!(!before.is_empty());
    // A thread that spins would have used 30 ticks of 10 ms, or half of them beside another busy thread. Readers of
    // other tests do not live that long, or wait too.
    for (id, ticks) in before {
        let used = after.get(&id).map_or(0, |now| now - ticks);
        assert!(used < 8, "thread {id} used {used} ticks");
    }
    drop(prefetcher);
}

#[test]
fn drop_ends_the_thread_at_any_moment() {
    let corpus = corpus(5_000);
    let sampler = sampler(&corpus, 1, 1);
    let start = Instant::now();
    for number in 0..200 {
        let mut prefetcher = Prefetcher::start(Arc::clone(&corpus), sampler, 0, number).expect("started");
        take(&mut prefetcher, number as usize % 4);
    }
    assert_eq!(Arc::strong_count(&corpus), 1, "no thread keeps the text");
    assert!(start.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_dead_reader_is_an_error_and_not_a_wait() {
    let corpus = corpus(5_000);
    // A sampler of a longer text than the corpus: the reader runs out of it and panics.
    let shape = Shape { context_length: 16, batch_size: 3, merge: 1, world: 1 };
    let sampler = Sampler::new(1 << 40, shape, 7).expect("enough text");
    let mut prefetcher = Prefetcher::start(corpus, sampler, 0, 0).expect("started");
    let error = (0..3).find_map(|_| prefetcher.next().err()).expect("an error");
    assert!(matches!(error, DataError::ReaderEnded));
}
