//! Image directories.

use crate::support::*;
use std::sync::Arc;
use switchyard_worker::data::{DataError, Dataset, Kind, Order, Prefetcher, StepShape, Task, ValidationSet};
use switchyard_worker_contract::config::{Data, Files, Reader, Source};

pub(crate) fn folder(files: &Files) -> Data {
    let mut data = data(Source::ImageFolder(files.clone()));
    data.images.size = 8;
    data
}

/// Two classes with `each` images of different sizes.
fn classes(each: u32) -> Dir {
    let directory = Dir::new();
    for image in 0..each {
        directory.write(&format!("cat/{image}.JPG"), jpeg(20 + image, 16, image));
        directory.write(&format!("ant/{image}.png"), png(9, 12 + image, 100 + image));
    }
    directory
}

fn with_bad(directory: &Dir, max_bad_samples: u64) -> Arc<Dataset> {
    let reader = Reader { max_bad_samples, ..READER };
    Arc::new(Dataset::open(&folder(&directory.files()), &reader, &Task::Classify, 7).unwrap())
}

#[test]
fn classes_are_directories() {
    let directory = classes(3);
    directory.write("cat/notes.txt", "not an image");
    directory.write("cat/.hidden.png", "ignored");
    directory.write("cat/empty.png", "");
    let dataset = open(&folder(&directory.files()), &Task::Classify).unwrap();
    assert_eq!(dataset.kind(), Kind::Images { height: 8, width: 8, channels: 3, classes: 2 });
    let facts = dataset.facts();
    assert_eq!((facts.train_samples, facts.files), (6, 6));
    let skipped: Vec<String> = facts.skipped.iter().map(ToString::to_string).collect();
    assert_eq!(
        skipped,
        [
            "1 file was skipped: hidden: cat/.hidden.png",
            "1 file was skipped: empty: cat/empty.png",
            "1 file was skipped: `.txt` is not a format that is read: cat/notes.txt",
        ]
    );
    let samples = training(&dataset);
    assert_eq!(samples.iter().filter(|(_, class)| *class == 0).count(), 3, "ant comes before cat");
    assert_eq!(samples.iter().map(|(pixels, _)| pixels).collect::<std::collections::BTreeSet<_>>().len(), 6);
}

#[test]
fn explicit_train_and_validation_directories() {
    let directory = Dir::new();
    for (name, seed) in [("train/a/1.png", 1), ("train/b/1.png", 2), ("val/b/2.png", 3), ("test/c/1.png", 4)] {
        directory.write(name, png(8, 8, seed));
    }
    let dataset = open(&folder(&directory.files()), &Task::Classify).unwrap();
    assert_eq!((dataset.facts().train_samples, dataset.facts().validation_samples), (2, 1));
    assert_eq!(validation(&dataset).targets, [1]);
    assert_eq!(dataset.facts().skipped[0].reason, "`test` is neither `train` nor `val`");
    directory.write("val/z/1.png", png(8, 8, 5));
    assert_error(&folder(&directory.files()), &Task::Classify, &["val/z/1.png", "class `z`", "images in `train`"]);
    directory.write("train/1.png", png(8, 8, 5));
    assert_error(&folder(&directory.files()), &Task::Classify, &["train/1.png", "outside of a class"]);
}

#[test]
fn the_split_depends_on_content() {
    let directory = classes(40);
    // A copy of an image under another name is on the same side as the original.
    for image in 0..40 {
        directory.write(&format!("cat/copy-{image}.jpg"), jpeg(20 + image, 16, image));
    }
    let mut data = folder(&directory.files());
    data.validation_fraction = 0.25;
    let dataset = open(&data, &Task::Classify).unwrap();
    let held = dataset.facts().validation_samples;
    assert!((12..50).contains(&held), "{held} of 120");
    let held = rows(&dataset, &validation(&dataset));
    assert!(training(&dataset).iter().all(|(pixels, _)| held.iter().all(|(other, _)| other != pixels)));
}

#[test]
fn invalid_image_folders() {
    let directory = Dir::new();
    assert_error(&folder(&directory.files()), &Task::Classify, &["none of the 0 files"]);
    directory.write("a/notes.txt", "x");
    assert_error(&folder(&directory.files()), &Task::Classify, &["class `a` has no image", "`.txt` is not a format"]);
    directory.write("1.png", png(8, 8, 1));
    assert_error(&folder(&directory.files()), &Task::Classify, &["1.png", "in a directory for its class"]);
    let mut unsized_images = folder(&directory.files());
    unsized_images.images.size = 0;
    assert_error(&unsized_images, &Task::Classify, &["spec.engine.data.images.size: got 0"]);
    let file = data(Source::ImageFolder(files(&directory.path("1.png"))));
    assert_error(&file, &Task::Classify, &["1.png: a file", "a directory with a directory for each class"]);
}

