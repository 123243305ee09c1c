//! Image directories made of links, and classes without an image.

use crate::folder::folder;
use crate::support::*;
use std::os::unix::fs::symlink;
use switchyard_worker::data::Task;
use switchyard_worker_contract::config::Source;

/// A store with three classes, and a data set that links to two of them.
fn linked() -> Dir {
    let directory = Dir::new();
    for (class, seed) in [("a", 1), ("b", 2), ("c", 3)] {
        directory.write(&format!("store/{class}/1.png"), png(8, 8, seed));
    }
    directory.write("data/c/1.png", png(8, 8, 4));
    for class in ["a", "b"] {
        symlink(directory.path(&format!("store/{class}")), directory.path(&format!("data/{class}"))).unwrap();
    }
    directory
}

fn classes(directory: &Dir) -> Vec<u32> {
    let dataset = open(&folder(&directory.below("data")), &Task::Classify).unwrap();
    training(&dataset).into_iter().map(|(_, class)| class).collect()
}

#[test]
fn links_to_classes_are_followed() {
    let directory = linked();
    let mut classes = classes(&directory);
    classes.sort_unstable();
    assert_eq!(classes, [0, 1, 2]);
}

#[test]
fn a_link_to_the_training_split_is_followed() {
    let directory = linked();
    std::fs::create_dir(directory.path("parted")).unwrap();
    symlink("../data", directory.path("parted/train")).unwrap();
    let dataset = open(&folder(&directory.below("parted")), &Task::Classify).unwrap();
    assert_eq!(dataset.facts().train_samples, 3);
}

#[test]
fn links_in_a_circle_end() {
    let directory = linked();
    symlink("..", directory.path("data/c/up")).unwrap();
    symlink(directory.path("store"), directory.path("store/a/store")).unwrap();
    let dataset = open(&folder(&directory.below("data")), &Task::Classify).unwrap();
    // `store/a/store` leads to the other classes once more, until it reaches `a` itself.
    let skipped = &dataset.facts().skipped;
    assert_eq!(skipped.len(), 1, "{skipped:?}");
    assert_eq!(skipped[0].reason, "a link to a directory above it");
}

#[test]
fn a_class_without_an_image_is_an_error() {
    let directory = linked();
    directory.write("data/d/1.heic", "x");
    directory.write("data/d/2.HEIC", "x");
    let data = folder(&directory.below("data"));
    let words = ["data/d: class `d` has no image (2 files were skipped: `.heic` is not a format", "exclude"];
    assert_error(&data, &Task::Classify, &words);
    // Without these files, the class is not part of the data.
    let mut excluding = data.clone();
    let Source::ImageFolder(files) = &mut excluding.source else { unreachable!() };
    files.exclude = vec!["d/*".to_owned()];
    assert_eq!(training(&open(&excluding, &Task::Classify).unwrap()).len(), 3);
    std::fs::remove_dir_all(directory.path("data/d")).unwrap();
    std::fs::create_dir(directory.path("data/d")).unwrap();
    assert_error(&data, &Task::Classify, &["class `d` has no image (it has no files)"]);
    directory.write("data/d/1.png", "");
    assert_error(&data, &Task::Classify, &["class `d` has no image (1 file was skipped: empty: d/1.png)"]);
}

/// Regression test: the folder was taken for one with a `train` split.
#[test]
fn a_class_can_have_the_name_train() {
    let directory = Dir::new();
    for class in ["car", "train"] {
        directory.write(&format!("{class}/1.png"), png(8, 8, 1));
    }
    let dataset = open(&folder(&directory.files()), &Task::Classify).unwrap();
    assert_eq!(dataset.facts().sample, "8x8x3 pixels in 2 classes");
}
