//! The reader's output depends only on data, seed, step and rank.

use crate::memory::memory;
use crate::support::*;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use switchyard_worker::data::{Batch, Dataset, Order, Prefetcher, StepShape, Task, ValidationSet};
use switchyard_worker_contract::config::{ImageShape, Reader, SampleType};
use switchyard_worker_contract::process_stat::ProcessStat;

const SHAPE: ImageShape = ImageShape { height: 8, width: 6, channels: 3 };

/// Small synthetic data of each kind, 60 samples.
fn every_kind() -> Vec<Arc<Dataset>> {
    let bert = |next_sentence| {
        Task::Masked(switchyard_worker::data::Masking {
            context: 20,
            predictions: 3,
            vocabulary: 100,
            next_sentence,
            mask: 100,
            cls: 101,
            sep: 102,
        })
    };
    let tasks = [(next_token(16, 100), None), (bert(false), None), (bert(true), None)];
    let classify = [(Task::Classify, None), (Task::Classify, Some(SHAPE))];
    tasks.into_iter().chain(classify).map(|(task, image)| open(&synthetic(60, image), &task).unwrap()).collect()
}

/// An image folder with augmentation, which takes time and uses random numbers.
fn folder() -> (Dir, Arc<Dataset>) {
    let directory = Dir::new();
    for image in 0..24 {
        directory.write(&format!("{}/{image}.png", image % 3), png(12, 10, image));
    }
    let mut data = data(switchyard_worker_contract::config::Source::ImageFolder(directory.files()));
    (data.images.size, data.images.crop_padding, data.images.flip) = (8, 2, true);
    let dataset = open(&data, &Task::Classify).unwrap();
    (directory, dataset)
}

/// The first `count` batches with this reader configuration.
fn first(dataset: &Arc<Dataset>, order: Order, reader: Reader, count: usize) -> Vec<Batch> {
    take(&mut start(dataset, order, &reader), count)
}

#[test]
fn workers_and_modes_do_not_change_the_output() {
    let (_directory, images) = folder();
    for dataset in every_kind().into_iter().chain([images]) {
        let order = order(&dataset, 2, 2, 2);
        let expected = first(&dataset, order, READER, 100);
        assert!(order.steps_per_epoch() < 20, "batches cross epochs");
        for (number, batch) in expected.iter().enumerate() {
            assert_eq!((batch.step, batch.micro_batch), (number as u64 / 2, number as u32 % 2));
        }
        for workers in [1, 2, 4] {
            for (double_buffer, infinite) in [(true, true), (true, false), (false, true), (false, false)] {
                let reader = Reader { workers: Some(workers), double_buffer, infinite, ..READER };
                assert_eq!(first(&dataset, order, reader, 100), expected, "{reader:?}");
            }
        }
    }
}

#[test]
fn any_step_can_be_the_first() {
    let (_directory, images) = folder();
    for dataset in every_kind().into_iter().chain([images]) {
        let order = order(&dataset, 2, 2, 1);
        let all = first(&dataset, order, READER, 100);
        for step in [1_usize, 5, 14, 15, 31] {
            for workers in [1, 3] {
                let reader = Reader { workers: Some(workers), infinite: workers == 1, ..READER };
                let mut late = Prefetcher::start(Arc::clone(&dataset), order, 0, step as u64, &reader).unwrap();
                assert_eq!(take(&mut late, 20), all[2 * step..][..20], "from step {step}");
            }
        }
    }
}

#[test]
fn each_step_has_the_same_samples_for_any_world_size() {
    for dataset in every_kind() {
        let step = |shape: StepShape, step: u64| -> Vec<u32> {
            let order = Order::new(&dataset, shape, 7).unwrap();
            let batches = (0..shape.world).flat_map(|rank| {
                let mut prefetcher = Prefetcher::start(Arc::clone(&dataset), order, rank, step, &READER).unwrap();
                take(&mut prefetcher, shape.merge as usize)
            });
            // For every kind, all inputs in sequence, and the targets.
            let (mut inputs, mut targets) = (Vec::new(), Vec::new());
            for batch in batches {
                inputs.extend(batch.tokens);
                inputs.extend(batch.pixels.into_iter().map(u32::from));
                inputs.extend(batch.values.into_iter().map(f32::to_bits));
                targets.extend(batch.targets);
                targets.extend(batch.next_sentence);
            }
            targets.sort_unstable();
            inputs.extend(targets);
            inputs
        };
        for number in [0, 4, 9] {
            let whole = step(StepShape { batch_size: 12, merge: 1, world: 1 }, number);
            for (batch_size, merge, world) in [(6, 1, 2), (3, 2, 2), (1, 3, 4), (2, 6, 1)] {
                assert_eq!(step(StepShape { batch_size, merge, world }, number), whole, "{batch_size}x{merge}x{world}");
            }
        }
    }
}

