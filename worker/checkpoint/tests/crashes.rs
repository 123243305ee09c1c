//! Injects power loss at every mutating call, a full disk at every write, and a transient error at
//! every call.
#![allow(clippy::unwrap_used)]

mod support;

use std::io::ErrorKind;
use std::path::Path;
use support::disk::{Fault, MemoryDisk};
use support::{DIRECTORY, JOB, assert_whole, id, latest, save};
use switchyard_checkpoint::disk::Vfs;
use switchyard_checkpoint::{CheckpointError, State, Store};

const STEPS: [u64; 4] = [500, 1000, 1500, 2000];
const KEEP: usize = 2;
/// Possible outcomes tried for each crash.
const OUTCOMES: u64 = 12;

fn store(disk: &MemoryDisk) -> Store<'_> {
    Store::new(disk, Path::new(DIRECTORY))
}

/// Writes four checkpoints and keeps two. Returns the last published step and the first error.
fn run(disk: &MemoryDisk, world: usize) -> (Option<u64>, Option<CheckpointError>) {
    let mut published = None;
    let mut first_error = None;
    for step in STEPS {
        // As in training: report a failure and continue.
        match save(&store(disk), id(1, step), world) {
            Ok(_) => published = Some(step),
            Err(error) => {
                assert_no_temporary_files(disk, step);
                let _ = store(disk).discard(id(1, step));
                first_error.get_or_insert(error);
            }
        }
        if let Err(error) = store(disk).prune(JOB, 1, KEEP) {
            first_error.get_or_insert(error);
        }
    }
    (published, first_error)
}

/// A failed write leaves no file behind, unless the machine is off.
fn assert_no_temporary_files(disk: &MemoryDisk, step: u64) {
    let names = disk.list(&Path::new(DIRECTORY).join(id(1, step).directory())).unwrap_or_default();
    assert!(names.iter().all(|name| !name.ends_with(".tmp")), "{names:?}");
}

/// The newest published checkpoint, or a newer one, is complete, and the next attempt can save
/// another one.
fn check(disk: &MemoryDisk, published: Option<u64>, world: usize, what: &str) {
    let store = store(disk);
    // A crash leaves only complete or unfinished checkpoints.
    for found in store.list().unwrap() {
        match found.state {
            State::Complete(checkpoint) => assert_whole(&store, &checkpoint),
            State::Incomplete => {}
            State::Damaged(error) => panic!("{what}: {error}"),
        }
    }
    let latest = latest(&store, JOB).unwrap_or_else(|error| panic!("{what}: {error}"));
    let step = latest.checkpoint.as_ref().map(|checkpoint| checkpoint.manifest().info().id.step);
    assert!(step >= published, "{what}: step {published:?} was published, {step:?} is found; {:?}", latest.skipped);
    let next = id(store.next_attempt(2).unwrap(), 9000);
    save(&store, next, world).unwrap_or_else(|error| panic!("{what}: the next attempt: {error}"));
    store.prune(JOB, next.attempt, 1).unwrap_or_else(|error| panic!("{what}: the next attempt: {error}"));
    let found = store.list().unwrap();
    assert!(
        matches!(&found[..], [one] if one.id == next && matches!(one.state, State::Complete(_))),
        "{what}: {found:?}"
    );
}

#[test]
fn the_newest_checkpoint_survives_power_off_at_every_call() {
    let mut points = 0;
    let mut outcomes = 0;
    for world in [1, 2, 4] {
        for at in 1.. {
            let disk = MemoryDisk::new(Some(Fault::PowerOff(at)));
            let (published, _) = run(&disk, world);
            if !disk.is_off() {
                assert_eq!(published, Some(2000));
                disk.repair();
                check(&disk, published, world, "no crash");
                break;
            }
            points += 1;
            for seed in 0..OUTCOMES {
                outcomes += 1;
                let what = format!("world {world}, power off at call {at}, outcome {seed}");
                check(&disk.after_power_off(seed), published, world, &what);
            }
        }
    }
    println!("{points} crash points, {outcomes} outcomes");
    assert!(points >= 300, "{points}");
}

#[test]
fn a_full_disk_costs_one_checkpoint_and_leaves_nothing_behind() {
    let mut points = 0;
    for (world, kind) in [1, 2, 4]
        .into_iter()
        .flat_map(|world| [ErrorKind::StorageFull, ErrorKind::QuotaExceeded].map(|kind| (world, kind)))
    {
        for at in 1.. {
            let disk = MemoryDisk::new(Some(Fault::Writes(at, kind)));
            let (published, error) = run(&disk, world);
            let Some(error) = error else { break };
            points += 1;
            let text = error.to_string();
            let CheckpointError::Io { needed: Some(needed), .. } = error else { panic!("{text}") };
            assert!(text.contains(&format!("cannot write it: {kind}; the file needs {needed} bytes")), "{text}");
            let names =
                |found: &[switchyard_checkpoint::StoreEntry]| found.iter().map(|it| it.id.step).collect::<Vec<_>>();
            let found = store(&disk).list().unwrap();
            assert!(found.iter().all(|it| matches!(it.state, State::Complete(_))), "{found:?}");
            assert_eq!(names(&found).first().copied(), published);
            disk.repair();
            check(&disk, published, world, &format!("world {world}, {kind} from write {at}"));
        }
    }
    println!("{points} writes");
    assert!(points >= 100, "{points}");
}

#[test]
fn a_transient_error_is_reported_and_the_next_checkpoint_succeeds() {
    let kinds = [ErrorKind::PermissionDenied, ErrorKind::ReadOnlyFilesystem, ErrorKind::Other];
    let mut points = 0;
    for kind in kinds {
        for at in 1.. {
            let disk = MemoryDisk::new(Some(Fault::Call(at, kind)));
            let (published, error) = run(&disk, 2);
            if disk.counts().0 < at {
                break;
            }
            points += 1;
            assert!(error.is_some(), "{kind} at call {at} was not reported");
            check(&disk, published, 2, &format!("{kind} at call {at}"));
        }
    }
    println!("{points} calls");
}
