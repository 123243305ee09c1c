//! Saving, exporting, pruning and refusing checkpoints on a real disk.
#![allow(clippy::unwrap_used)]

mod support;

use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use support::disk::MemoryDisk;
use support::{JOB, assert_whole, id, info, latest, save, specs, tensors, write_shards};
use switchyard_checkpoint::disk::Disk;
use switchyard_checkpoint::export::{Exported, export};
use switchyard_checkpoint::format::CheckpointInfo;
use switchyard_checkpoint::{CheckpointError, CheckpointId, Manifest, Plan, Role, Store};

fn ids(store: &Store<'_>) -> Vec<CheckpointId> {
    store.list().unwrap().iter().map(|found| found.id).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

#[test]
fn state_saved_by_any_number_of_ranks_is_restored() {
    let directory = tempfile::tempdir().unwrap();
    // Creates the directory and its parents.
    let path = directory.path().join("a/b");
    let store = Store::new(&Disk, &path);
    assert!(store.list().unwrap().is_empty() && latest(&store, JOB).unwrap().checkpoint.is_none());
    let memory = MemoryDisk::new(None);
    let in_memory = Store::new(&memory, Path::new(support::DIRECTORY));
    // 200 ranks exceed the elements of some tensors, and 1000 exceed all elements, so that some
    // shards are empty.
    let real = [1, 2, 3, 8].map(|world| (store, world));
    for (step, (store, world)) in (1..).zip(real.into_iter().chain([(in_memory, 200), (in_memory, 1000)])) {
        let manifest = save(&store, id(1, step), world).unwrap();
        let checkpoint = latest(&store, JOB).unwrap().checkpoint.unwrap();
        assert_eq!(*checkpoint.manifest(), manifest);
        assert_whole(&store, &checkpoint);
        assert_eq!(manifest.check_tensors(&specs()), Ok(()));
    }
    assert_eq!(ids(&store).len(), 4);
}

#[test]
fn shards_are_valid_safetensors() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::new(&Disk, directory.path());
    save(&store, id(1, 7), 2).unwrap();
    let state = tensors(&specs(), 7);
    let mut numbers: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    for rank in 0..2 {
        let bytes =
            fs::read(directory.path().join(format!("step-000000007.attempt-1/rank-{rank}.safetensors"))).unwrap();
        let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
        let label = metadata.metadata().as_ref().unwrap();
        assert_eq!((label["job"].as_str(), label["rank"].as_str()), (JOB, rank.to_string().as_str()));
        let file = SafeTensors::deserialize(&bytes).unwrap();
        for name in state.keys() {
            let Ok(view) = file.tensor(name) else { continue };
            numbers.entry(name.clone()).or_default().extend(floats(view.data()));
        }
    }
    assert!(numbers == state);
}

#[test]
fn an_export_uses_the_names_parts_and_axes_of_other_programs() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::new(&Disk, directory.path());
    save(&store, id(3, 42), 4).unwrap();
    let to = directory.path().join("model.safetensors");
    let exported = export(&Disk, &store, &store.open(id(3, 42)).unwrap(), &to).unwrap();
    let bytes = fs::read(&to).unwrap();
    assert_eq!(exported, Exported { tensors: 7, bytes: bytes.len() as u64 });
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let expected = [("format", "pt"), ("step", "42")].map(|(key, value)| (key.to_string(), value.to_string()));
    assert_eq!(*metadata.metadata(), Some(expected.into()));
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut names = file.names();
    names.sort_unstable();
    assert_eq!(names, ["bn.running_mean", "conv.weight", "k", "q", "temperature", "v", "wte.weight"]);
    let state = tensors(&specs(), 42);
    let floats = |name: &str| floats(file.tensor(name).unwrap().data());
    for name in ["bn.running_mean", "temperature", "wte.weight"] {
        assert_eq!(floats(name), state[name]);
    }
    assert_eq!(file.tensor("temperature").unwrap().shape(), [0_usize; 0]);
    assert_eq!(file.tensor("conv.weight").unwrap().shape(), [4, 2, 3, 3]);
    let (ours, theirs) = (&state["conv.weight"], floats("conv.weight"));
    for (o, h, w, i) in (0..72).map(|n| (n / 18, n / 6 % 3, n / 2 % 3, n % 2)) {
        assert_eq!(theirs[((o * 2 + i) * 3 + h) * 3 + w], ours[((o * 3 + h) * 3 + w) * 2 + i]);
    }
    for (part, name) in ["q", "k", "v"].into_iter().enumerate() {
        assert_eq!(file.tensor(name).unwrap().shape(), [2, 5]);
        for (row, column) in (0..10).map(|n| (n / 5, n % 5)) {
            assert_eq!(floats(name)[row * 5 + column], state["attention.qkv"][column * 6 + 2 * part + row]);
        }
    }
    let error = export(&Disk, &store, &store.open(id(3, 42)).unwrap(), Path::new("/dev/null/x")).unwrap_err();
    assert!(error.to_string().starts_with("/dev/null/x: cannot create it: "), "{error}");
}

