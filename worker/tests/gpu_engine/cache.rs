//! Compiled kernels and algorithms are kept between runs.

use crate::pods::Job;
use crate::support::{Told, gpt, on, run};
use std::path::Path;
use switchyard_cuda_libraries::environment;
use switchyard_worker_contract::config::*;
use switchyard_worker_contract::env;

const STEPS: u64 = 2;

/// A run with this folder; its losses must be those of any other.
fn with(folder: &Path, ranks: u32) -> Told {
    let libraries = environment();
    let job = Job::new(1, ranks, STEPS).with(on(Device::Cuda, STEPS, gpt));
    let extra = [(env::GPU_CACHE, folder.to_str().unwrap()), ("CUDA_VISIBLE_DEVICES", "0")];
    let told = run(&job, &libraries, &extra);
    assert!(told.codes.iter().all(|code| *code == 0), "{}", told.log);
    told
}

/// Programs that were compiled, of how many, and kinds of products that were asked for, as the log says.
fn made(told: &Told) -> [usize; 3] {
    let line = told.log.lines().find(|line| line.contains("programs for the GPU"));
    let (_, line) = line.and_then(|line| line.split_once("note: ")).unwrap_or_else(|| panic!("{}", told.log));
    let numbers: Vec<usize> = line.split(|c: char| !c.is_ascii_digit()).filter_map(|word| word.parse().ok()).collect();
    [numbers[0], numbers[1], numbers[2]]
}

fn entries(folder: &Path) -> Vec<std::path::PathBuf> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn a_second_run_compiles_nothing_and_one_that_finds_damage_makes_it_again() {
    let folder = tempfile::tempdir().unwrap();
    let first = with(folder.path(), 1);
    let [compiled, programs, asked] = made(&first);
    assert!(compiled == programs && programs > 3 && asked > 3, "{}", first.log);
    let second = with(folder.path(), 1);
    assert_eq!(made(&second), [0, programs, 0]);
    assert_eq!((&first.digest, first.losses()), (&second.digest, second.losses()));
    let files = entries(folder.path());
    assert_eq!(files.len(), programs + 1);
    for (number, file) in files.iter().enumerate() {
        let mut bytes = std::fs::read(file).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0x10;
        // Also one that is cut, and one of another's contents.
        std::fs::write(file, if number % 2 == 0 { &bytes } else { &bytes[..middle] }).unwrap();
    }
    let third = with(folder.path(), 1);
    assert_eq!(made(&third), [programs, programs, asked]);
    assert_eq!(third.log.matches("is corrupt or misnamed").count(), files.len(), "{}", third.log);
    assert_eq!(third.digest, first.digest);
    let fourth = with(folder.path(), 1);
    assert_eq!(made(&fourth), [0, programs, 0], "what was damaged is written again");
    assert!(!fourth.log.contains("damaged"), "{}", fourth.log);
}

#[test]
fn a_folder_that_cannot_be_written_is_no_error() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let told = with(&file.join("below"), 1);
    let [compiled, programs, _] = made(&told);
    assert_eq!(compiled, programs);
}

#[test]
fn two_processes_at_once_keep_what_a_third_one_uses() {
    let folder = tempfile::tempdir().unwrap();
    with(folder.path(), 2);
    let after = with(folder.path(), 1);
    let [compiled, programs, _] = made(&after);
    assert_eq!(compiled, 0, "{}", after.log);
    assert!(!after.log.contains("damaged"), "{}", after.log);
    let names = entries(folder.path()).into_iter().filter(|file| file.extension().is_some()).count();
    assert_eq!((names, entries(folder.path()).len()), (0, programs + 1), "no file is left half written");
}
