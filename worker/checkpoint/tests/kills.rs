//! Kills a process at random moments while it writes to a real disk.
#![allow(clippy::unwrap_used)]

mod support;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use support::disk::Random;
use support::{JOB, assert_whole, id, latest, save};
use switchyard_checkpoint::Store;
use switchyard_checkpoint::disk::Disk;

/// Environment of the child: where to write, and which attempt it is.
const DIRECTORY: &str = "SWITCHYARD_TEST_CHECKPOINTS";
const ATTEMPT: &str = "SWITCHYARD_TEST_ATTEMPT";
const KILLS: u32 = 50;

/// Child process of the test below: saves until it is killed, and prints each durable step. Does
/// nothing if run on its own. Not ignored, because a skipped test fails `cargo xtask test`.
#[test]
fn child() {
    let Ok(directory) = std::env::var(DIRECTORY) else { return };
    let launched = std::env::var(ATTEMPT).unwrap().parse().unwrap();
    let store = Store::new(&Disk, Path::new(&directory));
    let attempt = store.next_attempt(launched).unwrap();
    let latest = latest(&store, JOB).unwrap().checkpoint;
    let first = latest.map_or(1, |checkpoint| checkpoint.manifest().info().id.step + 1);
    store.prune(JOB, attempt, 2).unwrap();
    let mut out = std::io::stdout();
    for step in first.. {
        save(&store, id(attempt, step), 2).unwrap();
        // A single write, so that a line is complete or absent.
        out.write_all(format!("\npublished {step}\n").as_bytes()).unwrap();
        out.flush().unwrap();
        store.prune(JOB, attempt, 2).unwrap();
    }
}

#[test]
fn the_newest_checkpoint_survives_kills() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::new(&Disk, directory.path());
    let mut random = Random(9);
    let mut newest = 0;
    for attempt in 1..=KILLS {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture"])
            .env(DIRECTORY, directory.path())
            .env(ATTEMPT, attempt.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        // Startup is over once the first checkpoint is published.
        let started = out.by_ref().find(|line| line.starts_with("published "));
        std::thread::sleep(Duration::from_micros(random.next() % 200_000));
        child.kill().unwrap();
        let last = out.filter(|line| line.starts_with("published ")).last().or(started);
        let last: u64 = last.expect("a checkpoint").strip_prefix("published ").unwrap().parse().unwrap();
        assert!(child.wait().unwrap().code().is_none(), "attempt {attempt} ended by itself");

        let latest = latest(&store, JOB).unwrap();
        let checkpoint = latest.checkpoint.unwrap_or_else(|| panic!("attempt {attempt}: {:?}", latest.skipped));
        assert_whole(&store, &checkpoint);
        let step = checkpoint.manifest().info().id.step;
        assert!(step == last || step == last + 1, "attempt {attempt}: {last} was published, {step} was found");
        assert!(last > newest, "attempt {attempt} resumed from step {newest}, and published {last}");
        newest = step;
        // Later attempts remove the remains of killed processes.
        let ids: Vec<_> = store.list().unwrap().iter().map(|found| found.id).collect();
        assert!(ids.len() <= 5, "{ids:?}");
    }
    println!("{newest} checkpoints, {KILLS} kills");
}