#[test]
fn bad_images_are_replaced_counted_and_limited() {
    let directory = classes(6);
    directory.write("cat/2.JPG", "not an image");
    let cut = jpeg(40, 16, 3);
    directory.write("cat/3.JPG", &cut[..cut.len() / 2]);
    let dataset = with_bad(&directory, 2);
    let mut prefetcher = start(&dataset, order(&dataset, 3, 1, 1), &READER);
    // Three epochs read every sample three times, but count each bad one once.
    let batches = take(&mut prefetcher, 12);
    assert_eq!(prefetcher.bad_samples().count(), 2);
    let good: Vec<Vec<u32>> = {
        let clean = classes(6);
        training(&open(&folder(&clean.files()), &Task::Classify).unwrap())
            .into_iter()
            .map(|(pixels, _)| pixels)
            .collect()
    };
    for batch in &batches {
        assert!(rows(&dataset, batch).iter().all(|(pixels, _)| good.contains(pixels)), "only whole images");
    }
    for workers in [2, 4] {
        let mut prefetcher = start(&dataset, order(&dataset, 3, 1, 1), &Reader { workers: Some(workers), ..READER });
        assert_eq!(take(&mut prefetcher, 12), batches, "{workers} workers replace them in the same way");
    }
    let mut failed = Vec::new();
    for workers in [1, 3] {
        let dataset = with_bad(&directory, 1);
        let mut prefetcher = start(&dataset, order(&dataset, 3, 1, 1), &Reader { workers: Some(workers), ..READER });
        let (batch, error) = (0..12).find_map(|batch| prefetcher.next().err().map(|error| (batch, error))).unwrap();
        let text = error.to_string();
        assert!(
            text.starts_with("spec.engine.reader.maxBadSamples: 2 samples cannot be read, the last of them /"),
            "{text}"
        );
        assert!(text.contains("cat/") && text.ends_with("expected at most 1"), "{text}");
        failed.push((batch, text));
        assert!(matches!(prefetcher.next(), Err(DataError::ReaderEnded(_))), "the error does not depend on waiting");
    }
    assert_eq!(failed[0], failed[1], "always in the same batch");
}

#[test]
fn only_bad_images_are_an_error() {
    let directory = Dir::new();
    for image in 0..5 {
        directory.write(&format!("a/{image}.png"), format!("not an image {image}"));
    }
    let dataset = with_bad(&directory, 100);
    let mut prefetcher = start(&dataset, order(&dataset, 2, 1, 1), &READER);
    let text = prefetcher.next().unwrap_err().to_string();
    assert!(text.contains("5 samples cannot be read") && text.contains("unknown first bytes"), "{text}");
}

#[test]
fn bad_validation_images_count_too() {
    let directory = Dir::new();
    for (name, seed) in [("train/a/1.png", 1), ("train/b/1.png", 2), ("val/b/2.png", 3)] {
        directory.write(name, png(8, 8, seed));
    }
    directory.write("val/a/bad.png", "x");
    for limit in [0, 1] {
        let dataset = with_bad(&directory, limit);
        let prefetcher = start(&dataset, order(&dataset, 1, 1, 1), &READER);
        let mut set = ValidationSet::new(&dataset, 2, Some(1), 1, prefetcher.bad_samples().clone()).unwrap();
        match set.batch(0, 0) {
            Ok((batch, _)) => {
                assert_eq!((limit, batch.targets.as_slice()), (1, [1, 1].as_slice()), "the good one twice")
            }
            Err(error) => assert!(limit == 0 && error.to_string().contains("val/a/bad.png"), "{error}"),
        }
        assert_eq!(prefetcher.bad_samples().count(), 1);
    }
}

#[test]
fn changed_or_deleted_files_are_an_error() {
    for change in [
        |path: &std::path::Path| std::fs::write(path, png(8, 8, 9)).unwrap(),
        |path: &std::path::Path| {
            std::fs::remove_file(path).unwrap();
        },
    ] {
        let directory = Dir::new();
        for image in 0..4 {
            directory.write(&format!("a/{image}.png"), png(10, 10, image));
        }
        let dataset = with_bad(&directory, 100);
        change(&directory.path("a/2.png"));
        let mut prefetcher = start(&dataset, order(&dataset, 1, 1, 1), &READER);
        let error = (0..4).find_map(|_| prefetcher.next().err()).unwrap();
        let text = error.to_string();
        assert!(
            matches!(error, DataError::Changed { .. }) && text.contains("a/2.png has changed since the start"),
            "{text}"
        );
    }
}

#[test]
fn augmentation_is_for_training_only_and_independent_of_the_batch_division() {
    let directory = classes(6);
    let mut data = folder(&directory.files());
    (data.images.crop_padding, data.images.flip) = (2, true);
    data.validation_fraction = 0.3;
    let dataset = open(&data, &Task::Classify).unwrap();
    let plain = open(&Data { images: folder(&directory.files()).images, ..data.clone() }, &Task::Classify).unwrap();
    assert_eq!(validation(&dataset), validation(&plain), "not augmented");
    assert_ne!(training(&dataset), training(&plain));
    let epoch_of = |dataset: &Arc<Dataset>, shape: StepShape, step: u64| -> Vec<(Vec<u32>, u32)> {
        let order = Order::new(dataset, shape, 7).unwrap();
        (0..shape.world)
            .flat_map(|rank| {
                let mut prefetcher = Prefetcher::start(Arc::clone(dataset), order, rank, step, &READER).unwrap();
                let batches: Vec<_> = take(&mut prefetcher, shape.merge as usize);
                batches.iter().flat_map(|batch| rows(dataset, batch)).collect::<Vec<_>>()
            })
            .collect()
    };
    let whole = StepShape { batch_size: 4, merge: 1, world: 1 };
    for (batch_size, merge, world) in [(1, 1, 4), (2, 2, 1), (1, 2, 2)] {
        for step in [0, 3, 11] {
            let divided = epoch_of(&dataset, StepShape { batch_size, merge, world }, step);
            assert_eq!(divided, epoch_of(&dataset, whole, step), "{batch_size} x {merge} x {world}, step {step}");
        }
    }
}