#[test]
fn the_validation_set_does_not_depend_on_its_division() {
    let mut data = synthetic(60, None);
    data.validation_fraction = 0.5;
    for task in [next_token(16, 100), Task::Classify] {
        let dataset = open(&data, &task).unwrap();
        assert_eq!(dataset.facts().validation_samples, 30);
        let all = |batch_size, batches, world| {
            let mut set =
                ValidationSet::new(&dataset, batch_size, Some(batches), world, dataset.bad_samples()).unwrap();
            let mut targets: Vec<u32> = Vec::new();
            for index in 0..batches {
                for rank in 0..world {
                    targets.extend(&set.batch(rank, index).unwrap().0.targets);
                }
            }
            targets
        };
        let mut whole = all(24, 1, 1);
        whole.sort_unstable();
        for (batch_size, batches, world) in [(1, 24, 1), (2, 6, 2), (1, 1, 24)] {
            let mut divided = all(batch_size, batches, world);
            divided.sort_unstable();
            assert_eq!(divided, whole);
        }
    }
    assert!(ValidationSet::new(&every_kind()[0], 1, Some(1), 1, every_kind()[0].bad_samples()).is_none());
}

#[test]
fn synthetic_samples_are_learnable_and_cheap() {
    let mut data = synthetic(2000, Some(SHAPE));
    data.validation_fraction = 0.5;
    let dataset = open(&data, &Task::Classify).unwrap();
    // Nearest-mean classification: a validation sample belongs to the class with the closest
    // training mean.
    let mut means: BTreeMap<u32, (Vec<f64>, f64)> = BTreeMap::new();
    for (pixels, class) in training(&dataset) {
        let (sum, count) = means.entry(class).or_insert_with(|| (vec![0.0; pixels.len()], 0.0));
        sum.iter_mut().zip(pixels).for_each(|(sum, pixel)| *sum += f64::from(pixel));
        *count += 1.0;
    }
    assert_eq!(means.len(), 4);
    let held = rows(&dataset, &validation(&dataset));
    let right = held.iter().filter(|(pixels, class)| {
        let distance = |(sum, count): &(Vec<f64>, f64)| -> f64 {
            sum.iter().zip(pixels).map(|(sum, pixel)| (sum / count - f64::from(*pixel)).powi(2)).sum()
        };
        means.iter().min_by(|a, b| distance(a.1).total_cmp(&distance(b.1))).unwrap().0 == class
    });
    assert!(right.count() > 900, "of {}", held.len());
    // A window of synthetic text repeats its phrases.
    let text = open(&synthetic(100, None), &next_token(64, 5000)).unwrap();
    let batch = start(&text, order(&text, 50, 1, 1), &READER).next().unwrap().clone();
    let pairs: BTreeSet<(u32, u32)> = batch.tokens.iter().copied().zip(batch.targets.iter().copied()).collect();
    assert!(pairs.len() < 1600, "{} different pairs of 3200", pairs.len());
    assert_error(&synthetic(0, None), &next_token(8, 10), &["spec.engine.data.samples: got 0"]);
    assert_error(&synthetic(u64::MAX, None), &Task::Classify, &["spec.engine.data.samples"]);
}

#[test]
fn buffers_are_reused_and_counted() {
    for (workers, double_buffer, most) in [(1, true, 2), (3, true, 4), (2, false, 1)] {
        let dataset = open(&synthetic(60, Some(SHAPE)), &Task::Classify).unwrap();
        let reader = Reader { workers: Some(workers), double_buffer, ..READER };
        let mut prefetcher = start(&dataset, order(&dataset, 2, 1, 1), &reader);
        let places: BTreeSet<usize> = (0..200).map(|_| prefetcher.next().unwrap().pixels.as_ptr() as usize).collect();
        assert!(places.len() <= most, "{} buffers", places.len());
        let bytes = 2 * (8 * 6 * 3 + 4);
        assert_eq!(Prefetcher::memory_bytes(&dataset, 2, &reader), most as u64 * bytes);
    }
}

#[test]
fn the_training_thread_does_not_allocate() {
    let (_directory, images) = folder();
    for dataset in every_kind().into_iter().chain([images]) {
        for (workers, double_buffer) in [(1, true), (3, true), (2, false)] {
            let reader = Reader { workers: Some(workers), double_buffer, infinite: double_buffer, ..READER };
            let mut prefetcher = start(&dataset, order(&dataset, 2, 1, 1), &reader);
            take(&mut prefetcher, 5);
            let ((), bytes) = memory(|| {
                for _ in 0..60 {
                    prefetcher.next().unwrap();
                }
            });
            assert_eq!(bytes, 0, "{reader:?}");
        }
    }
}