#[test]
fn an_old_attempt_neither_wins_nor_harms() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::new(&Disk, directory.path());
    save(&store, id(1, 500), 1).unwrap();
    // Attempt 1 is partitioned and still working when attempt 2 has resumed from step 500.
    let zombie = write_shards(&store, id(1, 1500), 1).unwrap();
    let attempt = store.next_attempt(2).unwrap();
    save(&store, id(attempt, 1000), 1).unwrap();
    let superseded = |error: CheckpointError| matches!(error, CheckpointError::Superseded { own: 1, newest: 2, .. });
    assert!(superseded(store.publish(&zombie).unwrap_err()));
    assert!(superseded(write_shards(&store, id(1, 2000), 1).unwrap_err()));
    assert!(superseded(store.prune(JOB, 1, 1).unwrap_err()));
    // If its check ran just before attempt 2 wrote, it publishes, but still loses.
    fs::write(directory.path().join("step-000001500.attempt-1/manifest.json"), zombie.encode().unwrap()).unwrap();
    assert_eq!(latest(&store, JOB).unwrap().checkpoint.unwrap().manifest().info().id, id(2, 1000));
    assert_eq!(ids(&store), [id(2, 1000), id(1, 1500), id(1, 500)]);
    // A job restarted in the old directory is newer than everything in it.
    assert_eq!((store.next_attempt(1).unwrap(), store.next_attempt(9).unwrap()), (3, 9));
}

#[test]
fn existing_checkpoints_are_never_overwritten() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::new(&Disk, directory.path());
    let manifest = save(&store, id(1, 500), 2).unwrap();
    for error in [
        write_shards(&store, id(1, 500), 2).unwrap_err(),
        store.publish(&manifest).unwrap_err(),
        store.discard(id(1, 500)).unwrap_err(),
    ] {
        assert!(matches!(error, CheckpointError::Exists { .. }), "{error}");
    }
    // An attempt may overwrite its own unfinished checkpoint.
    write_shards(&store, id(1, 1000), 4).unwrap();
    save(&store, id(1, 1000), 2).unwrap();
    assert_whole(&store, &latest(&store, JOB).unwrap().checkpoint.unwrap());
}

#[test]
fn pruning_removes_only_what_is_no_longer_needed() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::new(&Disk, directory.path());
    for step in [1, 2, 4, 5, 7, 8] {
        save(&store, id(1, step), 2).unwrap();
    }
    for unfinished in [3, 6, 9] {
        write_shards(&store, id(1, unfinished), 2).unwrap();
    }
    for damaged in [2, 7] {
        let shard = directory.path().join(id(1, damaged).directory()).join("rank-1.safetensors");
        fs::remove_file(shard).unwrap();
    }
    // Two checkpoints of another job: one complete, one still being written.
    let other = |step| CheckpointInfo { job: "other".into(), ..info(id(1, step)) };
    let plan = Plan::new(specs(), 1).unwrap();
    for (step, publish) in [(10, true), (11, false)] {
        let digest = store.write_shard("other", id(1, step), 0, &plan, &tensors(&specs(), step)).unwrap();
        let manifest = Manifest::new(other(step), plan.clone(), vec![digest]).unwrap();
        publish.then(|| store.publish(&manifest).unwrap());
    }
    fs::write(directory.path().join("step-000000001.attempt-1/notes.txt"), "mine").unwrap();
    symlink(directory.path().join("step-000000008.attempt-1"), directory.path().join("step-000000000.attempt-1"))
        .unwrap();

    // Pruning must not remove foreign files, so removing the oldest checkpoint's directory fails,
    // and the error is reported.
    let error = store.prune(JOB, 1, 2).unwrap_err().to_string();
    assert!(error.contains("step-000000001.attempt-1: cannot remove it: "), "{error}");
    fs::remove_dir_all(directory.path().join("step-000000001.attempt-1")).unwrap();
    fs::remove_file(directory.path().join("step-000000000.attempt-1")).unwrap();
    assert_eq!(ids(&store), [11, 10, 9, 8, 7, 5].map(|step| id(1, step)));
    assert!(store.prune(JOB, 1, 2).unwrap().is_empty());
    assert_eq!(store.prune(JOB, 1, 0).unwrap(), [7, 5].map(|step| id(1, step)), "at least one is kept");
    assert_eq!(ids(&store), [11, 10, 9, 8].map(|step| id(1, step)));
    assert_eq!(store.prune("other", 1, 1).unwrap(), []);
    store.discard(id(1, 9)).unwrap();
    assert_eq!(ids(&store), [11, 10, 8].map(|step| id(1, step)));
}

