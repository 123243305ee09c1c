//! Compiled kernels and algorithm choices are cached between runs.

use crate::pods::Job;
use crate::support::{RunOutput, gpt, on, run};
use std::path::Path;
use switchyard_cuda_libraries::environment;
use switchyard_worker_contract::config::*;
use switchyard_worker_contract::env;

const STEPS: u64 = 2;

/// A run with this cache folder; its losses must be the same as with any other.
fn with(folder: &Path, ranks: u32) -> RunOutput {
    let libraries = environment();
    let job = Job::new(1, ranks, STEPS).with(on(Device::Cuda, STEPS, gpt));
    let extra = [(env::GPU_CACHE, folder.to_str().unwrap()), ("CUDA_VISIBLE_DEVICES", "0")];
    let output = run(&job, &libraries, &extra);
    assert!(output.codes.iter().all(|code| *code == 0), "{}", output.log);
    output
}

/// From the log: compiled programs, all programs, and product kinds that were queried.
fn work_counts(output: &RunOutput) -> [usize; 3] {
    let line = output.log.lines().find(|line| line.contains("programs for the GPU"));
    let (_, line) = line.and_then(|line| line.split_once("note: ")).unwrap_or_else(|| panic!("{}", output.log));
    let numbers: Vec<usize> = line.split(|c: char| !c.is_ascii_digit()).filter_map(|word| word.parse().ok()).collect();
    [numbers[0], numbers[1], numbers[2]]
}

fn entries(folder: &Path) -> Vec<std::path::PathBuf> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn a_second_run_compiles_nothing_and_damaged_entries_are_rebuilt() {
    let folder = tempfile::tempdir().unwrap();
    let first = with(folder.path(), 1);
    let [compiled, programs, queried] = work_counts(&first);
    assert!(compiled == programs && programs > 3 && queried > 3, "{}", first.log);
    let second = with(folder.path(), 1);
    assert_eq!(work_counts(&second), [0, programs, 0]);
    assert_eq!((&first.digest, first.losses()), (&second.digest, second.losses()));
    let files = entries(folder.path());
    assert_eq!(files.len(), programs + 1);
    for (number, file) in files.iter().enumerate() {
        let mut bytes = std::fs::read(file).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0x10;
        // Also truncated files, and one with another entry's content.
        std::fs::write(file, if number % 2 == 0 { &bytes } else { &bytes[..middle] }).unwrap();
    }
    let third = with(folder.path(), 1);
    assert_eq!(work_counts(&third), [programs, programs, queried]);
    assert_eq!(third.log.matches("is corrupt or misnamed").count(), files.len(), "{}", third.log);
    assert_eq!(third.digest, first.digest);
    let fourth = with(folder.path(), 1);
    assert_eq!(work_counts(&fourth), [0, programs, 0], "damaged entries are rewritten");
    assert!(!fourth.log.contains("damaged"), "{}", fourth.log);
}

#[test]
fn an_unwritable_cache_is_not_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let output = with(&file.join("below"), 1);
    let [compiled, programs, _] = work_counts(&output);
    assert_eq!(compiled, programs);
}

#[test]
fn two_concurrent_processes_fill_the_cache_for_a_third() {
    let folder = tempfile::tempdir().unwrap();
    with(folder.path(), 2);
    let after = with(folder.path(), 1);
    let [compiled, programs, _] = work_counts(&after);
    assert_eq!(compiled, 0, "{}", after.log);
    assert!(!after.log.contains("damaged"), "{}", after.log);
    let names = entries(folder.path()).into_iter().filter(|file| file.extension().is_some()).count();
    assert_eq!((names, entries(folder.path()).len()), (0, programs + 1), "no partial file remains");
}