#[test]
fn the_reader_reports_its_own_speed() {
    let (_directory, dataset) = folder();
    // Filled on demand, so that every batch filled is observed here.
    let reader = Reader { double_buffer: false, ..READER };
    let (mut samples, mut seconds) = (0.0, 0.0);
    // The first batch is filled at the start, each further one when the batch before is returned.
    let mut earliest = Instant::now();
    let mut prefetcher = start(&dataset, order(&dataset, 4, 1, 1), &reader);
    for _ in 0..30 {
        let making = prefetcher.next().unwrap().making.unwrap();
        assert!(earliest <= making.start && making.start < making.end, "waiting does not count as work");
        samples += 4.0;
        seconds += making.took().as_secs_f64();
        earliest = Instant::now();
    }
    let reported = prefetcher.capacity().unwrap();
    assert!(
        (0.99..1.01).contains(&(reported * seconds / samples)),
        "{reported} samples/s, by batch {}",
        samples / seconds
    );
}

#[test]
fn an_infinite_reader_starts_the_next_epoch_early() {
    let dataset = open(&synthetic(8, Some(SHAPE)), &Task::Classify).unwrap();
    let work_ahead = |infinite| {
        let reader = Reader { workers: Some(2), infinite, ..READER };
        let mut prefetcher = start(&dataset, order(&dataset, 4, 1, 1), &reader);
        prefetcher.next().unwrap();
        // The last batch of the first epoch is in use: is the next epoch being prepared?
        prefetcher.next().unwrap();
        if infinite {
            wait_until(|| prefetcher.samples_made() > 8);
        } else {
            std::thread::sleep(Duration::from_millis(200));
        }
        prefetcher.samples_made()
    };
    assert!(work_ahead(true) > 8, "the next epoch is under way");
    assert_eq!(work_ahead(false), 8, "the queue drains");
}

fn wait_until(ready: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(600);
    while !ready() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// CPU time of each of this process's threads named `reader`, in kernel ticks.
fn reader_ticks() -> BTreeMap<String, u64> {
    let mut ticks = BTreeMap::new();
    for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
        let Ok(stat) = std::fs::read_to_string(task.path().join("stat")) else { continue };
        let stat = ProcessStat::parse(&stat).unwrap();
        if stat.name == "reader" {
            ticks.insert(task.file_name().to_string_lossy().into_owned(), stat.cpu_ticks().unwrap());
        }
    }
    ticks
}

#[test]
fn an_idle_reader_uses_no_cpu_time() {
    let dataset = open(&synthetic(60, Some(SHAPE)), &Task::Classify).unwrap();
    let mut prefetcher = start(&dataset, order(&dataset, 2, 1, 1), &Reader { workers: Some(2), ..READER });
    prefetcher.next().unwrap();
    wait_until(|| reader_ticks().len() >= 2);
    let before = reader_ticks();
    std::thread::sleep(Duration::from_millis(300));
    let after = reader_ticks();
    // A spinning thread would have used 30 ticks of 10 ms. Threads of other tests are busy, so at
    // least two must rest.
    let resting = before.iter().filter(|(id, ticks)| after.get(*id).is_some_and(|now| now - *ticks < 8)).count();
    assert!(resting >= 2, "{before:?} {after:?}");
}

#[test]
fn drop_stops_the_threads_at_any_time() {
    let (_directory, dataset) = folder();
    for number in 0..100 {
        let reader = Reader { workers: Some(1 + number % 3), ..READER };
        let order = order(&dataset, 2, 1, 1);
        let mut prefetcher = Prefetcher::start(Arc::clone(&dataset), order, 0, number.into(), &reader).unwrap();
        take(&mut prefetcher, number as usize % 4);
    }
    assert_eq!(Arc::strong_count(&dataset), 1, "no thread keeps the data");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20))]

    #[test]
    fn floats_are_the_normalised_bytes(mean in 0.0f64..1.0, deviation in 0.1f64..2.0, padding in 0u32..4) {
        let directory = idx_directory();
        let mut data = data(switchyard_worker_contract::config::Source::Idx(directory.files()));
        (data.images.mean, data.images.deviation) = (vec![mean], vec![deviation]);
        (data.images.crop_padding, data.images.flip) = (padding, true);
        let batches = [SampleType::UInt8, SampleType::Float32].map(|sample_type| {
            let reader = Reader { sample_type, ..READER };
            let dataset = Arc::new(Dataset::open(&data, &reader, &Task::Classify, 3).unwrap());
            start(&dataset, order(&dataset, 3, 1, 1), &reader).next().unwrap().clone()
        });
        let expected: Vec<f32> =
            batches[0].pixels.iter().map(|byte| (f32::from(*byte) / 255.0 - mean as f32) / deviation as f32).collect();
        prop_assert_eq!(&batches[1].values, &expected);
        prop_assert_eq!(&batches[0].targets, &batches[1].targets);
    }
}