#[test]
fn links_and_directories_in_place_of_files_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::new(&Disk, directory.path());
    save(&store, id(1, 5), 1).unwrap();
    let own = directory.path().join("step-000000005.attempt-1");
    let error = |expected: &str| {
        let error = store.open(id(1, 5)).unwrap_err().to_string();
        assert!(error.ends_with(expected), "{error}");
    };
    for name in ["rank-0.safetensors", "manifest.json"] {
        fs::rename(own.join(name), own.join("aside")).unwrap();
        symlink(own.join("aside"), own.join(name)).unwrap();
        error(&format!("{name}: kind: got a symbolic link; expected a file"));
        fs::remove_file(own.join(name)).unwrap();
        fs::create_dir(own.join(name)).unwrap();
        error(&format!("{name}: kind: got a directory; expected a file"));
        fs::remove_dir(own.join(name)).unwrap();
        let status = std::process::Command::new("mkfifo").arg(own.join(name)).status().unwrap();
        assert!(status.success());
        error(&format!("{name}: kind: got a device, a socket or a pipe; expected a file"));
        fs::remove_file(own.join(name)).unwrap();
        fs::rename(own.join("aside"), own.join(name)).unwrap();
    }
    fs::rename(&own, directory.path().join("elsewhere")).unwrap();
    symlink(directory.path().join("elsewhere"), &own).unwrap();
    error("step-000000005.attempt-1: kind: got a symbolic link; expected a directory");
}

#[test]
fn errors_name_the_mistake_of_the_caller() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::new(&Disk, directory.path());
    let plan = Plan::new(specs(), 2).unwrap();
    let mut state = tensors(&specs(), 1);
    let mut error = |rank, change: fn(&mut support::Tensors)| {
        change(&mut state);
        store.write_shard(JOB, id(1, 1), rank, &plan, &state).unwrap_err().to_string()
    };
    assert!(error(2, |_| {}).ends_with("rank-2.safetensors: rank: got 2; expected less than 2"));
    let text = error(0, |state| state.get_mut("wte.weight").unwrap().truncate(3));
    assert!(text.ends_with("tensor `wte.weight`: got nothing; expected 350 numbers from index 0"), "{text}");
    let text = error(0, |state| drop(state.remove("wte.weight")));
    assert!(text.ends_with("tensor `wte.weight`: got nothing; expected 350 numbers from index 0"), "{text}");
    assert_eq!(specs().iter().filter(|spec| spec.role == Role::Statistic).count(), 1);
    assert!(fs::read_dir(directory.path()).unwrap().next().is_none(), "nothing was written");
}

#[test]
fn an_unwritable_directory_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, "").unwrap();
    let error = save(&Store::new(&Disk, &file), id(1, 1), 1).unwrap_err().to_string();
    assert!(error.contains("file: "), "{error}");
    let closed = directory.path().join("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o555)).unwrap();
    match save(&Store::new(&Disk, &closed), id(1, 1), 1) {
        Err(error) => assert!(error.to_string().contains("cannot create it: Permission denied"), "{error}"),
        // Root can write anywhere.
        Ok(_) => assert!(rustix::process::geteuid().is_root()),
    }
}
